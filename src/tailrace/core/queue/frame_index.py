"""An index of the frames of a partition: their columns and lanes, by run, without opening them."""

from __future__ import annotations

from array import array
from bisect import bisect_right

import numpy as np

from tailrace.core.core_tuning import INDEX_ENTRIES_MAX
from tailrace.core.model.identifiers import (
    HAS_EXPIRES_AT,
    HAS_KEY,
    HAS_PRIORITY,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    BatchView,
)

REMEMBERED = HAS_KEY | HAS_EXPIRES_AT
PLAIN_LANE = 1 << PRIORITY_DEFAULT
LANES_AT = 8
"""A trait holds the `REMEMBERED` columns of a run and, above them, a bit for each of its lanes."""
PLAIN = PLAIN_LANE << LANES_AT
_PLACES = np.arange(PRIORITY_MAX + 1)


class FrameIndex:
    """Runs of frames with equal traits. The index may claim more than is there, never less: when there are
    too many runs, neighbours are merged."""

    def __init__(self) -> None:
        self._starts = array("Q", (0,))
        self._traits = array("H", (PLAIN,))
        self._end = 0
        self._last = [0, 0, 0]
        self._recount()

    def appended(self, first: int, view: BatchView) -> None:
        """Add an appended batch."""
        trait = (view.columns & REMEMBERED) | PLAIN
        if view.columns & HAS_PRIORITY and view.priorities is not None:
            counts = np.bincount(view.priorities, minlength=PRIORITY_MAX + 1)
            trait = (trait & REMEMBERED) | int(((counts > 0) << _PLACES).sum()) << LANES_AT
        self._end = end = first + view.count
        if trait != self._traits[-1]:
            if self._starts[-1] == first:
                self._traits[-1] = trait
                if len(self._traits) > 1 and self._traits[-2] == trait:
                    del self._starts[-1], self._traits[-1]
            else:
                self._starts.append(first)
                self._traits.append(trait)
                if len(self._starts) > INDEX_ENTRIES_MAX:
                    self._coarsen()
        if trait != PLAIN:
            self._note(trait, end)

    def lost(self, end: int) -> None:
        """Messages up to `end` are lost: no frame is there to be opened."""
        self._end = end

    def trimmed(self, offset: int) -> None:
        """Forget frames below an offset."""
        gone = bisect_right(self._starts, offset) - 1
        if gone > 0:
            del self._starts[:gone], self._traits[:gone]
            self._starts[0] = 0

    # ------------------------------------------------------------------------------------------- questions

    def laned(self, offset: int) -> bool:
        """Whether some message from an offset on may have another priority than the default."""
        return self._last[0] > offset

    def keyed(self, offset: int) -> bool:
        """Whether some message from an offset on may have a key."""
        return self._last[1] > offset

    def ending(self, offset: int) -> bool:
        """Whether some message from an offset on may expire."""
        return self._last[2] > offset

    def columns(self, first: int, end: int) -> int:
        """The columns (`HAS_KEY`, `HAS_EXPIRES_AT`) that some message in [first, end) may have."""
        at = bisect_right(self._starts, first) - 1
        found = self._traits[at]
        while (at := at + 1) < len(self._starts) and self._starts[at] < end:
            found |= self._traits[at]
        return found & REMEMBERED

    def lanes(self, offset: int) -> tuple[int, int]:
        """The lanes (a bit each) that rows from `offset` on may have, and the end of the run for which that
        holds: above `offset`, and not above the end of the partition unless it is the last run."""
        at = bisect_right(self._starts, offset) - 1
        end = self._starts[at + 1] if at + 1 < len(self._starts) else max(self._end, offset + 1)
        return self._traits[at] >> LANES_AT, end

    # -------------------------------------------------------------------------------------------- snapshot

    def buffers(self) -> tuple[bytes, bytes]:
        """The state for a snapshot."""
        return self._starts.tobytes(), self._traits.tobytes()

    def load(self, starts: memoryview, traits: memoryview, end: int) -> None:
        """Restore the state from a snapshot."""
        self._starts, self._traits, self._end = array("Q"), array("H"), end
        self._starts.frombytes(starts)
        self._traits.frombytes(traits)
        if not len(self._starts) == len(self._traits) > 0:
            raise ValueError("the traits of a snapshot do not fit together")
        self._recount()

    def verify(self) -> None:
        """Assert the invariants."""
        assert self._starts[0] == 0
        assert list(self._starts) == sorted(set(self._starts)), "traits out of order"
        assert all(one != other for one, other in zip(self._traits, self._traits[1:], strict=False))

    # ------------------------------------------------------------------------------------------- internals

    def _note(self, trait: int, end: int) -> None:
        if trait >> LANES_AT != PLAIN_LANE:
            self._last[0] = end
        if trait & HAS_KEY:
            self._last[1] = end
        if trait & HAS_EXPIRES_AT:
            self._last[2] = end

    def _recount(self) -> None:
        self._last = [0, 0, 0]
        ends = [*self._starts[1:], self._end]
        for trait, end in zip(self._traits, ends, strict=True):
            self._note(trait, end)

    def _coarsen(self) -> None:
        """Merge runs in pairs; a merged run has the traits of both."""
        starts, traits = array("Q"), array("H")
        for at in range(0, len(self._starts), 2):
            both = self._traits[at] | (self._traits[at + 1] if at + 1 < len(self._traits) else 0)
            if not traits or traits[-1] != both:
                starts.append(self._starts[at])
                traits.append(both)
        self._starts, self._traits = starts, traits
        self._recount()
