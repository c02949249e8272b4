"""Messages by key in a log of segments: found through the keys of each segment, the newest first.

The keys of the segment that is written lie in memory, those of a closed one in its file (`key_rows`). What is
in neither has still to be read from the frames: frames that were there when the log was opened, and closed
segments whose file is missing or damaged. `KeySearch.index` does that in pieces, so that no reader thread is
held for long; until it is done, `find` says that it does not know.

A file is put in place under the log's lock, and only while its segment is still there: whoever removes a
segment removes the file under the same lock.
"""

from __future__ import annotations

import errno
import threading
from bisect import bisect_right

import numpy as np

from tailrace.errors import Corrupt, StorageFault
from tailrace.format.frame import DATA, HEADER_BYTES, Frame, check_body, parse
from tailrace.format.gathering import key_rows_of
from tailrace.ports import KeyPlaces
from tailrace.storage.files.key_rows import KeyFile, KeyRows, Places, Rows, encode_keys, find_rows
from tailrace.storage.files.log_folder import LogFolder
from tailrace.storage.files.log_reader import LogReader
from tailrace.storage.files.scan import damaged, scan
from tailrace.storage.files.segment import Segment

_GUESS_BYTES = 4096
"""A frame is read together with its header when it is no longer than this."""


class _Build:
    """The keys of one segment, as far as they were read."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.rows = KeyRows()
        self.position = 0

    @property
    def end(self) -> int:
        """Up to where they have to be read: the rest of an open segment is in memory."""
        return self.segment.size if self.segment.sealed else self.segment.unkeyed


class KeySearch:
    """Searches beside the writer of a log."""

    def __init__(self, reader: LogReader, folder: LogFolder, lock: threading.Lock) -> None:
        self._reader = reader
        self._folder = folder
        self._lock = lock
        self._building = threading.Lock()
        self._build: _Build | None = None
        self._wanted: Segment | None = None
        """A closed segment whose keys somebody asked for, and whose file cannot be used."""

    def find(self, key_hash: int, begin: int, end: int, skip: int, count: int) -> KeyPlaces | None:
        """See `PartitionLog.find_key`."""
        return self._reader.steady(lambda: self._find(key_hash, begin, end, skip, count))

    def _find(self, key_hash: int, begin: int, end: int, skip: int, count: int) -> KeyPlaces | None:
        generation = self._reader.generation
        passed = found = 0
        chosen: list[Places] = []
        for segment in reversed(self._reader.segments):
            if segment.base_offset >= end:
                continue
            if segment.end_offset <= begin or found >= count:
                break
            places = self._in_segment(segment, key_hash)
            if places is None:
                return None
            first, last = places.offsets.searchsorted((begin, max(begin, end))).tolist()
            passing = min(skip - passed, last - first)
            passed += passing
            last -= passing
            first = max(first, last - (count - found))
            if first < last:
                chosen.append(Places(places.offsets[first:last], places.positions[first:last]))
                found += last - first
        if not chosen:
            none = np.empty(0, np.int64)
            return KeyPlaces(none, none, passed, generation)
        offsets, positions = zip(*reversed(chosen), strict=True)
        return KeyPlaces(np.concatenate(offsets), np.concatenate(positions), passed, generation)

    def _in_segment(self, segment: Segment, key_hash: int) -> Places | None:
        sealed, unkeyed, early, late = _kept(segment)
        if sealed and early is None:
            found = self._in_file(segment, key_hash)
            if found is None:
                self._wanted = segment
            return found
        if unkeyed:
            return None
        parts = [] if early is None else [find_rows(early, key_hash)]
        if late is not None:
            parts.append(late.find(key_hash))
        if len(parts) == 2:
            return Places(*(np.concatenate(pair) for pair in zip(*parts, strict=True)))
        return parts[0] if parts else Places(np.empty(0, np.int64), np.empty(0, np.int64))

    def _in_file(self, segment: Segment, key_hash: int) -> Places | None:
        """None when the file is not there, or is not good: it is derived data, the frames are asked."""
        disk = self._reader.disk
        try:
            handle = disk.open(f"{self._reader.folder}/{segment.keys_name}")
        except FileNotFoundError:
            return None
        try:
            file = KeyFile(disk, handle)
            return file.find(key_hash) if _covers(file, segment) else None
        except Corrupt:
            return None
        finally:
            disk.close(handle)

    def read(self, places: KeyPlaces, bytes_max: int) -> list[Frame]:
        """See `PartitionLog.read_places`."""
        return self._reader.steady(lambda: self._read(places, bytes_max))

    def _read(self, places: KeyPlaces, bytes_max: int) -> list[Frame]:
        reader = self._reader
        segments = reader.segments
        if reader.generation != places.generation:
            return []
        frames: list[Frame] = []
        room, before = bytes_max, -1
        opened: Segment | None = None
        handle = -1
        try:
            for offset, position in zip(places.offsets.tolist(), places.positions.tolist(), strict=True):
                segment = segments[bisect_right(segments, offset, key=lambda each: each.base_offset) - 1]
                if not segment.base_offset <= offset < segment.end_offset:
                    return []
                if segment is opened and position == before:
                    continue  # Another message of the same frame.
                if segment is not opened:
                    if opened is not None:
                        reader.disk.close(handle)
                        opened = None
                    handle, opened = reader.disk.open(reader.path(segment)), segment
                item, before = self._frame(segment, handle, offset, position), position
                if frames and item.size > room:
                    break
                frames.append(item)
                room -= item.size
        finally:
            if opened is not None:
                reader.disk.close(handle)
        return frames

    def _frame(self, segment: Segment, handle: int, offset: int, position: int) -> Frame:
        """The frame at a position, which holds a message."""
        disk, limit, path = self._reader.disk, segment.size, self._reader.path(segment)
        try:
            chunk = disk.view(handle, position, min(_GUESS_BYTES, max(limit - position, 0)))
            header = parse(chunk)
            if header.size > len(chunk):
                chunk = disk.view(handle, position, header.size)
            body = check_body(header, chunk)
        except Corrupt as error:
            raise damaged(path, position, error.message.replace(" at 0", "")) from None
        if header.kind != DATA or not header.base_offset <= offset < header.end_offset:
            raise damaged(path, position, f"the message {offset} is not in the frame that its key leads to")
        return Frame(header, bytes(chunk[:HEADER_BYTES]), body)

    # ---------------------------------------------------------------------------------- reading the keys

    def index(self, bytes_max: int) -> bool:
        """See `PartitionLog.index_keys`."""
        with self._building:
            return self._reader.steady(lambda: self._index(bytes_max))

    def _index(self, bytes_max: int) -> bool:
        build = self._build
        if build is None or build.segment not in self._reader.segments:
            build = self._build = self._next()
            if build is None:
                return True
        segment, reader = build.segment, self._reader
        start, end = build.position, build.end
        handle = reader.disk.open(reader.path(segment))
        try:
            for header, position, body in scan(reader.disk, handle, reader.path(segment), start, end):
                if header.kind == DATA:
                    for offset, hashes in key_rows_of(header, body):
                        build.rows.note(hashes, offset, position)
                build.position = position + header.size
                if build.position - start >= bytes_max:
                    break
        finally:
            reader.disk.close(handle)
        if build.position >= end:
            self._finish(build)
        if self._build is None:
            self._build = self._next()
        return self._build is None

    def _next(self) -> _Build | None:
        """What to read next: of the open segment what was there before, or a closed one that is wanted."""
        segments = self._reader.segments
        wanted, self._wanted = self._wanted, None
        if wanted is not None and wanted in segments:
            return _Build(wanted)
        if segments and segments[-1].unkeyed and not segments[-1].sealed:
            return _Build(segments[-1])
        return None

    def _finish(self, build: _Build) -> None:
        """Let the keys be found from now on. A segment that was sealed meanwhile is read on to its end."""
        with self._lock:
            segment = build.segment
            if build.position < build.end and segment in self._reader.segments:
                return
            self._build = None
            if segment not in self._reader.segments:
                return
            rows = build.rows.rows()
            if not segment.sealed:
                segment.early = rows
                segment.unkeyed = 0
                return
            try:
                parts = encode_keys(segment.first_entry, segment.size, rows)
                self._folder.put_derived(segment.keys_name, parts)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise StorageFault(
                        f"writing {segment.keys_name} failed: {error}", outcome="none"
                    ) from error
                # Without space they stay in memory, until the next time.
                segment.early = rows
                segment.unkeyed = 0


def _kept(segment: Segment) -> tuple[bool, int, Rows | None, KeyRows | None]:
    """Whether a segment is sealed, and what of its keys is in memory, as of one moment: the writer may seal
    it meanwhile, and lets go of them one after the other. So it is looked at until nothing has changed."""
    while True:
        seen = segment.sealed, segment.unkeyed, segment.early, segment.keys
        sealed, unkeyed, early, late = segment.sealed, segment.unkeyed, segment.early, segment.keys
        if (sealed, unkeyed) == seen[:2] and early is seen[2] and late is seen[3]:
            return seen


def _covers(file: KeyFile, segment: Segment) -> bool:
    return bool(file.first_entry == segment.first_entry and file.size == segment.size)
