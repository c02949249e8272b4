"""A world with one log on a simulated disk: random work and random trouble, checked against a model of a
list.

What has to hold: on an honest disk nothing that was acknowledged as synced is lost, and the log is writable
again after
every crash; whatever is served is byte for byte what was appended, in order, without gaps; nothing is
invented; a flipped
bit is detected, and only behind the last proof of a sync may it pass for a torn tail, which is then reported
as cut.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from tailrace.errors import Corrupt, Full, InvalidRequest, StorageFault
from tailrace.format.frame import (
    DATA,
    FACTS,
    MORE,
    Frame,
    Header,
    crc32c,
    make,
    walk,
)
from tailrace.ports import Recovery, Snapshot
from tailrace.sim.disk import Crash, SimDisk
from tailrace.storage.file_log import FileLog
from tailrace.storage.file_store import FileStore
from tailrace.storage.opening import read_mark
from tailrace.storage.scan import look_behind
from tailrace.storage.segment import first_entry
from tailrace.storage.snapshots import snapshot_entry

LOG = "topic/0"
STEPS = 70

STATES = frozenset(
    (
        "crash",
        "crash inside append",
        "crash inside close",
        "crash inside recover",
        "crash inside save snapshot",
        "crash inside trim",
        "crash inside truncate",
        "damage found when opened",
        "damage found when read",
        "damage found when replayed",
        "damage gone after repair",
        "disk full",
        "file vanished",
        "flip harmless",
        "flip passed for a torn tail",
        "lying disk lost acknowledged frames",
        "name change undone",
        "process restarted",
        "segment rolled",
        "segments trimmed",
        "snapshot fell back",
        "sync failed",
        "torn tail cut",
        "truncated",
        "truncation refused",
        "unsynced frames lost",
        "write failed",
        "write torn",
    )
)
"""What 200 seeds and more have to reach: a check that was never put to the test proves nothing."""


class Violation(AssertionError):
    """The log broke a promise."""


class SimClock:
    """See `Clock`; time passes when the world says so."""

    def __init__(self) -> None:
        self.time_us = 1_700_000_000_000_000

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return self.time_us


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

    def cut(self, entry: int) -> None:
        """The log ends before `entry`."""
        del self.frames[entry:]
        self.durable = min(self.durable, entry)
        self.snapshots = {at: state for at, state in self.snapshots.items() if at < entry}


class StorageWorld:
    """One seed: a log, its model, and the trouble."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()
        self.disk = SimDisk(seed + 1)
        self.disk.lying = self.random.random() < 0.06
        self.clock = SimClock()
        self.segment_bytes = self.random.choice((2048, 4096, 16384))
        self.model = Model()
        self.finished = False
        self.log = self._take_log()
        self._check_recovery(self.log.recover())

    def _take_log(self) -> FileLog:
        store = FileStore(
            self.disk,
            self.clock,
            segment_bytes=self.segment_bytes,
            nonce=lambda: self.random.getrandbits(62) + 1,
        )
        return store.log(LOG)

    def run(self) -> Counter[str]:
        """All steps; raises `Violation`."""
        for _ in range(STEPS):
            if self.finished:
                break
            self.clock.time_us += self.random.choice((0, 1000, 300_000, 1_100_000))
            self._one_step()
        self.disk.capacity = None
        if not self.finished:
            self._restart(self.random.choice((True, False)))
        self.seen += self.disk.seen
        return self.seen

    def _one_step(self) -> None:
        step = self.random.choices(
            (
                self._append,
                self._sync,
                self._read,
                self._save_snapshot,
                self._trim,
                self._truncate,
                self._close,
                self._trouble,
                self._flip_at_rest,
                self._flip_while_open,
            ),
            (40, 5, 8, 6, 4, 3, 3, 12, 4, 2),
        )[0]
        try:
            step()
        except Crash:
            self.seen[f"crash inside {step.__name__.strip('_').replace('_', ' ')}"] += 1
            self._restart(True)
        except Full as error:
            self._require(error.outcome == "none", "a full disk has to say that nothing happened")
        except Corrupt as error:
            raise Violation(f"an honest disk was called damaged: {error.message}") from error
        except StorageFault as error:
            if error.outcome != "none":
                self._check_fenced()
                self._restart(self.random.random() < 0.5)

    # ---------------------------------------------------------------------------------- work

    def _append(self) -> None:
        model, random = self.model, self.random
        frames: list[Frame] = []
        offset = model.end_offset
        for group in range(random.choice((1, 1, 1, 2, 4))):
            length = random.choice((1, 1, 1, 2, 3))
            for place in range(length):
                kind = DATA if random.random() < 0.7 else FACTS
                more = MORE if place < length - 1 else 0
                frame = self._frame(kind, more, len(model.frames) + len(frames), offset, group)
                offset = frame.header.end_offset if kind == DATA else offset
                frames.append(frame)
        sync = random.random() < 0.6
        before = len(model.frames)
        segments = self.log.stats().segments
        try:
            self.log.append(frames, sync=sync)
        except (Crash, StorageFault) as error:
            if isinstance(error, Crash) or error.outcome != "none":
                model.frames += frames
            raise
        model.frames += frames
        if sync:
            model.durable = before + len(frames)
        if self.log.stats().segments > segments:
            self.seen["segment rolled"] += 1

    def _frame(self, kind: int, more: int, entry: int, offset: int, salt: int) -> Frame:
        body = self.random.randbytes(self.random.choice((0, 1, 40, 64, 200, 700)))
        span = self.random.randrange(1, 5) if kind == DATA else 0
        now = self.clock.now_us()
        header = Header(
            kind, more, len(body), crc32c(body), entry, offset, span, span, 1, now, salt, 0, 0, now - salt
        )
        return make(header, body)

    def _sync(self) -> None:
        self.log.sync()
        self.model.durable = len(self.model.frames)

    def _read(self) -> None:
        end = self.model.end_offset
        offset = self.random.randrange(end + 1)
        self._compare_data(offset, end, self.random.choice((1, 500, 4000)))

    def _save_snapshot(self) -> None:
        model = self.model
        low = max(model.start, model.saved, 0)
        if low >= len(model.frames):
            return
        entry = self.random.randrange(low, len(model.frames))
        state = self.random.randbytes(self.random.choice((0, 30, 900)))
        model.snapshots.setdefault(entry, state)
        self.log.save_snapshot(Snapshot(entry, 0, [model.snapshots[entry][:20], model.snapshots[entry][20:]]))
        model.saved = max(model.saved, entry)
        model.durable = len(model.frames)

    def _trim(self) -> None:
        before = self.log.stats().segments
        self.model.start = max(self.model.start, 0)
        limit = self._trim_limit()
        offset = self.random.randrange(self.model.end_offset + 1)
        start = self.model.start
        self.model.start = max(start, limit)
        self.log.trim(offset)
        self.model.start = max(start, self._first_entry())
        self._require(self.model.start <= max(limit, start), "trim went above the previous snapshot")
        if self.log.stats().segments < before:
            self.seen["segments trimmed"] += 1

    def _trim_limit(self) -> int:
        saved = self._kept_snapshots()
        return saved[-2] + 1 if len(saved) > 1 else 0

    def _kept_snapshots(self) -> list[int]:
        names = self.disk.list(LOG)
        return [entry for name in names if (entry := snapshot_entry(name)) is not None]

    def _first_entry(self) -> int:
        entries = [entry for name in self.disk.list(LOG) if (entry := first_entry(name)) is not None]
        return min(entries, default=0)

    def _truncate(self) -> None:
        model = self.model
        low = max(self._first_entry(), model.start)
        if low >= len(model.frames) or self.disk.lying:
            return  # a disk that lies may bring back what was cut
        entry = self.random.randrange(low, len(model.frames))
        while entry > low and model.frames[entry - 1].header.flags & MORE:
            entry -= 1
        if entry and model.frames[entry - 1].header.flags & MORE:
            return
        if low and not any(low <= at + 1 <= entry for at in self._kept_snapshots()):
            try:
                self.log.truncate(entry)
            except InvalidRequest:
                self.seen["truncation refused"] += 1
            else:
                raise Violation("a log was cut although only a later snapshot knows what was trimmed")
            return
        model.durable = min(model.durable, entry)
        model.saved = -1
        self.log.truncate(entry)
        model.cut(entry)
        model.durable = entry
        self.seen["truncated"] += 1

    def _close(self) -> None:
        self.log.close()
        self.model.durable = len(self.model.frames)
        self._reopen()

    # ---------------------------------------------------------------------------------- trouble

    def _trouble(self) -> None:
        random, disk = self.random, self.disk
        kinds = ("crash", "crash soon", "restart", "sync", "write", "full", "room")
        # what a failed write left comes back on a disk that lies about taking it back
        kind = random.choice(kinds[:3] if disk.lying else kinds)
        if kind == "crash":
            self._restart(True)
        elif kind == "crash soon":
            disk.crash_in = random.randrange(12)
        elif kind == "restart":
            self._restart(False)
        elif kind == "sync":
            disk.sync_fails_in = random.randrange(4)
        elif kind == "write":
            disk.write_fails_in = random.randrange(2)
        else:
            disk.capacity = disk.used() + random.randrange(2000) if kind == "full" else None

    def _restart(self, power_loss: bool) -> None:
        if power_loss:
            self.disk.crash()
            self.seen["crash"] += 1
            if self.disk.lying:
                self.log = self._take_log()
                self._check_lying(self.log.recover())
                self.finished = True
                return
        else:
            self.disk.restart()
            self.seen["process restarted"] += 1
        self._reopen()

    def _reopen(self) -> None:
        """Open again; the machine may stop while it opens."""
        self.log = self._take_log()
        if self.random.random() < 0.1:
            self.disk.crash_in = self.random.randrange(12)
        try:
            self._check_recovery(self.log.recover())
        except Crash:
            self.seen["crash inside recover"] += 1
            self._restart(True)
        self.disk.crash_in = None

    def _check_fenced(self) -> None:
        model = self.model
        offset, entry = model.end_offset, len(model.frames)
        try:
            self.log.append([self._frame(DATA, 0, entry, offset, 0)], sync=True)
        except StorageFault as error:
            self._require(error.outcome == "none", "a fenced log has to refuse for certain")
        else:
            raise Violation("a log took an append after its sync had failed")

    # ---------------------------------------------------------------------------------- checks

    def _require(self, truth: bool, promise: str) -> None:
        if not truth:
            raise Violation(promise)

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

    def _check_lying(self, recovery: Recovery) -> None:
        """A disk that lies may lose anything; what is served is still true. The world ends here."""
        lost = recovery.end_entry < self.model.durable
        try:
            self._check_frames(recovery)
        except Corrupt:
            lost = True
        if lost:
            self.seen["lying disk lost acknowledged frames"] += 1

    # ---------------------------------------------------------------------------------- flipped bits

    def _flip_at_rest(self) -> None:
        """Close or stop, flip one bit, open, check what is said of it, flip it back and open again."""
        if self.disk.lying:
            return
        fate = self.random.choice(("close", "restart", "crash"))
        if fate == "close":
            self.log.close()
            self.model.durable = len(self.model.frames)
        elif fate == "crash":
            self.disk.crash()
        self.disk.restart()
        self.disk.capacity = None
        path, position, bit = self._pick_bit()
        proven = self._proven_position(path)
        self.disk.flip(path, position, bit)
        self.log = self._take_log()
        recovery = self.log.recover()
        outcome = self._judge_flip(recovery, path, position, proven)
        self.seen[outcome] += 1
        self.disk.restart()
        if recovery.fault is None:
            self.model.cut(recovery.end_entry)
            self.model.durable = recovery.end_entry
        if path.rpartition("/")[2] in self.disk.list(LOG):
            self.disk.flip(path, position, bit)
        self._repaired(recovery)

    def _repaired(self, damaged: Recovery) -> None:
        self.log = self._take_log()
        self._check_recovery(self.log.recover())
        if damaged.fault is not None:
            self.seen["damage gone after repair"] += 1

    def _pick_bit(self) -> tuple[str, int, int]:
        names = [name for name in self.disk.list(LOG) if self.disk.content(f"{LOG}/{name}")]
        logs = [name for name in names if first_entry(name) is not None]
        path = f"{LOG}/{self.random.choice(logs if logs and self.random.random() < 0.7 else names)}"
        return path, self.random.randrange(len(self.disk.content(path))), self.random.randrange(8)

    def _proven_position(self, path: str) -> int:
        """Up to where something says that this segment was synced; no limit for sealed ones."""
        entry = first_entry(path.rpartition("/")[2])
        entries = [first_entry(name) for name in self.disk.list(LOG) if first_entry(name) is not None]
        if entry is None or entry != entries[-1]:
            return 1 << 62
        mark = read_mark(self.disk, LOG)
        handle = self.disk.open(path)
        tail = look_behind(self.disk, handle, 0, self.disk.size(handle), None)
        return max(tail.synced, mark.position if mark and mark.segment == entry else 0)

    def _judge_flip(self, recovery: Recovery, path: str, position: int, proven: int) -> str:
        """What became of a flip; anything that is served must be true all the same."""
        model = self.model
        fallback = recovery.snapshot is None or recovery.snapshot.entry < model.saved
        if recovery.fault is not None:
            self._check_frames_below(recovery)
            self._check_refuses()
            return "damage found when opened"
        try:
            self._check_frames(recovery)
            self._compare_data(0, min(model.end_offset, recovery.end_offset), 1000)
        except Corrupt as error:
            self._require(error.path == path, f"damage in {path} was reported in {error.path}")
            quarantined = self.log.stats().fault is not None
            return "damage found when replayed" if quarantined else "damage found when read"
        if recovery.end_entry < model.durable:
            self._require(recovery.cut_bytes > 0, "acknowledged frames went without a word")
            self._require(position >= proven, f"a flip at {position} was cut although {proven} was proven")
            return "flip passed for a torn tail"
        if fallback and model.saved >= 0:
            return "snapshot fell back"
        return "flip harmless"

    def _check_frames_below(self, recovery: Recovery) -> None:
        try:
            self._check_frames(recovery)
            self._compare_data(0, min(recovery.end_offset, self.model.end_offset), 1000)
        except Corrupt:
            self.seen["damage found when read"] += 1

    def _check_refuses(self) -> None:
        frame = self._frame(DATA, 0, len(self.model.frames), self.model.end_offset, 0)
        try:
            self.log.append([frame], sync=True)
        except Corrupt as error:
            self._require(str(error.path).startswith(LOG), "the refusal does not name the file")
        else:
            raise Violation("a damaged log took an append")

    def _flip_while_open(self) -> None:
        """A bit of a frame flips under an open log: the read that covers it must notice."""
        if self.disk.lying or self.disk.crash_in is not None:
            return
        path, position, bit = self._pick_bit()
        self.disk.flip(path, position, bit)
        try:
            self._compare_data(0, self.model.end_offset, 1 << 20)
        except Corrupt:
            self.seen["damage found when read"] += 1
        finally:
            self.disk.flip(path, position, bit)


def run(seed: int) -> Counter[str]:
    """Run one seed; returns how often each state was reached, or raises `Violation`."""
    return StorageWorld(seed).run()
