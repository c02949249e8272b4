"""What a partition does beside its commands: syncs in intervals, retention, snapshots, giving back space."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tailrace.broker.runtime.replay_debt import ReplayDebt
from tailrace.core.model.commands import Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import Sweep
from tailrace.errors import Full
from tailrace.format.frame import Buffer, Frame
from tailrace.ports import Snapshot

if TYPE_CHECKING:
    from tailrace.broker.runtime.partition_runtime import PartitionRuntime

log = logging.getLogger("tailrace.upkeep")

INTERNAL_BYTES = 1024 * 1024
"""Nobody reads internal logs: when so much was written, what the snapshots cover is freed."""
FLUSH_BYTES = 16 * 1024 * 1024
PRESSES_MAX = 5
COLLECT_BYTES = 64 * 1024 * 1024
"""An ephemeral topic is looked at when so much was written, too: as much as a segment."""


class Maintenance:
    """Upkeep of one partition. All methods run on the pump's thread."""

    def __init__(self, shard: PartitionRuntime) -> None:
        self._shard = shard
        self._saver = object()
        """Snapshots are stored one after the other, beside the appends and syncs of the log."""
        self._unsynced_bytes = 0
        self._synced_us = 0
        self.debt = ReplayDebt()
        """What a restart would replay; begun anew when the state is built from the log."""
        self._uncollected_bytes = 0
        self._freed_offset = 0
        self._over: list[Callable[[], None]] = []
        self._floor: int | None = 0
        """The oldest frame outside of the readable log that the newest stored snapshot still needs."""
        self._stored_start = 0
        """Where the readable log begins, as the newest stored snapshot tells it."""
        self._free_again = False
        self._pressed = (0, 0)
        """How often `press` has tried to free what lies below an offset."""

    def wrote(self, frames: Sequence[Frame], data_bytes: int, size: int) -> None:
        """Note what is in the log now: `size` bytes, `data_bytes` of them messages."""
        self._unsynced_bytes += size
        debt = self.debt
        for item in frames:
            debt.add(item.header)
        if not self._shard.machine.delivers and debt.bytes > max(INTERNAL_BYTES, 2 * debt.snapshot_bytes):
            self.free()
        if self._shard.options.ephemeral:
            self._uncollected_bytes += data_bytes
            if self._uncollected_bytes > COLLECT_BYTES:
                self._collect(0)

    def sync(self, now_us: int) -> None:
        """Sync what was written since the last time, when it is due (`durability = interval`)."""
        shard = self._shard
        if shard.options.durability != "interval" or shard.fault is not None or shard.reopening:
            return
        due_us = self._synced_us + shard.options.sync_interval_ms * 1000
        if self._unsynced_bytes and (now_us >= due_us or self._unsynced_bytes > FLUSH_BYTES):
            self._synced_us = now_us
            self._flush(lambda error: None)

    def _flush(self, over: Callable[[Exception | None], None]) -> None:
        self._unsynced_bytes = 0
        self._shard.assurance.flush(over)

    def sweep(self) -> None:
        """Apply retention: find what is past it, record the trim, free the segments."""
        shard = self._shard
        options = shard.options
        if (
            options.retention_ms is None
            and options.retention_bytes is None
            and options.retention_count is None
        ):
            if options.ephemeral:
                self._collect(0)
            return
        since = None if options.retention_ms is None else shard.time_us() - options.retention_ms * 1000
        log = shard.log

        def work() -> object:
            return log.retention_offset(
                bytes_max=options.retention_bytes, append_time_us=since, count_max=options.retention_count
            )

        def done(result: Any, error: Exception | None) -> None:
            if error is None:
                self._collect(result)

        shard.run_in_order(work, done)

    def _collect(self, retention_offset: int) -> None:
        """Record the trim to what retention keeps, or to what the groups of an ephemeral topic still need;
        then free the segments."""
        shard, state = self._shard, self._shard.state
        self._uncollected_bytes = 0
        if shard.lost is not None:
            return
        if retention_offset > state.start_offset or (
            shard.options.ephemeral and state.ring.floor() > state.start_offset
        ):
            sweep = Sweep(min(retention_offset, shard.end_offset), shard.end_offset)
            shard.submit(sweep, b"", self._trimmed)
        elif shard.options.ephemeral and state.start_offset > self._freed_offset:
            self.free()  # Publishes trimmed it to make room for themselves.

    def _trimmed(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        if type(reply) is not Refusal:
            self.free()

    def free(self) -> None:
        """Give back the segments below the start, as far as snapshots allow.

        A segment never goes before what says so is durable. The steps: the trim is written; the log is
        synced; a snapshot that has the trim is stored; the segments below the start that this snapshot tells
        are removed. On an `interval` topic the record of a trim may be lost until then, and the log begins
        where it did before. A snapshot that was begun earlier does not have the trim: another one follows.
        """
        if not self._over:
            self.save_snapshot(self._trim)
        elif not self._free_again:
            self._free_again = True
            self._over.append(self._go_on_freeing)

    def press(self) -> None:
        """On a full disk: what was trimmed goes only when two snapshots are of later entries, and without
        messages there may be no later entry. So the beginning is recorded again, for another snapshot."""
        shard, start = self._shard, self._shard.state.start_offset
        if shard.fault is not None or shard.lost is not None or not shard.machine.delivers or self._over:
            return
        stats = shard.log.stats()
        if stats.segments < 2 or stats.start_offset >= start:
            return
        self._pressed = (start, self._pressed[1] + 1 if self._pressed[0] == start else 1)
        if self._pressed[1] <= PRESSES_MAX:
            shard.submit(Sweep(0, again=True), b"", self._trimmed)

    def _go_on_freeing(self) -> None:
        self._free_again = False
        self.free()

    def _trim(self) -> None:
        shard = self._shard
        if shard.fault is not None or shard.lost is not None:
            return
        log, offset, floor = shard.log, self._stored_start, self._floor
        self._freed_offset = offset
        shard.run_in_order(lambda: log.trim(offset, floor), self._done)

    @property
    def saving(self) -> bool:
        """Whether a snapshot is under way."""
        return bool(self._over)

    @property
    def replayed(self) -> bool:
        """Whether a restart replays this log, and a snapshot can be taken of it now."""
        shard = self._shard
        return shard.options.storage != "memory" and shard.fault is None and not shard.reopening

    def shorten_replay(self) -> None:
        """Take a snapshot, so that a restart replays less. Of internal logs, what it covers goes."""
        if self._shard.machine.delivers:
            self.save_snapshot()
        else:
            self.free()

    def after_saving(self, action: Callable[[], None]) -> None:
        """Call `action` now, or at the end of the snapshot that is under way: a log is not closed beneath
        it."""
        if self._over:
            self._over.append(action)
        else:
            action()

    def save_snapshot(self, over: Callable[[], None] = lambda: None) -> None:
        """Store the state as of now, once everything that it was built from is on the disk; then call
        `over`, whatever came of it. While one is under way, its end is waited for instead.

        The steps: freeze the state on the loop; wait until its frames are written; sync them; encode and
        store the snapshot. The last two run beside the appends, which do not wait for them.
        """
        shard = self._shard
        if shard.fault is not None or shard.reopening or not shard.entry:
            over()
            return
        if self._over:
            self._over.append(over)
            return
        begun_us = shard.pump.clock.now_us()
        try:
            thaw = shard.state.freeze()
            floor = shard.state.lowest_entry() if shard.machine.delivers else None
        except Exception as error:
            # Whoever waits goes on all the same: a log has to be closed, whatever its state is worth.
            self.debt.owe(0, 0, begun_us)
            self._done(None, error)
            over()
            return
        self._over.append(over)
        shard.metrics.snapshot_taken((shard.pump.clock.now_us() - begun_us) / 1e6)
        entry, offset, size = shard.entry - 1, shard.state.end_offset, 0
        start = shard.state.start_offset
        failures, debt = shard.failures, self.debt
        owed_us, owed_bytes = debt.us, debt.bytes
        debt.pay(begun_us)

        def store() -> None:
            nonlocal size
            chunks = thaw()  # Here and not on the loop: with many stuck messages it takes a while.
            size = sum(len(chunk) for chunk in chunks)
            shard.log.save_snapshot(Snapshot(entry, offset, chunks))

        def appended(result: object, error: Exception | None) -> None:
            self._flush(flushed)

        def flushed(error: Exception | None) -> None:
            if error is None and failures == shard.failures:
                shard.pump.threads.run(self._saver, store, saved)
            else:
                missed()  # Storage failed, or what the snapshot describes was partly dropped.

        def saved(result: object, error: Exception | None) -> None:
            self._done(result, error)
            if error is not None:
                missed()
                return
            self._floor, self._stored_start, debt.snapshot_bytes = floor, start, size
            finished()

        def missed() -> None:
            debt.owe(owed_us, owed_bytes, shard.pump.clock.now_us())
            finished()

        def finished() -> None:
            waiting, self._over = self._over, []
            for action in waiting:
                action()

        shard.run_in_order(lambda: None, appended)  # Behind everything that the state was built from.

    def _done(self, result: object, error: Exception | None) -> None:
        """A snapshot or trim that fails costs replay time or space, never data: it is counted and tried
        again later.
        """
        if error is not None:
            if isinstance(error, Full):
                self._shard.pump.filled()
            else:
                log.error("%s: upkeep failed", self._shard.name, exc_info=error)
            self._shard.metrics.refused("upkeep")

    def forget(self) -> None:
        """The storage threads need not know of it any more."""
        self._shard.pump.threads.forget(self._saver)
