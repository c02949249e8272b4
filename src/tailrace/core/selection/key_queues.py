"""Messages by key where keys matter: a key never overtakes itself and is in flight to one member only.

All unsettled messages of a key that are known here stand in one queue, by offset. (A message without a key
has a queue of its own.)

- The *holder* is the member to which messages of the key are in flight, if any.
- The *candidate* is the first message of the queue that is not in flight. It is offered to the holder alone,
  or, if the key has none, to every member. While the candidate waits to be due or is dying, nothing of the
  key is offered: so it holds its key.
- The *lane* of the key is that of its oldest message, in flight or not: an urgent message behind an ordinary
  one of its key cannot go first, and does not carry the ordinary one along. To a member that asks for urgent
  messages only, an ordinary one behind an urgent one is not offered either: when its turn comes, its key is
  as ordinary as it is.

Each lane has a `Spot` of offers for every member, and one for each holder. To withdraw an offer, only the
queue is changed; the heap keeps the entry, which is skipped when it comes to the top (`Spot.lift`).

Example: offsets 0 to 4 have the keys A B A C B and the lanes 2 2 0 3 2.

    step                       goes       afterwards
    ada leases 1 message       0          A: holder ada, candidate 2, offered to ada alone, in lane 2 as 0 is
    bob leases 9               1, 4, 3    B and C: all with bob; C comes last, as its lane is less urgent
    nack of 0, due in 5 s                 A: no holder, candidate 0. It waits, so nothing of A is offered
    5 s later, eve leases 1    0          A: holder eve, candidate 2, offered to eve alone
    ack of 0                              A: no holder, candidate 2, offered to every member, now in lane 0

Messages that were never delivered are taken into the window in the order of the log, up to `looked`, and at
most `KEY_ROWS` of one key: behind that, `KeyQueue.more` says where the ledger has more of it. Keys and lanes
come from the frames. A frame that is not cached ends the window; a lane that may go on behind it waits for
the frame once its known messages are used up.

Selecting reads offers and takes none away: only events do that. Selecting may extend the window, learn keys
and lanes, and drop entries that nobody offers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from tailrace.core.core_tuning import KEY_ROWS, WINDOW_ROWS
from tailrace.core.model.identifiers import PRIORITY_DEFAULT, Columns
from tailrace.core.selection.key_offers import KeyQueue, Spot, retry_entry
from tailrace.core.selection.lane_queues import View, fresh_rows, lane_of, row_of
from tailrace.core.selection.lanes import LANES, LANES_ALL
from tailrace.core.selection.selection_terms import LedgerView

FLYING, BACK, DYING = range(3)


class Window(NamedTuple):
    """How far messages are known. `unknown` are lanes, a bit each, that may go on behind the `hole`, an
    offset where a frame is missing (None: nothing is)."""

    hole: int | None
    unknown: int


class KeyQueues:
    """The keys of one group: their queues, their offers, and the window."""

    def __init__(self, source: LedgerView) -> None:
        self.rows: dict[int, KeyQueue] = {}
        self.flying: set[int] = set()
        self.due: dict[int, int] = {}
        self.blocked: set[int] = set()
        """Dying messages."""
        self.looked = 0
        """Every unsettled message below this offset is known, but for keys that have `more`."""
        self._keys: dict[int, KeyQueue] = {}
        self._free = [Spot() for _ in range(LANES)]
        self._held: dict[str, list[Spot]] = {}
        self._held_max = 256
        self._offered: dict[str, None] = {}
        """Members to whom alone something was offered since `takers` was last called."""
        self._waiting: list[tuple[int, int]] = []
        self._now_us = 0
        self._unplaced: dict[int, tuple[int, str, int, int | None]] = {}
        """Messages delivered before whose key or lane is not known yet: state, member, due time, key."""
        self._ahead: list[KeyQueue] = []
        self._short: dict[KeyQueue, None] = {}
        """Keys that have more in the ledger and nothing left to offer."""
        self._insist = True
        """Whether to wait for a missing frame that has more of a key, or to go on with other keys. Both in
        turn, a lease each, so that neither waits for the other for ever."""
        self._lanes = 0
        """All lanes that keys have had. Messages further on may belong to these keys and share their
        lanes."""
        self.expiring = False
        """Whether some frame has messages that expire. Then lanes show one row at a time, because a key may
        change its lane when a message expires."""
        self._bases: list[int] = []
        self._times: list[int] = []
        self.drawn: list[tuple[KeyQueue, Spot]] = []
        """Keys whose offers the present selection has taken out, and the spots of those offers; empty between
        selections."""
        for first, end, due_us, keys in source.back_rows():
            self._unknown(BACK, range(first, end), "", due_us, keys)
        for member, first, end, keys in source.leased_rows():
            self._unknown(FLYING, range(first, end), member, 0, keys)
        for first, end, keys in source.dying_rows():
            self._unknown(DYING, range(first, end), "", 0, keys)

    def _unknown(self, state: int, offsets: range, member: str, due_us: int, keys: Sequence[int]) -> None:
        for row, offset in enumerate(offsets):
            self._unplaced[offset] = (state, member, due_us, keys[row] or None if keys else None)

    # ---------------------------------------------------------------------------------------------- events

    def leased(self, member: str, spans: Sequence[int], keys: Sequence[int]) -> None:
        """Messages are in flight to a member."""
        rows, flying, due = self.rows, self.flying, self.due
        self._insist = True
        touched, place = [], 0
        for first, end in zip(spans[::2], spans[1::2], strict=True):
            for offset in range(first, end):
                queue = rows.get(offset)
                if queue is None:
                    key = keys[place] or None if keys else None
                    self._unplaced[offset] = (FLYING, member, 0, key)
                elif offset not in flying:
                    flying.add(offset)
                    if due:
                        due.pop(offset, None)
                    queue.holder = member
                    queue.spot = None
                    queue.untouched = False
                    count = queue.flying = queue.flying + 1
                    if queue.codes[count - 1] >> 3 != offset:
                        queue.mixed = True
                    if count < len(queue.codes) or queue.more is not None:
                        touched.append(queue)
                place += 1
        self._offer_all(touched)

    def acked(self, spans: Sequence[int]) -> None:
        """Messages that were in flight are settled."""
        self.settled(spans)

    def settled(self, spans: Sequence[int]) -> None:
        """Messages are settled, wherever they were."""
        rows, flying = self.rows, self.flying
        touched = []
        for offset in self._known(spans):
            queue = rows.pop(offset, None)
            if queue is None:
                self._unplaced.pop(offset, None)
                continue
            codes = queue.codes
            lane = codes[0] & 7
            del codes[0 if codes[0] >> 3 == offset else bisect_left(codes, offset << 3)]
            stands = False
            if offset in flying:
                flying.remove(offset)
                queue.flying -= 1
                stands = queue.flying > 0 and queue.spot is not None and codes[0] & 7 == lane
                if not queue.flying:
                    queue.holder = ""
                    queue.mixed = False
            else:
                self.due.pop(offset, None)
                self.blocked.discard(offset)
            if not codes and queue.more is None:
                queue.spot = None
                self._keys.pop(queue.key, None)
            elif not stands:
                touched.append(queue)
        self._offer_all(touched)

    def returned(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """(first, end, due_us): messages are to be delivered again when they are due."""
        touched = []
        for first, end, due_us in runs:
            for offset in range(first, end):
                queue = self.rows.get(offset)
                if queue is None:
                    _, _, _, key = self._unplaced.get(offset, (0, "", 0, None))
                    self._unplaced[offset] = (BACK, "", due_us, key)
                    continue
                if offset in self.flying:
                    self._landed(queue, offset)
                self._wait(offset, due_us)
                touched.append(queue)
        self._offer_all(touched)

    def dying(self, spans: Sequence[int]) -> None:
        """Messages are on their way to the dead letters, and hold their keys."""
        touched = []
        for offset in self._known(spans):
            queue = self.rows.get(offset)
            if queue is None:
                if offset in self._unplaced:
                    self._unplaced[offset] = (DYING, "", 0, self._unplaced[offset][3])
                else:
                    self._unplaced[offset] = (DYING, "", 0, None)
                continue
            if offset in self.flying:
                self._landed(queue, offset)
            self.due.pop(offset, None)
            self.blocked.add(offset)
            touched.append(queue)
        self._offer_all(touched)

    def _known(self, spans: Sequence[int]) -> Iterable[int]:
        """The offsets in spans; of a span with more offsets than are known here, only the known ones."""
        for first, end in zip(spans[::2], spans[1::2], strict=True):
            if end - first <= len(self.rows) + len(self._unplaced) + 64:
                yield from range(first, end)
            else:
                yield from sorted(o for o in (*self.rows, *self._unplaced) if first <= o < end)

    def _landed(self, queue: KeyQueue, offset: int) -> None:
        """A message is not in flight any more; messages behind it in its queue may still be."""
        self.flying.remove(offset)
        queue.flying -= 1
        queue.mixed = queue.flying > 0
        if not queue.flying:
            queue.holder = ""

    def _wait(self, offset: int, due_us: int) -> None:
        self.due[offset] = due_us
        heappush(self._waiting, (due_us, offset))

    # ---------------------------------------------------------------------------------------------- offers

    def _offer_all(self, queues: Iterable[KeyQueue]) -> None:
        for queue in queues:
            self._offer(queue)

    def _offer(self, queue: KeyQueue) -> None:
        """Offer the candidate of a key, if it may go now."""
        queue.untouched = False
        codes = queue.codes
        row = queue.first_down(self.flying) if queue.mixed else queue.flying
        entry = self.entry(queue, row) if row < len(codes) else None
        if entry is None:
            queue.spot = None
            if queue.more is not None and (row >= len(codes) or codes[row] >> 3 >= queue.more):
                self._short[queue] = None
            return
        spots = self._free
        if queue.holder:
            spots = self._held.get(queue.holder) or self._held.setdefault(
                queue.holder, [Spot() for _ in range(LANES)]
            )
        spot = spots[codes[0] & 7]
        if queue.spot is not spot or queue.entry != entry:
            queue.spot = spot
            queue.entry = entry
            spot.push(entry)
            if queue.holder:
                self._offered[queue.holder] = None

    def entry(self, queue: KeyQueue, row: int) -> int | None:
        """The entry of a message in its offer; None if it has to wait."""
        code = queue.codes[row]
        offset = code >> 3
        if offset in self.blocked or (queue.more is not None and offset >= queue.more):
            return None
        if offset in self.due:
            if self.due[offset] > self._now_us:
                return None
            code = retry_entry(self.due[offset], code)
        if offset >= self.looked and queue.key:
            self._ahead.append(queue)
            return None
        return code

    # ------------------------------------------------------------------------------------------- selecting

    def prepare(self, view: View) -> Window | int:
        """Learn what can be learnt of the messages from the frames that are cached; return what the window
        has then, or an offset whose frame has to be cached first."""
        missing = self._place(view)
        if missing is not None:
            return missing
        self._wake(view.want.now_us)
        missing = self._reload(view)
        unknown, hole = 0, self._fill(view)
        if missing is None and self._short:
            missing = self._reload(view)  # In front of what came back, there are others of its key.
            if self._room() <= 0:
                hole = None  # They fill the window: nothing behind it has to be waited for.
        if missing is not None and self._insist:
            return missing
        if hole is not None:
            if any(offset >= hole and due_us <= self._now_us for offset, due_us in self.due.items()):
                return hole
            unknown = _lanes_from(hole, view) | self._lanes
        elif missing is not None:
            unknown, hole = LANES_ALL, missing
        return Window(hole, unknown)

    def spots(self, member: str) -> list[tuple[Spot, Spot]]:
        """By lane: the offers to every member, and to this one alone."""
        held = self._held.get(member) or [Spot() for _ in range(LANES)]
        return list(zip(self._free, held, strict=True))

    def starved_below(self, starved_us: int) -> int:
        """The offset below which messages that were never delivered were appended at a time or before."""
        place = bisect_right(self._times, starved_us)
        return self._bases[place] if place < len(self._bases) else self.looked

    def expires(self) -> None:
        """A frame has messages that expire; see `expiring`."""
        self.expiring = True

    def takers(self) -> list[str]:
        """Members to whom alone something was offered since this was last called."""
        offered, self._offered = self._offered, {}
        return list(offered)

    def put_back(self) -> None:
        """End a selection: offer again what it has taken out, until an event says otherwise."""
        for queue, spot in self.drawn:
            queue.spot = spot
            spot.push(queue.entry)
        self.drawn.clear()

    @property
    def latest_us(self) -> int:
        """Append time of the last frame in the window."""
        return self._times[-1] if self._times else 0

    def since(self, offset: int) -> int:
        """Append time of a message that was never delivered; of the oldest known frame, if the message is
        older."""
        return self._times[max(bisect_right(self._bases, offset) - 1, 0)] if self._bases else 0

    def _place(self, view: View) -> int | None:
        """Find the key and lane of messages delivered before; return an offset whose frame is missing."""
        for offset in sorted(self._unplaced):
            state, member, due_us, key = self._unplaced[offset]
            lane = view.lane_by_traits(offset)
            if lane is None or key is None:
                columns = view.at_hand.columns(offset)
                if columns is None:
                    return offset
                self.expiring = self.expiring or columns.expires_us is not None
                lane = lane_of(columns, offset)
                hashes = columns.key_hashes
                key = 0 if hashes is None else int(hashes[row_of(columns, offset)])
            del self._unplaced[offset]
            queue = self._join(key, offset << 3 | lane)
            if state == FLYING:
                self.flying.add(offset)
                queue.flying += 1
                queue.holder = member
                queue.mixed = True
            elif state == BACK:
                self._wait(offset, due_us)
            else:
                self.blocked.add(offset)
            self._offer(queue)
        return None

    def _join(self, key: int, code: int) -> KeyQueue:
        """Put a message into the queue of its key."""
        queue = self._keys.get(key) if key else None
        if queue is None:
            queue = KeyQueue(key, code)
            if key:
                self._keys[key] = queue
        elif not queue.codes or code > queue.codes[-1]:
            queue.codes.append(code)
        else:
            insort(queue.codes, code)
            queue.mixed = queue.flying > 0
        self.rows[code >> 3] = queue
        self._lanes |= 1 << (code & 7)
        return queue

    def _wake(self, now_us: int) -> None:
        """Offer messages that have become due."""
        self._now_us = max(self._now_us, now_us)
        waiting = self._waiting
        while waiting and waiting[0][0] <= self._now_us:
            due_us, offset = heappop(waiting)
            if self.due.get(offset) == due_us:
                self._offer(self.rows[offset])
        if len(self._held) > self._held_max:
            holders = {queue.holder for queue in self.rows.values()}
            self._held = {member: spots for member, spots in self._held.items() if member in holders}
            self._offered = {member: None for member in self._offered if member in holders}
            self._held_max = 2 * len(self._held) + 256

    def _room(self) -> int:
        """How many more messages that were never delivered fit into the window."""
        return WINDOW_ROWS - len(self.rows) + len(self.flying) + len(self.due) + len(self.blocked)

    def _fill(self, view: View) -> int | None:
        """Extend the window until it is full; return the offset where a frame is missing."""
        end_offset, missing = view.want.end_offset, None
        while True:
            room = self._room()
            if room <= 0 or self.looked >= end_offset:
                break
            place = next(view.fresh(self.looked, end_offset), None)
            if place is None:
                self.looked = end_offset
                break
            columns = view.at_hand.columns(place[0])
            if columns is None:
                missing = self.looked = place[0]
                break
            self._absorb(columns, place[0], room, view)
        if self._ahead:
            ahead, self._ahead = self._ahead, []
            self._offer_all(ahead)
        return missing

    def _absorb(self, columns: Columns, first: int, room: int, view: View) -> None:
        """Take the rows of a frame that were never delivered into the window."""
        end = min(columns.end_offset, view.want.end_offset)
        taken = _codes(columns, first, end, view)
        if len(taken) > room:
            end, taken = taken[room][0] >> 3, taken[:room]
        self.looked = end
        self.expiring = self.expiring or columns.expires_us is not None
        if not self._bases or self._bases[-1] != columns.base_offset:
            self._bases.append(columns.base_offset)
            self._times.append(columns.append_time_us)
            if len(self._bases) > 2 * WINDOW_ROWS:
                del self._bases[:WINDOW_ROWS], self._times[:WINDOW_ROWS]
        rows, keys, free = self.rows, self._keys, self._free
        for code, key in taken:
            queue = keys.get(key) if key else None
            if queue is None:
                queue = KeyQueue(key, code)
                if key:
                    keys[key] = queue
                rows[code >> 3] = queue
                queue.untouched = True
                lane = code & 7
                self._lanes |= 1 << lane
                free[lane].fresh.append(code)
            elif queue.more is None:
                if len(queue.codes) >= KEY_ROWS:
                    queue.more = code >> 3
                elif queue.codes and code > queue.codes[-1]:
                    queue.codes.append(code)
                    self._lanes |= 1 << (code & 7)
                    rows[code >> 3] = queue
                else:
                    self._offer(self._join(key, code))
                    continue
                if queue.spot is None and not queue.untouched:
                    self._offer(queue)

    def _reload(self, view: View) -> int | None:
        """Find more messages of keys that have nothing left to offer; return an offset whose frame is
        missing."""
        for queue in list(self._short):
            found = 0
            while queue.more is not None and found < KEY_ROWS:
                place = next(view.fresh(queue.more, self.looked), None)
                if place is None:
                    queue.more = None
                    break
                columns = view.at_hand.columns(place[0])
                if columns is None:
                    queue.more = place[0]
                    return place[0]
                end = min(columns.end_offset, self.looked)
                codes = [code for code, key in _codes(columns, place[0], end, view) if key == queue.key]
                for code in codes[: KEY_ROWS - found]:
                    self._join(queue.key, code)
                queue.more = end if len(codes) <= KEY_ROWS - found else codes[KEY_ROWS - found] >> 3
                found += len(codes)
            del self._short[queue]
            self._insist = False
            if queue.codes:
                self._offer(queue)
            elif queue.more is None:
                self._keys.pop(queue.key, None)
        return None


def _codes(columns: Columns, first: int, end: int, view: View) -> list[tuple[int, int]]:
    """(code, key) of the rows of a frame in [first, end) that were never delivered."""
    rows = fresh_rows(columns, first, end, view)
    offsets = rows + columns.base_offset if columns.offsets is None else columns.offsets[rows]
    lanes = PRIORITY_DEFAULT if columns.priorities is None else columns.priorities[rows].astype(np.int64)
    codes: list[int] = (offsets << 3 | lanes).tolist()
    keys = [0] * len(codes) if columns.key_hashes is None else columns.key_hashes[rows].tolist()
    return list(zip(codes, keys, strict=True))


def _lanes_from(offset: int, view: View) -> int:
    """Lanes (a bit each) that messages from an offset on may have; all lanes if that takes long to find."""
    lanes = 0
    for _ in range(16):
        if offset >= view.want.end_offset:
            return lanes
        more, offset = view.traits.lanes(offset)
        lanes |= more
    return LANES_ALL
