"""A world with one log on a simulated disk: random work and trouble, checked against a model.

What has to hold: on an honest disk nothing that was acknowledged as synced is lost, and the log is writable
again after every crash; whatever is served is byte for byte what was appended, in order, without gaps;
nothing is invented; what was refused for certain does not appear, also when another thread flushes in the
middle of an append and fails; a flipped bit is detected, and only behind the last proof of a sync may it pass
for a torn tail, which is then reported as cut.
"""

from __future__ import annotations

from collections import Counter

from tailrace.errors import Corrupt, Full, InvalidRequest, StorageFault
from tailrace.format.frame import DATA, FACTS, MORE, Frame
from tailrace.ports import Recovery, Snapshot
from tailrace.sim.bit_flips import FlippedLog
from tailrace.sim.log_checks import LOG, LogViolation
from tailrace.sim.sim_disk import Crash
from tailrace.storage.snapshots import snapshot_entry

STEPS = 70

STATES = frozenset(
    (
        "crash",
        "crash inside append",
        "crash inside close",
        "crash inside recover",
        "crash inside save snapshot",
        "crash inside seal",
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
        "flush at a lock",
        "flush at a write",
        "flush failed beside an append",
        "lying disk lost acknowledged frames",
        "name change undone",
        "page forgotten",
        "process restarted",
        "segment rolled",
        "segment sealed early",
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


class StorageWorld(FlippedLog):
    """One seed: a log, its model, and the trouble."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.disk.lying = self.random.random() < 0.06
        self.disk.stubborn = self.random.random() < 0.4
        self.finished = False

    def run(self) -> Counter[str]:
        """All steps; raises `LogViolation`."""
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
                self._seal,
            ),
            (40, 5, 8, 6, 4, 3, 3, 12, 4, 2, 2),
        )[0]
        rare = (self._save_snapshot, self._trim, self._truncate, self._close, self._seal)
        if step in rare and self.random.random() < 0.15:
            self.disk.crash_in = self.random.randrange(4)
        try:
            step()
        except Crash:
            self.seen[f"crash inside {step.__name__.strip('_').replace('_', ' ')}"] += 1
            self._restart(True)
        except Full as error:
            self._require(error.outcome == "none", "a full disk has to say that nothing happened")
            self._end_when_fenced()
        except Corrupt as error:
            raise LogViolation(f"an honest disk was called damaged: {error.message}") from error
        except StorageFault as error:
            self._require(error.outcome == "none" or self.log.stats().fault is not None, "no fence was left")
            self._end_when_fenced()
        else:
            self._end_when_fenced()

    def _end_when_fenced(self) -> None:
        if self.log.stats().fault is not None and not self.finished:
            self._check_fenced()
            self._restart(self.random.random() < 0.5)

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
        if random.random() < 0.15:
            self._others_turn = random.choice(("lock", "write"))
            if random.random() < 0.3 and not self.disk.lying:
                self.disk.sync_fails_in = 0
        try:
            self.log.append(frames, sync=sync)
        except (Crash, StorageFault) as error:
            if isinstance(error, Crash) or error.outcome != "none":
                model.frames += frames
            raise
        finally:
            self._others_turn = None
        model.frames += frames
        if sync:
            model.durable = before + len(frames)
        if self.log.stats().segments > segments:
            self.seen["segment rolled"] += 1

    def _sync(self) -> None:
        if self.random.random() < 0.5:
            self.log.sync()
        else:
            self.log.flush()
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

    def _seal(self) -> None:
        before = self.log.stats().segments
        self.log.seal()
        if self.log.stats().segments > before:
            self.seen["segment sealed early"] += 1

    def _trim_limit(self) -> int:
        saved = self._kept_snapshots()
        return saved[-2] + 1 if len(saved) > 1 else 0

    def _kept_snapshots(self) -> list[int]:
        names = self.disk.list(LOG)
        return [entry for name in names if (entry := snapshot_entry(name)) is not None]

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
                raise LogViolation("a log was cut although only a later snapshot knows what was trimmed")
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
        elif self.random.random() < 0.3:
            self.disk.evicts_in = self.random.randrange(8)
        try:
            self._check_recovery(self.log.recover())
        except Crash:
            self.seen["crash inside recover"] += 1
            self._restart(True)
        self.disk.crash_in = self.disk.evicts_in = None

    def _check_fenced(self) -> None:
        model = self.model
        offset, entry = model.end_offset, len(model.frames)
        try:
            self.log.append([self._frame(DATA, 0, entry, offset, 0)], sync=True)
        except StorageFault as error:
            self._require(error.outcome == "none", "a fenced log has to refuse for certain")
        else:
            raise LogViolation("a log took an append after its sync had failed")

    def _check_lying(self, recovery: Recovery) -> None:
        """A disk that lies may lose anything; what is served is still true. The world ends here."""
        lost = recovery.end_entry < self.model.durable
        try:
            self._check_frames(recovery)
        except Corrupt:
            lost = True
        if lost:
            self.seen["lying disk lost acknowledged frames"] += 1


def run(seed: int) -> Counter[str]:
    """Run one seed; returns how often each state was reached, or raises `LogViolation`."""
    return StorageWorld(seed).run()
