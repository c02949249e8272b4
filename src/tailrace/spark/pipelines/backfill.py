"""The pipeline `backfill`: messages of an archive, of another topic or of any DataFrame into a topic.

The work is cut into chunks, and each is one write that happens once: its plan is put in place as a version in
the state folder before it is written under that version, so a run that was killed repeats the chunk just as
it was. What belongs to the backfill is fixed by the first run. Order: the rows of a source partition keep
theirs, so keys do. Where a key has been in several partitions of the source, because partitions were added,
give a DataFrame with `order_by` instead: see `backfill_frame`.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
from msgspec import Meta

from tailrace.core.model.commands import DescribeTopic
from tailrace.errors import InvalidRequest, NotFound
from tailrace.spark.archives import Range, manifest_name, state_folder
from tailrace.spark.link import link_to
from tailrace.spark.manifests import archived_topics, newest, newest_version, put_version, replace_file
from tailrace.spark.options import ReadOptions, read_options, write_options
from tailrace.spark.pipelines import CommonOptions
from tailrace.spark.pipelines.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME = "backfill"
HELP = "write an archive, another topic or Parquet files into a topic, in order per key, exactly once"

RATE_S = 5.0
"""With a limit on the rate, a chunk is what may be written in so many seconds."""
TASK_ROWS_MIN = 20_000


class BackfillOptions(CommonOptions, frozen=True, kw_only=True):
    """Options of `backfill`. `topic` is the one that is written."""

    archive: Annotated[str, Meta(description="folder of the archive to read from")] = ""
    from_topic: Annotated[str, Meta(description="topic to read; the same as topic when empty")] = ""
    parquet: Annotated[str, Meta(description="Parquet files with columns of messages, instead")] = ""
    order_by: Annotated[list[str], Meta(description="with parquet: columns by which keys are ordered")] = []  # noqa: RUF012
    chunks: Annotated[int, Meta(ge=1, description="with parquet: in so many writes")] = 16
    start: Annotated[str, Meta(description="as the option of the data source")] = "earliest"
    end: Annotated[str, Meta(description="as the option of the data source")] = "latest"
    state: Annotated[str, Meta(description="folder for the position; in the archive when empty")] = ""
    chunk_rows: Annotated[int, Meta(ge=1, description="messages of one write at most")] = 1_000_000
    chunk_bytes: Annotated[int, Meta(ge=1, description="bytes of one write, about")] = 256 * 1024 * 1024
    rows_per_second: Annotated[float, Meta(ge=0, description="messages per second at most; 0: no limit")] = (
        0.0
    )
    keep_partition: Annotated[
        bool | None, Meta(description="into the partition of the same number; None: when there are as many")
    ] = None
    timeout_s: Annotated[float, Meta(gt=0, description="how long a call to the broker may take")] = 30.0


OPTIONS = BackfillOptions


class BackfillChunk(msgspec.Struct, frozen=True):
    """One write. Parts are partitions of the source with offsets, or part 0 with numbers of chunks."""

    version: int
    writer: str
    source: str
    topic: str
    topic_id: int
    until: dict[int, int]
    """Where the whole backfill ends."""
    starts: dict[int, int]
    ends: dict[int, int]
    written: bool = False
    rows: int = 0
    """Written by all chunks before this one."""


class BackfillSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did."""

    topic: str
    writer: str
    chunks: int
    rows: int | None
    """Of this run; None where they were not counted: rows of a DataFrame without a limit on their rate."""
    rows_total: int | None
    """Of all runs; None for a DataFrame."""
    complete: bool


# ------------------------------------------------------------------------------------------------ the plan


def next_chunk(last: BackfillChunk, rows_max: int) -> BackfillChunk | None:
    """The write after one that is done: a share of what is left of every part, so that all end together."""
    from tailrace.spark.source.slices import share

    left = {("", part): (at, last.until[part]) for part, at in last.ends.items() if at < last.until[part]}
    if not left:
        return None
    ends = last.ends | {part: end for (_, part), (_, end) in share(left, rows_max).items()}
    rows = last.rows + units(last)
    return msgspec.structs.replace(
        last, version=last.version + 1, starts=last.ends, ends=ends, written=False, rows=rows
    )


def units(chunk: BackfillChunk) -> int:
    """How much of its parts a chunk has: offsets, or numbers of chunks."""
    return sum(chunk.ends[part] - at for part, at in chunk.starts.items())


def chunk_rows(options: BackfillOptions, row_bytes: float) -> int:
    """How many rows a write has at most."""
    rows = min(options.chunk_rows, int(options.chunk_bytes / max(row_bytes, 1.0)))
    if options.rows_per_second:
        rows = min(rows, int(options.rows_per_second * RATE_S))
    return max(rows, 1)


def pause_s(rows: int, rows_per_second: float, elapsed_s: float) -> float:
    """How long to wait after so many rows in that time, to stay below a rate."""
    return max(0.0, rows / rows_per_second - elapsed_s) if rows_per_second else 0.0


