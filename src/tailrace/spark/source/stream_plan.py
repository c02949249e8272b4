"""Where a stream read stands and what its next micro-batch takes: offsets, limits, growth and loss; no I/O.

The offsets in Spark's checkpoint, for each topic its id and the next offset of every partition:

    {"version": 1, "topics": {"orders": {"id": 7, "offsets": {"0": 1500, "1": 1498}}}}

A partition that is not in it begins at 0; so does a topic that was not there before. The id tells a topic
from one of the same name that was made after it was deleted. The same position is always the same text,
because Spark compares texts to find out whether there is anything new.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from pyspark.sql.datasource import InputPartition

from tailrace.core.model.commands import TopicInfo
from tailrace.errors import InvalidRequest, StorageFault
from tailrace.spark.options import ReadOptions
from tailrace.spark.source.log_spans import AtTime, Place, Span, spans_of
from tailrace.spark.source.slices import Slice, share

VERSION = 1
BUNDLE_ROWS = 1_000
"""So many rows are not worth two tasks."""


class Reached(msgspec.Struct, frozen=True):
    """The next offset of each partition of a topic."""

    id: int
    offsets: dict[int, int]


class Head(msgspec.Struct, frozen=True):
    """A topic as the broker has it: of each partition the first offset, the end, and the fault if any."""

    id: int
    starts: list[int]
    ends: list[int]
    faults: list[str | None]

    @classmethod
    def of(cls, info: TopicInfo) -> Head:
        """From the description of a topic."""
        rows = sorted(info.partitions, key=lambda row: int(row["partition"]))
        columns = ([row[name] for row in rows] for name in ("start_offset", "end_offset", "fault"))
        return cls(info.id, *columns)


Position = Mapping[str, Reached]
Heads = Mapping[str, Head]


class _Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    topics: dict[str, Reached]


class Aligned(NamedTuple):
    """A position that the topics can be read on from, and what is lost between the two."""

    position: Position
    losses: list[str]


@dataclass(frozen=True)
class Bundle(InputPartition):
    """Slices that one task reads one after the other."""

    slices: tuple[Slice, ...]


# ------------------------------------------------------------------------------------------ the checkpoint


def encode(position: Position) -> dict[str, Any]:
    """A position as Spark stores it."""
    topics = {
        topic: {"id": reached.id, "offsets": {str(p): o for p, o in sorted(reached.offsets.items())}}
        for topic, reached in sorted(position.items())
    }
    return {"version": VERSION, "topics": topics}


def decode(stored: Mapping[str, Any]) -> dict[str, Reached]:
    """A position out of Spark's checkpoint; raises `InvalidRequest`."""
    version = stored.get("version")
    if version != VERSION:
        raise InvalidRequest(
            f"the checkpoint has offsets of version {version!r}; this release of Tailrace reads {VERSION}"
        )
    try:
        return msgspec.convert(stored, _Checkpoint, strict=False).topics
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the checkpoint has offsets that are not Tailrace's: {error}") from None


# ----------------------------------------------------------------------------------------------- the start


def begin(heads: Heads, options: ReadOptions, at_time: AtTime) -> Aligned:
    """The position that a new checkpoint begins with, and what is asked for and gone. What a start by offsets
    does not name begins at its earliest; raises `InvalidRequest` for what is not there."""
    extents = {
        (topic, partition): extent
        for topic, head in heads.items()
        for partition, extent in enumerate(zip(head.starts, head.ends, strict=True))
    }
    spans, losses = spans_of(options, extents, at_time)
    position = {
        topic: Reached(head.id, {p: spans[topic, p][0] for p in range(len(head.ends))})
        for topic, head in heads.items()
    }
    return Aligned(position, losses)


def ends_of(heads: Heads) -> dict[str, Reached]:
    """The position of who has read everything."""
    return {topic: Reached(head.id, dict(enumerate(head.ends))) for topic, head in heads.items()}


# --------------------------------------------------------------------------------------- the next micro-batch


def align(position: Position, heads: Heads) -> Aligned:
    """Compare a position with the topics as they are. Partitions that it does not have are added at 0; where
    messages are gone, it goes on with the next that is there."""
    losses: list[str] = []
    aligned: dict[str, Reached] = {}
    for topic in sorted({*position, *heads}):
        head, reached = heads.get(topic), position.get(topic)
        if reached is not None and (head is None or reached.id != head.id):
            losses.append(_gone(topic, head))
            reached = None
        if head is None:
            continue
        known = {} if reached is None else reached.offsets
        offsets = {
            partition: _next(topic, head, partition, known.get(partition, 0), losses)
            for partition in range(len(head.ends))
        }
        aligned[topic] = Reached(head.id, offsets)
    return Aligned(aligned, losses)


