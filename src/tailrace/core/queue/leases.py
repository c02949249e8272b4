"""Leases of one group on one partition: the live ones, and those that ended well and are remembered.

A receipt is (lease, offset). A live lease knows its spans and which of its messages were taken away from it.
Of a lease whose messages are all settled only the id is kept, until its deadline, so that settling twice is
harmless.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import groupby

import msgspec

from tailrace.core.core_tuning import LEASES_REMEMBERED_MAX


class LiveLease(msgspec.Struct, array_like=True):
    """One lease. `spans` are as leased; `keys` has the key hash of each message, if the fact had them;
    `taken` (flat, in no order) are messages that left the lease without being settled through it; `left` is
    how many messages the lease still holds."""

    id: int
    member: str
    deadline_us: int
    time_us: int
    spans: list[int]
    left: int
    keys: list[int] = []
    taken: list[int] = []


class GroupLeases:
    """The leases by id, those that ended well, and their deadlines."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: every receipt is stale from now on."""
        self.live: dict[int, LiveLease] = {}
        self._deadlines: list[tuple[int, int]] = []
        self._ended = array("Q")
        self._ended_us = array("Q")
        self._gone = 0
        self._until: dict[int, int] = {}
        self._taken: dict[int, bytes] = {}

    def open(self, lease: LiveLease) -> None:
        """Add a new lease."""
        self.live[lease.id] = lease
        heappush(self._deadlines, (lease.deadline_us, lease.id))

    def extend(self, lease: LiveLease, deadline_us: int) -> None:
        """Move the deadline of a lease."""
        lease.deadline_us = deadline_us
        heappush(self._deadlines, (deadline_us, lease.id))

    def end(self, lease: LiveLease, time_us: int) -> None:
        """End a lease that holds no message any more. It is remembered until its deadline; beyond
        `LEASES_REMEMBERED_MAX`, the oldest are forgotten first."""
        del self.live[lease.id]
        self._until[lease.id] = lease.deadline_us
        self._ended.append(lease.id)
        self._ended_us.append(lease.deadline_us)
        if lease.taken:
            self._taken[lease.id] = array("Q", lease.taken).tobytes()
        while self._ended_us[self._gone] <= time_us or len(self._until) > LEASES_REMEMBERED_MAX:
            forgotten = self._ended[self._gone]
            del self._until[forgotten]
            self._taken.pop(forgotten, None)
            self._gone += 1
            if self._gone == len(self._ended):
                break
        if self._gone > 1024 and self._gone * 2 > len(self._ended):
            del self._ended[: self._gone], self._ended_us[: self._gone]
            self._gone = 0

    def drop(self, lease: LiveLease) -> None:
        """Forget a lease that timed out: its receipts are stale."""
        del self.live[lease.id]

    def ended_well(self, lease: int, time_us: int) -> bool:
        """Whether all messages of a lease were settled and its deadline is still to come."""
        return self._until.get(lease, 0) > time_us

    def taken_from(self, lease: int) -> Sequence[int]:
        """Spans that were taken away from a remembered lease before it ended."""
        return array("Q", self._taken.get(lease, b""))

    def next_deadline_us(self) -> int | None:
        """When the next lease times out."""
        deadlines, live = self._deadlines, self.live
        while deadlines:
            deadline_us, number = deadlines[0]
            lease = live.get(number)
            if lease is not None and lease.deadline_us == deadline_us:
                return deadline_us
            heappop(deadlines)
        return None

    # -------------------------------------------------------------------------------------------- snapshot

    def columns(self) -> tuple[bytes, bytes, bytes]:
        """The live leases, the ended ones and their deadlines."""
        small = msgspec.msgpack.encode((list(self.live.values()), self._taken))
        return small, self._ended[self._gone :].tobytes(), self._ended_us[self._gone :].tobytes()

    def fill(self, small: memoryview, ended: memoryview, ended_us: memoryview) -> None:
        """Restore the leases from `columns`."""
        leases, self._taken = msgspec.msgpack.decode(small, type=tuple[list[LiveLease], dict[int, bytes]])
        self._ended.frombytes(ended)
        self._ended_us.frombytes(ended_us)
        self._until = dict(zip(self._ended, self._ended_us, strict=True))
        self.live = {lease.id: lease for lease in leases}
        self._deadlines = [(lease.deadline_us, lease.id) for lease in leases]
        heapify(self._deadlines)

    def verify(self) -> None:
        """Assert the invariants."""
        assert not self.live.keys() & self._until.keys(), "a lease lives and has ended"
        assert len(self._until) == len(self._ended) - self._gone
        assert self._taken.keys() <= self._until.keys()
        for lease in self.live.values():
            assert lease.left > 0, f"lease {lease.id} is empty"


class KeyRuns:
    """The keys of a fact, one per message, read along with its spans; all 0 if the fact has none."""

    __slots__ = ("_at", "_keys")

    def __init__(self, keys: Sequence[int]) -> None:
        self._keys, self._at = keys, 0

    def skip(self, many: int) -> None:
        """Pass over messages."""
        self._at += many

    def runs(self, first: int, end: int) -> list[tuple[int, int, int]]:
        """The next messages, [first, end), as (first, end, key) of neighbours with one key."""
        if not self._keys:
            return [(first, end, 0)]
        found = []
        for key, group in groupby(self._keys[self._at : self._at + end - first]):
            after = first + sum(1 for _ in group)
            found.append((first, after, key))
            first = after
        assert first == end, f"the fact has too few keys: {len(self._keys)}"
        self._at += found[-1][1] - found[0][0]
        return found
