"""Maintenance of one partition: syncs in intervals, retention, snapshots, freeing segments.

All of it runs beside the commands, and none of it may cost a promise. A snapshot or a trim that fails costs
replay time or space, and is tried again later; a sync that fails fails the partition.

A segment is freed only after everything that says so is durable. Suppose retention finds that messages below
offset 5000 are past it:

    1  a `Trimmed` fact is decided and written: readers see the log begin at 5000
    2  the log is synced, so that the snapshot to come describes nothing that could be lost
    3  a snapshot is stored that says "begins at 5000"
    4  segments that lie wholly below 5000 are removed, except for those that the *previous* snapshot needs

If a power failure takes the fact before it is synced, the log simply begins at its old start again. Internal
logs have no readers, so their segments are freed as snapshots cover them.
"""

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
"""Bytes written to an internal log after which segments that snapshots cover are freed."""
FLUSH_BYTES = 16 * 1024 * 1024
PRESSES_MAX = 5
COLLECT_BYTES = 64 * 1024 * 1024
"""Bytes written to an ephemeral topic after which settled messages are trimmed: the size of a segment."""


class Maintenance:
    """Syncs, trims and snapshots of one partition. All methods run on the pump's thread."""

    def __init__(self, runtime: PartitionRuntime) -> None:
        self._runtime = runtime
        self._saver = object()
        """Orders snapshots one after the other, beside the appends and syncs of the log."""
        self._unsynced_bytes = 0
        self._synced_us = 0
        self.debt = ReplayDebt()
        """Cost of a replay; replaced when the state is rebuilt from the log."""
        self._uncollected_bytes = 0
        self._freed_offset = 0
        self._over: list[Callable[[], None]] = []
        self._floor: int | None = 0
        """Oldest entry with a delayed or staged message that the newest stored snapshot refers to."""
        self._stored_start = 0
        """Start of the readable log according to the newest stored snapshot."""
        self._free_again = False
        self._pressed = (0, 0)
        """A start offset, and how often `press` has tried to free the segments below it."""

    def wrote(self, frames: Sequence[Frame], data_bytes: int, size: int) -> None:
        """Count frames that are in the log now: `size` bytes, `data_bytes` of them messages."""
        self._unsynced_bytes += size
        debt = self.debt
        for item in frames:
            debt.add(item.header)
        if not self._runtime.machine.delivers and debt.bytes > max(INTERNAL_BYTES, 2 * debt.snapshot_bytes):
            self.free()
        if self._runtime.options.ephemeral:
            self._uncollected_bytes += data_bytes
            if self._uncollected_bytes > COLLECT_BYTES:
                self._collect(0)

    def sync(self, now_us: int) -> None:
        """With `durability = interval`: sync when the interval is over or enough was written."""
        runtime = self._runtime
        if runtime.options.durability != "interval" or runtime.fault is not None or runtime.reopening:
            return
        due_us = self._synced_us + runtime.options.sync_interval_ms * 1000
        if self._unsynced_bytes and (now_us >= due_us or self._unsynced_bytes > FLUSH_BYTES):
            self._synced_us = now_us
            self._flush(lambda error: None)

    def _flush(self, over: Callable[[Exception | None], None]) -> None:
        self._unsynced_bytes = 0
        self._runtime.assurance.flush(over)

    def sweep(self) -> None:
        """Apply retention: find the offset to trim to, record the trim, free the segments."""
        runtime = self._runtime
        options = runtime.options
        if (
            options.retention_ms is None
            and options.retention_bytes is None
            and options.retention_count is None
        ):
            if options.ephemeral:
                self._collect(0)
            return
        since = None if options.retention_ms is None else runtime.time_us() - options.retention_ms * 1000
        log = runtime.log

        def work() -> object:
            return log.retention_offset(
                bytes_max=options.retention_bytes, append_time_us=since, count_max=options.retention_count
            )

        def done(result: Any, error: Exception | None) -> None:
            if error is None:
                self._collect(result)

        runtime.run_in_order(work, done)

    def _collect(self, retention_offset: int) -> None:
        """Trim to the start that retention wants, or that the groups of an ephemeral topic allow; then free
        the segments."""
        runtime, state = self._runtime, self._runtime.state
        self._uncollected_bytes = 0
        if runtime.lost is not None:
            return
        if retention_offset > state.start_offset or (
            runtime.options.ephemeral and state.ring.floor() > state.start_offset
        ):
            sweep = Sweep(min(retention_offset, runtime.end_offset), runtime.end_offset)
            runtime.submit(sweep, b"", self._trimmed)
        elif runtime.options.ephemeral and state.start_offset > self._freed_offset:
            self.free()  # Publishing trimmed the ring to make room.

    def _trimmed(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        if type(reply) is not Refusal:
            self.free()

    def free(self) -> None:
        """Free the segments below the start, as far as snapshots allow; the steps are listed above.

        A snapshot that is under way was begun before the trim and does not have it: another one follows."""
        if not self._over:
            self.save_snapshot(self._trim)
        elif not self._free_again:
            self._free_again = True
            self._over.append(self._go_on_freeing)

    def press(self) -> None:
        """On a full disk: free trimmed segments that stay only because nothing is published.

        A trimmed segment is removed when two snapshots are of later entries. Without messages there may be no
        later entry, so the start of the log is recorded once more, for another snapshot. The segment that is
        being written is never removed: if all of it is trimmed, it is sealed first."""
        runtime, start = self._runtime, self._runtime.state.start_offset
        if (
            runtime.fault is not None
            or runtime.lost is not None
            or not runtime.machine.delivers
            or self._over
        ):
            return
        stats = runtime.log.stats()
        only = stats.segments < 2
        if stats.start_offset >= start or (only and start < runtime.end_offset):
            return
        self._pressed = (start, self._pressed[1] + 1 if self._pressed[0] == start else 1)
        if self._pressed[1] <= PRESSES_MAX:
            if only:
                runtime.run_in_order(runtime.log.seal, self._done)
            runtime.submit(Sweep(0, again=True), b"", self._trimmed)

    def _go_on_freeing(self) -> None:
        self._free_again = False
        self.free()

    def _trim(self) -> None:
        runtime = self._runtime
        if runtime.fault is not None or runtime.lost is not None:
            return
        log, offset, floor = runtime.log, self._stored_start, self._floor
        self._freed_offset = offset
        runtime.run_in_order(lambda: log.trim(offset, floor), self._done)

    @property
    def saving(self) -> bool:
        """Whether a snapshot is under way."""
        return bool(self._over)

    @property
    def replayed(self) -> bool:
        """Whether a restart replays this log and a snapshot of it can be taken now."""
        runtime = self._runtime
        return runtime.options.storage != "memory" and runtime.fault is None and not runtime.reopening

    def shorten_replay(self) -> None:
        """Take a snapshot, so that a restart replays less; free the segments of internal logs with it."""
        if self._runtime.machine.delivers:
            self.save_snapshot()
        else:
            self.free()

    def after_saving(self, action: Callable[[], None]) -> None:
        """Call `action` now, or when the snapshot under way has ended: a log is not closed beneath it."""
        if self._over:
            self._over.append(action)
        else:
            action()

    def save_snapshot(self, over: Callable[[], None] = lambda: None) -> None:
        """Store a snapshot of the state as of now; then call `over`, whether it succeeded or not. If a
        snapshot is under way already, `over` is called at its end.

        The steps: freeze the state on the loop; wait until the frames of all its facts are written; sync
        them; encode and store the snapshot. The last two steps run beside the appends.
        """
        runtime = self._runtime
        if runtime.fault is not None or runtime.reopening or not runtime.entry:
            over()
            return
        if self._over:
            self._over.append(over)
            return
        begun_us = runtime.pump.clock.now_us()
        try:
            thaw = runtime.state.freeze()
            floor = runtime.state.lowest_entry() if runtime.machine.delivers else None
        except Exception as error:
            # Call `over` all the same: a log has to be closed, whatever its state is worth.
            self.debt.owe(0, 0, begun_us)
            self._done(None, error)
            over()
            return
        self._over.append(over)
        runtime.metrics.snapshot_taken((runtime.pump.clock.now_us() - begun_us) / 1e6)
        entry, offset, size = runtime.entry - 1, runtime.state.end_offset, 0
        start = runtime.state.start_offset
        failures, debt = runtime.failures, self.debt
        owed_us, owed_bytes = debt.us, debt.bytes
        debt.pay(begun_us)

        def store() -> None:
            nonlocal size
            chunks = thaw()  # Not on the loop: with many unsettled messages this takes a while.
            size = sum(len(chunk) for chunk in chunks)
            runtime.log.save_snapshot(Snapshot(entry, offset, chunks))

        def appended(result: object, error: Exception | None) -> None:
            self._flush(flushed)

        def flushed(error: Exception | None) -> None:
            if error is None and failures == runtime.failures:
                runtime.pump.threads.run(self._saver, store, saved)
            else:
                missed()  # Storage failed: part of the state in the snapshot may have been dropped.

        def saved(result: object, error: Exception | None) -> None:
            self._done(result, error)
            if error is not None:
                missed()
                return
            self._floor, self._stored_start, debt.snapshot_bytes = floor, start, size
            finished()

        def missed() -> None:
            debt.owe(owed_us, owed_bytes, runtime.pump.clock.now_us())
            finished()

        def finished() -> None:
            waiting, self._over = self._over, []
            for action in waiting:
                action()

        runtime.run_in_order(lambda: None, appended)  # After the writes of all facts in the state.

    def _done(self, result: object, error: Exception | None) -> None:
        """Count a failed snapshot or trim. It costs replay time or space, never data."""
        if error is not None:
            if isinstance(error, Full):
                self._runtime.pump.filled()
            else:
                log.error("%s: upkeep failed", self._runtime.name, exc_info=error)
            self._runtime.metrics.refused("upkeep")

    def forget(self) -> None:
        """Let the storage threads forget the snapshots of this log."""
        self._runtime.pump.threads.forget(self._saver)
