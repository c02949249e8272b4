"""One lane during one selection by key: what is offered, and what the keys drawn so far offer after it."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from tailrace.core.model.identifiers import Columns
from tailrace.core.selection.lane_queues import BLOCK_ROWS, LAPSED_MAX, NEVER_US, View, row_bytes, row_of
from tailrace.core.selection.lanes import EMPTY, READY, UNKNOWN

if TYPE_CHECKING:
    from tailrace.core.selection.key_queues import KeyQueues

CODE = (1 << 62) - 1
"""Mask that gives the code of an entry."""
NOTHING = 1 << 62
"""Behind every entry of a message that was never delivered; their entries are their codes."""
RUN_MIN = 4


def retry_entry(due_us: int, code: int) -> int:
    """The entry of a message that came back: below zero, in the order in which they became due."""
    return (due_us << 64 | code) - (1 << 128)


class Spot:
    """Offers of one lane: those that came with the log, in its order, others that were never delivered in a
    heap, and what came back in another."""

    __slots__ = ("back", "back_top", "fresh", "heap", "start", "top")

    def __init__(self) -> None:
        self.fresh: list[int] = []
        self.start = 0
        """What is in front of it does not stand any more."""
        self.heap: list[int] = []
        self.back: list[int] = []
        self.top = self.back_top = NOTHING
        """The best offers of the heaps, after `lift`."""

    def push(self, entry: int) -> None:
        """Offer something more."""
        heappush(self.heap if entry >= 0 else self.back, entry)

    def lift(self, rows: dict[int, KeyQueue]) -> None:
        """Drop offers from the heaps until those on top still stand."""
        self.top = self._stands(self.heap, rows) if self.heap else NOTHING
        self.back_top = self._stands(self.back, rows) if self.back else NOTHING

    def _stands(self, heap: list[int], rows: dict[int, KeyQueue]) -> int:
        while heap:
            entry = heap[0]
            queue = rows.get((entry & CODE) >> 3)
            if queue is not None and queue.spot is self and queue.entry == entry:
                return entry
            heappop(heap)
        return NOTHING

    def next_fresh(self, place: int, rows: dict[int, KeyQueue]) -> tuple[int, int]:
        """The first of those that came with the log, from a place on, that still stands: place and entry."""
        fresh = self.fresh
        while place < len(fresh):
            code = fresh[place]
            queue = rows.get(code >> 3)
            if queue is not None and queue.untouched and queue.codes[0] == code:
                return place, code
            place += 1
        return place, NOTHING

    def trim(self, rows: dict[int, KeyQueue]) -> None:
        """Go past offers that do not stand any more."""
        self.start, _ = self.next_fresh(self.start, rows)
        if self.start > 4_096 or self.start == len(self.fresh):
            del self.fresh[: self.start]
            self.start = 0


class KeyQueue:
    """The known unsettled messages of a key, as codes (``offset << 3 | lane``), ascending. A message without
    a key (0) is alone in its queue."""

    __slots__ = ("codes", "entry", "flying", "holder", "key", "mixed", "more", "spot", "untouched")

    def __init__(self, key: int, code: int) -> None:
        self.key = key
        self.codes = [code]
        self.flying = 0
        """How many are in flight, to `holder`; the first ones, unless `mixed`."""
        self.holder = ""
        self.mixed = False
        self.more: int | None = None
        """From here on messages of the key were not taken into the window."""
        self.untouched = False
        """Its first message is offered as it came with the log."""
        self.entry = 0
        self.spot: Spot | None = None
        """What else is offered, and where; None: nothing."""

    def first_down(self, flying: set[int], row: int = 0) -> int:
        """The first row from `row` on that is not in flight."""
        if not self.mixed and self.flying > row:
            return self.flying
        codes = self.codes
        while row < len(codes) and codes[row] >> 3 in flying:
            row += 1
        return row


class KeyCursor:
    """A lane during one selection. It shows runs of rows, longer ones as more is drawn. The offers that it
    takes out of their heaps are put back when the selection ends."""

    __slots__ = (
        *("_columns", "_dying_holds", "_end", "_feeds", "_first", "_following", "_free", "_fresh", "_held"),
        *("_last", "_left", "_place", "_queues", "_returning", "_size", "_some_back", "_view"),
        *("hole", "stale", "starved_code", "starved_us"),
        *("at", "missing", "row_bytes", "rows", "since_us", "state"),
    )

    def __init__(
        self,
        queues: KeyQueues,
        view: View,
        spots: tuple[Spot, Spot],
        feeds: list[KeyCursor],
        dying_holds: bool,
    ) -> None:
        self._queues = queues
        self._view = view
        self._free, self._held = spots
        self._feeds = feeds
        self._dying_holds = dying_holds
        self._free.trim(queues.rows)
        self._place = self._free.start
        self._fresh = self._free.fresh[self._place] if self._free.fresh else NOTHING
        self._free.lift(queues.rows)
        self._held.lift(queues.rows)
        self._following: list[tuple[int, int, KeyQueue]] = []
        """(entry, row, key): what keys that were drawn from offer next."""
        self._returning: list[tuple[int, int, KeyQueue]] = []
        """The same, of what came back."""
        self._some_back = min(self._free.back_top, self._held.back_top) < 0
        """There may be something that came back; mostly there is not."""
        self._last: tuple[int, int, KeyQueue] | None = None
        """The end of the run that is shown, when its key has not offered the one behind it yet."""
        self._left = view.want.count_max
        self._size = 1 if queues.expiring else min(RUN_MIN, self._left)
        self._first = self._end = 0
        self._columns: Columns | None = None
        self.starved_us = self.starved_code = 0
        """What waits since then goes by its time: in the window, entries below the code."""
        self.hole: int | None = None
        """Where the window ends for want of a frame; None if nothing of this lane can be behind that."""
        self.stale = True
        self.state = EMPTY
        self.rows: list[int] = []
        self.at = 0
        self.since_us = 0
        self.row_bytes = 0.0
        self.missing: int | None = None

    def refill(self) -> bool:
        """What was shown was drawn: show what is next. Whether other lanes show something else now."""
        if self._last is not None:
            _, row, queue = self._last
            self._follow(queue, row)
        if self._size > 1:
            # Never more than can still be drawn: what is shown in vain has to be offered again.
            self._left -= len(self.rows)
            self._size = max(min(2 * self._size, BLOCK_ROWS, self._left), 1)
        self._show()
        return self.refresh()

    def refresh(self) -> bool:
        """Show what is next in every lane that was given something by another."""
        changed = False
        while stale := [feed for feed in self._feeds if feed.stale]:
            changed = True
            for feed in stale:
                feed._show_again()
        return changed

    def _show_again(self) -> None:
        if self.state != READY:
            self._show()
        elif self._last is not None and len(self.rows) == 1:
            self._offer_next(self._last)
            self._show()
        self.stale = False

    def _show(self) -> None:
        """Gather a run of rows that are next in this lane: of one frame, a retry always alone."""
        run: list[int] = []
        self.stale, self._last = False, None
        self.rows, self.at, self.missing, self.state, self.since_us = run, 0, None, UNKNOWN, 0
        size = self._size
        while (entry := self._best() if self._some_back else self._best_fresh()) != NOTHING:
            offset = (entry & CODE) >> 3
            if entry < 0 and not run:
                if self._pass_lapsed():
                    continue
                if len(self._view.lapsed) >= LAPSED_MAX:
                    return
                if self._hole_may_starve(entry):
                    break
            if not self._first <= offset < self._end:
                if run:
                    break
                if not self._open(offset):
                    self.missing, self.since_us = offset, self._since(entry)
                    return
            if self._queues.expiring and self._expired(self._columns, offset):
                if run:
                    break
                if len(self._view.lapsed) >= LAPSED_MAX:
                    return
                self._pass_over(offset, *self._take(entry))
                continue
            if not run:
                self.since_us = self._since(entry)
            elif entry < 0:
                break
            queue, row = self._take(entry)
            run.append(offset)
            if entry < 0 or len(run) == size:
                self._last = (entry, row, queue)
                break
            if row + 1 < len(queue.codes):
                self._follow(queue, row)
        if run:
            self.state = READY
        else:
            self.missing, self.since_us = self.hole, self._queues.latest_us
            self.state = EMPTY if self.hole is None else UNKNOWN

    def _since(self, entry: int) -> int:
        """Since when the lane waits when this is next: something behind a retry may starve."""
        if entry >= 0:
            return self._fresh_since(entry)
        due_us, fresh_us = self._queues.due[(entry & CODE) >> 3], self._fresh_since(self._best_fresh())
        return min(due_us, fresh_us) if fresh_us <= self.starved_us else due_us

    def _fresh_since(self, code: int) -> int:
        if code < self.starved_code:
            return self._queues.since(code >> 3)
        return NEVER_US if code < NOTHING or self.hole is None else self._queues.latest_us

    def _hole_may_starve(self, entry: int) -> bool:
        """Whether the frame that is missing may have something that has waited longer than a retry."""
        latest_us = self._queues.latest_us
        unknown = self.hole is not None and latest_us <= self.starved_us and self._best_fresh() == NOTHING
        return unknown and latest_us < self._queues.due[(entry & CODE) >> 3]

    def _best(self) -> int:
        """What is next: what came back, as it became due; then what was never delivered, in its order."""
        back = self._free.back_top
        if self._held.back_top < back:
            back = self._held.back_top
        if self._returning and self._returning[0][0] < back:
            back = self._returning[0][0]
        return back if back < 0 else self._best_fresh()

    def _best_fresh(self) -> int:
        best = self._fresh
        if self._free.top < best:
            best = self._free.top
        if self._held.top < best:
            best = self._held.top
        if self._following and self._following[0][0] < best:
            best = self._following[0][0]
        return best

    def _take(self, entry: int) -> tuple[KeyQueue, int]:
        """Take the best offer out of where it stands: its key and row."""
        rows = self._queues.rows
        if entry == self._fresh:
            queue = rows[entry >> 3]
            self._place, self._fresh = self._free.next_fresh(self._place + 1, rows)
            return queue, 0
        following = self._returning if entry < 0 else self._following
        if following and following[0][0] == entry:
            _, row, queue = heappop(following)
            return queue, row
        free = self._free
        spot = free if entry == free.top or entry == free.back_top else self._held
        queue = rows[(entry & CODE) >> 3]
        queue.spot = None
        self._queues.drawn.append((queue, spot))
        spot.lift(rows)
        return queue, queue.first_down(self._queues.flying)

    def _follow(self, queue: KeyQueue, row: int) -> None:
        """The message behind one that was drawn is next of its key."""
        row = queue.first_down(self._queues.flying, row + 1) if queue.mixed else row + 1
        if row < len(queue.codes):
            entry = self._queues.entry(queue, row)
            if entry is not None:
                self._offer_next((entry, row, queue))

    def _offer_next(self, following: tuple[int, int, KeyQueue]) -> None:
        if following[0] >= 0:
            heappush(self._following, following)
        else:
            heappush(self._returning, following)
            self._some_back = True

    def _open(self, offset: int) -> bool:
        columns = self._view.at_hand.columns(offset)
        if columns is None:
            return False
        self._columns = columns
        self._first, self._end = columns.base_offset, columns.end_offset
        self.row_bytes = row_bytes(columns)
        if columns.expires_us is not None:
            self._queues.expiring = True
        return True

    def _expired(self, columns: Columns | None, offset: int) -> bool:
        if columns is None or columns.expires_us is None:
            return False
        return 0 < int(columns.expires_us[row_of(columns, offset)]) <= self._view.want.wall_us

    def _pass_lapsed(self) -> bool:
        """A retry is next. The fresh message behind it, by which the lane would starve, is passed over if it
        has expired: it does not wait. Whether it was."""
        code = self._best_fresh()
        if code >= self.starved_code or len(self._view.lapsed) >= LAPSED_MAX:
            return False
        columns = self._view.at_hand.columns(code >> 3)
        if not self._expired(columns, code >> 3):
            return False
        self._queues.expiring = True
        self._pass_over(code >> 3, *self._take(code))
        return True

    def _pass_over(self, offset: int, queue: KeyQueue, row: int) -> None:
        """A message has outlived its time. The one behind it may go, in the lane that the key has then,
        unless the key is held until the lapsed one is buried."""
        lapsed = self._view.lapsed
        lapsed[offset] = None
        if self._dying_holds or row + 1 >= len(queue.codes):
            return
        lane = next(code & 7 for code in queue.codes if code >> 3 not in lapsed)
        feed = self._feeds[lane]
        feed._follow(queue, row)
        feed.stale = feed is not self