# -------------------------------------------------------------------------------------------------- running


def run(session: SparkSession, options: BackfillOptions, progress: Progress) -> BackfillSummary:
    """Write what is not written yet."""
    if options.follow:
        raise InvalidRequest("follow: a backfill has an end; `project` follows a topic")
    if options.parquet:
        return backfill_frame(session.read.parquet(options.parquet), options, progress)
    source = options.from_topic or options.topic
    if not options.archive and source == options.topic:
        raise InvalidRequest("from_topic: another topic, or an archive, is needed to read from")
    if options.archive and not options.from_topic and newest(options.archive, source) is None:
        there = ", ".join(archived_topics(options.archive)) or "none"
        raise NotFound(f"from_topic: {options.archive} has nothing of {source!r}; its topics: {there}")
    return _Backfill(session, options, progress, source).run()


def backfill_frame(frame: DataFrame, options: BackfillOptions, progress: Progress) -> BackfillSummary:
    """Any DataFrame with columns of messages into a topic. Rows of a key are written by `order_by`, all in
    the same chunk. The DataFrame has to give the same rows each time, as one of files does."""
    return _FrameBackfill(frame, options, progress).run()


class _Writing(ABC):
    """Chunks one after the other: planned, written, noted."""

    def __init__(self, options: BackfillOptions, progress: Progress, state: str, source: str) -> None:
        given = {"topic": options.topic, "timeout_s": str(options.timeout_s)}
        if options.url:
            given["url"] = options.url
        self._url = write_options(given).url.spelled()
        self._link = link_to(self._url, options.timeout_s)
        self._options = options
        self._progress = progress
        self._source = source
        if not state:
            raise InvalidRequest("state: a folder for the position is needed")
        self._state = Path(os.path.abspath(state))
        self._target = self._link.ask(DescribeTopic(options.topic))

    @abstractmethod
    def begin(self) -> BackfillChunk:
        """A version without rows, which says where the backfill begins and ends."""

    @abstractmethod
    def rows(self, chunk: BackfillChunk) -> tuple[DataFrame, int | None]:
        """The rows of a chunk, in the order in which they are to be written, and how many they are if that is
        known."""

    @abstractmethod
    def rows_max(self) -> int:
        """How much of the parts, together, one chunk has at most."""

    def rows_total(self, chunk: BackfillChunk) -> int | None:
        """How many rows all chunks up to this one have, if that is known."""
        return None

    def keep_partition(self, chunk: BackfillChunk) -> bool:
        """Whether rows go to the partition that their column names."""
        return bool(self._options.keep_partition)

    def run(self, clock: Callable[[], float] = time.monotonic) -> BackfillSummary:
        """All chunks that are left."""
        self._progress.step("looking for the position")
        chunk = self._last()
        chunks = 0
        rows: int | None = 0
        while True:
            if chunk.written:
                following = next_chunk(chunk, self.rows_max())
                if following is None:
                    break
                put_version(self._state, following.version, msgspec.json.encode(following))
                chunk = following
            began_s = clock()
            count = self._write(chunk)
            chunk = msgspec.structs.replace(chunk, written=True)
            replace_file(self._state / manifest_name(chunk.version), msgspec.json.encode(chunk))
            chunks += 1
            rows = None if count is None or rows is None else rows + count
            wait_s = pause_s(count or 0, self._options.rows_per_second, clock() - began_s)
            if wait_s and not self._progress.again(wait_s):
                break
        return BackfillSummary(
            topic=chunk.topic,
            writer=chunk.writer,
            chunks=chunks,
            rows=rows,
            rows_total=self.rows_total(chunk),
            complete=chunk.ends == chunk.until,
        )

    def _last(self) -> BackfillChunk:
        stored = newest_version(self._state)
        if stored is None:
            chunk = self.begin()
            put_version(self._state, chunk.version, msgspec.json.encode(chunk))
            return chunk
        chunk = msgspec.json.decode(stored, type=BackfillChunk)
        have = chunk.source, chunk.topic, chunk.topic_id
        if have != (self._source, self._options.topic, self._target.id):
            raise InvalidRequest(
                f"state: {self._state} is of a backfill from {chunk.source} to {chunk.topic} (id "
                f"{chunk.topic_id}), not from {self._source} to {self._options.topic} (id {self._target.id})"
            )
        return chunk

    def first(self, starts: dict[int, int], until: dict[int, int]) -> BackfillChunk:
        """What a new backfill begins with."""
        writer = f"backfill-{os.urandom(8).hex()}"
        return BackfillChunk(
            0, writer, self._source, self._options.topic, self._target.id, until, starts, starts, True
        )

    def _write(self, chunk: BackfillChunk) -> int | None:
        frame, rows = self.rows(chunk)
        self._progress.step(f"chunk {chunk.version}", rows=rows)
        options = {
            "url": self._url,
            "timeout_s": str(self._options.timeout_s),
            "topic": chunk.topic,
            "txn_app_id": chunk.writer,
            "txn_version": str(chunk.version),
            "keep_partition": str(self.keep_partition(chunk)).lower(),
        }
        # The column `topic` of rows that were read would send them back to where they came from.
        frame.drop("topic").write.format("tailrace").mode("append").options(**options).save()
        self._progress.done(rows or 0)
        return rows


