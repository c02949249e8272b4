"""Opening a log: read what a crash or damage left, and judge where the log ends; change nothing yet.

`inspect_folder` only reads. `FileLog.recover` then acts on the verdict: it cuts a torn tail, or it
quarantines the log.

A crash may leave any subset of the sectors that were not synced, so bytes that do not pass their checks prove
nothing by themselves. The question is always whether something *says* that they had been synced:

    sealed segment   synced whole before its successor was made: every bad frame in it is damage
    last segment     synced up to the highest position that the durable mark or a barrier states
    missing files    the mark names the first segment that was not trimmed and the one written last; a
                     snapshot names an entry up to which the log was synced

Each append begins with a barrier, which states up to where the segment was synced before that append
(`scan`). Suppose the last segment is good up to position 2048, and the frame there is bad:

    0         1024      2048      3072      4096
    │ B F F F │ B F F   │ ✗✗✗✗✗✗✗ │ B F     │ zeros: reserved space

    the mark says 1024, the barrier at 3072 says 1024    nothing says that 2048 was synced:
                                                         a torn tail, cut at 2048
    the mark says 1024, the barrier at 3072 says 3072    2048 to 3072 had been synced when the barrier
                                                         was written: damage, the log is quarantined

A torn tail may hold whole frames behind the bad place, as here: they go, too, because the log has to be
without gaps, and nothing says that they were synced. Zeros up to the end of the file are reserved space, and
no bad frame. A group of frames (MORE) that lacks its end is cut like a torn tail: a group is there whole or
not at all.

Reading every file at every start would take minutes, so a sealed segment is taken from its index when the
index fits the file and its neighbours; its frames are checked when they are replayed, read or scrubbed. Only
the last segment is read whole.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from tailrace.errors import Corrupt
from tailrace.format.frame import BARRIER, DATA, LOST, MORE, Header
from tailrace.ports import Disk, Snapshot
from tailrace.storage.files import mark as marks
from tailrace.storage.files.log_folder import QUARANTINE_NAME
from tailrace.storage.files.mark import MARK_NAME, SLOT_BYTES, Mark
from tailrace.storage.files.scan import damaged, look_behind, scan
from tailrace.storage.files.segment import Segment, decode_index, first_entry, index_name, log_name
from tailrace.storage.snapshots import load_snapshot, snapshot_entry
from tailrace.storage.storage_tuning import CHUNK


class Checked(msgspec.Struct, eq=False):
    """A segment file that was read from its start; `segment` covers the good frames, in whole groups."""

    segment: Segment
    position: int
    """End of the readable part: the first bad place, or the end of the file."""
    file_bytes: int
    reason: Corrupt | None = None
    synced: int = 0
    """Highest synced position that a barrier in the file states."""
    used: int = 0
    """Position behind the last byte that is not zero."""
    nonce: int | None = None
    origin: int | None = None


class Opened(msgspec.Struct, eq=False):
    """The contents of a log's folder, judged."""

    segments: list[Segment]
    end_entry: int
    end_offset: int
    mark: Mark | None
    snapshots: list[Snapshot]
    """The good ones, newest first."""
    last: Checked | None = None
    leftover: str | None = None
    """Name of a segment file that was created and never written."""
    origin: int | None = None
    synced: int = 0
    """Position in the last segment up to which a mark or barrier proves a sync."""
    fault: Corrupt | None = None
    lost: Corrupt | None = None
    """Set when segments are missing in front; raised for reads below the first segment."""
    untouched: bool = False
    """Whether the folder holds only the mark that was synced when the log was made."""

    @property
    def follows(self) -> bool:
        """Whether the segments continue where the newest good snapshot ends, or begin where the log began."""
        start = self.snapshots[0].entry + 1 if self.snapshots else self.origin or 0
        return not self.segments or self.segments[0].first_entry <= start

    @property
    def cut_bytes(self) -> int:
        """Bytes of the torn tail."""
        return max(self.last.used - self.last.segment.size, 0) if self.last and not self.fault else 0


