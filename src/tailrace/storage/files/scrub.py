"""Scrub of one log: sealed segments, their keys and snapshots are read from the disk and checked.

The page cache of a piece is dropped before the read, so that the disk is checked and not memory; and once
more after it, because nobody will read the piece soon.
"""

from __future__ import annotations

from contextlib import suppress

from tailrace.errors import Corrupt, StorageFault
from tailrace.format.frame import BARRIER, LOST, Header
from tailrace.ports import Scrubbed
from tailrace.storage.files.key_rows import check_keys
from tailrace.storage.files.log_reader import LogReader
from tailrace.storage.files.scan import scan
from tailrace.storage.files.segment import Segment, last_false
from tailrace.storage.snapshots import load_snapshot, snapshot_entry


def scrub_piece(reader: LogReader, entry: int, bytes_max: int) -> Scrubbed:
    """See `PartitionLog.scrub`."""
    for segment in reader.segments:
        if segment.sealed and segment.end_entry > entry:
            try:
                return _segment_piece(reader, segment, entry, bytes_max)
            except Corrupt as error:
                if segment not in reader.segments:
                    return Scrubbed(segment.end_entry, 0)  # Trimmed or cut meanwhile.
                reader.found(error)
                raise
            except OSError as error:
                if segment not in reader.segments:
                    return Scrubbed(segment.end_entry, 0)
                text = f"reading {reader.path(segment)} failed: {error}"
                raise StorageFault(text, outcome="none") from error
    return _beside(reader)


def _segment_piece(reader: LogReader, segment: Segment, entry: int, bytes_max: int) -> Scrubbed:
    path, start = reader.path(segment), 0
    if entry > segment.first_entry:
        points = reader.points(segment)
        start = points[last_false(points, lambda point: point.entry > entry)].position
    reader.disk.uncache(path, start)
    handle = reader.disk.open(path)
    try:
        behind, read = entry, 0
        for header, position, _ in scan(reader.disk, handle, path, start, segment.size):
            behind, read = _behind(header), position + header.size - start
            if read >= bytes_max and behind > entry:
                return Scrubbed(behind, read)
        return Scrubbed(segment.end_entry, read)
    finally:
        reader.disk.close(handle)
        reader.disk.uncache(path, start)


def _behind(header: Header) -> int:
    if header.kind == BARRIER:
        return header.entry
    return header.entry + (header.producer_id if header.kind == LOST else 1)


def _removed(reader: LogReader, path: str) -> str:
    """Remove a damaged keys file, which is made again from the frames; returns the words for the report."""
    with suppress(FileNotFoundError):
        reader.disk.remove(path)
    return "; the file was removed, and is made again from the frames when it is needed"


def _beside(reader: LogReader) -> Scrubbed:
    """Check the snapshots, and the keys of sealed segments. Damage there is reported and stops nothing: the
    previous snapshot or the frames serve instead."""
    read, problems = 0, []
    sealed = {segment.keys_name: segment.size for segment in reader.segments if segment.sealed}
    for name in reader.disk.list(reader.folder):
        if snapshot_entry(name) is None and name not in sealed:
            continue
        path = f"{reader.folder}/{name}"
        try:
            reader.disk.uncache(path)
            if name in sealed:
                read += check_keys(reader.disk, path, sealed[name])
            else:
                read += sum(len(chunk) for chunk in load_snapshot(reader.disk, path).chunks)
        except FileNotFoundError:
            continue  # A newer snapshot took its place, or the segment was trimmed.
        except Corrupt as error:
            cure = _removed(reader, path) if name in sealed else ""  # A snapshot stays as it is.
            problems.append(f"{path}: {error.message}{cure}")
        except OSError as error:
            raise StorageFault(f"reading {path} failed: {error}", outcome="none") from error
    return Scrubbed(None, read, problems)
