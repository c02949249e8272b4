"""A map from offsets to values, kept as sorted disjoint runs that split and merge.

A queue knows something of millions of offsets, and nearly always the same of many neighbours. So the map
stores runs (first, end, value): a value for all offsets from `first` to `end - 1`. Ten million neighbours
with one value are one run. `put` gives a range a value, whatever it had; `cut` takes a range out and returns
what was there.

    put(0, 10, a), put(10, 20, a)    (0, 20, a)                              neighbours with one value merge
    put(5, 8, b)                     (0, 5, a) (5, 8, b) (8, 20, a)          a run is split
    cut(6, 12)                       (0, 5, a) (5, 6, b) (12, 20, a)         returns (6, 8, b) (8, 12, a)

Runs are stored in one of two ways, stretch by stretch of 4096 offsets:

- *Blocks* (`span_blocks`): sorted arrays of runs, changed one run at a time. Normally everything lies here.
- *Chunks* (`dense_spans`): one small number per offset. Consumers that take messages from everywhere in a
  backlog leave runs of one offset each, and change hundreds of them per call. On numbers that is one numpy
  operation.

A chunk is made when `put_many` or `cut_many` changes a stretch in more than `MANY` places and at least 2 *
`THIN` of its offsets have a value. The chunk becomes runs again when fewer than `THIN` are left. No offset of
a stretch that is a chunk lies in the blocks.

    The map holds (0, 5, a) (5, 6, b) (12, 20, a), as above. put_many gives every second offset from 4096 to
    4294 the value a: 100 spans. The offsets 4096 to 8191 become a chunk with the cells 1 0 1 0 1 0 ..., where
    1 stands for a. The map has 103 runs now. cut_many takes the first 75 of the 100 offsets out again: 25 are
    left, fewer than `THIN`, and they become 25 runs in the blocks.

Seen from outside the form is canonical: touching runs with equal values are always one run, across blocks and
chunks. So equal content has equal bytes in a snapshot, whatever led to it.

*Flat spans*, in which facts carry offsets, are the bounds of ascending disjoint spans in one list: [first,
end, first, end, ...].
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tailrace.core.collections import span_blocks
from tailrace.core.collections.dense_spans import BITS, CHUNK, DenseSpans, Offsets, by_chunk, spans_in
from tailrace.core.collections.span_blocks import Run, SpanBlocks

MANY = 8
"""From this many spans in one call, or places in one chunk, numpy is faster than a Python loop."""
LONG = 64
"""Longer spans than this on average are taken one by one."""
THIN = 32
"""A chunk with fewer offsets becomes runs again; a chunk with less than twice as many is not made."""
STEP = 512


class FrozenRuns(NamedTuple):
    """A copy of a map: its blocks and its chunks."""

    firsts: list[array[int]]
    ends: list[array[int]]
    values: list[list[bytes]]
    chunks: list[DenseSpans]

    def columns(self) -> tuple[bytes, bytes, bytes]:
        """Firsts, ends and values of all runs, for a snapshot. All values must have one length."""
        values = b"".join([b"".join(values) for values in self.values])
        if not self.chunks:
            return b"".join(self.firsts), b"".join(self.ends), values
        parts = [chunk.edges(chunk.base, chunk.base + CHUNK) for chunk in self.chunks]
        blocks = [np.frombuffer(b"".join(side), np.int64) for side in (self.firsts, self.ends)]
        firsts = np.concatenate([blocks[0], *[part[0] for part in parts]])
        ends = np.concatenate([blocks[1], *[part[1] for part in parts]])
        order = np.argsort(firsts, kind="stable")
        firsts, ends = firsts[order], ends[order]
        one = firsts[1:] == ends[:-1]
        size = len(self.chunks[0].values[1])
        if size:
            tables = [np.frombuffer(b"".join(chunk.values[1:]), np.uint8) for chunk in self.chunks]
            rows = [table.reshape(-1, size)[part[2] - 1] for table, part in zip(tables, parts, strict=True)]
            cells = np.concatenate([np.frombuffer(values, np.uint8).reshape(-1, size), *rows])[order]
            one &= (cells[1:] == cells[:-1]).all(axis=1)
            values = cells[np.concatenate(([True], ~one))].tobytes()
        return (
            firsts[np.concatenate(([True], ~one))].tobytes(),
            ends[np.concatenate((~one, [True]))].tobytes(),
            values,
        )


class Runs(SpanBlocks):
    """The map. Values are bytes without a meaning here; `total` counts offsets."""

    __slots__ = ("_chunks", "_numbers")

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._chunks: dict[int, DenseSpans] = {}
        self._numbers: list[int] = []
        """Numbers of the chunks, ascending."""

    # ------------------------------------------------------------------------------------------- questions

    def __len__(self) -> int:
        """The number of runs."""
        return sum(1 for _ in self) if self._chunks else super().__len__()

    def __bool__(self) -> bool:
        return bool(self._heads or self._chunks)

    def __iter__(self) -> Iterator[Run]:
        return self._merged(0, None) if self._chunks else super().__iter__()

    @property
    def first(self) -> int | None:
        """The lowest offset."""
        lowest = self._heads[0] if self._heads else None
        if self._chunks:
            chunk = self._chunks[self._numbers[0]]
            first = chunk.base + int((chunk.cells > 0).argmax())
            return first if lowest is None or first < lowest else lowest
        return lowest

    def at(self, offset: int) -> Run | None:
        """The run that holds an offset, perhaps cut short where a chunk begins or ends."""
        chunk = self._chunks.get(offset >> BITS) if self._chunks else None
        if chunk is None:
            return super().at(offset)
        place = offset - chunk.base
        number = int(chunk.cells[place])
        if not number:
            return None
        others = np.flatnonzero(chunk.cells != number)
        at = int(others.searchsorted(place))
        first = int(others[at - 1]) + 1 if at else 0
        end = int(others[at]) if at < len(others) else CHUNK
        return chunk.base + first, chunk.base + end, chunk.values[number]

    def since(self, offset: int) -> Iterator[Run]:
        """Runs from an offset on, the first of them clipped. The map must not change during iteration."""
        return self._merged(offset, None) if self._chunks else super().since(offset)

    def within(self, first: int, end: int) -> list[Run]:
        """Runs in [first, end), clipped."""
        if not self._chunks:
            return super().within(first, end)
        return [
            (start, stop if stop < end else end, value) for start, stop, value in self._merged(first, end)
        ]

    def tally(self, spans: Sequence[int]) -> tuple[int, set[bytes]]:
        """The number of offsets of flat spans that have a value, and these values."""
        many, values = 0, set[bytes]()
        if _few(spans):
            for first, end in pairs(spans):
                for start, stop, value in self.within(first, end):
                    many += stop - start
                    values.add(value)
            return many, values
        for number, offsets in by_chunk(spans):
            chunk = self._chunks.get(number)
            if chunk is not None:
                cells = chunk.cells[offsets - chunk.base]
                many += int(np.count_nonzero(cells))
                known = chunk.values
                values.update([known[n] for n in set(cells.tolist()) if n])
                continue
            for first, end in spans_in(offsets):
                for start, stop, value in super().within(first, end):
                    many += stop - start
                    values.add(value)
        return many, values

    # --------------------------------------------------------------------------------------------- changes

    def put(self, first: int, end: int, value: bytes = b"") -> None:
        """Give [first, end) a value, whatever it had."""
        if not self._chunks:
            super().put(first, end, value)
            return
        for start, stop, chunk in self._split(first, end):
            if chunk is not None and stop - start == CHUNK:
                self._drop(chunk)
                chunk = None
            if chunk is None:
                super().put(start, stop, value)
            else:
                places = slice(start - chunk.base, stop - chunk.base)
                self.total += chunk.fill(places, stop - start, chunk.number(value))

    def cut(self, first: int, end: int) -> list[Run]:
        """Take [first, end) out; return the runs that were there, clipped."""
        if not self._chunks:
            return super().cut(first, end)
        taken: list[Run] = []
        for start, stop, chunk in self._split(first, end):
            if chunk is None:
                taken += super().cut(start, stop)
                continue
            taken += chunk.runs(start, stop)
            self._clear(chunk, slice(start - chunk.base, stop - chunk.base))
        return list(_joined(taken))

    def put_many(self, spans: Sequence[int], value: bytes = b"") -> None:
        """Give the offsets of flat spans a value, whatever they had."""
        if _few(spans):
            for first, end in pairs(spans):
                self.put(first, end, value)
            return
        for number, offsets in by_chunk(spans):
            chunk = self._chunks.get(number) or self._made(number, offsets, len(offsets))
            if chunk is not None:
                self.total += chunk.fill(offsets - chunk.base, len(offsets), chunk.number(value))
                continue
            for first, end in spans_in(offsets):
                super().put(first, end, value)

    def cut_many(self, spans: Sequence[int]) -> int:
        """Take the offsets of flat spans out; return how many of them had a value."""
        before = self.total
        if _few(spans):
            for first, end in pairs(spans):
                self.cut(first, end)
            return before - self.total
        for number, offsets in by_chunk(spans):
            chunk = self._chunks.get(number) or self._made(number, offsets, 0)
            if chunk is not None:
                self._clear(chunk, offsets - chunk.base)
                continue
            for first, end in spans_in(offsets):
                super().cut(first, end)
        return before - self.total

    # ----------------------------------------------------------------------------------------------- bytes

    def frozen(self) -> FrozenRuns:
        """A copy that is encoded later, while this map changes."""
        return FrozenRuns(
            [block[:] for block in self._firsts],
            [block[:] for block in self._ends],
            [block[:] for block in self._values],
            [chunk.frozen() for chunk in self._chunks.values()],
        )

    def fill(self, firsts: Sequence[int], ends: Sequence[int], values: Sequence[bytes]) -> None:
        """Fill an empty map from `FrozenRuns.columns`; raise `ValueError` when they are inconsistent."""
        assert not self
        half = span_blocks.BLOCK_MAX // 2
        for at in range(0, len(firsts), half):
            self._heads.append(firsts[at])
            self._firsts.append(array("Q", firsts[at : at + half]))
            self._ends.append(array("Q", ends[at : at + half]))
            self._values.append(list(values[at : at + half]))
        self.total = sum(ends) - sum(firsts)
        try:
            self.verify()
        except AssertionError as error:
            raise ValueError(f"runs of a snapshot: {error}") from error

    def verify(self) -> None:
        """Assert the invariants."""
        last, value, total = -1, b"", 0
        assert len(self._heads) == len(self._firsts) == len(self._ends) == len(self._values)
        for head, firsts, ends, values in zip(
            self._heads, self._firsts, self._ends, self._values, strict=True
        ):
            assert 0 < len(firsts) == len(ends) == len(values) <= span_blocks.BLOCK_MAX, "sizes of a block"
            assert head == firsts[0], "head of a block"
        assert sorted(self._chunks) == self._numbers, "numbers of the chunks"
        for chunk in self._chunks.values():
            chunk.verify()
            assert not super().within(chunk.base, chunk.base + CHUNK), "a chunk and runs at one place"
        for first, end, its in self:
            assert first < end, f"an empty run at {first}"
            assert first > last or (first == last and its != value), (
                f"runs overlap or could be one at {first}"
            )
            last, value, total = end, its, total + end - first
        assert total == self.total, f"{self.total} counted, {total} there"

    # -------------------------------------------------------------------------------------------- internals

    def _merged(self, first: int, end: int | None) -> Iterator[Run]:
        """Runs from an offset on, without those that begin at or above `end`."""
        return _joined(self._in_order(first, end))

    def _in_order(self, first: int, end: int | None) -> Iterator[Run]:
        """Runs of blocks and chunks in order; touching ones may have equal values."""
        runs = super().since(first)
        run = next(runs, None)
        for at in range(bisect_left(self._numbers, first >> BITS), len(self._numbers)):
            chunk = self._chunks[self._numbers[at]]
            if end is not None and chunk.base >= end:
                break
            while run is not None and run[0] < chunk.base and (end is None or run[0] < end):
                yield run
                run = next(runs, None)
            after = chunk.base + CHUNK
            stop = after if end is None or end > after else end
            for low in range(max(first, chunk.base), stop, STEP):  # Callers mostly want the first few only.
                yield from chunk.runs(low, min(low + STEP, stop))
        while run is not None and (end is None or run[0] < end):
            yield run
            run = next(runs, None)

    def _split(self, first: int, end: int) -> Iterator[tuple[int, int, DenseSpans | None]]:
        """Split [first, end) into pieces that lie in one chunk each and pieces that lie in none."""
        numbers = self._numbers
        for number in numbers[bisect_left(numbers, first >> BITS) : bisect_left(numbers, -(-end >> BITS))]:
            chunk = self._chunks[number]
            if first < chunk.base:
                yield first, chunk.base, None
                first = chunk.base
            stop = min(end, chunk.base + CHUNK)
            yield first, stop, chunk
            first = stop
        if first < end:
            yield first, end, None

    def _made(self, number: int, offsets: Offsets, added: int) -> DenseSpans | None:
        """Make a chunk of a stretch that changes in many places, if it will hold enough offsets."""
        if np.count_nonzero(offsets[1:] - offsets[:-1] > 1) < MANY:
            return None
        chunk = DenseSpans(number)
        there = super().within(chunk.base, chunk.base + CHUNK)
        if sum([end - first for first, end, _ in there]) + added < 2 * THIN:
            return None
        super().cut(chunk.base, chunk.base + CHUNK)
        for first, end, value in there:
            self.total += chunk.fill(
                slice(first - chunk.base, end - chunk.base), end - first, chunk.number(value)
            )
        self._chunks[number] = chunk
        insort(self._numbers, number)
        return chunk

    def _clear(self, chunk: DenseSpans, places: Any) -> None:
        """Take places of a chunk out, and turn the chunk into runs when little is left."""
        self.total += chunk.fill(places, 0, 0)
        if chunk.count < THIN:
            left = chunk.runs(chunk.base, chunk.base + CHUNK)
            self._drop(chunk)
            for first, end, value in left:
                super().put(first, end, value)

    def _drop(self, chunk: DenseSpans) -> None:
        self.total -= chunk.count
        number = chunk.base >> BITS
        del self._chunks[number]
        del self._numbers[bisect_left(self._numbers, number)]


class SpanSet(Runs):
    """A set of offsets, as runs without values."""

    __slots__ = ()

    def add(self, first: int, end: int) -> None:
        """Add [first, end)."""
        self.put(first, end)

    def remove(self, first: int, end: int) -> int:
        """Remove [first, end); return how many of these offsets were in the set."""
        before = self.total
        self.cut(first, end)
        return before - self.total

    def spans(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Spans from an offset on, clipped. The set must not change during iteration."""
        for start, stop, _ in self.since(first):
            if end is not None and start >= end:
                return
            yield start, stop if end is None or stop < end else end

    def intersect(self, first: int, end: int) -> list[tuple[int, int]]:
        """The spans in [first, end), clipped."""
        if not self._chunks:
            return list(self.spans(first, end))
        found: list[tuple[int, int]] = []
        for start, stop, chunk in self._split(first, end):
            if chunk is None:
                part = [(run[0], run[1]) for run in SpanBlocks.within(self, start, stop)]
            else:
                firsts, ends, _ = chunk.edges(start, stop)
                part = list(zip(firsts.tolist(), ends.tolist(), strict=True))
            if found and part and found[-1][1] == part[0][0]:
                part[0] = (found.pop()[0], part[0][1])
            found += part
        return found


