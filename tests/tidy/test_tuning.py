"""The tuning constants of a package stand in one table, and all of them are used.

Covers `client/sdk_tuning.py`, `core/core_tuning.py`, `protocols/edge_tuning.py` and
`storage/storage_tuning.py`.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "src" / "tailrace"
TABLES = {
    "client": "sdk_tuning",
    "core": "core_tuning",
    "protocols": "edge_tuning",
    "storage": "storage_tuning",
}
ALONE = ("client", "protocols")
"""Packages that have no other numbers; in the others there are those of formats and structures."""
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


@pytest.mark.parametrize("package", ALONE)
def test_numbers_stand_in_the_table_alone(package: str) -> None:
    others = [path for path in (ROOT / package).rglob("*.py") if path.stem != TABLES[package]]
    found = {path.stem: numbers(path) - ADDRESSES for path in others}
    assert {name: some for name, some in found.items() if some} == {}


@pytest.mark.parametrize("package", TABLES)
def test_all_of_them_are_used(package: str) -> None:
    used = {
        name.name
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == f"tailrace.{package}.{TABLES[package]}"
        for name in node.names
    }
    assert numbers(ROOT / package / f"{TABLES[package]}.py") - used == set()
