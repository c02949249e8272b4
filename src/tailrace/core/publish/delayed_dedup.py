"""Dedup ids of delayed messages of one partition: they count from when the message was stored.

At that time a delayed message has no offset, so its id is remembered with its ref, which says where it is
stored. If it is released while its id still counts, its offset is remembered under id and ref together. So a
producer that sends it again learns its offset, and a later message with the same id is never taken for it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from tailrace.core.collections.aging_table import AgingTable
from tailrace.core.collections.hash_table import Buffer, Numbers, present_rows
from tailrace.core.model.identifiers import Hashes
from tailrace.core.publish.dedup import DedupWindow, Mask

WINDOW_BUFFERS = 6
"""Buffers of a snapshot in which no offset of a released message is remembered, and of all older
snapshots."""


class DelayedDedup:
    """Ids of delayed messages, and the offsets of those that were released."""

    __slots__ = ("_lines", "_offsets", "_turned_us", "waiting")

    def __init__(self, window_ms: int, entries_max: int) -> None:
        self.waiting = DedupWindow(window_ms, entries_max)
        """Ids by ref. Those of released and cancelled messages continue to count."""
        self._offsets = AgingTable()
        """Offsets of released messages. It ages once in a window: no old id counts any more then."""
        self._turned_us = 0
        self._lines = array("q")
        """First offset and time of each release whose offsets are remembered."""

    def live(self, time_us: int) -> int:
        """The number of ids that count at a time."""
        return self.waiting.live(time_us)

    def knows(self, given: Hashes, time_us: int) -> Mask:
        """Which of these ids, none of them all zero, count at a time."""
        return self.waiting.knows(given, time_us)

    def times(self, ids: Hashes) -> Numbers:
        """When the message with each id was stored; -1 for ids that are not remembered."""
        return self.waiting.times(ids)

    def places(self, ids: Hashes, time_us: int) -> Numbers:
        """The offset of each message that was released by a time; -1 for the others."""
        found = np.full(len(ids), -1, np.int64)
        refs = self.waiting.places(ids)
        rows = np.flatnonzero(refs >= 0)
        if len(rows) and self._lines:
            names = _named(ids[rows], refs[rows])
            offsets = self._offsets.get_many(names)
            lines = np.array(self._lines, np.int64).reshape(-1, 2)
            released_us = lines[lines[:, 0].searchsorted(offsets, "right") - 1, 1]
            found[rows] = np.where(released_us <= time_us, offsets, -1)
        return found

    def add(self, ids: Hashes, ref: int, time_us: int) -> None:
        """Remember the ids of a stored batch whose first message has this ref."""
        self.waiting.add(ids, ref, time_us)

    def land(self, ids: Hashes, refs: Numbers, base_offset: int, time_us: int) -> None:
        """Messages got their offsets. Those whose ids do not count any more are left out, so that a flood of
        old ones takes no memory."""
        rows = present_rows(ids)
        rows = rows[self.knows(ids[rows], time_us) & (self.waiting.places(ids[rows]) == refs[rows])]
        if not len(rows):
            return
        if time_us - self._turned_us >= self.waiting.window_us:
            del self._lines[: 2 * bisect_left(self._lines[1::2], self._turned_us)]
            self._offsets.age()
            self._turned_us = time_us
        self._offsets.put_many(_named(ids[rows], refs[rows]), rows + base_offset)
        self._lines.extend((base_offset, time_us))

    def buffers(self) -> list[bytes]:
        """Copies for a snapshot; offsets of released messages only if there are some."""
        landed: list[bytes] = []
        if self._lines:
            numbers = array("q", (self._turned_us, *self._lines))
            landed = [numbers.tobytes(), *self._offsets.buffers()]
        return [*self.waiting.buffers(), *landed]

    def load(self, buffers: Sequence[Buffer]) -> None:
        """Restore the state from `buffers`."""
        self.waiting.load(buffers[:WINDOW_BUFFERS])
        if len(buffers) > WINDOW_BUFFERS:
            lines = array("q")
            lines.frombytes(buffers[WINDOW_BUFFERS])
            self._turned_us, self._lines = lines[0], lines[1:]
            self._offsets.load(buffers[WINDOW_BUFFERS + 1 :])

    def landed(self) -> int:
        """The number of offsets of released messages that are remembered."""
        return len(self._offsets)

    def verify(self) -> None:
        """Assert the invariants."""
        self.waiting.verify()
        self._offsets.check()
        for column in (self._lines[::2], self._lines[1::2]):
            assert list(column) == sorted(column), "offsets and times of releases grow together"
        assert bool(self._lines) == bool(self.landed())


def _named(ids: Hashes, refs: Numbers) -> Hashes:
    """One hash for an id together with the ref of the message that has it."""
    names = ids.copy()
    names[:, 1] ^= refs.view(np.uint64)
    return names
