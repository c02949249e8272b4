"""The sealed segments of a partition, found in the broker's data folder or in a copy of it; reads only.

The last segment of a log is still being written, so it is not sealed, and what is in it cannot be read from
the files: the sealed part ends where that segment begins. Nothing is locked. A broker may go on writing, and
may delete the oldest segments at any time.

Where the log begins is more than where its files begin: what was trimmed stays in its segment until the whole
segment can go. The newest snapshot knows the start of the log as of its entry, and facts behind it may have
moved it on; both are looked at. A copy that lacks the snapshots and the oldest segments may know of no trim,
and then shows all messages that its segments hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np

from tailrace.cluster.embedded import FILE, FileCoordinator
from tailrace.core.catalog.catalog import Catalog
from tailrace.core.model.facts import Fact, Trimmed
from tailrace.core.partition import SNAPSHOT_VERSION
from tailrace.errors import Corrupt, NotFound, StorageFault
from tailrace.format import codec, frame
from tailrace.format.batch import stored
from tailrace.format.frame import FACTS, HEADER_BYTES
from tailrace.ports import Snapshot
from tailrace.storage.files.frame_scan import scan_frames
from tailrace.storage.files.inspect import ViewedDisk
from tailrace.storage.files.log_reader import LogReader
from tailrace.storage.files.opening import check_segment
from tailrace.storage.files.segment import (
    Point,
    Points,
    Segment,
    decode_index,
    first_entry,
    index_name,
    log_name,
)
from tailrace.storage.snapshots import load_snapshot, snapshot_entry

TOPICS = "topics"
_TRIES = 10
_facts_of = codec.facts_decoder(Fact)


class _SnapshotStart(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of the head of a partition's snapshot; what follows is skipped."""

    version: int
    start_offset: int


class SealedLog(msgspec.Struct, frozen=True, eq=False):
    """What can be read of a partition: the offsets [start, end), in these segments."""

    folder: str
    start: int
    end: int
    segments: tuple[Segment, ...]


def load_catalog(data: str) -> Catalog:
    """The topics of a data folder."""
    disk = ViewedDisk(data)
    catalog = FileCoordinator(disk).load()
    if catalog is None:
        raise NotFound(f"data: there is no {FILE} in {disk.root}, it is not the data folder of a broker")
    return catalog


def sealed_log(disk: ViewedDisk, folder: str) -> SealedLog:
    """The sealed part of the log in a folder, as of now."""
    trouble: Exception | None = None
    for attempt in range(_TRIES):
        try:
            return _look(disk, folder)
        except FileNotFoundError as error:
            trouble = error  # A segment or snapshot went while it was looked at: look again.
        except Corrupt:
            if attempt:
                raise
            # A list of names that was made while segments were sealed may lack one in the middle.
    raise StorageFault(f"{disk.root}/{folder} changes faster than it can be read: {trouble}")


def _look(disk: ViewedDisk, folder: str) -> SealedLog:
    names = disk.list(folder)
    entries = sorted(entry for name in names if (entry := first_entry(name)) is not None)
    segments: list[Segment] = []
    for entry, following in pairwise(entries):
        segments.append(_sealed(disk, folder, entry, following, segments[-1] if segments else None))
    active = _active(disk, folder, entries[-1]) if entries else None
    snapshot = _newest_snapshot(disk, folder, names)
    if segments:
        first, end = segments[0].base_offset, segments[-1].end_offset
    else:
        first = end = active.base_offset if active else snapshot.offset if snapshot else 0
    start = max(first, _log_start(disk, folder, segments, active, snapshot))
    return SealedLog(folder, min(start, end), end, tuple(segments))


def _sealed(disk: ViewedDisk, folder: str, entry: int, following: int, before: Segment | None) -> Segment:
    """A segment by its index; one without a good index is read and checked whole."""
    segment = load_index(disk, folder, entry)
    if segment is None:
        path = f"{folder}/{log_name(entry)}"
        checked = check_segment(disk, path, entry, before.end_offset if before else None, None)
        if checked.reason is not None:
            raise checked.reason
        segment = checked.segment
    if segment.end_entry != following or (before and before.end_offset != segment.base_offset):
        raise Corrupt(
            f"{disk.root}/{folder}: between the segments {log_name(entry)} and {log_name(following)} entries "
            "are missing; if it is a copy, make it again, oldest files first"
        )
    return segment


