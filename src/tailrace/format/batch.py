"""Bodies of data and scheduled frames: making, checking and reading them.

`encode`, `encode_one`, `encode_table` and `make_ids` are for producers. `open_body` is for the broker: it
proves that a foreign body is exactly what its columns say, measures it, and makes the `BatchView` for the
core. `view_of` makes the same view of a stored frame. `decode` and `with_positions` are for readers; `take`
keeps some of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.core.model.identifiers import (
    BATCH_BYTES_MAX,
    DEDUP_ID_BYTES_MAX,
    HAS_DEDUP_ID,
    HAS_DELIVER_AT,
    HAS_EXPIRES_AT,
    HAS_HEADERS,
    HAS_KEY,
    HAS_OFFSET_DELTA,
    HAS_PRIORITY,
    HASH_OF_EMPTY,
    HEADER_BYTES_MAX,
    KEY_BYTES_MAX,
    PRIORITY_MAX,
    VALUE_BYTES_MAX,
    BatchView,
    Hashes,
    Times,
)
from tailrace.errors import Corrupt, InvalidRequest, TailraceError, TooLarge
from tailrace.format.builder import body_of, encode, encode_one, hashes_of, make_ids
from tailrace.format.frame import Buffer, Header
from tailrace.format.message import MessageLayout, inspect
from tailrace.format.schema import buffers_of, numbers_of, schema_of
from tailrace.format.tabular import encode_table, with_positions

__all__ = [
    "TIME_US_END",
    "body_of",
    "decode",
    "encode",
    "encode_one",
    "encode_table",
    "make_ids",
    "open_body",
    "schema_of",
    "stored",
    "take",
    "view_of",
    "with_positions",
]

TIME_US_END = 253_402_300_800_000_000
"""The year 10000. Times of a batch lie in [0, TIME_US_END), which every reader can represent."""

Numbers = npt.NDArray[Any]

_EMPTY = np.array(HASH_OF_EMPTY, np.uint64)


class _Opened:
    """A proved body: pyarrow's view of it, and its plain buffers for numpy, which is faster on small ones."""

    __slots__ = ("batch", "body", "columns", "flat", "message")

    def __init__(self, body: Buffer, columns: int, bytes_max: int) -> None:
        schema = schema_of(columns)
        self.body, self.columns = body, columns
        self.message: MessageLayout = inspect(body, columns, bytes_max=bytes_max)
        try:
            self.batch = pa.ipc.read_record_batch(body, schema)
            self.batch.validate(full=True)
        except MemoryError:  # Not the sender's fault: all sizes are limited by now.
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise InvalidRequest(f"batch: {error}") from None
        for name, node in never_null(columns):
            if self.message.nodes[2 * node + 1]:
                raise InvalidRequest(f"{name}: a row is null")
        self.flat: list[Any] | None = None
        if self.message.compressed:  # The buffers of the body are not those of the columns.
            self.flat = [buffer for column in self.batch.columns for buffer in column.buffers()]

    def numbers(self, buffer: int, dtype: str, count: int) -> Numbers:
        """The first `count` numbers of a buffer, not copied; `validate` has proved that they exist."""
        if self.flat is not None:
            return np.frombuffer(self.flat[buffer], dtype, count)
        return np.frombuffer(self.body, dtype, count, self.message.start + self.message.buffers[2 * buffer])

    def valid(self, name: str) -> npt.NDArray[np.bool_] | None:
        """Which rows of a column are not null; None if no row is null."""
        node, buffer = buffers_of(self.columns)[name]
        if not self.message.nodes[2 * node + 1]:
            return None
        rows = self.message.rows
        bits = self.numbers(buffer, "u1", (rows + 7) // 8)
        return np.unpackbits(bits, count=rows, bitorder="little").view(np.bool_)

    def column(self, name: str, dtype: str, extra: int = 0) -> Numbers:
        """The numbers of a column or, with `extra` = 1, the offsets of a column of variable length."""
        return self.numbers(buffers_of(self.columns)[name][1] + 1, dtype, self.message.rows + extra)

    def hashes(self, name: str) -> Hashes:
        """`hash128` of the items of a column: only a null is all zero, an empty item is not."""
        hashes = hashes_of(self.batch.column(name).to_pylist())
        empty = (hashes[:, 0] == 0) & (hashes[:, 1] == 0)
        if empty.any():
            valid = self.valid(name)
            hashes = hashes.copy()
            hashes[empty if valid is None else empty & valid] = _EMPTY
        return hashes


@cache
def never_null(columns: int) -> list[tuple[str, int]]:
    """Names and field nodes of the columns that have a value in every row."""
    places = buffers_of(columns)
    return [(field.name, places[field.name][0]) for field in schema_of(columns) if not field.nullable]


def decode(body: Buffer, columns: int) -> pa.RecordBatch:
    """The rows of a body for a reader, not copied; raises `Corrupt` if the body does not fit its header."""
    return _reopen(body, columns).batch


def stored(body: Buffer, columns: int) -> pa.RecordBatch:
    """The rows of a body that was proved when it was published, and whose checksum was right when it was read
    back. The proof, which costs several times as much as opening the body, is not repeated."""
    try:
        return pa.ipc.read_record_batch(body, schema_of(columns))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Corrupt(f"the body of a frame cannot be read: {error}") from error


def _reopen(body: Buffer, columns: int) -> _Opened:
    try:
        return _Opened(body, columns, BATCH_BYTES_MAX)
    except TailraceError as error:
        raise Corrupt(f"the body of a frame cannot be read: {error.message}") from error


def take(body: Buffer, columns: int, rows: Sequence[int] | npt.NDArray[np.int64]) -> Buffer:
    """A body of only these rows, in this order."""
    return body_of(decode(body, columns).take(numbers_of(rows)), columns)


def view_of(header: Header, body: Buffer, want_keys: bool = False, want_ids: bool = False) -> BatchView:
    """The view of a stored, checked frame; the body is opened only for wanted columns that it has."""
    columns = header.columns
    keys = dedup_ids = deliver_at = ids = priorities = None
    wanted = HAS_PRIORITY | HAS_DEDUP_ID | (HAS_KEY if want_keys else 0)
    if columns & wanted or want_ids:
        opened = _reopen(body, columns)
        if opened.message.rows != header.count:
            raise Corrupt(f"a frame of {header.count} rows has a body of {opened.message.rows}")
        keys = opened.hashes("key") if want_keys and columns & HAS_KEY else None
        dedup_ids = opened.hashes("dedup_id") if columns & HAS_DEDUP_ID else None
        priorities = opened.column("priority", "u1") if columns & HAS_PRIORITY else None
        if want_ids:
            deliver_at, ids = _delays(opened)
    return BatchView(
        header.count,
        columns,
        header.length,
        header.timestamp_max_us,
        keys=keys,
        dedup_ids=dedup_ids,
        deliver_at_us=deliver_at,
        ids=ids,
        priorities=priorities,
    )


def _delays(opened: _Opened) -> tuple[Times | None, Hashes]:
    """The due time of each row, and its id as two big-endian halves; copies, because they outlive the
    body."""
    ids = opened.numbers(buffers_of(opened.columns)["id"][1] + 1, ">u8", 2 * opened.message.rows)
    deliver_at = None
    if opened.columns & HAS_DELIVER_AT:
        deliver_at = opened.column("deliver_at", "<i8").astype(np.int64)
    return deliver_at, ids.astype(np.uint64).reshape(-1, 2)


def open_body(
    body: Buffer,
    columns: int,
    *,
    want_keys: bool = False,
    bytes_max: int = BATCH_BYTES_MAX,
    header_bytes_max: int = HEADER_BYTES_MAX,
) -> tuple[BatchView, pa.RecordBatch]:
    """Prove that a foreign body is valid and within all limits; raises `InvalidRequest` or `TooLarge`."""
    if columns & HAS_OFFSET_DELTA:
        raise InvalidRequest("offset_delta: only compaction writes this column")
    opened = _Opened(body, columns, bytes_max)
    timestamp_max = _check_times(opened, "timestamp")
    value_max = _longest(opened, "value", VALUE_BYTES_MAX)
    key_max = header_max = 0
    keys = dedup_ids = deliver_at = ids = priorities = None
    if columns & HAS_KEY:
        key_max = _longest(opened, "key", KEY_BYTES_MAX)
        keys = _check_keys(opened, want_keys)
    _check_tombstones(opened)
    if columns & HAS_HEADERS:
        header_max = _check_headers(opened, header_bytes_max)
    if columns & HAS_PRIORITY:
        priorities = _check_priorities(opened)
    if columns & HAS_DELIVER_AT:
        if opened.valid("deliver_at") is not None:
            raise InvalidRequest("deliver_at: a batch is delayed as a whole, and a row has no time")
        _check_times(opened, "deliver_at")
        deliver_at, ids = _delays(opened)
    if columns & HAS_EXPIRES_AT:
        _check_times(opened, "expires_at")
    if columns & HAS_DEDUP_ID:
        _longest(opened, "dedup_id", DEDUP_ID_BYTES_MAX)
        dedup_ids = opened.hashes("dedup_id")
    rows, sizes = opened.message.rows, (key_max, header_max, value_max)
    view = BatchView(
        rows, columns, len(body), timestamp_max, *sizes, keys, dedup_ids, deliver_at, ids, priorities
    )
    return view, opened.batch


def _longest(opened: _Opened, name: str, limit: int) -> int:
    """Length of the longest item; refuses a longer one than the limit."""
    offsets = opened.column(name, "<i4", 1)
    return _within(offsets[1:] - offsets[:-1], name, limit)


def _within(lengths: Numbers, name: str, limit: int) -> int:
    longest = int(lengths.max())
    if longest > limit:
        row = int(lengths.argmax())
        raise TooLarge(f"{name}: {longest} bytes in row {row}, at most {limit} are allowed", limit=limit)
    return longest


def _check_times(opened: _Opened, name: str) -> int:
    """The greatest time; refuses times outside of the years 1970 to 9999. Nulls are fine."""
    times = opened.column(name, "<i8")
    valid = opened.valid(name)
    if valid is not None:
        times = times[valid]
        if not len(times):
            return 0
    greatest = int(times.max())
    if int(times.min()) < 0 or greatest >= TIME_US_END:
        raise InvalidRequest(f"{name}: times lie between the years 1970 and 9999")
    return greatest


def _check_keys(opened: _Opened, want: bool) -> Hashes | None:
    """Check that each key has a hash, and no other row. If keys are hashed anyway, check the hashes, too."""
    valid, hashed = opened.valid("key"), opened.valid("key_hash")
    if (valid is None) != (hashed is None) or not (valid is None or np.array_equal(valid, hashed)):  # type: ignore[arg-type]
        raise InvalidRequest("key_hash: must be there exactly where a key is")
    if not want:
        return None
    hashes = opened.hashes("key")
    plain = hashes[:, 0].copy()
    plain[(hashes == _EMPTY).all(axis=1)] = 0  # The murmur3 hash of an empty key, which is what is stored.
    wrong = plain != opened.column("key_hash", "<u8")
    if valid is not None:
        wrong &= valid
    if wrong.any():
        raise InvalidRequest(f"key_hash: row {int(wrong.argmax())} is not the hash of its key")
    return hashes


def _check_tombstones(opened: _Opened) -> None:
    valid = opened.valid("value")
    if valid is None:
        return
    keyed = opened.valid("key") if opened.columns & HAS_KEY else np.zeros(len(valid), np.bool_)
    if keyed is not None and not (valid | keyed).all():
        row = int((valid | keyed).argmin())
        raise InvalidRequest(f"value: null in row {row}, and only a message with a key may have none")


def _check_headers(opened: _Opened, limit: int) -> int:
    """Size of the largest headers of a row, names and values together."""
    node, buffer = buffers_of(opened.columns)["headers"]
    _, _, entries, entry_nulls, _, name_nulls, _, value_nulls = opened.message.nodes[2 * node : 2 * node + 8]
    if entry_nulls or name_nulls or value_nulls:
        raise InvalidRequest("headers: a name or a value is null")
    if not entries:
        return 0
    rows = opened.column("headers", "<i4", 1)
    names = opened.numbers(buffer + 4, "<i4", entries + 1)
    values = opened.numbers(buffer + 7, "<i4", entries + 1)
    sizes = (names.astype(np.int64) + values)[rows]
    return _within(sizes[1:] - sizes[:-1], "headers", limit)


def _check_priorities(opened: _Opened) -> Numbers:
    priorities = opened.column("priority", "u1")
    row = int(priorities.argmax())
    if priorities[row] > PRIORITY_MAX:
        raise InvalidRequest(f"priority: {priorities[row]} in row {row}, 0 to {PRIORITY_MAX} are allowed")
    return priorities
