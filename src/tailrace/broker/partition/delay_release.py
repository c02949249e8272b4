"""Release of delayed messages: prefetched before they are due, appended to the readable log at ticks.

    delayed ──AHEAD_US before it is due──▶ prefetched ──at the tick after it is due──▶ ReleaseDue ──▶ appended

The core's delay queue knows of every delayed message where it is stored (its *ref*: frame and row), when it
is due, and its id; the body lies in a scheduled frame, anywhere in the log. Reading it at the moment at which
it is due would be too late, so a reader thread reads the bodies some seconds ahead (`DelayPrefetch`).

*Ticks.* Time is cut into ticks of 10 ms. At a tick, everything due by then goes into one batch, in the order
(due time, ref), and that batch becomes one `ReleaseDue` command. So a message is normally appended within
10 ms after it is due, and never before. Three messages as an example:

    wall clock      A is due at .004, B at .009, C at .013 (seconds after 12:00:00)
    11:59:56.004    A comes within AHEAD_US and is prefetched
    11:59:59        the prefetch reaches only about a second ahead: everything due within the next AHEAD_US
                    is prefetched, B and C among it
    12:00:00.010    tick: A and B are due  ──▶ ReleaseDue(until = (.009, ref of B), refs = [A, B])
                    decided in the coming turn: one DATA frame with fresh offsets, and the fact
                    `Released(until)`, tied together: both are in the log, or neither is
    12:00:00.020    tick: the prefetch drops everything up to (.009, ref of B); C is due ──▶ ReleaseDue

*A release is a command like any other.* It is decided on the state of its turn, and that state may have
changed since the command was made. The core compares the refs: if B was cancelled in between, the rows due up
to `until` are [A] and not [A, B]. Then nothing is appended, and the next tick tries with [A]. At most one
release is undecided at a time, and at most `UNSAFE_MAX` wait for the disk.

*Nothing is read twice.* Two marks tell what was asked for. `_after` is a place in the order (due time, ref):
all messages up to it were asked for, except those stored later. `_since` parts those: every message up to
`_after` whose ref is at or above `_since` has not been asked for. Suppose everything due up to 12:00:04 was
asked for while entry 90 was the first that was not durable. Then D is stored in entry 93, due at 12:00:02:
D lies before `_after`, its ref lies above `_since` = (90, row 0), so the next look loads D, and none of the
others up to 12:00:04.
A message is loaded only when its frame is stored: until then the write may still fail.

*Clocks.* Messages are due by the wall clock, which may be put forward or back at any time. Pauses after a
failed read or a refusal are durations, in steady time. After a restart or a lost write `start` begins anew:
nothing here is stored, all of it follows from the delay queue and the log. A message that cannot be read is
never skipped: it holds those behind it until the read succeeds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tailrace.broker.metrics import Metrics
from tailrace.broker.partition.delay_prefetch import DelayPrefetch, Picked, TooMuch, pick
from tailrace.broker.runtime.pump import Pump, Timer
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
from tailrace.core.model.facts import Delayed
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import ReleaseDue
from tailrace.core.partition import Partition
from tailrace.errors import Corrupt, Overloaded
from tailrace.format.batch import body_of, open_body
from tailrace.format.frame import Buffer, crc32c
from tailrace.ports import PartitionLog, Respond

log = logging.getLogger("tailrace.delays")

AHEAD_US = 4_000_000
"""How long before they are due messages are read from the log."""
STAGGER = 16
STAGGER_US = 50_000
"""Step between the moments at which partitions look ahead, so that they do not all look at once."""
RELEASE_ROWS = 10_000
RELEASE_BYTES = 4 * 1024 * 1024
"""Bounds of one release. A backlog continues at the next tick."""
NEAR_BYTES = 16 * 1024 * 1024
NEAR_BYTES_TOTAL = 64 * 1024 * 1024
"""Memory for prefetched messages: of one partition, and of all partitions of a node."""
LOAD_ROWS = 65_536
ROW_BYTES = 512
"""Assumed size of a message before the first load."""
UNSAFE_MAX = 8
"""Releases that may wait for the disk."""
PAUSE_US = 1_000_000
FULL_PAUSE_US = 100_000
"""Pause when there is no room for the messages that are due."""
_START = (-1, 0)


class ReleaseTells(NamedTuple):
    """Who hears of releases."""

    submit: Callable[[Any, Buffer, Respond], None]
    """Queue a command for the next turn."""
    damaged: Callable[[Exception, PartitionLog], None]
    """A read found damage in a log."""


class DelayRelease:
    """Prefetch and release on one partition. All methods run on the pump's thread."""

    def __init__(
        self,
        name: str,
        number: int,
        pump: Pump,
        metrics: Metrics,
        well: Callable[[], bool],
        tell: ReleaseTells,
    ) -> None:
        self._name = name
        self._pump = pump
        self._metrics = metrics
        self._well = well
        """Whether the partition takes commands."""
        self._tell = tell
        self._state: Partition
        self._log: PartitionLog
        self.bytes_max = NEAR_BYTES
        self._margin_us = AHEAD_US // 4 + number % STAGGER * STAGGER_US
        """Load more when the marks reach less far ahead than this."""
        self._near = DelayPrefetch()
        self._timer: Timer | None = None
        self._life = 0
        """Number of the state; answers to work that was begun for an earlier state are ignored."""
        self._stopped = True
        self._reset()

    def _reset(self) -> None:
        self._life += 1
        self._near.clear()
        self._after, self._since = _START, 0
        self._safe_entry = 0
        self._soonest_us = 0
        """Earliest due time of the messages delayed since the last look; 0 before the first look."""
        self._loading = False
        self._row_bytes = ROW_BYTES
        self._submitted: tuple[int, tuple[int, int]] | None = None
        """The undecided release: the count of releases before it, and the last (due time, ref) in it."""
        self._unsafe = 0
        self._paused_until_us = 0

    def limit(self, bytes_max: int) -> None:
        """Set the bound on prefetched messages."""
        self.bytes_max = bytes_max

    # -- events of the partition

    def start(self, state: Partition, log: PartitionLog, entry: int) -> None:
        """The partition takes commands on a new state, and everything below an entry is durable: forget all
        marks; what became due is released at once."""
        self._state, self._log = state, log
        self._reset()
        self._stopped = False
        self._safe_entry = entry
        self._review()

    def scheduled(self, fact: Delayed) -> None:
        """Delayed messages were accepted; they are not durable yet."""
        times = fact.view.deliver_at_us
        assert times is not None
        # Staged messages may have become due while they were applied.
        first_us = max(int(times.min()), fact.wall_us or fact.append_time_us)
        self._soonest_us = min(self._soonest_us, first_us)

    def stored(self, entry: int) -> None:
        """Scheduled frames are durable up to this entry."""
        self._safe_entry = entry + 1
        if not self._stopped and self._soonest_us != NEVER:
            self._review()

    def stop(self) -> None:
        """Stop the timer and free the prefetched messages: the log will be closed."""
        self._stopped = True
        self._near.clear()
        self._set_timer(None)

    def safe_refs_end(self) -> int:
        """The first ref that may not be durable yet; all refs below are."""
        return ref_of(self._safe_entry, 0)

    # -- looking around

    def _tick(self, time_us: int) -> None:
        self._timer = None
        self._review()

    def _review(self) -> None:
        """Load messages that are due soon, release those that are due, set the timer for the next look."""
        if self._stopped or not self._well():
            self._set_timer(None)
            return
        timetable = self._state.timetable
        if self._submitted is not None and timetable.releases > self._submitted[0]:
            # Decided: everything up to its end has left the wheel. Newer messages there are not loaded yet.
            self._near.drop(self._submitted[1])
            self._submitted = None
        due_us = timetable.next_due_us()
        if due_us is None:
            self._near.clear()
            self._set_timer(None)
            return
        clock = self._pump.clock
        if clock.now_us() < self._paused_until_us:
            self._set_timer(None)
            self._timer = self._pump.at(self._paused_until_us, self._tick)
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
        self._timer = None if wall_us is None else self._pump.at_wall(wall_us, self._tick)

    # -- loading

    def _load(self, wall_us: int) -> None:
        """Read messages that are due soon and were not asked for, if there may be some and memory allows."""
        recent = self._soonest_us <= self._after[0]
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
        log, life = self._log, self._life
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
                self._soonest_us = 0
                self._failed(error, log)
            self._review()

        self._pump.threads.read(work, done)

    def _choose(self, until_us: int, limit: int) -> Rows:
        """Rows to load, not sorted; moves the marks past them."""
        timetable = self._state.timetable
        until_us = max(until_us, self._after[0])
        behind, recent = timetable.wheel.between(self._after, until_us, self._since)
        end = self.safe_refs_end()
        unsafe = [int(part[part[:, REF] >= end, AT].min(initial=NEVER)) for part in (behind, recent)]
        behind, recent = (some(part, part[:, REF] < end) for part in (behind, recent))
        if len(recent) > limit:
            recent = np.take(recent, np.argsort(recent[:, REF]), axis=0)
            self._since = int(recent[limit, REF])
            return recent[:limit]
        # Messages not durable yet are found later: by their ref, or by their time if beyond the mark.
        self._soonest_us = min(unsafe)
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
        else:  # Many are due at the very same microsecond: cut by ref.
            first = in_order(first)[:room]
            self._after = int(first[-1, AT]), int(first[-1, REF])
        return np.concatenate((recent, first))

    def _failed(self, error: Exception, source: PartitionLog) -> None:
        if isinstance(error, TooMuch):
            self._row_bytes = error.row_bytes
            return
        # Nothing is skipped: a message that cannot be read holds back those behind it. The operator is told.
        log.error("%s: delayed messages cannot be read: %s", self._name, error)
        if isinstance(error, Corrupt):
            self._tell.damaged(error, source)
        self._metrics.refused("delays")
        self._paused_until_us = self._pump.clock.now_us() + PAUSE_US

    # -- releasing

    def _release(self, wall_us: int) -> None:
        timetable = self._state.timetable
        if self._submitted is not None:
            return  # The last release is decided in the coming turn.
        if self._unsafe >= UNSAFE_MAX:
            return
        count, nbytes = self._state.ring.room()
        if count <= 0 or nbytes <= 0 or self._pump.full:
            self._paused_until_us = self._pump.clock.now_us() + FULL_PAUSE_US
            return
        rows = timetable.due_rows(wall_us, min(count, RELEASE_ROWS))
        taken = self._near.take(rows)
        if taken is None:
            return
        picked, body = _fitting(taken[0], min(nbytes, 4 * RELEASE_BYTES))
        count = picked.batch.num_rows
        view, _ = open_body(body, picked.columns, want_keys=self._state.options.key_index)
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
                self._paused_until_us = self._pump.clock.now_us() + pause_us

        self._tell.submit(command, body, answered)


def _fitting(picked: Picked, bytes_max: int) -> tuple[Picked, Buffer]:
    """The first messages that fit one batch, at least one, and the body of that batch."""
    batch, columns = picked.batch, picked.columns
    if batch.nbytes > RELEASE_BYTES and batch.num_rows > 1:
        batch = batch.slice(0, max(1, batch.num_rows * RELEASE_BYTES // batch.nbytes))
    body = body_of(batch, columns)
    while len(body) > bytes_max and batch.num_rows > 1:
        batch = batch.slice(0, batch.num_rows // 2)
        body = body_of(batch, columns)
    return Picked(batch, columns), body