def check_segment(disk: Disk, path: str, first: int, base_offset: int | None, nonce: int | None) -> Checked:
    """Read and check a whole segment file."""
    handle = disk.open(path)
    try:
        file_bytes = disk.size(handle)
        checked = Checked(Segment(first, base_offset or 0), file_bytes, file_bytes)
        try:
            _check_frames(disk, handle, path, checked, base_offset)
        except Corrupt as error:
            checked.reason, checked.position = error, error.position
        tail = look_behind(
            disk, handle, checked.position, file_bytes, checked.nonce if nonce is None else nonce
        )
        checked.used = max(tail.used, checked.position) if checked.reason else checked.position
        if checked.reason and tail.used == checked.position:
            checked.reason = None  # nothing but zeros: the space that was reserved, not a bad frame
        checked.synced = max(checked.synced, tail.synced)
        return checked
    finally:
        disk.close(handle)


def _check_frames(disk: Disk, handle: int, path: str, checked: Checked, base_offset: int | None) -> None:
    segment = checked.segment
    entry, offset = segment.first_entry, base_offset
    group: list[tuple[Header, int]] = []
    for header, position, _ in scan(disk, handle, path, 0, checked.file_bytes):
        if header.entry != entry:
            raise damaged(path, position, f"entry {header.entry} stands where {entry} belongs")
        if header.kind == BARRIER:
            if offset is None:
                offset = segment.base_offset = segment.end_offset = header.base_offset
            if checked.nonce is None:
                checked.nonce, checked.origin = header.producer_id, header.leader_epoch
            checked.synced = max(checked.synced, header.append_time_us)
            continue
        if position == 0:
            raise damaged(path, position, "the segment does not begin with a barrier")
        entry += header.producer_id if header.kind == LOST else 1
        if header.kind == LOST:
            offset = header.timestamp_max_us
        if header.kind == DATA:
            if header.base_offset != offset:
                raise damaged(path, position, f"offset {header.base_offset} stands where {offset} belongs")
            offset = header.end_offset
        if header.flags & MORE:
            group.append((header, position))
            continue
        for earlier, place in group:
            segment.note(earlier, place)
        group.clear()
        segment.note(header, position)
        segment.size = position + header.size


def shortened(disk: Disk, path: str, segment: Segment, entry: int) -> tuple[Segment, int | None]:
    """Describe a segment without the frames from `entry` on; also returns the number in its barriers."""
    short, nonce = Segment(segment.first_entry, segment.base_offset), None
    handle = disk.open(path)
    try:
        for header, position, _ in scan(disk, handle, path, 0, segment.size):
            if position == 0:
                nonce = header.producer_id
            if header.entry >= entry:
                break
            if header.kind != BARRIER:
                short.note(header, position)
                short.size = position + header.size
    finally:
        disk.close(handle)
    return short, nonce


def drop_cache(disk: Disk, folder: str) -> None:
    """Drop the page cache of everything that no sync proves, so that it is read from the disk.

    After a failed sync the page cache shows bytes that never got to the disk. Of the segments only the last
    one can hold such pages, behind the durable mark: all others were synced before they had a successor."""
    names = disk.list(folder)
    if names == [MARK_NAME]:
        return  # The log is empty: nothing was acknowledged that could be missing on the disk.
    for name in names:
        if name == MARK_NAME or first_entry(name) is None:
            disk.uncache(f"{folder}/{name}")
    entries = [entry for name in names if (entry := first_entry(name)) is not None]
    if entries:
        mark = read_mark(disk, folder) if MARK_NAME in names else None
        synced = mark.position if mark is not None and mark.segment == max(entries) else 0
        disk.uncache(f"{folder}/{log_name(max(entries))}", synced)


