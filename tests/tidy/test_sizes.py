"""Limits on files, functions and parameters; file names that mean one thing; a docstring in every module."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
POSITIONAL_PARAMETERS_MAX = 7
NAMES_WITHOUT_MEANING = {"base", "common", "helpers", "manager", "utils"}
NAMES_MAY_REPEAT = {"__init__.py", "__main__.py"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def source_files() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def place(path: Path, line: int = 1) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in source_files():
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def functions() -> Iterator[tuple[Path, Function]]:
    for path, tree in parsed():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield path, node


def lines_without_docstring(function: Function) -> int:
    """From `def` to the last line; decorators and the docstring do not count."""
    assert function.end_lineno is not None
    total = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        total -= docstring.end_lineno - docstring.lineno + 1
    return total


def positional_parameters(function: Function) -> int:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_files_are_short() -> None:
    long = [
        f"{place(path)}: {count} lines"
        for path in source_files()
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > FILE_LINES_MAX
    ]
    assert not long, f"more than {FILE_LINES_MAX} lines (400 are wanted):\n" + "\n".join(long)


def test_functions_are_short() -> None:
    long = [
        f"{place(path, function.lineno)} {function.name}: {count} lines"
        for path, function in functions()
        if (count := lines_without_docstring(function)) > FUNCTION_LINES_MAX
    ]
    assert not long, f"more than {FUNCTION_LINES_MAX} lines without docstring:\n" + "\n".join(long)


def test_functions_take_few_positional_parameters() -> None:
    wide = [
        f"{place(path, function.lineno)} {function.name}: {count}"
        for path, function in functions()
        if (count := positional_parameters(function)) > POSITIONAL_PARAMETERS_MAX
    ]
    assert not wide, f"more than {POSITIONAL_PARAMETERS_MAX} positional parameters:\n" + "\n".join(wide)


def test_file_names_are_unique() -> None:
    places = defaultdict(list)
    for path in (SRC / "tailrace").rglob("*.py"):
        if path.name not in NAMES_MAY_REPEAT:
            places[path.name].append(place(path))
    repeated = [f"{name}: {', '.join(sorted(found))}" for name, found in places.items() if len(found) > 1]
    assert not repeated, "a file name says what it is, once:\n" + "\n".join(sorted(repeated))


def test_file_names_mean_something() -> None:
    empty = [place(path) for path in source_files() if path.stem.strip("_") in NAMES_WITHOUT_MEANING]
    assert not empty, "name the thing, not the drawer:\n" + "\n".join(empty)


def test_modules_have_docstrings() -> None:
    bare = [place(path) for path, tree in parsed() if not ast.get_docstring(tree)]
    assert not bare, "no module docstring:\n" + "\n".join(bare)
