"""Ids of cancelled messages, so that a repeated cancel gets the first answer again, also after their time.

Only the latest are kept: the table ages whenever it is full of young ids (see `aging_table`). So memory is
bounded without a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tailrace.core.collections.aging_table import AgingTable
from tailrace.core.collections.hash_table import MISSING, Buffer
from tailrace.core.core_tuning import CANCELLED_KEPT_MIN
from tailrace.core.model.identifiers import hash128


class CancelledIds:
    """The ids that were cancelled last in one partition."""

    __slots__ = ("_table",)

    def __init__(self) -> None:
        self._table = AgingTable()

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, name: bytes) -> bool:
        # Clients choose ids. Unhashed, ids that count up would crowd into neighbouring slots.
        return self._table.get(*hash128(name)) != MISSING

    def add(self, names: Iterable[bytes]) -> None:
        """Remember ids of messages that are cancelled now."""
        for name in names:
            self._table.put(*hash128(name), 0)
        if self._table.young >= CANCELLED_KEPT_MIN:
            self._table.age()

    def buffers(self) -> list[bytes]:
        """The state for a snapshot; empty while no id is remembered."""
        return self._table.buffers() if len(self) else []

    def load(self, buffers: Sequence[Buffer]) -> None:
        """Restore the state from `buffers`."""
        if buffers:
            self._table.load(buffers)

    def verify(self) -> None:
        """Assert the invariants."""
        self._table.check()
        assert self._table.young < CANCELLED_KEPT_MIN, "too many young ids"
