"""What the SDK hands to applications: messages, results of publishing, topics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Any
from uuid import UUID

import msgspec
import numpy as np
import pyarrow as pa

from tailrace.core.model.commands import (
    EARLIEST,
    LATEST,
    Published,
    TopicInfo,
)
from tailrace.core.model.identifiers import HAS_OFFSET_DELTA, PRIORITY_DEFAULT
from tailrace.errors import InvalidRequest, TailraceError
from tailrace.format import tabular
from tailrace.format.batch import stored
from tailrace.format.frame import Header
from tailrace.format.small import PlainRows

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def moment(time_us: int) -> datetime:
    """Microseconds since 1970 as an aware datetime."""
    return _EPOCH + timedelta(microseconds=time_us)


class Result(msgspec.Struct, frozen=True):
    """Where a message was stored. `duplicate` is true when its dedup id was known: offset is that of the
    first (None where that has none yet, or it is forgotten). A delayed message is `scheduled`: it has no
    offset before it is due.
    """

    topic: str
    partition: int
    offset: int | None
    duplicate: bool
    id_bytes: bytes
    append_time_us: int
    deliver_at_us: int | None = None

    @property
    def id(self) -> UUID:
        """The UUIDv7 that the producer gave it."""
        return UUID(bytes=self.id_bytes)

    @property
    def append_time(self) -> datetime:
        """The broker's time when it was appended."""
        return moment(self.append_time_us)

    @property
    def sequence(self) -> int | None:
        """Offset + 1: what `expected_sequence` speaks of."""
        return None if self.offset is None else self.offset + 1

    @property
    def scheduled(self) -> bool:
        """Whether it waits for its time; `Client.cancel` takes it back until then."""
        return self.deliver_at_us is not None

    @property
    def deliver_at(self) -> datetime | None:
        """When a scheduled message is due."""
        return None if self.deliver_at_us is None else moment(self.deliver_at_us)


class Topic(msgspec.Struct, frozen=True):
    """A topic: its options, and on describe one row per partition."""

    name: str
    id: int
    options: dict[str, Any]
    partitions: list[dict[str, Any]] = []
    created: bool = False

    @classmethod
    def of(cls, info: TopicInfo) -> Topic:
        """From the reply of the broker."""
        return cls(info.name, info.id, info.options, info.partitions, info.created)


class Rows:
    """A batch as read: columns are turned into Python lists when somebody first asks for them.

    The batch of a few plain rows is opened when somebody first asks for another column than the values, which
    is mostly never."""

    __slots__ = ("_batch", "_lists", "_plain", "base_offset", "deltas", "header", "partition", "topic")

    def __init__(self, topic: str, partition: int, header: Header, batch: pa.RecordBatch | PlainRows) -> None:
        self.topic = topic
        self.partition = partition
        self.header = header
        self._batch: Any = batch
        self._plain: list[bytes] | None = None
        """The values of plain rows; then `_batch` is their body until somebody asks for it."""
        self._lists: dict[str, list[Any] | None] | None = None
        """Made when needed: one dictionary for each message would be work for the garbage collector."""
        self.base_offset = header.base_offset
        self.deltas: list[int] | None = None
        if isinstance(batch, PlainRows):
            self._batch, self._plain = batch
        elif header.columns & HAS_OFFSET_DELTA:
            self.deltas = batch.column("offset_delta").to_pylist()

    @property
    def batch(self) -> pa.RecordBatch:
        """All of its columns."""
        if not isinstance(self._batch, pa.RecordBatch):
            self._batch = stored(self._batch, self.header.columns)
        return self._batch

    def offset(self, row: int) -> int:
        """Offset of a row."""
        return self.base_offset + (row if self.deltas is None else self.deltas[row])

    def first_row(self, offset: int) -> int:
        """The first row at or above an offset."""
        if self.deltas is None:
            return max(0, offset - self.base_offset)
        return int(np.searchsorted(self.deltas, offset - self.base_offset))

    def before(self, offset: int) -> Rows:
        """Those below an offset."""
        header = self.header
        if offset >= header.end_offset:
            return self
        count = self.first_row(offset)
        header = msgspec.structs.replace(header, count=count, span=offset - header.base_offset)
        return Rows(self.topic, self.partition, header, self.batch.slice(0, count))

    def values(self, name: str) -> list[Any] | None:
        """A column as a list; None when the batch does not have it."""
        if self._plain is not None and name == "value":
            return self._plain
        lists = self._lists
        if lists is None:
            lists = self._lists = {}
        elif name in lists:
            return lists[name]
        found = None
        if name in self.batch.schema.names:
            column = self.batch.column(name)
            if pa.types.is_timestamp(column.type):
                column = column.cast(pa.int64())
            found = column.to_pylist()
        lists[name] = found
        return found

    def messages(self, first: int) -> Iterator[Message]:
        """Messages from a row on."""
        values = self.values("value")
        assert values is not None
        if first:
            values = values[first:]
        return map(Message, repeat(self), values, range(first, first + len(values)))


