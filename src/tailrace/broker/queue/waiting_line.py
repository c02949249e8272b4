"""A line: the lease requests of one group that wait for something on one partition, in order of arrival.

Those that take anything come first; behind them those that already have enough and want only what is more
urgent, the least choosy first. Who was woken is still in the line, and is not woken again before it has found
nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import Protocol

from tailrace.core.selection.lanes import LANES

SPARE = 64
"""So many that left may stand in a line before they are cleared away."""


class Waiter(Protocol):
    """One partition of a lease request that found nothing there."""

    member: str
    number: int
    """When its request came: later ones have greater numbers."""
    above: int
    """It wants only messages of lanes that are more urgent than this one; LANES: whatever there is."""

    def wake(self, passing: bool) -> bool:
        """There may be something. False: it cannot ask now, and does not wait here any more. `passing`: when
        it finds nothing, it lets those know who may have what it may not."""
        ...


class WaitingLine:
    """Those who wait; who is there twice counts once."""

    __slots__ = ("_heaps", "_idle", "_members", "_queued", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[Waiter, None] = {}
        self._idle: set[Waiter] = set()
        """Those that were not woken since they found nothing."""
        self._heaps: list[list[tuple[int, Waiter]]] = [[] for _ in range(LANES + 1)]
        self._queued: set[Waiter] = set()
        """Those that stand in a heap, once each, idle or not."""
        self._members: tuple[dict[str, dict[Waiter, None]], dict[str, dict[Waiter, None]]] = ({}, {})
        """By member: those that want only what is urgent, and the others."""

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, waiter: Waiter) -> None:
        """It found nothing, for the first time or again."""
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
        """It does not wait any more; harmless when it did not."""
        if waiter in self._waiting:
            del self._waiting[waiter]
            self._idle.discard(waiter)
            members = self._members[waiter.above == LANES]
            del members[waiter.member][waiter]
            if not members[waiter.member]:
                del members[waiter.member]

    def next(self, above: int) -> Waiter | None:
        """The one that came first of those that want lanes above this one, and was not woken; it is now."""
        heap = self._heaps[above]
        while heap:
            _, waiter = heappop(heap)
            self._queued.discard(waiter)
            if waiter in self._idle:
                self._idle.discard(waiter)
                return waiter
        return None

    def all_idle(self) -> list[Waiter]:
        """All that were not woken; they are now."""
        found = sorted(self._idle, key=lambda waiter: waiter.number)
        self._idle.clear()
        return found

    def of_member(self, member: str) -> list[Waiter]:
        """Those of a member that were not woken; they are now."""
        found = [
            waiter for members in self._members for waiter in members.get(member, ()) if waiter in self._idle
        ]
        self._idle.difference_update(found)
        return found

    def sharers(self, member: str, above: int) -> int:
        """Among how many members what is free is to be split when one of them asks."""
        members = self._members[above == LANES]
        return len(members) + (member not in members)

    @property
    def choosy(self) -> Collection[str]:
        """The members that wait for urgent messages only."""
        return self._members[False].keys()

    @property
    def hungry(self) -> Collection[str]:
        """The members that wait for whatever there is."""
        return self._members[True].keys()
