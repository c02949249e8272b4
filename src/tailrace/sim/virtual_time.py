"""Virtual time for simulated worlds, and the broker's process in it: started, stopped, started again.

The world's clock is the true time: clients go by it, and the accounts are made in it. The wall clock of the
broker's machine may be wrong, by `skew_us`, and be put forward or back at any time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from tailrace.broker.engine import Engine
from tailrace.broker.runtime.clock import ManualClock
from tailrace.broker.runtime.replay_debt import ReplayBounds
from tailrace.cluster.embedded import MemoryCoordinator
from tailrace.sim.late_storage import CutStore, LateThreads

SECOND_US = 1_000_000
REPLAY_BOUNDS = ReplayBounds(us_max=4_000, us_min=1_000)
"""Worlds are small: with those of a real broker, nothing but a clean stop would leave a snapshot."""
SKEWS_S = (0, 0, -10, -3_000, 1, 3_600)
"""How far a machine's clock is ahead; producers may be ahead of it by an hour at most."""


class Violation(AssertionError):
    """A promise was broken."""


class VirtualTime:
    """What every world with a broker has: chance, a clock, what is to happen, and what outlives a broker."""

    clocks = 0.4
    """In so many of the seeds the clock of the broker's machine jumps."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()
        self.clock = ManualClock()
        self._clock_random = Random(f"the clock of {seed}")
        """Chance of its own, so that the rest of a seed is the same without it."""
        self.skew_us = 0
        """How far the wall clock of the broker's machine is ahead of the true time."""
        self.clock_jumps = self._clock_random.random() < self.clocks
        self.life: BrokerRun | None = None
        """The broker, while it runs."""
        self.store = CutStore(self.found_cut)
        self.coordinator = MemoryCoordinator()
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._event_count = 0

    def found_cut(self, name: str, end_offset: int) -> None:
        """A log that a failed sync spoilt was opened again, and ends earlier by now."""

    def later(self, delay_us: int, action: Callable[[], None]) -> None:
        """Do something after a while; in order where the time is the same."""
        self._event_count += 1
        due_us = self.clock.now_us() + max(0, delay_us)
        heapq.heappush(self._events, (due_us, self._event_count, action))

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        until_us = self.clock.now_us() + int(seconds * SECOND_US)
        while self._events and self._events[0][0] <= until_us:
            self._step()
        self.clock.set_us(until_us)

    def _step(self) -> None:
        """What happens next."""
        due_us, _, action = heapq.heappop(self._events)
        self.clock.set_us(due_us)
        action()

    def put_clock(self, skew_s: int | None = None) -> None:
        """Put the wall clock of the broker's machine forward or back, if it does so in this seed."""
        if not self.clock_jumps:
            return
        before_us, skew_s = self.skew_us, self._clock_random.choice(SKEWS_S) if skew_s is None else skew_s
        self.skew_us = skew_s * SECOND_US
        where = "over a restart" if self.life is None else "while the broker runs"
        if self.skew_us != before_us:
            way = "forward" if self.skew_us > before_us else "back"
            self.seen[f"clock put {way} {where}"] += 1

    def chance(self, probability: float) -> bool:
        """Whether it happens this time."""
        return self.random.random() < probability

    def delay_us(self) -> int:
        """How long a message is on its way."""
        return self.random.choice((50, 200, 1_000, 30_000))


class SimulatedClock:
    """See `Clock`: steady time begins with what the wall clock shows when the broker starts."""

    def __init__(self, world: VirtualTime) -> None:
        self._world = world
        self.skew_us = world.skew_us
        """How far steady time is ahead of the true time."""

    def now_us(self) -> int:
        """See `Clock.now_us`."""
        return self._world.clock.now_us() + self.skew_us

    def wall_us(self) -> int:
        """See `Clock.wall_us`."""
        return self._world.clock.now_us() + self._world.skew_us


class BrokerRun:
    """One run of the broker's process."""

    def __init__(self, world: VirtualTime) -> None:
        self.alive = True
        self.spoilt = False
        """Whether a failure is waiting to happen in one of its logs."""
        self.world = world
        self.clock = SimulatedClock(world)
        self._armed_us = 0
        self.threads = LateThreads(world.random, self.later, world.store, self._drain, world.seen)
        stores: Any = {"file": world.store}
        self.engine = Engine(
            self.clock,
            self.threads,
            stores,
            world.coordinator,
            wake=self._wake,
            arm=self._arm,
            entropy=world.random.randbytes,
            replay_bounds=REPLAY_BOUNDS,
        )
        self.engine.open()
        self.replayed_us = sum(runtime.upkeep.debt.us for runtime in self.engine.topics.runtimes())
        """An estimate of what this start replayed, in microseconds."""

    def later(self, delay_us: int, action: Callable[[], None]) -> None:
        """Call back, unless the process has ended by then."""
        self.world.later(delay_us, lambda: action() if self.alive else None)

    def _wake(self) -> None:
        self.later(self.world.random.choice((0, 10, 1000)), self.engine.pump.turn)

    def _arm(self, due_us: int) -> None:
        """As with the one timer of a real host, the latest call counts."""
        if due_us != self._armed_us:
            self._armed_us = due_us
            self.later(max(0, due_us - self.clock.now_us()), lambda: self._tick(due_us))

    def _tick(self, due_us: int) -> None:
        if due_us == self._armed_us:
            self._armed_us = 0
            self.engine.pump.tick()

    def _drain(self) -> None:
        self.engine.pump.drain()
