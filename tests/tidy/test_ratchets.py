"""Ratchets: habits that are on their way out are counted, and no count may grow.

Each constant is what the tree has today. A change that makes one smaller lowers the constant with it; at 0
the habit is forbidden. A count that grows is no reason to raise its constant: the failure lists the places.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "tailrace"
TESTS = ROOT / "tests"

MODULES_MAX = 17
"""Modules in one folder, without `__init__.py`: more are two rooms."""
PRIVATE_ACCESSES = 0
"""Uses of another object's private members: whoever needs one asks for a verb instead."""
COMPOSER_ARGUMENTS = 3
"""Objects that are given the object that makes them: parts get the values that they need."""
DISTANT_ASSIGNMENTS = 0
"""Assignments through two dots (`a.b.c = …`) outside of `WIRING`: state is changed by its owner."""
TYPE_ONLY_IMPORTS = 0
"""Imports behind TYPE_CHECKING inside one package: two modules that need each other's types are one."""
REPEATED_CLASSES = 0
"""Class names that occur twice, but for public names that several public packages export."""
UNTESTED_MODULES = 0
"""Modules without `test_<module>.py` that no docstring of a test file names, as `core/queue/ledger.py`."""
NESTED_FUNCTIONS = 0
"""Functions within functions in the broker: an order of steps that is read by following callbacks."""
FOREIGN_STATE = 0
"""Reads of a partition's state from outside of its runtime: the runtime answers, since the partition may be
on another node."""

WIRING = ("broker/engine.py", "broker/node.py", "connect.py", "sim/worlds/", "testing/local_broker.py")
"""Where finished objects are put together, and a world turns the knobs of what it simulates."""
OWNERS = ("broker/runtime/", "broker/partition/")
"""Where partitions are run: the runtimes own the state."""
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
"""Not private, in spite of their names."""
STANDARD_LIBRARY = {"os._exit"}
"""Public, in spite of its name."""
SIBLINGS = {"bus", "client", "sync"}
"""Public packages that give their own forms of a thing the same name."""

Places = list[str]


@cache
def trees() -> dict[str, ast.Module]:
    paths = sorted(SRC.rglob("*.py"))
    return {str(path.relative_to(SRC)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for name, tree in trees().items():
        for node in ast.walk(tree):
            yield name, node


def private_accesses() -> Places:
    return [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, node in nodes()
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in NAMED_TUPLES
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super")
        and ast.unparse(node) not in STANDARD_LIBRARY
    ]


def composer_arguments() -> Places:
    """Calls of classes that hand over `self`; the actors of a world are given their world."""

    def is_class(called: ast.expr) -> bool:
        last = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return last.lstrip("_")[:1].isupper()

    return [
        f"{name}:{node.lineno} {ast.unparse(node.func)}(self)"
        for name, node in nodes()
        if isinstance(node, ast.Call)
        and not name.startswith("sim/worlds/")
        and is_class(node.func)
        and any(
            isinstance(given, ast.Name) and given.id == "self"
            for given in (*node.args, *(keyword.value for keyword in node.keywords))
        )
    ]


def distant_assignments() -> Places:
    def targets(node: ast.AST) -> list[ast.expr]:
        if isinstance(node, ast.Assign):
            return [part for target in node.targets for part in getattr(target, "elts", [target])]
        return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []

    return [
        f"{name}:{target.lineno} {ast.unparse(target)}"
        for name, node in nodes()
        if not name.startswith(WIRING)
        for target in targets(node)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Attribute)
    ]


def type_only_imports() -> Places:
    return [
        f"{name}:{item.lineno} {item.module}"
        for name, node in nodes()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for item in node.body
        if isinstance(item, ast.ImportFrom) and "/" in name
        if (item.module or "").startswith(f"tailrace.{name.partition('/')[0]}.")
    ]


def repeated_classes() -> Places:
    found = defaultdict(list)
    for name, node in nodes():
        if isinstance(node, ast.ClassDef):
            found[node.name].append(name)

    def siblings(places: Places) -> bool:
        packages = {place.partition("/")[0] for place in places}
        return packages <= SIBLINGS and len(packages) == len(places)

    return [
        f"{name}: {', '.join(places)}"
        for name, places in sorted(found.items())
        if len(places) > 1 and not (siblings(places) and not name.startswith("_"))
    ]


def untested_modules() -> Places:
    files = list(TESTS.rglob("test_*.py"))
    mirrored = {str(path.relative_to(TESTS)).replace("test_", "") for path in files}
    told = "\n".join(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in files)
    named = set(re.findall(r"`([\w/]+\.py)`", told))
    modules = [name for name in trees() if Path(name).name not in ("__init__.py", "__main__.py")]
    return [name for name in modules if name not in mirrored and name not in named]


def nested_functions() -> Places:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return sorted(
        {
            f"{name}:{inner.lineno} {inner.name}"
            for name, node in nodes()
            if name.startswith("broker/") and isinstance(node, functions)
            for inner in ast.walk(node)
            if inner is not node and isinstance(inner, functions)
        }
    )


def foreign_state() -> Places:
    """`….state` of anything but `self` in the broker, outside of `OWNERS`. A called `state()` is a verb, and
    `life.state` is where a message of a trace is."""
    called = {id(node.func) for _, node in nodes() if isinstance(node, ast.Call)}
    return [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, node in nodes()
        if name.startswith("broker/")
        and not name.startswith(OWNERS)
        and isinstance(node, ast.Attribute)
        and node.attr == "state"
        and id(node) not in called
        and ast.unparse(node) not in ("self.state", "life.state")
    ]


RATCHETS: list[tuple[Callable[[], Places], int]] = [
    (private_accesses, PRIVATE_ACCESSES),
    (composer_arguments, COMPOSER_ARGUMENTS),
    (distant_assignments, DISTANT_ASSIGNMENTS),
    (type_only_imports, TYPE_ONLY_IMPORTS),
    (repeated_classes, REPEATED_CLASSES),
    (untested_modules, UNTESTED_MODULES),
    (nested_functions, NESTED_FUNCTIONS),
    (foreign_state, FOREIGN_STATE),
]


@pytest.mark.parametrize(("count", "most"), RATCHETS, ids=[count.__name__ for count, _ in RATCHETS])
def test_no_count_grows(count: Callable[[], Places], most: int) -> None:
    places = count()
    constant = count.__name__.upper()
    assert len(places) <= most, f"{constant}: {len(places)} instead of {most}:\n" + "\n".join(places)
    assert len(places) == most, (
        f"{len(places)} are left: write {constant} = {len(places)}, so that it stays so"
    )


def test_folders_are_small() -> None:
    folders: dict[str, int] = defaultdict(int)
    for name in trees():
        folders[str(Path(name).parent)] += Path(name).name != "__init__.py"
    assert {folder: count for folder, count in folders.items() if count > MODULES_MAX} == {}