class Message(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A message as read from a topic; everything but the value is looked up in its batch on demand."""

    rows: Rows
    value: bytes | None
    row: int

    def _get(self, name: str) -> Any:
        column = self.rows.values(name)
        return None if column is None else column[self.row]

    @property
    def topic(self) -> str:
        """Topic that it was read from."""
        return self.rows.topic

    @property
    def partition(self) -> int:
        """Partition that it was read from."""
        return self.rows.partition

    @property
    def offset(self) -> int:
        """Its place in the partition."""
        return self.rows.offset(self.row)

    @property
    def sequence(self) -> int:
        """Offset + 1."""
        return self.rows.offset(self.row) + 1

    @property
    def id(self) -> UUID:
        """The producer's UUIDv7."""
        return UUID(bytes=self._get("id"))

    @property
    def key(self) -> bytes | None:
        """The key, if it has one."""
        key: bytes | None = self._get("key")
        return key

    @property
    def headers(self) -> list[tuple[str, bytes]]:
        """Headers in the order given; names may repeat."""
        return list(self._get("headers") or ())

    @property
    def timestamp(self) -> datetime:
        """The producer's time."""
        return moment(self._get("timestamp"))

    @property
    def append_time(self) -> datetime:
        """The broker's time when it was appended."""
        return moment(self.rows.header.append_time_us)

    @property
    def priority(self) -> int:
        """0 critical to 4 background."""
        priority = self._get("priority")
        return PRIORITY_DEFAULT if priority is None else int(priority)

    @property
    def deliver_at(self) -> datetime | None:
        """When it was to be delivered, if it was delayed."""
        time_us = self._get("deliver_at")
        return None if time_us is None else moment(time_us)

    @property
    def expires_at(self) -> datetime | None:
        """When it stops being worth delivering."""
        time_us = self._get("expires_at")
        return None if time_us is None else moment(time_us)

    @property
    def dedup_id(self) -> bytes | None:
        """The dedup id that it was published with."""
        dedup_id: bytes | None = self._get("dedup_id")
        return dedup_id

    def __repr__(self) -> str:
        return f"Message({self.topic}/{self.partition}@{self.offset}, key={self.key!r}, value={self.value!r})"


class Stored(msgspec.Struct, frozen=True, eq=False):
    """What became of a batch, for the results of its messages."""

    topic: str
    partition: int
    ids: bytes
    reply: Published
    deliver_ats: Sequence[int] | None = None

    def result(self, row: int) -> Result:
        """The result of one message."""
        reply, duplicate = self.reply, False
        offset = reply.base_offset + row
        if reply.scheduled:
            before = bisect_left(reply.scheduled, row)
            if before < len(reply.scheduled) and reply.scheduled[before] == row:
                return self._waits(row)
            offset -= before
        for other, first in reply.duplicates or ():
            if other == row:
                offset, duplicate = first, True
                break
            if other < row:
                offset -= 1
        id_bytes = self.ids[16 * row : 16 * row + 16]
        known = None if offset < 0 else offset
        return Result(self.topic, self.partition, known, duplicate, id_bytes, reply.append_time_us)

    def _waits(self, row: int) -> Result:
        assert self.deliver_ats is not None, "only what has a time is delayed"
        id_bytes = self.ids[16 * row : 16 * row + 16]
        time_us, at_us = self.reply.append_time_us, self.deliver_ats[row]
        return Result(self.topic, self.partition, None, False, id_bytes, time_us, at_us)


class Pending:
    """What receipts need of a batch under way."""

    noticed = False
    """Whether somebody was told of its failure, or will be."""

    @property
    def done(self) -> bool:
        """Whether it is settled."""
        raise NotImplementedError

    def wait(self) -> Generator[Any, None, Stored]:
        """Suspend until the batch is settled; returns what was stored, or raises."""
        raise NotImplementedError


class Receipt:
    """Promise for one message; awaiting it gives the durable `Result` or raises why there is none."""

    __slots__ = ("batch", "row")

    def __init__(self, batch: Pending, row: int) -> None:
        self.batch = batch
        """What it travels with."""
        self.row = row
        """Where it is there."""

    def __await__(self) -> Generator[Any, None, Result]:
        stored = yield from self.batch.wait()
        return stored.result(self.row)

    def known(self) -> Result | None:
        """The result, or its failure raised, when the batch is settled; None while it is under way. Can be
        asked from any thread."""
        if self.batch.done:
            try:
                next(self.__await__())
            except StopIteration as end:
                result: Result = end.value
                return result
        return None


class Receipts:
    """Promise for several messages; awaiting it gives their results in the order sent."""

    __slots__ = ("_places",)

    def __init__(self, places: Sequence[tuple[Pending, range | Sequence[int], Sequence[int] | None]]) -> None:
        # (batch, rows in the batch, places in the caller's list; None = the next ones in order)
        self._places = places

    def __len__(self) -> int:
        return sum(len(rows) for _, rows, _ in self._places)

    def __await__(self) -> Generator[Any, None, list[Result]]:
        results: list[Any] = [None] * len(self)
        at = 0
        for number, (batch, rows, places) in enumerate(self._places):
            try:
                stored = yield from batch.wait()
            except TailraceError:
                for other, _, _ in self._places[number:]:
                    other.noticed = True  # One failure stands for all of them.
                raise
            for index, row in enumerate(rows):
                results[at + index if places is None else places[index]] = stored.result(row)
            at += len(rows)
        return results


def to_us(time: datetime | int | float, what: str, fail: Callable[[str], Exception]) -> int:
    """A datetime (aware), or microseconds, as microseconds."""
    if isinstance(time, datetime):
        if time.tzinfo is None:
            raise fail(f"{what}: {time!r} has no time zone; use datetime.now(timezone.utc) or the like")
        return (time - _EPOCH) // timedelta(microseconds=1)
    if isinstance(time, bool) or not isinstance(time, int):
        raise fail(f"{what}: a datetime or microseconds since 1970, not {type(time).__name__}")
    return time


def public_batch(rows: Rows, first: int) -> pa.RecordBatch:
    """A read batch with its place in the log, as `Reader.batches` gives it."""
    batch = tabular.with_positions(rows.batch, rows.header, rows.topic, rows.partition)
    return batch.slice(first) if first else batch


def point(at: str | int | datetime) -> int:
    """A point in a log as the broker's verbs name it."""
    if at == "earliest":
        return EARLIEST
    if at == "latest":
        return LATEST
    if isinstance(at, str):
        raise InvalidRequest(f'a point in the log is "earliest", "latest" or a time, not {at!r}')
    time_us = to_us(at, "time", InvalidRequest)
    return max(0, time_us)
