"""Traces in the SDK: the lives of messages as typed results."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tailrace.client.messages import moment, to_us
from tailrace.client.rpc.calls import ask, whole_of
from tailrace.core.model.queue_commands import Trace, TraceFound
from tailrace.errors import InvalidRequest
from tailrace.ports import BrokerVerbs


class LifeEvent(msgspec.Struct, frozen=True):
    """One thing that happened to a message."""

    time_us: int
    event: str
    """published, appended, scheduled, released, cancelled, staged, applied, dropped, delivered, extended,
    nacked, expired, given_back, acked, dying, dead_lettered, redriven, lapsed, settled, committed, rewound,
    reset, group_deleted or collected."""
    group: str | None = None
    member: str | None = None
    attempt: int | None = None
    details: dict[str, Any] = {}
    """What else belongs to it: deadline_us, delay_us, reason, error, offset, the place of a dead letter, …"""

    @property
    def time(self) -> datetime:
        """When it happened, by the broker's clock (`published`: by the producer's)."""
        return moment(self.time_us)


class Life(msgspec.Struct, frozen=True):
    """The life of one message."""

    topic: str
    partition: int
    offset: int | None
    """None while it is scheduled or staged, and for ever when it was cancelled or dropped."""
    id: UUID
    key: bytes | None
    status: str
    """scheduled, cancelled, staged, dropped, free, leased, waiting, settled, dying, dead or collected;
    "mixed" where groups differ."""
    groups: dict[str, str]
    """Status by group."""
    events: list[LifeEvent]
    timestamp_us: int
    traceparent: str | None = None
    """The W3C trace context that it was published with."""
    origin: dict[str, str] | None = None
    """Of a dead letter: topic, partition, offset and time of the message that it was."""
    details: dict[str, Any] = {}

    @property
    def timestamp(self) -> datetime:
        """The producer's time."""
        return moment(self.timestamp_us)


class Traced(msgspec.Struct, frozen=True):
    """What a trace found, the oldest first. It is not `complete` when there is more than was asked for, or
    when the search came to its bounds of time and bytes before the end."""

    lives: list[Life]
    complete: bool

    def __iter__(self) -> Iterator[Life]:
        return iter(self.lives)

    def __len__(self) -> int:
        return len(self.lives)


_EVENT_FIELDS = frozenset(("time_us", "event", "group", "member", "attempt"))
_LIFE_FIELDS = frozenset(Life.__struct_fields__) - {"details"}


async def trace(
    verbs: BrokerVerbs,
    topic: str,
    timeout: float,
    *,
    partition: int | None = None,
    offset: int | None = None,
    id: UUID | bytes | str | None = None,
    key: bytes | None = None,
    since: datetime | int | None = None,
    until: datetime | int | None = None,
    status: str | None = None,
    limit: int = 100,
    full: bool = False,
) -> Traced:
    """Ask for lives; see `Client.trace`."""
    request = Trace(
        topic,
        partition,
        offset,
        None if id is None else _id_bytes(id),
        key,
        0 if since is None else to_us(since, "since", InvalidRequest),
        0 if until is None else to_us(until, "until", InvalidRequest),
        status,
        whole_of("limit", limit),
        full,
    )
    reply = await ask(verbs, request, timeout)
    assert isinstance(reply, TraceFound)
    return Traced([life_of(found) for found in reply.messages], reply.complete)


def life_of(found: dict[str, Any]) -> Life:
    """A life from the answer of the broker."""
    known = {name: value for name, value in found.items() if name in _LIFE_FIELDS}
    known["id"] = UUID(bytes=bytes(found["id"]))
    known["events"] = [_event_of(event) for event in found["events"]]
    details = {name: value for name, value in found.items() if name not in _LIFE_FIELDS}
    return Life(**known, details=details)


def _event_of(found: dict[str, Any]) -> LifeEvent:
    known = {name: value for name, value in found.items() if name in _EVENT_FIELDS}
    details = {name: value for name, value in found.items() if name not in _EVENT_FIELDS}
    return LifeEvent(**known, details=details)


def _id_bytes(id_: UUID | bytes | str) -> bytes:
    if isinstance(id_, UUID):
        return id_.bytes
    if isinstance(id_, bytes) and len(id_) == 16:
        return id_
    if isinstance(id_, str):
        try:
            return UUID(id_).bytes
        except ValueError:
            pass
    raise InvalidRequest(f"id: a UUID, its 16 bytes or its text, not {id_!r}")
