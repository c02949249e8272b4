"""Bodies of data and scheduled frames: messages into Arrow and back, and the check of every foreign body.

`encode` and `make_ids` are the producer's side. `open_body` is the broker's: it proves that a foreign body
is exactly what its columns say, measures it and gives the core its `BatchView`. `view_of` makes the same view
of a stored frame, `decode` is for readers, `take` rewrites a body with some of its rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mmh3
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.core.model import (
    BATCH_BYTES_MAX,
    BATCH_ROWS_MAX,
    DEDUP_ID_BYTES_MAX,
    HAS_DEDUP_ID,
    HAS_DELIVER_AT,
    HAS_EXPIRES_AT,
    HAS_HEADERS,
    HAS_KEY,
    HAS_OFFSET_DELTA,
    HAS_PRIORITY,
    HEADER_BYTES_MAX,
    KEY_BYTES_MAX,
    PRIORITY_MAX,
    VALUE_BYTES_MAX,
    BatchView,
    Hashes,
)
from tailrace.errors import Corrupt, InvalidRequest, TailraceError, TooLarge
from tailrace.format.frame import Buffer, Header
from tailrace.format.message import Message, Part, assemble, inspect
from tailrace.format.schema import positions, schema_of

TIME_US_END = 253_402_300_800_000_000
"""The year 10000: times of a batch lie in [0, TIME_US_END), which every reader can represent."""

Headers = Mapping[str, bytes] | Iterable[tuple[str, bytes]]
Times = int | Sequence[int | None] | npt.NDArray[np.int64]

_digest = mmh3.mmh3_x64_128_digest
_MASK62 = (1 << 62) - 1


def make_ids(count: int, unix_ms: int, random_bits_62: int, head_bits_12: int) -> bytes:
    """`count` UUIDv7 of one millisecond, 16 bytes each: one head, a random tail that counts up and wraps."""
    high = unix_ms << 16 | 0x7000 | head_bits_12
    if count == 1:
        return struct.pack(">QQ", high, 1 << 63 | random_bits_62)
    ids = np.empty((count, 2), ">u8")
    ids[:, 0] = high
    tail = np.arange(count, dtype=np.uint64) + np.uint64(random_bits_62)
    ids[:, 1] = (tail & np.uint64(_MASK62)) | np.uint64(1 << 63)
    return ids.tobytes()


def encode(
    values: Sequence[Buffer | None],
    *,
    ids: bytes,
    timestamps: Times,
    keys: Sequence[Buffer | None] | None = None,
    headers: Sequence[Headers | None] | None = None,
    priorities: Sequence[int] | None = None,
    deliver_at: Times | None = None,
    expires_at: Times | None = None,
    dedup_ids: Sequence[Buffer | None] | None = None,
    compression: str | None = None,
) -> tuple[int, Buffer]:
    """The columns and the body of a batch; a column of Nones is left out, one int of time is for all rows."""
    rows = len(values)
    if not 0 < rows <= BATCH_ROWS_MAX or len(ids) != 16 * rows:
        raise InvalidRequest(f"batch: {rows} values, {len(ids) // 16} ids; 1 to {BATCH_ROWS_MAX} are allowed")
    columns, nodes = 0, [rows, 0]
    parts: list[Part] = [(0, ()), (16 * rows, (ids,))]
    _add_binary(values, nodes, parts)
    _add_times(timestamps, rows, nodes, parts)
    if keys is not None and _some(keys, rows, "keys"):
        columns |= HAS_KEY
        _add_keys(keys, nodes, parts)
    if headers is not None and _some(headers, rows, "headers"):
        columns |= HAS_HEADERS
        _add_headers(headers, nodes, parts)
    if priorities is not None and _some(priorities, rows, "priorities"):
        columns |= HAS_PRIORITY
        nodes += (rows, 0)
        parts += ((0, ()), (rows, (bytes(priorities),)))
    for bit, times in ((HAS_DELIVER_AT, deliver_at), (HAS_EXPIRES_AT, expires_at)):
        if times is not None and (isinstance(times, int) or _some(times, rows, "times")):
            columns |= bit
            _add_times(times, rows, nodes, parts)
    if dedup_ids is not None and _some(dedup_ids, rows, "dedup_ids"):
        columns |= HAS_DEDUP_ID
        _add_binary(dedup_ids, nodes, parts)
    body = assemble(columns, rows, nodes, parts)
    if compression is None:
        return columns, body
    return columns, body_of(pa.ipc.read_record_batch(body, schema_of(columns)), columns, compression)


def _some(items: Sequence[Any] | npt.NDArray[Any], rows: int, what: str) -> bool:
    if len(items) != rows:
        raise InvalidRequest(f"{what}: {len(items)} for {rows} values")
    return isinstance(items, np.ndarray) or any(item is not None for item in items)


def _validity(present: list[bool]) -> bytes:
    return np.packbits(present, bitorder="little").tobytes()


def _offsets(lengths: list[int]) -> tuple[int, bytes]:
    """The total and the packed Arrow offsets of pieces of these lengths."""
    if len(lengths) == 1:
        return lengths[0], struct.pack("<ii", 0, lengths[0])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return int(offsets[-1]), offsets.astype("<i4").tobytes()


def _add_binary(items: Sequence[Buffer | None], nodes: list[int], parts: list[Part]) -> None:
    rows, nulls, validity = len(items), 0, b""
    try:
        lengths = list(map(len, items))  # type: ignore[arg-type]
    except TypeError:  # a None among them
        present = [item is not None for item in items]
        nulls, validity = rows - sum(present), _validity(present)
        items = [b"" if item is None else item for item in items]
        lengths = list(map(len, items))  # type: ignore[arg-type]
    total, offsets = _offsets(lengths)
    if total > BATCH_BYTES_MAX:
        raise TooLarge(f"batch: {total} bytes, at most {BATCH_BYTES_MAX} are allowed", limit=BATCH_BYTES_MAX)
    nodes += (rows, nulls)
    parts += ((len(validity), (validity,)), (len(offsets), (offsets,)), (total, items))  # type: ignore[arg-type]


def _add_times(times: Times, rows: int, nodes: list[int], parts: list[Part]) -> None:
    nulls, validity = 0, b""
    if isinstance(times, int):
        packed = struct.pack("<q", times) * rows
    elif isinstance(times, np.ndarray):
        packed = times.astype("<i8", copy=False).tobytes()
    else:
        if None in times:
            present = [time is not None for time in times]
            nulls, validity = rows - sum(present), _validity(present)
            times = [time or 0 for time in times]
        packed = struct.pack(f"<{rows}q", *times)
    if len(packed) != 8 * rows:
        raise InvalidRequest(f"times: {len(packed) // 8} for {rows} values")
    nodes += (rows, nulls)
    parts += ((len(validity), (validity,)), (8 * rows, (packed,)))


def _add_keys(keys: Sequence[Buffer | None], nodes: list[int], parts: list[Part]) -> None:
    """The keys, and the low halves of their hashes with the same validity."""
    _add_binary(keys, nodes, parts)
    length, validity = parts[-3]
    hashes = _hashes(keys)[:, 0].tobytes()
    nodes += nodes[-2:]
    parts += ((length, validity), (len(hashes), (hashes,)))


def _add_headers(headers: Sequence[Headers | None], nodes: list[int], parts: list[Part]) -> None:
    """A map is a list of entries: offsets, then the names and the values of all rows in two columns."""
    rows, nulls, validity = len(headers), 0, b""
    names: list[bytes] = []
    values: list[bytes] = []
    ends = [0]
    for row in headers:
        for name, value in row.items() if isinstance(row, Mapping) else row or ():
            names.append(name.encode())
            values.append(value)
        ends.append(len(names))
    if None in headers:
        present = [row is not None for row in headers]
        nulls, validity = rows - sum(present), _validity(present)
    if None in values:
        raise InvalidRequest("headers: a value is missing")
    nodes += (rows, nulls, len(names), 0)
    parts += ((len(validity), (validity,)), (4 * rows + 4, (struct.pack(f"<{rows + 1}i", *ends),)), (0, ()))
    _add_binary(names, nodes, parts)
    _add_binary(values, nodes, parts)


def _hashes(items: Iterable[Buffer | None]) -> Hashes:
    """128-bit hashes, one row each, as `core.model.hash128` defines them; zero for None."""
    packed = b"".join([_ZERO if item is None else _digest(item) for item in items])
    return np.frombuffer(packed, "<u8").reshape(-1, 2)


_ZERO = bytes(16)


def body_of(batch: pa.RecordBatch, columns: int, compression: str | None = None) -> Buffer:
    """The body of a record batch that has exactly the schema of these columns."""
    if compression is not None:
        return _compressed(batch, compression)
    data = memoryview(batch.serialize())
    found = inspect(data, columns)  # pyarrow aligns to 8; bodies of frames keep Arrow's recommended 64
    return assemble(columns, found.rows, found.nodes, _parts(data, found))


def _compressed(batch: pa.RecordBatch, compression: str) -> Buffer:
    """pyarrow compresses only streams: the second message of one, behind the schema, is the body."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
    ) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    return memoryview(reader.read_next_message().serialize())


