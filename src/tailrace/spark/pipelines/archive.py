"""The pipeline `archive`: topics as Parquet files by date, so that the broker may forget messages soon.

A round reads what is not archived yet with the data source, writes it with Spark's Parquet writer to a folder
of its own, moves the files to their places and puts a new manifest in place: the last step makes them part of
the archive, all at once. A run that is killed before leaves files that nobody names. Two runs at once do not
disturb each other: one of them puts its manifest in place first, and the other begins again behind it.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from tailrace.core.model.commands import EARLIEST, LATEST, DescribeTopic
from tailrace.errors import Fenced, InvalidRequest
from tailrace.spark.archives import (
    ArchiveFile,
    Manifest,
    Range,
    compaction_groups,
    extended,
    missing,
    replaced,
    require_same_topic,
)
from tailrace.spark.link import BrokerLink, link_to
from tailrace.spark.manifests import (
    drop,
    merge,
    newest,
    parquet_files,
    publish,
    remove_garbage,
    settled,
    staging_folder,
)
from tailrace.spark.options import read_options
from tailrace.spark.pipelines import CommonOptions
from tailrace.spark.pipelines.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME = "archive"
HELP = "write topics to Parquet files by date, exactly once; mode=archive reads them back"

WRITERS_MAX = 64
"""So many dates or hours may one task write at once without sorting its rows; a task has few."""
ROWS_PER_FILE_MIN = 50_000
GARBAGE_EVERY_S = 3600.0

CONF = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.maxConcurrentOutputFileWriters": str(WRITERS_MAX),
    "spark.sql.files.maxRecordsPerFile": "0",
}
DATE = "date_from_unix_date(cast(unix_micros(append_time) div 86400000000 as int))"
HOUR = "lpad(cast((unix_micros(append_time) div 3600000000) % 24 as string), 2, '0')"
"""In UTC, whatever the zone of the session is."""


class ArchiveOptions(CommonOptions, frozen=True, kw_only=True):
    """Options of `archive`. Several topics have commas between them."""

    root: Annotated[str, Meta(description="folder of the archive; executors have to see it")]
    hourly: Annotated[bool, Meta(description="a folder for each hour, not only for each date")] = False
    rows_per_round: Annotated[int, Meta(ge=1, description="messages until the next manifest")] = 20_000_000
    rows_per_file: Annotated[int, Meta(ge=1, description="messages of one file at most")] = 2_000_000
    small_bytes: Annotated[
        int, Meta(ge=0, description="files below that size are merged with their neighbours; 0: never")
    ] = 16 * 1024 * 1024
    target_bytes: Annotated[int, Meta(ge=1, description="size of merged files at most")] = 128 * 1024 * 1024
    merge_min: Annotated[int, Meta(ge=2, description="small neighbours that are worth a merge")] = 8
    keep_s: Annotated[
        float, Meta(ge=0, description="how long files are kept that no manifest names any more")
    ] = 86_400.0
    accept_loss: Annotated[
        bool, Meta(description="go on behind messages that were trimmed before they were archived")
    ] = False
    interval_s: Annotated[float, Meta(gt=0, description="with --follow: seconds between rounds")] = 60.0
    timeout_s: Annotated[float, Meta(gt=0, description="how long a call to the broker may take")] = 30.0


OPTIONS = ArchiveOptions


class Archived(msgspec.Struct, frozen=True):
    """What the archive has of one partition."""

    topic: str
    partition: int
    start: int
    end: int
    files: int
    bytes: int


class ArchiveSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did, and what the archive has now."""

    root: str
    rounds: int
    rows: int
    files: int
    merged: int
    """Small files that became part of larger ones."""
    removed: int
    """Files that nobody needed any more."""
    partitions: list[Archived]


