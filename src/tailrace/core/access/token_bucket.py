"""A token bucket: how much in how much time, in whole numbers.

A bucket of rate 100 holds at most one second's worth, 100 tokens, and is full in the beginning. It gains 100
tokens a second; what is taken must be in it:

    take 60 at 0 s         0          40 are left
    take 60 at 0 s         200 ms     so long until 60 are in it; nothing was taken
    take 60 at 0.2 s       0          0 are left
    take 250 at 0.2 s      1 s        more than it can ever hold: it has to be full
    take 250 at 1.2 s      0          150 are owed, so the bucket has something to give again at 2.7 s

So in any time t no more than `rate * t` and one second's worth is taken, or `rate * t` and the largest amount
if that is more. What is only known afterwards, such as the size of an answer, is `charge`d, and may be owed.

*Nobody starves.* Small amounts would keep a bucket so empty that a large one never finds enough in it. So the
largest amount that was refused is remembered. If it is still not taken after a second in which nothing was
owed, as much is kept from smaller ones for the next two, in which the bucket fills up for it. If it does not
come, it is forgotten; then, as after it was served, the small ones have at least a second again.
"""

from __future__ import annotations

SECOND_US = 1_000_000
WAIT_US_MAX = 3_600 * SECOND_US
"""No wait that is told is longer; also what a bucket of rate 0 tells, which never gives anything."""


class TokenBucket:
    """One bucket. Its time never goes back: an earlier one counts as the latest."""

    __slots__ = ("_level", "_since_us", "_us", "_wanted", "rate")

    def __init__(self, rate: int, now_us: int) -> None:
        self.rate = rate
        """Tokens per second, and the most it holds."""
        self._level = rate * SECOND_US
        """Millionths of a token; negative while some are owed."""
        self._us = now_us
        self._wanted = 0
        """The largest amount that was refused and has not been taken since; in millionths."""
        self._since_us = 0
        """When it was refused, or when nothing will be owed after that."""

    def take(self, n: int, now_us: int) -> int:
        """Take `n` tokens and return 0, or take none and return the microseconds to wait."""
        wait_us = self.wait_us(n, now_us)
        if not wait_us:
            self.spend(n, now_us)
        return wait_us

    def wait_us(self, n: int, now_us: int) -> int:
        """0 if `n` tokens can be taken now, else how long to wait. A refusal is remembered."""
        self._refill(now_us)
        rate = self.rate
        if rate <= 0:
            return WAIT_US_MAX
        need = min(n, rate) * SECOND_US
        waiting_us = self._us - self._since_us
        if self._wanted and waiting_us >= 3 * SECOND_US:
            self._wanted = 0
        kept = self._wanted if need < self._wanted and waiting_us >= SECOND_US else 0
        if self._level >= kept + need:
            return 0
        if need > self._wanted:
            owed = max(-self._level, 0)
            self._wanted, self._since_us = need, self._us + owed // rate
        return min(-(-(kept + need - self._level) // rate), WAIT_US_MAX)

    def spend(self, n: int, now_us: int) -> None:
        """Take the `n` tokens for which `wait_us` has just said 0."""
        self.charge(n, now_us)
        if min(n, self.rate) * SECOND_US >= self._wanted:
            self._wanted = 0

    def charge(self, n: int, now_us: int) -> None:
        """Take `n` tokens whether they are there or not: what is missing is owed."""
        self._refill(now_us)
        self._level -= n * SECOND_US

    def owed_us(self, now_us: int) -> int:
        """How long it takes to pay what is owed; 0 if nothing is."""
        self._refill(now_us)
        if self._level >= 0:
            return 0
        return min(-(self._level // self.rate), WAIT_US_MAX) if self.rate > 0 else WAIT_US_MAX

    def full(self, now_us: int) -> bool:
        """Whether it is as good as new."""
        self._refill(now_us)
        return self._level >= self.rate * SECOND_US

    def change(self, rate: int, now_us: int) -> None:
        """From now on it has another rate. What is owed stays."""
        self._refill(now_us)
        self.rate, self._wanted = rate, 0
        self._level = min(self._level, rate * SECOND_US)

    def _refill(self, now_us: int) -> None:
        if now_us > self._us:
            self._level = min(self._level + (now_us - self._us) * self.rate, self.rate * SECOND_US)
            self._us = now_us
