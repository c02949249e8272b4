"""The writer of one log: turns are written on the storage threads, or at once where that costs less.

Waking a thread and being woken by it costs about 20 times as much as a small write that needs no sync. So
such a write is done on the loop, if it is next. A disk that cannot keep up would stall the loop: while the
threads have a slow write under way, and for a while after a slow one here, they do all writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tailrace.broker.runtime.pump import SLOW_WRITE_US, Pump
from tailrace.broker.runtime.turn import Turn
from tailrace.errors import StorageFault
from tailrace.ports import Finished, PartitionLog

INLINE_BYTES_MAX = 32 * 1024
INLINE_FRAME_BYTES = 2 * 1024
"""Many small frames are written on the loop up to this average size, and the bound on their sum below."""
INLINE_TOGETHER_BYTES_MAX = 256 * 1024
THREADS_ONLY_US = 1_000_000


class LogWriter:
    """Storage work on one log, in order. `written` is called when the write of a turn has ended."""

    def __init__(self, pump: Pump, written: Callable[[Turn, Exception | None], None]) -> None:
        self._pump = pump
        self._written = written
        self._outstanding = 0
        """Pieces of work that have not ended."""

    def write(self, log: PartitionLog, turn: Turn) -> None:
        """Write a turn, behind everything that was begun before."""
        frames, pump = turn.frames, self._pump
        size = frames[0].size if len(frames) == 1 else sum(item.size for item in frames)
        together = min(INLINE_FRAME_BYTES * len(frames), INLINE_TOGETHER_BYTES_MAX)
        self._outstanding += 1
        if (
            turn.synced
            or size > max(INLINE_BYTES_MAX, together)
            or self._outstanding > 1
            or pump.is_slow(turn.started_us)
            or size > log.room()
        ):
            pump.writing[turn] = turn.started_us
            pump.threads.append(log, frames, turn.synced, partial(self._ended, turn))
            return
        error: Exception | None = None
        began_us = pump.clock.now_us()  # Not when the turn began: long decisions are not a slow disk.
        try:
            log.append(frames, sync=False)
        except StorageFault as fault:
            error = fault
        now_us = pump.clock.now_us()
        if now_us - began_us > SLOW_WRITE_US:
            pump.threads_only_until_us = now_us + THREADS_ONLY_US
        self._outstanding -= 1
        self._written(turn, error)

    def _ended(self, turn: Turn, result: object, error: Exception | None) -> None:
        self._pump.writing.pop(turn, None)
        self._outstanding -= 1
        self._written(turn, error)

    def run(self, log: PartitionLog, work: Callable[[], object], done: Finished) -> None:
        """Do other work on the log, in order with the writes."""
        self._outstanding += 1
        self._pump.threads.run(log, work, partial(self._finished, done))

    def _finished(self, done: Finished, result: Any, error: Exception | None) -> None:
        self._outstanding -= 1
        done(result, error)
