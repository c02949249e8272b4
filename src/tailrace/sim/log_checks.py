"""A log on a simulated disk beside a model of it, and the checks that compare the two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from tailrace.errors import Corrupt, StorageFault
from tailrace.format.frame import DATA, Frame, Header, crc32c, make, walk
from tailrace.ports import Recovery, Snapshot
from tailrace.sim.sim_disk import SimDisk
from tailrace.storage.files.file_log import FileLog
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.files.segment import first_entry

LOG = "topic/0"


class LogViolation(AssertionError):
    """The log broke a promise."""


class SimClock:
    """See `Clock`; time passes when the world says so."""

    def __init__(self) -> None:
        self.time_us = 1_700_000_000_000_000

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return self.time_us

    def wall_us(self) -> int:
        """See `Clock.wall_us`."""
        return self.time_us


class ContestedLock:
    """The lock of a log, before which another thread may come first."""

    def __init__(self, first: Callable[[], None]) -> None:
        self._first = first
        self.held = False

    def __enter__(self) -> None:
        self._first()
        assert not self.held, "a log waits for itself"
        self.held = True

    def __exit__(self, *trouble: object) -> None:
        self.held = False


class Model:
    """What was appended, and what must not be lost."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        """By entry; the list's index is the entry."""
        self.durable = 0
        """Frames below this entry were acknowledged as synced."""
        self.start = 0
        """Frames from this entry on must be there; earlier ones may have been trimmed."""
        self.snapshots: dict[int, bytes] = {}
        self.saved = -1
        """The newest snapshot that was acknowledged, and not truncated since."""

    @property
    def end_offset(self) -> int:
        """The next offset."""
        return next(
            (frame.header.end_offset for frame in reversed(self.frames) if frame.header.kind == DATA), 0
        )

    def synced(self) -> None:
        """All that was appended is on the disk."""
        self.durable = len(self.frames)

    def cut(self, entry: int) -> None:
        """The log ends before `entry`."""
        del self.frames[entry:]
        self.durable = min(self.durable, entry)
        self.snapshots = {at: state for at, state in self.snapshots.items() if at < entry}


class CheckedLog:
    """A log, its disk and its model; anything that the log serves is compared with the model."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()
        self.disk = SimDisk(seed + 1, written=lambda: self._other_thread("write"))
        self.clock = SimClock()
        self.segment_bytes = self.random.choice((2048, 4096, 16384))
        self.model = Model()
        self._others_turn: str | None = None
        """Where the thread that flushes comes in: "lock" or "write"."""
        self._told: list[Corrupt] = []
        """What the logs told of damage."""
        self.log = self._take_log()
        self._check_recovery(self.log.recover())

    def _take_log(self) -> FileLog:
        self._lock = ContestedLock(lambda: self._other_thread("lock"))
        store = FileStore(
            self.disk,
            self.clock,
            segment_bytes=self.segment_bytes,
            nonce=lambda: self.random.getrandbits(62) + 1,
            lock=lambda: self._lock,
        )
        return store.log(LOG, lambda error, log: self._told.append(error))

    def _other_thread(self, place: str) -> None:
        """The thread that flushes gets its turn, in the middle of what this one does."""
        if self._others_turn != place or self._lock.held:
            return
        self._others_turn = None
        self.seen[f"flush at a {place}"] += 1
        try:
            self.log.flush()
        except StorageFault:
            self.seen["flush failed beside an append"] += 1

    def _frame(self, kind: int, more: int, entry: int, offset: int, salt: int) -> Frame:
        body = self.random.randbytes(self.random.choice((0, 1, 40, 64, 200, 700)))
        span = self.random.randrange(1, 5) if kind == DATA else 0
        now = self.clock.now_us()
        header = Header(
            kind, more, len(body), crc32c(body), entry, offset, span, span, 1, now, salt, 0, 0, now - salt
        )
        return make(header, body)

    def _first_entry(self) -> int:
        entries = [entry for name in self.disk.list(LOG) if (entry := first_entry(name)) is not None]
        return min(entries, default=0)

    def _require(self, truth: bool, promise: str) -> None:
        if not truth:
            raise LogViolation(promise)

    def _check_recovery(self, recovery: Recovery) -> None:
        """An honest disk without damage: everything durable is there, and the log can be written."""
        model = self.model
        self._require(recovery.fault is None, f"an honest disk was called damaged: {recovery.fault}")
        self._require(
            model.durable <= recovery.end_entry <= len(model.frames),
            f"ends at {recovery.end_entry}, durable {model.durable}, appended {len(model.frames)}",
        )
        if recovery.snapshot is None:
            self._require(model.saved < 0, f"the snapshot as of {model.saved} is gone")
        else:
            self._check_snapshot(recovery.snapshot)
            self._require(recovery.snapshot.entry >= model.saved, "an older snapshot came back")
        self._check_frames(recovery)
        if recovery.cut_bytes:
            self.seen["torn tail cut"] += 1
        if recovery.end_entry < len(model.frames):
            self.seen["unsynced frames lost"] += 1
        self._accept(recovery)

    def _accept(self, recovery: Recovery) -> None:
        """From here on, what was found counts."""
        model = self.model
        model.cut(recovery.end_entry)
        model.durable = recovery.end_entry
        model.saved = recovery.snapshot.entry if recovery.snapshot else -1
        self._require(recovery.end_offset == model.end_offset, "the next offset is wrong")
        first = self._first_entry()
        self._require(first <= max(model.start, 0), "frames went that were not trimmed")
        model.start = first
        self._compare_data(0, model.end_offset, 1 << 20)

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        expected = self.model.snapshots.get(snapshot.entry)
        self._require(
            expected == b"".join(snapshot.chunks), f"the snapshot as of {snapshot.entry} is another"
        )

    def _check_frames(self, recovery: Recovery) -> int:
        """Replayed frames are those of the model, without a gap; returns the entry behind the last."""
        entry = recovery.snapshot.entry + 1 if recovery.snapshot else self._first_entry()
        entry = max(entry, 0)
        for header, body in recovery.frames:
            self._require(entry < len(self.model.frames), f"entry {header.entry} was never appended")
            frame = self.model.frames[entry]
            same = header == frame.header and bytes(body) == bytes(frame.body)
            self._require(same, f"entry {header.entry} is not what was appended as {entry}")
            entry += 1
        self._require(entry >= recovery.end_entry or recovery.fault is not None, "the replay ended early")
        return entry

    def _compare_data(self, offset: int, end: int, bytes_max: int) -> int:
        """Read all data from an offset on; returns the offset behind the last frame that was served."""
        first = self._first_entry()
        wanted = [
            frame
            for frame in self.model.frames[first:]
            if frame.header.kind == DATA and offset < frame.header.end_offset <= end
        ]
        at = 0
        while at < len(wanted):
            served, place = 0, max(offset, wanted[at].header.base_offset)
            for buffer in self.log.read(place, end, bytes_max):
                for header, body in walk(buffer):
                    if header.kind != DATA:
                        continue
                    frame = wanted[at]
                    same = header == frame.header and bytes(body) == bytes(frame.body)
                    self._require(same, f"offset {header.base_offset} is not what was appended")
                    at += 1
                    served += 1
            self._require(served > 0, f"nothing was served at offset {place}")
        return wanted[-1].header.end_offset if wanted else offset
