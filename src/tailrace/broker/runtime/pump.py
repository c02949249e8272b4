"""The one loop of a node: members get a turn, storage completions are handed out, timers fire.

All state of a broker is touched by one thread, and the pump says in which order. It owns no thread and no
event loop itself. A *host* drives it by three calls, so the same pump runs on asyncio, in tests with virtual
time, and in the simulator:

    the pump asks           the host answers with
    wake()                  turn()    soon: every member that is ready decides and applies its commands
    threads have finished   drain()   the callbacks of finished storage work run, replies leave
    arm(due_us)             tick()    at the time given last: timers that are due fire

*Members* are partitions and whatever else collects work for a turn. A member calls `ready(self)` once, when
its first piece of work arrives, and does all of it in its turn. That is what makes batches. Suppose three
requests arrive in one read of a socket, two for partition 0 and one for partition 1:

    gather(True)      the listener brackets the requests of one read
      submit to 0     partition 0: ready(0)
      submit to 1     partition 1: ready(1)
      submit to 0     partition 0 is ready already
    gather(False)     turn(): 0 decides two commands ──▶ one write; 1 decides one ──▶ another write
    …
    drain()           storage finished the write of 0: its two replies leave

Without the bracket, the first `ready` would call `wake`, and all three would get their turn in the next
round of the event loop. Turns do not wait for storage: those that a partition makes while one of its writes
is under way queue up at the storage threads and become one write, the group commit (`storage.threads`).

One time is read for a whole turn, so that all commands of a turn are decided at the same moment. A member
that raises does not take the turn from the others; the first error is raised when all have had theirs.

*Timers* run on steady time (`at`) or on the wall clock (`at_wall`), which may jump. Cancelling a timer only
empties it. An empty timer leaves the heap when it comes up, or when the heap has grown to twice the size that
it had after the last clean-up, so that timers which are set and cancelled all day take no memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from typing import Protocol

from tailrace.ports import Clock, Threads

SLOW_WRITE_US = 10_000
PRUNE_MIN = 1024
"""Cancelled timers are removed from the heap when it has this size or more."""


class Turnable(Protocol):
    """A member of the pump that has work for the next turn."""

    def turn(self, now_us: int, wall_us: int) -> None:
        """Do all the work that waits."""
        ...


class Timer:
    """A call in the future, by steady time or by the wall clock; `cancel` makes it a no-op."""

    __slots__ = ("action", "due_us")

    def __init__(self, due_us: int, action: Callable[[int], None]) -> None:
        self.due_us = due_us
        self.action: Callable[[int], None] | None = action

    def cancel(self) -> None:
        """Forget the call."""
        self.action = None


class Pump:
    """Ready queue, timers and storage completions of one node."""

    def __init__(
        self,
        clock: Clock,
        threads: Threads,
        wake: Callable[[], None] = lambda: None,
        arm: Callable[[int], None] = lambda due_us: None,
        filled: Callable[[], None] = lambda: None,
    ) -> None:
        self.clock = clock
        self.threads = threads
        self.filled = filled
        """Called when a write found no space on the disk."""
        self.full = False
        """The disk is full: commands that bring messages are refused, see `broker.upkeep.space_watch`."""
        self.threads_only_until_us = 0
        """Until this steady time nothing is written on the loop, because a write there was slow."""
        self.writing: dict[object, int] = {}
        """Writes of the storage threads under way, the oldest first, and since when."""
        self._wake = wake
        self._arm = arm
        self._ready: list[Turnable] = []
        self._gathering = False
        self._woken = False
        """Whether `wake` was called since the last turn."""
        self._timers = _Timers()
        self._wall_timers = _Timers()

    def refuse_messages(self, full: bool) -> None:
        """From now on the disk is full, or is so no more."""
        self.full = full

    def ready(self, member: Turnable) -> None:
        """Give a member its turn soon. The member must not ask twice before it."""
        if not self._ready and not self._gathering and not self._woken:
            self._woken = True
            self._wake()
        self._ready.append(member)

    def gather(self, gathering: bool, later: bool = False) -> None:
        """Collect commands between `gather(True)` and `gather(False)`; then turn at once, or (`later`) in the
        next round of the event loop, together with what other connections bring until then.

        A listener brackets the requests of one read. A turn at once saves a round of the event loop; one turn
        for the requests of many connections saves most of the cost of turns and writes.
        """
        self._gathering = gathering
        if not gathering and self._ready:
            if not later:
                self.turn()
            elif not self._woken:
                self._woken = True
                self._wake()

    @property
    def busy(self) -> bool:
        """Whether a turn is due."""
        return bool(self._ready)

    def turn(self) -> None:
        """Give every ready member its turn, also when one of them raises."""
        ready, self._ready, self._woken = self._ready, [], False
        # Read the wall clock first: a message due by the wall clock must not get an earlier append time,
        # however much time passes between the two readings.
        wall_us, now_us = self.clock.wall_us(), self.clock.now_us()
        problem: Exception | None = None
        for member in ready:
            try:
                member.turn(now_us, wall_us)
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def is_slow(self, now_us: int) -> bool:
        """Whether a write on the loop may take long: one did lately, or the disk lets another one wait now,
        be it of another log. The whole broker would stand still in it, and it may be for seconds."""
        since_us = next(iter(self.writing.values()), now_us)
        return now_us < self.threads_only_until_us or now_us - since_us > SLOW_WRITE_US

    def drain(self) -> bool:
        """Run the callbacks of finished storage work; true when there were any."""
        finished = self.threads.completed()
        problem: Exception | None = None
        for done, result, error in finished:
            try:
                done(result, error)
            except Exception as failure:  # The other callbacks must still run.
                problem = problem or failure
        if problem is not None:
            raise problem
        return bool(finished)

    def at(self, due_us: int, action: Callable[[int], None]) -> Timer:
        """Call `action(now_us)` at a steady time."""
        timer, first = self._timers.add(due_us, action)
        if first:
            self._arm_next()
        return timer

    def at_wall(self, due_us: int, action: Callable[[int], None]) -> Timer:
        """Call `action(wall_us)` when the wall clock shows a time. A jump of the wall clock is noticed at the
        next `tick`; periodic upkeep makes sure that one comes soon."""
        timer, first = self._wall_timers.add(due_us, action)
        if first:
            self._arm_next()
        return timer

    def every(self, period_us: int, action: Callable[[int], None]) -> None:
        """Call `action(now_us)` once in every period, for ever."""
        self.at(self.clock.now_us() + period_us, partial(self._again, period_us, action))

    def _again(self, period_us: int, action: Callable[[int], None], now_us: int) -> None:
        self.at(now_us + period_us, partial(self._again, period_us, action))
        action(now_us)

    def next_deadline_us(self) -> int | None:
        """Steady time at which `tick` is due next; None when no timer is set."""
        due_us, wall_due_us = self._timers.next_us(), self._wall_timers.next_us()
        if wall_due_us is None:
            return due_us
        wall_due_us += self.clock.now_us() - self.clock.wall_us()
        return wall_due_us if due_us is None else min(due_us, wall_due_us)

    def tick(self) -> None:
        """Fire the timers that are due, and arm the next."""
        wall_us, now_us = self.clock.wall_us(), self.clock.now_us()
        try:
            self._timers.run(now_us)
            self._wall_timers.run(wall_us)
        finally:
            self._arm_next()

    def _arm_next(self) -> None:
        """The host has one timer, and each `arm` replaces the one before: it is set for the next of all."""
        due_us = self.next_deadline_us()
        if due_us is not None:
            self._arm(due_us)


class _Timers:
    """A heap of the timers of one clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Timer]] = []
        self._count = 0
        self._prune_at = PRUNE_MIN

    def add(self, due_us: int, action: Callable[[int], None]) -> tuple[Timer, bool]:
        """Add a timer; also returns whether it is due first of all."""
        timer = Timer(due_us, action)
        if len(self._heap) >= self._prune_at:
            # Most timers are cancelled long before they are due: do not keep them until then.
            self._heap = [item for item in self._heap if item[2].action is not None]
            heapq.heapify(self._heap)
            self._prune_at = max(PRUNE_MIN, 2 * len(self._heap))
        self._count += 1
        heapq.heappush(self._heap, (due_us, self._count, timer))
        return timer, self._heap[0][2] is timer

    def next_us(self) -> int | None:
        """Time of the first timer; None when there is none."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def run(self, time_us: int) -> None:
        """Fire the timers that are due at a time."""
        while (due_us := self.next_us()) is not None and due_us <= time_us:
            timer = heapq.heappop(self._heap)[2]
            if timer.action is not None:
                timer.action(time_us)
