"""How long a login with a password has to wait, so that guessing is slow and nobody else is locked out.

Wrong passwords are counted three times, and each count makes the next attempt wait, longer with each failure:

    of a pair (address and user)   from the first failure on, one attempt after the other
    of an address                  after a few, since many people may share an address
    of a user                      after a few and for less time, since anybody may fail in a user's name

An attempt waits before its password is checked, a right one like a wrong one, for the longest of the three,
which is seconds at most. A pair that has logged in before is *known*: it waits for failures of its own only,
neither for those of the user elsewhere nor for those of others behind the same address. How many attempts are
under way is bounded for each pair, and for each address as far as its pairs are not known.

Counts go down with time. Each table forgets what was not touched for longest, so that made-up names and
addresses cannot fill the memory. Of an IPv6 address the first 64 bits count, because a network has them.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict

TABLE_MAX = 10_000
"""Most pairs, addresses, users and known pairs that are remembered, each."""
STEP_US = 200_000
"""The first wait; each further failure doubles it."""
WAIT_US_MAX = 5_000_000
USER_WAIT_US_MAX = 2_000_000
FREE_OF_ADDRESS = 5
FREE_OF_USER = 3
"""Failures that cost nothing."""
FORGIVEN_US = 30_000_000
"""So much time takes back one failure."""
PENDING_MAX = 64
"""Most attempts of one address under way."""
PENDING_SLOW_MAX = 8
"""Most attempts of one pair under way, when it has to wait."""
SLOW_MAX = 8_192
"""Most attempts that wait, of all addresses."""
_NAME_MAX = 256


class _Failures:
    """Failures of one kind under one key."""

    __slots__ = ("count", "next_us", "since_us")

    def __init__(self, now_us: int) -> None:
        self.count = 0
        self.since_us = now_us
        self.next_us = 0

    def settle(self, now_us: int) -> int:
        """Take back what time has forgiven; returns what is left."""
        forgiven = max(now_us - self.since_us, 0) // FORGIVEN_US
        self.count = max(self.count - forgiven, 0)
        self.since_us += forgiven * FORGIVEN_US
        return self.count


class _FailureTable:
    """Failures by key; the key that was not touched for longest goes first."""

    def __init__(self, free: int, wait_us_max: int) -> None:
        self._rows: OrderedDict[tuple[str, ...], _Failures] = OrderedDict()
        self._free = free
        self._wait_us_max = wait_us_max

    def __len__(self) -> int:
        return len(self._rows)

    def wait_us(self, key: tuple[str, ...], now_us: int) -> int:
        row = self._rows.get(key)
        return 0 if row is None else self._delay_us(row.settle(now_us))

    def turn_us(self, key: tuple[str, ...], now_us: int) -> int:
        """As `wait_us`, with a turn for each: also the wait for those that came before."""
        row = self._rows.get(key)
        if row is None or not (delay_us := self._delay_us(row.settle(now_us))):
            return 0
        begin_us = min(max(now_us + delay_us, row.next_us), now_us + self._wait_us_max)
        row.next_us = begin_us + delay_us
        return begin_us - now_us

    def failed(self, key: tuple[str, ...], now_us: int) -> None:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Failures(now_us)
            if len(self._rows) > TABLE_MAX:
                self._rows.popitem(last=False)
        if not row.settle(now_us):
            row.since_us = now_us
        row.count += 1
        self._rows.move_to_end(key)

    def forget(self, key: tuple[str, ...]) -> None:
        self._rows.pop(key, None)

    def _delay_us(self, count: int) -> int:
        over = count - self._free
        return 0 if over <= 0 else min(STEP_US << min(over - 1, 16), self._wait_us_max)


class SlowDown:
    """The waits of logins. Each `begin` that gives a number is followed by one `end`."""

    def __init__(self) -> None:
        self._pairs = _FailureTable(0, WAIT_US_MAX)
        self._addresses = _FailureTable(FREE_OF_ADDRESS, WAIT_US_MAX)
        self._users = _FailureTable(FREE_OF_USER, USER_WAIT_US_MAX)
        self._known: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._pending: Counter[tuple[str, ...]] = Counter()
        """Attempts under way by address, and by pair."""
        self._slow = 0

    @property
    def rows(self) -> int:
        """How much is remembered, in rows of all tables."""
        counted = len(self._pairs) + len(self._addresses) + len(self._users)
        return counted + len(self._known) + len(self._pending)

    def knows(self, address: str, user: str) -> bool:
        """Whether a user has logged in from an address before."""
        return (network_of(address), user[:_NAME_MAX]) in self._known

    def begin(self, address: str, user: str, now_us: int) -> int | None:
        """How many microseconds an attempt has to wait; None if too many are under way."""
        place = (network_of(address),)
        pair = (*place, user[:_NAME_MAX])
        known = self.knows(address, user)
        wait_us = self._pairs.wait_us(pair, now_us)
        if not known:
            others_us = self._users.wait_us(pair[1:], now_us)
            wait_us = max(wait_us, self._addresses.wait_us(place, now_us), others_us)
        full = self._pending[pair] >= (PENDING_SLOW_MAX if wait_us else PENDING_MAX)
        full = full or (not known and self._pending[place] >= PENDING_MAX)
        if full or (wait_us and self._slow >= SLOW_MAX):
            self._tidy(place, pair)
            return None
        self._pending[place] += 1
        self._pending[pair] += 1
        self._slow += wait_us > 0
        return max(wait_us, self._pairs.turn_us(pair, now_us))

    def _tidy(self, *keys: tuple[str, ...]) -> None:
        for key in keys:
            if not self._pending[key]:
                del self._pending[key]

    def end(self, address: str, user: str, waited_us: int, right: bool | None, now_us: int) -> None:
        """An attempt that waited so long is over: the password was right, wrong, or (None) not checked."""
        place = (network_of(address),)
        pair = (*place, user[:_NAME_MAX])
        self._slow -= waited_us > 0
        for key in (place, pair):
            self._pending[key] -= 1
        self._tidy(place, pair)
        if right is None:
            return
        if right:
            # Only the pair is forgiven: who knows one password does not get more guesses at others.
            self._pairs.forget(pair)
            self._known[pair] = None
            self._known.move_to_end(pair)
            if len(self._known) > TABLE_MAX:
                self._known.popitem(last=False)
            return
        self._pairs.failed(pair, now_us)
        self._addresses.failed(place, now_us)
        self._users.failed(pair[1:], now_us)


def network_of(address: str) -> str:
    """What counts of an address: all of it, or of IPv6 the first 64 bits."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address[:_NAME_MAX]
    return str(parsed.ipv4_mapped or ipaddress.IPv6Address(int(parsed) >> 64 << 64))
