"""Storage for simulated brokers: memory logs behind threads that finish late, or with an error."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from tailrace.errors import Full, StorageFault
from tailrace.format.frame import DATA, MORE, Frame, Header
from tailrace.ports import Damaged, Finished, PartitionLog
from tailrace.storage.memory_log import MemoryLog, MemoryStore

Later = Callable[[int, Callable[[], None]], None]


class CutStore(MemoryStore):
    """Logs in memory that remember up to where they were synced. `cut` is told when a log that a failed sync
    spoilt is opened again, and ends earlier by now."""

    def __init__(self, cut: Callable[[str, int], None]) -> None:
        super().__init__()
        self._when_cut = cut
        self.durable: dict[str, int] = {}
        self._taken: dict[MemoryLog, str] = {}
        self._spoilt: dict[str, Random] = {}

    def log(self, name: str, damaged: Damaged) -> MemoryLog:
        """See `LogStore.log`. Whoever opens a log makes durable what is there: after a failed sync that is
        not all that was written."""
        random = self._spoilt.pop(name, None)
        if random is not None:
            self._when_cut(name, self._cut(name, random))
        log = super().log(name, damaged)
        self._taken[log] = name
        self.synced(log)
        return log

    def synced(self, log: MemoryLog) -> None:
        """Everything in this log survives from now on."""
        name = self._taken[log]
        self.durable[name] = self._contents[name].end_entry

    def spoil(self, log: MemoryLog, random: Random) -> None:
        """A sync of this log failed: some of what it was for is on the disk, and only that is found by
        whoever opens it next."""
        self._spoilt[self._taken[log]] = random

    def lose_power(self, random: Random) -> dict[str, int]:
        """Cut each log somewhere behind what was synced; returns where each one ends now, as an offset."""
        self.close()
        self._spoilt.clear()
        return {name: self._cut(name, random) for name in self.names()}

    def damage(self, name: str, count: int, random: Random) -> list[Header]:
        """Make so many frames with messages unreadable, at most, old ones or new ones; only such that the
        newest snapshot covers, so that no start has to replay them."""
        content = self._contents[name]
        covered = content.snapshots[0].entry if content.snapshots else -1
        headers = [header for header, _ in content.frames if header.kind == DATA and header.entry <= covered]
        headers = headers[random.choice((0, -4)) :]
        struck = random.sample(headers, min(count, len(headers)))
        content.damaged.update(header.entry for header in struck)
        return struck

    def damaged(self, name: str) -> list[Header]:
        """The frames of a log that are unreadable, and whose loss is not accepted."""
        content = self._contents[name]
        return [header for header, _ in content.frames if header.entry in content.damaged]

    def _cut(self, name: str, random: Random) -> int:
        durable = self.durable.get(name, 0)
        log = super().log(name, lambda error, log: None)  # Nothing is read.
        entry = log.recover().end_entry
        log.truncate(self._whole(name, random.choice((durable, random.randint(durable, entry)))))
        self._taken[log] = name
        self.synced(log)
        log.close()
        return log.stats().end_offset

    def _whole(self, name: str, entry: int) -> int:
        """Where a cut at an entry leads to: groups of frames are there whole or not at all."""
        flags = {header.entry: header.flags for header, _ in self._contents[name].frames}
        while flags.get(entry - 1, 0) & MORE:
            entry -= 1
        return entry


class Work(NamedTuple):
    """A piece of storage work: frames to append, or anything else to run."""

    frames: Sequence[Frame] | None
    sync: bool
    run: Callable[[], object]
    done: Finished


class Lane:
    """What waits for one log."""

    def __init__(self, log: object) -> None:
        self.log = log
        self.waiting: deque[Work] = deque()
        self.busy = False


class LateThreads:
    """See `ports.Threads`; in virtual time. Work on one log is done in order, and what waits together
    is written together, as the real threads do it."""

    def __init__(
        self, random: Random, later: Later, store: CutStore, notify: Callable[[], None], seen: Counter[str]
    ) -> None:
        self._random = random
        self._later = later
        self._store = store
        self._notify = notify
        self._seen = seen
        self._lanes: dict[int, Lane] = {}
        self._finished: list[tuple[Finished, object, Exception | None]] = []
        self.full = self.sync_fails = 0.0
        """How likely an append fails."""
        self.sync_failed = False
        """Whether a sync failed, be it that nobody has heard of it yet."""
        self.delays_us: tuple[int, ...] = (50, 500, 2_000, 20_000, 300_000)
        """How long a piece of work may take."""

    def append(self, log: PartitionLog, frames: Sequence[Frame], sync: bool, done: Finished) -> None:
        """See `Threads.append`."""
        self._submit(log, Work(frames, sync, lambda: None, done))

    def run(self, log: object, work: Callable[[], object], done: Finished) -> None:
        """See `Threads.run`."""
        self._submit(log, Work(None, False, work, done))

    def read(self, work: Callable[[], object], done: Finished) -> None:
        """See `Threads.read`."""
        self._seen["cold read"] += 1
        self._later(self._delay_us(), lambda: self._finish([self._act(Work(None, False, work, done))]))

    def tell(self, done: Finished, result: object) -> None:
        """See `Threads.tell`."""
        self._finish([(done, result, None)])

    def completed(self) -> list[tuple[Finished, object, Exception | None]]:
        """See `Threads.completed`."""
        finished, self._finished = self._finished, []
        return finished

    def forget(self, log: object) -> None:
        """See `Threads.forget`."""
        self._lanes.pop(id(log), None)

    def close(self) -> None:
        """See `Threads.close`; what waits has been done by then."""
        assert not any(lane.waiting for lane in self._lanes.values())

    def half_done(self) -> None:
        """The machine stops: the next append of each log may have reached the disk without a sync."""
        for lane in self._lanes.values():
            item = lane.waiting[0] if lane.waiting else None
            if item and item.frames and isinstance(lane.log, MemoryLog) and self._random.random() < 0.5:
                try:
                    lane.log.append(item.frames, sync=False)
                except StorageFault:
                    continue  # the log was fenced before
                self._seen["crash inside an append"] += 1

    def _delay_us(self) -> int:
        return self._random.choice(self.delays_us)

    def _submit(self, log: object, item: Work) -> None:
        lane = self._lanes.setdefault(id(log), Lane(log))
        lane.waiting.append(item)
        if not lane.busy:
            lane.busy = True
            self._later(self._delay_us(), lambda: self._work(lane))

    def _work(self, lane: Lane) -> None:
        items, lane.waiting = list(lane.waiting), deque()
        finished: list[tuple[Finished, object, Exception | None]] = []
        joined: list[Work] = []
        for item in items:
            if item.frames is not None:
                joined.append(item)
                continue
            finished += self._write(lane.log, joined)
            joined = []
            finished.append(self._act(item))
        finished += self._write(lane.log, joined)
        self._finish(finished)
        lane.busy = bool(lane.waiting)
        if lane.busy:
            self._later(self._delay_us(), lambda: self._work(lane))

    def _finish(self, finished: list[tuple[Finished, object, Exception | None]]) -> None:
        self._finished += finished
        self._later(self._random.choice((0, 100, 5_000)), self._notify)

    def _write(self, log: object, joined: list[Work]) -> list[tuple[Finished, object, Exception | None]]:
        """One write and at most one sync for all; when it fails, it failed for all."""
        if not joined:
            return []
        assert isinstance(log, MemoryLog)
        error: Exception | None = None
        frames = [frame for item in joined for frame in item.frames or ()]
        sync = any(item.sync for item in joined)
        chance = self._random.random()
        try:
            if chance < self.full:
                self._seen["full"] += 1
                log.fail_next(Full("no space is left"))
            elif chance < self.full + self.sync_fails and sync:
                self._seen["sync failed"] += 1
                log.append(frames, sync=False)
                self._fail_sync(log)
                log.sync()
            log.append(frames, sync=sync)
            if sync:
                self._store.synced(log)
            self._seen["appends joined"] += len(joined) > 1
        except Exception as caught:  # whatever it is, the owner has to hear of it
            self._seen["append failed"] += 1
            error = caught
        return [(item.done, None, error) for item in joined]

    def _fail_sync(self, log: MemoryLog) -> None:
        self.sync_failed = True
        self._store.spoil(log, self._random)
        log.fail_next(StorageFault("fdatasync failed"))

    def _act(self, item: Work) -> tuple[Finished, object, Exception | None]:
        log = getattr(item.run, "__self__", None)
        flushed = log if isinstance(log, MemoryLog) and getattr(item.run, "__name__", "") == "flush" else None
        if flushed is not None and not flushed.closed and self._random.random() < self.sync_fails:
            self._seen["flush failed"] += 1
            self._fail_sync(flushed)
        try:
            result = item.run()
        except Exception as caught:  # whatever it is, the owner has to hear of it
            self._seen["append failed"] += flushed is not None
            return item.done, None, caught
        if flushed is not None:
            self._store.synced(flushed)
        return item.done, result, None
