"""Ids of cancelled messages, so that a repeated cancel gets the first answer again, also after their time.

Only the latest are kept. New ids go to the young table; when it is full, it becomes the old table, and the
old table is forgotten. So memory is bounded without a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tailrace.core.collections.hash_table import MISSING, Buffer, HashTable
from tailrace.core.core_tuning import CANCELLED_KEPT_MIN
from tailrace.core.model.identifiers import hash128


class CancelledIds:
    """The ids that were cancelled last in one partition."""

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young, self._old = HashTable(), HashTable()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, name: bytes) -> bool:
        # Clients choose ids. Unhashed, ids that count up would crowd into neighbouring slots.
        low, high = hash128(name)
        return any(table.get(low, high) != MISSING for table in (self._young, self._old))

    def add(self, names: Iterable[bytes]) -> None:
        """Remember ids of messages that are cancelled now."""
        for name in names:
            self._young.put(*hash128(name), 0)
        if len(self._young) >= CANCELLED_KEPT_MIN:
            self._old, self._young = self._young, HashTable()

    def buffers(self) -> list[Buffer]:
        """The state for a snapshot; empty while no id is remembered."""
        return [*self._young.buffers(), *self._old.buffers()] if len(self) else []

    def load(self, buffers: Sequence[Buffer]) -> None:
        """Restore the state from `buffers`."""
        if buffers:
            young, old = buffers
            self._young, self._old = HashTable.from_buffers([young]), HashTable.from_buffers([old])

    def verify(self) -> None:
        """Assert the invariants."""
        self._young.check()
        self._old.check()
        assert len(self._young) < CANCELLED_KEPT_MIN, "the young table is full"
