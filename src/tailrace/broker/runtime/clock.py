"""The broker's clock, in two readings: steady time for durations, wall time for users' absolute times.

Steady time is wall time at the start plus monotonic time, slewed to wall time, never backwards. A wall clock
that is put right by an hour is followed at one part in a hundred, so that no lease notices. What was asked
for by the wall clock (`deliver_at`, `expires_at`, cron) follows it at once. `core.partition_clock` lists what
runs on which.
"""

from __future__ import annotations

import time

_SLEW = 0.01
"""At most one part in a hundred: a wall clock that jumps is followed, slowly."""


_REVIEW_US = 10_000
"""How often the wall clock is looked at."""


class SystemClock:
    """`Clock` on the machine's clocks."""

    def __init__(self) -> None:
        self._monotonic_ns = time.monotonic_ns()
        self._base_us = self._last_us = time.time_ns() // 1000

    def now_us(self) -> int:
        """Microseconds since 1970 UTC, never less than before."""
        elapsed_us = (time.monotonic_ns() - self._monotonic_ns) // 1000
        now_us = self._base_us + elapsed_us
        if elapsed_us >= _REVIEW_US:
            drift_us = time.time_ns() // 1000 - now_us
            step_us = int(elapsed_us * _SLEW)
            now_us += max(-step_us, min(step_us, drift_us))
            self._monotonic_ns += elapsed_us * 1000
            self._base_us = now_us
        if now_us < self._last_us:
            return self._last_us
        self._last_us = now_us
        return now_us

    def wall_us(self) -> int:
        """Microseconds since 1970 UTC as the machine's clock shows them."""
        return time.time_ns() // 1000


class ManualClock:
    """A clock that stands still until it is moved; for tests and simulation."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = now_us
        self.skew_us = 0
        """How far the wall clock is ahead of the steady time; set it to put the wall clock forward or
        back."""

    def now_us(self) -> int:
        """The virtual time."""
        return self._now_us

    def wall_us(self) -> int:
        """What a clock on the wall shows."""
        return self._now_us + self.skew_us

    def set_us(self, now_us: int) -> None:
        """Move forward to a time; moving back is a mistake of the caller."""
        assert now_us >= self._now_us, "virtual time never goes back"
        self._now_us = now_us

    def start_again(self) -> None:
        """A broker starts: its steady time begins with what the wall clock shows, be that less than
        before."""
        self._now_us, self.skew_us = self.wall_us(), 0
