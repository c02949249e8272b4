"""Offsets of a partition whose messages are lost for good, and whose loss was accepted by an operator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from tailrace.core.collections.span_map import flat, pairs
from tailrace.core.log_head import LogHead
from tailrace.core.model.commands import Done
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.facts import MessagesLost
from tailrace.core.model.internal_commands import RecordLoss
from tailrace.core.model.turn_input import TurnInput


class LostOffsets:
    """Spans of offsets without messages. They are forgotten when the partition is trimmed beyond them."""

    def __init__(self, head: LogHead) -> None:
        self._head = head
        self.spans: list[int] = []
        """Flat, ascending, not touching each other."""

    def load(self, spans: Sequence[int]) -> None:
        """Restore the state from `spans`."""
        self.spans = list(spans)

    def range_at(self, offset: int) -> tuple[int, int] | None:
        """The lost range that contains an offset."""
        at = bisect_right(self.spans, offset)
        return (self.spans[at - 1], self.spans[at]) if at % 2 else None

    def next_from(self, offset: int, end: int) -> int:
        """Where the first lost range from an offset on begins, at most `end`."""
        at = bisect_right(self.spans, offset)
        return min(end, self.spans[at]) if at < len(self.spans) and not at % 2 else end

    def within(self, spans: Sequence[int]) -> list[tuple[int, int]]:
        """The lost parts of other spans."""
        found = [
            (max(first, begin), min(end, stop))
            for first, end in pairs(spans)
            for begin, stop in pairs(self.spans)
        ]
        return [(first, end) for first, end in found if first < end]

    def decide(self, command: RecordLoss, turn: TurnInput) -> Decision:
        """Record an accepted loss; offsets that are trimmed or known to be lost need no fact."""
        start, end = self._head.start_offset, self._head.end_offset
        spans = [(max(first, start), min(stop, end)) for first, stop in pairs(command.spans)]
        spans = [(first, stop) for first, stop in spans if first < stop]
        if not spans or all(self.range_at(first) == (first, stop) for first, stop in spans):
            return Decision(NOTHING, Done())
        return Decision((MessagesLost(flat(spans), turn.now_us),), Done())

    def apply(self, fact: MessagesLost) -> None:
        """Apply a fact."""
        joined: list[int] = []
        for first, end in sorted([*pairs(self.spans), *pairs(fact.spans)]):
            if joined and first <= joined[-1]:
                joined[-1] = max(joined[-1], end)
            else:
                joined += (first, end)
        self.spans = joined
        self._head.pass_time(fact.time_us)

    def trimmed(self, offset: int) -> None:
        """Forget lost offsets below the beginning of the partition."""
        if self.spans and self.spans[0] < offset:
            self.spans = flat((max(first, offset), end) for first, end in pairs(self.spans) if end > offset)

    def verify(self) -> None:
        """Assert the invariants."""
        assert len(self.spans) % 2 == 0
        assert self.spans == sorted(set(self.spans)), "lost ranges out of order"
        assert not self.spans or self.spans[-1] <= self._head.end_offset
