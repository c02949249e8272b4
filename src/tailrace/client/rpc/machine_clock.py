"""The machine's clocks as clients use them; see `ports.ClientClock`."""

from __future__ import annotations

import time

_ELAPSED = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The clock of leases: a laptop that was asleep has lost its leases all the same."""


class MachineClock:
    """`ClientClock` on the clocks of this machine."""

    wall_ns = staticmethod(time.time_ns)

    def elapsed_ms(self) -> float:
        """Time that passed, on whatever the machine spent it."""
        return time.clock_gettime(_ELAPSED) * 1000
