"""The table of docs/modules.md, made from the first line of every module's docstring.

`python scripts/modules_table.py` prints it, `--write` puts it between the two markers of the page.
tests/tidy/test_architecture.py compares the page with it.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "modules.md"
BEGIN = "<!-- modules: begin (written by scripts/modules_table.py) -->"
END = "<!-- modules: end -->"
HEAD = ["| module | what it is |", "|---|---|"]


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT / "src").with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def first_line(path: Path) -> str:
    """The first line of the module's docstring, "" when it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.strip().partition("\n")[0].strip()


def modules() -> list[Path]:
    return sorted((ROOT / "src").rglob("*.py"), key=module_name)


def row(path: Path) -> str:
    return f"| `{module_name(path)}` | {first_line(path).replace('|', chr(92) + '|')} |"


def rows() -> list[str]:
    return [row(path) for path in modules()]


def rows_on_page() -> list[str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    between = lines[lines.index(BEGIN) + 1 : lines.index(END)]
    return [line for line in between if line.strip() and line not in HEAD]


def write() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    lines[lines.index(BEGIN) + 1 : lines.index(END)] = [*HEAD, *rows()]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        write()
    else:
        print("\n".join([*HEAD, *rows()]))
