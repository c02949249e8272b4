"""One lane during one selection by key: what is offered, and what the keys drawn so far offer after it."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from tailrace.core.lane_queues import LAPSED_MAX, View, row_bytes, row_of
from tailrace.core.lanes import EMPTY, READY, UNKNOWN
from tailrace.core.model import Columns

if TYPE_CHECKING:
    from tailrace.core.key_queues import KeyQueues

RETRY = 1 << 62
"""Taken off the code of a message that came back: it stands in front of all that were never delivered."""
NEVER_US = 1 << 62


class Spot:
    """Offers of one lane: codes in the order of the log, and all others in a heap."""

    __slots__ = ("fresh", "heap")

    def __init__(self) -> None:
        self.fresh: deque[int] = deque()
        self.heap: list[int] = []


class KeyQueue:
    """The known unsettled messages of a key, as codes (``offset << 3 | lane``), ascending. A message without
    a key (0) is alone in its queue."""

    __slots__ = ("codes", "entry", "flying", "holder", "key", "mixed", "more", "spot")

    def __init__(self, key: int, code: int) -> None:
        self.key = key
        self.codes = [code]
        self.flying = 0
        """How many are in flight, to `holder`; the first ones, unless `mixed`."""
        self.holder = ""
        self.mixed = False
        self.more: int | None = None
        """From here on messages of the key were not taken into the window."""
        self.entry = 0
        self.spot: Spot | None = None
        """What is offered and where; None: nothing."""

    def first_down(self, flying: set[int], row: int = 0) -> int:
        """The first row from `row` on that is not in flight."""
        if not self.mixed:
            return max(self.flying, row)
        codes = self.codes
        while row < len(codes) and codes[row] >> 3 in flying:
            row += 1
        return row


class KeyFeed:
    """A lane during one selection. What is shown is taken out only when it was drawn."""

    __slots__ = (
        *("_columns", "_dying_holds", "_end", "_feeds", "_first", "_following", "_free", "_held"),
        *("_queue", "_queues", "_row", "_source", "_view", "hole", "stale", "starved_code"),
        *("at", "missing", "row_bytes", "rows", "since_us", "state"),
    )

    def __init__(
        self,
        queues: KeyQueues,
        view: View,
        spots: tuple[Spot, Spot],
        feeds: list[KeyFeed],
        dying_holds: bool,
    ) -> None:
        self._queues = queues
        self._view = view
        self._free, self._held = spots
        self._feeds = feeds
        self._dying_holds = dying_holds
        self._following: list[tuple[int, int, KeyQueue]] = []
        """(entry, row, key): what keys that were drawn from offer next."""
        self._source: deque[int] | list[int] | list[tuple[int, int, KeyQueue]] = []
        self._queue: KeyQueue | None = None
        self._row = 0
        self._first = self._end = 0
        self._columns: Columns | None = None
        self.starved_code = 0
        self.hole: int | None = None
        """Where the window ends for want of a frame; None if nothing of this lane can be behind that."""
        self.stale = True
        self.state = EMPTY
        self.rows: list[int] = []
        self.at = 0
        self.since_us = 0
        self.row_bytes = 0.0
        self.missing: int | None = None

    def refill(self) -> None:
        """What was shown was drawn: take it out and show the next."""
        queue, row = self._take_out()
        following = queue.first_down(self._queues.flying, row + 1)
        if following < len(queue.codes):
            entry = self._queues.entry(queue, following)
            if entry is not None:
                heappush(self._following, (entry, following, queue))
        self.stale = True
        self.refresh()

    def refresh(self) -> None:
        """Show what is next in every lane that has changed."""
        if self.stale:
            self._show()
        stale = [feed for feed in self._feeds if feed.stale]
        while stale:
            for feed in stale:
                feed._show()
            stale = [feed for feed in self._feeds if feed.stale]

    def _show(self) -> None:
        self.stale = False
        self.at, self.missing, self.state = 0, None, UNKNOWN
        while True:
            entry = self._best()
            if entry is None:
                self.missing = self.hole
                self.state = EMPTY if self.hole is None else UNKNOWN
                return
            offset = (entry if entry >= 0 else entry + RETRY) >> 3
            if not self._first <= offset < self._end and not self._open(offset):
                self.missing = offset
                return
            if not self._expired(offset):
                break
            if len(self._view.lapsed) >= LAPSED_MAX:
                return
            self._lapse(offset)
        self.rows = [offset]
        if entry < 0:
            self.since_us = self._queues.due[offset]
        else:
            self.since_us = NEVER_US if entry >= self.starved_code else self._queues.since(offset)
        self.state = READY

    def _best(self) -> int | None:
        """The entry that is next, and where it stands."""
        best, self._queue = _top(self._free, self._queues.rows)
        spot = self._free
        if self._held.heap:
            held, queue = _top(self._held, self._queues.rows)
            if held is not None and (best is None or held < best):
                best, self._queue, spot = held, queue, self._held
        following = self._following
        if following and (best is None or following[0][0] < best):
            best, self._row, self._queue = following[0]
            self._source = following
        elif best is not None:
            assert self._queue is not None
            self._row = self._queue.first_down(self._queues.flying)
            self._source = spot.fresh if spot.fresh and spot.fresh[0] == best else spot.heap
        return best

    def _open(self, offset: int) -> bool:
        columns = self._view.at_hand.columns(offset)
        if columns is None:
            return False
        self._columns = columns
        self._first, self._end = columns.base_offset, columns.end_offset
        self.row_bytes = row_bytes(columns)
        return True

    def _expired(self, offset: int) -> bool:
        assert self._columns is not None
        expires = self._columns.expires_us
        if expires is None:
            return False
        return 0 < int(expires[row_of(self._columns, offset)]) <= self._view.want.now_us

    def _take_out(self) -> tuple[KeyQueue, int]:
        source, queue = self._source, self._queue
        assert queue is not None
        if isinstance(source, deque):
            source.popleft()
        else:
            heappop(source)  # type: ignore[misc]
        queue.spot = None
        self._queues.drawn.append(queue)
        return queue, self._row

    def _lapse(self, offset: int) -> None:
        """What is next has outlived its time. The one behind it may go, in the lane that the key has then,
        unless the key is held until the lapsed one is buried."""
        lapsed = self._view.lapsed
        lapsed[offset] = None
        queue, row = self._take_out()
        following = queue.first_down(self._queues.flying, row + 1)
        if self._dying_holds or following >= len(queue.codes):
            return
        entry = self._queues.entry(queue, following)
        if entry is not None:
            lane = next(code & 7 for code in queue.codes if code >> 3 not in lapsed)
            feed = self._feeds[lane]
            heappush(feed._following, (entry, following, queue))
            feed.stale = feed is not self


def _top(spot: Spot, rows: dict[int, KeyQueue]) -> tuple[int | None, KeyQueue | None]:
    """The first offer that still stands."""
    fresh, heap = spot.fresh, spot.heap
    best = found = None
    while fresh:
        queue = rows.get(fresh[0] >> 3)
        if queue is not None and queue.spot is spot and queue.entry == fresh[0]:
            best, found = fresh[0], queue
            break
        fresh.popleft()
    while heap:
        entry = heap[0]
        if best is not None and best <= entry:
            break
        queue = rows.get((entry if entry >= 0 else entry + RETRY) >> 3)
        if queue is not None and queue.spot is spot and queue.entry == entry:
            return entry, queue
        heappop(heap)
    return best, found
