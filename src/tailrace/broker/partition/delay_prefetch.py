"""Prefetched delayed messages of one partition: read from the log in bulk, kept in the order of release.

`core.process.release_process` decides which messages to read and when, and when to release them. This module
is its reader and its shelf.

*Reading* (`pick`, on a reader thread). A ref names a frame by its entry and a row in it. Refs are grouped by
entry, every frame is read once, the wanted rows are taken out of it, and the rest of the frame is freed. For
the refs below, in the order in which they are due, that means two frames and not four reads:

    wanted      (entry 7, row 2)  (entry 5, row 0)  (entry 7, row 0)  (entry 5, row 3)
    read        entry 5: rows 0, 3        entry 7: rows 0, 2
    joined      5·0  5·3  7·0  7·2        one batch, sorted by ref
    returned    7·2  5·0  7·0  5·3        the order that was asked for

Frames may have different optional columns; the joined batch has every column that any of them has.

*Keeping* (`DelayPrefetch`). Each load is a run: rows in order, and a batch with the messages in the same
order. A release names the first rows that are due. Mostly one run holds exactly these rows, one after the
other, and their messages are a slice of its batch, without a copy. Rows of several runs, or with cancelled
ones between them, are joined and reordered.

A run's memory is freed when its last row has left, not before: the batch is one piece.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa

from tailrace.broker.metrics import Metrics
from tailrace.broker.runtime.process_driver import ProcessKind
from tailrace.broker.runtime.turn import refuse
from tailrace.core.collections.timing_wheel import AT, REF, ROW_BITS, Rows, end_of, in_order
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.model.internal_commands import ReleaseDue
from tailrace.core.partition import Partition
from tailrace.core.process.release_process import (
    DelayedLoaded,
    LoadDelayed,
    ReleaseProcess,
    ReleaseRows,
)
from tailrace.errors import Corrupt, StorageFault
from tailrace.format.batch import body_of, open_body, stored
from tailrace.format.frame import Buffer, crc32c
from tailrace.format.gathering import widened
from tailrace.format.schema import numbers_of, schema_of
from tailrace.ports import PartitionLog

_log = logging.getLogger("tailrace.delays")

NEAR_BYTES = 16 * 1024 * 1024
NEAR_BYTES_TOTAL = 64 * 1024 * 1024
"""Memory for prefetched messages: of one partition, and of all partitions of a node."""
RELEASE_BYTES = 4 * 1024 * 1024
"""Bound of one release."""
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


class DelayedRun(msgspec.Struct, eq=False):
    """Messages of one load: rows in the order of release, and their messages in the same order. Rows before
    `start` have left."""

    rows: Rows
    picked: Picked
    last: tuple[int, int]
    nbytes: int
    start: int = 0


Loaded = DelayedRun | DelayedLoaded | Refusal


def load(log: PartitionLog, end: int, request: LoadDelayed) -> tuple[Loaded, StorageFault | None]:
    """Read delayed messages; blocking."""
    rows = in_order(request.rows)
    try:
        picked = pick(log, rows[:, REF], request.bytes_max)
    except TooMuch as much:
        return DelayedLoaded(much.row_bytes, kept=False), None
    except StorageFault as error:
        return refuse(error), error
    last = int(rows[-1, AT]), int(rows[-1, REF])
    return DelayedRun(np.ascontiguousarray(rows[:, : REF + 1]), picked, last, picked.batch.nbytes), None


class DelayPrefetch:
    """Messages that are loaded and not released yet: the shelf of the release process."""

    def __init__(self, want_keys: bool) -> None:
        self._want_keys = want_keys
        self._bytes_max = NEAR_BYTES
        self._runs: list[DelayedRun] = []

    def limit(self, bytes_max: int) -> None:
        """Set the bound on prefetched messages; it counts from the next load on."""
        self._bytes_max = bytes_max

    def free_bytes(self, until: tuple[int, int]) -> int:
        """See `PrefetchRoom`."""
        return self._bytes_max - sum(run.nbytes for run in self._runs if run.last > until)

    def keep(self, found: Loaded) -> DelayedLoaded | Refusal:
        """Add a load."""
        if not isinstance(found, DelayedRun):
            return found
        self._runs.append(found)
        return DelayedLoaded(max(found.nbytes // len(found.rows), 1))

    def forget(self, what: tuple[int, int]) -> None:
        """Forget the rows up to a (due time, ref), inclusive."""
        for run in self._runs:
            if int(run.rows[run.start, AT]) <= what[0]:
                run.start = end_of(run.rows, *what)
        self._runs = [run for run in self._runs if run.start < len(run.rows)]

    def clear(self) -> None:
        """Forget all rows."""
        self._runs = []

    def fill(self, command: ReleaseRows) -> tuple[ReleaseDue, Buffer]:
        """The release of these rows, or of the first that fit one batch, at least one."""
        rows = command.rows
        picked, body = _fitting(self._take(rows), min(command.bytes_max, 4 * RELEASE_BYTES))
        count = picked.batch.num_rows
        view, _ = open_body(body, picked.columns, want_keys=self._want_keys)
        until_us, until_ref = rows[count - 1, : REF + 1].tolist()
        return ReleaseDue(view, crc32c(body), until_us, until_ref, rows[:count, REF].copy()), body

    def _take(self, rows: Rows) -> Picked:
        """The messages of these rows, which are all that wait up to their last one, in order."""
        until_us, until_ref = rows[-1, : REF + 1].tolist()
        refs: list[Rows] = []
        pieces: list[tuple[pa.RecordBatch, int]] = []
        columns = 0
        for run in self._runs:
            if int(run.rows[run.start, AT]) <= until_us:
                end = end_of(run.rows, until_us, until_ref)
                if end > run.start:
                    refs.append(run.rows[run.start : end, REF])
                    pieces.append((run.picked.batch.slice(run.start, end - run.start), run.picked.columns))
                    columns |= run.picked.columns
        assert pieces, "what is released was loaded"
        held, wanted = refs[0] if len(refs) == 1 else np.concatenate(refs), rows[:, REF]
        joined = _joined(pieces, columns)
        if not np.array_equal(held, wanted):
            order = np.argsort(held)
            places = np.minimum(np.searchsorted(held, wanted, sorter=order), len(held) - 1)
            assert (held[order[places]] == wanted).all(), "what is released was loaded"
            joined = joined.take(numbers_of(order[places]))
        return Picked(joined, columns)


def _fitting(picked: Picked, bytes_max: int) -> tuple[Picked, Buffer]:
    """The first messages that fit one batch, at least one, and the body of that batch."""
    batch, columns = picked.batch, picked.columns
    if batch.nbytes > RELEASE_BYTES and batch.num_rows > 1:
        batch = batch.slice(0, max(1, batch.num_rows * RELEASE_BYTES // batch.nbytes))
    body = body_of(batch, columns)
    while len(body) > bytes_max and batch.num_rows > 1:
        batch = batch.slice(0, batch.num_rows // 2)
        body = body_of(batch, columns)
    return Picked(batch, columns), body


def releases(home: TopicPartition, topic_id: int, prefetch: DelayPrefetch, metrics: Metrics) -> ProcessKind:
    """The process that releases the delayed messages of a partition."""
    return ProcessKind(
        make=partial(_make, home, topic_id, prefetch),
        watches=ReleaseProcess.WATCHES,
        log=_log,
        readers={LoadDelayed: load},
        shelf=prefetch,
        failed=partial(metrics.refused, "delays"),
    )


def _make(home: TopicPartition, topic_id: int, prefetch: DelayPrefetch, state: Partition) -> ReleaseProcess:
    return ReleaseProcess(home, topic_id, state.timetable, state.ring, prefetch)
