"""DataFrame columns into messages: which column is which field, and the checks of every row.

Columns are checked once, on the driver; a batch of rows is checked and turned into fields of messages as a
whole. Errors name the column and the row.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.model.identifiers import (
    HEADER_BYTES_MAX,
    KEY_BYTES_MAX,
    PRIORITY_MAX,
    TIMESTAMP_AHEAD_US_MAX,
)
from tailrace.errors import InvalidRequest, TooLarge
from tailrace.format.batch import TIME_US_END
from tailrace.format.schema import HEADERS, TIME

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

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


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
        numbers = integers(column)
        bad = present(column) & ((numbers < least) | (numbers > most))
        found = int(numbers[int(bad.argmax())])
        self.refuse(name, bad, f"{least} to {most} are allowed, not {found}")

    def longest(self, name: str, lengths: pa.Array, limit: int) -> None:
        """Every length that is there is at most that."""
        longest = pc.max(lengths).as_py()
        if longest is None or longest <= limit:
            return
        sizes = integers(lengths)
        row = int((sizes > limit).argmax())
        text = f"{name}: {sizes[row]} bytes in {self.row(row)}, at most {limit} are allowed"
        raise TooLarge(text, limit=limit)


def present(column: pa.Array) -> Mask:
    """Which rows have something."""
    return np.asarray(column.is_valid(), np.bool_)


def integers(column: pa.Array) -> Numbers:
    """Whole numbers, or microseconds; 0 where there is none."""
    if not pa.types.is_int64(column.type):
        column = column.cast(pa.int64())
    return np.asarray(column.fill_null(0) if column.null_count else column)


def _check_tombstones(fields: Mapping[str, pa.Array], where: Where) -> None:
    value, key = fields["value"], fields.get("key")
    if value.null_count:
        bad = ~present(value) if key is None else ~present(value) & ~present(key)
        where.refuse("value", bad, "null without a key; only a message with a key may have none")


def _add_times(fields: dict[str, pa.Array], given: Mapping[str, pa.Array], now_us: int, where: Where) -> None:
    """`timestamp`, and `deliver_at` and `expires_at` each from its column of times or of spans."""
    rows = len(fields["value"])
    fields["timestamp"] = (
        _times("timestamp", given["timestamp"], now_us, where)
        if "timestamp" in given
        else pa.nulls(rows, TIME)
    )
    for name, span in (("deliver_at", "delay_ms"), ("expires_at", "ttl_ms")):
        times = _times(name, given[name], now_us, where) if name in given else None
        spans = given.get(span)
        if spans is not None and spans.null_count < len(spans):
            if times is not None:
                where.refuse(span, present(times) & present(spans), f"together with {name}")
            where.within(span, spans, 0 if span == "delay_ms" else 1, SPAN_MS_MAX - now_us // 1000 - 1)
            moments = pa.array(integers(spans) * 1000 + now_us, mask=~present(spans)).view(TIME)
            times = moments if times is None else pc.coalesce(times, moments)
        if times is not None:
            fields[name] = times
    if "deliver_at" in fields:
        due = integers(fields["deliver_at"])
        fields["deliver_at"] = pa.array(due, mask=due <= now_us).view(TIME)  # What is due is not delayed.


def _times(name: str, column: pa.Array, now_us: int, where: Where) -> pa.Array:
    times = column.cast(TIME)
    if times.null_count < len(times):
        numbers = integers(times)
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
    given = present(column)
    if values.null_count:
        entry = int((~present(values)).argmax())
        row = int(np.searchsorted(ends, entry, "right")) - 1
        text = f"headers: {names[entry].as_py()!r} has no value in {where.row(row)}"
        raise InvalidRequest(text)
    mask = None if given.all() else pa.array(~given)
    column = pa.MapArray.from_arrays(pa.array(ends.astype(np.int32)), names, values, type=HEADERS, mask=mask)
    where.longest("headers", pa.array(header_sizes(column)), HEADER_BYTES_MAX)
    return column


def header_sizes(column: pa.Array) -> Numbers:
    """The bytes of the names and values of each row; the column is no slice of another."""
    sizes = integers(pc.binary_length(column.keys)) + integers(pc.binary_length(column.items))
    totals = np.concatenate(([0], np.cumsum(sizes)))[np.asarray(column.offsets)]
    found: Numbers = totals[1:] - totals[:-1]
    return found
