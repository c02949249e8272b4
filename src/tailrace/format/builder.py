"""Messages into bodies, for producers: fast for batches of one message and for batches of thousands."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import mmh3
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.core.model.identifiers import (
    BATCH_BYTES_MAX,
    BATCH_ROWS_MAX,
    HAS_DEDUP_ID,
    HAS_DELIVER_AT,
    HAS_EXPIRES_AT,
    HAS_HEADERS,
    HAS_KEY,
    HAS_PRIORITY,
    Hashes,
)
from tailrace.errors import InvalidRequest, TooLarge
from tailrace.format.frame import Buffer
from tailrace.format.message import Part, assemble, inspect
from tailrace.format.schema import schema_of

Headers = Mapping[str, bytes] | Iterable[tuple[str, bytes]]
Times = int | Sequence[int | None] | npt.NDArray[np.int64]

_digest = mmh3.mmh3_x64_128_digest
_MASK62 = (1 << 62) - 1
_ZERO = bytes(16)
_TIME = struct.Struct("<q")


def make_ids(count: int, unix_ms: int, random_bits_62: int, head_bits_12: int) -> bytes:
    """`count` UUIDv7 of one millisecond, 16 bytes each: one head, and a random tail that counts up and
    wraps."""
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
    """The columns and the body of a batch. A column of Nones is left out; a time given as one int is for all
    rows."""
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
        parts += ((0, ()), (rows, (_packed(f"{rows}B", priorities, "priorities"),)))
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


def encode_one(value: bytes, message_id: bytes, timestamp_us: int) -> bytes:
    """The body of one message that has only a value: the same as from `encode`, faster."""
    before, between, behind, end = _mould(len(value))
    return b"".join((before, message_id, between, value, behind, _TIME.pack(timestamp_us), end))


@lru_cache(maxsize=256)
def _mould(size: int) -> tuple[bytes, bytes, bytes, bytes]:
    """The pieces around the id, the value and the time in the body of one message. They depend only on the
    length of the value, and messages that are sent one by one mostly have few different lengths."""
    body = bytes(encode([bytes(size)], ids=_ZERO, timestamps=0)[1])
    message = inspect(body, 0)
    # Per column: validity and data of the id; validity, offsets and data of the value; those of the time.
    at_id, at_value, at_time = (message.start + message.buffers[2 * number] for number in (1, 4, 6))
    return body[:at_id], body[at_id + 16 : at_value], body[at_value + size : at_time], body[at_time + 8 :]


def _some(items: Sequence[Any] | npt.NDArray[Any], rows: int, what: str) -> bool:
    if len(items) != rows:
        raise InvalidRequest(f"{what}: {len(items)} for {rows} values")
    return isinstance(items, np.ndarray) or any(item is not None for item in items)


def _packed(form: str, numbers: Iterable[Any], what: str) -> bytes:
    try:
        return struct.pack(f"<{form}", *numbers)
    except struct.error as error:
        raise InvalidRequest(f"{what}: {error}") from None


def _validity(present: list[bool] | npt.NDArray[np.bool_]) -> bytes:
    return np.packbits(present, bitorder="little").tobytes()


def _offsets(lengths: list[int]) -> tuple[int, bytes]:
    """The total and the packed Arrow offsets of items of these lengths."""
    if len(lengths) == 1:
        return lengths[0], struct.pack("<ii", 0, lengths[0])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return int(offsets[-1]), offsets.astype("<i4").tobytes()


def _add_binary(items: Sequence[Buffer | None], nodes: list[int], parts: list[Part]) -> None:
    rows, nulls, validity = len(items), 0, b""
    try:
        lengths = list(map(len, items))  # type: ignore[arg-type]
    except TypeError:  # There is a None among them.
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
        packed = _packed("q", (times,), "times") * rows
    elif isinstance(times, np.ndarray):
        packed = times.astype("<i8", copy=False).tobytes()
    else:
        if None in times:
            present = [time is not None for time in times]
            nulls, validity = rows - sum(present), _validity(present)
            times = [time or 0 for time in times]
        packed = _packed(f"{rows}q", times, "times")
    if len(packed) != 8 * rows:
        raise InvalidRequest(f"times: {len(packed) // 8} for {rows} values")
    nodes += (rows, nulls)
    parts += ((len(validity), (validity,)), (8 * rows, (packed,)))


def _add_keys(keys: Sequence[Buffer | None], nodes: list[int], parts: list[Part]) -> None:
    """Add the columns of keys and of their hashes (low halves), with the same validity."""
    _add_binary(keys, nodes, parts)
    length, validity = parts[-3]
    hashes = hashes_of(keys)[:, 0].tobytes()
    nodes += nodes[-2:]
    parts += ((length, validity), (len(hashes), (hashes,)))


def _add_headers(headers: Sequence[Headers | None], nodes: list[int], parts: list[Part]) -> None:
    """Add a map column: a list of entries, that is offsets, then the names and the values of all rows."""
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


def hashes_of(items: Sequence[Buffer | None]) -> Hashes:
    """murmur3 x64 128, seed 0, as two halves per row; zero for None."""
    try:
        packed = b"".join(map(_digest, items))  # type: ignore[arg-type]
    except TypeError:  # There is a None among them.
        packed = b"".join([_ZERO if item is None else _digest(item) for item in items])
    return np.frombuffer(packed, "<u8").reshape(-1, 2)


def body_of(batch: pa.RecordBatch, columns: int, compression: str | None = None) -> Buffer:
    """The body of a record batch that has exactly the schema of these columns."""
    if compression is not None:
        return _compressed(batch, compression)
    return join_columns(columns, batch.num_rows, {name: [batch.column(name)] for name in batch.schema.names})


def join_columns(columns: int, rows: int, pieces: Mapping[str, Sequence[pa.Array]]) -> bytes:
    """A body of columns given in pieces; each byte is copied once."""
    nodes: list[int] = []
    parts: list[Part] = []
    for field in schema_of(columns):
        _add_arrays(field.type, pieces[field.name], nodes, parts)
    return assemble(columns, rows, nodes, parts)


def _add_arrays(kind: pa.DataType, arrays: Sequence[pa.Array], nodes: list[int], parts: list[Part]) -> None:
    nulls, validity = sum(array.null_count for array in arrays), b""
    if nulls:
        validity = _validity(np.concatenate([np.asarray(array.is_valid()) for array in arrays]))
    nodes += (sum(map(len, arrays)), nulls)
    parts.append((len(validity), (validity,)))
    if pa.types.is_map(kind):
        ends = [np.asarray(array.offsets) for array in arrays]
        parts.append(_joined(ends))
        nodes += (sum(int(end[-1] - end[0]) for end in ends), 0)
        parts.append((0, ()))
        whole = list(zip(arrays, ends, strict=True))
        names = [array.keys.slice(end[0], end[-1] - end[0]) for array, end in whole]
        values = [array.items.slice(end[0], end[-1] - end[0]) for array, end in whole]
        _add_arrays(kind.key_type, names, nodes, parts)
        _add_arrays(kind.item_type, values, nodes, parts)
    elif pa.types.is_binary(kind) or pa.types.is_string(kind):
        ends = [_ends(array) for array in arrays]
        parts.append(_joined(ends))
        data = [_bytes(array.buffers()[2], end[0], end[-1]) for array, end in zip(arrays, ends, strict=True)]
        parts.append((sum(map(len, data)), data))
    else:
        width = kind.bit_width // 8
        data = [
            _bytes(array.buffers()[1], width * array.offset, width * (array.offset + len(array)))
            for array in arrays
        ]
        parts.append((sum(map(len, data)), data))


def _ends(array: pa.Array) -> npt.NDArray[np.int32]:
    """The offsets of a column of bytes: where each value begins, and where the last one ends."""
    if not len(array):
        return np.zeros(1, np.int32)
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, 4 * array.offset)


def _joined(ends: Sequence[npt.NDArray[np.int32]]) -> Part:
    """The offsets of all pieces as those of one column; each piece may begin anywhere."""
    joined = np.zeros(sum(map(len, ends)) - len(ends) + 1, np.int32)
    at, total = 1, 0
    for end in ends:
        joined[at : at + len(end) - 1] = end[1:] + (total - end[0])
        at, total = at + len(end) - 1, total + int(end[-1] - end[0])
    packed = joined.tobytes()
    return len(packed), (packed,)


def _bytes(buffer: pa.Buffer | None, start: int, end: int) -> memoryview:
    return memoryview(b"" if buffer is None else buffer).cast("B")[start:end]


def _compressed(batch: pa.RecordBatch, compression: str) -> Buffer:
    """A compressed body. pyarrow compresses only streams; the second message of one, behind the schema, is
    the body."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
    ) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()
    return memoryview(reader.read_next_message().serialize())
