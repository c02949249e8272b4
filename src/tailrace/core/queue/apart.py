"""Messages of one group that are set apart, because they may have ended the members that had them.

They are among those that wait (`core.backlog`), and are leased one at a time to members that have nothing
else, those that were delivered least first. When whole workers die again and again, all that they had is set
apart: so they lie by the number of their deliveries, and finding the next one costs the same among many.
"""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.core.collections.span_map import SpanSet


class Apart:
    """Spans of offsets by the number of their deliveries."""

    __slots__ = ("_by_deliveries", "total")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """None is set apart."""
        self._by_deliveries: dict[int, SpanSet] = {}
        self.total = 0

    def __bool__(self) -> bool:
        return bool(self._by_deliveries)

    @property
    def least(self) -> int | None:
        """How often those were delivered that were delivered least; None: there are none."""
        return min(self._by_deliveries, default=None)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Spans, those delivered least first, then by offset. Nothing may change meanwhile."""
        for deliveries in sorted(self._by_deliveries):
            yield from self._by_deliveries[deliveries].spans()

    def union(self) -> SpanSet:
        """All of them."""
        found = SpanSet()
        for first, end in self:
            found.add(first, end)
        return found

    def add(self, first: int, end: int, deliveries: int) -> None:
        """Messages are set apart that are not yet."""
        self._by_deliveries.setdefault(deliveries, SpanSet()).add(first, end)
        self.total += end - first

    def cut(self, first: int, end: int, deliveries: int) -> None:
        """Messages with so many deliveries wait no more; harmless when they were not set apart."""
        spans = self._by_deliveries.get(deliveries)
        if spans is not None:
            self.total -= spans.remove(first, end)
            if not spans:
                del self._by_deliveries[deliveries]
