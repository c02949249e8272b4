"""What CONTRIBUTING.md, tests/README.md and docstrings say is so: numbers, files, drawings.

Covers `ports.py`.
"""

import ast
import re
import tomllib
from pathlib import Path

from tailrace import errors
from tests.conftest import LONG_TIMEOUT_S
from tests.tidy import test_ratchets, test_sizes

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
BRANCH = re.compile("[├└]──")


def budgets() -> dict[str, str]:
    """The budget of each target, as the Makefile has it."""
    seconds = dict(re.findall(r"^(\w+_BUDGET_S) \?= (\d+)$", MAKEFILE, re.M))
    used = re.findall(r"^([a-z-]+):.*\n.*within\.sh \$\((\w+)\)", MAKEFILE, re.M)
    return {target: seconds[name] for target, name in used}


def test_budgets_are_those_of_the_makefile() -> None:
    rows = re.findall(r"^\| `make ([a-z-]+)[^`]*` \|.*\| ?(?:(\d+) s)? ?\|$", CONTRIBUTING, re.M)
    told = {target: seconds for target, seconds in rows if seconds}
    assert told == budgets()
    assert len(told) == 3


def test_other_numbers_are_those_of_the_code() -> None:
    prose = re.sub(r"\s+", " ", CONTRIBUTING)
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    defaults = dict(re.findall(r"^([A-Z_]+) \?= (\w+)$", MAKEFILE, re.M))
    assert f"make sim SEEDS={defaults['SEEDS']}`" in prose
    assert f"make bench SUITE={defaults['SUITE']}`" in prose
    assert f"make soak MINUTES={defaults['MINUTES']}`" in prose
    assert defaults["TEST_PROCESSES"] == "2"
    assert "run the tests in two processes" in prose
    limit = tools["pytest"]["ini_options"]["timeout"]
    assert f"a time limit ({limit} s unless it says more, {LONG_TIMEOUT_S} s with `--long`)" in prose
    assert f"up to {tools['ruff']['line-length']} characters" in prose
    assert f"A file has at most {test_sizes.FILE_LINES_MAX} lines" in prose
    assert f"a function {test_sizes.FUNCTION_LINES_MAX} without its docstring" in prose
    assert f"and {test_sizes.POSITIONAL_PARAMETERS_MAX} positional parameters" in prose
    assert f"A folder has at most {test_ratchets.MODULES_MAX} modules" in prose


def test_every_helper_of_tests_is_in_the_table() -> None:
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    folder = ROOT / "tests"
    helpers = {
        str(path.relative_to(folder)) for path in folder.rglob("*.py") if not path.name.startswith("test_")
    }
    assert helpers - named == {"conftest.py"}
    assert [name for name in named if not any((base / name).exists() for base in (folder, ROOT))] == []


def test_targets_and_files_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
    assert set(re.findall(r"`make ([a-z-]+)", CONTRIBUTING)) <= targets
    named = re.findall(r"`([\w.-]+/[\w./-]*)`", CONTRIBUTING)
    assert len(named) > 10
    bases = (ROOT, ROOT / "src" / "tailrace")
    missing = [name for name in named if not any((base / name).exists() for base in bases)]
    made = {"bench/results/", "/usr/bin/python3"}
    assert set(missing) <= made


def test_every_port_has_a_conformance_suite() -> None:
    """A suite names the ports that it is for in the first line of its docstring."""
    tree = ast.parse((ROOT / "src" / "tailrace" / "ports.py").read_text(encoding="utf-8"))
    ports = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(parent, ast.Name) and parent.id == "Protocol" for parent in node.bases)
    }
    named: list[str] = []
    for path in sorted((ROOT / "tests" / "conformance").glob("test_*_conformance.py")):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        named += [name for name in re.findall(r"`(\w+)`", text.splitlines()[0]) if name in ports]
    assert len(ports) >= 8
    assert sorted(set(named)) == sorted(ports)


def docstrings() -> list[tuple[str, str]]:
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((str(path.relative_to(ROOT)), ast.get_docstring(node) or ""))
    return found


def test_a_drawing_in_a_docstring_keeps_its_lines() -> None:
    """Drawings are indented blocks: whoever reflows prose leaves those alone."""
    bad = [
        f"{name}: {line}"
        for name, text in docstrings()
        for line in text.splitlines()
        if re.search("[─-▟]", line) and not line.startswith("  ")
    ]
    assert not bad, "\n".join(bad)


def test_the_tree_of_errors_is_that_of_the_classes() -> None:
    text = errors.__doc__ or ""
    drawn = [
        (line.index("── ") // 4, re.split(r"[├└]── ", line)[1].split()[0])
        for line in text.splitlines()
        if BRANCH.search(line)
    ]

    def below(root: type[errors.TailraceError], depth: int = 1) -> list[tuple[int, str]]:
        return [
            found
            for child in root.__subclasses__()
            if child.__module__ == errors.__name__
            for found in ((depth, child.__name__), *below(child, depth + 1))
        ]

    assert drawn == below(errors.TailraceError)
