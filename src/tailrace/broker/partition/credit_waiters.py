"""Credit: how many more messages a member and a group may have in flight, and the requests that wait for it.

Two limits count over all partitions of all topics of a group: `in_flight_max` of a member, and
`group_in_flight_max` of the group. The partitions keep running sums of what is in flight (`core.credit`), so
that asking costs the same whatever the number of partitions. A member's credit is the smaller rest:

    limits 100 and 150          ann   bob   eve   group
    in flight                   100    40     0     140
    credit                        0    10    10

A request without credit waits for one of two things. If its member is at the member's limit (ann), it waits
until something of that member is settled, and is woken then: nobody else can use that credit. Otherwise the
limit of the group is in the way, and it waits in one line with all such requests of the group, in order of
arrival. When messages are settled, as many are woken as there is credit for: with 148 of 150 in flight two
requests, since each may take one message at least. A woken request that does not use its credit passes it on
(`pass_on`).

Wake-ups are collected and done in the next turn of the pump, so that many acks of one turn wake once.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from tailrace.broker.runtime.pump import Pump
from tailrace.core.credit import Flights
from tailrace.core.model.group_options import GroupPolicy


class CreditWaiter(Protocol):
    """A request that had no credit left."""

    def credit_freed(self) -> None:
        """Ask again; the request does not wait for credit any more."""
        ...


class CreditWaiters:
    """Messages in flight of all groups of a node, and the requests that wait for fewer."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self.flights = Flights(self._freed)
        self._own: dict[tuple[str, str], dict[CreditWaiter, None]] = {}
        """By group and member: the requests that wait for their member's credit."""
        self._all: dict[str, OrderedDict[CreditWaiter, GroupPolicy]] = {}
        """By group: the requests that wait for the group's credit, in order of arrival."""
        self._members: dict[tuple[str, str], None] = {}
        self._groups: dict[str, None] = {}

    def left(self, group: str, member: str, policy: GroupPolicy) -> int:
        """The number of messages that a member may still be given; negative after a limit was lowered."""
        flights = self.flights.find(group)
        if flights is None:
            return min(policy.in_flight_max, policy.group_in_flight_max)
        of_member = flights.by_member.get(member, 0)
        return min(policy.in_flight_max - of_member, policy.group_in_flight_max - flights.total)

    def wait(self, group: str, member: str, policy: GroupPolicy, short: CreditWaiter) -> None:
        """Wake a request when there may be credit for it."""
        flights = self.flights.find(group)
        of_member = 0 if flights is None else flights.by_member.get(member, 0)
        if of_member >= policy.in_flight_max:
            self._own.setdefault((group, member), {})[short] = None
        else:
            self._all.setdefault(group, OrderedDict())[short] = policy
        self.pass_on(group)  # It may have been woken for credit of the group: then others may use it.

    def held(self, group: str, member: str) -> int:
        """Messages in flight of a member, over all partitions."""
        flights = self.flights.find(group)
        return 0 if flights is None else flights.by_member.get(member, 0)

    def wait_for_less(self, group: str, member: str, short: CreditWaiter) -> None:
        """Wake a request when something of its member is settled."""
        self._own.setdefault((group, member), {})[short] = None

    def leave(self, group: str, member: str, short: CreditWaiter) -> None:
        """Forget a request; harmless if it does not wait."""
        own = self._own.get((group, member))
        if own is not None and own.pop(short, 0) is None and not own:
            del self._own[group, member]
        line = self._all.get(group)
        if line is not None and line.pop(short, None) is not None and not line:
            del self._all[group]

    def pass_on(self, group: str) -> None:
        """There may be credit that nobody uses: wake requests of the group in the next turn."""
        if group in self._all:
            self._touch()
            self._groups[group] = None

    def changed(self, group: str) -> None:
        """The limits may have changed: wake all requests of the group in the next turn."""
        for key in [key for key in self._own if key[0] == group]:
            self._touch()
            self._members[key] = None
        for short in self._all.pop(group, ()):
            self._own.setdefault((group, ""), {})[short] = None
            self._touch()
            self._members[group, ""] = None

    def _freed(self, group: str, member: str) -> None:
        if (group, member) in self._own:
            self._touch()
            self._members[group, member] = None
        self.pass_on(group)

    def _touch(self) -> None:
        if not self._members and not self._groups:
            self._pump.ready(self)

    def turn(self, now_us: int, wall_us: int) -> None:
        """Wake the requests that there is credit for."""
        members, self._members = self._members, {}
        groups, self._groups = self._groups, {}
        for key in members:
            for short in self._own.pop(key, ()):
                short.credit_freed()
        for group in groups:
            self._wake(group)

    def _wake(self, group: str) -> None:
        flights, line = self.flights.find(group), self._all.get(group)
        woken = flights.total if flights is not None else 0
        while line:
            short, policy = next(iter(line.items()))
            if woken >= policy.group_in_flight_max:
                return
            del line[short]
            woken += 1
            short.credit_freed()
        self._all.pop(group, None)