class _Backfill(_Writing):
    """From an archive (and the log behind it), or from another topic."""

    def __init__(
        self, session: SparkSession, options: BackfillOptions, progress: Progress, source: str
    ) -> None:
        state = options.state
        if not state and options.archive:
            state = f"{options.archive}/{state_folder(source)}/backfill-{quote(options.topic, safe='')}"
        where = os.path.abspath(options.archive) if options.archive else "the log"
        super().__init__(options, progress, state, f"{source} in {where}")
        self._session = session
        self._from = source

    def _given(self, **more: str) -> dict[str, str]:
        given = {"url": self._url, "topic": self._from, "timeout_s": str(self._options.timeout_s), **more}
        if self._options.archive:
            given.update(mode="archive", archive=os.path.abspath(self._options.archive))
        return given

    def begin(self) -> BackfillChunk:
        """From the options `start` and `end`, as of now."""
        spans = self._spans(read_options(self._given(start=self._options.start, end=self._options.end)))
        return self.first(
            {part: start for part, (start, _) in spans.items()},
            {part: end for part, (_, end) in spans.items()},
        )

    def _spans(self, options: ReadOptions) -> dict[int, Range]:
        if not self._options.archive:
            from tailrace.spark.source.batch_reader import planned

            return {partition: span for (_, partition), span in planned(self._link, options).items()}
        from tailrace.spark.source.archive_reader import known, whole

        return {partition: span for (_, partition), span in whole(options, known(options)).items()}

    def rows_max(self) -> int:
        """As many as options allow, for messages of the size that they have on average."""
        manifest = newest(self._options.archive, self._from) if self._options.archive else None
        files = [file for cover in manifest.partitions.values() for file in cover.files] if manifest else []
        if files:
            nbytes, rows = sum(file.raw_bytes for file in files), sum(file.rows for file in files)
        else:
            parts: list[dict[str, Any]] = self._link.ask(DescribeTopic(self._from)).partitions
            nbytes = sum(part["bytes"] for part in parts)
            rows = sum(part["end_offset"] - part["start_offset"] for part in parts)
        return chunk_rows(self._options, nbytes / max(rows, 1))

    def rows(self, chunk: BackfillChunk) -> tuple[DataFrame, int | None]:
        """By partition and offset; every offset is a row."""
        rows = units(chunk)
        cores = max(self._session.sparkContext.defaultParallelism, 1)
        given = self._given(
            start=_offsets(self._from, chunk.starts),
            end=_offsets(self._from, chunk.ends),
            rows_per_partition=str(max(-(-rows // cores), TASK_ROWS_MIN)),
        )
        found = self._session.read.format("tailrace").options(**given).load()
        # Partitions that were added to the source since the first run do not belong to the backfill.
        return found.where(found["partition"].isin(list(chunk.until))), rows

    def rows_total(self, chunk: BackfillChunk) -> int | None:
        """Every offset is a row."""
        return chunk.rows + units(chunk)

    def keep_partition(self, chunk: BackfillChunk) -> bool:
        """By default where the target has as many partitions as the source."""
        if self._options.keep_partition is not None:
            return self._options.keep_partition
        return len(chunk.until) == len(self._target.partitions)


class _FrameBackfill(_Writing):
    """From a DataFrame: chunks are the keys with the same remainder of their hash."""

    def __init__(self, frame: DataFrame, options: BackfillOptions, progress: Progress) -> None:
        super().__init__(options, progress, options.state, options.parquet or "a DataFrame")
        if options.order_by and "key" not in frame.columns:
            raise InvalidRequest("order_by: orders the rows of a key, and there is no column `key`")
        self._frame = frame
        self._count = options.chunks if "key" in frame.columns else 1

    def begin(self) -> BackfillChunk:
        """From the first chunk to the last."""
        return self.first({0: 0}, {0: self._count})

    def rows_max(self) -> int:
        """One chunk."""
        return 1

    def rows(self, chunk: BackfillChunk) -> tuple[DataFrame, int | None]:
        """The rows of its keys, each key in one task; counted only where the rate depends on it."""
        from pyspark.sql import functions

        rows = self._frame
        if "key" in rows.columns:
            number = functions.pmod(functions.xxhash64("key"), functions.lit(chunk.until[0]))
            rows = rows.where(number == chunk.starts[0])
            if self._options.order_by:
                rows = rows.repartition("key").sortWithinPartitions(*self._options.order_by)
        return rows, rows.count() if self._options.rows_per_second else None


def _offsets(topic: str, offsets: dict[int, int]) -> str:
    return msgspec.json.encode({topic: offsets}).decode()
