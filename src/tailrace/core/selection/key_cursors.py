"""One lane during one selection by key: its offers, and what the keys drawn so far offer next.

A selection must not change the offers, and still draw several messages of a key in order. So the cursor of a
lane draws from several places, always the best entry of all:

    _fresh                        the offers that came with the log, in its order, by a position that moves on
    _free, _held                  the heaps of the two spots: offers to every member, and to this member alone
    _following, _returning        what keys that this selection drew from offer next

Entries that came back are negative, in the order in which they became due; they precede entries never
delivered, which are codes in offset order. What is taken out of a heap is noted in `KeyQueues.drawn` and put
back when the selection ends.

Example: offsets 0 to 4 have the keys A B A C B and the lanes 2 2 0 3 2, and nothing is in flight. Lane 2
offers 0 (A) and 1 (B). A member leases 9 messages, and the cursor of lane 2 is asked for its first run:

    takes 0    2, the next of A, is put into _following, in this lane because A has it
    takes 1    4, the next of B, is put into _following
    takes 2    the best of _following; A has no more
    takes 4    the run is 0 1 2 4: `RUN_MIN` rows

The runs of a lane double in length as more is drawn, so that a short lease does not prepare rows in vain.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush

from tailrace.core.core_tuning import BLOCK_ROWS, LAPSED_MAX, RUN_MIN
from tailrace.core.model.identifiers import Columns
from tailrace.core.selection.key_offers import CODE, NOTHING, KeyQueue, Spot
from tailrace.core.selection.key_queues import KeyQueues
from tailrace.core.selection.lane_queues import NEVER_US, View, row_bytes, row_of
from tailrace.core.selection.lanes import EMPTY, LANES, READY, UNKNOWN


class KeyCursor:
    """A lane during one selection. It shows runs of rows, longer ones as more is drawn."""

    __slots__ = (
        *("_columns", "_dying_holds", "_end", "_feeds", "_first", "_following", "_free", "_fresh", "_held"),
        *("_last", "_left", "_place", "_queues", "_returning", "_size", "_some_back", "_view"),
        *("above", "hole", "stale", "starved_code", "starved_us"),
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
        """(entry, row, queue): what keys that were drawn from offer next, if it was never delivered."""
        self._returning: list[tuple[int, int, KeyQueue]] = []
        """The same, for messages that came back."""
        self._some_back = min(self._free.back_top, self._held.back_top) < 0
        """Whether there may be messages that came back; mostly there are none."""
        self._last: tuple[int, int, KeyQueue] | None = None
        """The last message of the run, if its key has not offered the next one yet."""
        self._left = view.want.count_max
        self._size = 1 if queues.expiring else min(RUN_MIN, self._left)
        self._first = self._end = 0
        self._columns: Columns | None = None
        self.starved_us = self.starved_code = 0
        """Messages appended at `starved_us` or before starve; in the window these are the entries below
        `starved_code`."""
        self.hole: int | None = None
        """The offset where the window ends for want of a frame; None if no message of this lane can lie
        behind it."""
        self.above = LANES
        """Only messages are wanted that are more urgent than this lane."""
        self.stale = True
        self.state = EMPTY
        self.rows: list[int] = []
        self.at = 0
        self.since_us = 0
        self.row_bytes = 0.0
        self.missing: int | None = None

    def refill(self) -> bool:
        """All rows shown were drawn: show the next run. Return whether other lanes have changed by it."""
        if self._last is not None:
            _, row, queue = self._last
            self.follow(queue, row)
        if self._size > 1:
            # Never more than can still be drawn: what is shown in vain has to be offered again.
            self._left -= len(self.rows)
            self._size = max(min(2 * self._size, BLOCK_ROWS, self._left), 1)
        self._show()
        return self.refresh()

    def refresh(self) -> bool:
        """Renew the runs of lanes to which another lane has passed a key."""
        changed = False
        while stale := [feed for feed in self._feeds if feed.stale]:
            changed = True
            for feed in stale:
                feed.show_again()
        return changed

    def show_again(self) -> None:
        if self.state != READY:
            self._show()
        elif self._last is not None and len(self.rows) == 1:
            self._offer_next(self._last)
            self._show()
        self.stale = False

    def _show(self) -> None:
        """Gather the next run of this lane: rows of one frame; a message that came back is always alone."""
        run: list[int] = []
        self.stale, self._last = False, None
        self.rows, self.at, self.missing, self.state, self.since_us = run, 0, None, UNKNOWN, 0
        size, choosy = self._size, self.above < LANES
        while (entry := self._best() if self._some_back else self._best_fresh()) != NOTHING:
            if choosy and not self._goes_ahead(entry):
                self._take(entry)  # And nothing of its key after it.
                continue
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
                self.follow(queue, row)
        if run:
            self.state = READY
        else:
            self.missing, self.since_us = self.hole, self._queues.latest_us
            self.state = EMPTY if self.hole is None else UNKNOWN

    def _goes_ahead(self, entry: int) -> bool:
        """Whether a member that wants only what is more urgent than a lane can use a message: it and all of
        its key before it are. When those have been handled, the key has the lane of this message."""
        above, code = self.above, entry & CODE
        if code & 7 >= above:
            return False
        following = self._returning if entry < 0 else self._following
        if following and following[0][0] == entry:
            return True  # It follows one that was drawn.
        codes = self._queues.rows[code >> 3].codes
        return all(before & 7 < above for before in codes[: bisect_left(codes, code)])

    def _since(self, entry: int) -> int:
        """Since when the lane waits if this entry is next. A message behind a retry may starve."""
        if entry >= 0:
            return self._fresh_since(entry)
        due_us, fresh_us = self._queues.due[(entry & CODE) >> 3], self._fresh_since(self._best_fresh())
        return min(due_us, fresh_us) if fresh_us <= self.starved_us else due_us

    def _fresh_since(self, code: int) -> int:
        if code < self.starved_code:
            return self._queues.since(code >> 3)
        return NEVER_US if code < NOTHING or self.hole is None else self._queues.latest_us

    def _hole_may_starve(self, entry: int) -> bool:
        """Whether the missing frame may have a message that has waited longer than a retry."""
        latest_us = self._queues.latest_us
        unknown = self.hole is not None and latest_us <= self.starved_us and self._best_fresh() == NOTHING
        return unknown and latest_us < self._queues.due[(entry & CODE) >> 3]

    def _best(self) -> int:
        """The next entry: messages that came back by due time, then those never delivered by offset."""
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
        """Take the best entry from its place; return its queue and row."""
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

    def follow(self, queue: KeyQueue, row: int) -> None:
        """Offer the message behind one that was drawn."""
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
            self._queues.expires()
        return True

    def _expired(self, columns: Columns | None, offset: int) -> bool:
        if columns is None or columns.expires_us is None:
            return False
        return 0 < int(columns.expires_us[row_of(columns, offset)]) <= self._view.want.wall_us

    def _pass_lapsed(self) -> bool:
        """A retry is next. Pass over the fresh message behind it, by which the lane would starve, if it has
        expired; return whether it had."""
        code = self._best_fresh()
        if code >= self.starved_code or len(self._view.lapsed) >= LAPSED_MAX:
            return False
        columns = self._view.at_hand.columns(code >> 3)
        if not self._expired(columns, code >> 3):
            return False
        self._queues.expires()
        self._pass_over(code >> 3, *self._take(code))
        return True

    def _pass_over(self, offset: int, queue: KeyQueue, row: int) -> None:
        """A message has expired. The one behind it may go, in the lane that the key has then, unless the
        expired one becomes a dead letter and holds the key until then."""
        lapsed = self._view.lapsed
        lapsed[offset] = None
        if self._dying_holds or row + 1 >= len(queue.codes):
            return
        lane = next(code & 7 for code in queue.codes if code >> 3 not in lapsed)
        feed = self._feeds[lane]
        feed.follow(queue, row)
        feed.stale = feed is not self


def key_cursors(
    queues: KeyQueues, view: View, starved_us: int, dying_holds: bool
) -> Sequence[KeyCursor] | int:
    """Cursors of all lanes, or an offset whose frame has to be cached first."""
    window = queues.prepare(view)
    if isinstance(window, int):
        return window
    starved_below = queues.starved_below(starved_us)
    feeds: list[KeyCursor] = []
    for lane, spots in enumerate(queues.spots(view.want.member)):
        feed = KeyCursor(queues, view, spots, feeds, dying_holds)
        feed.starved_us, feed.starved_code = starved_us, starved_below << 3
        feed.hole = window.hole if window.unknown >> lane & 1 else None
        if lane < view.want.above:
            feed.above = view.want.above
        feeds.append(feed)
    feeds[0].refresh()
    return feeds
