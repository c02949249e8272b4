"""ARCHITECTURE.md lists every module with the first line of its docstring."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "modules_table.py"


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
    hint = "run `make table`, or edit ARCHITECTURE.md:"
    assert not missing, "\n".join([hint, "rows to paste:", *missing, "rows to remove:", *stale])
    assert not stale, "\n".join([hint, "rows to remove:", *stale])
    assert found == expected, f"{hint} the rows are not in order of module name, or one is there twice"


def test_first_lines_say_something(table: ModuleType) -> None:
    """Ten characters at least; ruff's line length is the upper limit."""
    short = [table.module_name(path) for path in table.modules() if len(table.first_line(path)) < 10]
    assert not short, f"the docstring's first line says nothing: {short}"
