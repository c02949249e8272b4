"""Atomic writes: messages for any topics and partitions of which all are written, or none, once per version.

They are staged, outside of what anybody can read, under an attempt of their own; leaving the block decides
the writer's version for this attempt, unless it was decided before. So a writer that numbers its work can
repeat a version after any failure, and its messages are there exactly once:

    async with client.atomic("orders-import", batch_number) as tx:
        await tx.send("orders", value, key=key)
        await tx.send("totals", total)
    tx.won      # False: this version (or a later one) had been decided, and nothing was written now

Readers see the messages of one partition all at once, but not those of different partitions at the same time.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Any

from tailrace.client.publish.message_fields import Delay, Fields, Headers, check_fields
from tailrace.client.rpc.calls import ask
from tailrace.client.sdk_tuning import ABORT_S, STAGE_BYTES, STAGE_ROWS
from tailrace.core.model.commands import DescribeTopic, TopicInfo
from tailrace.core.model.identifiers import PRIORITY_DEFAULT, partition_of
from tailrace.core.model.queue_commands import AbortStaged, DecideStaged, StagedDecision, StageRows
from tailrace.errors import InvalidRequest, NotFound, TailraceError
from tailrace.format import batch as arrow
from tailrace.format.frame import Buffer, crc32c
from tailrace.ports import BrokerVerbs


class _Part:
    """What goes to one partition."""

    def __init__(self, topic: str, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.rows: list[Fields] = []
        self.nbytes = 0
        self.batches = 0
        """How many are staged, or may be."""
        self.lock = asyncio.Lock()


class _TopicShare:
    """What is known of a topic that is written to, and where the next message without a key goes."""

    def __init__(self, info: TopicInfo) -> None:
        self.value_max: int = info.options["message_bytes_max"]
        self.partitions = len(info.partitions)
        self.turn = secrets.randbelow(self.partitions)


class Atomic:
    """One attempt at a version; see `Client.atomic`. Use it as an async context manager, once."""

    def __init__(self, verbs: BrokerVerbs, writer: str, version: int, timeout: float) -> None:
        if not isinstance(writer, str) or not writer:
            raise InvalidRequest("writer: a name is needed, the same each time")
        if type(version) is not int or version < 0:
            raise InvalidRequest(f"version: 0 or more, growing from write to write, not {version!r}")
        self.writer = writer
        self.version = version
        self.attempt = secrets.token_hex(16)
        self.won: bool | None = None
        """Whether the version was decided for this attempt; None before the end of the block."""
        self.applied = False
        """Whether all partitions have it already. If not, the broker goes on until they have."""
        self._verbs = verbs
        self._wall_ns = verbs.clock.wall_ns
        self._timeout = timeout
        self._topics: dict[str, _TopicShare] = {}
        self._parts: dict[tuple[str, int], _Part] = {}
        self._state = "new"
        self._failed = False
        """Whether messages could not be staged: nothing may be decided without them."""

    async def __aenter__(self) -> Atomic:
        if self._state != "new":
            raise InvalidRequest("an atomic write is used once: ask the client for another one")
        self._state = "open"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state = "closed"
        if kind is not None:
            await self._abort()
            return
        try:
            self._require_whole()
            for part in self._parts.values():
                await self._stage(part)
        except BaseException:
            await self._abort()
            raise
        batches = [part.batches for part in self._parts.values() if part.batches]
        request = DecideStaged(self.writer, self.version, self._attempts(), batches, attempt=self.attempt)
        # From here on it may be decided, whatever is heard of it: nothing is aborted any more.
        reply = await ask(self._verbs, request, self._timeout)
        assert isinstance(reply, StagedDecision)
        self.won, self.applied = reply.won, reply.applied

    async def send(
        self,
        topic: str,
        value: Buffer | None,
        *,
        key: Buffer | None = None,
        partition: int | None = None,
        headers: Headers | None = None,
        timestamp: datetime | int | None = None,
        priority: int | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | int | None = None,
        ttl: float | None = None,
        expires_at: datetime | int | None = None,
    ) -> None:
        """Add a message. It is readable when the block has ended and the version was won; with a `delay`
        (seconds or a timedelta from now) or a time to `deliver_at` not before that."""
        self._require_whole()
        if self._state != "open":
            raise InvalidRequest("send: only inside of `async with client.atomic(…)`")
        known = await self._topic(topic)
        fields = check_fields(
            value,
            known.value_max,
            key=key,
            headers=headers,
            timestamp=timestamp,
            priority=priority,
            ttl=ttl,
            expires_at=expires_at,
            delay=delay,
            deliver_at=deliver_at,
            now_us=self._wall_ns() // 1000,
        )
        at = _place(known, fields.get("key"), partition)
        part = self._parts.get((topic, at))
        if part is None:
            part = self._parts[topic, at] = _Part(topic, at)
        if part.nbytes and part.nbytes + fields["size"] > STAGE_BYTES:
            await self._stage(part)
        part.rows.append(fields)
        part.nbytes += fields["size"]
        if len(part.rows) >= STAGE_ROWS or part.nbytes >= STAGE_BYTES:
            known.turn = (known.turn + 1) % known.partitions
            await self._stage(part)

    async def _topic(self, topic: str) -> _TopicShare:
        known = self._topics.get(topic)
        if known is None:
            info = await ask(self._verbs, DescribeTopic(topic), self._timeout)
            assert isinstance(info, TopicInfo)
            known = self._topics.setdefault(topic, _TopicShare(info))
        return known

    async def _stage(self, part: _Part) -> None:
        """Store what is gathered for a partition; sent again it is stored once, because of its number."""
        async with part.lock:
            if not part.rows:
                return
            rows, part.rows, part.nbytes = part.rows, [], 0
            try:
                for delayed in (False, True):
                    some = [fields for fields in rows if ("deliver_at" in fields) == delayed]
                    if some:
                        await self._stage_batch(part, some)
            except BaseException:
                self._failed = True
                raise

    async def _stage_batch(self, part: _Part, rows: list[Fields]) -> None:
        """One batch; delayed messages are batches of their own, because in those every row has its time."""
        number = part.batches
        part.batches += 1
        columns, body = _encode(rows, self._wall_ns() // 1000)
        request = StageRows(
            part.topic, part.partition, self.writer, self.attempt, columns, crc32c(body), number
        )
        await ask(self._verbs, request, self._timeout, body=body)

    def _require_whole(self) -> None:
        if self._failed:
            raise InvalidRequest("messages could not be staged before: nothing of this is written")

    def _attempts(self) -> list[tuple[str, int, str]]:
        return [(part.topic, part.partition, self.attempt) for part in self._parts.values() if part.batches]

    async def _abort(self) -> None:
        places = self._attempts()
        if places:
            with suppress(TailraceError):  # What stays behind expires.
                await ask(self._verbs, AbortStaged(self.writer, places), min(self._timeout, ABORT_S))


def _place(topic: _TopicShare, key: bytes | None, partition: int | None) -> int:
    if partition is not None:
        if type(partition) is not int or not 0 <= partition < topic.partitions:
            raise NotFound(f"partition: 0 to {topic.partitions - 1}, not {partition!r}")
        return partition
    return topic.turn if key is None else partition_of(key, topic.partitions)


def _encode(rows: list[Fields], now_us: int) -> tuple[int, Buffer]:
    """The columns and the body of messages that were checked."""

    def column(name: str, default: Any = None) -> list[Any] | None:
        items = [fields.get(name) for fields in rows]
        if all(item is None for item in items):
            return None
        return [default if item is None else item for item in items]

    ids = arrow.make_ids(len(rows), now_us // 1000, secrets.randbits(62), secrets.randbits(12))
    return arrow.encode(
        [fields["value"] for fields in rows],
        ids=ids,
        timestamps=column("timestamp", now_us) or now_us,
        keys=column("key"),
        headers=column("headers"),
        priorities=column("priority", PRIORITY_DEFAULT),
        deliver_at=column("deliver_at"),
        expires_at=column("expires_at"),
    )
