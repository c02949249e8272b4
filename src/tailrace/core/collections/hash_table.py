"""A hash table of 128-bit hashes to 64-bit numbers in one numpy buffer, with batch forms of get and put.

Open addressing with linear probing. A slot is 24 bytes: the two halves of the hash and the value. A slot
whose hash is all zero is empty, which is why `hash128` never gives zero. The low bits of the hash are the
*home* slot. An entry lies there, or, if others came first, in the next empty slot behind it. So a search
begins at the home slot and ends at the hash or at an empty slot. Nothing is ever deleted, so no search can
end too early.

    A new table has 16 slots. Hashes with the low halves 3 and 19 both have home slot 3 (19 mod 16), so they
    lie in slots 3 and 4. A search for a third hash with the low half 35 looks at slots 3 and 4, then at 5,
    which is empty: the hash is not there. The table doubles when an entry would take it over two thirds: here
    the 11th.

The batch forms do the same for all rows at once: one step reads the slot of each row, and the rows that have
not found their hash or an empty slot go on to the next one.

A large table doubles without a pause, in three steps that puts drive:

1. *Clear.* At two thirds, memory for twice the slots is taken and cleared from its first byte to its last, a
   piece with every put. A fresh table is touched all over by the first batch, and the kernel would clear all
   of it at once, in pages of 2 MB: 100 ms for 100 MB.
2. *Move.* The table with twice the slots takes all new entries; the *former* one stays beside it and only
   answers. Every put moves some slots of the former table, from the first to the last:

       former    x x x a b c d e        x: moved; an entry is looked for in the table first, then here

   An entry that is in both is the table's: the former table holds the value from before.
3. The former table goes.

Clearing takes S / 16 puts and moving S / 4, for S slots, and the table is full again after more than S / 2.

The layout depends only on the calls and their order: two replicas that apply the same facts have equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.core.model.identifiers import Hashes

MISSING = -1
SLOTS_MIN = 16
FEW = 48
"""Below this many rows a Python loop is faster than numpy."""

SMALL_SLOTS = 4096
"""A table with fewer slots is moved at once: that takes less than a millisecond."""
CLEARS = 32
"""Slots of the next table that are cleared for each new entry."""
MOVES = 4
"""Slots of the former table that are moved for each new entry."""
STEP = 256
"""Slots that are moved at a time, at least."""

_FIRST = np.ones(1, np.bool_)

Numbers = npt.NDArray[np.int64]
Slots = npt.NDArray[np.uint64]
Buffer = bytes | bytearray | memoryview


class EqualHashes(msgspec.Struct, frozen=True, eq=False):
    """Equal hashes of a batch: the first row of each group, the group of each row, and the rank of the row in
    its group."""

    first: Numbers
    group: Numbers
    rank: Numbers


def group_rows(hashes: Hashes) -> EqualHashes:
    """Group the rows by hash; ranks follow the order of the rows."""
    rows = len(hashes)
    # Sorts are stable, so rows of a group stay in order. One half of the hash is nearly always enough.
    order = np.argsort(hashes[:, 0], kind="stable")
    low = hashes[:, 0][order]
    same = low[1:] == low[:-1]
    if not same.any():
        each = np.arange(rows)
        return EqualHashes(each, each, np.zeros(rows, np.int64))
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
    return EqualHashes(order[starts], group, rank)


def present_rows(hashes: Hashes) -> Numbers:
    """The rows with the field: those whose hash is not all zero."""
    return np.flatnonzero(hashes[:, 0] | hashes[:, 1])


class HashTable:
    """A map from hash to value. Values are 0 or more; `MISSING` stands for no entry."""

    __slots__ = (
        "_cleared",
        "_count",
        "_due",
        "_former",
        "_keys",
        "_mask",
        "_moved",
        "_next",
        "_slots",
        "_values",
    )

    def __init__(self, entries: int = 0, *, slots: Slots | None = None, count: int = 0) -> None:
        """Make an empty table with room for that many entries before it grows, or one of these slots, where
        `count` are in use."""
        self._take(np.zeros((_slots_for(entries), 3), np.uint64) if slots is None else slots, count)

    def _take(self, slots: Slots, count: int) -> None:
        self._slots = slots
        self._count = count
        self._mask = len(slots) - 1
        # Scalar access through memoryviews gives Python ints and takes half of numpy's time.
        self._keys: memoryview[int] = slots.reshape(-1).data
        self._values: memoryview[int] = slots.view(np.int64).reshape(-1).data
        self._next: Slots | None = None
        self._cleared = 0
        """Slots of the next table that are cleared so far."""
        self._former: HashTable | None = None
        self._moved = self._due = 0
        """Slots of the former table that have been moved, and those that are due to be."""

    @property
    def slots(self) -> Slots:
        """All slots, used and empty, without those of a former table."""
        return self._slots

    def __len__(self) -> int:
        return self._count

    def _find(self, low: int, high: int) -> int:
        """Position (slot * 3) of the hash, or of the empty slot where it belongs."""
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

    def _is_used(self, at: int) -> bool:
        return bool(self._keys[at] or self._keys[at + 1])

    def get(self, low: int, high: int) -> int:
        """The value, or `MISSING`."""
        at = self._find(low, high)
        keys = self._keys
        if keys[at] or keys[at + 1]:
            return self._values[at + 2]
        return MISSING if self._former is None else self._former.get(low, high)

    def shares_low(self, low: int, high: int) -> bool:
        """Whether there is another hash with the same low half. Such hashes have one home slot, so all of
        them lie between that slot and the next empty one."""
        keys, mask = self._keys, self._mask
        at = (low & mask) * 3
        while keys[at] or keys[at + 1]:
            if keys[at] == low and keys[at + 1] != high:
                return True
            at = 0 if at == mask * 3 else at + 3
        return self._former is not None and self._former.shares_low(low, high)

    def put(self, low: int, high: int, value: int) -> None:
        """Set or replace."""
        assert low or high, "the all-zero hash is reserved"
        self._reserve(1)
        at = self._find(low, high)
        keys = self._keys
        if not keys[at] and not keys[at + 1]:
            self._count += self._former is None or self._former.get(low, high) == MISSING
            keys[at], keys[at + 1] = low, high
        self._values[at + 2] = value

    def get_many(self, hashes: Hashes) -> Numbers:
        """One value per row, `MISSING` where there is no entry. No row may be all zero."""
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
            found[row] = self._values[place + 2] if self._is_used(place := self._find(low, high)) else MISSING
        if self._former is not None:
            missing = np.flatnonzero(found == MISSING)
            found[missing] = self._former.get_many(hashes[missing])
        return found

    def put_many(self, hashes: Hashes, values: Numbers) -> None:
        """Set or replace one value per row. The rows are distinct, and none is all zero."""
        self._reserve(len(hashes))
        if self._former is None:
            self._count += self._insert(_entries(hashes, values))
        else:
            self._count += int(np.count_nonzero(self.get_many(hashes) == MISSING))
            self._insert(_entries(hashes, values))

    def _insert(self, entries: Slots, *, replace: bool = True) -> int:
        """Put distinct entries, for which there is room; return how many of them are new."""
        mask, slots = self._mask, self._slots
        at = (entries[:, 0] & np.uint64(mask)).astype(np.intp)
        new = 0
        while len(entries) > FEW:
            there = slots.take(at, axis=0)
            same = (there[:, 0] == entries[:, 0]) & (there[:, 1] == entries[:, 1])
            empty = (there[:, 0] | there[:, 1]) == 0
            # Several rows may want one empty slot: the last one written gets it, the others go on.
            ours = same | empty
            written = ours if replace else empty
            slots[at[written]] = entries[written]
            there = slots.take(at, axis=0)
            done = ours & (there[:, 0] == entries[:, 0]) & (there[:, 1] == entries[:, 1])
            new += int(np.count_nonzero(done)) - int(np.count_nonzero(same))
            on = np.flatnonzero(~done)
            entries, at = entries[on], (at[on] + 1) & mask
        keys = self._keys
        for low, high, value in entries.tolist():
            place = self._find(low, high)
            used = self._is_used(place)
            new += not used
            if replace or not used:
                keys[place], keys[place + 1], keys[place + 2] = low, high, value
        return new

    # ---------------------------------------------------------------------------------- growing

    def _reserve(self, entries: int) -> None:
        """Make room for `entries` more, and take the steps of growing that go with them."""
        if self._former is not None:
            self._due += entries * MOVES
            if self._due >= STEP:
                self._move(self._due)
        wanted = self._count + entries
        size = len(self._slots)
        if wanted * 3 <= size * 2:
            return
        if self._former is not None:
            self._move(len(self._former.slots))  # One batch was so large that the move is not over yet.
        if size < SMALL_SLOTS or wanted * 4 > size * 3:
            self._grow(np.zeros((_slots_for(wanted), 3), np.uint64))
            if size < SMALL_SLOTS:
                self._move(size)
            return
        if self._next is None:
            self._next = np.empty((2 * size, 3), np.uint64)
        cleared = self._cleared + entries * CLEARS
        self._next[self._cleared : cleared] = 0
        self._cleared = cleared
        if cleared >= 2 * size:
            self._grow(self._next)

    def _grow(self, slots: Slots) -> None:
        """Continue in an empty table with more slots; the present one becomes the former table."""
        former = HashTable(slots=self._slots, count=self._count)
        self._take(slots, self._count)
        self._former = former

    def _move(self, slots: int) -> None:
        """Move the next slots of the former table. Entries that were put since then are newer and stay."""
        former = self._former
        assert former is not None
        old = former.slots[self._moved : self._moved + slots]
        self._insert(old[_used(old)], replace=False)
        self._moved += slots
        self._due = 0
        if self._moved >= len(former.slots):
            self._former, self._moved = None, 0

    def buffers(self) -> list[bytes]:
        """A copy of the slots for a snapshot; while the table grows, also the former table's, and the
        progress of the growth."""
        if self._former is None and self._next is None:
            return [self._slots.tobytes()]
        former = b"" if self._former is None else self._former.slots.data
        place = np.array([self._moved, self._due, self._cleared], np.uint64)
        return [b"".join((self._slots.data, former, place.data))]

    @classmethod
    def from_buffers(cls, buffers: Sequence[Buffer]) -> HashTable:
        """Restore the table that `buffers` came from, byte for byte."""
        (data,) = buffers
        rows = np.frombuffer(data, np.uint64).reshape(-1, 3)
        size = 1 << (len(rows).bit_length() - 1)
        slots = rows[:size].copy()
        table = cls(slots=slots, count=int(np.count_nonzero(_used(slots))))
        if len(rows) > size:
            table.grow_on(rows[size:])
        return table

    def grow_on(self, rows: Slots) -> None:
        """Continue growing where the snapshot of a table did: the slots of its former table, and one row that
        says how far it was."""
        self._moved, self._due, self._cleared = rows[-1].tolist()
        if self._cleared:
            self._next = np.zeros((2 * len(self._slots), 3), np.uint64)
            return
        slots = rows[:-1].copy()
        used = _used(slots)
        former = HashTable(slots=slots, count=int(np.count_nonzero(used)))
        left = slots[used][:, :2]
        self._count += int(np.count_nonzero(self.get_many(left) == MISSING))
        self._former = former

    def check(self) -> None:
        """Assert the invariants: the load, the count, and that every entry can be found."""
        slots = self._slots
        assert len(slots) & (len(slots) - 1) == 0, "slots are a power of two"
        assert self._count * 4 <= len(slots) * 3, "load is at most three quarters"
        used = slots[_used(slots)]
        if len(used):
            assert np.array_equal(self.get_many(used[:, :2]), used[:, 2].view(np.int64)), "an entry is lost"
        count = len(used)
        if (former := self._former) is not None:
            former.check()
            moved, left = former.slots[: self._moved], former.slots[self._moved :]
            self._former = None
            assert (self.get_many(moved[_used(moved)][:, :2]) != MISSING).all(), "an entry was not moved"
            count += int(np.count_nonzero(self.get_many(left[_used(left)][:, :2]) == MISSING))
            self._former = former
        assert count == self._count, f"{count} slots in use, {self._count} counted"


def _used(slots: Slots) -> npt.NDArray[np.bool_]:
    used: npt.NDArray[np.bool_] = (slots[:, 0] | slots[:, 1]) != 0
    return used


def _entries(hashes: Hashes, values: Numbers) -> Slots:
    entries = np.empty((len(hashes), 3), np.uint64)
    entries[:, :2] = hashes
    entries[:, 2] = values.view(np.uint64)
    return entries


def _slots_for(entries: int) -> int:
    slots = SLOTS_MIN
    while entries * 3 > slots * 2:
        slots *= 2
    return slots
