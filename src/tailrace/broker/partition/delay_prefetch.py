"""Prefetched delayed messages of one partition: read from the log in bulk, kept in the order of release.

`delay_release` decides which messages to read and when; this module reads them and keeps them.

*Reading* (`pick`, on a reader thread). A ref names a frame by its entry and a row in it. Refs are grouped by
entry, every frame is read once, the wanted rows are taken out of it, and the rest of the frame is freed. For
the refs below, in the order in which they are due, that means two frames and not four reads:

    wanted      (entry 7, row 2)  (entry 5, row 0)  (entry 7, row 0)  (entry 5, row 3)
    read        entry 5: rows 0, 3        entry 7: rows 0, 2
    joined      5·0  5·3  7·0  7·2        one batch, sorted by ref
    returned    7·2  5·0  7·0  5·3        the order that was asked for

Frames may have different optional columns; the joined batch has every column that any of them has.

*Keeping* (`DelayPrefetch`). Each load is a run: rows in order, and a batch with the messages in the same
order. A release asks for "the first rows that are due". Mostly one run holds exactly these rows, one after
the other, and the answer is a slice of its batch, without a copy. Rows of several runs are joined and
reordered. The answer stops at the first row that is not loaded, because messages may not overtake one
another: with 1 2 4 loaded and 1 2 3 4 due, it is 1 2.

A run's memory is freed when its last row has left, not before: the batch is one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from tailrace.core.collections.timing_wheel import AT, REF, ROW_BITS, Rows, end_of
from tailrace.errors import Corrupt
from tailrace.format.batch import stored
from tailrace.format.gathering import widened
from tailrace.format.schema import numbers_of, schema_of
from tailrace.ports import PartitionLog

_ROW_MASK = (1 << ROW_BITS) - 1
_ENTRIES_AT_ONCE = 256
"""Frames that are read at once; their rows are picked and the rest is freed before the next are read."""


class Picked(msgspec.Struct, frozen=True, eq=False):
    """Messages as they are stored, in the order asked for. `columns` tells which optional columns exist."""

    batch: pa.RecordBatch
    columns: int


class TooMuch(Exception):
    """The rows have more bytes than there is room for; `row_bytes` is the average of a row."""

    def __init__(self, row_bytes: int) -> None:
        super().__init__(f"{row_bytes} bytes a row")
        self.row_bytes = row_bytes


def pick(log: PartitionLog, refs: Sequence[int] | Rows, bytes_max: int) -> Picked:
    """Read the messages with these refs, in the order of the refs; blocking.

    Raises `TooMuch` above `bytes_max`, except for a single message."""
    wanted = np.asarray(refs, np.int64)
    sorted_refs = np.sort(wanted)
    entries, starts = np.unique(sorted_refs >> ROW_BITS, return_index=True)
    ends = [*starts[1:].tolist(), len(sorted_refs)]
    batches: list[tuple[pa.RecordBatch, int]] = []
    columns = size = rows = 0
    for first in range(0, len(entries), _ENTRIES_AT_ONCE):
        frames = log.read_entries(entries[first : first + _ENTRIES_AT_ONCE].tolist())
        for number, (header, body) in enumerate(frames, first):
            here = sorted_refs[starts[number] : ends[number]] & _ROW_MASK
            batch = stored(body, header.columns)
            if int(here[-1]) >= batch.num_rows:
                raise Corrupt(f"entry {header.entry} has {batch.num_rows} rows, not row {int(here[-1])}")
            if len(here) < batch.num_rows:
                batch = batch.take(numbers_of(here))
            batches.append((batch, header.columns))
            columns |= header.columns
            size, rows = size + batch.nbytes, rows + len(here)
            if size > bytes_max and len(sorted_refs) > 1:
                raise TooMuch(-(-size // rows))
    joined = _joined(batches, columns)
    order = np.searchsorted(sorted_refs, wanted)
    if (order[1:] < order[:-1]).any():
        joined = joined.take(numbers_of(order))
    return Picked(joined, columns)


def _joined(batches: Sequence[tuple[pa.RecordBatch, int]], columns: int) -> pa.RecordBatch:
    """Join batches into one that has every column of any of them."""
    pieces = [batch if have == columns else widened(batch, columns) for batch, have in batches]
    if len(pieces) == 1:
        return pieces[0]
    (joined,) = pa.Table.from_batches(pieces, schema_of(columns)).combine_chunks().to_batches()
    return joined


class _Run:
    """Rows of one load, in order of release; rows before `start` have left."""

    __slots__ = ("picked", "rows", "start")

    def __init__(self, rows: Rows, picked: Picked) -> None:
        self.rows = rows
        self.picked = picked
        self.start = 0


class DelayPrefetch:
    """Messages that are loaded and not released yet."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self.nbytes = 0

    def add(self, rows: Rows, picked: Picked) -> None:
        """Add a load: rows in order of release, and their messages in the same order."""
        self._runs.append(_Run(np.ascontiguousarray(rows[:, : REF + 1]), picked))
        self.nbytes += picked.batch.nbytes

    def drop(self, until: tuple[int, int]) -> None:
        """Forget the rows up to a (due time, ref), inclusive."""
        kept = []
        for run in self._runs:
            if run.start < len(run.rows) and int(run.rows[run.start, AT]) <= until[0]:
                run.start = end_of(run.rows, *until)
            if run.start < len(run.rows):
                kept.append(run)
            else:
                self.nbytes -= run.picked.batch.nbytes
        self._runs = kept

    def clear(self) -> None:
        """Forget all rows."""
        self._runs, self.nbytes = [], 0

    def take(self, rows: Rows) -> tuple[Picked, int] | None:
        """Messages of the first of these rows, up to the first row that is not loaded, and their number; None
        when the first row is not loaded. `rows` are all that are due up to their last one, in order."""
        until_us, until_ref = int(rows[-1, AT]), int(rows[-1, REF])
        refs: list[Rows] = []
        pieces: list[tuple[pa.RecordBatch, int]] = []
        for run in self._runs:
            if int(run.rows[run.start, AT]) <= until_us:
                end = end_of(run.rows, until_us, until_ref)
                if end > run.start:
                    refs.append(run.rows[run.start : end, REF])
                    pieces.append((run.picked.batch.slice(run.start, end - run.start), run.picked.columns))
        if not pieces:
            return None
        held, wanted = refs[0] if len(refs) == 1 else np.concatenate(refs), rows[:, REF]
        columns = 0
        for _, have in pieces:
            columns |= have
        if np.array_equal(held, wanted):
            return Picked(_joined(pieces, columns), columns), len(rows)
        order = np.argsort(held)
        places = np.minimum(np.searchsorted(held, wanted, sorter=order), len(held) - 1)
        found = held[order[places]] == wanted
        count = len(rows) if found.all() else int(found.argmin())
        if not count:
            return None
        picked = _joined(pieces, columns).take(numbers_of(order[places[:count]]))
        return Picked(picked, columns), count
