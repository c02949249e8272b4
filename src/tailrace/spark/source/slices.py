"""Slices: which offsets of which partition one task reads, and the plans that cut topics into them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from pyspark.sql.datasource import InputPartition

from tailrace.spark.source.log_spans import Place, Span


@dataclass(frozen=True)
class Slice(InputPartition):
    """Offsets [start, end) of one partition. `source` says where a reader finds them, if it has a choice."""

    topic: str
    partition: int
    start: int
    end: int
    source: str = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.topic}/{self.partition} from {self.start} to {self.end}"


def cut(spans: Mapping[Place, Span], rows_max: int = 0) -> list[Slice]:
    """Slices of at most so many offsets (0: as they are), ordered by topic, partition and offset. Those of
    one partition are about the same size."""
    slices = []
    for (topic, partition), (start, end) in sorted(spans.items()):
        rows = end - start
        if rows <= 0:
            continue
        pieces = 1 if not rows_max else -(-rows // rows_max)
        bounds = [start + rows * piece // pieces for piece in range(pieces + 1)]
        slices += [Slice(topic, partition, first, stop) for first, stop in pairwise(bounds)]
    return slices


def share(spans: Mapping[Place, Span], rows_max: int) -> dict[Place, Span]:
    """The first parts of spans, `rows_max` offsets together, each in proportion to its length. There is
    always some progress: where a proportion is less than one row, the longest come first."""
    lags = {place: max(0, end - start) for place, (start, end) in spans.items()}
    total = sum(lags.values())
    if total <= rows_max:
        return dict(spans)
    rows_max = max(rows_max, 1)
    parts = {place: lag * rows_max // total for place, lag in lags.items()}
    rest = rows_max - sum(parts.values())
    for place in _longest(lags):
        if rest <= 0:
            break
        if parts[place] < lags[place]:
            parts[place] += 1
            rest -= 1
    return {place: (start, start + parts[place]) for place, (start, _) in spans.items()}


def _longest(lags: Mapping[Place, int]) -> Iterable[Place]:
    return sorted(lags, key=lambda place: (-lags[place], place))
