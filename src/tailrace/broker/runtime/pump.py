"""The one loop: commands that wait get their turn, and replies leave when their facts are durable.

The pump owns no thread and no event loop. Its host calls `turn` soon after `wake` was called, `drain`
after storage reported completions, and `tick` when the time has come that `arm` was last called with. So
the same pump runs on asyncio, in tests with virtual time, and in simulation.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from tailrace.ports import Clock, Threads

PRUNE_MIN = 1024
"""So many timers are kept before the cancelled ones among them are looked for."""


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
    ) -> None:
        self.clock = clock
        self.threads = threads
        self.full = False
        """While the disk is full: what brings messages is refused, see `broker.space_watch`."""
        self.filled: Callable[[], None] = lambda: None
        """Hook: a write found no space."""
        self.threads_only_until_us = 0
        """Set after a write on the loop was slow: until then nothing is written there."""
        self._wake = wake
        self._arm = arm
        self._ready: list[Turnable] = []
        self._gathering = False
        self._woken = False
        """Whether the next round of the event loop brings a turn."""
        self._timers = _Timers()
        self._wall_timers = _Timers()

    def ready(self, member: Turnable) -> None:
        """Give a member its turn soon; it takes care not to ask twice."""
        if not self._ready and not self._gathering and not self._woken:
            self._woken = True
            self._wake()
        self._ready.append(member)

    def gather(self, gathering: bool, later: bool = False) -> None:
        """Between `gather(True)` and `gather(False)` commands only gather; at the end all of them get their
        turn at once, or (`later`) in the next round of the event loop, with what others bring until then.

        A listener brackets the requests of one read with it: a turn at once saves a round of the event loop,
        one turn for the requests of many connections saves most of what a turn and its write cost.
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
        """One turn for every member that asked for it; one that fails does not take it from the others."""
        ready, self._ready, self._woken = self._ready, [], False
        # The wall first: what is due by it must not be stored under an earlier time, however long it takes
        # from one reading to the next.
        wall_us, now_us = self.clock.wall_us(), self.clock.now_us()
        problem: Exception | None = None
        for member in ready:
            try:
                member.turn(now_us, wall_us)
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def drain(self) -> bool:
        """Hand out the completions of storage work; true when there were any."""
        finished = self.threads.completed()
        problem: Exception | None = None
        for done, result, error in finished:
            try:
                done(result, error)
            except Exception as failure:  # The others still have to hear of theirs.
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
        """Call `action(wall_us)` when the wall clock shows a time. That it was put forward or back is noticed
        at the next `tick`, which the upkeep makes come soon."""
        timer, first = self._wall_timers.add(due_us, action)
        if first:
            self._arm_next()
        return timer

    def every(self, period_us: int, action: Callable[[int], None]) -> None:
        """Call `action(now_us)` again and again."""

        def again(now_us: int) -> None:
            self.at(now_us + period_us, again)
            action(now_us)

        self.at(self.clock.now_us() + period_us, again)

    def next_deadline_us(self) -> int | None:
        """When `tick` is due next, in steady time."""
        due_us, wall_due_us = self._timers.next_us(), self._wall_timers.next_us()
        if wall_due_us is None:
            return due_us
        wall_due_us += self.clock.now_us() - self.clock.wall_us()
        return wall_due_us if due_us is None else min(due_us, wall_due_us)

    def tick(self) -> None:
        """Run what is due, and arm the next."""
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
    """Timers by one clock, the next first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Timer]] = []
        self._count = 0
        self._prune_at = PRUNE_MIN

    def add(self, due_us: int, action: Callable[[int], None]) -> tuple[Timer, bool]:
        """A new timer, and whether it is the next of all."""
        timer = Timer(due_us, action)
        if len(self._heap) >= self._prune_at:
            # Most timers are cancelled long before they are due: their memory goes in time, not at the end.
            self._heap = [item for item in self._heap if item[2].action is not None]
            heapq.heapify(self._heap)
            self._prune_at = max(PRUNE_MIN, 2 * len(self._heap))
        self._count += 1
        heapq.heappush(self._heap, (due_us, self._count, timer))
        return timer, self._heap[0][2] is timer

    def next_us(self) -> int | None:
        """When the next one is due."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def run(self, time_us: int) -> None:
        """Run those that are due."""
        while (due_us := self.next_us()) is not None and due_us <= time_us:
            timer = heapq.heappop(self._heap)[2]
            if timer.action is not None:
                timer.action(time_us)
