"""The walk through a log by entry, headers first: a body is read only on request.

For searches that need few of the frames that they pass. Small frames are read in pieces of `GLANCE` bytes;
the part of a body beyond a piece is not read at all, so large bodies cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tailrace.errors import Corrupt, StorageFault
from tailrace.format.frame import BARRIER, HEADER_BYTES, Buffer, Header, check_body, parse
from tailrace.ports import Disk
from tailrace.storage.files.log_reader import LogReader
from tailrace.storage.files.scan import damaged
from tailrace.storage.files.segment import last_false
from tailrace.storage.storage_tuning import GLANCE

Glanced = tuple[Header, Callable[[], Buffer]]
"""A header, and a function that reads the checked body while the walk stands there."""


def scan_frames(reader: LogReader, entry: int, end: int) -> Iterator[Glanced]:
    """See `PartitionLog.scan`."""
    for segment, size in [(segment, segment.size) for segment in reader.segments if segment.frames]:
        if segment.end_entry <= entry:
            continue
        if segment.first_entry >= end:
            return
        path = reader.path(segment)
        try:
            points = reader.points(segment)
            handle = reader.disk.open(path)
        except OSError as error:
            if segment not in reader.segments:
                continue  # Trimmed since the walk began.
            raise StorageFault(f"opening {path} failed: {error}", outcome="none") from error
        try:
            start = points[last_false(points, lambda point: point.entry > entry)].position
            for header, body in _walk(reader.disk, handle, path, start, size):
                if header.entry >= end:
                    return
                if header.kind != BARRIER and header.entry >= entry:
                    yield header, partial(_told, reader, body)
        except Corrupt as error:
            if segment in reader.segments:  # Else trimmed or cut since the walk began.
                reader.found(error)
            raise
        except OSError as error:
            raise StorageFault(f"reading {path} failed: {error}", outcome="none") from error
        finally:
            reader.disk.close(handle)


def entry_at(reader: LogReader, append_time_us: int) -> int | None:
    """See `PartitionLog.entry_at`; None when no frame is that new."""
    for segment in reader.segments:
        if segment.frames and segment.last_append_us >= append_time_us:
            try:
                points = reader.points(segment)
            except Corrupt as error:
                reader.found(error)
                raise
            except OSError as error:
                raise StorageFault(f"reading the index of {reader.path(segment)} failed: {error}") from error
            return points[last_false(points, lambda point: point.append_time_us >= append_time_us)].entry
    return None


def _told(reader: LogReader, body: Callable[[], Buffer]) -> Buffer:
    try:
        return body()
    except Corrupt as error:
        reader.found(error)
        raise


def _walk(disk: Disk, handle: int, path: str, start: int, end: int) -> Iterator[Glanced]:
    view, base, position = memoryview(b""), start, start
    while position < end:
        at = position - base
        if at + HEADER_BYTES > len(view):
            view, base, at = memoryview(disk.read(handle, position, min(GLANCE, end - position))), position, 0
        try:
            header = parse(view, at)
        except Corrupt as error:
            raise damaged(path, position, error.message.replace(f" at {at}", "")) from None
        yield header, partial(_body, disk, handle, path, position, header, view[at:])
        position += header.size


def _body(disk: Disk, handle: int, path: str, position: int, header: Header, view: memoryview) -> Buffer:
    size = header.size
    if len(view) < size:
        view = memoryview(disk.read(handle, position, size))
    try:
        return check_body(header, view)
    except Corrupt as error:
        raise damaged(path, position, error.message.replace(" at 0", "")) from None
