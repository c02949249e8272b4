"""A hash table that forgets in bulk: a young table takes all entries, an old one is only asked.

Nothing is deleted entry by entry. `age` forgets the old table, makes the young one the old one, and begins a
new one. When to do so is for the owner to say: when every entry of the old table has lost its meaning.

    put a, age, put b      young: b    old: a     both are found
    age                    young:      old: b     a is forgotten

An entry that was put again may be in both. The greater value counts, so values have to grow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailrace.core.collections.hash_table import Buffer, HashTable, Numbers
from tailrace.core.model.identifiers import Hashes


class AgingTable:
    """A map from hash to value, of the entries that were put since `age` was called the time before last."""

    __slots__ = ("_old", "_young")

    def __init__(self) -> None:
        self._young, self._old = HashTable(), HashTable()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def young(self) -> int:
        """The number of entries since `age` was called last."""
        return len(self._young)

    @property
    def old(self) -> int:
        """The number of entries that the next `age` forgets."""
        return len(self._old)

    def get(self, low: int, high: int) -> int:
        """The value, or `MISSING`."""
        return max(self._young.get(low, high), self._old.get(low, high))

    def get_many(self, hashes: Hashes) -> Numbers:
        """One value per row, `MISSING` where there is no entry. No row may be all zero."""
        found = self._young.get_many(hashes)
        return np.maximum(found, self._old.get_many(hashes)) if len(self._old) else found

    def put(self, low: int, high: int, value: int) -> None:
        """Set or replace."""
        self._young.put(low, high, value)

    def put_many(self, hashes: Hashes, values: Numbers) -> None:
        """Set or replace one value per row. The rows are distinct, and none is all zero."""
        self._young.put_many(hashes, values)

    def age(self) -> None:
        """Forget what was old already; what is young is old from now on."""
        self._old, self._young = self._young, HashTable()

    def buffers(self) -> list[bytes]:
        """Copies of both tables for a snapshot."""
        return [*self._young.buffers(), *self._old.buffers()]

    def load(self, buffers: Sequence[Buffer]) -> None:
        """Restore the state from `buffers`."""
        self._young, self._old = (HashTable.from_buffers([table]) for table in buffers)

    def check(self) -> None:
        """Assert the invariants."""
        self._young.check()
        self._old.check()
