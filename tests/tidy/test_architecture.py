"""ARCHITECTURE.md says where everything is, and docs/modules.md lists every module with its first line."""

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "modules_table.py"
PACKAGE = ROOT / "src" / "tailrace"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
GUIDE = PAGE.partition("## Where is what\n")[2].partition("\n## ")[0]
GLOSSARY = PAGE.partition("## Glossary\n")[2]
NAMED_WHOLE = ("core", "broker", "client", "storage", "format", "bus")
"""Packages of which the guide names every module."""


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("modules_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_module_table_equals_the_docstrings(table: ModuleType) -> None:
    expected, found = table.rows(), table.rows_on_page()
    missing = [row for row in expected if row not in found]
    stale = [row for row in found if row not in expected]
    hint = "run `make table`, or edit docs/modules.md:"
    assert not missing, "\n".join([hint, "rows to paste:", *missing, "rows to remove:", *stale])
    assert not stale, "\n".join([hint, "rows to remove:", *stale])
    assert found == expected, f"{hint} the rows are not in order of module name, or one is there twice"


def test_first_lines_say_something(table: ModuleType) -> None:
    """Ten characters at least; ruff's line length is the upper limit."""
    short = [table.module_name(path) for path in table.modules() if len(table.first_line(path)) < 10]
    assert not short, f"the docstring's first line says nothing: {short}"


def rooms() -> dict[str, set[str]]:
    """What the guide names in each room."""
    found: dict[str, set[str]] = {}
    for row in re.findall(r"^\| `.*\|$", GUIDE, re.M):
        first, what, modules = row.strip("| ").split(" | ")
        for room in re.findall(r"`([^`]+)`", first):
            found.setdefault(room, set()).update(re.findall(r"`([a-z_]+)`", what + modules))
    return found


def in_room(room: str) -> set[str]:
    folder = PACKAGE / room
    return {path.stem for path in folder.glob("*.py")} - {"__init__"}


def test_the_guide_knows_every_room() -> None:
    packages = {
        str(path.parent.relative_to(PACKAGE))
        for path in PACKAGE.rglob("__init__.py")
        if path.parent != PACKAGE
    }
    assert set(rooms()) == packages


def test_the_guide_names_modules_where_they_are() -> None:
    for room, named in rooms().items():
        inside = in_room(room) | {path.name for path in (PACKAGE / room).iterdir() if path.is_dir()}
        shared = {name for other in rooms() if other.startswith(f"{room}/") for name in in_room(other)}
        assert named <= inside | shared | {"tailrace"}, room
        if room.split("/")[0] in NAMED_WHOLE:
            assert in_room(room) <= named, f"{room}: not named in the guide"


def test_paths_in_the_prose_exist() -> None:
    named = set(re.findall(r"`((?:core|broker|client|storage|protocols|format|tests)/[\w/.]+)`", PAGE))
    assert len(named) > 30
    places = {name: (ROOT / name, PACKAGE / name, PACKAGE / f"{name}.py") for name in named}
    assert [name for name, paths in places.items() if not any(path.exists() for path in paths)] == []


def test_every_word_of_the_glossary_once_and_in_one_sentence() -> None:
    entries = re.findall(r"^- \*\*(.+?)\*\*: (.+)$", GLOSSARY, re.M)
    words = Counter(word.strip() for term, _ in entries for word in term.split(","))
    assert len(words) > 60
    assert [word for word, count in words.items() if count > 1] == []
    assert [term for term, text in entries if not text.endswith(".") or ". " in text] == []
    assert len(entries) == len(re.findall(r"^- ", GLOSSARY, re.M))


def test_modules_named_in_the_code_exist() -> None:
    """As `core.queue.ledger`, with or without a name in it."""
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir()}

    def exists(name: str) -> bool:
        parts = name.split(".")
        for count in range(len(parts), 0, -1):
            path = PACKAGE.joinpath(*parts[:count])
            if path.with_suffix(".py").exists():
                return True
            if path.is_dir():
                exported = (path / "__init__.py").read_text(encoding="utf-8")
                return count == len(parts) or f'"{parts[count]}"' in exported
        return False

    named = [
        (str(path.relative_to(ROOT)), name)
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"`(?:tailrace\.)?([a-z_]+(?:\.\w+)+)`", path.read_text(encoding="utf-8"))
        if name.partition(".")[0] in packages
    ]
    assert len(named) > 30
    assert [place for place in named if not exists(place[1])] == []
