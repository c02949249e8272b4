"""The public API is exactly tailrace.__all__."""

import subprocess
import sys
from types import ModuleType

import tailrace

# Left in the namespace by ordinary imports, and no part of the API.
IMPORT_RESIDUE = {"Any", "TYPE_CHECKING", "annotations"}


def test_all_is_sorted_and_without_repeats() -> None:
    assert list(tailrace.__all__) == sorted(set(tailrace.__all__))


def test_every_name_resolves() -> None:
    unresolved = [name for name in tailrace.__all__ if getattr(tailrace, name, None) is None]
    assert not unresolved


def test_dir_lists_every_name() -> None:
    assert set(tailrace.__all__) <= set(dir(tailrace))


def test_nothing_public_is_left_out() -> None:
    public = {
        name
        for name, value in vars(tailrace).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    extra = public - set(tailrace.__all__) - IMPORT_RESIDUE
    assert not extra, f"public but not in __all__: {sorted(extra)}"


def test_submodules_do_not_hide_names() -> None:
    """`import tailrace.connect` binds the module to the package's name `connect`: the function has to win."""
    program = """
import importlib, pkgutil, types, tailrace
modules = {module.name for module in pkgutil.iter_modules(tailrace.__path__)}
for name in sorted(modules & set(tailrace.__all__)):
    before = getattr(tailrace, name)
    importlib.import_module("tailrace." + name)
    assert getattr(tailrace, name) is before, name
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_import_is_light() -> None:
    """`import tailrace` alone loads neither the broker nor the command line."""
    heavy = ("tailrace.broker", "tailrace.cli", "typer")
    program = f"import sys, tailrace; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr
