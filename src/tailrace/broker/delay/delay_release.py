"""Delayed messages of one partition on their way into the readable log: loaded ahead, released at ticks.

    far ──AHEAD_US before it is due──▶ loading (reader thread) ──▶ near ──at its tick──▶ ReleaseDue

All that is due at a tick goes into one batch. A release is a command like any other: it is decided on the
state of its turn, and when a cancel came in between, nothing happens and the next tick looks again.

Messages are due by the wall clock, which may be put forward or back at any time; pauses are durations.

What was loaded is remembered by two marks. Everything up to `_after` in the order of time was asked for, but
for messages that came later: those have refs at or above `_since`. So nothing is asked for twice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace.broker.delay.delay_prefetch import DelayPrefetch, Picked, TooMuch, pick
from tailrace.broker.runtime.pump import Timer
from tailrace.core.collections.timing_wheel import (
    AT,
    NEVER,
    REF,
    REF_MAX,
    TICK_US,
    Rows,
    in_order,
    ref_of,
    some,
)
from tailrace.core.model.commands import Published, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import ReleaseDue
from tailrace.errors import Corrupt, Overloaded
from tailrace.format.batch import body_of, open_body
from tailrace.format.frame import Buffer, crc32c

if TYPE_CHECKING:
    from tailrace.broker.runtime.partition_runtime import PartitionRuntime

log = logging.getLogger("tailrace.delays")

AHEAD_US = 4_000_000
"""So long before they are due messages are read from the log."""
STAGGER = 16
STAGGER_US = 50_000
"""Partitions look ahead at different moments, so that they do not all take their time at once."""
RELEASE_ROWS = 10_000
RELEASE_BYTES = 4 * 1024 * 1024
"""At most so much is released at one tick; a backlog goes on at the next."""
NEAR_BYTES = 16 * 1024 * 1024
NEAR_BYTES_TOTAL = 64 * 1024 * 1024
"""Memory for messages that are due soon: of one partition, and of all together."""
LOAD_ROWS = 65_536
ROW_BYTES = 512
"""What a message is taken to have before any was loaded."""
UNSAFE_MAX = 8
"""So many releases may wait for the disk."""
PAUSE_US = 1_000_000
FULL_PAUSE_US = 100_000
"""So long is waited where there is no room for what is due."""
_START = (-1, 0)


class DelayRelease:
    """The timers of one partition. Everything runs on the pump's thread."""

    def __init__(self, shard: PartitionRuntime) -> None:
        self._shard = shard
        self.bytes_max = NEAR_BYTES
        self._margin_us = AHEAD_US // 4 + shard.partition % STAGGER * STAGGER_US
        """What was asked for reaches at least so far ahead."""
        self._near = DelayPrefetch()
        self._timer: Timer | None = None
        self._life = 0
        """Grows when the state is another one: what was begun for an earlier one does not count."""
        self._stopped = True
        self._reset()

    def _reset(self) -> None:
        self._life += 1
        self._near.clear()
        self._after, self._since = _START, 0
        self._safe_entry = 0
        self._loading = False
        self._row_bytes = ROW_BYTES
        self._submitted: tuple[int, tuple[int, int]] | None = None
        """The release that is not known to be decided: how many there were before it, and its end."""
        self._unsafe = 0
        self._paused_until_us = 0

    # -- what the shard says

    def start(self) -> None:
        """The partition takes commands, with the state that it has now; what became due fires at once."""
        self._reset()
        self._stopped = False
        self._safe_entry = self._shard.entry
        self._review()

    def stored(self, entry: int) -> None:
        """Scheduled frames are durable, up to this one."""
        self._safe_entry = entry + 1
        if not self._stopped and self._shard.state.timetable.soonest_us != NEVER:
            self._review()

    def stop(self) -> None:
        """The log will be closed."""
        self._stopped = True
        self._near.clear()
        self._set_timer(None)

    def safe_refs_end(self) -> int:
        """Refs of messages that are durable lie below."""
        return ref_of(self._safe_entry, 0)

    # -- looking around

    def _tick(self, time_us: int) -> None:
        self._timer = None
        self._review()

    def _review(self) -> None:
        """Load what comes near, release what is due, and set the timer for the next look."""
        shard, timetable = self._shard, self._shard.state.timetable
        if self._stopped or shard.fault is not None:
            self._set_timer(None)
            return
        if self._submitted is not None and timetable.releases > self._submitted[0]:
            # All that waited up to its end has left the wheel; what came since then was not loaded yet.
            self._near.drop(self._submitted[1])
            self._submitted = None
        due_us = timetable.next_due_us()
        if due_us is None:
            self._near.clear()
            self._set_timer(None)
            return
        clock = shard.pump.clock
        if clock.now_us() < self._paused_until_us:
            self._set_timer(None)
            self._timer = shard.pump.at(self._paused_until_us, self._tick)
            return
        wall_us = clock.wall_us()
        if due_us <= wall_us + AHEAD_US:
            self._load(wall_us)
            if due_us <= wall_us:
                self._release(wall_us)
        next_us = -(-due_us // TICK_US) * TICK_US
        look_us = max(self._after[0] - self._margin_us, due_us - AHEAD_US)
        if look_us > wall_us:
            next_us = min(next_us, look_us)
        self._set_timer(max(next_us, (wall_us // TICK_US + 1) * TICK_US))

    def _set_timer(self, wall_us: int | None) -> None:
        if self._timer is not None:
            if self._timer.due_us == wall_us:
                return
            self._timer.cancel()
        self._timer = None if wall_us is None else self._shard.pump.at_wall(wall_us, self._tick)

    # -- loading

    def _load(self, wall_us: int) -> None:
        """Ask for what is near and was not asked for, if there may be some and there is room."""
        timetable = self._shard.state.timetable
        recent = timetable.soonest_us <= self._after[0]
        if self._loading or not (recent or self._after[0] < wall_us + self._margin_us):
            return
        room = self.bytes_max - self._near.nbytes
        if room <= 0:
            return
        limit = max(1, min(LOAD_ROWS, room // self._row_bytes))
        before = self._after, self._since
        rows = self._choose(wall_us + AHEAD_US, limit)
        if not len(rows):
            return
        log, life = self._shard.log, self._life
        self._loading = True

        def work() -> tuple[Rows, Picked]:
            ordered = in_order(rows)
            return ordered, pick(log, ordered[:, REF], 2 * room)

        def done(result: Any, error: Exception | None) -> None:
            if life != self._life or self._stopped:
                return
            self._loading = False
            if error is None:
                ordered, picked = result
                self._row_bytes = max(picked.batch.nbytes // len(ordered), 1)
                self._near.add(ordered, picked)
            else:
                self._after, self._since = before
                timetable.soonest_us = 0
                self._failed(error)
            self._review()

        self._shard.pump.threads.read(work, done)

    def _choose(self, until_us: int, limit: int) -> Rows:
        """The rows to load, not sorted; moves the marks behind them."""
        timetable = self._shard.state.timetable
        until_us = max(until_us, self._after[0])
        behind, recent = timetable.wheel.between(self._after, until_us, self._since)
        end = self.safe_refs_end()
        unsafe = [int(part[part[:, REF] >= end, AT].min(initial=NEVER)) for part in (behind, recent)]
        behind, recent = (some(part, part[:, REF] < end) for part in (behind, recent))
        if len(recent) > limit:
            recent = np.take(recent, np.argsort(recent[:, REF]), axis=0)
            self._since = int(recent[limit, REF])
            return recent[:limit]
        # What is not durable yet is found when it is: by its ref, or by its time if that is further on.
        timetable.soonest_us = min(unsafe)
        self._since = end
        room = limit - len(recent)
        if not room:
            return recent
        if len(behind) <= room:
            self._after = until_us, REF_MAX
            return np.concatenate((recent, behind))
        cut_us = int(np.partition(behind[:, AT], room - 1)[room - 1])
        first = some(behind, behind[:, AT] <= cut_us)
        if len(first) <= 2 * room:
            self._after = cut_us, REF_MAX
        else:  # Most of them are due at the very same moment: only their order parts them.
            first = in_order(first)[:room]
            self._after = int(first[-1, AT]), int(first[-1, REF])
        return np.concatenate((recent, first))

    def _failed(self, error: Exception) -> None:
        if isinstance(error, TooMuch):
            self._row_bytes = error.row_bytes
            return
        # Nothing is skipped: a message that cannot be read holds those behind it, and people hear of it.
        log.error("%s: delayed messages cannot be read: %s", self._shard.name, error)
        if isinstance(error, Corrupt):
            self._shard.damaged(error)
        self._shard.metrics.refused("delays")
        self._paused_until_us = self._shard.pump.clock.now_us() + PAUSE_US

    # -- releasing

    def _release(self, wall_us: int) -> None:
        timetable = self._shard.state.timetable
        if self._submitted is not None:
            return  # It is decided in the coming turn.
        if self._unsafe >= UNSAFE_MAX:
            return
        count, nbytes = self._shard.state.ring.room()
        if count <= 0 or nbytes <= 0 or self._shard.pump.full:
            self._paused_until_us = self._shard.pump.clock.now_us() + FULL_PAUSE_US
            return
        rows = timetable.due_rows(wall_us, min(count, RELEASE_ROWS))
        taken = self._near.take(rows)
        if taken is None:
            return
        picked, body = _fitting(taken[0], min(nbytes, 4 * RELEASE_BYTES))
        count = picked.batch.num_rows
        view, _ = open_body(body, picked.columns, want_keys=self._shard.options.key_index)
        until = int(rows[count - 1, AT]), int(rows[count - 1, REF])
        command = ReleaseDue(view, crc32c(body), *until, rows[:count, REF].copy())
        self._submitted = timetable.releases, until
        self._unsafe += 1
        life = self._life

        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            if life != self._life:
                return
            self._unsafe -= 1
            if isinstance(reply, Published):
                return
            self._submitted = None
            if isinstance(reply, Refusal):
                pause_us = FULL_PAUSE_US if reply.code == Overloaded.code else PAUSE_US
                self._paused_until_us = self._shard.pump.clock.now_us() + pause_us

        self._shard.submit(command, body, answered)


def _fitting(picked: Picked, bytes_max: int) -> tuple[Picked, Buffer]:
    """As many of the first messages as make one batch, but at least one, and its body."""
    batch, columns = picked.batch, picked.columns
    if batch.nbytes > RELEASE_BYTES and batch.num_rows > 1:
        batch = batch.slice(0, max(1, batch.num_rows * RELEASE_BYTES // batch.nbytes))
    body = body_of(batch, columns)
    while len(body) > bytes_max and batch.num_rows > 1:
        batch = batch.slice(0, batch.num_rows // 2)
        body = body_of(batch, columns)
    return Picked(batch, columns), body