def _gone(topic: str, head: Head | None) -> str:
    return f"topic {topic!r} was deleted" + ("" if head is None else " and made anew")


def _next(topic: str, head: Head, partition: int, offset: int, losses: list[str]) -> int:
    start, end, fault = head.starts[partition], head.ends[partition], head.faults[partition]
    if offset > end:
        if fault is not None:
            raise StorageFault(f"{topic}/{partition} cannot be read: {fault}")
        losses.append(f"{topic}/{partition} ends at {end}, but was read up to {offset}: its end was lost")
        return end
    if offset < start:
        losses.append(f"{topic}/{partition} begins at {start}: offsets {offset} to {start - 1} were trimmed")
        return start
    return offset


def advance(position: Position, aligned: Position, heads: Heads, rows_max: int = 0) -> dict[str, Reached]:
    """Where the next micro-batch ends: at the heads, or at most `rows_max` offsets on (0: no limit), shared
    among partitions by what they are behind. `aligned` is the position that `align` made of `position`.

    Partitions that are new and have nothing are not mentioned: they would be news without any rows."""
    lags = {
        (topic, partition): (offset, heads[topic].ends[partition])
        for topic, reached in aligned.items()
        for partition, offset in reached.offsets.items()
    }
    ends = limited(lags, rows_max)
    result: dict[str, Reached] = {}
    for topic, reached in aligned.items():
        before = position.get(topic)
        known = before.offsets if before is not None and before.id == reached.id else {}
        offsets = {p: ends[topic, p] for p in reached.offsets if ends[topic, p] or p in known}
        if offsets or before is not None:
            result[topic] = Reached(reached.id, offsets)
    return result


def limited(lags: Mapping[Place, Span], rows_max: int) -> dict[Place, int]:
    """Where each partition ends under a limit (0: none). Each that has anything goes on by one row at least
    if the limit is so high, so that none waits for a busier one; the rest is shared in proportion."""
    behind = {place: span for place, span in lags.items() if span[0] < span[1]}
    if not rows_max:
        taken: Mapping[Place, Span] = behind
    elif rows_max < len(behind):
        taken = share(behind, rows_max)
    elif rows_max == len(behind):
        taken = {place: (first, first + 1) for place, (first, _) in behind.items()}
    else:
        taken = share({p: (first + 1, end) for p, (first, end) in behind.items()}, rows_max - len(behind))
    return {place: taken[place][1] if place in taken else first for place, (first, _) in lags.items()}


# ------------------------------------------------------------------------------------- tasks of a micro-batch


def spans_between(start: Position, end: Position) -> dict[Place, Span]:
    """What a micro-batch has to read, by nothing but its two offsets: a replay reads the same."""
    spans: dict[Place, Span] = {}
    for topic, reached in end.items():
        before = start.get(topic)
        known = before.offsets if before is not None and before.id == reached.id else {}
        for partition, offset in reached.offsets.items():
            first = known.get(partition, 0)
            if first < offset:
                spans[topic, partition] = (first, offset)
    return spans


def readable(spans: Mapping[Place, Span], end: Position, heads: Heads) -> tuple[dict[Place, Span], list[str]]:
    """What of these spans is still there, and what is lost of them."""
    left: dict[Place, Span] = {}
    losses: list[str] = []
    for (topic, partition), (first, stop) in sorted(spans.items()):
        head = heads.get(topic)
        if head is None or head.id != end[topic].id:
            gone = _gone(topic, head)
            if gone not in losses:
                losses.append(gone)
            continue
        if stop > head.ends[partition]:
            stop = _next(topic, head, partition, stop, losses)
        if first < head.starts[partition]:
            first = _next(topic, head, partition, first, losses)
        if first < stop:
            left[topic, partition] = (first, stop)
    return left, losses


def bundle(slices: Iterable[Slice], rows_max: int = BUNDLE_ROWS) -> list[Bundle]:
    """Tasks: neighbouring slices are one while they have few rows together; the order stays."""
    bundles: list[list[Slice]] = []
    rows = 0
    for piece in slices:
        rows += piece.end - piece.start
        if not bundles or rows > rows_max:
            bundles.append([])
            rows = piece.end - piece.start
        bundles[-1].append(piece)
    return [Bundle(tuple(pieces)) for pieces in bundles]
