"""Search by key in a log of segments: through the keys of each segment, the newest first.

The keys of the active segment are in memory, those of a sealed one in its `.keys` file (`key_rows`). Keys
that are in neither have to be read from the frames: of frames that were there when the log was opened, and of
sealed segments whose file is missing or damaged. That is done in pieces (`index`), so that no reader thread
is held for long; until it is done, `find` answers None, which means "not known yet". Suppose the newest three
messages of a key are wanted, and the log was opened when the last segment had 1 MiB:

    segment 0, sealed      segment 40, sealed        segment 80, active
    0….keys                40….keys is missing       1 MiB without keys, then keys in memory

    find ──▶ None          segment 80 has frames without keys
    index, index …         they are read, and kept sorted in memory (`Segment.early`)
    find ──▶ None          80 has two of the messages; 40 has no file, and is noted as wanted
    index, index …         the frames of 40 are read, and its file is written
    find ──▶ 3 places      two in 80, one in 40; segment 0 is not looked at

A search costs what its answer needs: it stops when it has found enough, and of a sealed segment it reads the
head of the file and the blocks with the hash. Two keys may share a hash, so the caller compares keys.

Keys are derived data, and no sync waits for them. A file is put in place under the log's lock, and only while
its segment is still there, because a segment and its files are removed under the same lock. Searches run
beside the writer, which may seal a segment meanwhile: `_kept` looks until nothing has changed.
"""

from __future__ import annotations

import errno
import threading
from bisect import bisect_right
from contextlib import AbstractContextManager

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
"""Bytes read at first for a frame; a longer one takes a second read."""
Lock = AbstractContextManager[object]


class _Build:
    """The keys of one segment that were read from its frames so far."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.rows = KeyRows()
        self.position = 0

    @property
    def end(self) -> int:
        """Position up to which keys have to be read; the rest of an active segment is in memory."""
        return self.segment.size if self.segment.sealed else self.segment.unkeyed


class KeySearch:
    """Searches a log by key, beside its writer."""

    def __init__(self, reader: LogReader, folder: LogFolder, lock: Lock) -> None:
        self._reader = reader
        self._folder = folder
        self._lock = lock
        self._building = threading.Lock()
        self._build: _Build | None = None
        self._wanted: Segment | None = None
        """A sealed segment that a search needs, and whose file cannot be used."""

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
        """Search the file of a sealed segment; None when it is missing or damaged."""
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
        """The checked frame at a position, which must hold the message at `offset`."""
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
        """The segment to read next: a wanted sealed one, or the active one up to where keys are missing."""
        segments = self._reader.segments
        wanted, self._wanted = self._wanted, None
        if wanted is not None and wanted in segments:
            return _Build(wanted)
        if segments and segments[-1].unkeyed and not segments[-1].sealed:
            return _Build(segments[-1])
        return None

    def _finish(self, build: _Build) -> None:
        """Publish the keys of a segment. One that was sealed meanwhile is read on to its end first."""
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
                # On a full disk they stay in memory, until the next opening.
                segment.early = rows
                segment.unkeyed = 0


def _kept(segment: Segment) -> tuple[bool, int, Rows | None, KeyRows | None]:
    """Whether a segment is sealed, and its keys in memory, as of one moment. The writer that seals a segment
    changes these values one after the other, so they are read until two readings agree."""
    while True:
        seen = segment.sealed, segment.unkeyed, segment.early, segment.keys
        sealed, unkeyed, early, late = segment.sealed, segment.unkeyed, segment.early, segment.keys
        if (sealed, unkeyed) == seen[:2] and early is seen[2] and late is seen[3]:
            return seen


def _covers(file: KeyFile, segment: Segment) -> bool:
    return bool(file.first_entry == segment.first_entry and file.size == segment.size)