def flat(pairs: Iterator[tuple[int, int]] | Sequence[tuple[int, int]]) -> list[int]:
    """Ascending (first, end) pairs as flat spans; touching pairs become one span."""
    spans: list[int] = []
    for first, end in pairs:
        if spans and spans[-1] == first:
            spans[-1] = end
        else:
            spans += (first, end)
    return spans


def pairs(spans: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Flat spans as (first, end) pairs."""
    return zip(spans[::2], spans[1::2], strict=True)


def count(spans: Sequence[int]) -> int:
    """The number of offsets in flat spans."""
    return sum(spans[1::2]) - sum(spans[::2])


def without(first: int, end: int, holes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """[first, end) without ascending disjoint holes."""
    left = []
    for start, stop in holes:
        if start > first:
            left.append((first, min(start, end)))
        first = max(first, stop)
        if first >= end:
            return left
    left.append((first, end))
    return left


def _few(spans: Sequence[int]) -> bool:
    """Whether a loop over the spans is faster than numpy."""
    return len(spans) < 2 * MANY or count(spans) > LONG * len(spans)


def _joined(runs: Iterable[Run]) -> Iterator[Run]:
    """Join touching runs with equal values."""
    last: Run | None = None
    for run in runs:
        if last is None:
            last = run
        elif last[1] == run[0] and last[2] == run[2]:
            last = (last[0], run[1], run[2])
        else:
            yield last
            last = run
    if last is not None:
        yield last
