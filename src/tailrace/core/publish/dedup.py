"""The dedup window: the dedup ids that a partition has taken lately, and the first offset of each.

An id counts for `window_us` of append time after it was taken; two messages at exactly that distance are both
kept.

The table maps the hash of an id to its offset. It does not store times, because times and offsets grow
together: one *line* per batch (append time, first offset, number of ids before it) is enough. At any time,
the first line that has not expired gives the *floor*, its first offset. An entry counts if its offset is at
or above the floor, and the number of ids that count is a difference of two totals.

    Example, a window of 10 s            lines (time, first offset, ids before)
    at 0 s, x and y take 100 and 101     (0, 100, 0)
    at 4 s, z takes 102                  (0, 100, 0) (4, 102, 2)

    at 6 s, a batch with y, q, q     floor 100: y is a duplicate of 101. The first q is kept and takes 103;
                                     the second is a duplicate of it. 3 ids count before the batch.
    just before 10 s, y              still a duplicate of 101
    at 10 s, y                       floor 102: y is kept. z is still a duplicate of 102. 1 id counts.

Nothing is deleted entry by entry: the table ages when every entry of its old half is below the floor (see
`aging_table`). So memory is bounded by the ids of about two windows. An id that was taken again after its
window may be there twice: the later offset counts.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.core.collections.aging_table import AgingTable
from tailrace.core.collections.hash_table import Buffer, Numbers, group_rows, present_rows
from tailrace.core.model.identifiers import Hashes, Refusal
from tailrace.errors import Overloaded, TooLarge

ROTATE_MIN = 1024
"""A table with fewer young entries is not worth aging."""

_COMPACT_MIN = 1024

Mask = npt.NDArray[np.bool_]


class Filtered(msgspec.Struct, frozen=True, eq=False):
    """A batch with duplicates: the rows to keep, and (row, first offset) of each duplicate."""

    keep: Numbers
    duplicates: list[tuple[int, int]]


class OtherIds(Protocol):
    """Ids that count beside those of a window: of delayed messages, see `delayed_dedup`."""

    def live(self, time_us: int) -> int:
        """The number of ids that count at a time."""
        ...

    def knows(self, given: Hashes, time_us: int) -> Mask:
        """Which of these ids, none of them all zero, count at a time."""
        ...

    def places(self, ids: Hashes, time_us: int) -> Numbers:
        """The offset of each message that was released by a time; -1 for the others."""
        ...


class DedupWindow:
    """The dedup ids of one partition. `find` and `recall` only read; `add` is called for appended batches."""

    __slots__ = (
        "_firsts",
        "_head",
        "_split",
        "_table",
        "_times",
        "_total",
        "_totals",
        "entries_max",
        "window_us",
    )

    def __init__(self, window_ms: int, entries_max: int) -> None:
        self.window_us = window_ms * 1000
        self.entries_max = entries_max
        # One line per batch; lines before _head have expired.
        self._times, self._firsts, self._totals = array("q"), array("q"), array("q")
        self._head = 0
        self._total = 0
        self._table = AgingTable()
        self._split = 0  # Every old offset is below, every young one at or above.

    def _head_at(self, time_us: int) -> int:
        return bisect_right(self._times, time_us - self.window_us, self._head)

    def live(self, time_us: int) -> int:
        """The number of ids that count at a time."""
        return self._live_from(self._head_at(time_us))

    def _live_from(self, head: int) -> int:
        return self._total - self._totals[head] if head < len(self._totals) else 0

    def find(
        self,
        ids: Hashes,
        base_offset: int,
        time_us: int,
        *,
        late: Mask | None = None,
        others: OtherIds | None = None,
    ) -> Filtered | Refusal | None:
        """The duplicates in a batch that would be appended at that offset and time; None if there are none.

        `late` are the delayed rows, which get no offset yet; `others` has the ids of earlier delayed
        messages. A duplicate of a message that has no offset yet gets the first offset -1.
        """
        present = present_rows(ids)
        if not len(present):
            return None
        given = ids[present]
        head = self._head_at(time_us)
        if head < len(self._firsts):
            first = self._table.get_many(given)
            known = first >= self._firsts[head]
        else:
            first, known = np.zeros(len(given), np.int64), np.zeros(len(given), np.bool_)
        delayed = 0
        if others is not None:
            delayed = others.live(time_us)
            again = ~known & others.knows(given, time_us)
            if again.any():
                first, known = np.where(again, others.places(given, time_us), first), known | again
        groups = group_rows(given)
        duplicate = known | (groups.rank > 0)
        fresh = len(given) - int(np.count_nonzero(duplicate))
        if fresh and self._live_from(head) + delayed + fresh > self.entries_max:
            return self._full(head, fresh, delayed, time_us)
        if fresh == len(given):
            return None
        kept = np.ones(len(ids), np.bool_)
        kept[present[duplicate]] = False
        if late is None:
            offsets = np.cumsum(kept) - 1 + base_offset
        else:
            offsets = np.where(late, -1, np.cumsum(kept & ~late) - 1 + base_offset)
        first = np.where(known, first, offsets[present[groups.first[groups.group]]])
        rows = present[duplicate].tolist()
        return Filtered(np.flatnonzero(kept), list(zip(rows, first[duplicate].tolist(), strict=True)))

    def knows(self, given: Hashes, time_us: int) -> Mask:
        """Which of these ids, none of them all zero, count at a time."""
        head = self._head_at(time_us)
        if head == len(self._firsts):
            return np.zeros(len(given), np.bool_)
        return self._table.get_many(given) >= self._firsts[head]

    def places(self, ids: Hashes) -> Numbers:
        """The first offset of each id; -1 for ids that are not remembered."""
        found = np.full(len(ids), -1, np.int64)
        given = present_rows(ids)
        found[given] = self._table.get_many(ids[given])
        return found

    def times(self, ids: Hashes) -> Numbers:
        """When each id was added; -1 for ids that are not remembered."""
        lines = np.searchsorted(np.array(self._firsts, np.int64), self.places(ids), "right")
        return np.array([-1, *self._times], np.int64)[lines]

    def _full(self, head: int, fresh: int, delayed: int, time_us: int) -> Refusal:
        limit = self.entries_max
        if fresh > limit:
            return Refusal(
                TooLarge.code,
                f"the batch has {fresh} dedup ids, dedup_max is {limit}",
                details={"limit": limit},
            )
        live = self._live_from(head)
        surplus = live + delayed + fresh - limit
        wait_us = self.window_us
        if surplus <= live:
            # The batch whose end makes enough room, and how long it still counts.
            enough = bisect_left(self._totals, self._totals[head] + surplus, head + 1)
            wait_us = self._times[enough - 1] + self.window_us - time_us
        return Refusal(
            Overloaded.code,
            f"the dedup window is full: {live + delayed} ids and {fresh} new ones, dedup_max is {limit}",
            details={"retry_after_ms": -(-wait_us // 1000), "limit": limit},
        )

    def recall(self, ids: Hashes, base_offset: int, count: int) -> list[tuple[int, int]]:
        """(row, first offset) of the rows that were filtered out of a batch when it was first appended.

        `count` rows of the batch were kept, at `base_offset` and behind; the others are duplicates of lower
        offsets or of earlier rows. While all ids are remembered, the answer is the first one again. Otherwise
        every row is listed, with offset -1 where it is forgotten.
        """
        given = present_rows(ids)
        found = np.full(len(ids), -1, np.int64)
        if len(given):
            found[given] = self._table.get_many(ids[given])
            found[found >= base_offset + count] = -1  # The id was forgotten, and came again.
        offsets = found.tolist()
        duplicates, following = [], base_offset
        for row, offset in enumerate(offsets):
            if 0 <= offset < following:
                duplicates.append((row, offset))
            else:
                following += 1
        if following == base_offset + count and (found[given] >= 0).all():
            return duplicates
        return list(enumerate(offsets))

    def add(self, ids: Hashes, base_offset: int, time_us: int) -> None:
        """Remember the ids of an appended batch, and forget ids that have expired by then."""
        present = present_rows(ids)
        if not len(present):
            return
        self._expire(base_offset, time_us)
        self._table.put_many(ids[present], present + base_offset)
        self._times.append(time_us)
        self._firsts.append(base_offset)
        self._totals.append(self._total)
        self._total += len(present)

    def _expire(self, next_offset: int, time_us: int) -> None:
        head = self._head = self._head_at(time_us)
        floor = self._firsts[head] if head < len(self._firsts) else next_offset
        if self._table.young >= ROTATE_MIN and (not self._table.old or floor >= self._split):
            self._table.age()
            self._split = next_offset
        if head > _COMPACT_MIN and head * 2 > len(self._times):
            for column in (self._times, self._firsts, self._totals):
                del column[:head]
            self._head = 0

    def buffers(self) -> list[bytes]:
        """Copies for a snapshot, without expired lines."""
        numbers = array("q", (self._total, self._split))
        lines = [column[self._head :].tobytes() for column in (self._times, self._firsts, self._totals)]
        return [numbers.tobytes(), *lines, *self._table.buffers()]

    def load(self, buffers: Sequence[Buffer]) -> None:
        """Restore the state from `buffers`."""
        self._total, self._split = _numbers(buffers[0])
        self._times, self._firsts, self._totals = map(_numbers, buffers[1:4])
        self._head = 0
        self._table.load(buffers[4:])

    def verify(self) -> None:
        """Assert the invariants."""
        assert len(self._times) == len(self._firsts) == len(self._totals)
        assert 0 <= self._head <= len(self._times)
        for column in (self._times, self._firsts, self._totals):
            assert list(column) == sorted(column), "times, offsets and totals grow together"
        self._table.check()
        assert self._live_from(self._head) <= len(self._table), "a living id is lost"


def _numbers(data: Buffer) -> array[int]:
    column = array("q")
    column.frombytes(data)
    return column
