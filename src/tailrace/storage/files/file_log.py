"""The log of a partition in segment files: one vectored write per append, group sync, never a silent cut.

    00000000000000000000.log  .idx  .keys    sealed: entries 0 to 41, with its sparse index and its keys
    00000000000000000042.log                 active: entries from 42 on
    durable                                  the mark: synced up to position 8192 of the segment 42
    snapshot-00000000000000000030.snap       the state as of entry 30; the two newest are kept

An append writes a barrier and its frames behind the last byte of the active segment. The order of steps is
the safety argument; an arrow means that what stands before it is durable first:

    append    the name of the file ──▶ the barrier and the frames ──▶ a reply that promises a sync
    roll      the active segment ──▶ its index ──▶ the new file and its name ──▶ a mark that names it
    cut       a lower mark, in both slots ──▶ the cut
    trim      a higher "first segment" in the mark ──▶ files go, oldest first, each durably

So a segment with a successor is durable as a whole; stale bytes behind a cut can neither come back nor be
missed; and a crash in the middle of a trim leaves no gap.

*Two threads* work on a log: one appends, and another one may `flush` beside it. A sync that fails fences the
log (`log_folder`). Code that syncs, cuts, removes or changes the active file holds the lock, and looks at the
fence when it has the lock, not before: otherwise it would sync the same file again, and the kernel would call
that a success. An append writes without the lock. When it fails:

    the write fails, its bytes are cut off durably     outcome `none`: the log is as it was
    the write fails, and the cut or its sync as well   outcome `unknown`, and the log is fenced
    the sync fails, also that of the other thread      outcome `unknown`, and the log is fenced

*Opening* reads what the disk holds, not what the page cache shows: the cache of everything that no sync
proves is dropped; the log is read and judged (`opening`); what no sync proves is written again and synced,
because dropping a cache is only advice; then the mark says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from tailrace.errors import Corrupt, InvalidRequest, Outcome, StorageFault
from tailrace.format.frame import HEADER_BYTES, Buffer, Frame, Header
from tailrace.ports import Clock, Damaged, Disk, KeyPlaces, LogStats, Recovery, Scrubbed, Snapshot
from tailrace.storage.continuity import first_numbers, numbers_after
from tailrace.storage.files.frame_scan import Glanced, entry_at, scan_frames
from tailrace.storage.files.key_rows import KEYS_SUFFIX, KeyRows, encode_keys
from tailrace.storage.files.key_search import KeySearch, Lock
from tailrace.storage.files.log_folder import (
    NO_SPACE,
    QUARANTINE_NAME,
    TEMPORARY,
    LogFolder,
    MarkFile,
    refused,
)
from tailrace.storage.files.log_reader import LogReader
from tailrace.storage.files.lost_ranges import LOSS_NAME, read_intent
from tailrace.storage.files.mark import Mark
from tailrace.storage.files.opening import Opened, drop_cache, inspect_folder, shortened, write_again
from tailrace.storage.files.reservation import least_of, reserve
from tailrace.storage.files.scan import barrier
from tailrace.storage.files.scrub import scrub_piece
from tailrace.storage.files.segment import Segment, encode_index
from tailrace.storage.snapshots import SnapshotShelf
from tailrace.storage.storage_tuning import CACHED_SEGMENTS, MARK_INTERVAL_US, SNAPSHOTS_KEPT


class FileLog:
    """See `PartitionLog`, which is the contract. Entries and offsets of appended frames must continue those
    of the log."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        clock: Clock,
        damaged: Damaged,
        *,
        segment_bytes: int,
        nonce: Callable[[], int],
        known: bool = False,
        lock: Callable[[], Lock] = threading.Lock,
    ) -> None:
        self._known = known
        self._disk = disk
        self._folder = LogFolder(disk, folder, clock)
        self._reader = LogReader(disk, folder, self._found)
        self._flushing = lock()
        """Held to sync or close the active file, to remove files, or to change which file is active."""
        self._key_search = KeySearch(self._reader, self._folder, self._flushing)
        self._damaged = damaged
        self._segment_bytes = segment_bytes
        self._least = least_of(folder)
        self._make_nonce = nonce
        self._state = "new"
        self._mark: MarkFile | None = None
        self._active: Segment | None = None
        self._handle = -1
        self._nonce = 0
        self._origin: int | None = None
        """The entry with which the log began; 0 when it began with a snapshot; None before its first
        frame."""
        self._end_entry = 0
        self._end_offset = 0
        self._synced = 0
        """Position in the active segment up to which its bytes are known to be on the disk."""
        self._allocated = 0
        self._snapshots = SnapshotShelf(self._folder)

    # ---------------------------------------------------------------------------------- opening, closing

    def recover(self) -> Recovery:
        """See `PartitionLog.recover`.

        Sealed segments are checked while `frames` is read: it raises `Corrupt` when one turns out to be
        damaged, and the log is quarantined from then on."""
        if self._state != "new":
            raise InvalidRequest(f"{self._folder.folder} was opened before: take a new log from the store")
        with self._folder.guarded("opening", untouched=True):
            if not self._known:
                self._disk.make_folder(self._folder.folder)
            drop_cache(self._disk, self._folder.folder)
            opened = inspect_folder(self._disk, self._folder.folder, known=self._known)
            self._state = "open"
            self._take_over(opened)
        newest = opened.snapshots[0] if opened.snapshots else None
        after = newest.entry if newest else -1
        frames = self._reader.replay(after) if opened.follows else iter(())
        fault = opened.fault.message if opened.fault else None
        lost = read_intent(self._disk, self._folder.folder) if opened.fault is None else []
        return Recovery(newest, frames, self._end_entry, self._end_offset, opened.cut_bytes, fault, lost)

    def _take_over(self, opened: Opened) -> None:
        self._snapshots.take_over(opened.snapshots)
        self._end_entry, self._end_offset = opened.end_entry, opened.end_offset
        self._origin = opened.origin
        if opened.segments and not opened.segments[-1].sealed:
            opened.segments[-1].unkeyed = opened.segments[-1].size
        self._reader.take_over(tuple(opened.segments), opened.lost)
        if opened.fault is not None:
            self._folder.quarantine(opened.fault)
            return
        self._tidy(opened)
        self._mark = MarkFile(self._folder, opened.mark)
        if opened.untouched:
            return
        # the names that were found may not be durable yet, and trimming will rely on them
        self._folder.sync_names()
        if opened.last is None:
            self._write_mark(both=True)
            return
        self._active, self._nonce = opened.last.segment, opened.last.nonce or self._make_nonce()
        self._origin = opened.origin or 0
        self._handle = self._disk.open(self._reader.path(self._active))
        self._settle(self._active, opened)

    def _tidy(self, opened: Opened) -> None:
        """Remove leftovers of an interrupted step: temporary files, stale indexes, a note about damage that
        is gone."""
        sealed = {segment.index_name for segment in opened.segments[:-1]}
        sealed |= {segment.keys_name for segment in opened.segments[:-1]}
        for name in self._disk.list(self._folder.folder):
            stale = name.endswith((".idx", KEYS_SUFFIX)) and name not in sealed
            if stale or name.endswith(TEMPORARY) or name in (QUARANTINE_NAME, opened.leftover):
                self._disk.remove(self._folder.path(name))
        for segment in opened.segments[:-1]:
            if segment.points is not None:
                self._restore_index(segment)

    def _restore_index(self, segment: Segment) -> None:
        """Store an index that had to be rebuilt; on a full disk it stays in memory until the next opening."""
        try:
            self._folder.write_whole(segment.index_name, [encode_index(segment)])
            segment.points = None
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise

    def _settle(self, active: Segment, opened: Opened) -> None:
        """Cut the torn tail and make the rest durable."""
        assert opened.last is not None
        file_bytes, size, mark = opened.last.file_bytes, active.size, opened.mark
        self._synced, self._allocated = opened.synced, size
        here = (active.first_entry, size)
        if mark is not None and (mark.segment, mark.position) == here and file_bytes == size:
            return
        if mark is None or (mark.segment, mark.position) > here:
            self._write_mark(both=True)
        # also when only zeros follow: bytes that this crash left must not show up after the next one
        self._disk.truncate(self._handle, size)
        write_again(self._disk, self._handle, self._synced, size)
        self._sync_active(active)
        self._write_mark()

    def close(self) -> None:
        """See `PartitionLog.close`. The files of a fenced or quarantined log are closed without a sync."""
        with self._flushing:
            self._close()

    def _close(self) -> None:
        if self._state != "open":
            self._state = "closed"
            return
        try:
            if self._folder.fault is None and self._active is not None:
                with self._folder.guarded("closing"):
                    self._sync_active(self._active)
                    self._disk.truncate(self._handle, self._active.size)
                    self._write_mark()
        finally:
            self._state = "closed"
            if self._handle >= 0:
                self._disk.close(self._handle)
            if self._mark is not None:
                self._mark.close()

    @property
    def closed(self) -> bool:
        """Whether the log is closed."""
        return self._state == "closed"

    def _require_writable(self, outcome: Outcome = "none") -> None:
        self._folder.require_usable(outcome=outcome)
        if self._state != "open":
            raise StorageFault(f"{self._folder.folder} is not open", outcome=outcome)

    # ---------------------------------------------------------------------------------- writing

    def append(self, frames: Sequence[Frame], *, sync: bool) -> None:
        """See `PartitionLog.append`. A group of frames must end within its append."""
        self._require_writable()
        if not frames:
            if sync:
                self.sync()
            return
        entry, offset = self._end_entry, self._end_offset
        if self._origin is None and not self._snapshots.known:
            entry, offset = first_numbers(frames)
        first_entry, first_offset, size = entry, offset, HEADER_BYTES
        entry, offset = numbers_after(self._folder.folder, frames, entry, offset)
        parts: list[Buffer] = [b""]
        for frame in frames:
            parts += frame.parts()
            size += frame.header.size
        try:
            segment = self._room_for(size, first_entry, first_offset)
            origin = self._origin or 0
            parts[0] = barrier(first_entry, first_offset, self._synced, self._nonce, origin)
            try:
                self._disk.write(self._handle, parts, segment.size)
            except OSError as error:
                self._undo(segment)
                raise refused(f"writing {size} bytes to {self._reader.path(segment)}", error) from error
        except OSError as error:
            raise self._folder.fence("writing to", error) from error
        position = segment.size + HEADER_BYTES
        for frame in frames:
            segment.note(frame.header, position)
            if frame.keys is not None:
                if segment.keys is None:
                    segment.keys = KeyRows()
                segment.keys.note(frame.keys, frame.header.base_offset, position)
            position += frame.header.size
        self._end_entry, self._end_offset = entry, offset
        segment.size = position
        if sync:
            self.sync()
        else:
            self._require_writable("unknown")  # a flush beside it may have failed

    def room(self) -> int:
        """See `PartitionLog.room`."""
        if self._active is None or self._folder.fault is not None or self._state != "open":
            return 0
        end = min(self._allocated, self._segment_bytes)
        return max(end - self._active.size - HEADER_BYTES, 0)

    def _room_for(self, size: int, entry: int, offset: int) -> Segment:
        """The segment for the next bytes: rolled if the active one is full, with its space reserved."""
        segment = self._active
        if segment is None:
            with self._flushing:
                return self._start_segment(entry, offset, size)
        if segment.size and segment.size + size > self._segment_bytes:
            return self._roll(segment, size)
        if segment.size + size > self._allocated:
            try:
                self._allocated = reserve(
                    self._disk, self._handle, segment.size + size, self._segment_bytes, self._least
                )
            except OSError as error:
                self._undo(segment)
                raise refused(f"reserving space for {self._reader.path(segment)}", error) from error
        return segment

    def seal(self) -> None:
        """See `PartitionLog.seal`."""
        self._require_writable()
        segment = self._active
        if segment is not None and segment.size:
            with self._folder.guarded("sealing"):
                self._roll(segment, HEADER_BYTES)

    def _undo(self, segment: Segment) -> None:
        """Cut a failed write off and sync, so that no part of it can appear after a crash."""
        with self._flushing:
            self._require_writable("unknown")
            self._disk.truncate(self._handle, segment.size)
            self._allocated = segment.size
            self._sync_active(segment)

    def _roll(self, old: Segment, size: int) -> Segment:
        """Seal the active segment and start the next; on a full disk the active one stays active."""
        with self._flushing:
            self._require_writable()
            new = self._seal(old, size)
        segments = self._reader.segments
        if len(segments) > CACHED_SEGMENTS:
            self._disk.uncache(self._reader.path(segments[-CACHED_SEGMENTS - 1]))
        return new

    def _seal(self, old: Segment, size: int) -> Segment:
        handle = self._handle
        self._sync_active(old)
        try:
            self._folder.write_whole(old.index_name, [encode_index(old)])
        except OSError as error:
            raise refused(f"writing the index of {self._reader.path(old)}", error) from error
        self._seal_keys(old)
        new = self._start_segment(old.end_entry, old.end_offset, size)
        self._disk.truncate(handle, old.size)
        self._disk.close(handle)
        old.sealed, old.points = True, None
        old.early = old.keys = None
        return new

    def _seal_keys(self, old: Segment) -> None:
        """Store the keys of a segment if all of them are in memory. Otherwise, or on a full disk, they are
        read from the frames when a search needs them."""
        rows = old.key_rows()
        if rows is None:
            return
        try:
            self._folder.put_derived(old.keys_name, encode_keys(old.first_entry, old.size, rows))
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise refused(f"writing the keys of {self._reader.path(old)}", error) from error

    def _start_segment(self, entry: int, offset: int, size: int) -> Segment:
        segment = Segment(entry, offset)
        path = self._reader.path(segment)
        try:
            handle = self._disk.open(path, create=True)
        except OSError as error:
            raise refused(f"starting {path}", error) from error
        try:
            self._disk.truncate(handle, 0)
            wanted = reserve(self._disk, handle, size, self._segment_bytes, self._least)
        except OSError as error:
            self._disk.close(handle)
            self._folder.remove(segment.name)
            raise refused(f"starting {path}", error) from error
        self._folder.sync(handle)
        self._folder.sync_names()
        if self._origin is None:
            self._origin = 0 if self._snapshots.known else entry
        self._nonce = self._make_nonce()
        self._active, self._handle = segment, handle
        self._allocated, self._synced = wanted, 0
        self._end_entry, self._end_offset = entry, offset
        self._reader.publish((*self._reader.segments, segment))
        self._write_mark()
        return segment

    def sync(self) -> None:
        """See `PartitionLog.sync`. The durable mark follows at most once a second."""
        with self._flushing:
            self._require_writable("unknown")
            active = self._active
            if active is None or self._synced == active.size:
                return
            with self._folder.guarded("syncing"):
                self._sync_active(active)
                if self._mark_due():
                    self._write_mark()

    def flush(self) -> None:
        """See `PartitionLog.flush`. Only what changes the active segment or its file waits for it."""
        with self._flushing:
            if self._state == "closed":
                return  # closing synced everything
            self._require_writable("unknown")
            active = self._active
            if active is None:
                return
            size = active.size  # raised only after the bytes are written, so the sync covers all of it
            if self._synced >= size:
                return
            with self._folder.guarded("syncing"):
                self._folder.sync(self._handle)
                self._synced = max(self._synced, size)
                if self._mark_due():
                    self._write_mark(beside_append=True)

    def _mark_due(self) -> bool:
        return (
            self._mark is not None and self._folder.clock.now_us() - self._mark.written_us >= MARK_INTERVAL_US
        )

    def _sync_active(self, active: Segment) -> None:
        self._folder.sync(self._handle)
        self._synced = active.size

    def _write_mark(self, *, both: bool = False, beside_append: bool = False) -> None:
        assert self._mark is not None, "the mark is open while the log is"
        active, origin = self._active, self._origin or 0
        if active is None:
            mark = Mark(0, 0, 0, self._end_entry, self._end_offset, 0, origin, self._end_entry)
        else:
            # Beside an append the end is moving: only the synced position is certain.
            whole = self._synced == active.size and not beside_append
            entry = active.end_entry if whole else active.first_entry
            offset = active.end_offset if whole else active.base_offset
            first = self._reader.segments[0].first_entry
            mark = Mark(0, active.first_entry, self._synced, entry, offset, self._nonce, origin, first)
        self._mark.write(mark, both=both)

    # ---------------------------------------------------------------------------------- taking away

    def trim(self, offset: int, floor: int | None = None) -> None:
        """See `PartitionLog.trim`. The previous snapshot is the fallback, so nothing goes without two."""
        self._require_writable()
        known = self._snapshots.known  # a snapshot may be saved meanwhile: that only allows more
        if len(known) < SNAPSHOTS_KEPT:
            return
        needed = known[1][0] + 1
        if floor is not None:
            needed = min(needed, floor)
        with self._flushing, self._folder.guarded("trimming"):
            self._require_writable()
            segments = self._reader.segments
            gone: list[Segment] = []
            for oldest in segments[:-1]:
                if oldest.end_offset > offset or oldest.end_entry > needed:
                    break
                gone.append(oldest)
            if not gone:
                return
            self._reader.publish(segments[len(gone) :], shrunk=True)
            # before the files go: a log that begins behind what the mark says has lost some
            self._write_mark(both=True)
            for oldest in gone:
                # one at a time, each durable before the next: a crash never leaves a gap
                self._folder.remove(oldest.name, oldest.index_name, oldest.keys_name)

    def truncate(self, entry: int) -> None:
        """See `PartitionLog.truncate`. Snapshots of later entries are removed, too."""
        self._require_writable()
        segments = self._reader.segments
        if entry >= self._end_entry:
            return
        if not segments or entry < segments[0].first_entry:
            raise InvalidRequest(f"{self._folder.folder} begins behind entry {entry}: it cannot be cut there")
        first = segments[0].first_entry
        if first > (self._origin or 0) and not any(
            first <= at + 1 <= entry for at, _ in self._snapshots.known
        ):
            raise InvalidRequest(
                f"{self._folder.folder} cannot be cut at entry {entry}: "
                "only later snapshots know what was trimmed"
            )
        kept = [segment for segment in segments if segment.first_entry <= entry]
        with self._flushing, self._folder.guarded("cutting"):
            self._require_writable()
            self._snapshots.drop(lambda at: at >= entry)
            self._cut(kept, segments[len(kept) :], entry)

    def _cut(self, kept: list[Segment], gone: Sequence[Segment], entry: int) -> None:
        old = kept[-1]
        short, nonce = shortened(self._disk, self._reader.path(old), old, entry)
        short.unkeyed = short.size
        if gone:
            self._disk.close(self._handle)
            self._handle = self._disk.open(self._reader.path(old))
        self._active, self._nonce = short, nonce or self._nonce
        self._end_entry, self._end_offset = short.end_entry, short.end_offset
        self._synced = short.size if gone else min(self._synced, short.size)
        self._write_mark(both=True)
        self._reader.publish((*kept[:-1], short), shrunk=True)
        for segment in reversed(gone):
            self._folder.remove(segment.name, segment.index_name, segment.keys_name)
        self._folder.remove(old.index_name, old.keys_name)
        self._disk.truncate(self._handle, short.size)
        self._allocated = short.size
        self._sync_active(short)

    # ---------------------------------------------------------------------------------- snapshots

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """See `PartitionLog.save_snapshot`. The log is flushed first: a snapshot never describes more than
        the disk holds. On a log that never held a frame, the snapshot sets where it begins."""
        self._require_writable()
        if self._active is not None and snapshot.entry >= self._end_entry:
            raise InvalidRequest(f"a snapshot as of {snapshot.entry}: the log ends before {self._end_entry}")
        self.flush()
        with self._folder.guarded("saving a snapshot in"):
            self._snapshots.save(snapshot)
        if self._active is None:
            newest, self._end_offset = self._snapshots.known[0]
            self._end_entry = newest + 1

    def scrub(self, entry: int, bytes_max: int) -> Scrubbed:
        """See `PartitionLog.scrub`."""
        return scrub_piece(self._reader, entry, bytes_max)

    def loss_recorded(self) -> None:
        """See `PartitionLog.loss_recorded`."""
        self._require_writable()
        with self._folder.guarded("recording a loss in"):
            self._folder.remove(LOSS_NAME)

    # ---------------------------------------------------------------------------------- reading

    def _found(self, error: Corrupt) -> None:
        """A read found damage: sync what was written, quarantine the log, and report the damage once. Nothing
        happens if the log was fenced or quarantined before."""
        with self._flushing:
            if self._folder.fault is not None or self._state != "open":
                return
            if self._active is not None:
                size = self._active.size  # Appends go on beside this.
                try:
                    self._folder.sync(self._handle)
                    self._synced = max(self._synced, size)
                except StorageFault as trouble:
                    text = f"{error.message}; what was written last could not be synced: {trouble.message}"
                    error = Corrupt(text, **error.details)
            self._folder.quarantine(error)
        self._damaged(error, self)

    def read(self, offset: int, end: int, bytes_max: int) -> Sequence[Buffer]:
        """See `PartitionLog.read`. Frames of other kinds may stand between the data frames of a buffer."""
        return self._reader.read(offset, end, bytes_max)

    def read_entries(self, entries: Sequence[int]) -> list[tuple[Header, Buffer]]:
        """See `PartitionLog.read_entries`."""
        return self._reader.read_entries(entries)

    def find_key(self, key_hash: int, begin: int, end: int, skip: int, count: int) -> KeyPlaces | None:
        """See `PartitionLog.find_key`."""
        return self._key_search.find(key_hash, begin, end, skip, count)

    def read_places(self, places: KeyPlaces, bytes_max: int) -> list[Frame]:
        """See `PartitionLog.read_places`."""
        return self._key_search.read(places, bytes_max)

    def index_keys(self, bytes_max: int) -> bool:
        """See `PartitionLog.index_keys`."""
        return self._key_search.index(bytes_max)

    def scan(self, entry: int, end: int) -> Iterator[Glanced]:
        """See `PartitionLog.scan`."""
        return scan_frames(self._reader, entry, end)

    def entry_at(self, append_time_us: int) -> int:
        """See `PartitionLog.entry_at`."""
        found = entry_at(self._reader, append_time_us)
        return self._end_entry if found is None else found

    def find_time(self, timestamp_us: int) -> int | None:
        """See `PartitionLog.find_time`."""
        return self._reader.find_time(timestamp_us)

    def retention_offset(
        self, *, bytes_max: int | None, append_time_us: int | None, count_max: int | None
    ) -> int:
        """See `PartitionLog.retention_offset`. `bytes_max` counts whole data frames, `count_max` offsets."""
        found = self._reader.retention_offset(bytes_max, append_time_us, count_max)
        return self._end_offset if found is None else found

    def stats(self) -> LogStats:
        """See `PartitionLog.stats`."""
        segments, folder = self._reader.segments, self._folder
        return LogStats(
            start_offset=segments[0].base_offset if segments else self._end_offset,
            end_offset=self._end_offset,
            bytes=sum(segment.size for segment in segments),
            segments=len(segments),
            syncs=folder.syncs,
            sync_seconds=folder.sync_us / 1e6,
            fault=folder.fault.message if folder.fault else None,
        )