def run(session: SparkSession, options: ArchiveOptions, progress: Progress) -> ArchiveSummary:
    """Archive what is there, or go on until stopped."""
    work = Archiver(session, options, progress)
    topics = list(dict.fromkeys(name.strip() for name in options.topic.split(",") if name.strip()))
    if not topics:
        raise InvalidRequest("topic: at least one is needed")
    tidied_s = -GARBAGE_EVERY_S
    while True:
        full = [topic for topic in topics if work.round(topic)]
        if time.monotonic() - tidied_s >= GARBAGE_EVERY_S:
            tidied_s = time.monotonic()
            for topic in topics:
                work.tidy(topic)
        if not full and not (options.follow and progress.again(options.interval_s)):
            return work.summary(topics)


class Archiver:
    """An archive at work: rounds of its topics."""

    def __init__(self, session: SparkSession, options: ArchiveOptions, progress: Progress) -> None:
        # A session of its own has its own settings, so those of the caller stay as they are.
        self._session = session.newSession()
        for name, value in CONF.items():
            self._session.conf.set(name, value)
        self._options = options
        self._progress = progress
        given = {"topic": options.topic, "timeout_s": str(options.timeout_s)}
        if options.url:
            given["url"] = options.url
        self._url = read_options(given).url.spelled()
        self._link: BrokerLink = link_to(self._url, options.timeout_s)
        self._root = os.path.abspath(options.root)
        self._rounds = self._rows = self._files = self._merged = self._removed = 0

    def round(self, topic: str) -> bool:
        """Archive what is new of a topic; True when the round was full, so that there may be more."""
        self._progress.step(f"{topic}: looking for new messages")
        manifest, ranges, bounds = self.plan(topic)
        rows = sum(end - first for first, end in ranges.values())
        if not rows:
            return False
        run = os.urandom(8).hex()
        staging = staging_folder(self._root, topic, run)
        files: dict[int, list[ArchiveFile]] = {}
        named = False
        try:
            self._progress.step(f"{topic}: version {manifest.version + 1}", rows=rows)
            self.write(self.messages(topic, ranges, bounds), str(staging))
            self._progress.step(f"{topic}: putting version {manifest.version + 1} in place")
            files = settled(self._root, topic, parquet_files(staging), run, hourly=self._options.hourly)
            additions = {p: (span, files.pop(p, [])) for p, span in ranges.items()}
            drop(self._root, [file for others in files.values() for file in others])
            files = {partition: list(found) for partition, (_, found) in additions.items()}
            self._progress.step(f"{topic}: naming the files of version {manifest.version + 1}")
            following = extended(manifest, additions, time.time_ns() // 1000)
            named = True  # From here on they may be, whatever is heard of it.
            publish(self._root, following)
        except Fenced:
            named = False
            return True  # Another run was first: begin again at what it has left.
        finally:
            if not named:
                drop(self._root, [file for found in files.values() for file in found])
            shutil.rmtree(staging, ignore_errors=True)
        self._rounds += 1
        self._rows += rows
        self._files += sum(map(len, files.values()))
        self._progress.done(rows)
        self.merge_small(topic)
        return rows >= self._options.rows_per_round

    def plan(self, topic: str) -> tuple[Manifest, dict[int, Range], dict[int, Range]]:
        """The manifest to go on from, what of each partition comes next, and what the log has."""
        from tailrace.spark.source.slices import share

        info = self._link.ask(DescribeTopic(topic))
        # In this order: what is trimmed before its start is known was archived before the manifest is read,
        # and what the manifest has was in the log before its end is known.
        starts = self._link.offsets(topic, EARLIEST)
        manifest = newest(self._root, topic) or Manifest(topic, info.id)
        require_same_topic(manifest, info.id)
        ends = self._link.offsets(topic, LATEST)
        bounds: dict[int, Range] = dict(enumerate(zip(starts, ends, strict=False)))
        ranges = missing(manifest, bounds, accept_loss=self._options.accept_loss)
        shared = share({(topic, p): span for p, span in ranges.items()}, self._options.rows_per_round)
        chosen = {p: (first, end) for (_, p), (first, end) in shared.items() if first < end}
        return manifest, chosen, bounds

    def messages(self, topic: str, ranges: dict[int, Range], bounds: dict[int, Range]) -> DataFrame:
        """The rows of these ranges, as the data source reads them."""
        spans = {partition: ranges.get(partition, (end, end)) for partition, (_, end) in bounds.items()}
        rows = sum(end - first for first, end in ranges.values())
        cores = max(self._session.sparkContext.defaultParallelism, 1)
        rows_max = min(self._options.rows_per_file, max(-(-rows // cores), ROWS_PER_FILE_MIN))
        options: dict[str, Any] = {
            "url": self._url,
            "timeout_s": self._options.timeout_s,
            "topic": topic,
            "start": _offsets(topic, {partition: first for partition, (first, _) in spans.items()}),
            "end": _offsets(topic, {partition: end for partition, (_, end) in spans.items()}),
            "rows_per_partition": rows_max,
        }
        return self._session.read.format("tailrace").options(**options).load()

    def write(self, messages: DataFrame, folder: str) -> None:
        """Rows as Parquet files below a folder, those of each task and date in one."""
        from pyspark.sql import functions

        parts = {"date": functions.expr(DATE)}
        if self._options.hourly:
            parts["hour"] = functions.expr(HOUR)
        frame = messages.drop("topic").withColumns(parts)
        frame.write.partitionBy(*parts).option("compression", "zstd").parquet(folder)

    def merge_small(self, topic: str) -> None:
        """Make few large files of many small ones that lie side by side."""
        manifest = newest(self._root, topic)
        if manifest is None or not self._options.small_bytes:
            return
        groups = [
            (partition, group)
            for partition, cover in manifest.partitions.items()
            for group in compaction_groups(
                cover,
                small_bytes=self._options.small_bytes,
                target_bytes=self._options.target_bytes,
                files_min=self._options.merge_min,
            )
        ]
        if not groups:
            return
        self._progress.step(f"{topic}: merging {sum(len(group) for _, group in groups)} small files")
        run = os.urandom(8).hex()
        staging = staging_folder(self._root, topic, run)
        named, files = False, list[ArchiveFile]()
        try:
            root = self._root
            jobs = [(group, str(staging / f"{number}.parquet")) for number, (_, group) in enumerate(groups)]
            context = self._session.sparkContext
            context.parallelize(jobs, len(jobs)).foreach(lambda job: merge(root, job[0], job[1]))
            merged = []
            for (partition, group), (_, path) in zip(groups, jobs, strict=True):
                hourly = "/hour=" in group[0].folder
                (made,) = settled(root, topic, [Path(path)], run, hourly=hourly)[partition]
                files.append(made)
                merged.append((partition, group, made))
            following = replaced(manifest, merged, time.time_ns() // 1000)
            named = True  # From here on they may be, whatever is heard of it.
            publish(root, following)
            self._merged += sum(len(group) for _, group in groups)
        except Fenced:
            named = False
            return  # Another run was first; it, or the next round, merges them.
        finally:
            if not named:
                drop(self._root, files)
            shutil.rmtree(staging, ignore_errors=True)

    def tidy(self, topic: str) -> None:
        """Remove what is old and belongs to nothing."""
        keep_us = round(self._options.keep_s * 1e6)
        self._removed += remove_garbage(self._root, topic, time.time_ns() // 1000, keep_us)

    def summary(self, topics: list[str]) -> ArchiveSummary:
        """What was done, and what there is now."""
        partitions = []
        for topic in topics:
            manifest = newest(self._root, topic)
            for partition, cover in sorted(manifest.partitions.items()) if manifest else ():
                size = sum(file.bytes for file in cover.files)
                partitions.append(Archived(topic, partition, cover.start, cover.end, len(cover.files), size))
        return ArchiveSummary(
            root=self._root,
            rounds=self._rounds,
            rows=self._rows,
            files=self._files,
            merged=self._merged,
            removed=self._removed,
            partitions=partitions,
        )


def _offsets(topic: str, offsets: dict[int, int]) -> str:
    return msgspec.json.encode({topic: offsets}).decode()