def write_again(disk: Disk, handle: int, position: int, end: int) -> None:
    """Write the bytes that are there once more. After a failed sync the kernel may show pages that never
    reached the disk, and would not write them at the next sync."""
    while position < end:
        chunk = disk.read(handle, position, min(CHUNK, end - position))
        disk.write(handle, [chunk], position)
        position += len(chunk)


def inspect_folder(disk: Disk, folder: str, *, known: bool = False) -> Opened:
    """Read and judge everything in a log's folder; changes nothing. A log that is `known` was made durably
    before: if nothing of it is left, it is lost and not new."""
    names = disk.list(folder)
    entries = sorted(entry for name in names if (entry := first_entry(name)) is not None)
    opened = Opened(
        [],
        0,
        0,
        read_mark(disk, folder) if MARK_NAME in names else None,
        _load_snapshots(disk, folder, names),
    )
    if opened.mark and opened.mark.nonce:
        opened.origin = opened.mark.origin
    opened.untouched = names == [MARK_NAME] and opened.mark is not None and opened.mark.first_of_all
    if _never_written(disk, folder, entries, opened):
        opened.leftover, entries = log_name(entries[0]), []
    try:
        suspect, noted = _suspect(disk, folder) if QUARANTINE_NAME in names else (None, 0)
        for entry, following in pairwise(entries):
            offset = opened.segments[-1].end_offset if opened.segments else None
            opened.segments.append(_sealed(disk, folder, entry, following, offset, suspect))
        if entries:
            _judge_last(disk, folder, entries[-1], opened, noted if suspect == log_name(entries[-1]) else -1)
        if known and opened.mark is None and not entries:
            reason = "the files of this log are missing" if names else "the folder of this log is missing"
            raise _Damage(damaged(folder, 0, reason))
        _judge_whole(folder, opened)
    except _Damage as damage:
        if damage.segment is not None:
            opened.segments.append(damage.segment)
        opened.fault = damage.error
    if opened.segments:
        opened.end_entry, opened.end_offset = opened.segments[-1].end_entry, opened.segments[-1].end_offset
    elif opened.snapshots:
        opened.end_entry, opened.end_offset = opened.snapshots[0].entry + 1, opened.snapshots[0].offset
    return opened


def _never_written(disk: Disk, folder: str, entries: list[int], opened: Opened) -> bool:
    """Whether a crash interrupted the making of the only segment: the mark does not name it yet, and no frame
    is written before the mark does."""
    if len(entries) != 1 or opened.snapshots or opened.mark is None or opened.mark.nonce:
        return False
    return check_segment(disk, f"{folder}/{log_name(entries[0])}", entries[0], None, None).used == 0


