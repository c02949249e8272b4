"""For tests of applications: a broker in the test process with virtual time, and a real one beside it.

With pytest, use the fixtures `tailrace_broker` and `tailrace_server` (`tailrace.testing.plugin`, loaded by
itself where Tailrace is installed). Without it, make a `LocalBroker` or a `ServerProcess`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Type checkers read `__init__.pyi`.
_LAZY = {
    "LocalBroker": "tailrace.testing.local_broker",
    "ServerProcess": "tailrace.testing.server_process",
    "VirtualClock": "tailrace.testing.local_broker",
    "open_local": "tailrace.testing.local_broker",
}


__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    """Loaded when first named: every pytest run on a machine with Tailrace imports this package."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'tailrace.testing' has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(_LAZY)
