"""Stored frames as Arrow batches with Spark's schema: only the wanted columns, small frames gathered.

The columns are those of `tailrace.format.tabular.POSITIONED`. Buffers of large frames are handed on as they
came; what is the same in every row is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.model.identifiers import (
    HAS_DELIVER_AT,
    HAS_EXPIRES_AT,
    HAS_HEADERS,
    HAS_KEY,
    HAS_OFFSET_DELTA,
    HAS_PRIORITY,
)
from tailrace.errors import Corrupt, InvalidRequest
from tailrace.format.batch import stored
from tailrace.format.frame import Header
from tailrace.format.schema import TIME
from tailrace.format.tabular import POSITIONED, default_priorities
from tailrace.spark.source.slices import Slice

ROWS_WANTED = 8_000
ROWS_ALONE, BYTES_ALONE = 2_000, 1024 * 1024
"""From here on, copying a frame together with its neighbours costs more than a batch of its own."""
BYTES_WANTED = 8 * 1024 * 1024

_DDL = {
    pa.string(): "STRING",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.binary(): "BINARY",
    TIME: "TIMESTAMP",
    POSITIONED.field("headers").type: "MAP<STRING,BINARY>",
}
_OPTIONAL = {
    "key": HAS_KEY,
    "headers": HAS_HEADERS,
    "priority": HAS_PRIORITY,
    "deliver_at": HAS_DELIVER_AT,
    "expires_at": HAS_EXPIRES_AT,
}

Offsets = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """Rows of one frame, with their offsets; `batch` has the columns that are stored."""

    batch: pa.RecordBatch
    offsets: Offsets
    columns: int
    append_time_us: int

    def column(self, name: str) -> pa.Array:
        """A column of the messages. Where the frame does not have it: the default priority, else nulls."""
        bit = _OPTIONAL.get(name, 0)
        if self.columns & bit != bit:
            rows = len(self.offsets)
            absent = name == "priority"
            return default_priorities(rows) if absent else pa.nulls(rows, POSITIONED.field(name).type)
        column = self.batch.column(name)
        return column.cast(pa.int32()) if name == "priority" else column


Choose = Callable[[Piece], Any]
"""Which rows of a piece are wanted: a boolean array without nulls, or None for all."""


def ddl(columns: Sequence[str] = ()) -> str:
    """The schema in Spark's words; without columns, all of them."""
    names = columns or POSITIONED.names
    return ", ".join(f"`{name}` {_DDL[POSITIONED.field(name).type]}" for name in names)


def check_schema(names: Sequence[str], kinds: Sequence[str]) -> None:
    """Refuse columns or types (as `DataType.simpleString` says them) that messages do not have."""
    for name, kind in zip(names, kinds, strict=True):
        if name not in POSITIONED.names:
            raise InvalidRequest(f"schema: no column {name}; there are {', '.join(POSITIONED.names)}")
        wanted = _DDL[POSITIONED.field(name).type]
        if kind.upper() != wanted:
            raise InvalidRequest(f"schema: {name} is {wanted}, not {kind.upper()}")


def row_batches(
    frames: Iterable[tuple[Header, memoryview]],
    part: Slice,
    columns: Sequence[str] = (),
    choose: Sequence[Choose] = (),
) -> Iterator[pa.RecordBatch]:
    """The rows of a slice out of the frames that hold them."""
    names = list(columns or POSITIONED.names)
    schema = pa.schema([POSITIONED.field(name) for name in names])
    for pieces in _gathered(_pieces(frames, part, choose)):
        yield _build(part, pieces, names, schema)


def unexpired(now_us: int) -> Choose:
    """Chooses the rows that have not outlived their TTL at that time."""
    now = pa.scalar(now_us, TIME)

    def choose(piece: Piece) -> Any:
        if not piece.columns & HAS_EXPIRES_AT:
            return None
        return pc.fill_null(pc.greater(piece.batch.column("expires_at"), now), True)

    return choose


def _pieces(
    frames: Iterable[tuple[Header, memoryview]], part: Slice, choose: Sequence[Choose]
) -> Iterator[Piece]:
    for header, body in frames:
        piece = _cut(_piece(header, body, part), part)
        for wanted in choose:
            mask = wanted(piece)
            if mask is not None and len(piece.offsets):
                piece = piece._replace(
                    batch=piece.batch.filter(mask),
                    offsets=piece.offsets[mask.to_numpy(zero_copy_only=False)],
                )
        if len(piece.offsets):
            yield piece


