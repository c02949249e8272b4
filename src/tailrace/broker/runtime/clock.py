"""The broker's clock, in two readings: steady time for durations, wall time for users' absolute times.

Steady time is wall time at the start plus monotonic time, slewed to wall time, never backwards. When the wall
clock is corrected by an hour, steady time follows at one part in a hundred, so that no lease notices: it
arrives after about 100 hours. Times that users gave by the wall clock (`deliver_at`, `expires_at`, cron)
follow it at once. `core.partition_clock` lists which time is meant where.
"""

from __future__ import annotations

import time

_SLEW = 0.01
"""Greatest part by which steady time is sped up or slowed down to follow the wall clock."""


_REVIEW_US = 10_000
"""Least time between two comparisons with the wall clock."""


class SystemClock:
    """`Clock` on the machine's clocks."""

    def __init__(self) -> None:
        self._monotonic_ns = time.monotonic_ns()
        self._base_us = self._last_us = time.time_ns() // 1000

    def now_us(self) -> int:
        """Steady time, in microseconds since 1970 UTC; never less than before."""
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
        """Wall time of the machine, in microseconds since 1970 UTC."""
        return time.time_ns() // 1000


class ManualClock:
    """A clock that stands still until it is moved; for tests and simulation."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = now_us
        self.skew_us = 0
        """Lead of the wall clock over steady time; set it to move the wall clock forward or back."""

    def now_us(self) -> int:
        """Virtual steady time."""
        return self._now_us

    def wall_us(self) -> int:
        """Virtual wall time."""
        return self._now_us + self.skew_us

    def set_us(self, now_us: int) -> None:
        """Move forward to a time; moving back is a bug of the caller."""
        assert now_us >= self._now_us, "virtual time never goes back"
        self._now_us = now_us

    def start_again(self) -> None:
        """A broker starts: its steady time begins at the wall time, even if that is less than before."""
        self._now_us, self.skew_us = self.wall_us(), 0
