"""Batch reads from the broker: the plan on the driver, and the rows of a slice in a worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from functools import cache

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from tailrace.core.model.commands import EARLIEST, LATEST
from tailrace.errors import InvalidRequest, NotFound
from tailrace.spark.link import BrokerLink, link_to
from tailrace.spark.options import ReadOptions
from tailrace.spark.source.log_spans import Place, Span, spans_of, topics_of
from tailrace.spark.source.pushdown import Condition, narrowed, row_filter, since, understood
from tailrace.spark.source.row_batches import Choose, check_schema, row_batches, unexpired
from tailrace.spark.source.slice_frames import frames_of
from tailrace.spark.source.slices import Slice, cut

log = logging.getLogger("tailrace.spark")


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


def planned(link: BrokerLink, options: ReadOptions) -> dict[Place, Span]:
    """Which offsets of which partitions lie between start and end now."""
    start, end = options.start, options.end
    if isinstance(start, int) and isinstance(end, int) and 0 <= end < start:
        raise InvalidRequest(f"start: {start} lies behind end, {end}")
    extents: dict[Place, Span] = {}
    for topic in topics_of(options, [info.name for info in link.topics()], link.url):
        # In this order: what is deleted or appended meanwhile does not turn a span around.
        earliest, latest = link.offsets(topic, EARLIEST), link.offsets(topic, LATEST)
        for partition, span in enumerate(zip(earliest, latest, strict=False)):
            extents[topic, partition] = span
    found = cache(link.offsets)

    def at_time(place: Place, time_us: int) -> int:
        offsets = found(place[0], max(0, time_us))
        return offsets[place[1]]

    spans, losses = spans_of(options, extents, at_time)
    for loss in losses:
        if options.fail_on_data_loss:
            raise NotFound(
                f"start: {loss}. Begin later, read from the archive (mode=archive), or take what there is "
                "(fail_on_data_loss=false)"
            )
        log.warning("%s; they are left out", loss)
    return spans


def _later(link: BrokerLink, spans: dict[Place, Span], time_us: int) -> dict[Place, Span]:
    """Without the rows before the first one with that timestamp or a later one."""
    firsts = {topic: link.offsets(topic, time_us) for topic in {topic for topic, _ in spans}}
    return {
        (topic, partition): (min(max(start, firsts[topic][partition]), end), end)
        for (topic, partition), (start, end) in spans.items()
    }
