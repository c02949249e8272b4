"""The blocking form of the SDK: the same names without `async` and `await`, for scripts and threads.

All blocking clients of a process share one event loop on a daemon thread, which starts with the first of
them. A call hands a coroutine to it and waits, so it works in any thread, also beside a running loop: methods
that only do this are one line each (see `blocking_wrapper`). Written by hand are the paths that are too hot
for a crossing per message: `send` and `ack_nowait` leave theirs in a buffer that the loop empties in bursts,
readers and consumers cross over once per batch.
"""

from __future__ import annotations

from tailrace.client.queue.handler_verdicts import Reject, Retry
from tailrace.sync.blocking_access import AccessAdmin
from tailrace.sync.blocking_atomic import Atomic
from tailrace.sync.blocking_bus import Bus
from tailrace.sync.blocking_client import Admin, Client, connect
from tailrace.sync.blocking_consumer import Batch, Consumer, Delivery, StreamConsumer
from tailrace.sync.blocking_groups import DeadLetters, Groups, Schedules
from tailrace.sync.blocking_producer import Producer, Receipt, Receipts
from tailrace.sync.blocking_reader import Reader

__all__ = [
    "AccessAdmin",
    "Admin",
    "Atomic",
    "Batch",
    "Bus",
    "Client",
    "Consumer",
    "DeadLetters",
    "Delivery",
    "Groups",
    "Producer",
    "Reader",
    "Receipt",
    "Receipts",
    "Reject",
    "Retry",
    "Schedules",
    "StreamConsumer",
    "connect",
]