def _piece(header: Header, body: memoryview, part: Slice) -> Piece:
    batch = stored(body, header.columns)
    place = f"{part.topic}/{part.partition}"
    if batch.num_rows != header.count or header.end_offset >= 1 << 63:
        raise Corrupt(
            f"{place}: the frame at offset {header.base_offset} should have {header.count} rows, "
            f"it has {batch.num_rows}"
        )
    first = header.base_offset
    if not header.columns & HAS_OFFSET_DELTA:
        offsets = np.arange(first, first + header.count, dtype=np.int64)
    else:
        deltas = np.asarray(batch.column("offset_delta")).astype(np.int64)
        if (deltas[1:] <= deltas[:-1]).any() or (len(deltas) and deltas[-1] >= header.span):
            raise Corrupt(f"{place}: offset_delta does not grow within the frame at offset {first}")
        offsets = deltas + first
    return Piece(batch, offsets, header.columns, header.append_time_us)


def _cut(piece: Piece, part: Slice) -> Piece:
    """What of it lies in the slice."""
    first, stop = np.searchsorted(piece.offsets, (part.start, part.end))
    if first == 0 and stop == len(piece.offsets):
        return piece
    return piece._replace(
        batch=piece.batch.slice(int(first), int(stop - first)), offsets=piece.offsets[first:stop]
    )


def _gathered(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Small ones together, in order; large ones alone."""
    pending: list[Piece] = []
    rows = size = 0
    for piece in pieces:
        nbytes = piece.batch.get_total_buffer_size()
        if len(piece.offsets) >= ROWS_ALONE or nbytes >= BYTES_ALONE:
            if pending:
                yield pending
                pending, rows, size = [], 0, 0
            yield [piece]
            continue
        pending.append(piece)
        rows += len(piece.offsets)
        size += nbytes
        if rows >= ROWS_WANTED or size >= BYTES_WANTED:
            yield pending
            pending, rows, size = [], 0, 0
    if pending:
        yield pending


# -- columns


def _build(part: Slice, pieces: Sequence[Piece], names: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
    offsets = pieces[0].offsets
    if len(pieces) > 1:
        offsets = np.concatenate([piece.offsets for piece in pieces])
    arrays = [_column(name, part, pieces, offsets) for name in names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(name: str, part: Slice, pieces: Sequence[Piece], offsets: Offsets) -> pa.Array:
    rows = len(offsets)
    match name:
        case "topic":
            return _repeated(part.topic, _rounded(rows)).slice(0, rows)
        case "partition":
            return pa.array(np.full(rows, part.partition, np.int32))
        case "offset":
            return pa.array(offsets)
        case "sequence":
            return pa.array(offsets + 1)
        case "append_time":
            times = [piece.append_time_us for piece in pieces]
            return pa.array(np.repeat(times, [len(piece.offsets) for piece in pieces])).view(TIME)
    bit = _OPTIONAL.get(name, 0)
    if bit and not any(piece.columns & bit for piece in pieces):
        return default_priorities(rows) if name == "priority" else pa.nulls(rows, POSITIONED.field(name).type)
    found = [piece.column(name) for piece in pieces]
    whole = found[0] if len(found) == 1 else pa.concat_arrays(found)
    return _plain_ids(whole) if name == "id" else whole


def _rounded(rows: int) -> int:
    """Few different sizes, so that what is made for one batch serves the next."""
    return max(16_384, 1 << (rows - 1).bit_length())


@lru_cache(maxsize=16)
def _repeated(text: str, rows: int) -> pa.Array:
    raw = text.encode()
    ends = np.arange(rows + 1, dtype=np.int32) * np.int32(len(raw))
    return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(ends), pa.py_buffer(raw * rows)])


@lru_cache(maxsize=4)
def _id_ends(rows: int) -> pa.Buffer:
    return pa.py_buffer(np.arange(rows + 1, dtype=np.int32) * np.int32(16))


def _plain_ids(ids: pa.Array) -> pa.Array:
    """Ids of fixed size as plain binary, which Spark has: the same bytes with offsets beside them."""
    data = ids.buffers()[1].slice(16 * ids.offset, 16 * len(ids))
    return pa.Array.from_buffers(pa.binary(), len(ids), [None, _id_ends(_rounded(len(ids))), data])
