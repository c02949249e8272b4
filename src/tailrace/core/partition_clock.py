"""The clock of one partition: durations run on it, across restarts, whatever the wall clock did meanwhile.

Deadlines, back-offs and windows are kept in the log as times of this clock. So it must never show less than
the last append time, or a lease of three seconds would be held until the wall clock has caught up; and it
must go on, or nothing would ever end. If the wall clock was put back before the start of a broker, the
partition's clock therefore *leads*:

    partition time = now + lead        lead = max(0, last append time - now), when the partition is opened

`now` is the broker's own steady time: wall time at its start plus monotonic time. Time during which no broker
ran counts, unless the wall clock was put back over it. The lead shrinks by one part in a hundred: partition
time then runs that much slower, so a duration is at most 1.02 % longer than it should be, and times in the
log return to wall time. For example, a lead of 10 s is gone after 1000 s. A faster correction would show in
leases and back-offs; a slower one would leave append times wrong for longer (an hour of lead already takes
more than four days).

Which time counts where; "wall" is the machine's clock at the moment, jumps included:

    partition   append times; leases, back-offs, `starvation_ms`; receipts that are remembered; dedup windows,
                also of delayed messages; idle producers and writers; staged batches without a decision;
                retention by time; on coordinators the time that a member has to give a partition up
    wall        `deliver_at` and the release of delayed messages; `expires_at`; ticks of cron schedules and
                since when one counts; how far a `timestamp` may lie ahead
    steady      whatever does not outlive the broker: sessions, polls, pauses before another attempt, syncs

Facts hold partition times, and wall times under names of their own; `apply` uses nothing else.
"""

from __future__ import annotations

SLEW = 100
"""The lead shrinks by one microsecond for every `SLEW` microseconds that pass."""


class PartitionClock:
    """Translates between the broker's steady time and the time of one partition; both only grow."""

    __slots__ = ("_lead_us", "_since_us")

    def __init__(self, append_time_us: int, now_us: int) -> None:
        self._lead_us = max(0, append_time_us - now_us)
        self._since_us = now_us

    @property
    def lead_us(self) -> int:
        """The lead when the partition was opened; it has only shrunk since."""
        return self._lead_us

    @property
    def opened_us(self) -> int:
        """The partition time when the partition was opened."""
        return self._since_us + self._lead_us

    def time_us(self, now_us: int) -> int:
        """The partition time at a steady time."""
        lead_us = self._lead_us
        if lead_us:
            lead_us -= (now_us - self._since_us) // SLEW
            if lead_us > 0:
                return now_us + lead_us
        return now_us

    def steady_us(self, time_us: int) -> int:
        """The first steady time at which the partition time is at least `time_us`."""
        since_us, lead_us = self._since_us, self._lead_us
        if time_us >= since_us + lead_us * SLEW:  # The lead is gone by then.
            return time_us
        ahead_us = time_us - since_us - lead_us
        return since_us + max(0, -(-ahead_us * SLEW // (SLEW - 1)))
