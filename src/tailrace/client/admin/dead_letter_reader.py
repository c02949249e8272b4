"""Reading what a group has not settled, without leasing: who looks takes nothing away from others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import AsyncGenerator
from datetime import datetime

import msgspec

from tailrace.client.messages import Message, Rows, moment
from tailrace.client.queue.held_leases import offsets_of
from tailrace.client.rpc.calls import ask, ask_parts
from tailrace.client.sdk_tuning import FETCH_BYTES, LETTERS_AT_ONCE
from tailrace.core.model import dead_letter_headers
from tailrace.core.model.commands import DescribeTopic, Fetch, Fetched, TopicInfo
from tailrace.core.model.queue_commands import FindUnsettled, UnsettledFound
from tailrace.errors import NotFound
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.ports import BrokerVerbs


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that a group could not handle, where it came from, and why it is here."""

    message: Message
    topic: str
    partition: int
    offset: int
    time: datetime | None
    group: str
    attempts: int
    deliveries: int
    first_delivery: datetime | None
    last_delivery: datetime | None
    last_member: str
    reason: str
    error: str
    topic_id: int = 0
    """Tells the origin from another topic of that name, created later; 0 where it is not known."""

    @classmethod
    def of(cls, message: Message) -> DeadLetter:
        """From the message on the dead-letter topic. `topic`, `partition` and `offset` are the origin's."""
        told = {name: value.decode("utf-8", "replace") for name, value in message.headers}

        def text(name: str) -> str:
            return told.get(dead_letter_headers.PREFIX + name, "")

        def number(name: str, default: int = 0) -> int:
            given = text(name)
            return int(given) if given.lstrip("-").isdigit() else default

        def at(name: str) -> datetime | None:
            return moment(number(name)) if number(name) > 0 else None

        return cls(
            message,
            text("origin-topic"),
            number("origin-partition", -1),
            number("origin-offset", -1),
            at("origin-time"),
            text("group"),
            number("attempts"),
            number("deliveries"),
            at("first-delivery"),
            at("last-delivery"),
            text("last-member"),
            text("reason"),
            text("error"),
            number("origin-topic-id"),
        )


class DeadLetterReader:
    """The messages of one topic that one group has not settled."""

    def __init__(self, verbs: BrokerVerbs, topic: str, group: str, timeout: float) -> None:
        self._verbs = verbs
        self._topic = topic
        self._group = group
        self._timeout = timeout

    async def pieces(self) -> AsyncGenerator[tuple[int, list[Message]], None]:
        """All that are there now, one partition after the other; what comes later is left out, so that a
        message which is sent back and dies again is not met twice. Nothing when there is no such topic."""
        try:
            info = await ask(self._verbs, DescribeTopic(self._topic), self._timeout)
        except NotFound:
            return
        assert isinstance(info, TopicInfo)
        for row in info.partitions:
            partition, offset, end = row["partition"], row["start_offset"], row["end_offset"]
            while offset < end:
                request = FindUnsettled(self._topic, partition, self._group, offset, LETTERS_AT_ONCE)
                reply = await ask(self._verbs, request, self._timeout)
                assert isinstance(reply, UnsettledFound)
                wanted = [place for place in offsets_of(reply.spans) if place < end]
                at = 0
                while at < len(wanted):
                    messages, reached = await self._read(partition, wanted[at:])
                    if messages:
                        yield partition, messages
                    at = bisect_left(wanted, reached)
                offset = wanted[-1] + 1 if wanted else end

    async def at(self, partition: int, offset: int) -> Message:
        """One message, settled or not."""
        messages, _ = await self._read(partition, [offset])
        if not messages:
            raise NotFound(f"{self._topic}/{partition} has no message {offset}")
        return messages[0]

    async def _read(self, partition: int, wanted: list[int]) -> tuple[list[Message], int]:
        """The first of the wanted messages, as many as one answer holds, and from where to go on."""
        first, alone = wanted[0], len(wanted) == 1
        request = Fetch(self._topic, [(partition, first)], 1 if alone else FETCH_BYTES)
        try:
            reply, parts = await ask_parts(self._verbs, request, self._timeout)
        except NotFound as error:
            start = error.details.get("start_offset", 0)
            if alone or start <= first:
                raise
            return [], start  # Retention was quicker.
        assert isinstance(reply, Fetched)
        found: list[Message] = []
        reached, chosen = first + 1, set(wanted)
        for header, body in frame.walk(memoryview(b"".join(parts))):
            if header.kind == frame.DATA:
                rows = Rows(self._topic, partition, header, arrow.decode(body, header.columns))
                found += [m for m in rows.messages(rows.first_row(first)) if m.offset in chosen]
                reached = header.end_offset
        return found, reached
