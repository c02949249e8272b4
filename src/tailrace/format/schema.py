"""The columns of a batch: their order, their types, and the Arrow nodes and buffers that they take.

The schema is never stored: it follows from the format version and the column bits of the frame header.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.core.model.identifiers import (
    COLUMNS_ALL,
    HAS_DEDUP_ID,
    HAS_DELIVER_AT,
    HAS_EXPIRES_AT,
    HAS_HEADERS,
    HAS_KEY,
    HAS_OFFSET_DELTA,
    HAS_PRIORITY,
)
from tailrace.errors import InvalidRequest

TIME = pa.timestamp("us", tz="UTC")
HEADERS = pa.map_(pa.string(), pa.binary())

_FIELDS: list[tuple[int, pa.Field]] = [
    (0, pa.field("id", pa.binary(16), nullable=False)),
    (0, pa.field("value", pa.binary())),
    (0, pa.field("timestamp", TIME, nullable=False)),
    (HAS_KEY, pa.field("key", pa.binary())),
    (HAS_KEY, pa.field("key_hash", pa.uint64())),
    (HAS_HEADERS, pa.field("headers", HEADERS)),
    (HAS_PRIORITY, pa.field("priority", pa.uint8(), nullable=False)),
    (HAS_DELIVER_AT, pa.field("deliver_at", TIME)),
    (HAS_EXPIRES_AT, pa.field("expires_at", TIME)),
    (HAS_DEDUP_ID, pa.field("dedup_id", pa.binary())),
    (HAS_OFFSET_DELTA, pa.field("offset_delta", pa.uint32(), nullable=False)),
]


@cache
def _schema(columns: int) -> pa.Schema:
    return pa.schema([field for bit, field in _FIELDS if not bit or bit & columns])


def schema_of(columns: int) -> pa.Schema:
    """The exact schema of a body with these optional columns."""
    if columns & ~COLUMNS_ALL:
        raise InvalidRequest(f"columns: unknown bits {columns & ~COLUMNS_ALL:#x}")
    return _schema(columns)


def numbers_of(values: Sequence[int] | npt.NDArray[Any]) -> pa.Array:
    """Numbers as a column. `pa.array` is avoided: it checks for pandas objects and imports pandas for that,
    if it is installed, which blocks everything else for half a second."""
    array = np.ascontiguousarray(values, getattr(values, "dtype", np.int64))
    kind = pa.from_numpy_dtype(array.dtype)
    return pa.Array.from_buffers(kind, len(array), [None, pa.py_buffer(array)])


@cache
def buffers_of(columns: int) -> dict[str, tuple[int, int]]:
    """For each column: the index of its first field node, and of its first buffer (the validity bitmap)."""
    places: dict[str, tuple[int, int]] = {}
    nodes = buffers = 0
    for field in _schema(columns):
        places[field.name] = nodes, buffers
        more_nodes, more_buffers = _sizes(field.type)
        nodes, buffers = nodes + more_nodes, buffers + more_buffers
    return places


@cache
def counts(columns: int) -> tuple[int, int]:
    """The numbers of field nodes and of buffers of a body with these columns."""
    sizes = [_sizes(field.type) for field in _schema(columns)]
    return sum(nodes for nodes, _ in sizes), sum(buffers for _, buffers in sizes)


def _sizes(kind: pa.DataType) -> tuple[int, int]:
    if pa.types.is_map(kind):
        return 4, 2 + 1 + 3 + 3  # The map, its entries, their names, their values.
    return 1, 3 if pa.types.is_binary(kind) else 2
