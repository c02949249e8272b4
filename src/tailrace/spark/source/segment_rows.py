"""Mode `segments`: tasks read the sealed segments of topics from a folder, without a broker.

The folder is the broker's data folder, shared with the workers, or a copy of it. `latest` is where the sealed
part of a partition ends: messages in the segment that is still being written cannot be read this way, and an
end beyond it is an error. A segment that retention deletes while it is read is data loss: see
`fail_on_data_loss`. Nothing in the folder is written or locked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tailrace.errors import Corrupt, InvalidRequest, NotFound, StorageFault
from tailrace.format.frame import DATA, LOST, Header
from tailrace.spark.options import ReadOptions
from tailrace.spark.source.log_spans import Place, Span, spans_of, topics_of
from tailrace.spark.source.row_batches import check_schema, row_batches, unexpired
from tailrace.spark.source.sealed_logs import (
    TOPICS,
    SealedLog,
    find_time,
    load_catalog,
    load_index,
    sealed_log,
)
from tailrace.spark.source.slices import Slice, cut
from tailrace.storage.files.inspect import ViewedDisk
from tailrace.storage.files.log_reader import LogReader
from tailrace.storage.files.scan import scan
from tailrace.storage.files.segment import Segment, last_false

log = logging.getLogger("tailrace.spark")
END_IS = "the sealed part, which is all that mode segments reads, ends"


class PooledDisk(ViewedDisk):
    """Reads into memory of Arrow's pool, which reuses pages where malloc would map and fault new ones."""

    def read(self, handle: int, position: int, length: int) -> Any:
        """See `RealDisk.read`."""
        return self.view(handle, position, length)


@dataclass(frozen=True)
class SealedSlice(Slice):
    """A slice and the segments that it is read from, one after the other: each as a slice of its own, whose
    source is the file."""

    parts: tuple[Slice, ...] = ()


class SegmentReader(DataSourceReader):
    """Plans slices of sealed segments on the driver and reads them in workers."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns: list[str] = schema.fieldNames()
        check_schema(self._columns, [field.dataType.simpleString() for field in schema.fields])
        self._now_us = time.time_ns() // 1000

    def partitions(self) -> list[InputPartition]:
        """A slice per partition, or several of at most `rows_per_partition`, in the order of offsets."""
        return list(planned(self._options))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a slice."""
        options = self._options
        if not isinstance(partition, SealedSlice):
            return iter(())
        frames = segment_frames(options.data, partition, fail_on_data_loss=options.fail_on_data_loss)
        choose = [unexpired(self._now_us)] if options.skip_expired else []
        return row_batches(frames, partition, self._columns, choose)


def planned(options: ReadOptions) -> list[SealedSlice]:
    """The slices of a read: what the folder has now."""
    catalog = load_catalog(options.data)
    disk = ViewedDisk(f"{options.data}/{TOPICS}")
    logs: dict[Place, SealedLog] = {}
    for topic in topics_of(options, catalog.topics, options.data):
        entry = catalog.topics[topic]
        if entry.options.storage != "file":
            raise InvalidRequest(f"topic: {topic!r} is kept in {entry.options.storage}, it has no segments")
        for partition in range(entry.options.partitions):
            logs[topic, partition] = sealed_log(disk, f"{entry.folder}/{partition}")
    extents: dict[Place, Span] = {place: (found.start, found.end) for place, found in logs.items()}
    spans, losses = spans_of(
        options, extents, lambda place, time_us: find_time(disk, logs[place], time_us), END_IS
    )
    for loss in losses:
        _lost(f"{loss}: the log was trimmed", options.fail_on_data_loss)
    slices = cut(spans, options.rows_per_partition)
    return [_located(part, logs[part.topic, part.partition]) for part in slices]


def _located(part: Slice, sealed: SealedLog) -> SealedSlice:
    """A slice with the segments that hold it."""
    parts = []
    for segment in sealed.segments:
        start, end = max(part.start, segment.base_offset), min(part.end, segment.end_offset)
        if start < end:
            path = f"{sealed.folder}/{segment.name}"
            parts.append(Slice(part.topic, part.partition, start, end, path))
    return SealedSlice(part.topic, part.partition, part.start, part.end, parts=tuple(parts))


def segment_frames(
    data: str, part: SealedSlice, *, fail_on_data_loss: bool = True
) -> Iterator[tuple[Header, memoryview]]:
    """The data frames that hold the offsets of a slice, checked; the first and the last may reach beyond
    it."""
    disk = PooledDisk(f"{data}/{TOPICS}")
    for piece in part.parts:
        yield from _file_frames(disk, piece, fail_on_data_loss)


def _file_frames(
    disk: ViewedDisk, part: Slice, fail_on_data_loss: bool
) -> Iterator[tuple[Header, memoryview]]:
    folder, _, name = part.source.rpartition("/")
    at = part.start
    try:
        handle = disk.open(part.source)
    except FileNotFoundError:
        _lost(f"{part.name}: retention deleted {name} before it was read", fail_on_data_loss)
        return
    try:
        position, size = _place(disk, folder, int(name.partition(".")[0]), at, disk.size(handle))
        for header, _, body in scan(disk, handle, part.source, position, size):
            if header.kind == LOST and header.timestamp_max_us > at:
                end = header.timestamp_max_us
                _lost(f"{part.name}: offsets {at} to {end - 1} were lost, as accepted", fail_on_data_loss)
                at = end
                if at >= part.end:
                    return
            if header.kind != DATA or header.end_offset <= at:
                continue
            if header.base_offset > at:
                raise Corrupt(f"{part.name}: offset {at} is not in {disk.root}/{part.source}")
            yield header, body
            at = header.end_offset
            if at >= part.end:
                return
    except OSError as error:
        raise StorageFault(f"reading {disk.root}/{part.source} failed: {error}", outcome="none") from error
    finally:
        disk.close(handle)
    raise Corrupt(f"{part.name}: {disk.root}/{part.source} ends at offset {at}")


def _place(disk: ViewedDisk, folder: str, entry: int, offset: int, file_bytes: int) -> tuple[int, int]:
    """Where in a segment to begin to look for an offset, and where its frames end."""
    try:
        segment: Segment | None = load_index(disk, folder, entry)
    except FileNotFoundError:
        segment = None  # Deleted since it was opened, which does not matter to who has it open.
    if segment is None or segment.points is None:
        return 0, file_bytes
    points = LogReader(disk, folder).points(segment)
    return points[last_false(points, lambda point: point.base_offset > offset)].position, segment.size


def _lost(text: str, strict: bool) -> None:
    if strict:
        raise NotFound(
            f"{text}. Read from a later start, read a copy of the folder, or let what is gone be left out "
            "(fail_on_data_loss=false)"
        )
    log.warning("%s; it is left out", text)
