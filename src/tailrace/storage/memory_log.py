"""Logs in memory: the same port without a disk, for topics that promise no durability, and for tests.

The content of a log belongs to its store: a log that is closed and taken again finds its frames, as after a
restart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

from tailrace.errors import Corrupt, InvalidRequest, Outcome, StorageFault, Unavailable
from tailrace.format.frame import DATA, HEADER_BYTES, LOST, Buffer, Frame, Header, pack
from tailrace.format.gathering import key_rows_of
from tailrace.ports import (
    Damaged,
    KeyPlaces,
    LogStats,
    Losses,
    LostRange,
    Recovery,
    Scrubbed,
    Snapshot,
    TopicFolders,
)
from tailrace.storage.continuity import first_numbers, numbers_after
from tailrace.storage.files.key_rows import KeyRows
from tailrace.storage.storage_tuning import SNAPSHOTS_KEPT

MEMORY_ROOM = 1 << 62


class _Content:
    """The content of one log. `frames` is replaced when the log shrinks, so readers in other threads keep
    their list."""

    def __init__(self) -> None:
        self.frames: list[tuple[Header, bytes]] = []
        self.snapshots: list[Snapshot] = []
        self.bytes = 0
        self.started = False
        self.start_offset = 0
        self.end_entry = 0
        self.end_offset = 0
        self.damaged: set[int] = set()
        """Entries that tests have made unreadable."""
        self.keys = KeyRows()
        """Keys of the messages; a frame's position is its entry."""
        self.generation = 0
        self.lost: list[int] = []
        """Offsets, as flat spans, whose loss was accepted and is not a fact in the log yet."""

    def index_again(self) -> None:
        """Frames were removed: collect the keys of the others."""
        self.generation += 1
        if not self.keys.count:
            return
        keys = KeyRows()
        for header, raw in self.frames:
            if header.kind == DATA:
                body = memoryview(raw)[HEADER_BYTES : HEADER_BYTES + header.length]
                for offset, hashes in key_rows_of(header, body):
                    keys.note(hashes, offset, header.entry)
        self.keys = keys


