"""Idempotent producers of one partition: the epoch and sequence of each, and its last 16 results.

A producer numbers its batches 0, 1, 2, … per partition and epoch. The next number is a new batch. One of the
last 16 numbers is a retry and gets the first result; an older one cannot be answered any more. A number
beyond the next is a gap, which the client closes by sending in order. A higher epoch starts again at 0 and
fences all lower ones.

    a producer at epoch 2, sequence 40 sends      the answer
    epoch 2, sequence 41                          new: it is appended
    epoch 2, sequence 40 to 25                    the result of that batch, again
    epoch 2, sequence 24 or lower                 refused: the result is not kept any more
    epoch 2, sequence 43                          refused: 41 is expected
    epoch 3, sequence 0                           new: epoch 2 is fenced from now on
    epoch 1, any sequence                         refused: fenced

State is columnar: a dict from id to row, and arrays. The result of sequence s lies in slot s % 16 of the row.
A producer that was idle for seven days of append time is forgotten: it starts again at 0, with any epoch. Its
row stays until it comes back or a new producer needs the room; until then, a claim continues from its epoch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from tailrace.core.collections.hash_table import Buffer
from tailrace.core.core_tuning import PRODUCER_IDLE_US_MAX, PRODUCERS_MAX, RESULTS_KEPT
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Fenced, InvalidRequest, Overloaded, Unavailable

ID_MAX = (1 << 64) - 1
EPOCH_MAX = (1 << 32) - 1
SEQUENCE_MAX = (1 << 32) - 1
"""The greatest number that fits into a frame header; after that, a producer has to claim a new epoch."""

_NUMBERS = 4
"""The numbers of a result: base offset, count, append time, wall time."""
_ROW = RESULTS_KEPT * _NUMBERS
_EMPTY_ROW = array("q", bytes(8 * _ROW))


class BatchResult(msgspec.Struct, frozen=True):
    """The outcome of a batch: `count` rows (0 if all were duplicates) have offsets from `base_offset` on.
    Delayed rows do not count; if all were delayed, `base_offset` is -1. The wall time of the decision tells
    which rows were delayed."""

    base_offset: int
    count: int
    append_time_us: int
    wall_us: int


class Producers:
    """The idempotent producers of a partition. `check` and `next_epoch` only read."""

    __slots__ = ("_active", "_epochs", "_ids", "_last", "_results", "_rows", "capacity")

    def __init__(self, capacity: int = PRODUCERS_MAX) -> None:
        self.capacity = capacity
        self._rows: dict[int, int] = {}
        self._ids, self._epochs, self._last, self._active = array("Q"), array("q"), array("q"), array("q")
        self._results = array("q")

    def __len__(self) -> int:
        return len(self._rows)

    def check(
        self, producer_id: int, epoch: int, sequence: int, time_us: int
    ) -> BatchResult | Refusal | None:
        """None: the batch is new. A result: the batch was stored before, with that result. Else a refusal."""
        if not (0 <= sequence <= SEQUENCE_MAX and 0 <= epoch <= EPOCH_MAX and 0 <= producer_id <= ID_MAX):
            return out_of_range(producer_id, epoch, sequence)
        row = self._rows.get(producer_id)
        if row is None or time_us - self._active[row] > PRODUCER_IDLE_US_MAX:
            if sequence:
                return _gap(sequence, 0, "the producer is not known here")
            return self._room(time_us) if row is None else None
        current = self._epochs[row]
        if epoch < current:
            return Refusal(
                Fenced.code,
                f"epoch {epoch} of the producer is fenced by {current}",
                details={"epoch": current},
            )
        last = self._last[row] if epoch == current else -1
        if sequence == last + 1:
            return None
        if sequence > last:
            return _gap(sequence, last + 1, "an earlier batch is missing")
        if last - sequence >= RESULTS_KEPT:
            text = f"batch {sequence} is stored, its result is not kept any more: the producer is at {last}"
            return Refusal(InvalidRequest.code, text, details={"last": last})
        at = row * _ROW + sequence % RESULTS_KEPT * _NUMBERS
        return BatchResult(*self._results[at : at + _NUMBERS])

    def next_epoch(self, producer_id: int, time_us: int) -> int | Refusal:
        """The epoch that a claim gets: 1 at first; 0 is for producers that never claim."""
        row = self._rows.get(producer_id)
        epoch = 1 if row is None else self._epochs[row] + 1
        problem = out_of_range(producer_id, epoch, 0)
        if problem is None and row is None:
            problem = self._room(time_us)
        return epoch if problem is None else problem

    def _room(self, time_us: int) -> Refusal | None:
        if len(self._rows) < self.capacity:
            return None
        wait_us = int(np.frombuffer(self._active, np.int64).min()) + PRODUCER_IDLE_US_MAX - time_us
        if wait_us < 0:
            return None
        text = f"{self.capacity} producers are active on this partition, and that is the most there can be"
        return Refusal(
            Overloaded.code, text, details={"retry_after_ms": wait_us // 1000 + 1, "limit": self.capacity}
        )

    def claim(self, producer_id: int, epoch: int, time_us: int) -> None:
        """Apply: an epoch starts, without a batch yet."""
        row = self._rows.get(producer_id)
        if row is None:
            row = self._admit(producer_id)
        self._epochs[row], self._last[row], self._active[row] = epoch, -1, time_us

    def advance(self, producer_id: int, epoch: int, sequence: int, result: BatchResult) -> None:
        """Apply: the batch of a sequence has this result."""
        row = self._rows.get(producer_id)
        if row is None:
            row = self._admit(producer_id)
        if sequence == 0:
            self._epochs[row] = epoch
        else:
            assert self._epochs[row] == epoch, f"epoch {epoch} without a start, at {self._epochs[row]}"
            assert self._last[row] == sequence - 1, f"sequence {sequence} after {self._last[row]}"
        self._last[row] = sequence
        self._active[row] = result.append_time_us
        at, results = row * _ROW + sequence % RESULTS_KEPT * _NUMBERS, self._results
        results[at], results[at + 1] = result.base_offset, result.count
        results[at + 2], results[at + 3] = result.append_time_us, result.wall_us

    def resume(self, producer_id: int, epoch: int, sequence: int) -> None:
        """Apply, if earlier batches may be lost: the next batch has this sequence."""
        row = self._rows.get(producer_id)
        if row is None:
            row = self._admit(producer_id)
        self._epochs[row], self._last[row] = epoch, sequence - 1

    def _admit(self, producer_id: int) -> int:
        if len(self._rows) < self.capacity:
            row = len(self._ids)
            self._ids.append(producer_id)
            self._epochs.append(0)
            self._last.append(-1)
            self._active.append(0)
            self._results.extend(_EMPTY_ROW)
        else:
            row = int(np.frombuffer(self._active, np.int64).argmin())
            del self._rows[self._ids[row]]
            self._ids[row] = producer_id
        self._rows[producer_id] = row
        return row

    def buffers(self) -> list[bytes]:
        """Copies for a snapshot."""
        columns = (self._ids, self._epochs, self._last, self._active, self._results)
        return [column.tobytes() for column in columns]

    def load(self, buffers: Sequence[Buffer]) -> None:
        """Restore the state from `buffers`."""
        ids, *others = buffers
        self._ids = array("Q")
        self._ids.frombytes(ids)
        self._epochs, self._last, self._active, self._results = (
            array("q"),
            array("q"),
            array("q"),
            array("q"),
        )
        for column, data in zip((self._epochs, self._last, self._active, self._results), others, strict=True):
            column.frombytes(data)
        self._rows = {producer_id: row for row, producer_id in enumerate(self._ids)}

    def verify(self) -> None:
        """Assert the invariants."""
        assert len(self._rows) == len(self._ids) <= self.capacity
        assert len(self._epochs) == len(self._last) == len(self._active) == len(self._ids)
        assert len(self._results) == _ROW * len(self._ids)
        assert all(self._ids[row] == producer_id for producer_id, row in self._rows.items())
        assert all(last >= -1 for last in self._last)


def _gap(sequence: int, expected: int, why: str) -> Refusal:
    text = f"batch {sequence} of the producer came too early: {why}, {expected} is expected"
    return Refusal(Unavailable.code, text, details={"expected": expected})


def out_of_range(producer_id: int, epoch: int, sequence: int) -> Refusal | None:
    """The refusal of numbers that do not fit into the header of a frame."""
    for name, value, most in (
        ("producer_id", producer_id, ID_MAX),
        ("producer_epoch", epoch, EPOCH_MAX),
        ("producer_sequence", sequence, SEQUENCE_MAX),
    ):
        if not 0 <= value <= most:
            return Refusal(InvalidRequest.code, f"{name} is {value}: it goes from 0 to {most}")
    return None
