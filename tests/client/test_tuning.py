"""The constants of the SDK stand in one table, and all of them are used."""

import ast
from pathlib import Path

import tailrace.client

ROOT = Path(tailrace.client.__file__).parent
TABLE = ROOT / "tuning.py"
ADDRESSES = {"DEFAULT_PORT"}


def numbers(path: Path) -> set[str]:
    """The public numbers that a module defines."""
    return {
        target.id
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper() and not target.id.startswith("_")
        if all(isinstance(part, ast.Constant | ast.BinOp | ast.operator) for part in ast.walk(node.value))
        if not any(isinstance(getattr(part, "value", None), str | bool) for part in ast.walk(node.value))
    }


def test_numbers_stand_in_the_table_alone() -> None:
    others = {path.stem: numbers(path) for path in ROOT.rglob("*.py") if path != TABLE}
    assert {name: found - ADDRESSES for name, found in others.items() if found - ADDRESSES} == {}


def test_all_of_them_are_used() -> None:
    used = {
        name.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "tailrace.client.tuning"
        for name in node.names
    }
    assert numbers(TABLE) - used == set()
