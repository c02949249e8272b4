"""Ids of cancelled messages, so that a repeated cancel is answered like the first, after their time too.

Only so many are kept, the latest: new ones go to the young table; when it is full it becomes the old one, and
what was the old one is forgotten. So memory is bounded, and no clock is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tailrace.core.collections.hash_table import MISSING, Buffer, HashTable
from tailrace.core.model.identifiers import hash128

KEPT_MIN = 100_000
"""So many of a partition are remembered for certain, and at most twice as many and one request."""


class CancelledIds:
    """What was cancelled last in one partition."""

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young, self._old = HashTable(), HashTable()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, name: bytes) -> bool:
        # Hashed, as clients choose ids: those that only count up would stand in each other's way.
        low, high = hash128(name)
        return any(table.get(low, high) != MISSING for table in (self._young, self._old))

    def add(self, names: Iterable[bytes]) -> None:
        """Remember ids that were cancelled now."""
        for name in names:
            self._young.put(*hash128(name), 0)
        if len(self._young) >= KEPT_MIN:
            self._old, self._young = self._young, HashTable()

    def buffers(self) -> list[Buffer]:
        """The state for a snapshot; nothing while nothing was cancelled."""
        return [*self._young.buffers(), *self._old.buffers()] if len(self) else []

    def load(self, buffers: Sequence[Buffer]) -> None:
        """Take over what `buffers` gave."""
        if buffers:
            young, old = buffers
            self._young, self._old = HashTable.from_buffers([young]), HashTable.from_buffers([old])

    def verify(self) -> None:
        """Assert the invariants."""
        self._young.check()
        self._old.check()
        assert len(self._young) < KEPT_MIN, "the young table is full"