def _parts(data: memoryview, found: Message) -> list[Part]:
    pairs = zip(found.buffers[::2], found.buffers[1::2], strict=True)
    return [(length, (data[found.start + at : found.start + at + length],)) for at, length in pairs]


def decode(body: Buffer, columns: int) -> pa.RecordBatch:
    """The rows of a body for a reader, not copied; raises `Corrupt` when it is not what its header says."""
    try:
        return _read(body, columns, BATCH_BYTES_MAX)[0]
    except TailraceError as error:
        raise Corrupt(f"the body of a frame cannot be read: {error.message}") from error


def _read(body: Buffer, columns: int, bytes_max: int) -> tuple[pa.RecordBatch, Message]:
    """Open and prove: nothing that pyarrow does with the result later can leave its buffers."""
    found = inspect(body, columns, bytes_max=bytes_max)
    try:
        batch = pa.ipc.read_record_batch(body, schema_of(columns))
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidRequest(f"batch: {error}") from None
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if not field.nullable and column.null_count:
            raise InvalidRequest(f"{field.name}: a row is null")
    return batch, found


def take(body: Buffer, columns: int, rows: Sequence[int] | npt.NDArray[np.int64]) -> Buffer:
    """A body that holds only these rows, in this order."""
    batch = decode(body, columns).take(pa.array(rows, pa.int64()))
    return body_of(batch, columns)


