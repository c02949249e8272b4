"""Messages of one group that are neither settled nor leased, and which of them may go next.

The state is a cursor and three disjoint sets below it. A message below the cursor that is in none of the sets
and not leased is settled.

    cursor      nothing at or above it was ever leased or settled
    fresh       never delivered, but passed over: later messages went first
    back        waits for another delivery, with counters, due time and key: failed, given back or redriven
    dying       on its way to the dead letters

The rest is an index over the state, rebuilt at need. It answers who may go now where messages of a key keep
their order. One member leases here, and handles the messages of a key in the order of delivery. So a message
in flight holds nothing up (if it fails, later ones of its key that are in flight come back with it); only one
that waits or dies holds up later ones of its key. Where several members lease from one partition,
`core.selection.key_queues` decides instead.

    blockers    by key, the offsets of its messages in back or dying, ascending
    ready       in back, delivered before, due, and everything before it in its row of blockers is ready, too
    renewed     the same, but without a counted delivery: redriven, or given back before a handler got it. It
                takes its turn by offset among messages never delivered, so later ones of its row wait for it
    held        by key, messages never delivered that selection met behind a blocker and set aside
    scanned     how far selection has looked: everything from the cursor to here is in held or open
    open        messages never delivered, below `scanned`, that may go; just fresh while nothing is held

The keys of messages never delivered are not known here: selection reads them from the frames, and reports
what it found by `scan`, so that nothing is looked at twice.

Example: six messages with the keys A B A C B A at the offsets 0 to 5.

    step                           goes       cursor    fresh    back    blockers    held
    lease 2                        0, 1       2
    ack 1; nack 0, due in 5 s                 2                  0       A: 0
    lease 1                        3          4         2        0       A: 0        A: 2
    lease 9                        4          5         2        0       A: 0        A: 2, 5
    5 s later, lease 9             0, 2, 5    6

The third step passes over 2, whose key waits for 0. The fourth looks at 5, too: it is held, and `scanned` is
6. In the last step 0 is ready. As nothing else of its key is in back, 2 and 5 go in the same lease, behind
it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from struct import Struct

from tailrace.core.collections.span_blocks import Run
from tailrace.core.collections.span_map import Runs, SpanSet, pairs

BACK = Struct("<IIQQIQQ")
"""Deliveries, failures, times of the first and last delivery, last member (a number of `texts`), due time,
key."""
DYING = Struct("<IIQQIQII")
"""Deliveries, failures, times of the first and last delivery, last member, key, reason, error (members,
reasons and errors are numbers of `texts`)."""


class Backlog:
    """The sets and their index. Offsets given to `put_*` must be in none of the sets before."""

    def __init__(self) -> None:
        self.fresh = SpanSet()
        self.back = Runs()
        self.dying = Runs()
        self.clear(0)

    def clear(self, cursor: int) -> None:
        """Start again: everything below the cursor is settled."""
        self.cursor = cursor
        self.fresh.clear()
        self.back.clear()
        self.dying.clear()
        self.rebuild(0)

    def rebuild(self, time_us: int) -> None:
        """Derive the index from the state again, as of a time."""
        self._open: SpanSet | None = None
        self.scanned = self.cursor
        """Everything from the cursor up to this offset is in `open` or `held`."""
        self.held: dict[int, list[int]] = {}
        self._look(time_us)

    def _look(self, time_us: int) -> None:
        """Derive `ready`, `renewed` and `blockers`, as of a time."""
        self.clock_us = time_us
        self.ready = SpanSet()
        self.renewed = SpanSet()
        self.blockers: dict[int, list[int]] = {}
        self._dues: list[tuple[int, int, int]] = []
        self.came_due = 0
        """How many have become ready because time passed, and nobody was told of it yet."""
        for first, end, value in self.dying:
            self._index(first, end, DYING.unpack(value)[5], dying=True)
        for first, end, value in self.back:
            self._index_back(first, end, value)

    @property
    def open(self) -> SpanSet:
        """Messages never delivered that may go: `fresh` itself while nothing is held."""
        return self.fresh if self._open is None else self._open

    def _part(self) -> SpanSet:
        """`open` as a set of its own."""
        if self._open is None:
            self._open = SpanSet()
            for first, end in self.fresh.spans():
                self._open.add(first, end)
        return self._open

    # ---------------------------------------------------------------------------------------------- changes

    def take_new(self, first: int, end: int) -> list[tuple[int, int]]:
        """Take messages of [first, end) that were never delivered; return their spans. Above the cursor all
        are taken, and those between the cursor and `first` become fresh."""
        taken = []
        cursor = self.cursor
        if first < cursor:
            taken = [(start, stop) for start, stop, _ in self.fresh.cut(first, min(end, cursor))]
            if taken and self._open:
                self._open.cut(first, min(end, cursor))
            first = cursor
        if first < end:
            if first > cursor:
                self.fresh.add(cursor, first)
                if self._open is not None and self.scanned < first:
                    self._open.add(self.scanned, first)
            if self._open is not None and self.scanned > first:
                self._open.cut(first, end)
            self.cursor = end
            if self.scanned < end:
                self.scanned = end
            taken.append((first, end))
        return taken

    def take_many(self, spans: Sequence[int]) -> int:
        """`take_new` for many spans at once; return how many messages were taken."""
        last = spans[-1]
        if last > self.cursor:
            self.fresh.add(self.cursor, last)
            if self.scanned < last:
                if self._open is not None:
                    self._open.add(self.scanned, last)
                self.scanned = last
            self.cursor = last
        if self._open:
            self._open.cut_many(spans)
        return self.fresh.cut_many(spans)

    def put_back(self, first: int, end: int, value: bytes, time_us: int) -> None:
        """Messages wait for another delivery from `time_us` on."""
        if time_us > self.clock_us:
            self.clock_us = time_us
        self.back.put(first, end, value)
        self._index_back(first, end, value)

    def take_back(self, first: int, end: int) -> list[Run]:
        """Take messages of [first, end) that wait; return their runs."""
        taken = self.back.cut(first, end)
        for start, stop, value in taken:
            key = BACK.unpack(value)[6]
            if key:
                self._unindex(start, stop, key)
            else:
                self.ready.cut(start, stop)
                self.renewed.cut(start, stop)
        return taken

    def put_dying(self, first: int, end: int, value: bytes) -> None:
        """Messages are on their way to the dead letters."""
        self.dying.put(first, end, value)
        self._index(first, end, DYING.unpack(value)[5], dying=True)

    def take_dying(self, first: int, end: int) -> list[Run]:
        """Take dying messages of [first, end); return their runs."""
        taken = self.dying.cut(first, end)
        for start, stop, value in taken:
            if key := DYING.unpack(value)[5]:
                self._unindex(start, stop, key)
        return taken

    def scan(self, until: int, held: list[tuple[int, int]]) -> None:
        """Note that selection has looked at messages never delivered up to an offset; those in `held`, as
        (key, offset), wait for their key."""
        if until > self.scanned:
            self._part().add(self.scanned, until)
            self.scanned = until
        for key, offset in held:
            self._part().cut(offset, offset + 1)
            row = self.held.setdefault(key, [])
            if not row or row[-1] < offset:
                row.append(offset)
                continue
            at = bisect_left(row, offset)
            if row[at] != offset:
                row.insert(at, offset)

    # ------------------------------------------------------------------------------------------- questions

    def apart(self, spans: Sequence[int]) -> tuple[list[tuple[int, int]], Sequence[int]]:
        """Split flat spans into those that contain messages in `back` and the others, which stay flat."""
        back = self.back
        if not back or spans[0] >= self.cursor or not back.within(spans[0], spans[-1]):
            return [], spans
        holding, others = [], list[int]()
        for first, end in pairs(spans):
            if back.within(first, end):
                holding.append((first, end))
            else:
                others += (first, end)
        return holding, others

    def waits_behind(self, key: int, offset: int) -> bool:
        """Whether a message has to wait for an older one of its key that waits or dies."""
        row = self.blockers.get(key)
        return row is not None and row[0] < offset

    def next_due_us(self) -> int | None:
        """When the next message becomes due. It may have left `back` since: then `advance` finds nothing."""
        if self.came_due:
            return self.clock_us  # Some are due, and nobody was told of it yet.
        return self._dues[0][0] if self._dues else None

    def advance(self, time_us: int) -> None:
        """Set the time: messages that are due become ready."""
        if time_us < self.clock_us:
            self._look(time_us)
        self.clock_us = time_us
        dues = self._dues
        if not dues or dues[0][0] > time_us:
            return
        before = self.ready.total + self.renewed.total
        while dues and dues[0][0] <= time_us:
            due_us, first, end = heappop(dues)
            for start, stop, value in self.back.within(first, end):
                deliveries, _, _, _, _, due, key = BACK.unpack(value)
                if due != due_us:
                    continue
                if not key:
                    (self.ready if deliveries else self.renewed).add(start, stop)
                    continue
                row = self.blockers[key]
                for offset in range(start, stop):
                    self._promote(row, bisect_left(row, offset))
        self.came_due += self.ready.total + self.renewed.total - before

    def told_due(self, time_us: int) -> int:
        """Set the time; how many have become ready because time passed, since this was asked last."""
        self.advance(time_us)
        many, self.came_due = self.came_due, 0
        return many

    # ------------------------------------------------------------------------------------------- internals

    def _index_back(self, first: int, end: int, value: bytes) -> None:
        deliveries, _, _, _, _, due_us, key = BACK.unpack(value)
        if due_us > self.clock_us:
            heappush(self._dues, (due_us, first, end))
        if key and (end - first > 1 or key in self.blockers):
            self._index(first, end, key, dying=False)
            return
        if key:
            self.blockers[key] = [first]
        if due_us <= self.clock_us:
            (self.ready if deliveries else self.renewed).add(first, end)

    def _index(self, first: int, end: int, key: int, *, dying: bool) -> None:
        if not key:
            return
        row = self.blockers.setdefault(key, [])
        for offset in range(first, end):
            at = bisect_left(row, offset)
            row.insert(at, offset)
            if dying or not self._promote(row, at):
                self._demote(row, at + 1)

    def _unindex(self, first: int, end: int, key: int) -> None:
        row = self.blockers[key]
        if len(row) == 1:
            del self.blockers[key]
            self.ready.cut(first, end)
            self.renewed.cut(first, end)
            if key in self.held:
                self._free(key)
            return
        for offset in range(first, end):
            at = bisect_left(row, offset)
            del row[at]
            self.ready.cut(offset, offset + 1)
            self.renewed.cut(offset, offset + 1)
            if row:
                self._promote(row, at)
        if not row:
            del self.blockers[key]
        if key in self.held:
            self._free(key)

    def _free(self, key: int) -> None:
        """Open the held messages of a key that no blocker precedes any more."""
        held, row = self.held[key], self.blockers.get(key)
        until = bisect_left(held, row[0]) if row else len(held)
        for offset in held[:until]:
            if offset >= self.cursor or offset in self.fresh:
                self._part().add(offset, offset + 1)
        del held[:until]
        if not held:
            del self.held[key]

    def _promote(self, row: list[int], at: int) -> bool:
        """Make messages of a key's row ready, from index `at` on, up to the first that is not due, is dying,
        or is renewed. Return whether the message at the index is ready, so that it does not hold up the
        next."""
        if at and row[at - 1] not in self.ready:
            return False
        start = at
        while at < len(row):
            offset = row[at]
            if offset in self.ready:
                break
            run = self.back.at(offset)
            if run is None:
                break
            deliveries, _, _, _, _, due_us, _ = BACK.unpack(run[2])
            if due_us > self.clock_us:
                break
            if not deliveries:
                self.renewed.add(offset, offset + 1)
                break
            self.ready.add(offset, offset + 1)
            at += 1
        return start < len(row) and row[start] in self.ready

    def _demote(self, row: list[int], at: int) -> None:
        """Take back `ready` from index `at` of a key's row on: a message before it waits."""
        while at < len(row):
            offset = row[at]
            if not self.ready.remove(offset, offset + 1):
                self.renewed.cut(offset, offset + 1)
                break
            at += 1

    def verify(self) -> None:
        """Assert the invariants."""
        for runs in (self.fresh, self.back, self.dying, self.ready, self.renewed, self.open):
            runs.verify()
        again = Backlog()
        again.back, again.dying = self.back, self.dying
        again.rebuild(self.clock_us)
        assert again.blockers == self.blockers, "the keys held are not those of the messages"
        assert self.scanned >= self.cursor
        for ours, theirs in ((self.ready, again.ready), (self.renewed, again.renewed)):
            for first, end in ours.spans():
                assert theirs.intersect(first, end) == [(first, end)], f"ready too early: {first}-{end}"
        for first, end in self.open.spans(0, self.cursor):
            assert self.fresh.intersect(first, end) == [(first, end)], f"open, not fresh: {first}-{end}"
