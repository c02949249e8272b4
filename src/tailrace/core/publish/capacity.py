"""Room in a partition: how much it holds, what all groups have settled, and what is trimmed for an append.

On an ephemeral topic a message is kept until every group has settled it. `max_messages` and `max_bytes` limit
what is kept. After every decision the limits hold for [start_offset, end_offset):

1. settled messages make room: they are trimmed in the same decision as the append;
2. if that is not enough, the append is refused or the oldest messages are trimmed, by the topic's `on_full`.

Bytes are those of stored batches, divided evenly among the messages of a batch. Sums are kept per run of
batches, and neighbouring runs are merged when there are too many, so that a partition of any size costs a few
kilobytes here.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import msgspec

from tailrace.core.collections.hash_table import Buffer
from tailrace.core.core_tuning import CAPACITY_RUNS_MAX, RETRY_AFTER_MS
from tailrace.core.log_head import LogHead
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.facts import Appended, Delayed, Trimmed
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.topic_options import TopicOptions
from tailrace.errors import Corrupt, Overloaded, TooLarge

ANY = 1 << 62
"""No limit: more than there ever is."""


def too_large(options: TopicOptions, count: int, nbytes: int) -> Refusal | None:
    """Why a batch never fits, not even into an empty ring; None if it does."""
    for name, size, most in (
        ("max_messages", count, options.max_messages),
        ("max_bytes", nbytes, options.max_bytes),
    ):
        if most is not None and size > most:
            text = f"{size} {name.removeprefix('max_')} are more than the topic's {name}, {most}"
            return Refusal(TooLarge.code, text, details={"size": size, "limit": most})
    return None


class Capacity:
    """Sums of bytes over the offsets of one partition, and the rules of ephemeral topics."""

    def __init__(self, head: LogHead, places: Callable[[], list[int]]) -> None:
        self._head = head
        self._places = places
        """The first offset that each group has not settled."""
        self._ends: list[int] = []
        """End offset of each run of batches."""
        self._sums: list[int] = []
        """Bytes ever appended up to the end of each run."""
        self._first = (0, 0)
        """The offset where the first run begins, and the sum there."""

    # ------------------------------------------------------------------------------------------- questions

    @property
    def total(self) -> int:
        """Bytes ever appended."""
        return self._sums[-1] if self._sums else self._first[1]

    def nbytes(self, offset: int) -> int:
        """Bytes of the messages from an offset on."""
        run = bisect_right(self._ends, offset)
        if run == len(self._ends):
            return 0
        start, before = self._begin(run)
        rows, size = self._ends[run] - start, self._sums[run] - before
        return self.total - before - size * max(offset - start, 0) // rows

    def floor(self) -> int:
        """The offset below which every group has settled all messages; the start offset if there is no
        group."""
        places, start_offset = self._places(), self._head.start_offset
        return max(start_offset, min(places)) if places else start_offset

    def room(self) -> tuple[int, int]:
        """Messages and bytes that can be appended now, including the room that trimming makes."""
        options, end_offset = self._head.options, self._head.end_offset
        if options.max_messages is None and options.max_bytes is None:
            return ANY, ANY
        kept = end_offset if options.on_full == "overwrite" else self.floor()
        messages = ANY if options.max_messages is None else options.max_messages - (end_offset - kept)
        nbytes = ANY if options.max_bytes is None else options.max_bytes - self.nbytes(kept)
        return messages, nbytes

    # ---------------------------------------------------------------------------------------------- decide

    def admit(self, decision: Decision) -> Decision:
        """Add to a decision the trim that makes room for its appends, or refuse it. Every decision of the
        partition passes here once.

        Messages that were accepted earlier (delayed or staged) and are released now must be appended some
        day: if they are larger than the ring, they wait until it is empty.
        """
        options = self._head.options
        if options.max_messages is None and options.max_bytes is None:
            return decision
        count = nbytes = 0
        accepted = False
        for fact in decision.facts:
            if isinstance(fact, Appended):
                count += fact.view.count
                nbytes += fact.view.nbytes
                accepted = fact.released
            elif isinstance(fact, Delayed):
                problem = too_large(options, 1, fact.view.value_bytes_max)
                if problem is not None:
                    return Decision(NOTHING, problem)
        if not count:
            return decision
        problem = None if accepted else too_large(options, count, nbytes)
        if problem is not None:
            return Decision(NOTHING, problem)
        start = self._start_for(count, nbytes)
        if start <= self._head.start_offset:
            return decision
        floor = self.floor()
        if start > floor and options.on_full == "refuse":
            return Decision(NOTHING, self._full())
        # All settled messages are trimmed at once, so that not every single append has to make room.
        trimmed = Trimmed(max(start, floor))
        return msgspec.structs.replace(decision, facts=(*decision.facts, trimmed))

    def _start_for(self, count: int, nbytes: int) -> int:
        """The lowest start offset that leaves room for `count` more messages and `nbytes` more bytes; at most
        the end."""
        options, end_offset = self._head.options, self._head.end_offset
        start = 0
        if options.max_messages is not None:
            start = end_offset + count - options.max_messages
        if options.max_bytes is not None:
            start = max(start, self._place(self.total + nbytes - options.max_bytes))
        return min(start, end_offset)

    def _full(self) -> Refusal:
        floor = self.floor()
        held = f"{self._head.end_offset - floor} messages ({self.nbytes(floor)} bytes)"
        who = "wait for the slowest group" if self._places() else "are kept: no group is enlisted"
        text = f"the partition is full: {held} {who}"
        return Refusal(Overloaded.code, text, details={"retry_after_ms": RETRY_AFTER_MS})

    # ----------------------------------------------------------------------------------------------- apply

    def appended(self, end_offset: int, nbytes: int) -> None:
        """A batch was appended."""
        total = self.total + nbytes
        self._ends.append(end_offset)
        self._sums.append(total)
        if len(self._ends) > CAPACITY_RUNS_MAX:
            self._merge(4 * (total - self._first[1]) // CAPACITY_RUNS_MAX)

    def _merge(self, grain: int) -> None:
        """Merge neighbouring runs that have no more than `grain` bytes together."""
        ends, sums = [], []
        before = self._first[1]
        for run in range(len(self._ends) - 1):
            if self._sums[run + 1] - before > grain:
                ends.append(self._ends[run])
                sums.append(before := self._sums[run])
        self._ends, self._sums = [*ends, self._ends[-1]], [*sums, self._sums[-1]]

    def trimmed(self, offset: int) -> None:
        """The partition was trimmed up to an offset."""
        if offset > self._first[0]:
            self._first = offset, self.total - self.nbytes(offset)
            run = bisect_right(self._ends, offset)
            del self._ends[:run], self._sums[:run]

    def _begin(self, run: int) -> tuple[int, int]:
        return (self._ends[run - 1], self._sums[run - 1]) if run else self._first

    def _place(self, total: int) -> int:
        """The lowest offset below which `total` bytes were ever appended; the end if there are fewer."""
        if total <= self._first[1]:
            return self._first[0]
        run = bisect_left(self._sums, total)
        if run == len(self._sums):
            return self._head.end_offset
        start, before = self._begin(run)
        rows, size = self._ends[run] - start, self._sums[run] - before
        return start - (before - total) * rows // size  # Rounded up.

    # -------------------------------------------------------------------------------------------- snapshot

    def buffers(self) -> list[Buffer]:
        """The state for a snapshot."""
        if not self._ends and not self._first[1]:
            return []
        return [array("q", (*self._first, *self._ends)).tobytes(), array("q", self._sums).tobytes()]

    def load(self, columns: Sequence[memoryview]) -> None:
        """Restore the state from a snapshot; batches appended before sums were kept count nothing."""
        if not columns:
            self._first = self._head.end_offset, 0
            return
        if len(columns) != 2:
            raise Corrupt(f"the snapshot has {len(columns)} pieces of sums")
        places, sums = (memoryview(bytes(column)).cast("q").tolist() for column in columns)
        self._first, self._ends, self._sums = (places[0], places[1]), places[2:], sums

    def verify(self) -> None:
        """Assert the invariants."""
        assert len(self._ends) == len(self._sums) <= CAPACITY_RUNS_MAX
        for places in ([self._first[0], *self._ends], [self._first[1], *self._sums]):
            assert places == sorted(places), "sums grow"
        assert self._head.start_offset <= self._first[0]
        assert (self._ends[-1] if self._ends else self._first[0]) == self._head.end_offset
