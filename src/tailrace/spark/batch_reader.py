"""Batch reads from the broker: the plan on the driver, and the rows of a slice in a worker."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from tailrace.core.commands import EARLIEST, LATEST
from tailrace.errors import InvalidRequest, NotFound
from tailrace.spark.frames import frames_of
from tailrace.spark.link import Link, link_to
from tailrace.spark.options import Point, ReadOptions
from tailrace.spark.pushdown import Condition, narrowed, row_filter, since, understood
from tailrace.spark.row_batches import Choose, check_schema, row_batches, unexpired
from tailrace.spark.slices import Place, Slice, Span, cut

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class BatchReader(DataSourceReader):
    """Messages of topics between two points, read through the broker."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.columns: list[str] = schema.fieldNames()
        check_schema(self.columns, [field.dataType.simpleString() for field in schema.fields])
        self.conditions: list[Condition] = []
        self.now_us = time.time_ns() // 1000

    def partitions(self) -> list[InputPartition]:
        """What is read is fixed here: later messages, topics and partitions do not belong to it."""
        options = self.options
        link = link_to(options.url, options.timeout_s)
        spans = planned(link, options)
        after_us = since(self.conditions)
        if after_us is not None:
            spans = _later(link, spans, max(0, after_us))
        return list(narrowed(cut(spans, options.rows_per_partition), self.conditions))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one slice, in a worker."""
        if not isinstance(partition, Slice):
            return iter(())
        options = self.options
        link = link_to(options.url, options.timeout_s)
        chosen = row_filter(self.conditions)
        choose: list[Choose] = [] if chosen is None else [chosen]
        if options.skip_expired:
            choose.append(unexpired(self.now_us))
        frames = frames_of(link, partition, fail_on_data_loss=options.fail_on_data_loss)
        return row_batches(frames, partition, self.columns, choose)


class FilteringReader(BatchReader):
    """The same for sessions that push filters down: Spark refuses `pushFilters` in all others."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take what slices and batches can decide; the rest stays with Spark."""
        self.conditions, left = understood(filters)
        return left


# -- the plan


def planned(link: Link, options: ReadOptions) -> dict[Place, Span]:
    """Which offsets of which partitions lie between start and end now."""
    start, end = options.start, options.end
    if isinstance(start, int) and isinstance(end, int) and 0 <= end < start:
        raise InvalidRequest(f"start: {start} lies behind end, {end}")
    topics = chosen_topics(link, options)
    points = {"start": start, "end": end}
    for name, point in points.items():
        _check_places(point, topics, name)
    spans: dict[Place, Span] = {}
    for topic in topics:
        # In this order: what is appended or deleted meanwhile moves no point out of its bounds.
        earliest = link.offsets(topic, EARLIEST)
        for name, point in points.items():
            _check_partitions(point, topic, len(earliest), name)
        starts = earliest if start == EARLIEST else offsets_at(link, topic, start, EARLIEST)
        ends = None if end == LATEST else offsets_at(link, topic, end, LATEST)
        latest = link.offsets(topic, LATEST)
        for partition, low in enumerate(earliest):
            place, bounds = (topic, partition), (low, latest[partition])
            first = _within("start", place, starts[partition], bounds, options)
            stop = _within("end", place, (ends or latest)[partition], bounds, options)
            spans[place] = (first, max(first, stop))
    return spans


def chosen_topics(link: Link, options: ReadOptions) -> list[str]:
    """The topics that are named or whose names match the pattern, sorted; none is an error."""
    known = [info.name for info in link.topics()]
    if not options.pattern:
        missing = sorted(set(options.topics) - set(known))
        if missing:
            raise NotFound(f"topic: {link.url} has no topic {', '.join(missing)}")
        return sorted(set(options.topics))
    found = sorted(name for name in known if re.fullmatch(options.pattern, name))
    if not found:
        raise NotFound(f"topic_pattern: no topic of {link.url} matches {options.pattern!r}")
    return found


def offsets_at(link: Link, topic: str, point: Point, absent: int) -> list[int]:
    """The offset of a point in each partition of a topic; `absent` (EARLIEST or LATEST) is for those that a
    point by partition leaves out."""
    if isinstance(point, datetime):
        return link.offsets(topic, max(0, (point - _EPOCH) // timedelta(microseconds=1)))
    if point in (EARLIEST, LATEST):
        return link.offsets(topic, int(point))
    filled = link.offsets(topic, absent)
    if isinstance(point, int):
        return [point] * len(filled)
    assert isinstance(point, dict)
    for partition, offset in point.get(topic, {}).items():
        known = offset >= 0 or offset == absent
        filled[partition] = offset if known else link.offsets(topic, offset)[partition]
    return filled


def _check_places(point: Point, topics: list[str], name: str) -> None:
    if not isinstance(point, dict):
        return
    strange = sorted(set(point) - set(topics))
    if strange:
        raise InvalidRequest(f"{name}: {', '.join(strange)} is not among the topics, {', '.join(topics)}")
    for topic, offsets in point.items():
        for partition, offset in offsets.items():
            if partition < 0 or offset < EARLIEST:
                raise InvalidRequest(
                    f"{name}: {topic}/{partition}: an offset, {EARLIEST} (earliest) or {LATEST} (latest), "
                    f"not {offset}"
                )


def _check_partitions(point: Point, topic: str, count: int, name: str) -> None:
    named = point.get(topic, {}) if isinstance(point, dict) else {}
    for partition in named:
        if partition >= count:
            raise InvalidRequest(f"{name}: {topic} has no partition {partition}, only {count}")


def _within(name: str, place: Place, offset: int, bounds: Span, options: ReadOptions) -> int:
    """An offset that is there, or the nearest one where loss is no failure."""
    low, high = bounds
    if low <= offset <= high:
        return offset
    if options.fail_on_data_loss:
        what = f"deleted, its log begins at {low}" if offset < low else f"beyond the end, {high}"
        raise NotFound(
            f"{name}: offset {offset} of {place[0]}/{place[1]} is {what}. Choose another, or take what there "
            "is (fail_on_data_loss=false)"
        )
    return min(max(offset, low), high)


def _later(link: Link, spans: dict[Place, Span], time_us: int) -> dict[Place, Span]:
    """Without the rows before the first one with that timestamp or a later one."""
    firsts = {topic: link.offsets(topic, time_us) for topic in {topic for topic, _ in spans}}
    return {
        (topic, partition): (min(max(start, firsts[topic][partition]), end), end)
        for (topic, partition), (start, end) in spans.items()
    }