def load_index(disk: ViewedDisk, folder: str, entry: int) -> Segment | None:
    """The figures of a sealed segment, with its points; None when its index is missing or damaged."""
    try:
        handle = disk.open(f"{folder}/{index_name(entry)}")
    except FileNotFoundError:
        disk.close(disk.open(f"{folder}/{log_name(entry)}"))  # raises when the segment is gone altogether
        return None
    try:
        segment = decode_index(disk.read(handle, 0, disk.size(handle)))
    except Corrupt:
        return None  # derived data: the frames decide
    finally:
        disk.close(handle)
    return segment if segment.first_entry == entry else None


def _active(disk: ViewedDisk, folder: str, entry: int) -> Segment:
    """The segment that is being written, as a range to search; its first frame says where its offsets
    begin."""
    handle = disk.open(f"{folder}/{log_name(entry)}")
    try:
        size = disk.size(handle)
        try:
            base = frame.parse(disk.read(handle, 0, HEADER_BYTES)).base_offset
        except Corrupt:
            base = size = 0  # It was made a moment ago.
    finally:
        disk.close(handle)
    segment = Segment(entry, base)
    segment.size, segment.frames, segment.end_entry = size, 1, 1 << 62
    segment.points = Points()
    segment.points.append(Point(base, 0, entry, 0, 0, 0))
    return segment


def _newest_snapshot(disk: ViewedDisk, folder: str, names: list[str]) -> Snapshot | None:
    for name in sorted((name for name in names if snapshot_entry(name) is not None), reverse=True):
        try:
            return load_snapshot(disk, f"{folder}/{name}")
        except Corrupt:
            continue  # The one before serves as well: there are only more facts behind it.
    return None


def _log_start(
    disk: ViewedDisk, folder: str, segments: list[Segment], active: Segment | None, snapshot: Snapshot | None
) -> int:
    """The highest start that the files know of."""
    start, entry = 0, 0
    if snapshot is not None:
        start, entry = _start_in(snapshot), snapshot.entry + 1
    for part in [*segments, *([active] if active and active.size else [])]:
        if part.end_entry <= entry:
            continue
        reader = LogReader(disk, folder)
        reader.publish((part,))
        for trimmed in _trims(reader, entry, torn=part is active):
            start = max(start, trimmed)
    return start


def _start_in(snapshot: Snapshot) -> int:
    data = b"".join(snapshot.chunks)
    try:
        head = msgspec.msgpack.decode(
            data[8 : 8 + int.from_bytes(data[:8], "little")], type=_SnapshotStart, strict=True
        )
    except msgspec.MsgspecError as error:
        raise Corrupt(f"a snapshot cannot be read: {error}") from error
    if head.version != SNAPSHOT_VERSION:
        raise Corrupt(f"a snapshot has version {head.version}: this release reads {SNAPSHOT_VERSION}")
    return head.start_offset


def _trims(reader: LogReader, entry: int, *, torn: bool) -> Iterator[int]:
    """The starts that facts from an entry on state. Facts frames that name a range of offsets hold no
    trim."""
    try:
        for header, body in scan_frames(reader, entry, 1 << 62):
            if header.kind == FACTS and not header.span:
                yield from (fact.offset for fact in _facts_of(body()) if isinstance(fact, Trimmed))
    except Corrupt:
        if not torn:
            raise
        # The end of what is written so far; what comes later is not part of this look.


def find_time(disk: ViewedDisk, log: SealedLog, timestamp_us: int) -> int:
    """The first offset whose timestamp is at or above a time, as the broker finds it; else the end."""
    reader = LogReader(disk, log.folder)
    reader.publish(log.segments)
    base = reader.find_time(timestamp_us)
    if base is None:
        return log.end
    for part in reader.read(base, log.end, 1):
        for header, body in frame.walk(part, check=False):
            if header.kind == frame.DATA and header.timestamp_max_us >= timestamp_us:
                times = np.asarray(stored(body, header.columns).column("timestamp").cast("int64"))
                return max(log.start, header.base_offset + int(np.argmax(times >= timestamp_us)))
    return log.end
