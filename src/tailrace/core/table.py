"""A hash table of 128-bit hashes to 64-bit numbers in one numpy buffer, with batch forms of get and put.

Open addressing with linear probing. A slot is 24 bytes: the two halves of the hash and the value; a slot
whose hash is all zero is empty, which is why `hash128` never gives zero. The low bits of the hash are the
home slot. At most two thirds are in use, then the table doubles. Nothing is ever deleted.

The layout depends only on the calls and their order: two replicas that apply the same facts have equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.core.model import Hashes

MISSING = -1
SLOTS_MIN = 16
FEW = 48
"""So many rows are looked up one by one: by then a round of numpy calls costs more."""

_FIRST = np.ones(1, np.bool_)

Numbers = npt.NDArray[np.int64]
Buffer = bytes | bytearray | memoryview


class Groups(msgspec.Struct, frozen=True, eq=False):
    """Equal hashes of a batch: the first row of each group, each row's group, and its rank inside of it."""

    first: Numbers
    group: Numbers
    rank: Numbers


def group_rows(hashes: Hashes) -> Groups:
    """Group the rows by hash; ranks follow the order of the rows."""
    rows = len(hashes)
    # Sorts are stable, so rows of a group stay in order. One half of the hash is nearly always enough.
    order = np.argsort(hashes[:, 0], kind="stable")
    low = hashes[:, 0][order]
    same = low[1:] == low[:-1]
    if not same.any():
        each = np.arange(rows)
        return Groups(each, each, np.zeros(rows, np.int64))
    high = hashes[:, 1][order]
    equal = same & (high[1:] == high[:-1])
    if (same != equal).any():
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        equal = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
    begins = np.concatenate((_FIRST, ~equal))
    starts = np.flatnonzero(begins)
    number = np.cumsum(begins) - 1
    group, rank = np.empty(rows, np.int64), np.empty(rows, np.int64)
    group[order] = number
    rank[order] = np.arange(rows) - starts[number]
    return Groups(order[starts], group, rank)


def present_rows(hashes: Hashes) -> Numbers:
    """The rows that have the field: those with a hash that is not all zero."""
    return np.flatnonzero(hashes[:, 0] | hashes[:, 1])


