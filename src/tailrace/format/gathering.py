"""Rows out of stored frames for delivery: the columns that decisions need, and the frames of an answer.

If at least half of the rows of the stored frames are delivered, in stored order, the answer is the stored
frames as they are: nothing is copied, and the receiver skips the other rows. Otherwise the rows are gathered
into one new frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.core.model.identifiers import (
    HAS_EXPIRES_AT,
    HAS_KEY,
    HAS_OFFSET_DELTA,
    HAS_PRIORITY,
    HASH_OF_EMPTY,
    PRIORITY_DEFAULT,
    Columns,
    Hashes,
    hash128,
)
from tailrace.errors import Corrupt
from tailrace.format import frame
from tailrace.format.batch import decode, stored
from tailrace.format.builder import body_of
from tailrace.format.frame import Buffer, Frame, Header
from tailrace.format.message import inspect
from tailrace.format.schema import buffers_of, numbers_of, schema_of

_LOOKED_AT = HAS_KEY | HAS_PRIORITY | HAS_EXPIRES_AT | HAS_OFFSET_DELTA
_SPAN_END = 1 << 32
COPIED_BYTES_MAX = 1024 * 1024
"""Up to this size together, frames are copied whole to pick rows from them, which takes fewer calls."""

Run = tuple[int, int, int, int]
"""First offset, count, and two numbers that do not matter here: see `core.model.queue_commands.Grant`."""


Offsets = npt.NDArray[np.int64]


def _opened(item: Frame) -> pa.RecordBatch:
    return stored(item.body, item.header.columns)


def columns_of(header: Header, body: Buffer) -> Columns:
    """The columns of a stored data frame that decisions need: copies, which do not keep the body in
    memory."""
    base, end, time_us = header.base_offset, header.end_offset, header.append_time_us
    columns = header.columns
    if not columns & _LOOKED_AT:
        return Columns(base, end, time_us, nbytes=header.length)
    plain = _PlainRows(body, columns)
    offsets = priorities = hashes = expires = None
    if columns & HAS_OFFSET_DELTA:
        offsets = plain.numbers("offset_delta", "<u4").astype(np.int64) + base
    if columns & HAS_PRIORITY:
        priorities = plain.numbers("priority", "u1").copy()
    if columns & HAS_KEY:
        hashes = plain.numbers("key_hash", "<u8", HASH_OF_EMPTY[0])
    if columns & HAS_EXPIRES_AT:
        expires = plain.numbers("expires_at", "<i8", 1)
    return Columns(base, end, time_us, offsets, priorities, hashes, expires, header.length)


def stored_hashes(keys: Hashes) -> npt.NDArray[np.uint64]:
    """Hashes of the core as `key_rows_of` finds them in a stored body: 0 only if there is no key."""
    low = keys[:, 0]
    if low.all():
        return low
    return np.where((low == 0) & (keys[:, 1] != 0), np.uint64(HASH_OF_EMPTY[0]), low)


def hash_of_key(key: bytes) -> int:
    """The hash that `key_rows_of` finds for a message with this key."""
    return hash128(key)[0] or HASH_OF_EMPTY[0]


def key_rows_of(header: Header, body: Buffer) -> list[tuple[int, npt.NDArray[np.uint64]]]:
    """The `key_hash` of the messages of a stored data frame, as runs of consecutive offsets; 0 stands for no
    key. Empty if no message has a key."""
    columns = header.columns
    if not columns & HAS_KEY:
        return []
    plain = _PlainRows(body, columns)
    hashes = plain.numbers("key_hash", "<u8", HASH_OF_EMPTY[0])
    if not columns & HAS_OFFSET_DELTA:
        return [(header.base_offset, hashes)]
    deltas = plain.numbers("offset_delta", "<u4").tolist()
    return [(header.base_offset + delta, hashes[row : row + 1]) for row, delta in enumerate(deltas)]


class _PlainRows:
    """The numbers of a stored body. It was proved when it was published, and is not proved again."""

    def __init__(self, body: Buffer, columns: int) -> None:
        self._body = body
        self._places = buffers_of(columns)
        self._message = inspect(body, columns)
        self._batch = decode(body, columns) if self._message.compressed else None

    def numbers(self, name: str, dtype: str, instead_of_zero: int | None = None) -> npt.NDArray[Any]:
        """A column. With `instead_of_zero`, a copy in which only nulls are 0."""
        message, (node, buffer) = self._message, self._places[name]
        if self._batch is None:
            places = (
                message.start + message.buffers[2 * buffer],
                message.start + message.buffers[2 * buffer + 2],
            )
            data: list[Any] = [self._body, self._body]
        else:
            places, data = (0, 0), self._batch.column(name).buffers()
        found = np.frombuffer(data[1], dtype, message.rows, places[1])
        if instead_of_zero is None:
            return found
        found = np.where(found == 0, found.dtype.type(instead_of_zero), found)
        if message.nodes[2 * node + 1]:
            bits = np.frombuffer(data[0], np.uint8, (message.rows + 7) // 8, places[0])
            found[np.unpackbits(bits, count=message.rows, bitorder="little") == 0] = 0
        return found


def gather(
    frames: Sequence[Frame], runs: Sequence[Run], opened: Callable[[Frame], pa.RecordBatch] = _opened
) -> Sequence[Frame]:
    """The frames of a delivery of these runs, in this order. `frames` are the stored frames that hold them,
    by ascending offset; each holds some of them. `opened` gives the rows of a frame."""
    rows = 0
    for item in frames:
        rows += item.header.count
    if len(runs) == 1:
        first, count, _, _ = runs[0]
        if 2 * count >= rows:
            return frames
        if len(frames) == 1 and not frames[0].header.columns & HAS_OFFSET_DELTA:
            return (_slice(frames[0], first, count, opened),)
        return (pick(frames, np.arange(first, first + count), opened),)
    offsets = offsets_of(runs)
    if 2 * len(offsets) >= rows and bool((offsets[1:] > offsets[:-1]).all()):
        return frames
    return (pick(frames, offsets, opened),)


def _slice(item: Frame, first: int, count: int, opened: Callable[[Frame], pa.RecordBatch]) -> Frame:
    """A frame with a run of rows of one frame; it needs no column of offsets."""
    columns, row = item.header.columns, first - item.header.base_offset
    body = body_of(opened(item).slice(row, count), columns)
    return _frame((item,), columns, body, first, count, count)


def pick(
    frames: Sequence[Frame], offsets: Offsets, opened: Callable[[Frame], pa.RecordBatch] = _opened
) -> Frame:
    """A frame with rows from anywhere, in any order, with a column of their offsets."""
    columns = 0
    for item in frames:
        columns |= item.header.columns
    columns &= ~HAS_OFFSET_DELTA
    picked = _picked(frames, columns, *_places(frames, offsets), opened)
    base = int(offsets.min())
    span = int(offsets.max()) + 1 - base
    if span >= _SPAN_END:
        raise Corrupt(f"{span} offsets lie between the messages of one delivery")
    columns |= HAS_OFFSET_DELTA
    arrays = [*picked.columns, numbers_of((offsets - base).astype(np.uint32))]
    body = body_of(pa.RecordBatch.from_arrays(arrays, schema=schema_of(columns)), columns)
    return _frame(frames, columns, body, base, span, len(offsets))


def _picked(
    frames: Sequence[Frame],
    columns: int,
    at: Offsets,
    rows: Offsets,
    opened: Callable[[Frame], pa.RecordBatch],
) -> pa.RecordBatch:
    """Rows of these frames: for each, the frame (`at`) and the row in it (`rows`)."""
    batches = []
    for item in frames:
        batch = opened(item)
        batches.append(batch if item.header.columns == columns else widened(batch, columns))
    if len(batches) == 1:
        return batches[0].take(numbers_of(rows))
    if sum([item.size for item in frames]) <= COPIED_BYTES_MAX:
        starts = np.cumsum([0, *[item.header.count for item in frames[:-1]]])
        return pa.concat_batches(batches).take(numbers_of(starts[at] + rows))
    order = np.argsort(at, kind="stable")
    parts = np.split(order, np.searchsorted(at[order], range(1, len(frames))))
    taken = [batch.take(numbers_of(rows[part])) for batch, part in zip(batches, parts, strict=True)]
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return pa.concat_batches(taken).take(numbers_of(back))


def _places(frames: Sequence[Frame], offsets: Offsets) -> tuple[Offsets, Offsets]:
    """The frame of each offset, and the row in it."""
    bases = np.array([item.header.base_offset for item in frames])
    at = bases.searchsorted(offsets, "right") - 1
    rows = offsets - bases[at]
    good = bool((at >= 0).all())
    if good and not any(item.header.columns & HAS_OFFSET_DELTA for item in frames):
        counts = np.array([item.header.count for item in frames])
        good = bool((rows < counts[at]).all())
    elif good:
        for number, item in enumerate(frames):
            here = at == number
            known = _deltas_in(item)
            wanted = rows[here]
            rows[here] = found = known.searchsorted(wanted)
            good = good and bool((found < len(known)).all()) and np.array_equal(known[found], wanted)
    if not good:
        raise Corrupt("a message that shall be delivered is not in the frame that should hold it")
    return at, rows


def _deltas_in(item: Frame) -> npt.NDArray[Any]:
    if item.header.columns & HAS_OFFSET_DELTA:
        return _PlainRows(item.body, item.header.columns).numbers("offset_delta", "<u4")
    return np.arange(item.header.count)


def offsets_of(runs: Sequence[Run]) -> Offsets:
    """Every offset of runs, in their order."""
    starts, counts, _, _ = zip(*runs, strict=True)
    firsts = np.array(starts, np.int64)
    total = sum(counts)
    if total == len(runs):
        return firsts
    lengths = np.array(counts, np.int64)
    return np.arange(total) + np.repeat(firsts - np.cumsum(lengths) + lengths, lengths)


def widened(batch: pa.RecordBatch, columns: int) -> pa.RecordBatch:
    """Add missing columns to a batch: nulls, or the default priority."""
    schema = schema_of(columns)
    have = set(batch.schema.names)
    rows = batch.num_rows
    arrays = []
    for field in schema:
        if field.name in have:
            arrays.append(batch.column(field.name))
        elif field.name == "priority":
            arrays.append(numbers_of(np.full(rows, PRIORITY_DEFAULT, np.uint8)))
        else:
            arrays.append(pa.nulls(rows, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _frame(frames: Sequence[Frame], columns: int, body: Buffer, base: int, span: int, count: int) -> Frame:
    """A frame that is in no log. Its append time is the earliest of the frames from which its rows come."""
    header = Header(
        frame.DATA,
        columns,
        len(body),
        frame.crc32c(body),
        frames[0].header.entry,
        base,
        span,
        count,
        frames[0].header.leader_epoch,
        min(item.header.append_time_us for item in frames),
        timestamp_max_us=max(item.header.timestamp_max_us for item in frames),
    )
    return frame.make(header, body)
