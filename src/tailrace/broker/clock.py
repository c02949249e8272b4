"""The broker's clock: wall time at the start plus monotonic time, slewed to wall time, never backwards."""

from __future__ import annotations

import time

_SLEW = 0.01
"""At most one part in a hundred: a wall clock that jumps is followed, slowly."""


class SystemClock:
    """`Clock` on the machine's clocks."""

    def __init__(self) -> None:
        self._monotonic_ns = time.monotonic_ns()
        self._now_us = time.time_ns() // 1000

    def now_us(self) -> int:
        """Microseconds since 1970 UTC, never less than before."""
        monotonic_ns = time.monotonic_ns()
        elapsed_us = (monotonic_ns - self._monotonic_ns) // 1000
        if elapsed_us <= 0:
            return self._now_us
        self._monotonic_ns += elapsed_us * 1000
        drift_us = time.time_ns() // 1000 - (self._now_us + elapsed_us)
        step_us = int(elapsed_us * _SLEW) + 1
        self._now_us += elapsed_us + max(-step_us, min(step_us, drift_us))
        return self._now_us


class ManualClock:
    """A clock that stands still until it is moved; for tests and simulation."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self._now_us = now_us

    def now_us(self) -> int:
        """The virtual time."""
        return self._now_us

    def set_us(self, now_us: int) -> None:
        """Move forward to a time; moving back is a mistake of the caller."""
        assert now_us >= self._now_us, "virtual time never goes back"
        self._now_us = now_us
