"""Maintenance of one partition: syncs in intervals, snapshots, freeing segments.

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
from functools import partial
from typing import Any, NamedTuple

from tailrace.broker.metrics import Metrics
from tailrace.broker.runtime.assurance import Assurance
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.replay_debt import ReplayDebt
from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Full
from tailrace.format.frame import Buffer, Frame
from tailrace.ports import Finished, PartitionLog, Respond, Snapshot

log = logging.getLogger("tailrace.upkeep")

FLUSH_BYTES = 16 * 1024 * 1024


class Captured(NamedTuple):
    """A state as of now, and what is known of its log."""

    log: PartitionLog
    entry: int
    end_offset: int
    start_offset: int
    floor: int | None
    """Oldest entry with a delayed or staged message that the state refers to."""
    encode: Callable[[], Sequence[Buffer]]
    """Takes a while, and may run on any thread."""


class MaintenanceAsks(NamedTuple):
    """What maintenance asks of its partition."""

    well: Callable[[], PartitionLog | None]
    """The log, if it is well and its state is known."""
    capture: Callable[[], Captured | None]
    """The state, if a snapshot of it can be taken now."""
    in_order: Callable[[Callable[[], object], Finished], None]
    """Do work on the log, in order with its appends."""
    answer: Callable[[Respond, Reply], None]
    """Reply when everything that is decided by now is committed."""


class _Saving(NamedTuple):
    """A snapshot under way, and what is owed again if it fails."""

    captured: Captured
    failures: int
    """How often storage had failed when the snapshot began."""
    debt: ReplayDebt
    owed_us: float
    owed_bytes: int


def _store(captured: Captured) -> int:
    """Encode and store a snapshot, on a storage thread: with many unsettled messages this takes a while.
    Returns its size."""
    chunks = captured.encode()
    captured.log.save_snapshot(Snapshot(captured.entry, captured.end_offset, chunks))
    return sum(len(chunk) for chunk in chunks)


class Maintenance:
    """Syncs, trims and snapshots of one partition. All methods run on the pump's thread."""

    def __init__(
        self,
        name: str,
        pump: Pump,
        metrics: Metrics,
        assurance: Assurance,
        asks: MaintenanceAsks,
    ) -> None:
        self._name = name
        self._pump = pump
        self._metrics = metrics
        self._assurance = assurance
        self._asks = asks
        self._saver = object()
        """Orders snapshots one after the other, beside the appends and syncs of the log."""
        self._unsynced_bytes = 0
        self._synced_us = 0
        self.debt = ReplayDebt()
        """Cost of a replay; replaced when the state is rebuilt from the log."""
        self.freed_offset = 0
        """Segments below this offset are freed, or are being freed."""
        self._over: list[Callable[[], None]] = []
        self._floor: int | None = 0
        """Oldest entry with a delayed or staged message that the newest stored snapshot refers to."""
        self._stored_start = 0
        """Start of the readable log according to the newest stored snapshot."""
        self._free_again = False

    def owe(self, debt: ReplayDebt) -> None:
        """The state was rebuilt from the log: what its replay has cost."""
        self.debt = debt

    def wrote(self, frames: Sequence[Frame]) -> None:
        """Count frames that are in the log now."""
        size, debt = 0, self.debt
        for item in frames:
            size += item.size
            debt.add(item.header)
        self._unsynced_bytes += size

    def sync(self, now_us: int, interval_us: int) -> None:
        """Sync when the interval is over or enough was written."""
        due_us = self._synced_us + interval_us
        if self._unsynced_bytes and (now_us >= due_us or self._unsynced_bytes > FLUSH_BYTES):
            self._synced_us = now_us
            self._flush(lambda error: None)

    def _flush(self, over: Callable[[Exception | None], None]) -> None:
        self._unsynced_bytes = 0
        self._assurance.flush(over)

    def free(self) -> None:
        """Free the segments below the start, as far as snapshots allow; the steps are listed above.

        A snapshot that is under way was begun before the trim and does not have it: another one follows."""
        if not self._over:
            self.save_snapshot(self._trim)
        elif not self._free_again:
            self._free_again = True
            self._over.append(self._go_on_freeing)

    def _go_on_freeing(self) -> None:
        self._free_again = False
        self.free()

    def _trim(self) -> None:
        log = self._asks.well()
        if log is None:
            return
        offset, floor = self._stored_start, self._floor
        self.freed_offset = offset
        self._asks.in_order(lambda: log.trim(offset, floor), self.done)

    @property
    def saving(self) -> bool:
        """Whether a snapshot is under way."""
        return bool(self._over)

    def after_saving(self, action: Callable[[], None]) -> None:
        """Call `action` now, or when the snapshot under way has ended: a log is not closed beneath it."""
        if self._over:
            self._over.append(action)
        else:
            action()

    def save_snapshot(self, over: Callable[[], None] = lambda: None) -> None:
        """Store a snapshot of the state as of now; then call `over`, whether it succeeded or not. If a
        snapshot is under way already, `over` is called at its end.

        The steps: freeze the state on the loop; wait until all its facts are committed (`_committed`); sync
        them (`_synced`); encode and store the snapshot (`_stored`). The last two steps run
        beside the appends.
        """
        if self._over:
            self._over.append(over)
            return
        clock, debt = self._pump.clock, self.debt
        begun_us = clock.now_us()
        try:
            captured = self._asks.capture()
        except Exception as error:
            # Call `over` all the same: a log has to be closed, whatever its state is worth.
            debt.owe(0, 0, begun_us)
            self.done(None, error)
            over()
            return
        if captured is None:
            over()
            return
        self._over.append(over)
        self._metrics.snapshot_taken((clock.now_us() - begun_us) / 1e6)
        saving = _Saving(captured, self._assurance.failures, debt, debt.us, debt.bytes)
        debt.pay(begun_us)
        self._asks.answer(partial(self._committed, saving), Done())

    def _committed(self, saving: _Saving, reply: Reply, parts: object) -> None:
        if type(reply) is Refusal:
            self._missed(saving)  # Storage failed: the state in the snapshot was dropped.
        else:
            self._flush(partial(self._synced, saving))

    def _synced(self, saving: _Saving, error: Exception | None) -> None:
        if error is None and saving.failures == self._assurance.failures:
            self._pump.threads.run(
                self._saver, partial(_store, saving.captured), partial(self._stored, saving)
            )
        else:  # Storage failed: part of the state in the snapshot may have been dropped.
            self._missed(saving)

    def _stored(self, saving: _Saving, size: Any, error: Exception | None) -> None:
        self.done(size, error)
        if error is not None:
            self._missed(saving)
            return
        self._floor, self._stored_start = saving.captured.floor, saving.captured.start_offset
        saving.debt.stored(size)
        self._end_saving()

    def _missed(self, saving: _Saving) -> None:
        saving.debt.owe(saving.owed_us, saving.owed_bytes, self._pump.clock.now_us())
        self._end_saving()

    def _end_saving(self) -> None:
        waiting, self._over = self._over, []
        for action in waiting:
            action()

    def done(self, result: object, error: Exception | None) -> None:
        """Count a failed snapshot or trim. It costs replay time or space, never data."""
        if error is not None:
            if isinstance(error, Full):
                self._pump.filled()
            else:
                log.error("%s: upkeep failed", self._name, exc_info=error)
            self._metrics.refused("upkeep")

    def forget(self) -> None:
        """Let the storage threads forget the snapshots of this log."""
        self._pump.threads.forget(self._saver)