def view_of(header: Header, body: Buffer, want_keys: bool = False, want_dedup: bool = True) -> BatchView:
    """The view of a stored, checked frame; the body is opened only for hashes that are wanted and there."""
    columns = header.flags & 0x7F
    keys = dedup_ids = None
    want_keys, want_dedup = want_keys and bool(columns & HAS_KEY), want_dedup and bool(columns & HAS_DEDUP_ID)
    if want_keys or want_dedup:
        batch = decode(body, columns)
        if batch.num_rows != header.count:
            raise Corrupt(f"a frame of {header.count} rows has a body of {batch.num_rows}")
        keys = _column_hashes(batch, "key") if want_keys else None
        dedup_ids = _column_hashes(batch, "dedup_id") if want_dedup else None
    return BatchView(
        header.count, columns, header.length, header.timestamp_max_us, keys=keys, dedup_ids=dedup_ids
    )


def _column_hashes(batch: pa.RecordBatch, name: str) -> Hashes:
    return _hashes(batch.column(name).to_pylist())


def open_body(
    body: Buffer,
    columns: int,
    *,
    want_keys: bool = False,
    want_dedup: bool = True,
    bytes_max: int = BATCH_BYTES_MAX,
) -> tuple[BatchView, pa.RecordBatch]:
    """Prove that a foreign body is sound and within all limits; raises `InvalidRequest` or `TooLarge`."""
    if columns & HAS_OFFSET_DELTA:
        raise InvalidRequest("offset_delta: only compaction writes this column")
    batch, _ = _read(body, columns, bytes_max)
    at = positions(columns) if columns >= 0 else {}
    value = batch.column(1)
    key_max = header_max = 0
    keys = dedup_ids = None
    value_max = _longest(value, "value", VALUE_BYTES_MAX)
    timestamp_max = _check_times(batch.column(2), "timestamp")
    if columns & HAS_KEY:
        key = batch.column(at["key"])
        key_max = _longest(key, "key", KEY_BYTES_MAX)
        hashed = batch.column(at["key_hash"])
        keys = _check_keys(key, hashed, want_keys)
    if value.null_count:
        _check_tombstones(value, batch.column(at["key"]) if columns & HAS_KEY else None)
    if columns & HAS_HEADERS:
        header_max = _check_headers(batch.column(at["headers"]))
    if columns & HAS_PRIORITY:
        _check_priorities(batch.column(at["priority"]))
    if columns & HAS_DELIVER_AT:
        times = batch.column(at["deliver_at"])
        if times.null_count:
            raise InvalidRequest("deliver_at: a batch is delayed as a whole, and a row has no time")
        _check_times(times, "deliver_at")
    if columns & HAS_EXPIRES_AT:
        _check_times(batch.column(at["expires_at"]), "expires_at")
    if columns & HAS_DEDUP_ID:
        _longest(batch.column(at["dedup_id"]), "dedup_id", DEDUP_ID_BYTES_MAX)
        dedup_ids = _column_hashes(batch, "dedup_id") if want_dedup else None
    view = BatchView(
        batch.num_rows, columns, len(body), timestamp_max, key_max, header_max, value_max, keys, dedup_ids
    )
    return view, batch


