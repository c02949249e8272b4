"""Tailrace: a persistent message queue on a partitioned log, as a server or inside the process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tailrace import errors
from tailrace.connect import connect

if TYPE_CHECKING:
    from tailrace import bus, sync
    from tailrace.bus import AckPolicy, Bus, EventStore, RequestFailed
    from tailrace.client.admin import Admin
    from tailrace.client.aio import Client
    from tailrace.client.atomic import Atomic
    from tailrace.client.consumer import Consumer
    from tailrace.client.dead_letters import DeadLetter, DeadLetters, Redriven
    from tailrace.client.deliveries import Batch, Delivery
    from tailrace.client.group_admin import Group, Groups, Reset
    from tailrace.client.leases import FailedAck
    from tailrace.client.plain_handlers import BlockingDelivery
    from tailrace.client.producer import Producer
    from tailrace.client.reader import Reader
    from tailrace.client.results import Message, Receipt, Receipts, Result, Topic
    from tailrace.client.schedules import Schedule, Scheduled, Schedules
    from tailrace.client.streaming import StreamConsumer
    from tailrace.client.tracing_calls import Life, LifeEvent, Traced
    from tailrace.client.verdicts import Reject, Retry

__all__ = [
    "AckPolicy",
    "Admin",
    "Atomic",
    "Batch",
    "BlockingDelivery",
    "Bus",
    "Client",
    "Consumer",
    "DeadLetter",
    "DeadLetters",
    "Delivery",
    "EventStore",
    "FailedAck",
    "Group",
    "Groups",
    "Life",
    "LifeEvent",
    "Message",
    "Producer",
    "Reader",
    "Receipt",
    "Receipts",
    "Redriven",
    "Reject",
    "RequestFailed",
    "Reset",
    "Result",
    "Retry",
    "Schedule",
    "Scheduled",
    "Schedules",
    "StreamConsumer",
    "Topic",
    "Traced",
    "bus",
    "connect",
    "errors",
    "sync",
]

_LAZY = {
    "AckPolicy": "tailrace.bus",
    "Admin": "tailrace.client.admin",
    "Atomic": "tailrace.client.atomic",
    "Batch": "tailrace.client.deliveries",
    "BlockingDelivery": "tailrace.client.plain_handlers",
    "Bus": "tailrace.bus",
    "Client": "tailrace.client.aio",
    "Consumer": "tailrace.client.consumer",
    "DeadLetter": "tailrace.client.dead_letters",
    "DeadLetters": "tailrace.client.dead_letters",
    "Delivery": "tailrace.client.deliveries",
    "EventStore": "tailrace.bus",
    "FailedAck": "tailrace.client.leases",
    "Group": "tailrace.client.group_admin",
    "Groups": "tailrace.client.group_admin",
    "Life": "tailrace.client.tracing_calls",
    "LifeEvent": "tailrace.client.tracing_calls",
    "Message": "tailrace.client.results",
    "Producer": "tailrace.client.producer",
    "Reader": "tailrace.client.reader",
    "Receipt": "tailrace.client.results",
    "Receipts": "tailrace.client.results",
    "Redriven": "tailrace.client.dead_letters",
    "Reject": "tailrace.client.verdicts",
    "RequestFailed": "tailrace.bus",
    "Reset": "tailrace.client.group_admin",
    "Result": "tailrace.client.results",
    "Retry": "tailrace.client.verdicts",
    "Schedule": "tailrace.client.schedules",
    "Scheduled": "tailrace.client.schedules",
    "Schedules": "tailrace.client.schedules",
    "StreamConsumer": "tailrace.client.streaming",
    "Topic": "tailrace.client.results",
    "Traced": "tailrace.client.tracing_calls",
    "bus": "tailrace.bus",
    "sync": "tailrace.sync",
}


def __getattr__(name: str) -> Any:
    """Classes are loaded when first named: `import tailrace` alone stays quick."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    loaded = importlib.import_module(module)
    return loaded if name in ("bus", "sync") else getattr(loaded, name)


def __dir__() -> list[str]:
    return sorted(__all__)
