"""A waiting line: the lease requests of one group that wait on one partition, in order of arrival.

A request that takes messages of any lane comes before all that already have enough and want only messages
above a lane. So a line keeps one heap per lane, by the number of the request:

    heap LANES      r4  r7  r9      take anything: woken first, r4 before r7
    heap 2          r3              wants lanes 0 and 1 only
    heap 1          r5  r6          want lane 0 only

A waiter in the line is *idle* or *woken*:

    join ──▶ idle ──next()──▶ woken ──found nothing: join──▶ idle
                                └─────got something: leave──▶ gone

A woken one stays in the line, because its member still waits and counts when free messages are shared; but it
is not woken again before it has found nothing. A waiter that leaves is not looked up in its heap: it stays
there as a dead entry, which `next` skips, and which a clean-up removes when dead entries outnumber the rest.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import Protocol

from tailrace.core.selection.lanes import LANES

SPARE = 64
"""Dead entries that a heap may always have without a clean-up."""


class Waiter(Protocol):
    """One partition of a lease request that found nothing there."""

    member: str
    number: int
    """Number of its request; later requests have greater numbers."""
    above: int
    """It wants messages of lanes more urgent than this one only; `LANES`: of any lane."""

    def wake(self, passing: bool) -> bool:
        """Ask again: there may be messages. False: it cannot ask now, and does not wait here any more. With
        `passing` it calls `LeaseWaiters.in_vain` when it finds nothing."""
        ...


class WaitingLine:
    """The waiters of one group on one partition. A member with several waiters counts once."""

    __slots__ = ("_heaps", "_idle", "_members", "_queued", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[Waiter, None] = {}
        self._idle: set[Waiter] = set()
        """Waiters that were not woken since they found nothing."""
        self._heaps: list[list[tuple[int, Waiter]]] = [[] for _ in range(LANES + 1)]
        self._queued: set[Waiter] = set()
        """Waiters that have an entry in a heap, idle or not."""
        self._members: tuple[dict[str, dict[Waiter, None]], dict[str, dict[Waiter, None]]] = ({}, {})
        """By member: the waiters that want urgent messages only, and the others."""

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, waiter: Waiter) -> None:
        """Add a waiter that found nothing, for the first time or again."""
        if waiter not in self._waiting:
            self._waiting[waiter] = None
            self._members[waiter.above == LANES].setdefault(waiter.member, {})[waiter] = None
        self._idle.add(waiter)
        if waiter not in self._queued:
            self._queued.add(waiter)
            heap = self._heaps[waiter.above]
            heappush(heap, (waiter.number, waiter))
            if len(heap) > 2 * len(self._waiting) + SPARE:
                self._queued.difference_update(item[1] for item in heap if item[1] not in self._waiting)
                heap[:] = [item for item in heap if item[1] in self._waiting]
                heapify(heap)

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter; harmless if it is not in the line."""
        if waiter in self._waiting:
            del self._waiting[waiter]
            self._idle.discard(waiter)
            members = self._members[waiter.above == LANES]
            del members[waiter.member][waiter]
            if not members[waiter.member]:
                del members[waiter.member]

    def next(self, above: int) -> Waiter | None:
        """Take the first idle waiter of those that want lanes above this one; it counts as woken now."""
        heap = self._heaps[above]
        while heap:
            _, waiter = heappop(heap)
            self._queued.discard(waiter)
            if waiter in self._idle:
                self._idle.discard(waiter)
                return waiter
        return None

    def all_idle(self) -> list[Waiter]:
        """Take all idle waiters, in order of arrival; they count as woken now."""
        found = sorted(self._idle, key=lambda waiter: waiter.number)
        self._idle.clear()
        return found

    def of_member(self, member: str) -> list[Waiter]:
        """Take the idle waiters of a member; they count as woken now."""
        found = [
            waiter for members in self._members for waiter in members.get(member, ()) if waiter in self._idle
        ]
        self._idle.difference_update(found)
        return found

    def sharers(self, member: str, above: int) -> int:
        """The number of members that share the free messages when this member asks."""
        members = self._members[above == LANES]
        return len(members) + (member not in members)

    @property
    def choosy(self) -> Collection[str]:
        """The members that wait for urgent messages only."""
        return self._members[False].keys()

    @property
    def hungry(self) -> Collection[str]:
        """The members that wait for messages of any lane."""
        return self._members[True].keys()
