"""Whole tables: a user's pyarrow table into a body, and a body with positions for readers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.model.identifiers import (
    BATCH_ROWS_MAX,
    HAS_DEDUP_ID,
    HAS_DELIVER_AT,
    HAS_EXPIRES_AT,
    HAS_HEADERS,
    HAS_KEY,
    HAS_OFFSET_DELTA,
    HAS_PRIORITY,
    PRIORITY_DEFAULT,
)
from tailrace.errors import Corrupt, InvalidRequest
from tailrace.format.builder import body_of, hashes_of
from tailrace.format.frame import Buffer, Header
from tailrace.format.schema import HEADERS, TIME, numbers_of, schema_of

_TAKEN: dict[str, tuple[int, pa.DataType]] = {
    "value": (0, pa.binary()),
    "timestamp": (0, TIME),
    "key": (HAS_KEY, pa.binary()),
    "headers": (HAS_HEADERS, HEADERS),
    "priority": (HAS_PRIORITY, pa.uint8()),
    "deliver_at": (HAS_DELIVER_AT, TIME),
    "expires_at": (HAS_EXPIRES_AT, TIME),
    "dedup_id": (HAS_DEDUP_ID, pa.binary()),
}
"""The columns that a user's table may have, with their bits and the types to which they are cast."""

POSITIONED = pa.schema(
    {
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "sequence": pa.int64(),
        "id": pa.binary(),
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": HEADERS,
        "timestamp": TIME,
        "append_time": TIME,
        "priority": pa.int32(),
        "deliver_at": TIME,
        "expires_at": TIME,
    }
)
"""The schema for readers. All columns are always present, in types that Spark has, too (none unsigned or of
fixed size). All are nullable, because Spark refuses batches whose nullability differs from its own schema.
`priority` is still never null: a message without one has the default, also if its batch does not store the
column."""


def encode_table(
    table: pa.Table | pa.RecordBatch, *, ids: bytes, timestamp: int, compression: str | None = None
) -> tuple[int, Buffer]:
    """The columns and the body of a table with a `value` column; `timestamp` is for rows without one."""
    rows = table.num_rows
    if not 0 < rows <= BATCH_ROWS_MAX or len(ids) != 16 * rows:
        raise InvalidRequest(f"batch: {rows} rows, {len(ids) // 16} ids; 1 to {BATCH_ROWS_MAX} are allowed")
    given = _cast(table)
    now = pa.scalar(timestamp, TIME)
    given["timestamp"] = (
        pc.fill_null(given["timestamp"], now) if "timestamp" in given else pa.repeat(now, rows)
    )
    given["id"] = pa.Array.from_buffers(pa.binary(16), rows, [None, pa.py_buffer(ids)])
    columns = 0
    for name, (bit, _) in _TAKEN.items():
        if bit and name in given and given[name].null_count < rows:
            columns |= bit
    if columns & HAS_PRIORITY:
        given["priority"] = pc.fill_null(given["priority"], PRIORITY_DEFAULT)
        if all_default(given["priority"]):
            columns &= ~HAS_PRIORITY
    if columns & HAS_KEY:
        hashes = hashes_of(given["key"].to_pylist())[:, 0]
        given["key_hash"] = pa.array(hashes, pa.uint64(), mask=np.asarray(given["key"].is_null()))
    schema = schema_of(columns)
    batch = pa.RecordBatch.from_arrays([given[name] for name in schema.names], schema=schema)
    return columns, body_of(batch, columns, compression)


def _cast(table: pa.Table | pa.RecordBatch) -> dict[str, Any]:
    """The columns by name, in the types of a batch; refuses a column that cannot be cast, by its name."""
    names = table.schema.names
    unknown = sorted(set(names) - _TAKEN.keys())
    if unknown or "value" not in names or len(set(names)) != len(names):
        raise InvalidRequest(
            f"table: needs value, may have {', '.join(_TAKEN)} once each; has {', '.join(names)}"
        )
    given: dict[str, Any] = {}
    for name in names:
        column, kind = table.column(name), _TAKEN[name][1]
        try:
            if isinstance(column, pa.ChunkedArray):
                column = column.combine_chunks()
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            given[name] = column if column.type == kind else column.cast(kind)
        except pa.ArrowException as error:
            raise InvalidRequest(f"{name}: {error}") from None
    return given


def with_positions(batch: pa.RecordBatch, header: Header, topic: str, partition: int) -> pa.RecordBatch:
    """A decoded batch with the topic, partition and offset of every row, as `POSITIONED`."""
    rows = batch.num_rows
    columns = header.columns
    if rows != header.count or header.base_offset + header.span >= 1 << 63:
        raise Corrupt(f"a frame of {header.count} rows at offset {header.base_offset} has a body of {rows}")
    if columns & HAS_OFFSET_DELTA:
        deltas = np.asarray(batch.column("offset_delta")).astype(np.int64)
        if (deltas[1:] <= deltas[:-1]).any() or deltas[-1] >= header.span:
            raise Corrupt(f"offset_delta: not growing within the {header.span} offsets of its frame")
        offsets = deltas + header.base_offset
    else:
        offsets = np.arange(header.base_offset, header.base_offset + rows, dtype=np.int64)
    given: dict[str, Any] = {
        "topic": _repeated(topic.encode(), rows),
        "partition": numbers_of(np.full(rows, partition, np.int32)),
        "offset": numbers_of(offsets),
        "sequence": numbers_of(offsets + 1),
        "id": batch.column(0).cast(pa.binary()),
        "value": batch.column(1),
        "timestamp": batch.column(2),
        "append_time": numbers_of(np.full(rows, header.append_time_us, np.int64)).view(TIME),
    }
    for name in ("key", "headers", "deliver_at", "expires_at"):
        bit, kind = _TAKEN[name]
        given[name] = batch.column(name) if columns & bit else pa.nulls(rows, kind)
    given["priority"] = (
        batch.column("priority").cast(pa.int32()) if columns & HAS_PRIORITY else default_priorities(rows)
    )
    return pa.RecordBatch.from_arrays([given[name] for name in POSITIONED.names], schema=POSITIONED)


def default_priorities(rows: int) -> pa.Array:
    """The column `priority` of rows whose batch does not store it."""
    return numbers_of(np.full(rows, PRIORITY_DEFAULT, np.int32))


def all_default(priorities: pa.Array) -> bool:
    """Whether all priorities are the default, so that the column can be left out."""
    return bool((np.asarray(priorities) == PRIORITY_DEFAULT).all())


def _repeated(text: bytes, rows: int) -> pa.Array:
    """A column with the same string in every row; pyarrow's own `repeat` takes twenty times as long."""
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(len(text))
    return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(text * rows)])
