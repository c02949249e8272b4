"""Facts as rows: one for each message and event, expanded from the spans that facts name.

What a fact does not say itself is told by `tailrace.core.trace.trace_fold`. So it is known as far as the walk
goes back, and null otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.core.model import facts as f
from tailrace.core.trace.trace_fold import (
    NO_OFFSETS,
    NOBODY,
    Counts,
    GroupTrace,
    Offsets,
    TraceEvent,
    TraceFold,
)
from tailrace.format.schema import TIME

LIFECYCLE = pa.schema(
    {
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "group": pa.string(),
        "event": pa.string(),
        "time": TIME,
        "member": pa.string(),
        "lease": pa.int64(),
        "deliveries": pa.int32(),
        "failures": pa.int32(),
        "reason": pa.string(),
        "error": pa.string(),
        "due": TIME,
    }
)
EVENTS = (
    "appended",
    "delivered",
    "acked",
    "nacked",
    "expired",
    "given_back",
    "extended",
    "dying",
    "dead_lettered",
    "lapsed",
    "settled",
    "redriven",
    "reset",
    "committed",
    "collected",
)


class LifeRows(TraceFold):
    """Gathers the rows of one partition; `take` gives them as batches."""

    def __init__(self, topic: str, partition: int) -> None:
        super().__init__({})
        self._topic = topic
        self._partition = partition
        self._rows: list[TraceEvent] = []
        self._first: int | None = None
        """The first offset whose whole life is seen."""
        self._start: int | None = None
        """Where the partition begins, as far as it was told."""
        self._time_us = 0
        self.count = 0
        """Rows that were gathered."""

    # ------------------------------------------------------------------------------------------ what happens

    def know(self, names: Mapping[int, str]) -> None:
        """Groups of today by number; facts may name more."""
        self._names = {**names, **self._names}

    def appended(self, base: int, span: int, time_us: int) -> None:
        """A data frame."""
        if self._first is None:
            self._first = base
        self._time_us = max(self._time_us, time_us)
        self.told(TraceEvent(np.arange(base, base + span), "appended", time_us))

    def fact(self, fact: Any, frame_time_us: int) -> None:
        """A fact; the time of its frame is for those that have none of their own."""
        self._time_us = max(self._time_us, frame_time_us)
        if isinstance(fact, f.Trimmed):
            self._trimmed(fact)
        else:
            self._apply(fact)

    def chosen(self, spans: list[int]) -> Offsets:
        """See `TraceFold.chosen`: all of them."""
        return expand(spans)

    def told(self, event: TraceEvent) -> None:
        """See `TraceFold.told`."""
        self._rows.append(event)
        self.count += len(event.offsets)

    def _enlisted(self, fact: f.Enlisted, group: GroupTrace) -> None:
        super()._enlisted(fact, group)
        if group.cursor is None:
            group.cursor = fact.start

    def _extended(self, fact: f.LeaseExtended, group: GroupTrace) -> None:
        for lease in fact.leases:  # One row for a lease: a lease of many messages may be extended often.
            known = {"member": group.member(lease), "lease": lease, "due_us": fact.deadline_us}
            self._tell("extended", fact, group, np.array([NOBODY]), **known)

    def _cursor_moved(self, fact: f.CursorMoved, group: GroupTrace) -> None:
        if group.cursor is not None:
            offsets = np.arange(group.cursor, fact.offset)
            self._tell("committed", fact, group, offsets, member=fact.member)
        group.cursor = fact.offset

    def _reset(self, fact: f.GroupReset, group: GroupTrace) -> None:
        group.clear()
        group.cursor = fact.offset
        self._tell("reset", fact, group, np.array([fact.offset]))

    def _trimmed(self, fact: f.Trimmed) -> None:
        start = self._first if self._start is None else self._start
        if start is not None and start < fact.offset:
            self.told(TraceEvent(np.arange(start, fact.offset), "collected", self._time_us))
        self._start = fact.offset

    # -------------------------------------------------------------------------------------------- as batches

    def take(self) -> pa.RecordBatch:
        """What was gathered since the last time, all columns of `LIFECYCLE`."""
        rows, self._rows, self.count = self._rows, [], 0
        counts = np.array([len(some.offsets) for some in rows], np.int64)
        total = int(counts.sum())
        offsets = np.concatenate([some.offsets for some in rows]) if rows else NO_OFFSETS
        known = np.zeros(total, np.bool_) if self._first is None else offsets >= self._first
        columns = {
            "topic": pa.repeat(pa.scalar(self._topic), total),
            "partition": pa.repeat(pa.scalar(self._partition, pa.int32()), total),
            "offset": pa.array(offsets, mask=offsets < 0),
            "time": _times([some.time_us for some in rows], counts),
            "lease": _numbers([some.lease for some in rows], counts),
            "deliveries": _each([some.deliveries for some in rows], counts, known),
            "failures": _each([some.failures for some in rows], counts, known),
            "due": _times([some.due_us for some in rows], counts),
        }
        columns["group"] = _texts([None if some.group is None else some.group.name for some in rows], counts)
        for name in ("event", "member", "reason", "error"):
            columns[name] = _texts([getattr(some, name) for some in rows], counts)
        return pa.RecordBatch.from_arrays([columns[name] for name in LIFECYCLE.names], schema=LIFECYCLE)


def expand(spans: list[int]) -> Offsets:
    """All offsets of flat spans."""
    if len(spans) == 2:
        return np.arange(spans[0], spans[1])
    pairs = np.array(spans, np.int64).reshape(-1, 2)
    lengths = pairs[:, 1] - pairs[:, 0]
    before = np.cumsum(lengths) - lengths
    result: Offsets = np.arange(int(lengths.sum())) + np.repeat(pairs[:, 0] - before, lengths)
    return result


def _numbers(values: list[int | None], counts: Offsets) -> pa.Array:
    """A 64-bit number for each row; those without a sign keep their bits."""
    missing = np.array([value is None for value in values], np.bool_)
    plain = np.array([value or 0 for value in values], np.uint64).view(np.int64)
    return pa.array(np.repeat(plain, counts), mask=np.repeat(missing, counts))


def _times(values: list[int | None], counts: Offsets) -> pa.Array:
    return _numbers(values, counts).cast(TIME)


def _each(values: list[Counts | None], counts: Offsets, known: npt.NDArray[np.bool_]) -> pa.Array:
    """Counters that may differ from row to row; null where only a part of the story was seen."""
    filled = [
        np.zeros(count, np.int32) if value is None else value
        for value, count in zip(values, counts.tolist(), strict=True)
    ]
    missing = np.repeat(np.array([value is None for value in values], np.bool_), counts)
    numbers = np.concatenate(filled) if filled else np.empty(0, np.int32)
    return pa.array(numbers, pa.int32(), mask=missing | ~known)


def _texts(values: list[str | None], counts: Offsets) -> pa.Array:
    places = {value: place for place, value in enumerate(dict.fromkeys(values))}
    codes = np.repeat(np.array([places[value] for value in values], np.int64), counts)
    return pa.array(list(places), pa.string()).take(pa.array(codes))
