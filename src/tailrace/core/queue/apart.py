"""Messages of one group that are set apart, because they may have ended the members that had them.

These messages wait in the backlog (`core.queue.backlog`), and are leased one at a time to members that hold
no other message; the least delivered go first. When whole workers die again and again, all messages that they
held are set apart. So the messages lie by their number of deliveries, and finding the next one costs the same
among many.
"""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.core.collections.span_map import SpanSet


class Apart:
    """Spans of offsets by the number of their deliveries."""

    __slots__ = ("_by_deliveries", "_by_due", "total")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all spans."""
        self._by_deliveries: dict[int, SpanSet] = {}
        self._by_due: dict[int, int] = {}
        """By time: how many messages starve from then on, and may go to any member like all that are due."""
        self.total = 0

    def __bool__(self) -> bool:
        return bool(self._by_deliveries)

    @property
    def least(self) -> int | None:
        """The lowest number of deliveries; None if no message is set apart."""
        return min(self._by_deliveries, default=None)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Spans, the least delivered first, then by offset. Nothing may change during iteration."""
        for deliveries in sorted(self._by_deliveries):
            yield from self._by_deliveries[deliveries].spans()

    def union(self) -> SpanSet:
        """All spans as one set."""
        found = SpanSet()
        for first, end in self:
            found.add(first, end)
        return found

    def starving_after(self, time_us: int) -> int:
        """How many messages do not starve yet at a time."""
        return sum(many for due_us, many in self._by_due.items() if due_us > time_us)

    def add(self, first: int, end: int, deliveries: int, due_us: int) -> None:
        """Set messages apart that are not yet; from `due_us` on they starve."""
        self._by_deliveries.setdefault(deliveries, SpanSet()).add(first, end)
        self._by_due[due_us] = self._by_due.get(due_us, 0) + end - first
        self.total += end - first

    def cut(self, first: int, end: int, deliveries: int, due_us: int) -> None:
        """Messages with this number of deliveries and this due time wait no more; harmless if they were not
        set apart."""
        spans = self._by_deliveries.get(deliveries)
        if spans is None:
            return
        removed = spans.remove(first, end)
        if not spans:
            del self._by_deliveries[deliveries]
        if removed:
            self.total -= removed
            self._by_due[due_us] -= removed
            if not self._by_due[due_us]:
                del self._by_due[due_us]
