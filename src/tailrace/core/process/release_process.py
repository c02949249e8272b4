"""Release of delayed messages: prefetched before they are due, appended to the readable log at ticks.

    delayed ──AHEAD_US before it is due──▶ prefetched ──at the tick after it is due──▶ ReleaseDue ──▶ appended

The delay queue of the home partition knows of every delayed message where it is stored (its *ref*: frame and
row), when it is due, and its id; the body lies in a scheduled frame, anywhere in the log. Reading it at the
moment at which it is due would be too late, so it is read some seconds ahead and kept on the shelf (see
`core.process.process`). This process decides by due times and refs only, and never sees a body.

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
    12:00:00.020    tick: the shelf drops everything up to (.009, ref of B); C is due ──▶ ReleaseDue

*A release is a command like any other.* It is decided on the state of its turn, and that state may have
changed since the command was made. The core compares the refs: if B was cancelled in between, the rows due up
to `until` are [A] and not [A, B]. Then nothing is appended, and the next tick tries with [A]. At most one
release is undecided at a time, and at most `UNSAFE_MAX` wait for the disk. Power may fail at any moment: a
release is in the log as a whole or not at all, and the next life releases what is left.

*Nothing is read twice.* Two marks tell what was read. `after` is a place in the order (due time, ref): all
messages up to it were read, except those stored later. `since` parts those: no message whose ref is at or
above `since` was read. Suppose everything due up to 12:00:04 was read while entry 90 was the first that was
not durable. Then D is stored in entry 93, due at 12:00:02: D lies before `after`, its ref lies above
`since` = (90, row 0), so the next look loads D, and none of the others up to 12:00:04.
A message is read only when its frame is stored: until then the write may still fail. The marks move when a
read has succeeded, so that a message is released only if it lies behind both; after a failed read they stand
where they were, and it is done again after a pause. A message that cannot be read is never skipped: it holds
those behind it.

*Little memory.* The shelf is bounded. If it is full when something is due that is not on it, because that was
stored later than what the shelf holds, the shelf is cleared and reading begins anew with what is due first.
Without that, those on the shelf would wait for a message that has no room beside them.

*Clocks.* Messages are due by the wall clock, which may be put forward or back at any time. Pauses after a
failed read or a refusal are durations, in steady time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.core.collections.timing_wheel import (
    AT,
    NEVER,
    REF,
    REF_MAX,
    ROW_BITS,
    TICK_US,
    Rows,
    in_order,
    ref_of,
    some,
)
from tailrace.core.delay.delay_queue import DelayQueue
from tailrace.core.model.commands import Published, Reply
from tailrace.core.model.facts import Delayed
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.process.process import (
    After,
    Answered,
    AtWall,
    Cancel,
    Count,
    Due,
    Effect,
    Event,
    FactsStored,
    Forget,
    Found,
    Log,
    Now,
    Read,
    Submit,
)
from tailrace.errors import Overloaded

AHEAD_US = 4_000_000
"""How long before they are due messages are read from the log."""
STAGGER = 16
STAGGER_US = 50_000
"""Step between the moments at which partitions look ahead, so that they do not all look at once."""
RELEASE_ROWS = 10_000
"""Most messages of one release. A backlog continues at the next tick."""
LOAD_ROWS = 65_536
ROW_BYTES = 512
"""Assumed size of a message before the first load."""
UNSAFE_MAX = 8
"""Releases that may wait for the disk."""
PAUSE_US = 1_000_000
FULL_PAUSE_US = 100_000
"""Pause when there is no room for the messages that are due."""
NONE, ALL = (-1, 0), (NEVER, REF_MAX)
"""Places in the order before and behind every message."""


class LoadDelayed(msgspec.Struct, frozen=True, eq=False):
    """Read the messages of these rows, which are not sorted, onto the shelf. If they have more than
    `bytes_max` bytes, none is kept, unless it is a single one."""

    rows: Rows
    bytes_max: int


class DelayedLoaded(msgspec.Struct, frozen=True):
    """A load has ended: the average size of its messages, and whether they are kept."""

    row_bytes: int
    kept: bool = True


class ReleaseRows(msgspec.Struct, frozen=True, eq=False):
    """Append the messages of these rows, or the first of them that go into one batch. The rows are all that
    wait up to the last one, in order, and are on the shelf, which makes a `ReleaseDue` of this."""

    rows: Rows
    bytes_max: int


class ReleaseRoom(Protocol):
    """How much the home partition can append."""

    def room(self) -> tuple[int, int]:
        """Messages and bytes."""
        ...


class PrefetchRoom(Protocol):
    """How much the shelf can take."""

    def free_bytes(self, until: tuple[int, int]) -> int:
        """Room for messages once those up to a (due time, ref) are forgotten; 0 or less if there is none."""
        ...


class _Marks(NamedTuple):
    """What was read: everything up to (after_us, after_ref) in the order with a ref below `since`."""

    after_us: int
    after_ref: int
    since: int

    def cover(self, rows: Rows) -> npt.NDArray[np.bool_]:
        at, ref = rows[:, AT], rows[:, REF]
        before = (at < self.after_us) | ((at == self.after_us) & (ref <= self.after_ref))
        covered: npt.NDArray[np.bool_] = before & (ref < self.since)
        return covered


_NOTHING = _Marks(-1, 0, 0)


class ReleaseProcess:
    """Prefetch and release on one partition."""

    WATCHES: frozenset[type] = frozenset((Delayed,))

    def __init__(
        self,
        home: TopicPartition,
        topic_id: int,
        queue: DelayQueue,
        capacity: ReleaseRoom,
        shelf: PrefetchRoom,
    ) -> None:
        self._home = home
        self._topic_id = topic_id
        self._queue = queue
        self._capacity = capacity
        self._shelf = shelf
        self._margin_us = AHEAD_US // 4 + home.partition % STAGGER * STAGGER_US
        """Load more when the marks reach less far ahead than this."""
        self._stored_end = ref_of((queue.wheel.newest_ref() >> ROW_BITS) + 1, 0)
        """All refs below are durable."""
        self._soonest_us = NEVER
        """Earliest due time of the messages stored since the last look."""
        self._loaded = _NOTHING
        self._loading: _Marks | None = None
        """The marks as they will be when the load under way has succeeded."""
        self._row_bytes = ROW_BYTES
        self._releases = queue.releases
        """The releases that this process has seen decided."""
        self._undecided = False
        self._unsafe = 0
        self._paused = False
        self._look_us: int | None = None
        """When the next look is due."""

    def step(self, event: Event, now: Now) -> Sequence[Effect]:
        """See `Process.step`."""
        effects: Sequence[Effect] = ()
        if isinstance(event, Answered):
            return self._answered(event.reply)
        if isinstance(event, FactsStored):
            self._stored(event.facts)
        elif isinstance(event, Found):
            effects = self._found(event.result)
        elif isinstance(event, Due) and event.tag == "pause":
            self._paused = False
        elif isinstance(event, Due):
            self._look_us = None
        return (*effects, *self._review(now))

    def _stored(self, facts: Sequence[Delayed]) -> None:
        for fact in facts:
            times = fact.view.deliver_at_us
            assert times is not None
            # Staged messages may have become due while they were applied.
            first_us = max(int(times.min()), fact.wall_us or fact.append_time_us)
            self._soonest_us = min(self._soonest_us, first_us)
        self._stored_end = ref_of(facts[-1].entry + 1, 0)

    def _review(self, now: Now) -> Sequence[Effect]:
        """Load messages that are due soon, release those that are due, set the time of the next look."""
        if now.damaged:
            return self._look_at(None)
        queue, wall_us, gone = self._queue, now.wall_us, NONE
        if queue.releases > self._releases:
            # Decided: everything up to its end has left the queue. Newer messages there are not loaded yet.
            self._releases, self._undecided, gone = queue.releases, False, queue.released
        due_us = queue.next_due_us()
        if due_us is None and self._loaded is not _NOTHING:
            self._loaded, gone = _NOTHING, ALL
        effects: list[Effect] = [] if gone is NONE else [Forget(gone)]
        if due_us is not None and due_us <= wall_us + AHEAD_US and not self._paused:
            effects += self._load(wall_us, gone)
            if due_us <= wall_us:
                effects += self._release(now, gone)
        if due_us is None or self._paused:
            return (*effects, *self._look_at(None))
        next_us = -(-due_us // TICK_US) * TICK_US
        reach = self._loaded if self._loading is None else self._loading
        ahead_us = max(reach.after_us - self._margin_us, due_us - AHEAD_US)
        if ahead_us > wall_us:
            next_us = min(next_us, ahead_us)
        return (*effects, *self._look_at(max(next_us, (wall_us // TICK_US + 1) * TICK_US)))

    def _look_at(self, wall_us: int | None) -> Sequence[Effect]:
        if wall_us == self._look_us:
            return ()
        self._look_us = wall_us
        return (Cancel("look") if wall_us is None else AtWall("look", wall_us),)

    def _pause(self, delay_us: int) -> Effect:
        self._paused = True
        return After("pause", delay_us)

    # -- loading

    def _load(self, wall_us: int, gone: tuple[int, int]) -> Sequence[Effect]:
        """Read messages that are due soon and were not read, if there may be some and memory allows."""
        reach_us = self._loaded.after_us
        needed = self._soonest_us <= reach_us or reach_us < wall_us + self._margin_us
        if self._loading is not None or not needed:
            return ()
        room = self._shelf.free_bytes(gone)
        if room <= 0:
            return ()
        limit = max(1, min(LOAD_ROWS, room // self._row_bytes))
        rows, marks = self._choose(wall_us + AHEAD_US, limit)
        if not len(rows):
            self._loaded = marks
            return ()
        self._loading = marks
        return (Read("load", LoadDelayed(rows, 2 * room)),)

    def _choose(self, until_us: int, limit: int) -> tuple[Rows, _Marks]:
        """Rows to load, not sorted; and the marks behind them."""
        marks, end = self._loaded, self._stored_end
        until_us = max(until_us, marks.after_us)
        parts = self._queue.wheel.between(marks[:2], until_us, marks.since)
        # Messages that are not durable yet are found when they are stored.
        behind, recent = (some(part, part[:, REF] < end) for part in parts)
        if len(recent) > limit:
            recent = np.take(recent, np.argsort(recent[:, REF]), axis=0)
            return recent[:limit], marks._replace(since=int(recent[limit, REF]))
        self._soonest_us = NEVER
        marks = marks._replace(since=end)
        room = limit - len(recent)
        if not room:
            return recent, marks
        if len(behind) <= room:
            return np.concatenate((recent, behind)), _Marks(until_us, REF_MAX, end)
        cut_us = int(np.partition(behind[:, AT], room - 1)[room - 1])
        first = some(behind, behind[:, AT] <= cut_us)
        if len(first) <= 2 * room:
            marks = _Marks(cut_us, REF_MAX, end)
        else:  # Many are due at the very same microsecond: cut by ref.
            first = in_order(first)[:room]
            marks = _Marks(int(first[-1, AT]), int(first[-1, REF]), end)
        return np.concatenate((recent, first)), marks

    def _found(self, result: DelayedLoaded | Refusal) -> Sequence[Effect]:
        assert self._loading is not None
        marks, self._loading = self._loading, None
        if isinstance(result, DelayedLoaded) and result.kept:
            self._loaded, self._row_bytes = marks, result.row_bytes
            return ()
        self._soonest_us = 0  # The marks stay: look again.
        if isinstance(result, DelayedLoaded):
            self._row_bytes = result.row_bytes
            return ()
        # Nothing is skipped: a message that cannot be read holds back those behind it. The operator is told.
        text = f"{self._home}: delayed messages cannot be read: {result.message}"
        return (Log("error", text), Count(), self._pause(PAUSE_US))

    # -- releasing

    def _release(self, now: Now, gone: tuple[int, int]) -> Sequence[Effect]:
        if self._undecided or self._unsafe >= UNSAFE_MAX:
            return ()  # An undecided release is decided in the coming turn.
        count, nbytes = self._capacity.room()
        if count <= 0 or nbytes <= 0 or now.full:
            return (self._pause(FULL_PAUSE_US),)
        rows = self._queue.due_rows(now.wall_us, min(count, RELEASE_ROWS))
        loaded = self._loaded.cover(rows)
        if not loaded.all():  # Messages may not overtake one another.
            rows = rows[: int(loaded.argmin())]
        if not len(rows):
            return self._clear(gone)
        self._undecided = True
        self._unsafe += 1
        release = ReleaseRows(rows, nbytes)
        return (Submit("release", self._home, release, None, self._topic_id, sure=False),)

    def _clear(self, gone: tuple[int, int]) -> Sequence[Effect]:
        """The first message is due and not on the shelf: if that is full, it is cleared."""
        if self._loading is not None or self._shelf.free_bytes(gone) > 0:
            return ()
        self._loaded = _NOTHING
        return (Forget(ALL),)

    def _answered(self, reply: Reply) -> Sequence[Effect]:
        self._unsafe -= 1
        if isinstance(reply, Published):
            return ()
        self._undecided = False
        if not isinstance(reply, Refusal):
            return ()  # Other rows were due: the next tick tries again.
        return (self._pause(FULL_PAUSE_US if reply.code == Overloaded.code else PAUSE_US),)