def _numbers(column: pa.Array, dtype: str, buffer: int = 1, extra: int = 0) -> npt.NDArray[Any]:
    """A buffer of a column as numpy, not copied; `validate` has proved its length."""
    return np.frombuffer(column.buffers()[buffer], dtype, len(column) + extra)


def _longest(column: pa.Array, name: str, limit: int) -> int:
    """Length of the longest item; refuses what is above the limit."""
    offsets = _numbers(column, "<i4", extra=1)
    return _within(offsets[1:] - offsets[:-1], name, limit)


def _within(lengths: npt.NDArray[Any], name: str, limit: int) -> int:
    longest = int(lengths.max())
    if longest > limit:
        row = int(lengths.argmax())
        raise TooLarge(f"{name}: {longest} bytes in row {row}, at most {limit} are allowed", limit=limit)
    return longest


def _check_times(column: pa.Array, name: str) -> int:
    """The greatest time; every one that is not null must be one that calendars know."""
    times = _numbers(column, "<i8")
    if column.null_count:
        times = times[np.asarray(column.is_valid())]
        if not len(times):
            return 0
    greatest = int(times.max())
    if int(times.min()) < 0 or greatest >= TIME_US_END:
        raise InvalidRequest(f"{name}: times lie between the years 1970 and 9999")
    return greatest


def _check_keys(key: pa.Array, hashed: pa.Array, want: bool) -> Hashes | None:
    if key.null_count != hashed.null_count or (key.null_count and not key.is_null().equals(hashed.is_null())):
        raise InvalidRequest("key_hash: must be there exactly where a key is")
    if not want:
        return None
    hashes = _hashes(key.to_pylist())
    stored = _numbers(hashed, "<u8")
    wrong = hashes[:, 0] != stored
    if key.null_count:
        wrong &= np.asarray(key.is_valid())
    if wrong.any():
        raise InvalidRequest(f"key_hash: row {int(wrong.argmax())} is not the hash of its key")
    return hashes


def _check_tombstones(value: pa.Array, key: pa.Array | None) -> None:
    if key is None or (key.null_count and (np.asarray(value.is_null()) & np.asarray(key.is_null())).any()):
        raise InvalidRequest("value: only a message with a key may have none")


def _check_headers(column: pa.MapArray) -> int:
    """Bytes of the largest headers of a row, names and values together."""
    names, values = column.keys, column.items
    if names.null_count or values.null_count:
        raise InvalidRequest("headers: a name or a value is null")
    rows = _numbers(column, "<i4", extra=1)
    if not len(names):
        return 0
    ends = _numbers(names, "<i4", extra=1).astype(np.int64) + _numbers(values, "<i4", extra=1)
    sizes = ends[rows]
    return _within(sizes[1:] - sizes[:-1], "headers", HEADER_BYTES_MAX)


def _check_priorities(column: pa.Array) -> None:
    priorities = _numbers(column, "u1")
    if priorities.max() > PRIORITY_MAX:
        row = int(priorities.argmax())
        raise InvalidRequest(f"priority: {priorities[row]} in row {row}, 0 to {PRIORITY_MAX} are allowed")