class MemoryLog:
    """See `PartitionLog`."""

    def __init__(
        self, name: str, content: _Content, store_errors: list[StorageFault], damaged: Damaged
    ) -> None:
        self._name = name
        self._content = content
        self._store_errors = store_errors
        self._next_error: StorageFault | None = None
        self._fault: StorageFault | None = None
        self._state = "new"
        self._syncs = 0
        self._damaged = damaged

    def damage(self, entry: int) -> None:
        """Make the frame with this entry unreadable, as if its bytes had changed on a disk."""
        self._content.damaged.add(entry)

    def _checked(self, header: Header, raw: bytes) -> bytes:
        if header.entry not in self._content.damaged:
            return raw
        error = Corrupt(f"{self._name} is damaged at entry {header.entry}", path=self._name, position=0)
        if self._fault is None and self._state == "open":
            self._fault = error
            self._damaged(error, self)
        raise error

    def fail_next(self, error: StorageFault) -> None:
        """Make the next append or sync fail with `error`; an outcome other than `none` fences the log, as on
        a disk."""
        self._next_error = error

    @property
    def closed(self) -> bool:
        """Whether the log is closed."""
        return self._state == "closed"

    def recover(self) -> Recovery:
        """See `PartitionLog.recover`."""
        if self._state != "new":
            raise InvalidRequest(f"{self._name} was opened before: take a new log from the store")
        self._state = "open"
        content = self._content
        newest = content.snapshots[0] if content.snapshots else None
        frames = self._replay(list(content.frames), newest.entry if newest else -1)
        return Recovery(newest, frames, content.end_entry, content.end_offset, lost=list(content.lost))

    def append(self, frames: Sequence[Frame], *, sync: bool) -> None:
        """See `PartitionLog.append`."""
        self._require_writable()
        if not frames:
            return
        content = self._content
        entry, offset, start = content.end_entry, content.end_offset, content.start_offset
        if not content.started and not content.snapshots:
            entry, offset = first_numbers(frames)
            start = offset
        entry, offset = numbers_after(self._name, frames, entry, offset)
        stored = [(frame.header, b"".join(frame.parts())) for frame in frames]
        self._fail_if_asked()
        content.frames += stored
        for frame in frames:
            if frame.keys is not None:
                content.keys.note(frame.keys, frame.header.base_offset, frame.header.entry)
        content.bytes += sum(len(raw) for _, raw in stored)
        content.started = True
        content.start_offset, content.end_entry, content.end_offset = start, entry, offset
        self._syncs += sync

    def room(self) -> int:
        """See `PartitionLog.room`."""
        return MEMORY_ROOM

    def flush(self) -> None:
        """See `PartitionLog.flush`."""
        if not self.closed:
            self.sync()

    def sync(self) -> None:
        """See `PartitionLog.sync`."""
        self._require_writable("unknown")
        self._fail_if_asked()
        self._syncs += 1

    def read(self, offset: int, end: int, bytes_max: int) -> Sequence[Buffer]:
        """See `PartitionLog.read`; one buffer per data frame."""
        found: list[Buffer] = []
        room = bytes_max
        frames = self._content.frames
        for at in range(_first_data(frames, offset), len(frames)):
            header, raw = frames[at]
            if header.kind != DATA or header.end_offset <= offset:
                continue
            if header.end_offset > end or (found and len(raw) > room):
                break
            if found and header.entry in self._content.damaged:
                break
            found.append(self._checked(header, raw))
            room -= len(raw)
        return found

    def read_entries(self, entries: Sequence[int]) -> list[tuple[Header, Buffer]]:
        """See `PartitionLog.read_entries`."""
        frames = self._content.frames
        found: list[tuple[Header, Buffer]] = []
        for entry in entries:
            at = bisect_left(frames, entry, key=lambda frame: frame[0].entry)
            if at == len(frames) or frames[at][0].entry != entry:
                raise StorageFault(f"{self._name} does not hold entry {entry}", outcome="none")
            header, raw = frames[at]
            self._checked(header, raw)
            found.append((header, memoryview(raw)[HEADER_BYTES : HEADER_BYTES + header.length]))
        return found

    def find_key(self, key_hash: int, begin: int, end: int, skip: int, count: int) -> KeyPlaces | None:
        """See `PartitionLog.find_key`."""
        generation = self._content.generation
        offsets, entries = self._content.keys.find(key_hash)
        first, last = offsets.searchsorted((begin, max(begin, end))).tolist()
        passed = min(skip, last - first)
        last -= passed
        first = max(first, last - count)
        return KeyPlaces(offsets[first:last], entries[first:last], passed, generation)

    def read_places(self, places: KeyPlaces, bytes_max: int) -> list[Frame]:
        """See `PartitionLog.read_places`."""
        found: list[Frame] = []
        room, frames = bytes_max, self._content.frames
        if self._content.generation != places.generation:
            return []
        for entry in dict.fromkeys(places.positions.tolist()):
            at = bisect_left(frames, entry, key=lambda frame: frame[0].entry)
            if at == len(frames) or frames[at][0].entry != entry:
                return []
            header, raw = frames[at]
            if found and header.size > room:
                break
            found.append(Frame(header, pack(header), self._body(header, raw)))
            room -= header.size
        return found

    def index_keys(self, bytes_max: int) -> bool:
        """See `PartitionLog.index_keys`: all keys are in memory."""
        return True

    def scan(self, entry: int, end: int) -> Iterator[tuple[Header, Callable[[], Buffer]]]:
        """See `PartitionLog.scan`."""
        frames = self._content.frames
        count = len(frames)
        at = bisect_left(frames, entry, hi=count, key=lambda frame: frame[0].entry)
        for number in range(at, count):
            header, raw = frames[number]
            if header.entry >= end:
                return
            yield header, partial(self._body, header, raw)

    def entry_at(self, append_time_us: int) -> int:
        """See `PartitionLog.entry_at`."""
        content = self._content
        for header, _ in list(content.frames):
            if header.append_time_us >= append_time_us:
                return header.entry
        return content.end_entry

    def find_time(self, timestamp_us: int) -> int | None:
        """See `PartitionLog.find_time`."""
        for header, _ in list(self._content.frames):
            if header.kind == DATA and header.timestamp_max_us >= timestamp_us:
                return header.base_offset
        return None

    def retention_offset(
        self, *, bytes_max: int | None, append_time_us: int | None, count_max: int | None
    ) -> int:
        """See `PartitionLog.retention_offset`."""
        content = self._content
        data = [header for header, _ in list(content.frames) if header.kind == DATA]
        drop = sum(header.size for header in data) - bytes_max if bytes_max is not None else 0
        for header in data:
            young = append_time_us is None or header.append_time_us >= append_time_us
            few = count_max is None or header.base_offset >= content.end_offset - count_max
            if drop <= 0 and young and few:
                return header.base_offset
            drop -= header.size
        return content.end_offset

    def seal(self) -> None:
        """See `PartitionLog.seal`; each frame is a segment of its own."""
        self._require_writable()

    def trim(self, offset: int, floor: int | None = None) -> None:
        """See `PartitionLog.trim`; each frame is a segment of its own."""
        self._require_writable()
        content = self._content
        if len(content.snapshots) < SNAPSHOTS_KEPT:
            return
        needed = content.snapshots[1].entry + 1
        if floor is not None:
            needed = min(needed, floor)
        start, gone = content.start_offset, 0
        for header, _ in content.frames:
            end = _end_after(header, start)
            if end > offset or header.entry >= needed:
                break
            start, gone = end, gone + 1
        content.bytes -= sum(len(raw) for _, raw in content.frames[:gone])
        content.frames = content.frames[gone:]
        content.start_offset = start
        content.index_again()

    def truncate(self, entry: int) -> None:
        """See `PartitionLog.truncate`."""
        self._require_writable()
        content = self._content
        if entry >= content.end_entry:
            return
        first = content.frames[0][0].entry if content.frames else content.end_entry
        if entry < first:
            raise InvalidRequest(f"{self._name} begins behind entry {entry}: it cannot be cut there")
        content.snapshots = [snapshot for snapshot in content.snapshots if snapshot.entry < entry]
        content.bytes -= sum(len(raw) for _, raw in content.frames[entry - first :])
        content.frames = content.frames[: entry - first]
        content.index_again()
        content.end_entry = entry
        content.end_offset = content.start_offset
        for header, _ in content.frames:
            content.end_offset = _end_after(header, content.end_offset)

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """See `PartitionLog.save_snapshot`; chunks are copied, as a disk would."""
        self._require_writable()
        content = self._content
        if content.started and snapshot.entry >= content.end_entry:
            raise InvalidRequest(
                f"a snapshot as of entry {snapshot.entry}: the log ends before {content.end_entry}"
            )
        self._fail_if_asked()
        chunks = [bytes(chunk) for chunk in snapshot.chunks if len(chunk)]
        others = [known for known in content.snapshots if known.entry != snapshot.entry]
        kept = [Snapshot(snapshot.entry, snapshot.offset, chunks), *others]
        content.snapshots = sorted(kept, key=lambda known: -known.entry)[:SNAPSHOTS_KEPT]
        if not content.started:
            newest = content.snapshots[0]
            content.end_entry, content.end_offset = newest.entry + 1, newest.offset
            content.start_offset = newest.offset

    def scrub(self, entry: int, bytes_max: int) -> Scrubbed:
        """See `PartitionLog.scrub`; there are no sealed segments, so all frames are checked."""
        read = 0
        for header, raw in self._content.frames:
            if header.entry >= entry:
                read += len(self._checked(header, raw))
                if read >= bytes_max:
                    return Scrubbed(header.entry + 1, read)
        return Scrubbed(None, read)

    def loss_recorded(self) -> None:
        """See `PartitionLog.loss_recorded`."""
        self._require_writable()
        self._content.lost.clear()

    def stats(self) -> LogStats:
        """See `PartitionLog.stats`."""
        content = self._content
        fault = self._fault.message if self._fault else None
        return LogStats(content.start_offset, content.end_offset, content.bytes, 1, self._syncs, 0.0, fault)

    def close(self) -> None:
        """See `PartitionLog.close`."""
        self._state = "closed"

    def _replay(self, frames: list[tuple[Header, bytes]], after: int) -> Iterator[tuple[Header, Buffer]]:
        for header, raw in frames[bisect_right(frames, after, key=lambda frame: frame[0].entry) :]:
            yield header, self._body(header, raw)

    def _body(self, header: Header, raw: bytes) -> memoryview:
        return memoryview(self._checked(header, raw))[HEADER_BYTES : HEADER_BYTES + header.length]

    def _require_writable(self, outcome: Outcome = "none") -> None:
        if self._fault is not None:
            raise type(self._fault)(self._fault.message, outcome=outcome, **self._fault.details)
        if self._state != "open":
            raise StorageFault(f"{self._name} is not open", outcome=outcome)

    def _fail_if_asked(self) -> None:
        error, self._next_error = self._next_error, None
        if error is None and self._store_errors:
            error = self._store_errors.pop(0)
        if error is not None:
            if error.outcome != "none":
                self._fault = error
            raise error


