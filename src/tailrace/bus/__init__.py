"""The bus: typed commands and events between the parts of an application, on Tailrace topics.

>>> bus = Bus("shop")
>>> @bus.event
... class OrderPlaced(msgspec.Struct):
...     order: int
>>> @bus.handler(OrderPlaced)
... async def bill(message: Message[OrderPlaced]) -> None:
...     print(message.data.order)

`async with bus.attach(client)` puts it to work: `send` commands, `publish` events, `request` answers,
`run` the handlers; `tailrace worker module:bus` does the last in a process of its own.
"""

from __future__ import annotations

from tailrace.bus.application import Bus
from tailrace.bus.envelope import Batch, BlockingMessage, Message
from tailrace.bus.event_store import Event, EventStore
from tailrace.bus.outcomes import AckPolicy, RequestFailed
from tailrace.client.queue.handler_verdicts import Reject, Retry

__all__ = [
    "AckPolicy",
    "Batch",
    "BlockingMessage",
    "Bus",
    "Event",
    "EventStore",
    "Message",
    "Reject",
    "RequestFailed",
    "Retry",
]
