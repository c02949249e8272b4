"""Mode `archive`: rows of the archive, and from where it ends on those of the log, as if they were one.

What is archived is read from Parquet files, in workers, even where the broker still has it. The rest comes
through the broker, which is asked only when the read goes beyond the archive. What neither of them has is
data loss: see `fail_on_data_loss`. When retention overtakes a read, the archive is asked again before that is
said.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from tailrace.core.model.commands import EARLIEST, LATEST
from tailrace.errors import Corrupt, NotFound, StorageFault
from tailrace.format.frame import Header
from tailrace.format.schema import TIME
from tailrace.format.tabular import POSITIONED
from tailrace.spark.archives import (
    ArchiveFile,
    Cover,
    Manifest,
    Range,
    chosen,
    holes,
    pieces,
    require_same_topic,
)
from tailrace.spark.link import BrokerLink, link_to
from tailrace.spark.manifests import BATCH_ROWS, archived_topics, newest, rows_of
from tailrace.spark.options import ReadOptions
from tailrace.spark.source.log_spans import Place, Span, spans_of, topics_of
from tailrace.spark.source.row_batches import check_schema, row_batches, unexpired
from tailrace.spark.source.slice_frames import frames_of
from tailrace.spark.source.slices import Slice, cut

log = logging.getLogger("tailrace.spark")
NOTHING = Cover()


class Known(msgspec.Struct, frozen=True):
    """What archive and log have of the topics that are read. `link` is None where no broker is needed."""

    manifests: dict[str, Manifest]
    logs: dict[Place, Span]
    link: BrokerLink | None

    def cover(self, place: Place) -> Cover:
        """What is archived of a partition; an empty range where its log begins when nothing is."""
        manifest = self.manifests.get(place[0])
        found = manifest.cover(place[1]) if manifest is not None else None
        if found is not None:
            return found
        start = self.logs[place][0] if place in self.logs else 0
        return Cover(start, start)

    def extents(self) -> dict[Place, Span]:
        """From the first offset that either of them has to the last."""
        places = {(t, p) for t, manifest in self.manifests.items() for p in manifest.partitions}
        found: dict[Place, Span] = {}
        for place in sorted(places | self.logs.keys()):
            cover = self.cover(place)
            start, end = self.logs.get(place, (cover.end, cover.end))
            if end < cover.end:
                raise Corrupt(
                    f"the archive of {place[0]}/{place[1]} ends at offset {cover.end}, the log at {end}: the "
                    "broker has lost messages, or it is another broker"
                )
            found[place] = (min(cover.start, start) if cover.files else start), end
        return found


class ArchiveReader(DataSourceReader):
    """Plans ranges of files and of the log on the driver and reads them in workers."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns: list[str] = schema.fieldNames()
        check_schema(self._columns, [field.dataType.simpleString() for field in schema.fields])
        self._now_us = time.time_ns() // 1000

    def partitions(self) -> list[InputPartition]:
        """A slice per file and one per partition of the log, or several of at most `rows_per_partition`."""
        return list(planned(self._options, known(self._options)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a slice."""
        if not isinstance(partition, Slice):
            return iter(())
        if partition.source:
            return self._file_rows(partition)
        return self._log_rows(partition)

    def _file_rows(self, part: Slice) -> Iterator[pa.RecordBatch]:
        """From the file that the slice names."""
        path = Path(self._options.archive) / part.source
        stored = [name for name in self._columns if name != "topic"]
        if self._options.skip_expired:
            stored.append("expires_at")
        at = part.start
        try:
            for batch in rows_of(path, stored, part.start, part.end):
                at += batch.num_rows
                yield from self._shown(batch, part.topic)
        except FileNotFoundError:
            raise StorageFault(f"{path} is missing, and the manifest of {part.topic} names it") from None
        except (pa.ArrowException, OSError) as error:
            raise StorageFault(f"reading {path} failed: {error}") from error
        if at != part.end:
            raise Corrupt(f"{part.name}: {path} has {at - part.start} rows of it")

    def _shown(self, batch: pa.RecordBatch, topic: str) -> Iterator[pa.RecordBatch]:
        if self._options.skip_expired:
            now = pa.scalar(self._now_us, TIME)
            batch = batch.filter(pc.fill_null(pc.greater(batch.column("expires_at"), now), True))
            if not batch.num_rows:
                return
        arrays = [
            _repeated(topic).slice(0, batch.num_rows) if name == "topic" else _typed(batch, name)
            for name in self._columns
        ]
        schema = pa.schema([POSITIONED.field(name) for name in self._columns])
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _log_rows(self, part: Slice) -> Iterator[pa.RecordBatch]:
        """Through the broker; what it has trimmed since the plan was made may be archived by now."""
        options = self._options
        link = link_to(options.url, options.timeout_s)
        lost: list[NotFound] = []
        choose = [unexpired(self._now_us)] if options.skip_expired else []
        yield from row_batches(_until_lost(frames_of(link, part), lost), part, self._columns, choose)
        if not lost:
            return
        gap = lost[0].details["first"], lost[0].details["end"]
        manifest = newest(options.archive, part.topic)
        cover = (manifest.cover(part.partition) if manifest else None) or NOTHING
        if not holes(cover, gap):
            for file in file_slices(cover, (part.topic, part.partition), gap):
                yield from self._file_rows(file)
        elif options.fail_on_data_loss:
            raise lost[0]
        else:
            log.warning("%s; it is left out", lost[0].message)
        if gap[1] < part.end:
            yield from self._log_rows(Slice(part.topic, part.partition, gap[1], part.end))


def _until_lost(
    frames: Iterator[tuple[Header, memoryview]], lost: list[NotFound]
) -> Iterator[tuple[Header, memoryview]]:
    """Frames up to the first offset that is gone: what came before it is not to be dropped with it."""
    try:
        yield from frames
    except NotFound as error:
        if "first" not in error.details:
            raise
        lost.append(error)


@lru_cache(maxsize=4)
def _repeated(topic: str) -> pa.Array:
    """Made once: pyarrow takes long for it."""
    return pa.repeat(pa.scalar(topic), BATCH_ROWS)


def _typed(batch: pa.RecordBatch, name: str) -> pa.Array:
    column, kind = batch.column(name), POSITIONED.field(name).type
    return column if column.type == kind else column.cast(kind)


# -- the plan


def known(options: ReadOptions) -> Known:
    """Look at the newest manifests and, unless the archive has all that is asked for, at the broker."""
    found = {topic: newest(options.archive, topic) for topic in _archived(options)}
    manifests = {topic: manifest for topic, manifest in found.items() if manifest is not None}
    if _within(options, manifests):
        return Known(manifests, {}, None)
    link = link_to(options.url, options.timeout_s)
    live = {info.name: info.id for info in link.topics()}
    topics = topics_of(options, live.keys() | manifests.keys(), f"{options.archive} or {link.url}")
    # In this order: what is trimmed before its start is known was archived before the manifest is read, and
    # what the manifest has was in the log before its end is known.
    starts = {topic: link.offsets(topic, EARLIEST) for topic in topics if topic in live}
    found = {topic: newest(options.archive, topic) for topic in topics}
    manifests = {topic: manifest for topic, manifest in found.items() if manifest is not None}
    logs: dict[Place, Span] = {}
    for topic in topics:
        if topic not in live:
            log.warning("%s has no topic %r any more: only what is archived of it is read", link.url, topic)
            continue
        if topic in manifests:
            require_same_topic(manifests[topic], live[topic])
        ends = link.offsets(topic, LATEST)
        logs |= {(topic, p): span for p, span in enumerate(zip(starts[topic], ends, strict=False))}
    return Known(manifests, logs, link)


def _archived(options: ReadOptions) -> list[str]:
    if not options.pattern:
        return sorted(set(options.topics))
    names = archived_topics(options.archive)
    return topics_of(options, names, options.archive) if names else []


def _within(options: ReadOptions, manifests: Mapping[str, Manifest]) -> bool:
    """Whether a read by offsets ends within the archive, in every partition of every topic."""
    end = options.end
    if options.pattern or not isinstance(end, dict) or set(end) != set(options.topics):
        return False
    return all(
        topic in manifests
        and offsets.keys() == manifests[topic].partitions.keys()
        and all(0 <= offset <= manifests[topic].partitions[p].end for p, offset in offsets.items())
        for topic, offsets in end.items()
    )


def planned(options: ReadOptions, have: Known) -> list[Slice]:
    """The slices of a read, by topic, partition and offset; a slice of a file names it."""
    spans, losses = _spans(options, have)
    slices: list[Slice] = []
    for place, span in sorted(spans.items()):
        cover, rows_max = have.cover(place), options.rows_per_partition
        before = span[0], min(span[1], cover.start)
        here = max(span[0], cover.start), min(span[1], cover.end)
        behind = max(span[0], cover.end), span[1]
        in_log = have.logs.get(place, (cover.end, cover.end))
        losses += [_gone(place, hole, "is not in the archive") for hole in holes(cover, here)]
        if behind[0] < min(behind[1], in_log[0]):
            gap = behind[0], min(behind[1], in_log[0])
            losses.append(
                _gone(place, gap, f"lies between the archive and the log, which begins at {in_log[0]}")
            )
            behind = gap[1], behind[1]
        slices += cut({place: before}, rows_max)
        slices += file_slices(cover, place, here, rows_max)
        slices += cut({place: behind}, rows_max)
    for loss in losses:
        if options.fail_on_data_loss:
            raise NotFound(f"{loss}. Begin later, or let what is gone be left out (fail_on_data_loss=false)")
        log.warning("%s; it is left out", loss)
    return sorted(slices, key=lambda part: (part.topic, part.partition, part.start))


def whole(options: ReadOptions, have: Known) -> dict[Place, Span]:
    """What a read has of each partition, from archive and log together."""
    return _spans(options, have)[0]


def _spans(options: ReadOptions, have: Known) -> tuple[dict[Place, Span], list[str]]:
    return spans_of(options, have.extents(), lambda place, us: _at_time(options, have, place, us))


def file_slices(cover: Cover, place: Place, wanted: Range, rows_max: int = 0) -> list[Slice]:
    """Slices of the files that hold a range."""
    return [
        Slice(*place, first, end, file.path)
        for file in chosen(cover, wanted)
        for first, end in pieces(file, wanted, rows_max)
    ]


def _gone(place: Place, gap: Range, where: str) -> str:
    return f"{place[0]}/{place[1]}: what is at offsets {gap[0]} to {gap[1] - 1} {where}"


def _at_time(options: ReadOptions, have: Known, place: Place, time_us: int) -> int:
    """The first offset of a time, in the archive or else in the log."""
    found = archived_time(options.archive, have.cover(place).files, time_us)
    in_log = have.logs.get(place)
    if have.link is None or in_log is None:
        return have.cover(place).end if found is None else found
    later = have.link.offsets(place[0], max(0, time_us))[place[1]]
    return later if found is None else min(found, later)


def archived_time(root: str, files: Iterable[ArchiveFile], time_us: int) -> int | None:
    """The first archived offset whose timestamp is at or above a time; None when there is none."""
    wanted = pa.scalar(time_us, TIME)
    for file in files:
        if file.time_max_us >= time_us:
            for batch in rows_of(Path(root) / file.path, ["timestamp"], file.first, file.end):
                late = batch.filter(pc.greater_equal(batch.column("timestamp"), wanted))
                if late.num_rows:
                    offset: int = late.column("offset")[0].as_py()
                    return offset
    return None
