"""An event store on a topic with `key_index`: the events of an aggregate are the messages of one key.

The version of a stream is the number of its events. An append names the version that it was decided on and
is refused with `SequenceConflict` when somebody else was quicker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from tailrace.bus.registry import TypeRegistry, as_key
from tailrace.client.client import Client
from tailrace.client.read.reader import Start
from tailrace.core.model.identifiers import ANY_KEY_SEQUENCE, partition_of
from tailrace.errors import InvalidRequest

ANY = ANY_KEY_SEQUENCE
"""As `expected`: append whatever the version is."""
NEW = 0
"""As `expected`: the stream must not exist yet."""
PAGE = 1000
"""Events that one request asks for."""


class Event(msgspec.Struct, frozen=True, eq=False):
    """An event as read: its stream, its version there (1 for the first; 0 when it was not counted), its place
    in the topic, and its data."""

    stream: str
    version: int
    partition: int
    offset: int
    name: str
    data: Any


class EventStore:
    """Streams of events on one topic; use it as an async context manager."""

    def __init__(self, client: Client, topic: str) -> None:
        self.topic = topic
        self._client = client
        self._registry = TypeRegistry()
        self._partitions = 0
        self._producer = client.producer(topic, linger_ms=0)

    async def __aenter__(self) -> EventStore:
        admin = self._client.admin()
        await admin.create_topic(self.topic, if_missing=True, key_index=True)
        topic = await admin.describe_topic(self.topic)
        if not topic.options["key_index"]:
            raise InvalidRequest(f"topic {self.topic!r} was made without key_index: it cannot hold streams")
        self._partitions = len(topic.partitions)
        await self._producer.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._producer.__aexit__(*error)

    def event(self, kind: Any = None, *, name: str | None = None, version: int = 1) -> Any:
        """Register a type of events; also as a decorator."""

        def add(kind: Any) -> Any:
            self._registry.add(kind, name, version, self.topic, None)
            return kind

        return add if kind is None else add(kind)

    def upcast(self, name: str, version: int, upcaster: Any) -> None:
        """From plain data of `version` of a type to that of the next."""
        self._registry.upcast(name, version, upcaster)

    async def append(self, stream: str, events: Sequence[Any], *, expected: int = ANY) -> int:
        """Append events to a stream that has `expected` of them; all or none of several go in together.

        Returns the version of the stream afterwards (0 with `ANY`, when it was not asked for).
        """
        if not events:
            raise InvalidRequest("append: at least one event")
        key = as_key(stream)
        assert key is not None
        encoded = [self._registry.encode(event) for event in events]
        receipts = await self._producer.send_many(
            [body for _, body, _ in encoded],
            keys=[key] * len(encoded),
            headers=[headers for _, _, headers in encoded],
            expected_key_sequence=expected,
        )
        await receipts
        return 0 if expected == ANY else expected + len(events)

    async def read(
        self, stream: str, *, since: int = 0, backwards: bool = False, limit: int | None = None
    ) -> list[Event]:
        """Events of a stream in order, from the one after version `since`; or the newest first. It costs what
        it returns: other streams are not read, nor are events of this one that are not asked for."""
        key = as_key(stream)
        assert key is not None
        if since < 0 or (limit is not None and limit < 0):
            raise InvalidRequest(f"read: since and limit are 0 or more, not {since} and {limit}")
        partition = partition_of(key, self._partitions)
        pages = self._client.key_pages(self.topic)
        found: list[Event] = []
        until, more = 0, limit != 0
        while more:
            count = PAGE if limit is None else min(limit - len(found), PAGE)
            page = await pages.read(
                partition, key, since=since, until=until, limit=count, newest_first=backwards
            )
            events = []
            for version, message in enumerate(page.messages, page.version):
                name, _, data = self._registry.decode(message.value, message.headers)
                events.append(Event(stream, version, partition, message.offset, name, data))
            if backwards:
                events.reverse()
            found += events
            more = page.more and len(found) != limit and bool(events)
            if more and backwards:
                until = events[-1].version - 1
            elif more:
                # What is appended while a long stream is read is left to the next read.
                since, until = events[-1].version, until or page.total
        return found

    async def subscribe(self, start: Start = "earliest") -> AsyncIterator[Event]:
        """All events of all streams from a position on, as they come; `Event.version` is 0 here."""
        async with self._client.reader(self.topic, start=start) as reader:
            async for message in reader:
                name, _, data = self._registry.decode(message.value, message.headers)
                stream = (message.key or b"").decode(errors="replace")
                yield Event(stream, 0, message.partition, message.offset, name, data)
