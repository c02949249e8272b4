"""Inspection of the files of a log without opening it: reads only, needs no lock, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tailrace.errors import Corrupt, NotFound
from tailrace.storage.disk import RealDisk
from tailrace.storage.files.key_rows import check_keys, keys_name
from tailrace.storage.files.log_folder import QUARANTINE_NAME
from tailrace.storage.files.mark import MARK_NAME
from tailrace.storage.files.opening import check_segment, inspect_folder, read_mark
from tailrace.storage.files.segment import decode_index, first_entry, index_name
from tailrace.storage.snapshots import load_snapshot, snapshot_entry


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a log. Fields that do not apply to its kind are zero or empty."""

    kind: str
    """`segment`, `snapshot` or `mark`."""
    file: str
    file_bytes: int
    first_entry: int = 0
    end_entry: int = 0
    base_offset: int = 0
    end_offset: int = 0
    frames: int = 0
    bytes: int = 0
    """Bytes of whole, good frames."""
    first_append_us: int = 0
    last_append_us: int = 0
    sealed: bool = False
    position: int = 0
    """Of the mark: position up to which the segment `first_entry` is durable."""
    problem: str = ""


class Problem(msgspec.Struct, frozen=True):
    """Something wrong in the files of a log."""

    file: str
    position: int
    what: str
    fatal: bool
    """Whether messages or state are affected; derived files are rebuilt by the broker."""


class ViewedDisk(RealDisk):
    """A folder that is only read."""

    def __init__(self, root: str | Path) -> None:
        self.root = os.path.abspath(root)
        if not os.path.isdir(self.root):
            raise NotFound(f"there is no folder {self.root}")

    def open(self, path: str, *, create: bool = False) -> int:
        """Open for reading."""
        return os.open(self._path(path), os.O_RDONLY | os.O_CLOEXEC)


def _view(folder: str | Path) -> tuple[ViewedDisk, str]:
    path = Path(os.path.abspath(folder))
    disk = ViewedDisk(path.parent)
    if not path.is_dir():
        raise NotFound(f"there is no log at {path}")
    return disk, path.name


def _file_bytes(disk: ViewedDisk, path: str) -> int:
    handle = disk.open(path)
    try:
        return disk.size(handle)
    finally:
        disk.close(handle)


def inspect_log(folder: str | Path) -> Iterator[Row]:
    """The files of the log in `folder`, one row each: segments in order, then snapshots, then the mark.

    Every segment is read and checked whole; rows come as they are ready.
    """
    disk, name = _view(folder)
    names = disk.list(name)
    entries = sorted(entry for file in names if (entry := first_entry(file)) is not None)
    offset: int | None = None
    for entry in entries:
        row = _segment_row(disk, name, entry, offset, sealed=entry != entries[-1])
        offset = row.end_offset if not row.problem else None
        yield row
    for file in names:
        at = snapshot_entry(file)
        if at is not None:
            yield _snapshot_row(disk, name, file, at)
    if MARK_NAME in names:
        mark, size = read_mark(disk, name), _file_bytes(disk, f"{name}/{MARK_NAME}")
        if mark is None:
            yield Row(kind="mark", file=MARK_NAME, file_bytes=size, problem="no slot passes its checksum")
        else:
            yield Row(
                kind="mark",
                file=MARK_NAME,
                file_bytes=size,
                first_entry=mark.segment,
                end_entry=mark.entry,
                end_offset=mark.offset,
                position=mark.position,
            )


def _segment_row(disk: ViewedDisk, name: str, entry: int, offset: int | None, *, sealed: bool) -> Row:
    checked = check_segment(disk, f"{name}/{entry:020d}.log", entry, offset, None)
    segment = checked.segment
    return Row(
        kind="segment",
        file=segment.name,
        file_bytes=checked.file_bytes,
        first_entry=entry,
        end_entry=segment.end_entry,
        base_offset=segment.base_offset,
        end_offset=segment.end_offset,
        frames=segment.frames,
        bytes=segment.size,
        first_append_us=segment.first_append_us,
        last_append_us=segment.last_append_us,
        sealed=sealed,
        problem=checked.reason.message if checked.reason else "",
    )


def _snapshot_row(disk: ViewedDisk, name: str, file: str, entry: int) -> Row:
    path = f"{name}/{file}"
    size = _file_bytes(disk, path)
    try:
        snapshot = load_snapshot(disk, path)
    except Corrupt as error:
        return Row(kind="snapshot", file=file, file_bytes=size, end_entry=entry + 1, problem=error.message)
    return Row(
        kind="snapshot", file=file, file_bytes=size, end_entry=snapshot.entry + 1, end_offset=snapshot.offset
    )


def verify_log(folder: str | Path) -> list[Problem]:
    """Read and check every file of a log; an empty list means no problems.

    A torn tail of the last segment is reported as not fatal: the broker cuts it when it opens the log.
    """
    disk, name = _view(folder)
    problems: list[Problem] = []
    fault = inspect_folder(disk, name).fault
    if fault is not None:
        problems.append(_problem(fault, fatal=True))
    rows = list(inspect_log(folder))
    reported = {problem.file for problem in problems}
    for row in rows:
        if row.problem and row.file not in reported:
            fatal = row.kind == "segment" and row.sealed
            position = row.bytes if row.kind == "segment" else 0
            problems.append(Problem(row.file, position, row.problem, fatal))
    problems += _index_problems(disk, name, [row for row in rows if row.kind == "segment"])
    if QUARANTINE_NAME in disk.list(name):
        what = "the broker found damage and refuses writes; the note says where"
        problems.append(Problem(QUARANTINE_NAME, 0, what, fatal=fault is not None))
    return problems


def _problem(error: Corrupt, *, fatal: bool) -> Problem:
    return Problem(str(error.path).rpartition("/")[2], error.position, error.message, fatal)


def _index_problems(disk: ViewedDisk, name: str, rows: list[Row]) -> list[Problem]:
    found = []
    for row in rows:
        if not row.sealed or row.problem:
            continue
        file = index_name(row.first_entry)
        try:
            handle = disk.open(f"{name}/{file}")
        except FileNotFoundError:
            found.append(Problem(file, 0, "the index is missing and will be rebuilt", fatal=False))
            continue
        try:
            segment = decode_index(disk.read(handle, 0, disk.size(handle)))
            if (segment.end_entry, segment.end_offset, segment.size) != (
                row.end_entry,
                row.end_offset,
                row.bytes,
            ):
                raise Corrupt("the index does not describe its segment")
        except Corrupt as error:
            found.append(Problem(file, 0, f"{error.message}; it will be rebuilt", fatal=False))
        finally:
            disk.close(handle)
        file = keys_name(row.first_entry)
        try:
            check_keys(disk, f"{name}/{file}", row.bytes)
        except FileNotFoundError:
            pass  # Only a topic with `key_index` has one.
        except Corrupt as error:
            found.append(Problem(file, 0, f"{error.message}; it will be rebuilt", fatal=False))
    return found
