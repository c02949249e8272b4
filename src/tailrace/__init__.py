"""Tailrace: a persistent message queue on a partitioned log, as a server or inside the process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tailrace import errors
from tailrace.connect import connect

if TYPE_CHECKING:
    from tailrace import sync
    from tailrace.client.admin import Admin
    from tailrace.client.aio import Client
    from tailrace.client.producer import Producer
    from tailrace.client.reader import Reader
    from tailrace.client.results import Message, Receipt, Receipts, Result, Topic

__all__ = [
    "Admin",
    "Client",
    "Message",
    "Producer",
    "Reader",
    "Receipt",
    "Receipts",
    "Result",
    "Topic",
    "connect",
    "errors",
    "sync",
]

_LAZY = {
    "Admin": "tailrace.client.admin",
    "Client": "tailrace.client.aio",
    "Message": "tailrace.client.results",
    "Producer": "tailrace.client.producer",
    "Reader": "tailrace.client.reader",
    "Receipt": "tailrace.client.results",
    "Receipts": "tailrace.client.results",
    "Result": "tailrace.client.results",
    "Topic": "tailrace.client.results",
    "sync": "tailrace.sync",
}


def __getattr__(name: str) -> Any:
    """Classes are loaded when first named: `import tailrace` alone stays quick."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    loaded = importlib.import_module(module)
    return loaded if name == "sync" else getattr(loaded, name)


def __dir__() -> list[str]:
    return sorted(__all__)
