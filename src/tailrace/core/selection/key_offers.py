"""The queue of a key and the spots where keys offer their next message, as `key_queues` keeps them."""

from __future__ import annotations

from heapq import heappop, heappush

CODE = (1 << 62) - 1
"""Mask that gives the code of an entry."""
NOTHING = 1 << 62
"""Greater than every entry of a message. (The entry of a message that was never delivered is its code.)"""


def retry_entry(due_us: int, code: int) -> int:
    """The entry of a message that came back: negative, ordered by due time."""
    return (due_us << 64 | code) - (1 << 128)


class Spot:
    """Offers of one lane: those that came with the log, in its order; others never delivered, in a heap; and
    messages that came back, in another heap."""

    __slots__ = ("back", "back_top", "fresh", "heap", "start", "top")

    def __init__(self) -> None:
        self.fresh: list[int] = []
        self.start = 0
        """Offers before this index are void."""
        self.heap: list[int] = []
        self.back: list[int] = []
        self.top = self.back_top = NOTHING
        """The best valid offers of the heaps, after `lift`."""

    def push(self, entry: int) -> None:
        """Add an offer."""
        heappush(self.heap if entry >= 0 else self.back, entry)

    def lift(self, rows: dict[int, KeyQueue]) -> None:
        """Drop void offers from the heaps until those on top are valid."""
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
        """The first valid offer that came with the log, from an index on: index and entry."""
        fresh = self.fresh
        while place < len(fresh):
            code = fresh[place]
            queue = rows.get(code >> 3)
            if queue is not None and queue.untouched and queue.codes[0] == code:
                return place, code
            place += 1
        return place, NOTHING

    def trim(self, rows: dict[int, KeyQueue]) -> None:
        """Drop void offers from the beginning of those that came with the log."""
        self.start, _ = self.next_fresh(self.start, rows)
        if self.start > 4_096 or self.start == len(self.fresh):
            del self.fresh[: self.start]
            self.start = 0


class KeyQueue:
    """The known unsettled messages of a key, as ascending codes (``offset << 3 | lane``). A message without a
    key (0) is alone in its queue."""

    __slots__ = ("codes", "entry", "flying", "holder", "key", "mixed", "more", "spot", "untouched")

    def __init__(self, key: int, code: int) -> None:
        self.key = key
        self.codes = [code]
        self.flying = 0
        """The number of messages in flight, to `holder`: the first ones, unless `mixed`."""
        self.holder = ""
        self.mixed = False
        self.more: int | None = None
        """From this offset on, messages of the key were not taken into the window."""
        self.untouched = False
        """Whether its first message is offered as it came with the log (`Spot.fresh`)."""
        self.entry = 0
        self.spot: Spot | None = None
        """Otherwise the offer of the key, and the spot where it is; None: nothing is offered."""

    def first_down(self, flying: set[int], row: int = 0) -> int:
        """The first row from `row` on that is not in flight."""
        if not self.mixed and self.flying > row:
            return self.flying
        codes = self.codes
        while row < len(codes) and codes[row] >> 3 in flying:
            row += 1
        return row
