"""Sorted disjoint runs of offsets in blocks, for changes that touch one run or a few.

One sorted array of runs would be simple, but an insertion into a hundred thousand runs moves half of them. So
the runs are divided into blocks of at most `BLOCK_MAX`, like the leaves of a B-tree with one level above
them:

    heads     0                       40              90          the first offset of each block
    firsts    [0, 12, 30]             [40, 55]        [90, ...]
    ends      [5, 20, 31]             [50, 60]        [95, ...]
    values    [a, a, b]               [b, a]          [a, ...]

To find offset 57, bisect the heads (the block at 40), then the firsts of that block: the last run that begins
at or before 57 is (55, 60, a), and it ends above 57. For offset 52 that is the run (40, 50, b), which ends
before it: 52 has no value.

A block that grows beyond `BLOCK_MAX` runs is split in half; a block without runs is removed. Blocks are not
merged. Touching runs with equal values are always one run, also where one block ends and the next begins.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator

BLOCK_MAX = 512

Run = tuple[int, int, bytes]
"""First offset, end (exclusive), value."""


class SpanBlocks:
    """A map from offsets to values (bytes without a meaning here), kept as runs. `total` counts offsets."""

    __slots__ = ("_ends", "_firsts", "_heads", "_values", "total")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._heads: list[int] = []
        self._firsts: list[array[int]] = []
        self._ends: list[array[int]] = []
        self._values: list[list[bytes]] = []
        self.total = 0

    # ------------------------------------------------------------------------------------------- questions

    def __len__(self) -> int:
        """The number of runs."""
        return sum(map(len, self._values))

    def __bool__(self) -> bool:
        return bool(self._heads)

    def __contains__(self, offset: int) -> bool:
        return self.at(offset) is not None

    def __iter__(self) -> Iterator[Run]:
        for firsts, ends, values in zip(self._firsts, self._ends, self._values, strict=True):
            yield from zip(firsts, ends, values, strict=True)

    @property
    def first(self) -> int | None:
        """The lowest offset."""
        return self._heads[0] if self._heads else None

    def at(self, offset: int) -> Run | None:
        """The run that holds an offset."""
        block = bisect_right(self._heads, offset) - 1
        if block < 0:
            return None
        firsts = self._firsts[block]
        index = bisect_right(firsts, offset) - 1
        end = self._ends[block][index]
        return (firsts[index], end, self._values[block][index]) if end > offset else None

    def since(self, offset: int) -> Iterator[Run]:
        """Runs from an offset on, the first of them clipped. The map must not change during iteration."""
        block, index = self._locate(offset)
        while block < len(self._heads):
            firsts, ends, values = self._firsts[block], self._ends[block], self._values[block]
            for at in range(index, len(firsts)):
                first = firsts[at]
                yield first if first > offset else offset, ends[at], values[at]
            block, index = block + 1, 0

    def within(self, first: int, end: int) -> list[Run]:
        """Runs in [first, end), clipped."""
        found = []
        for start, stop, value in SpanBlocks.since(self, first):
            if start >= end:
                break
            found.append((start, stop if stop < end else end, value))
        return found

    # --------------------------------------------------------------------------------------------- changes

    def put(self, first: int, end: int, value: bytes = b"") -> None:
        """Give [first, end) a value, whatever it had."""
        assert first < end, f"an empty run at {first}"
        if self._heads:
            if self._ends[-1][-1] <= first:
                self._append(first, end, value)
                return
            block, index = self._locate(first)
            if self._firsts[block][index] < end:
                SpanBlocks.cut(self, first, end)
                if not self._heads or self._ends[-1][-1] <= first:
                    self._append(first, end, value)
                    return
                block, index = self._locate(first)
            self._insert(block, index, first, end, value)
        else:
            self._append(first, end, value)

    def cut(self, first: int, end: int) -> list[Run]:
        """Take [first, end) out; return the runs that were there, clipped."""
        taken: list[Run] = []
        block, index = self._locate(first)
        while block < len(self._heads):
            firsts, ends, values = self._firsts[block], self._ends[block], self._values[block]
            start, stop, value = firsts[index], ends[index], values[index]
            if start >= end:
                break
            if start < first:
                ends[index] = first
                if stop > end:
                    self._insert_at(block, index + 1, end, stop, value)
                    taken.append((first, end, value))
                    break
                taken.append((first, stop, value))
                index += 1
            elif stop > end:
                firsts[index] = end
                if index == 0:
                    self._heads[block] = end
                taken.append((start, end, value))
                break
            else:
                until = bisect_right(ends, end, index)
                taken += zip(firsts[index:until], ends[index:until], values[index:until], strict=True)
                if self._delete(block, index, until):
                    index = 0
                    continue
            if index == len(firsts):
                block, index = block + 1, 0
        self.total -= sum([stop - start for start, stop, _ in taken])
        return taken

    # -------------------------------------------------------------------------------------------- internals

    def _locate(self, offset: int) -> tuple[int, int]:
        """(block, index) of the first run that ends above an offset; if there is none, the block behind the
        last."""
        block = bisect_right(self._heads, offset) - 1
        if block < 0:
            return 0, 0
        index = bisect_right(self._ends[block], offset)
        return (block, index) if index < len(self._ends[block]) else (block + 1, 0)

    def _append(self, first: int, end: int, value: bytes) -> None:
        self.total += end - first
        if self._heads:
            ends, values = self._ends[-1], self._values[-1]
            if ends[-1] == first and values[-1] == value:
                ends[-1] = end
                return
            if len(ends) < BLOCK_MAX:
                self._firsts[-1].append(first)
                ends.append(end)
                values.append(value)
                return
        self._heads.append(first)
        self._firsts.append(array("Q", (first,)))
        self._ends.append(array("Q", (end,)))
        self._values.append([value])

    def _insert(self, block: int, index: int, first: int, end: int, value: bytes) -> None:
        """Insert a run into free space before the run at (block, index), which exists."""
        self.total += end - first
        firsts, values = self._firsts[block], self._values[block]
        if index:
            left_block, left = block, index - 1
        else:
            left_block, left = block - 1, -1
        joins_left = left_block >= 0 and (
            self._ends[left_block][left] == first and self._values[left_block][left] == value
        )
        joins_right = firsts[index] == end and values[index] == value
        if joins_left:
            if joins_right:
                end = self._ends[block][index]
                self._delete(block, index, index + 1)
            self._ends[left_block][left] = end
        elif joins_right:
            firsts[index] = first
            if index == 0:
                self._heads[block] = first
        else:
            self._insert_at(block, index, first, end, value)

    def _insert_at(self, block: int, index: int, first: int, end: int, value: bytes) -> None:
        firsts, ends, values = self._firsts[block], self._ends[block], self._values[block]
        firsts.insert(index, first)
        ends.insert(index, end)
        values.insert(index, value)
        if index == 0:
            self._heads[block] = first
        if len(values) > BLOCK_MAX:
            half = len(values) // 2
            self._heads.insert(block + 1, firsts[half])
            self._firsts.insert(block + 1, firsts[half:])
            self._ends.insert(block + 1, ends[half:])
            self._values.insert(block + 1, values[half:])
            del firsts[half:], ends[half:], values[half:]

    def _delete(self, block: int, index: int, until: int) -> bool:
        """Delete runs of a block; return whether the block was removed with them."""
        firsts = self._firsts[block]
        if index == 0 and until == len(firsts):
            del self._heads[block], self._firsts[block], self._ends[block], self._values[block]
            return True
        del firsts[index:until], self._ends[block][index:until], self._values[block][index:until]
        if index == 0:
            self._heads[block] = firsts[0]
        return False
