"""The view `lifecycle`: what happened to messages, as rows, read from the facts of each partition's log.

One task walks the log of one partition from its beginning (or from near the time that is asked for), because
what a fact means follows from those before it. Rows are those of `tailrace.spark.source.life_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tailrace.client.messages import to_us
from tailrace.client.read.fact_feed import FactPiece, piece_of
from tailrace.core.model.commands import EARLIEST, LATEST
from tailrace.core.model.queue_commands import ReadFacts
from tailrace.errors import InvalidRequest
from tailrace.format.batch import TIME_US_END
from tailrace.format.schema import TIME
from tailrace.spark.link import BrokerLink, link_to
from tailrace.spark.options import Point, ReadOptions
from tailrace.spark.source.life_rows import LIFECYCLE, LifeRows
from tailrace.spark.source.log_spans import topics_of
from tailrace.spark.source.slices import Slice

PIECE_BYTES = 4 * 1024 * 1024
ROWS_WANTED = 8_000
ROWS_MAX = 32_000
BEYOND = (1 << 63) - 1

_NAMES = {pa.string(): "STRING", pa.int32(): "INT", pa.int64(): "BIGINT", TIME: "TIMESTAMP"}


def words_for(schema: pa.Schema) -> str:
    """A schema in Spark's words."""
    return ", ".join(f"`{field.name}` {_NAMES[field.type]}" for field in schema)


DDL = words_for(LIFECYCLE)


class LifecycleReader(DataSourceReader):
    """What happened on topics (on all of them when none is named), as far as their logs go back."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        check_view(options)
        self.options = options
        self.columns = chosen(schema, LIFECYCLE)
        self.from_us = _bound("start", options.start, EARLIEST)
        self.to_us = _bound("end", options.end, LATEST)

    def partitions(self) -> list[InputPartition]:
        """One slice of entries for each partition; what happens later does not belong to it."""
        link = link_to(self.options.url, self.options.timeout_s)
        places = [
            (topic, partition)
            for topic in topics_seen(link, self.options)
            for partition in range(len(link.offsets(topic, LATEST)))
        ]
        asked = [link.begin(ReadFacts(topic, partition, BEYOND, 1)) for topic, partition in places]
        ends = [piece_of(*answer.result()).end_entry for answer in asked]
        return [Slice(*place, 0, end, "facts") for place, end in zip(places, ends, strict=True) if end]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition, in a worker."""
        if not isinstance(partition, Slice):
            return
        link = link_to(self.options.url, self.options.timeout_s)
        rows = LifeRows(partition.topic, partition.partition)
        for piece in pieces_of(link, partition, self.from_us):
            add_piece(rows, piece, partition.end)
            if rows.count >= ROWS_WANTED:
                yield from self._batches(rows)
            if piece.frames and piece.frames[0][0].append_time_us >= self.to_us:
                break
        yield from self._batches(rows)

    def _batches(self, rows: LifeRows) -> Iterator[pa.RecordBatch]:
        batch = rows.take()
        if self.from_us or self.to_us < BEYOND:
            times = batch.column("time")
            bounds = self.from_us, min(self.to_us, TIME_US_END)
            low, high = (pa.scalar(time_us, TIME) for time_us in bounds)
            batch = batch.filter(pc.and_(pc.greater_equal(times, low), pc.less(times, high)))
        for start in range(0, batch.num_rows, ROWS_MAX):
            yield batch.slice(start, ROWS_MAX).select(self.columns)


def pieces_of(link: BrokerLink, slice_: Slice, from_us: int) -> Iterator[FactPiece]:
    """The log of a partition, piece by piece; the next one is on its way while one is looked at."""
    topic, partition, entry = slice_.topic, slice_.partition, slice_.start
    asked = link.begin(ReadFacts(topic, partition, entry, PIECE_BYTES, from_us))
    while True:
        piece = piece_of(*asked.result())
        over = piece.last or piece.next_entry >= slice_.end
        if not over:
            asked = link.begin(ReadFacts(topic, partition, piece.next_entry, PIECE_BYTES, from_us))
        yield piece
        if over:
            return


def add_piece(rows: LifeRows, piece: FactPiece, end_entry: int) -> None:
    """What a piece tells, in the order of the log and up to an entry."""
    rows.know(piece.groups)
    frames = iter(piece.appended)
    appended = next(frames, None)
    for header, facts in piece.frames:
        while appended is not None and appended[0] < min(header.entry, end_entry):
            rows.appended(*appended[1:])
            appended = next(frames, None)
        if header.entry >= end_entry:
            return
        for fact in facts:
            rows.fact(fact, header.append_time_us)
    while appended is not None and appended[0] < end_entry:
        rows.appended(*appended[1:])
        appended = next(frames, None)


def check_view(options: ReadOptions) -> None:
    """Refuse options that only messages have."""
    if options.mode != "broker":
        raise InvalidRequest(f"view: {options.view} comes from the broker, mode is {options.mode!r}")
    for name in ("columns", "rows_per_partition", "skip_expired"):
        if getattr(options, name):
            raise InvalidRequest(f"{name}: only with view=messages; select columns and rows in Spark")


def chosen(schema: StructType, known: pa.Schema) -> list[str]:
    """The columns of a schema that Spark was given, or has from us; raises for those that there are not."""
    kinds = dict(zip(known.names, known.types, strict=True))
    for field in schema.fields:
        kind = _NAMES.get(kinds.get(field.name), "")
        if kind.lower() != field.dataType.simpleString():
            raise InvalidRequest(f"schema: there is no column {field.name} {field.dataType.simpleString()}")
    return list(schema.fieldNames())


def topics_seen(link: BrokerLink, options: ReadOptions) -> list[str]:
    """The topics that are asked for; all when none is."""
    names = [info.name for info in link.topics()]
    return topics_of(options, names, link.url) if options.topics or options.pattern else sorted(names)


def _bound(name: str, point: Point, open_: int) -> int:
    if isinstance(point, datetime):
        return to_us(point, name, InvalidRequest)
    if point == open_:
        return 0 if open_ == EARLIEST else BEYOND
    raise InvalidRequest(f"{name}: a time, or left out, with view=lifecycle")