class HashTable:
    """Hash to value; values are 0 or more, `MISSING` stands for no entry."""

    __slots__ = ("_count", "_keys", "_mask", "_slots", "_values")

    def __init__(self, entries: int = 0) -> None:
        """An empty table with room for that many entries before it grows."""
        self._take(np.zeros((_slots_for(entries), 3), np.uint64), 0)

    def _take(self, slots: npt.NDArray[np.uint64], count: int) -> None:
        self._slots = slots
        self._count = count
        self._mask = len(slots) - 1
        # Scalar access through memoryviews gives Python ints and takes half of numpy's time.
        self._keys: memoryview[int] = slots.reshape(-1).data
        self._values: memoryview[int] = slots.view(np.int64).reshape(-1).data

    def __len__(self) -> int:
        return self._count

    def _find(self, low: int, high: int) -> int:
        """Position (three per slot) of the hash, or of the empty slot where it belongs."""
        keys, mask = self._keys, self._mask
        at = (low & mask) * 3
        while True:
            there = keys[at]
            if there == low and keys[at + 1] == high:
                return at
            if not there and not keys[at + 1]:
                return at
            at += 3
            if at > mask * 3:
                at = 0

    def get(self, low: int, high: int) -> int:
        """The value, or `MISSING`."""
        at = self._find(low, high)
        keys = self._keys
        return self._values[at + 2] if keys[at] or keys[at + 1] else MISSING

    def put(self, low: int, high: int, value: int) -> None:
        """Set or replace."""
        assert low or high, "the all-zero hash is reserved"
        self._reserve(self._count + 1)
        at = self._find(low, high)
        keys = self._keys
        if not keys[at] and not keys[at + 1]:
            keys[at], keys[at + 1] = low, high
            self._count += 1
        self._values[at + 2] = value

    def get_many(self, hashes: Hashes) -> Numbers:
        """One value per row, `MISSING` where there is none; no row may be all zero."""
        found = np.full(len(hashes), MISSING, np.int64)
        mask, slots = self._mask, self._slots
        rows, wanted = np.arange(len(hashes)), hashes
        at = (hashes[:, 0] & np.uint64(mask)).astype(np.intp)
        while len(rows) > FEW:
            there = slots.take(at, axis=0)
            hit = (there[:, 0] == wanted[:, 0]) & (there[:, 1] == wanted[:, 1])
            found[rows[hit]] = there[hit, 2].view(np.int64)
            on = np.flatnonzero(((there[:, 0] | there[:, 1]) != 0) & ~hit)
            rows, wanted, at = rows[on], wanted[on], (at[on] + 1) & mask
        for row, (low, high) in zip(rows.tolist(), wanted.tolist(), strict=True):
            found[row] = self.get(low, high)
        return found

    def put_many(self, hashes: Hashes, values: Numbers) -> None:
        """Set or replace one value per row; the rows are distinct and none is all zero."""
        self._reserve(self._count + len(hashes))
        entries = np.empty((len(hashes), 3), np.uint64)
        entries[:, :2] = hashes
        entries[:, 2] = values.view(np.uint64)
        self._insert(entries)

    def _insert(self, entries: npt.NDArray[np.uint64]) -> None:
        """Put distinct entries, for which there is room."""
        mask, slots = self._mask, self._slots
        at = (entries[:, 0] & np.uint64(mask)).astype(np.intp)
        while len(entries) > FEW:
            there = slots.take(at, axis=0)
            same = (there[:, 0] == entries[:, 0]) & (there[:, 1] == entries[:, 1])
            empty = (there[:, 0] | there[:, 1]) == 0
            # Several rows may want one empty slot: the last one written has it, the others go on.
            ours = same | empty
            slots[at[ours]] = entries[ours]
            there = slots.take(at, axis=0)
            done = ours & (there[:, 0] == entries[:, 0]) & (there[:, 1] == entries[:, 1])
            self._count += int(np.count_nonzero(done)) - int(np.count_nonzero(same))
            on = np.flatnonzero(~done)
            entries, at = entries[on], (at[on] + 1) & mask
        for low, high, value in entries.tolist():
            self.put(low, high, value)

    def _reserve(self, entries: int) -> None:
        if entries * 3 <= len(self._slots) * 2:
            return
        old = self._slots
        self._take(np.zeros((_slots_for(entries), 3), np.uint64), 0)
        self._insert(old[(old[:, 0] | old[:, 1]) != 0])

    def buffers(self) -> list[bytes]:
        """A copy of the slots for a snapshot."""
        return [self._slots.tobytes()]

    @classmethod
    def from_buffers(cls, buffers: Sequence[Buffer]) -> HashTable:
        """The table that `buffers` came from, byte for byte."""
        (data,) = buffers
        slots = np.frombuffer(data, np.uint64).reshape(-1, 3).copy()
        table = cls.__new__(cls)
        table._take(slots, int(np.count_nonzero(slots[:, 0] | slots[:, 1])))
        return table

    def check(self) -> None:
        """Assert the invariants: the load, the count, and that every entry can be found."""
        slots = self._slots
        assert len(slots) & (len(slots) - 1) == 0, "slots are a power of two"
        assert self._count * 3 <= len(slots) * 2, "load is at most two thirds"
        used = slots[(slots[:, 0] | slots[:, 1]) != 0]
        assert len(used) == self._count, f"{len(used)} slots in use, {self._count} counted"
        if len(used):
            assert np.array_equal(self.get_many(used[:, :2]), used[:, 2].view(np.int64)), "an entry is lost"


def _slots_for(entries: int) -> int:
    slots = SLOTS_MIN
    while entries * 3 > slots * 2:
        slots *= 2
    return slots
