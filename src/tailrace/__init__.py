"""Tailrace: a persistent message queue on a partitioned log, as a server or inside the process."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tailrace import errors
from tailrace.connect import connect

if TYPE_CHECKING:
    from tailrace import bus, sync
    from tailrace.bus import AckPolicy, Bus, EventStore, RequestFailed
    from tailrace.client.admin.access_admin import (
        AccessAdmin,
        AccessCaller,
        AccessCheck,
        AccessTenant,
        AccessToken,
        AccessUser,
        NewToken,
    )
    from tailrace.client.admin.dead_letter_reader import DeadLetter
    from tailrace.client.admin.dead_letters import DeadLetters, Redriven
    from tailrace.client.admin.group_admin import Group, Groups, Reset
    from tailrace.client.admin.schedules import Schedule, Scheduled, Schedules
    from tailrace.client.admin.topic_admin import Admin
    from tailrace.client.admin.trace_client import Life, LifeEvent, Traced
    from tailrace.client.client import Client
    from tailrace.client.messages import Message, Receipt, Receipts, Result, Topic
    from tailrace.client.publish.atomic_write import Atomic
    from tailrace.client.publish.producer import Producer
    from tailrace.client.queue.consumer import Consumer
    from tailrace.client.queue.delivery import Batch, Delivery
    from tailrace.client.queue.handler_verdicts import Reject, Retry
    from tailrace.client.queue.held_leases import FailedAck
    from tailrace.client.queue.threaded_handlers import BlockingDelivery
    from tailrace.client.read.reader import Reader
    from tailrace.client.read.stream_consumer import StreamConsumer
    from tailrace.core.model.access import Quota, Rule

__all__ = [
    "AccessAdmin",
    "AccessCaller",
    "AccessCheck",
    "AccessTenant",
    "AccessToken",
    "AccessUser",
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
    "NewToken",
    "Producer",
    "Quota",
    "Reader",
    "Receipt",
    "Receipts",
    "Redriven",
    "Reject",
    "RequestFailed",
    "Reset",
    "Result",
    "Retry",
    "Rule",
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
    "AccessAdmin": "tailrace.client.admin.access_admin",
    "AccessCaller": "tailrace.client.admin.access_admin",
    "AccessCheck": "tailrace.client.admin.access_admin",
    "AccessTenant": "tailrace.client.admin.access_admin",
    "AccessToken": "tailrace.client.admin.access_admin",
    "AccessUser": "tailrace.client.admin.access_admin",
    "AckPolicy": "tailrace.bus",
    "Admin": "tailrace.client.admin.topic_admin",
    "Atomic": "tailrace.client.publish.atomic_write",
    "Batch": "tailrace.client.queue.delivery",
    "BlockingDelivery": "tailrace.client.queue.threaded_handlers",
    "Bus": "tailrace.bus",
    "Client": "tailrace.client.client",
    "Consumer": "tailrace.client.queue.consumer",
    "DeadLetter": "tailrace.client.admin.dead_letter_reader",
    "DeadLetters": "tailrace.client.admin.dead_letters",
    "Delivery": "tailrace.client.queue.delivery",
    "EventStore": "tailrace.bus",
    "FailedAck": "tailrace.client.queue.held_leases",
    "Group": "tailrace.client.admin.group_admin",
    "Groups": "tailrace.client.admin.group_admin",
    "Life": "tailrace.client.admin.trace_client",
    "LifeEvent": "tailrace.client.admin.trace_client",
    "Message": "tailrace.client.messages",
    "NewToken": "tailrace.client.admin.access_admin",
    "Producer": "tailrace.client.publish.producer",
    "Quota": "tailrace.core.model.access",
    "Reader": "tailrace.client.read.reader",
    "Receipt": "tailrace.client.messages",
    "Receipts": "tailrace.client.messages",
    "Redriven": "tailrace.client.admin.dead_letters",
    "Reject": "tailrace.client.queue.handler_verdicts",
    "RequestFailed": "tailrace.bus",
    "Reset": "tailrace.client.admin.group_admin",
    "Result": "tailrace.client.messages",
    "Retry": "tailrace.client.queue.handler_verdicts",
    "Rule": "tailrace.core.model.access",
    "Schedule": "tailrace.client.admin.schedules",
    "Scheduled": "tailrace.client.admin.schedules",
    "Schedules": "tailrace.client.admin.schedules",
    "StreamConsumer": "tailrace.client.read.stream_consumer",
    "Topic": "tailrace.client.messages",
    "Traced": "tailrace.client.admin.trace_client",
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
