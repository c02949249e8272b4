"""A stretch of offsets with very many runs in it: one small number for each offset says which value it has.

Consumers that take messages from everywhere in a backlog leave nearly every message as a run of its own. As
numbers, hundreds of such runs change in one numpy operation.

A chunk covers `CHUNK` offsets from a multiple of `CHUNK` on. `cells` has one number per offset; `values` says
which value a number stands for, and 0 means no value. A run is a stretch of equal cells:

    values    ["", a, b]
    cells     1 1 0 2 2 2 1 0 0 ...        the chunk at 4096
    runs      (4096, 4098, a) (4099, 4102, b) (4102, 4103, a)

A new value gets the next number. When `values` is full, the numbers are given out anew to those values that
the cells still have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from tailrace.core.collections.span_blocks import Run

BITS = 12
CHUNK = 1 << BITS
"""Offsets of one chunk."""
VALUES_MAX = 4 * CHUNK
"""Values that a chunk numbers before it forgets those that no cell has any more."""

Offsets = npt.NDArray[np.int64]


class DenseSpans:
    """The chunk of the offsets from `base` on. `count` of them have a value."""

    __slots__ = ("_numbers", "base", "cells", "count", "values")

    def __init__(self, number: int) -> None:
        self.base = number << BITS
        self.cells: npt.NDArray[np.uint16] = np.zeros(CHUNK, np.uint16)
        self.values = [b""]
        """By number; 0 stands for no value."""
        self._numbers: dict[bytes, int] = {}
        self.count = 0

    def frozen(self) -> DenseSpans:
        """A copy for reading only."""
        copy = DenseSpans(self.base >> BITS)
        copy.cells, copy.values, copy.count = self.cells.copy(), self.values[:], self.count
        return copy

    def number(self, value: bytes) -> int:
        """The number of a value; a new value gets one."""
        number = self._numbers.get(value)
        if number is None:
            if len(self.values) >= VALUES_MAX:
                self._forget()
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number

    def _forget(self) -> None:
        used = [number for number in np.unique(self.cells).tolist() if number]
        table = np.zeros(len(self.values), np.uint16)
        table[used] = np.arange(1, len(used) + 1)
        self.cells = table[self.cells]
        self.values = [b"", *(self.values[number] for number in used)]
        self._numbers = {value: number for number, value in enumerate(self.values) if number}

    def fill(self, places: Any, many: int, number: int) -> int:
        """Give `many` places (a slice or indexes) a number; return by how much the count grew."""
        grown = (many if number else 0) - int(np.count_nonzero(self.cells[places]))
        self.cells[places] = number
        self.count += grown
        return grown

    def edges(self, first: int, end: int) -> tuple[Offsets, Offsets, npt.NDArray[np.uint16]]:
        """Firsts, ends and numbers of the runs in [first, end), clipped."""
        cells = self.cells[max(first - self.base, 0) : min(end - self.base, CHUNK)]
        breaks = np.flatnonzero(cells[1:] != cells[:-1]) + 1
        starts, stops = np.concatenate(([0], breaks)), np.concatenate((breaks, [len(cells)]))
        numbers = cells[starts]
        there = numbers > 0
        low = max(first, self.base)
        return starts[there] + low, stops[there] + low, numbers[there]

    def runs(self, first: int, end: int) -> list[Run]:
        """The runs in [first, end), clipped."""
        firsts, ends, numbers = self.edges(first, end)
        values = self.values
        return list(zip(firsts.tolist(), ends.tolist(), [values[n] for n in numbers.tolist()], strict=True))

    def verify(self) -> None:
        """Assert the invariants."""
        assert int(np.count_nonzero(self.cells)) == self.count > 0, f"count of the chunk at {self.base}"
        assert int(self.cells.max()) < len(self.values)
        assert {value: number for number, value in enumerate(self.values) if number} == self._numbers


def by_chunk(spans: Sequence[int]) -> Iterator[tuple[int, Offsets]]:
    """The offsets of flat spans by chunk: (number of the chunk, its offsets)."""
    bounds = np.array(spans, np.int64)
    firsts = bounds[::2]
    lengths = bounds[1::2] - firsts
    ends = np.cumsum(lengths)
    offsets = np.arange(ends[-1]) + np.repeat(firsts - ends + lengths, lengths)
    numbers = offsets >> BITS
    edges = (np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist()
    for first, end in pairwise((0, *edges, len(offsets))):
        yield int(numbers[first]), offsets[first:end]


def spans_in(offsets: Offsets) -> list[tuple[int, int]]:
    """Ascending offsets as (first, end) pairs."""
    breaks = np.flatnonzero(offsets[1:] - offsets[:-1] > 1)
    firsts = offsets[np.concatenate(([0], breaks + 1))]
    lasts = offsets[np.concatenate((breaks, [len(offsets) - 1]))]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))