def _end_after(header: Header, offset: int) -> int:
    """Where the messages end behind a frame that begins at an offset."""
    if header.kind == LOST:
        return header.timestamp_max_us
    return header.end_offset if header.kind == DATA else offset


def _first_data(frames: list[tuple[Header, bytes]], offset: int) -> int:
    """An index at or before the data frame that holds `offset`; only data frames have offsets."""
    low, high = 0, len(frames)
    while low < high:
        middle = (low + high) // 2
        probe = middle
        while probe < high and frames[probe][0].kind != DATA:
            probe += 1
        if probe < high and frames[probe][0].end_offset <= offset:
            low = probe + 1
        else:
            high = middle
    return low


class MemoryStore:
    """See `LogStore`."""

    folders: TopicFolders | None = None

    def __init__(self) -> None:
        self._contents: dict[str, _Content] = {}
        self._open: dict[str, MemoryLog] = {}
        self._errors: list[StorageFault] = []
        self._notes: dict[str, bytes] = {}

    def fail_next(self, error: StorageFault) -> None:
        """Make the next append or sync of any log fail with `error`; see `MemoryLog.fail_next`."""
        self._errors.append(error)

    def log(self, name: str, damaged: Damaged) -> MemoryLog:
        """See `LogStore.log`."""
        known = self._open.get(name)
        if known is not None and not known.closed:
            raise Unavailable(f"the log {name} is open already: close it first")
        log = MemoryLog(name, self._contents.setdefault(name, _Content()), self._errors, damaged)
        self._open[name] = log
        return log

    def known_log(self, name: str, damaged: Damaged) -> MemoryLog:
        """See `LogStore.known_log`; this engine keeps nothing across restarts, so a missing log is new."""
        return self.log(name, damaged)

    def find_losses(self, name: str, entries: Collection[int], snapshots: Collection[int]) -> Losses:
        """See `LogStore.find_losses`."""
        content = self._contents[name]
        gone = content.damaged | set(entries)
        ranges, offset = [], content.start_offset
        for header, raw in content.frames:
            end = _end_after(header, offset)
            if header.entry in gone:
                numbers = (header.entry, header.entry + 1, offset, end)
                ranges.append(LostRange(*numbers, name, 0, len(raw), "it cannot be read or applied"))
            offset = end
        return Losses(ranges)

    def accept_losses(self, name: str, entries: Collection[int], snapshots: Collection[int]) -> Losses:
        """See `LogStore.accept_losses`."""
        if (log := self._open.get(name)) is not None and not log.closed:
            raise Unavailable(f"the log {name} is open: close it first")
        losses, content = self.find_losses(name, entries, snapshots), self._contents[name]
        gone = {lost.first_entry: lost for lost in losses.ranges}
        frames = []
        for header, raw in content.frames:
            lost = gone.get(header.entry)
            if lost is not None:
                header = Header(
                    LOST, 0, 0, 0, header.entry, lost.first_offset, 0, 0, 0, 0, 1, 0, 0, lost.end_offset
                )
                raw = pack(header)
                content.lost += [lost.first_offset, lost.end_offset] * (lost.first_offset < lost.end_offset)
            frames.append((header, raw))
        content.frames = frames
        content.index_again()
        content.damaged.clear()
        content.snapshots = [kept for kept in content.snapshots if kept.entry not in snapshots]
        return losses

    def remove(self, name: str) -> None:
        """See `LogStore.remove`."""
        self._contents.pop(name, None)
        log = self._open.pop(name, None)
        if log is not None:
            log.close()

    def save_note(self, name: str, data: bytes) -> None:
        """See `LogStore.save_note`."""
        self._notes[name] = data

    def load_note(self, name: str) -> bytes | None:
        """See `LogStore.load_note`."""
        return self._notes.get(name)

    def names(self) -> Iterable[str]:
        """See `LogStore.names`."""
        return sorted(self._contents)

    def close(self) -> None:
        """See `LogStore.close`; the content stays for the next opening of a log."""
        for log in self._open.values():
            log.close()
        self._open.clear()
