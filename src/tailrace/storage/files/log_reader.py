"""Reads of a log of segments, beside its writer: by offset, by time, for retention and for replay.

Readers open the files themselves and read nothing beyond `Segment.size`, which the writer raises when the
bytes are in place. Before the writer removes bytes (truncate, trim), it publishes the smaller view and raises
`generation`. A reader that fails looks whether the generation has changed: then it begins anew; otherwise it
reports damage (`steady`).

    reader                              writer
    sees segments 0, 40, 80             trim: publishes 40, 80; generation 7 ──▶ 8
    opens segment 0: no such file       removes segment 0
    generation was 7, is 8: again, with 40 and 80
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from tailrace.errors import Corrupt, StorageFault
from tailrace.format.frame import BARRIER, DATA, HEADER_BYTES, LOST, Buffer, Header, check_body, parse
from tailrace.ports import Disk
from tailrace.storage.files.scan import damaged, scan
from tailrace.storage.files.segment import INDEX_STEP, Point, Points, Segment, decode_index, last_false
from tailrace.storage.storage_tuning import CHUNK, COPIED_BYTES_MAX

_INDEXES_KEPT = 8
T = TypeVar("T")


class LogReader:
    """The readers' view of a log: its segments in order, the active one last."""

    def __init__(
        self, disk: Disk, folder: str, found: Callable[[Corrupt], None] = lambda error: None
    ) -> None:
        self.disk = disk
        self.folder = folder
        self.found = found
        """Hook: a read found damage; called before the error is raised."""
        self.segments: tuple[Segment, ...] = ()
        self.generation = 0
        self.lost: Corrupt | None = None
        """Raised for reads below the first segment, if segments in front are missing and were not trimmed."""
        self._indexes: OrderedDict[tuple[int, int], Points] = OrderedDict()
        self._lock = threading.Lock()

    def take_over(self, segments: tuple[Segment, ...], lost: Corrupt | None) -> None:
        """The log was opened: its segments, and what there is to say of those that are lost before them."""
        self.lost = lost
        self.publish(segments)

    def publish(self, segments: tuple[Segment, ...], *, shrunk: bool = False) -> None:
        """Replace the view; with `shrunk` before bytes are removed."""
        self.segments = segments
        if shrunk:
            self.generation += 1

    def path(self, segment: Segment) -> str:
        """Path of a segment's file on the disk."""
        return f"{self.folder}/{segment.name}"

    def read(self, offset: int, end: int, bytes_max: int) -> Sequence[Buffer]:
        """See `PartitionLog.read`; each buffer holds whole frames and begins and ends with a data frame."""
        if self.lost is not None and self.segments and offset < self.segments[0].base_offset:
            raise self.lost
        return self.steady(lambda: self._read(offset, end, bytes_max))

    def read_entries(self, entries: Sequence[int]) -> list[tuple[Header, Buffer]]:
        """See `PartitionLog.read_entries`; bodies are views into larger pieces of the file, which are copied
        up to `COPIED_BYTES_MAX` and mapped beyond."""

        def find() -> list[tuple[Header, Buffer]]:
            wanted = sorted(set(entries))
            found: dict[int, tuple[Header, Buffer]] = {}
            room = COPIED_BYTES_MAX
            for segment in self.segments:
                here = wanted[
                    bisect_left(wanted, segment.first_entry) : bisect_left(wanted, segment.end_entry)
                ]
                if here:
                    room = self._find_entries(segment, here, found, room)
            missing = [entry for entry in wanted if entry not in found]
            if missing:
                raise StorageFault(f"{self.folder} does not hold entry {missing[0]}", outcome="none")
            return [found[entry] for entry in entries]

        return self.steady(find)

    def _find_entries(
        self, segment: Segment, wanted: list[int], found: dict[int, tuple[Header, Buffer]], room: int
    ) -> int:
        """Add frames of a segment to `found`; returns the room that is left for copies."""
        limit, points, path = segment.size, self.points(segment), self.path(segment)
        handle = self.disk.open(path)
        try:
            for start, end in _pieces(points, wanted, limit):
                copied = end - start <= room
                room -= end - start if copied else 0
                see = self.disk.view if copied else self.disk.map
                chunk, at = see(handle, start, end - start), 0
                while at < len(chunk):
                    try:
                        header = parse(chunk, at)
                        place = bisect_left(wanted, header.entry)
                        asked = place < len(wanted) and wanted[place] == header.entry
                        if asked and header.kind != BARRIER:
                            found[header.entry] = header, check_body(header, chunk, at)
                    except Corrupt as error:
                        raise damaged(path, start + at, error.message.replace(f" at {at}", "")) from None
                    at += header.size
        finally:
            self.disk.close(handle)
        return room

    def find_time(self, timestamp_us: int) -> int | None:
        """See `PartitionLog.find_time`."""

        def find() -> int | None:
            for segment in self.segments:
                if segment.time_max >= timestamp_us:
                    found = self._first(segment, lambda point: point.time_max >= timestamp_us)
                    if found is not None:
                        return found.base_offset
            return None

        return self.steady(find)

    def retention_offset(
        self, bytes_max: int | None, append_time_us: int | None, count_max: int | None
    ) -> int | None:
        """See `PartitionLog.retention_offset`; `bytes_max` counts whole data frames, `count_max` offsets."""

        def find() -> int | None:
            segments = self.segments
            if not segments:
                return None
            found = segments[0].base_offset
            if bytes_max is not None:
                found = max(found, self._keep_bytes(segments, bytes_max))
            if append_time_us is not None:
                found = max(found, self._keep_time(segments, append_time_us))
            if count_max is not None:
                found = max(found, self._keep_offset(segments, segments[-1].end_offset - count_max))
            return found

        return self.steady(find)

    def replay(self, after: int) -> Iterator[tuple[Header, Buffer]]:
        """The frames with an entry above `after`, as of now; also a LOST frame that only ends above it,
        because its loss was accepted after the snapshot was taken. Sealed segments are checked on the way;
        the last one was checked when the log was opened."""
        parts = [(segment, segment.size) for segment in self.segments if segment.frames]
        for segment, size in parts:
            if segment.end_entry <= after + 1:
                continue
            points = self.points(segment)
            start = points[last_false(points, lambda point: point.entry > after + 1)].position
            handle = self.disk.open(self.path(segment))
            try:
                for header, _, body in scan(
                    self.disk, handle, self.path(segment), start, size, check=segment.sealed
                ):
                    last = header.entry + header.producer_id - 1 if header.kind == LOST else header.entry
                    if header.kind != BARRIER and last > after:
                        yield header, body
            except Corrupt as error:
                self.found(error)
                raise
            finally:
                self.disk.close(handle)

    def points(self, segment: Segment) -> Points:
        """The sparse index of a segment, from memory, from its file, or rebuilt."""
        points = segment.points
        if points is not None:
            return points
        key = (segment.first_entry, segment.end_entry)
        with self._lock:
            points = self._indexes.get(key)
            if points is not None:
                self._indexes.move_to_end(key)
                return points
        points = self._load_points(segment)
        with self._lock:
            self._indexes[key] = points
            if len(self._indexes) > _INDEXES_KEPT:
                self._indexes.popitem(last=False)
        return points

    def _load_points(self, segment: Segment) -> Points:
        try:
            handle = self.disk.open(f"{self.folder}/{segment.index_name}")
            try:
                stored = decode_index(self.disk.read(handle, 0, self.disk.size(handle)))
            finally:
                self.disk.close(handle)
            if stored.points and (stored.end_entry, stored.size) == (segment.end_entry, segment.size):
                return stored.points
        except (Corrupt, FileNotFoundError):
            pass  # the index is derived data: rebuild it from the frames
        rebuilt = Segment(segment.first_entry, segment.base_offset)
        handle = self.disk.open(self.path(segment))
        try:
            for header, position, _ in scan(
                self.disk, handle, self.path(segment), 0, segment.size, check=False
            ):
                rebuilt.note(header, position)
        finally:
            self.disk.close(handle)
        return rebuilt.points or Points()

    def steady(self, work: Callable[[], T]) -> T:
        """Run a read; run it again if it failed because the log shrank meanwhile."""
        while True:
            generation = self.generation
            try:
                return work()
            except Corrupt as error:
                if generation == self.generation:
                    self.found(error)
                    raise
            except OSError as error:
                if generation == self.generation:
                    raise StorageFault(f"reading {self.folder} failed: {error}", outcome="none") from error

    def _read(self, offset: int, end: int, bytes_max: int) -> list[Buffer]:
        segments = self.segments
        first = max(bisect_right(segments, offset, key=lambda segment: segment.base_offset) - 1, 0)
        found: list[Buffer] = []
        room = bytes_max
        for segment in segments[first:]:
            if segment.base_offset >= end:
                break
            if segment.end_offset <= offset or not segment.frames:
                continue
            try:
                piece, more = self._read_segment(segment, offset, end, room, bool(found))
            except Corrupt:
                if found:
                    break
                raise
            if len(piece):
                found.append(piece)
                room -= len(piece)
            if not more or room <= 0:
                break
        return found

    def _read_segment(
        self, segment: Segment, offset: int, end: int, room: int, strict: bool
    ) -> tuple[memoryview, bool]:
        """The frames of one segment in one view, and whether the next segment may follow; with `strict` not
        even the first frame may exceed `room`."""
        limit = segment.size
        points = self.points(segment)
        base = points[last_false(points, lambda point: point.base_offset > offset)].position
        if base >= limit:
            return memoryview(b""), False
        path = self.path(segment)
        handle = self.disk.open(path)
        try:
            chunk = self.disk.view(handle, base, min(room + INDEX_STEP + HEADER_BYTES, limit - base))
            at, begin, stop = 0, -1, -1
            while base + at < limit:
                if begin < 0 and len(chunk) - at < HEADER_BYTES:
                    base += at
                    chunk, at = self.disk.view(handle, base, min(max(room, INDEX_STEP), limit - base)), 0
                try:
                    if at + HEADER_BYTES > len(chunk) and begin >= 0:
                        return chunk[begin:stop], False
                    header = parse(chunk, at)
                    size = header.size
                    data = header.kind == DATA
                    if begin < 0 and (not data or header.end_offset <= offset):
                        at += size
                        continue
                    if data and header.end_offset > end:
                        break
                    if begin >= 0 and (at + size - begin > room or at + size > len(chunk)):
                        break
                    if begin < 0:
                        if strict and size > room:
                            break
                        if at + size > len(chunk):
                            base += at
                            chunk, at = self.disk.view(handle, base, min(max(room, size), limit - base)), 0
                    check_body(header, chunk, at)
                except Corrupt as error:
                    if begin >= 0:
                        break
                    raise damaged(path, base + at, error.message.replace(f" at {at}", "")) from None
                if data:
                    begin = at if begin < 0 else begin
                    stop = at + size
                at += size
            else:
                return chunk[begin:stop] if begin >= 0 else memoryview(b""), True
            return chunk[begin:stop] if begin >= 0 else memoryview(b""), False
        finally:
            self.disk.close(handle)

    def _first(self, segment: Segment, holds: Callable[[Point], bool]) -> Point | None:
        """The first data frame of a segment for which a condition holds; the condition turns true once."""
        limit = segment.size
        points = self.points(segment)
        if not points:
            return None
        start = points[last_false(points, holds)]
        time_max, data_bytes = start.time_max, start.data_bytes
        handle = self.disk.open(self.path(segment))
        try:
            for header, position, _ in scan(
                self.disk, handle, self.path(segment), start.position, limit, check=False
            ):
                if header.kind != DATA:
                    continue
                time_max = max(time_max, header.timestamp_max_us)
                point = Point(
                    header.base_offset, position, header.entry, time_max, header.append_time_us, data_bytes
                )
                if holds(point):
                    return point
                data_bytes += header.size
        finally:
            self.disk.close(handle)
        return None

    def _keep_bytes(self, segments: tuple[Segment, ...], bytes_max: int) -> int:
        drop = sum(segment.data_bytes for segment in segments) - bytes_max
        for segment in segments:
            if drop <= 0:
                return segment.base_offset
            if segment.data_bytes > drop:
                found = self._first(segment, partial(_behind_bytes, drop))
                if found is not None:
                    return found.base_offset
            drop -= segment.data_bytes
        return segments[-1].end_offset

    def _keep_time(self, segments: tuple[Segment, ...], append_time_us: int) -> int:
        for segment in segments:
            if segment.frames and segment.last_append_us >= append_time_us:
                found = self._first(segment, lambda point: point.append_time_us >= append_time_us)
                if found is not None:
                    return found.base_offset
        return segments[-1].end_offset

    def _keep_offset(self, segments: tuple[Segment, ...], offset: int) -> int:
        for segment in segments:
            if segment.base_offset >= offset:
                return segment.base_offset
            if segment.end_offset > offset:
                found = self._first(segment, lambda point: point.base_offset >= offset)
                if found is not None:
                    return found.base_offset
        return segments[-1].end_offset


def _pieces(points: Sequence[Point], wanted: list[int], limit: int) -> list[tuple[int, int]]:
    """The pieces of a segment, from point to point of its index, that hold the wanted entries; neighbouring
    pieces are joined. A point stands where a frame begins, so each piece holds whole frames.
    """
    pieces: list[tuple[int, int]] = []
    for entry in wanted:
        at = last_false(points, lambda point, entry=entry: point.entry > entry)  # type: ignore[misc]
        start = points[at].position
        end = min(points[at + 1].position, limit) if at + 1 < len(points) else limit
        if pieces and start < pieces[-1][1]:
            continue
        if pieces and start == pieces[-1][1] and end - pieces[-1][0] <= CHUNK:
            pieces[-1] = pieces[-1][0], end
        elif start < end:
            pieces.append((start, end))
    return pieces


def _behind_bytes(drop: int, point: Point) -> bool:
    return point.data_bytes >= drop
