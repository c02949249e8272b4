"""DataFrame columns into messages: which column is which field, the checks of every row, and who gets it.

A batch of rows is checked and turned into columns of messages as a whole (`MessageColumns.fields`), sorted by
target (`Sorting.add`) and gathered there until there is enough for one good body, a `Parcel`. Nothing here
talks to a broker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.model import (
    HAS_DELIVER_AT,
    HAS_EXPIRES_AT,
    HAS_HEADERS,
    HAS_KEY,
    HAS_PRIORITY,
    HEADER_BYTES_MAX,
    KEY_BYTES_MAX,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    TIMESTAMP_AHEAD_US_MAX,
    partition_of,
)
from tailrace.errors import InvalidRequest, TooLarge
from tailrace.format.batch import TIME_US_END
from tailrace.format.builder import body_of, hashes_of, make_ids
from tailrace.format.frame import Buffer, crc32c
from tailrace.format.schema import HEADERS, TIME, schema_of

PARCEL_ROWS = 5_000
PARCEL_BYTES = 1024 * 1024
GATHERED_BYTES_MAX = 32 * 1024 * 1024
"""What one task holds back, for all targets together, to make good parcels of it."""
ROW_BYTES = 48
"""What a message takes besides its value and its key, about."""
SPAN_MS_MAX = TIME_US_END // 1000

_BYTES = ("binary", "string")
_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_MAPS = ("map<string,binary>", "map<string,string>")
KINDS: dict[str, tuple[str, ...]] = {
    "value": _BYTES,
    "key": _BYTES,
    "headers": _MAPS,
    "timestamp": ("timestamp",),
    "priority": _INTEGERS,
    "deliver_at": ("timestamp",),
    "delay_ms": _INTEGERS,
    "expires_at": ("timestamp",),
    "ttl_ms": _INTEGERS,
    "topic": ("string",),
    "partition": _INTEGERS,
}
"""The columns that mean something, and the types of Spark that each may have."""
IGNORED = frozenset(("offset", "sequence", "id", "append_time"))
"""Columns of rows that were read from a topic and that writing gives anew."""
_OPTIONAL = (
    ("key", HAS_KEY),
    ("headers", HAS_HEADERS),
    ("priority", HAS_PRIORITY),
    ("deliver_at", HAS_DELIVER_AT),
    ("expires_at", HAS_EXPIRES_AT),
)

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Target(msgspec.Struct, frozen=True):
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


class MessageColumns(msgspec.Struct, frozen=True):
    """Which columns of a DataFrame are used, once they were checked; see `message_columns`."""

    names: list[str]
    """In the order of the DataFrame, unused ones too."""
    used: list[str]
    topic: str
    """Of all rows; "": each names its own."""

    def fields(self, batch: pa.RecordBatch, now_us: int, where: Where) -> dict[str, pa.Array]:
        """The used columns of a batch as fields of messages, in the types of bodies, every row checked for
        itself; nulls stand where a message has no such field. `key_hash` comes along with `key`."""
        given = {name: batch.column(place) for place, name in enumerate(self.names) if name in self.used}
        fields: dict[str, pa.Array] = {"value": given["value"].cast(pa.binary())}
        if "key" in given:
            fields["key"] = given["key"].cast(pa.binary())
            where.longest("key", pc.binary_length(fields["key"]), KEY_BYTES_MAX)
        _check_tombstones(fields, where)
        _add_times(fields, given, now_us, where)
        if "headers" in given:
            fields["headers"] = _headers(given["headers"], where)
        if "priority" in given:
            where.within("priority", given["priority"], 0, PRIORITY_MAX)
            fields["priority"] = given["priority"].cast(pa.uint8())
        for name in ("topic", "partition"):
            if name in given:
                fields[name] = given[name]
        return fields


def message_columns(kinds: Mapping[str, str], topic: str, keep_partition: bool) -> MessageColumns:
    """Check the columns of a DataFrame (names and Spark's names of their types); raises `InvalidRequest` with
    the name of the column. With a `topic`, all rows go there. Rows that were read from a topic (there is a
    column `offset`) choose their partition anew, unless it is to be kept."""
    for name, kind in kinds.items():
        if name in IGNORED:
            continue
        if name not in KINDS:
            known = ", ".join(KINDS)
            raise InvalidRequest(f"{name}: no column of a message; there are {known}. Drop it or rename it")
        if kind.replace(" ", "") not in KINDS[name]:
            raise InvalidRequest(f"{name}: {' or '.join(KINDS[name])} is needed, not {kind}")
    if "value" not in kinds:
        raise InvalidRequest(f"value: a column of that name is needed, there are {', '.join(kinds)}")
    if not topic and "topic" not in kinds:
        raise InvalidRequest("topic: name one by an option, or in a column of that name for each row")
    unused = set(IGNORED)
    if topic:
        unused.add("topic")
    if "offset" in kinds and not keep_partition:
        unused.add("partition")
    return MessageColumns(list(kinds), [name for name in kinds if name not in unused], topic)


class Where:
    """Where in the data a batch lies: errors name the column, the row and what is wrong with it."""

    def __init__(self, spark_partition: int, first_row: int, rows: Numbers | None = None) -> None:
        self._spark_partition = spark_partition
        self._first_row = first_row
        self._rows = rows

    def of(self, rows: Numbers) -> Where:
        """For a batch of only these rows."""
        return Where(self._spark_partition, self._first_row, rows)

    def row(self, row: int) -> str:
        """For people; rows count from 0 in each partition of the DataFrame."""
        place = row if self._rows is None else int(self._rows[row])
        return f"row {self._first_row + place} of Spark partition {self._spark_partition}"

    def refuse(self, name: str, bad: Mask, problem: str) -> None:
        """Raise for the first row that is marked, if any is."""
        if bad.any():
            raise InvalidRequest(f"{name}: {problem}, in {self.row(int(bad.argmax()))}")

    def within(self, name: str, column: pa.Array, least: int, most: int) -> None:
        """Every number that is there lies between these two."""
        if column.null_count == len(column):
            return
        limits = pc.min_max(column)
        if limits["min"].as_py() >= least and limits["max"].as_py() <= most:
            return
        numbers, present = _integers(column), _present(column)
        bad = present & ((numbers < least) | (numbers > most))
        found = int(numbers[int(bad.argmax())])
        self.refuse(name, bad, f"{least} to {most} are allowed, not {found}")

    def longest(self, name: str, lengths: pa.Array, limit: int) -> None:
        """Every length that is there is at most that."""
        longest = pc.max(lengths).as_py()
        if longest is None or longest <= limit:
            return
        sizes = _integers(lengths)
        row = int((sizes > limit).argmax())
        text = f"{name}: {sizes[row]} bytes in {self.row(row)}, at most {limit} are allowed"
        raise TooLarge(text, limit=limit)


def _present(column: pa.Array) -> Mask:
    return np.asarray(column.is_valid(), np.bool_)


def _integers(column: pa.Array) -> Numbers:
    """Whole numbers, or microseconds; 0 where there is none."""
    if not pa.types.is_int64(column.type):
        column = column.cast(pa.int64())
    return np.asarray(column.fill_null(0) if column.null_count else column)


def _check_tombstones(fields: Mapping[str, pa.Array], where: Where) -> None:
    value, key = fields["value"], fields.get("key")
    if value.null_count:
        bad = ~_present(value) if key is None else ~_present(value) & ~_present(key)
        where.refuse("value", bad, "null without a key; only a message with a key may have none")


def _add_times(fields: dict[str, pa.Array], given: Mapping[str, pa.Array], now_us: int, where: Where) -> None:
    """`timestamp`, and `deliver_at` and `expires_at` each from its column of times or of spans."""
    rows = len(fields["value"])
    fields["timestamp"] = (
        _times("timestamp", given["timestamp"], now_us, where) if "timestamp" in given else pa.nulls(rows, TIME)
    )
    for name, span in (("deliver_at", "delay_ms"), ("expires_at", "ttl_ms")):
        times = _times(name, given[name], now_us, where) if name in given else None
        spans = given.get(span)
        if spans is not None and spans.null_count < len(spans):
            if times is not None:
                where.refuse(span, _present(times) & _present(spans), f"together with {name}")
            where.within(span, spans, 0 if span == "delay_ms" else 1, SPAN_MS_MAX - now_us // 1000 - 1)
            moments = pa.array(_integers(spans) * 1000 + now_us, mask=~_present(spans)).view(TIME)
            times = moments if times is None else pc.coalesce(times, moments)
        if times is not None:
            fields[name] = times
    if "deliver_at" in fields:
        due = _integers(fields["deliver_at"])
        fields["deliver_at"] = pa.array(due, mask=due <= now_us).view(TIME)  # What is due is not delayed.


def _times(name: str, column: pa.Array, now_us: int, where: Where) -> pa.Array:
    times = column.cast(TIME)
    if times.null_count < len(times):
        numbers = _integers(times)
        where.refuse(name, (numbers < 0) | (numbers >= TIME_US_END), "not between the years 1970 and 9999")
        if name == "timestamp":
            ahead = numbers > now_us + TIMESTAMP_AHEAD_US_MAX
            where.refuse(name, ahead, "more than an hour ahead of the clock")
    return times


def _headers(column: pa.Array, where: Where) -> pa.Array:
    """Maps in the type of bodies; the names and values of all rows are two columns behind them."""
    if column.offset:
        column = column.take(pa.array(np.arange(len(column))))  # Its parts are those of the whole otherwise.
    names, values = column.keys.cast(pa.string()), column.items.cast(pa.binary())
    ends = np.asarray(column.offsets).astype(np.int64)
    present = _present(column)
    if values.null_count:
        entry = int((~_present(values)).argmax())
        row = int(np.searchsorted(ends, entry, "right")) - 1
        text = f"headers: {names[entry].as_py()!r} has no value in {where.row(row)}"
        raise InvalidRequest(text)
    sizes = _integers(pc.binary_length(names)) + _integers(pc.binary_length(values))
    totals = np.concatenate(([0], np.cumsum(sizes)))[ends]
    where.longest("headers", pa.array(totals[1:] - totals[:-1]), HEADER_BYTES_MAX)
    mask = None if present.all() else pa.array(~present)
    return pa.MapArray.from_arrays(pa.array(ends.astype(np.int32)), names, values, type=HEADERS, mask=mask)


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


class _Topic:
    """A topic that rows go to, and which partition gets those without a key."""

    def __init__(self, name: str, target: Target, first: int) -> None:
        self.name = name
        self.target = target
        self.turn = first % target.partitions
        self.bytes_of_turn = 0

    def pass_on(self, nbytes: int) -> None:
        """So many bytes without a key went to the partition whose turn it is."""
        self.bytes_of_turn += nbytes
        if self.bytes_of_turn >= PARCEL_BYTES:
            self.turn, self.bytes_of_turn = (self.turn + 1) % self.target.partitions, 0


class Sorting:
    """The rows of one task on their way to partitions. Those of one partition keep their order, but for
    delayed ones, whose time decides. Rows without a key go to one partition after the other, in blocks."""

    def __init__(
        self, columns: MessageColumns, describe: Callable[[str], Target], spark_partition: int
    ) -> None:
        self._columns = columns
        self._describe = describe
        self._spark_partition = spark_partition
        self._topics: dict[str, _Topic] = {}
        self._piles: dict[tuple[str, int, bool], _Pile] = {}
        self._rows = 0

    def add(self, batch: pa.RecordBatch, now_us: int) -> Iterator[Parcel]:
        """Take rows in; gives the parcels that are full."""
        if not batch.num_rows:
            return
        where = Where(self._spark_partition, self._rows)
        self._rows += batch.num_rows
        fields = self._columns.fields(batch, now_us, where)
        names = fields.pop("topic", None)
        messages = pa.RecordBatch.from_arrays(list(fields.values()), names=list(fields))
        if names is None:
            yield from self._add(self._columns.topic, messages, now_us, where)
        else:
            where.refuse("topic", ~_present(names), "null, and no option `topic` names one")
            for name in pc.unique(names).to_pylist():
                rows = np.flatnonzero(np.asarray(pc.equal(names, name), np.bool_))
                yield from self._add(name, messages.take(pa.array(rows)), now_us, where.of(rows))
        if sum(pile.nbytes for pile in self._piles.values()) > GATHERED_BYTES_MAX:
            yield from self.rest(now_us)

    def rest(self, now_us: int) -> Iterator[Parcel]:
        """What has gathered, however little."""
        for (topic, partition, _), pile in self._piles.items():
            if pile.rows:
                yield _parcel(topic, partition, pile.empty(), now_us)

    def _add(self, name: str, messages: pa.RecordBatch, now_us: int, where: Where) -> Iterator[Parcel]:
        """Rows that go to one topic."""
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = _Topic(name, self._describe(name), self._spark_partition)
        fields = dict(zip(messages.schema.names, messages.columns, strict=True))
        lengths = pc.binary_length(fields["value"])
        where.longest("value", lengths, topic.target.value_max)
        sizes = _integers(lengths) + ROW_BYTES
        if "key" in fields:
            sizes = sizes + _integers(pc.binary_length(fields["key"]))
        codes = 2 * _partitions(topic, fields, sizes, where)
        if "deliver_at" in fields:
            codes += _present(fields["deliver_at"])
        fields.pop("partition", None)
        messages = pa.RecordBatch.from_arrays(list(fields.values()), names=list(fields))
        for code, piece, ends in _groups(messages, codes, sizes):
            pile = self._piles.setdefault((name, code >> 1, bool(code & 1)), _Pile())
            for pieces in pile.put(piece, ends):
                yield _parcel(name, code >> 1, pieces, now_us)


def _partitions(topic: _Topic, fields: dict[str, pa.Array], sizes: Numbers, where: Where) -> Numbers:
    """The partition of every row; where there are keys, their hashes, which bodies have too, are added."""
    rows, count = len(sizes), topic.target.partitions
    codes = np.full(rows, topic.turn, np.int64)
    free = np.ones(rows, np.bool_)
    if "key" in fields:
        keys = fields["key"].to_pylist()
        free = ~_present(fields["key"])
        fields["key_hash"] = pa.array(hashes_of(keys)[:, 0], pa.uint64(), mask=free)
        if count > 1:
            turn = topic.turn
            each = (turn if key is None else partition_of(key, count) for key in keys)
            codes = np.fromiter(each, np.int64, rows)
    if "partition" in fields:
        where.within("partition", fields["partition"], 0, count - 1)
        given = _present(fields["partition"])
        codes, free = np.where(given, _integers(fields["partition"]), codes), free & ~given
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
    order = np.argsort(codes, kind="stable")
    messages, codes, sizes = messages.take(pa.array(order)), codes[order], sizes[order]
    bounds = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist(), len(codes)]
    for at, end in pairwise(bounds):
        yield int(codes[at]), messages.slice(at, end - at), np.cumsum(sizes[at:end])


def _parcel(topic: str, partition: int, pieces: list[pa.RecordBatch], now_us: int) -> Parcel:
    """One body of rows that were checked; a column in which no row has anything is left out."""
    table = pa.Table.from_batches(pieces).combine_chunks()
    rows = table.num_rows
    fields = {name: table.column(name).chunk(0) for name in table.column_names}
    columns = 0
    for name, bit in _OPTIONAL:
        if name in fields and fields[name].null_count < rows:
            columns |= bit
    if columns & HAS_PRIORITY:
        fields["priority"] = fields["priority"].fill_null(PRIORITY_DEFAULT)
    fields["timestamp"] = fields["timestamp"].fill_null(pa.scalar(now_us, TIME))
    bits = random.getrandbits(74)
    ids = make_ids(rows, now_us // 1000, bits & ((1 << 62) - 1), bits >> 62)
    fields["id"] = pa.Array.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(ids)])
    schema = schema_of(columns)
    batch = pa.RecordBatch.from_arrays([fields[name] for name in schema.names], schema=schema)
    body = body_of(batch, columns)
    return Parcel(topic, partition, rows, columns, crc32c(body), body)
