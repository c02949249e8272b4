"""Rows on their way to partitions: sorted by target, and gathered there until they make a good body.

Nothing here talks to a broker: what a task does with its parcels is `tailrace.spark.sink.staged_tasks`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import mmh3
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.model.identifiers import (
    HAS_DELIVER_AT,
    HAS_EXPIRES_AT,
    HAS_HEADERS,
    HAS_KEY,
    HAS_PRIORITY,
    PRIORITY_DEFAULT,
)
from tailrace.format.builder import hashes_of, join_columns, make_ids
from tailrace.format.frame import Buffer, crc32c
from tailrace.format.schema import TIME
from tailrace.format.tabular import all_default
from tailrace.spark.sink.message_columns import (
    MessageColumns,
    Numbers,
    Where,
    header_sizes,
    integers,
    present,
)

PARCEL_ROWS = 5_000
PARCEL_BYTES = 1024 * 1024
ROWS_TOGETHER = 8_000
BYTES_TOGETHER = 2 * 1024 * 1024
"""Batches that are smaller are sorted together: a call of Arrow takes about as long for a few rows as for
some thousand."""
GATHERED_BYTES_MAX = 32 * 1024 * 1024
"""What one task holds back, for all targets together, to make good parcels of it."""
ROW_BYTES = 48
"""What a message takes besides its value, key and headers, about."""
_partition_hash = mmh3.mmh3_32_uintdigest
"""That of `core.model.identifiers.partition_of`, without a call in between for each row."""
_OPTIONAL = (
    ("key", HAS_KEY),
    ("headers", HAS_HEADERS),
    ("priority", HAS_PRIORITY),
    ("deliver_at", HAS_DELIVER_AT),
    ("expires_at", HAS_EXPIRES_AT),
)


class TopicShape(msgspec.Struct, frozen=True):
    """What has to be known of a topic that is written to."""

    partitions: int
    value_max: int


class Parcel(msgspec.Struct, frozen=True, eq=False):
    """Messages for one partition, as a body to send."""

    topic: str
    partition: int
    rows: int
    columns: int
    crc: int
    body: Buffer


class _Pile:
    """Rows that gather for one target: a partition, and there those that are delayed apart from the rest."""

    def __init__(self) -> None:
        self.pieces: list[pa.RecordBatch] = []
        self.rows = 0
        self.nbytes = 0

    def put(self, piece: pa.RecordBatch, ends: Numbers) -> Iterator[list[pa.RecordBatch]]:
        """Add rows whose sizes add up to `ends`; gives what is full."""
        at = 0
        rows = piece.num_rows
        while at < rows:
            before = int(ends[at - 1]) if at else 0
            room = PARCEL_BYTES - self.nbytes + before
            end = min(int(np.searchsorted(ends, room, "right")), at + PARCEL_ROWS - self.rows, rows)
            if end <= at:
                if self.rows:
                    yield self.empty()
                    continue
                end = at + 1  # One message above the usual size of a parcel.
            self.pieces.append(piece.slice(at, end - at))
            self.rows += end - at
            self.nbytes += int(ends[end - 1]) - before
            at = end
            if self.rows >= PARCEL_ROWS or self.nbytes >= PARCEL_BYTES:
                yield self.empty()

    def empty(self) -> list[pa.RecordBatch]:
        """Take all there is."""
        pieces, self.pieces, self.rows, self.nbytes = self.pieces, [], 0, 0
        return pieces


class _TopicRows:
    """A topic that rows go to, and which partition gets those without a key."""

    def __init__(self, name: str, shape: TopicShape, first: int) -> None:
        self.name = name
        self.shape = shape
        self.turn = first % shape.partitions
        self.bytes_of_turn = 0

    def pass_on(self, nbytes: int) -> None:
        """So many bytes without a key went to the partition whose turn it is."""
        self.bytes_of_turn += nbytes
        if self.bytes_of_turn >= PARCEL_BYTES:
            self.turn, self.bytes_of_turn = (self.turn + 1) % self.shape.partitions, 0


class Sorting:
    """The rows of one task on their way to partitions. Those of one partition keep their order, but for
    delayed ones, whose time decides. Rows without a key go to one partition after the other, in blocks."""

    def __init__(
        self, columns: MessageColumns, describe: Callable[[str], TopicShape], spark_partition: int
    ) -> None:
        self._columns = columns
        self._describe = describe
        self._spark_partition = spark_partition
        self._topics: dict[str, _TopicRows] = {}
        self._piles: dict[tuple[str, int, bool], _Pile] = {}
        self._rows = 0
        self._held: list[pa.RecordBatch] = []
        self._held_rows = self._held_bytes = 0

    def add(self, batch: pa.RecordBatch, now_us: int) -> Iterator[Parcel]:
        """Take rows in; gives the parcels that are full."""
        self._held.append(batch)
        self._held_rows += batch.num_rows
        self._held_bytes += batch.nbytes
        if self._held_rows >= ROWS_TOGETHER or self._held_bytes >= BYTES_TOGETHER:
            yield from self._sort(now_us)

    def _sort(self, now_us: int) -> Iterator[Parcel]:
        held, self._held, self._held_rows, self._held_bytes = self._held, [], 0, 0
        batches = [batch for batch in held if batch.num_rows]
        if not batches:
            return
        batch = batches[0]
        if len(batches) > 1:
            (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
        where = Where(self._spark_partition, self._rows)
        self._rows += batch.num_rows
        fields = self._columns.fields(batch, now_us, where)
        names = fields.pop("topic", None)
        messages = pa.RecordBatch.from_arrays(list(fields.values()), names=list(fields))
        if names is None:
            yield from self._add(self._columns.topic, messages, now_us, where)
        else:
            where.refuse("topic", ~present(names), "null, and no option `topic` names one")
            for name in pc.unique(names).to_pylist():
                rows = np.flatnonzero(np.asarray(pc.equal(names, name), np.bool_))
                yield from self._add(name, messages.take(pa.array(rows)), now_us, where.of(rows))
        if sum(pile.nbytes for pile in self._piles.values()) > GATHERED_BYTES_MAX:
            yield from self.rest(now_us)

    def rest(self, now_us: int) -> Iterator[Parcel]:
        """What has gathered, however little."""
        yield from self._sort(now_us)
        for (topic, partition, _), pile in self._piles.items():
            if pile.rows:
                yield _parcel(topic, partition, pile.empty(), now_us)

    def _add(self, name: str, messages: pa.RecordBatch, now_us: int, where: Where) -> Iterator[Parcel]:
        """Rows that go to one topic."""
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = _TopicRows(name, self._describe(name), self._spark_partition)
        fields = dict(zip(messages.schema.names, messages.columns, strict=True))
        lengths = pc.binary_length(fields["value"])
        where.longest("value", lengths, topic.shape.value_max)
        sizes = integers(lengths) + ROW_BYTES
        if "key" in fields:
            sizes = sizes + integers(pc.binary_length(fields["key"]))
        if "headers" in fields:
            sizes = sizes + header_sizes(fields["headers"])
        codes = 2 * _partitions(topic, fields, sizes, where)
        if "deliver_at" in fields:
            codes += present(fields["deliver_at"])
        fields.pop("partition", None)
        messages = pa.RecordBatch.from_arrays(list(fields.values()), names=list(fields))
        for code, piece, ends in _groups(messages, codes, sizes):
            pile = self._piles.setdefault((name, code >> 1, bool(code & 1)), _Pile())
            for pieces in pile.put(piece, ends):
                yield _parcel(name, code >> 1, pieces, now_us)


def _partitions(topic: _TopicRows, fields: dict[str, pa.Array], sizes: Numbers, where: Where) -> Numbers:
    """The partition of every row; where there are keys, their hashes, which bodies have too, are added."""
    rows, count = len(sizes), topic.shape.partitions
    codes = np.full(rows, topic.turn, np.int64)
    free = np.ones(rows, np.bool_)
    if "key" in fields:
        free = ~present(fields["key"])
        keys = fields["key"].to_numpy(zero_copy_only=False).tolist()  # Many times as fast as `to_pylist`.
        fields["key_hash"] = pa.array(hashes_of(keys)[:, 0], pa.uint64(), mask=free)
        if count > 1:
            if fields["key"].null_count:
                keys = [key or b"" for key in keys]
            hashes = np.fromiter(map(_partition_hash, keys), np.int64, rows)
            codes = np.where(free, codes, hashes % count)
    if "partition" in fields:
        where.within("partition", fields["partition"], 0, count - 1)
        given = present(fields["partition"])
        codes, free = np.where(given, integers(fields["partition"]), codes), free & ~given
    topic.pass_on(int(sizes[free].sum()))
    return codes


def _groups(
    messages: pa.RecordBatch, codes: Numbers, sizes: Numbers
) -> Iterator[tuple[int, pa.RecordBatch, Numbers]]:
    """Rows with the same code together, in their order, and what their sizes add up to."""
    first = int(codes[0])
    if (codes == first).all():
        yield first, messages, np.cumsum(sizes)
        return
    # Numbers of two bytes are sorted several times as fast.
    order = np.argsort(codes.astype(np.int16) if codes.max() < 1 << 15 else codes, kind="stable")
    messages, codes, sizes = messages.take(pa.array(order)), codes[order], sizes[order]
    bounds = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist(), len(codes)]
    for at, end in pairwise(bounds):
        yield int(codes[at]), messages.slice(at, end - at), np.cumsum(sizes[at:end])


def _parcel(topic: str, partition: int, pieces: list[pa.RecordBatch], now_us: int) -> Parcel:
    """One body of rows that were checked; a column that says nothing is left out."""
    fields = {name: [piece.column(name) for piece in pieces] for name in pieces[0].schema.names}
    rows = sum(piece.num_rows for piece in pieces)
    columns = 0
    for name, bit in _OPTIONAL:
        if name in fields and sum(array.null_count for array in fields[name]) < rows:
            columns |= bit
    if columns & HAS_PRIORITY:
        fields["priority"] = [array.fill_null(PRIORITY_DEFAULT) for array in fields["priority"]]
        if all(all_default(array) for array in fields["priority"]):
            columns &= ~HAS_PRIORITY
    now = pa.scalar(now_us, TIME)
    fields["timestamp"] = [array.fill_null(now) for array in fields["timestamp"]]
    # Ids tell messages apart and keep nothing secret: they need not be hard to guess.
    bits = random.getrandbits(74)  # nosec B311
    ids = make_ids(rows, now_us // 1000, bits & ((1 << 62) - 1), bits >> 62)
    fields["id"] = [pa.Array.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(ids)])]
    body = join_columns(columns, rows, fields)
    return Parcel(topic, partition, rows, columns, crc32c(body), body)
