"""Archives of topics as values: what a manifest says, how it grows, and which files hold a range of offsets.

An archive is a folder of Parquet files. Each file holds one contiguous range of offsets of one partition. A
manifest is the complete state of the archive of one topic; a file that the newest manifest does not name is
not part of the archive. Nothing here touches a disk: see `tailrace.spark.manifests`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby, pairwise
from urllib.parse import quote

import msgspec

from tailrace.errors import Corrupt, Fenced, InvalidRequest, NotFound

FORMAT = 1
STATE_FOLDER = "_tailrace"
Range = tuple[int, int]
"""First offset, and the first that does not belong to it any more."""


class ArchiveFile(msgspec.Struct, frozen=True):
    """One Parquet file: the offsets [first, end) of one partition, in order."""

    path: str
    """Below the folder of the archive."""
    first: int
    end: int
    rows: int
    bytes: int
    raw_bytes: int
    """Before compression."""
    append_min_us: int
    append_max_us: int
    time_max_us: int
    """The greatest timestamp of a message."""

    @property
    def folder(self) -> str:
        """Where it lies: the topic, the date and perhaps the hour of its append times."""
        return self.path.rpartition("/")[0]


class Cover(msgspec.Struct, frozen=True):
    """What is archived of one partition: the offsets [start, end), in files by ascending offset."""

    start: int = 0
    end: int = 0
    files: tuple[ArchiveFile, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    """The archive of one topic. Ids of topics are never used twice, so offsets of a topic that was deleted
    and created again cannot be taken for those of the first."""

    topic: str
    topic_id: int
    version: int = 0
    created_us: int = 0
    partitions: dict[int, Cover] = {}
    format: int = FORMAT

    def cover(self, partition: int) -> Cover | None:
        """What is archived of a partition; None when nothing ever was."""
        return self.partitions.get(partition)

    def paths(self) -> set[str]:
        """Every file that belongs to the archive."""
        return {file.path for cover in self.partitions.values() for file in cover.files}


# -------------------------------------------------------------------------------------------------- names


def topic_folder(topic: str) -> str:
    """The folder of a topic's files below the archive, in the way in which Spark writes partition columns."""
    return f"topic={quote(topic, safe='')}"


def state_folder(topic: str) -> str:
    """The folder of a topic's manifests, and of what is being written, below the archive."""
    return f"{STATE_FOLDER}/{quote(topic, safe='')}"


def manifest_name(version: int) -> str:
    """File name of a manifest."""
    return f"{version:020d}.json"


def manifest_version(name: str) -> int | None:
    """The version that a file name states; None for any other file."""
    stem, dot, suffix = name.partition(".")
    return int(stem) if dot and suffix == "json" and len(stem) == 20 and stem.isdigit() else None


def file_name(partition: int, first: int, end: int, run: str) -> str:
    """The name of a file; `run` makes it unlike that of another run which archives the same offsets."""
    return f"part-{partition:05d}-{first:020d}-{end:020d}-{run}.parquet"


