"""Credit: how many more messages members and groups may have, and the requests that wait for some of it.

The limits count over all partitions of all topics of a group. What is in flight is a running sum, which the
partitions keep (`core.flights`), so that asking costs the same whatever their number. A request for which the
limit of its member is in the way waits for something of that member to be settled; one for which the limit
of the group is in the way waits in the order of arrival, and as many are woken as there is credit for. Who
was woken and does not use it passes it on.
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
        """Ask again. It does not wait here any more."""
        ...


class CreditWaiters:
    """What is in flight in all groups of a node, and who waits for less of it."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self.flights = Flights(self._freed)
        self._own: dict[tuple[str, str], dict[CreditWaiter, None]] = {}
        """By group and member: those for which the member's limit was in the way."""
        self._all: dict[str, OrderedDict[CreditWaiter, GroupPolicy]] = {}
        """By group: those for which the group's limit was in the way, in the order of arrival."""
        self._members: dict[tuple[str, str], None] = {}
        self._groups: dict[str, None] = {}

    def left(self, group: str, member: str, policy: GroupPolicy) -> int:
        """How many messages a member may still be given."""
        flights = self.flights.find(group)
        if flights is None:
            return min(policy.in_flight_max, policy.group_in_flight_max)
        of_member = flights.by_member.get(member, 0)
        return min(policy.in_flight_max - of_member, policy.group_in_flight_max - flights.total)

    def wait(self, group: str, member: str, policy: GroupPolicy, short: CreditWaiter) -> None:
        """Tell a request when there may be credit for it."""
        flights = self.flights.find(group)
        of_member = 0 if flights is None else flights.by_member.get(member, 0)
        if of_member >= policy.in_flight_max:
            self._own.setdefault((group, member), {})[short] = None
        else:
            self._all.setdefault(group, OrderedDict())[short] = policy
        self.pass_on(group)  # Also for others: it may have been woken, and its member has too many by now.

    def held(self, group: str, member: str) -> int:
        """How many messages a member has, over all partitions."""
        flights = self.flights.find(group)
        return 0 if flights is None else flights.by_member.get(member, 0)

    def wait_for_less(self, group: str, member: str, short: CreditWaiter) -> None:
        """Tell a request when something of its member is settled."""
        self._own.setdefault((group, member), {})[short] = None

    def leave(self, group: str, member: str, short: CreditWaiter) -> None:
        """A request does not wait any more; harmless when it did not."""
        own = self._own.get((group, member))
        if own is not None and own.pop(short, 0) is None and not own:
            del self._own[group, member]
        line = self._all.get(group)
        if line is not None and line.pop(short, None) is not None and not line:
            del self._all[group]

    def pass_on(self, group: str) -> None:
        """There may be credit that nobody was told of: others are, in the next turn."""
        if group in self._all:
            self._touch()
            self._groups[group] = None

    def changed(self, group: str) -> None:
        """The limits may be others: whoever waits looks again."""
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
        """Wake whom there is credit for."""
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