class _Damage(Exception):
    """Damage that ends the readable part of a log; `segment` covers the good part of the damaged file."""

    def __init__(self, error: Corrupt, segment: Segment | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.segment = segment


def read_mark(disk: Disk, folder: str) -> Mark | None:
    """The durable mark of a log; None when it is missing or damaged."""
    handle = disk.open(f"{folder}/{MARK_NAME}")
    try:
        return marks.decode(disk.read(handle, 0, 2 * SLOT_BYTES))
    finally:
        disk.close(handle)


def _load_snapshots(disk: Disk, folder: str, names: list[str]) -> list[Snapshot]:
    found = []
    for name in reversed(names):
        if snapshot_entry(name) is None:
            continue
        try:
            found.append(load_snapshot(disk, f"{folder}/{name}"))
        except Corrupt:
            continue  # the previous snapshot serves instead; `verify_log` reports the damaged one
    return found


def _suspect(disk: Disk, folder: str) -> tuple[str, int]:
    """The file and the position that a quarantine note names."""
    handle = disk.open(f"{folder}/{QUARANTINE_NAME}")
    try:
        name, _, rest = disk.read(handle, 0, disk.size(handle)).decode(errors="replace").partition("\n")
    finally:
        disk.close(handle)
    number = rest.partition("\n")[0].removeprefix("position ")
    return name, int(number) if number.isdigit() else 0


def _sealed(
    disk: Disk, folder: str, entry: int, following: int, offset: int | None, suspect: str | None
) -> Segment:
    """A segment that has a successor: taken from its index, or checked whole. It was synced before the
    successor was made, so nothing in it can be a torn tail."""
    path = f"{folder}/{log_name(entry)}"
    if suspect != log_name(entry):
        handle = disk.open(path)
        try:
            file_bytes = disk.size(handle)
        finally:
            disk.close(handle)
        try:
            handle = disk.open(f"{folder}/{index_name(entry)}")
            try:
                segment = decode_index(disk.read(handle, 0, disk.size(handle)))
            finally:
                disk.close(handle)
            if (
                (segment.first_entry, segment.end_entry) == (entry, following)
                and segment.size <= file_bytes
                and offset in (None, segment.base_offset)
            ):
                segment.points = None
                return segment
        except (Corrupt, FileNotFoundError):
            pass  # the index is derived data: read the frames
    checked = check_segment(disk, path, entry, offset, None)
    if checked.reason is not None:
        raise _Damage(checked.reason, checked.segment)
    if checked.segment.end_entry != following:
        reason = f"entries {checked.segment.end_entry} to {following - 1} are missing"
        raise _Damage(damaged(path, checked.position, reason), checked.segment)
    segment = checked.segment
    segment.sealed = True
    return segment


def _judge_last(disk: Disk, folder: str, entry: int, opened: Opened, noted: int) -> None:
    """Judge the last segment: torn tail or damage. A running broker found the damage at position `noted`, so
    that is no torn tail, whether or not anything proves a sync."""
    path = f"{folder}/{log_name(entry)}"
    mark = opened.mark if opened.mark and opened.mark.segment == entry else None
    if opened.segments:
        offset: int | None = opened.segments[-1].end_offset
    else:
        offset = mark.offset if mark and mark.position == 0 else None
    checked = check_segment(disk, path, entry, offset, mark.nonce if mark else None)
    if checked.nonce is None and offset is None and opened.snapshots:
        checked.segment.begin_at(opened.snapshots[0].offset)
    if mark and checked.nonce is None:
        checked.nonce = mark.nonce
    synced = max(checked.synced, mark.position if mark else 0)
    if max(synced, noted + 1) > checked.position:
        reason = checked.reason or damaged(path, checked.position, "frames that were synced are missing")
        raise _Damage(reason, checked.segment)
    opened.last = checked
    opened.origin = opened.origin if checked.origin is None else checked.origin
    opened.synced = min(synced, checked.segment.size)
    opened.segments.append(checked.segment)


def _judge_whole(folder: str, opened: Opened) -> None:
    """Raise `_Damage` if segments are missing in front or behind."""
    mark, segments = opened.mark, opened.segments
    if mark and mark.nonce and segments and segments[0].first_entry > mark.first:
        path = f"{folder}/{log_name(mark.first)}"
        opened.lost = damaged(path, 0, f"entries below {segments[0].first_entry} are missing, never trimmed")
        raise _Damage(opened.lost)
    if mark and mark.nonce and (not segments or mark.segment > segments[-1].first_entry):
        path = f"{folder}/{log_name(mark.segment)}"
        raise _Damage(damaged(path, 0, "the file is missing, and the durable mark names it"))
    if not segments:
        return
    newest = opened.snapshots[0].entry if opened.snapshots else -1
    if not opened.follows:
        first = segments[0]
        reason = f"the log was trimmed up to entry {first.first_entry}, and no snapshot is usable"
        raise _Damage(damaged(f"{folder}/{first.name}", 0, reason))
    if newest >= segments[-1].end_entry:
        path = f"{folder}/{segments[-1].name}"
        reason = f"the log ends before entry {segments[-1].end_entry}, a snapshot is as of {newest}"
        raise _Damage(damaged(path, segments[-1].size, reason))