def folder_of(topic: str, append_time_us: int, *, hourly: bool) -> str:
    """Where messages of an append time lie."""
    time = datetime.fromtimestamp(append_time_us // 1_000_000, UTC)
    folder = f"{topic_folder(topic)}/date={time:%Y-%m-%d}"
    return f"{folder}/hour={time:%H}" if hourly else folder


# ------------------------------------------------------------------------------------------------- growing


def missing(manifest: Manifest, log: Mapping[int, Range], *, accept_loss: bool = False) -> dict[int, Range]:
    """What of the log, which has these offsets, is not archived yet. Messages that were trimmed before they
    were archived are an error, unless their loss is accepted."""
    ranges = {}
    for partition, (start, end) in sorted(log.items()):
        cover = manifest.cover(partition)
        first = start if cover is None else cover.end
        if first > end:
            raise Corrupt(
                f"the archive of {manifest.topic}/{partition} ends at offset {first}, the log at {end}: "
                "the broker has lost messages, or it is another broker"
            )
        if first < start:
            if not accept_loss:
                raise NotFound(
                    f"offsets {first} to {start - 1} of {manifest.topic}/{partition} were trimmed before "
                    "they were archived: accept_loss=true goes on behind them; let retention be longer",
                    partition=partition,
                )
            first = start
        if first < end:
            ranges[partition] = first, end
    return ranges


def extended(
    manifest: Manifest, additions: Mapping[int, tuple[Range, Sequence[ArchiveFile]]], now_us: int
) -> Manifest:
    """The next version, with the files of more ranges, each behind what its partition has so far."""
    partitions = dict(manifest.partitions)
    for partition, ((first, end), files) in additions.items():
        cover = partitions.get(partition)
        if cover is None:
            cover = Cover(first, first)
        if first < cover.end:
            raise Fenced(f"{manifest.topic}/{partition} is archived up to {cover.end}: {first} is old")
        ordered = tuple(sorted(files, key=lambda file: file.first))
        require_whole(f"{manifest.topic}/{partition}", (first, end), ordered)
        partitions[partition] = Cover(cover.start, end, (*cover.files, *ordered))
    return _next(manifest, partitions, now_us)


def replaced(
    manifest: Manifest, merged: Sequence[tuple[int, Sequence[ArchiveFile], ArchiveFile]], now_us: int
) -> Manifest:
    """The next version, with one file in the place of several neighbours, for each (partition, old, new)."""
    partitions = dict(manifest.partitions)
    for partition, old, new in merged:
        cover = partitions[partition]
        gone = {file.path for file in old}
        if not gone <= {file.path for file in cover.files}:
            raise Fenced(f"files of {manifest.topic}/{partition} were merged by somebody else meanwhile")
        if (new.first, new.end, new.rows) != (old[0].first, old[-1].end, sum(file.rows for file in old)):
            raise Corrupt(f"{new.path} does not hold what it was merged from")
        kept = [file for file in cover.files if file.path not in gone]
        files = tuple(sorted((*kept, new), key=lambda file: file.first))
        partitions[partition] = Cover(cover.start, cover.end, files)
    return _next(manifest, partitions, now_us)


def _next(manifest: Manifest, partitions: dict[int, Cover], now_us: int) -> Manifest:
    return msgspec.structs.replace(
        manifest, version=manifest.version + 1, created_us=now_us, partitions=partitions
    )


def require_whole(place: str, wanted: Range, files: Sequence[ArchiveFile]) -> None:
    """Files must hold a range without a gap, nothing twice, and a row for each offset."""
    at = wanted[0]
    for file in files:
        if file.first != at or file.rows != file.end - file.first:
            raise Corrupt(
                f"{place}: {file.path} holds {file.rows} rows of offsets {file.first} to {file.end - 1}, "
                f"and offset {at} comes next"
            )
        at = file.end
    if at != wanted[1]:
        raise Corrupt(f"{place}: offsets {at} to {wanted[1] - 1} were not written")


def check(manifest: Manifest) -> None:
    """Refuse a manifest that contradicts itself, or that a later release has written."""
    if manifest.format != FORMAT:
        raise Corrupt(f"the archive of {manifest.topic} has format {manifest.format}: this reads {FORMAT}")
    for cover in manifest.partitions.values():
        at = cover.start
        for file in cover.files:
            if not at <= file.first < file.end <= cover.end:
                raise Corrupt(f"the manifest of {manifest.topic} contradicts itself at {file.path}")
            at = file.end


# ------------------------------------------------------------------------------------------------- reading


def chosen(cover: Cover, wanted: Range) -> list[ArchiveFile]:
    """The files that hold some of a range, in order."""
    return [file for file in cover.files if max(file.first, wanted[0]) < min(file.end, wanted[1])]


def holes(cover: Cover, wanted: Range) -> list[Range]:
    """The parts of a range that no file holds."""
    if wanted[0] >= wanted[1]:
        return []
    found, at = [], wanted[0]
    for file in chosen(cover, wanted):
        if file.first > at:
            found.append((at, file.first))
        at = file.end
    if at < wanted[1]:
        found.append((at, wanted[1]))
    return found


def pieces(file: ArchiveFile, wanted: Range, rows_max: int = 0) -> list[Range]:
    """The part of a range that a file holds, in ranges of at most so many offsets (0: in one)."""
    first, end = max(file.first, wanted[0]), min(file.end, wanted[1])
    count = 1 if not rows_max else -(-(end - first) // rows_max)
    bounds = [first + (end - first) * number // count for number in range(count + 1)]
    return list(pairwise(bounds))


# --------------------------------------------------------------------------------------------- small files


def compaction_groups(
    cover: Cover, *, small_bytes: int, target_bytes: int, files_min: int
) -> list[tuple[ArchiveFile, ...]]:
    """Neighbours in one folder that are to become one file: at least so many, each small, none too large
    together."""
    groups: list[tuple[ArchiveFile, ...]] = []
    for (_, small), files in groupby(cover.files, key=lambda file: (file.folder, file.bytes < small_bytes)):
        if small:
            groups += [run for run in _runs(files, target_bytes) if len(run) >= max(files_min, 2)]
    return groups


def _runs(files: Iterable[ArchiveFile], target_bytes: int) -> Iterable[tuple[ArchiveFile, ...]]:
    run: list[ArchiveFile] = []
    size = 0
    for file in files:
        if run and (size + file.bytes > target_bytes or run[-1].end != file.first):
            yield tuple(run)
            run, size = [], 0
        run.append(file)
        size += file.bytes
    if run:
        yield tuple(run)


# ------------------------------------------------------------------------------------------------ garbage


def kept_paths(manifests: Sequence[Manifest], now_us: int, keep_us: int) -> tuple[set[str], list[int]]:
    """The files that a reader may still need, and the versions of manifests that nobody does.

    A reader holds to the manifest that was the newest when it began: what was the newest less than `keep_us`
    ago is kept with all its files.
    """
    ordered = sorted(manifests, key=lambda manifest: manifest.version)
    paths: set[str] = set()
    old: list[int] = []
    for manifest, following in pairwise(ordered):
        if following.created_us < now_us - keep_us:
            old.append(manifest.version)
        else:
            paths |= manifest.paths()
    if ordered:
        paths |= ordered[-1].paths()
    return paths, old


def require_same_topic(manifest: Manifest, topic_id: int) -> None:
    """An archive belongs to one topic; another of the same name has other messages at the same offsets."""
    if manifest.topic_id != topic_id:
        raise InvalidRequest(
            f"the archive of {manifest.topic} is of topic id {manifest.topic_id}, and the topic has id "
            f"{topic_id} now: it was deleted and created again, or the broker is another; use another folder"
        )
