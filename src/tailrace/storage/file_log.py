"""The log of a partition in segment files: one vectored write per append, group sync, fenced after a failed sync.

The order of steps is the safety argument. An append is durable when its bytes are synced in a file whose name is synced in its
folder. Rolling syncs the old segment before the new file exists, so a segment with a successor is durable as a whole.
Whatever takes bytes away (truncate, cutting a torn tail) first lowers the durable mark, then cuts, then syncs the cut, so
that stale bytes can neither come back nor be missed.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence

from tailrace.errors import Corrupt, Full, InvalidRequest, StorageFault
from tailrace.format.frame import BARRIER, DATA, HEADER_BYTES, MORE, Buffer, Frame, Header
from tailrace.ports import Clock, Disk, LogStats, Recovery, Snapshot
from tailrace.storage import snapshots
from tailrace.storage.mark import MARK_NAME, SLOT_BYTES, Mark, encode
from tailrace.storage.opening import QUARANTINE_NAME, Opened, inspect_folder
from tailrace.storage.reader import LogReader
from tailrace.storage.scan import CHUNK, barrier, scan
from tailrace.storage.segment import Segment, encode_index, first_entry

SEGMENT_BYTES = 64 * 1024 * 1024
MARK_INTERVAL_US = 1_000_000
SNAPSHOTS_KEPT = 2


class FileLog:
    """See `PartitionLog`; the port is the contract."""

    def __init__(
        self, disk: Disk, folder: str, clock: Clock, *, segment_bytes: int, nonce: Callable[[], int]
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._make_nonce = nonce
        self._reader = LogReader(disk, folder)
        self._active: Segment | None = None
        self._handle = -1
        self._mark_handle = -1
        self._nonce = 0
        self._origin: int | None = None
        self._end_entry = 0
        self._end_offset = 0
        self._synced = 0
        """Position in the active segment up to which this process knows that it is on the disk."""
        self._allocated = 0
        self._mark_sequence = 0
        self._marked_us = 0
        self._snapshots: list[tuple[int, int]] = []
        self._fault: StorageFault | None = None
        self._state = "new"
        self._syncs = 0
        self._sync_us = 0

    # ------------------------------------------------------------------------------------------ opening

    def recover(self) -> Recovery:
        """See `PartitionLog.recover`. `frames` raises `Corrupt` when a sealed segment turns out to be damaged on the way."""
        if self._state != "new":
            raise InvalidRequest(f"{self._folder} was opened before: take a new log from the store")
        try:
            self._disk.make_folder(self._folder)
            opened = inspect_folder(self._disk, self._folder)
            self._take_over(opened)
        except OSError as error:
            raise self._failed(f"opening {self._folder}", error) from error
        newest = opened.snapshots[0] if opened.snapshots else None
        after = newest.entry if newest else -1
        return Recovery(
            newest,
            self._replay(after),
            self._end_entry,
            self._end_offset,
            opened.cut_bytes,
            self._fault.message if self._fault else None,
        )

    def _replay(self, after: int) -> Iterator[tuple[Header, Buffer]]:
        return self._reader.replay(after, self._quarantine)

    def _take_over(self, opened: Opened) -> None:
        self._snapshots = [(snapshot.entry, snapshot.offset) for snapshot in opened.snapshots]
        self._end_entry, self._end_offset = opened.end_entry, opened.end_offset
        self._origin = opened.origin
        self._mark_sequence = opened.mark.sequence if opened.mark else 0
        self._reader.publish(tuple(opened.segments))
        self._state = "open"
        if opened.fault is not None:
            self._quarantine(opened.fault)
            return
        self._tidy(opened)
        self._mark_handle = self._disk.open(f"{self._folder}/{MARK_NAME}", create=True)
        if opened.last is None:
            self._disk.truncate(self._mark_handle, 2 * SLOT_BYTES)
            self._write_mark(times=2)
            self._sync_folder()
            return
        last = opened.last.segment
        self._active, self._nonce = last, opened.last.nonce or self._make_nonce()
        if self._origin is None:
            self._origin = last.first_entry
        self._handle = self._disk.open(self._reader.path(last))
        self._settle(opened, opened.mark)

    def _tidy(self, opened: Opened) -> None:
        """Remove what an interrupted step left: temporary files, indexes without frames, a note whose damage is gone."""
        names = self._disk.list(self._folder)
        sealed = {segment.index_name for segment in opened.segments if segment is not opened.segments[-1]}
        for name in names:
            orphan = name.endswith(".idx") and name not in sealed
            if orphan or name.endswith(snapshots.TEMPORARY) or name == QUARANTINE_NAME:
                self._disk.remove(f"{self._folder}/{name}")

    def _settle(self, opened: Opened, mark: Mark | None) -> None:
        """Cut the torn tail and make the rest durable.

        What no barrier or mark proves to be synced is written again: after a failed sync the kernel shows pages that never reached the
        disk and would not write them at the next sync."""
        last, size = opened.last, self._active.size if self._active else 0
        assert last is not None
        self._synced = opened.synced
        proven = mark is not None and (mark.segment, mark.position) == (last.segment.first_entry, size)
        if proven and last.file_bytes == size:
            self._allocated = size
            return
        if mark is None or (mark.segment, mark.position) > (last.segment.first_entry, size):
            self._synced = min(self._synced, size)
            self._write_mark(times=2)
        if last.file_bytes > size:
            # also when only zeros follow: a later crash must not find what this one left behind unseen
            self._disk.truncate(self._handle, size)
        self._allocated = min(last.file_bytes, size)
        position = self._synced
        while position < size:
            chunk = self._disk.read(self._handle, position, min(CHUNK, size - position))
            self._disk.write(self._handle, [chunk], position)
            position += len(chunk)
        self._sync_active()
        self._write_mark(times=1 if mark else 2)
        self._sync_folder()

    # ------------------------------------------------------------------------------------------ writing

    def append(self, frames: Sequence[Frame], *, sync: bool) -> None:
        """See `PartitionLog.append`. Entries and offsets must follow what is there; a group ends within its append."""
        self._require_writable()
        if not frames:
            if sync:
                self.sync()
            return
        entry, offset = self._end_entry, self._end_offset
        if self._origin is None and not self._snapshots:
            entry = frames[0].header.entry
            offset = next((frame.header.base_offset for frame in frames if frame.header.kind == DATA), 0)
        parts: list[Buffer] = [b""]
        start_offset, size = offset, HEADER_BYTES
        for frame in frames:
            header = frame.header
            if header.entry != entry or (header.kind == DATA and header.base_offset != offset):
                raise StorageFault(
                    f"{self._folder}: entry {header.entry} at offset {header.base_offset} does not follow "
                    f"entry {entry - 1}, offset {offset}",
                    outcome="none",
                )
            entry += 1
            if header.kind == DATA:
                offset += header.span
            parts += frame.parts()
            size += frame.size
        if header.flags & MORE:
            raise InvalidRequest(
                "an append ends with a frame that says MORE: a group belongs into one append"
            )
        try:
            segment = self._room_for(size, frames[0].header.entry, start_offset)
            parts[0] = barrier(
                frames[0].header.entry, start_offset, self._synced, self._nonce, self._origin or 0
            )
            self._write(segment, parts, size)
        except OSError as error:
            raise self._failed(f"writing to {self._folder}", error) from error
        position = segment.size + HEADER_BYTES
        for frame in frames:
            segment.note(frame.header, position)
            position += frame.size
        self._end_entry, self._end_offset = entry, offset
        segment.size = position
        if sync:
            self.sync()

    def _room_for(self, size: int, entry: int, offset: int) -> Segment:
        """The segment that takes the next bytes, rolled and allocated as needed."""
        segment = self._active
        if segment is None:
            return self._start_segment(entry, offset, size)
        if segment.size and segment.size + size > self._segment_bytes:
            return self._roll(size)
        if segment.size + size > self._allocated:
            wanted = max(self._segment_bytes, segment.size + size)
            self._undone(segment, lambda: self._disk.allocate(self._handle, wanted))
            self._allocated = wanted
        return segment

    def _write(self, segment: Segment, parts: Sequence[Buffer], size: int) -> None:
        try:
            self._disk.write(self._handle, parts, segment.size)
        except OSError as error:
            self._undo(segment)
            raise _refused(f"writing {size} bytes to {self._reader.path(segment)}", error) from error

    def _undone(self, segment: Segment, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            self._undo(segment)
            raise _refused(f"reserving space for {self._reader.path(segment)}", error) from error

    def _undo(self, segment: Segment) -> None:
        """Take a failed write back for good, so that no part of it can appear after a crash; fences when that fails."""
        self._disk.truncate(self._handle, segment.size)
        self._allocated = segment.size
        self._sync_active()

    def _roll(self, size: int) -> Segment:
        """Seal the active segment and start the next; when the disk is full the active one stays as it is."""
        old, old_handle = self._active, self._handle
        assert old is not None
        self._sync_active()
        try:
            self._write_file(old.index_name, [encode_index(old)])
            new = self._start_segment(old.end_entry, old.end_offset, size)
        except OSError as error:
            raise _refused(f"starting a segment in {self._folder}", error) from error
        self._disk.truncate(old_handle, old.size)
        self._disk.close(old_handle)
        old.sealed = True
        old.points = None
        return new

    def _start_segment(self, entry: int, offset: int, size: int) -> Segment:
        segment = Segment(entry, offset)
        path = self._reader.path(segment)
        wanted = max(self._segment_bytes, size)
        handle = self._disk.open(path, create=True)
        try:
            self._disk.truncate(handle, 0)
            self._disk.allocate(handle, wanted)
        except OSError as error:
            self._disk.close(handle)
            self._disk.remove(path)
            raise _refused(f"starting {path}", error) from error
        self._sync_file(handle)
        self._sync_folder()
        if self._origin is None:
            self._origin = entry
        self._nonce = self._make_nonce()
        self._active, self._handle = segment, handle
        self._allocated, self._synced = wanted, 0
        self._end_entry, self._end_offset = entry, offset
        self._reader.publish((*self._reader.segments, segment))
        self._write_mark()
        return segment

    def sync(self) -> None:
        """See `PartitionLog.sync`."""
        self._require_writable()
        if self._active is None or self._synced == self._active.size:
            return
        try:
            self._sync_active()
            if self._clock.now_us() - self._marked_us >= MARK_INTERVAL_US:
                self._write_mark()
        except OSError as error:
            raise self._failed(f"syncing {self._folder}", error) from error

    def _sync_active(self) -> None:
        active = self._active
        if active is not None:
            size = active.size
            self._sync_file(self._handle)
            self._synced = size

    def _sync_file(self, handle: int) -> None:
        began = self._clock.now_us()
        self._fencing(lambda: self._disk.sync(handle))
        self._syncs += 1
        self._sync_us += self._clock.now_us() - began

    def _sync_folder(self) -> None:
        self._fencing(lambda: self._disk.sync_folder(self._folder))

    def _fencing(self, step: Callable[[], None]) -> None:
        """A failed sync may have dropped the data for good, and a second one would lie: never sync again, never write again."""
        try:
            step()
        except OSError as error:
            self._fault = StorageFault(f"{self._folder} is fenced: a sync failed ({error}); reopen the log")
            raise self._fault from error

    def _write_mark(self, times: int = 1) -> None:
        """Say durably what is synced; `times=2` replaces both slots, for when the mark goes back."""
        active = self._active
        for _ in range(times):
            self._mark_sequence += 1
            mark = Mark(
                self._mark_sequence,
                active.first_entry if active else 0,
                self._synced,
                self._end_entry,
                self._end_offset,
                self._nonce,
                self._origin or 0,
            )
            raw, position = encode(mark)
            self._disk.write(self._mark_handle, [raw], position)
            self._sync_file(self._mark_handle)
        self._marked_us = self._clock.now_us()

    def _write_file(self, name: str, parts: Sequence[Buffer]) -> None:
        """A small file in one go, synced; its name is synced with the folder."""
        handle = self._disk.open(f"{self._folder}/{name}", create=True)
        try:
            self._disk.truncate(handle, 0)
            self._disk.write(handle, parts, 0)
            self._sync_file(handle)
        finally:
            self._disk.close(handle)

    # ------------------------------------------------------------------------------------------ taking away

    def trim(self, offset: int) -> None:
        """See `PartitionLog.trim`. With fewer than two snapshots nothing may go: the previous one is the fallback."""
        self._require_writable()
        if len(self._snapshots) < SNAPSHOTS_KEPT:
            return
        covered = self._snapshots[1][0]
        try:
            while len(self._reader.segments) > 1:
                oldest = self._reader.segments[0]
                if oldest.end_offset > offset or oldest.end_entry > covered + 1:
                    return
                self._reader.publish(self._reader.segments[1:], shrunk=True)
                self._remove_segment(oldest)
        except OSError as error:
            raise self._failed(f"trimming {self._folder}", error) from error

    def _remove_segment(self, segment: Segment) -> None:
        """Remove a segment durably: one at a time, so that a crash never leaves a gap."""
        names = self._disk.list(self._folder)
        for name in (segment.name, segment.index_name):
            if name in names:
                self._disk.remove(f"{self._folder}/{name}")
        self._sync_folder()

    def truncate(self, entry: int) -> None:
        """See `PartitionLog.truncate`. Snapshots that know of later entries go too."""
        self._require_writable()
        segments = self._reader.segments
        if entry >= self._end_entry:
            return
        if not segments or entry < segments[0].first_entry:
            raise InvalidRequest(f"{self._folder} begins behind entry {entry}: it cannot be cut there")
        kept = [segment for segment in segments if segment.first_entry <= entry]
        try:
            self._drop_snapshots(lambda at: at >= entry)
            self._cut(kept, [segment for segment in segments if segment.first_entry > entry], entry)
        except OSError as error:
            raise self._failed(f"cutting {self._folder}", error) from error

    def _cut(self, kept: list[Segment], gone: list[Segment], entry: int) -> None:
        old = kept[-1]
        short, nonce = self._shortened(old, entry)
        if gone:
            self._disk.close(self._handle)
            self._handle = self._disk.open(self._reader.path(old))
        self._active, self._nonce = short, nonce
        self._end_entry, self._end_offset = short.end_entry, short.end_offset
        self._synced = min(self._synced, short.size) if not gone else short.size
        self._write_mark(times=2)
        self._reader.publish((*kept[:-1], short), shrunk=True)
        for segment in reversed(gone):
            self._remove_segment(segment)
        if gone:
            self._disk.remove(f"{self._folder}/{old.index_name}")
        self._disk.truncate(self._handle, short.size)
        self._allocated = short.size
        self._sync_active()
        self._sync_folder()

    def _shortened(self, segment: Segment, entry: int) -> tuple[Segment, int]:
        """The figures of a segment without the frames from `entry` on, and its number."""
        short, nonce, path = (
            Segment(segment.first_entry, segment.base_offset),
            self._nonce,
            self._reader.path(segment),
        )
        handle = self._disk.open(path)
        try:
            for header, position, _ in scan(self._disk, handle, path, 0, segment.size):
                if position == 0:
                    nonce = header.producer_id
                if header.entry >= entry:
                    break
                if header.kind != BARRIER:
                    short.note(header, position)
                    short.size = position + header.size
        finally:
            self._disk.close(handle)
        return short, nonce

    # ------------------------------------------------------------------------------------------ snapshots

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """See `PartitionLog.save_snapshot`. The log is synced first, so that no snapshot knows more than the log.

        On a log that never held a frame, a snapshot sets where it begins."""
        self._require_writable()
        empty = self._active is None
        if not empty and snapshot.entry >= self._end_entry:
            raise InvalidRequest(
                f"a snapshot as of entry {snapshot.entry}: the log ends before {self._end_entry}"
            )
        self.sync()
        name = snapshots.snapshot_name(snapshot.entry)
        try:
            self._save(name, snapshots.encode(snapshot))
            kept = [(snapshot.entry, snapshot.offset)]
            kept += [known for known in self._snapshots if known[0] != snapshot.entry]
            self._snapshots = sorted(kept, reverse=True)[:SNAPSHOTS_KEPT]
            oldest = {at for at, _ in self._snapshots}
            self._drop_snapshots(lambda at: at not in oldest)
        except OSError as error:
            raise self._failed(f"saving a snapshot in {self._folder}", error) from error
        if empty:
            self._end_entry, self._end_offset = self._snapshots[0][0] + 1, self._snapshots[0][1]

    def _save(self, name: str, parts: Sequence[Buffer]) -> None:
        temporary = name + snapshots.TEMPORARY
        try:
            self._write_file(temporary, parts)
        except OSError as error:
            self._disk.remove(f"{self._folder}/{temporary}")
            raise _refused(f"writing {self._folder}/{name}", error) from error
        self._disk.rename(f"{self._folder}/{temporary}", f"{self._folder}/{name}")
        self._sync_folder()

    def _drop_snapshots(self, unwanted: Callable[[int], bool]) -> None:
        gone = False
        for name in self._disk.list(self._folder):
            at = snapshots.snapshot_entry(name)
            if at is not None and unwanted(at):
                self._disk.remove(f"{self._folder}/{name}")
                gone = True
        self._snapshots = [known for known in self._snapshots if not unwanted(known[0])]
        if gone:
            self._sync_folder()

    # ------------------------------------------------------------------------------------------ reading, state

    def read(self, offset: int, end: int, bytes_max: int) -> Sequence[Buffer]:
        """See `PartitionLog.read`. Frames of other kinds, barriers too, may stand between the data frames of a buffer."""
        return self._reader.read(offset, end, bytes_max)

    def find_time(self, timestamp_us: int) -> int | None:
        """See `PartitionLog.find_time`."""
        return self._reader.find_time(timestamp_us)

    def retention_offset(
        self, *, bytes_max: int | None, append_time_us: int | None, count_max: int | None
    ) -> int:
        """See `PartitionLog.retention_offset`."""
        if not self._reader.segments:
            return self._end_offset
        return self._reader.retention_offset(bytes_max, append_time_us, count_max)

    def stats(self) -> LogStats:
        """See `PartitionLog.stats`."""
        segments = self._reader.segments
        return LogStats(
            segments[0].base_offset if segments else self._end_offset,
            self._end_offset,
            sum(segment.size for segment in segments),
            len(segments),
            self._syncs,
            self._sync_us / 1e6,
            self._fault.message if self._fault else None,
        )

    def close(self) -> None:
        """See `PartitionLog.close`. A log that is fenced or quarantined is only let go."""
        if self._state != "open":
            self._state = "closed"
            return
        try:
            if self._fault is None and self._active is not None:
                self._sync_active()
                self._disk.truncate(self._handle, self._active.size)
                self._write_mark()
        except OSError as error:
            raise self._failed(f"closing {self._folder}", error) from error
        finally:
            self._state = "closed"
            for handle in (self._handle, self._mark_handle):
                if handle >= 0:
                    self._disk.close(handle)

    @property
    def closed(self) -> bool:
        """Whether the log has been let go."""
        return self._state == "closed"

    def _require_writable(self) -> None:
        if self._fault is not None:
            kind = type(self._fault)
            raise kind(self._fault.message, outcome="none", **self._fault.details)
        if self._state != "open":
            raise StorageFault(f"{self._folder} is not open", outcome="none")

    def _failed(self, act: str, error: OSError) -> StorageFault:
        """An OSError that was not handled closer by: nobody knows what it left, so the log is fenced."""
        if self._fault is None:
            self._fault = StorageFault(f"{act} failed: {error}; reopen the log")
        return self._fault

    def _quarantine(self, error: Corrupt) -> None:
        """Refuse writes from now on and leave a note beside the damaged file, which stays as it is."""
        self._fault = error
        name = str(error.path).rpartition("/")[2]
        if first_entry(name) is None:
            return
        note = f"{name}\nposition {error.position}\n{error.message}\n"
        self._write_file(QUARANTINE_NAME, [note.encode()])
        self._sync_folder()


def _refused(act: str, error: OSError) -> StorageFault:
    """A step that was taken back whole."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Full(f"{act}: no space is left")
    return StorageFault(f"{act} failed: {error}", outcome="none")
