"""Credit of groups: how many more messages members may have in flight, and whose request is woken for it.

Two limits count over all partitions of all topics of a group: `in_flight_max` of a member, and
`group_in_flight_max` of the group. A member's credit is the smaller rest:

    limits 100 and 150          ann   bob   eve   group
    in flight                   100    40     0     140
    credit                        0    10    10

This process is about a node, not about one partition: its state is derived from the partitions that are
counted in, and each of them counts itself out when its own life ends. It is the hottest of all, with an event
for each ack. So events are calls, without an object for each, and an ack costs the same whatever the number
of partitions, members and requests.

    event                                       call
    counts of a member changed                  `GroupCredit.add`, by a partition that is counted in
    a partition begins or ends its life         `count_in`, `count_out`
    a request has no credit, and waits          `wait`, `wait_for_less`
    a request is over                           `leave`
    a woken request did not use its credit      `pass_on`
    limits changed                              `changed`

    effect                                      how the shell gets it
    somebody is to be woken                     the hook `wanted`, once until `wakes` is called
    wake these requests, in this order          `wakes`, in the next turn: many acks of one turn wake once

A request without credit waits for one of two things. If its member is at the member's limit (ann), it waits
until something of that member is settled, and is woken then: nobody else can use that credit. Otherwise the
limit of the group is in the way, and it waits in one line with all such requests of the group, in order of
arrival. When messages are settled, as many are woken as there is credit for, since each may take one message
at least. Suppose 150 of 150 are in flight, and r1, r2 and r3 wait in the line:

    add(ann, -1), add(bob, -1)      wanted, once
    wakes()                         r1, r2; r3 still waits
    r1 leases 1                     149 in flight
    r2's receiver has no room       pass_on: wanted
    wakes()                         r3

A request in the line is woken for each credit that it may use, for what it leaves is passed on. So no credit
stays unused while somebody waits for it.

*The share of a node.* Limits are values that come with each question. Of a group whose partitions are on
several nodes, each node has a share of both limits, counts its own partitions, and asks with its share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from tailrace.core.queue.in_flight import InFlight

W = TypeVar("W")
"""A request that waits; the process only hands it back."""


class GroupCredit(Generic[W]):
    """The sums of one group over all partitions, and the requests that wait for its credit."""

    __slots__ = (
        *("_all", "_freed", "_line", "_own", "_passed", "_touched"),
        *("by_member", "name", "partitions", "total"),
    )

    def __init__(self, name: str, touched: Callable[[GroupCredit[W]], None]) -> None:
        self.name = name
        self.by_member: dict[str, int] = {}
        """Messages in flight; members without any are left out."""
        self.total = 0
        self.partitions = 0
        """The number of partitions that are counted in."""
        self._touched = touched
        """Called with each change that may wake somebody, at the first since `take`."""
        self._own: dict[str, dict[W, None]] = {}
        """By member: the requests that wait for the member's own credit."""
        self._line: OrderedDict[W, int] = OrderedDict()
        """The requests that wait for the group's credit, in order of arrival, and the limit of each. (A plain
        dictionary looks for its first item behind all that were deleted.)"""
        self._freed: dict[str, None] = {}
        """Members with requests, of which something was settled since `take`."""
        self._passed = False
        """Whether there may be credit for the line since `take`."""
        self._all = False

    @property
    def idle(self) -> bool:
        """Whether nothing is counted, and nobody waits."""
        return not (self.partitions or self._own or self._line)

    def add(self, member: str, many: int) -> None:
        """Change the count of a member by `many`, which may be negative."""
        left = self.by_member.get(member, 0) + many
        assert left >= 0, f"{member} has {left} messages in flight"
        if left:
            self.by_member[member] = left
        else:
            self.by_member.pop(member, None)
        self.total += many
        if many < 0:
            if member in self._own and member not in self._freed:
                self._touch()
                self._freed[member] = None
            if self._line:
                self.pass_on()

    def pass_on(self) -> None:
        """There may be credit that nobody uses."""
        if self._line and not self._passed:
            if not (self._freed or self._all):
                self._touched(self)
            self._passed = True

    def change(self) -> None:
        """The limits may have changed."""
        if self._line or self._own:
            self._touch()
            self._all = True

    def _touch(self) -> None:
        if not (self._passed or self._freed or self._all):
            self._touched(self)

    def wait_for_less(self, member: str, waiter: W) -> None:
        """Wake a request when something of its member is settled."""
        self._own.setdefault(member, {})[waiter] = None

    def wait(self, member: str, waiter: W, member_max: int, group_max: int) -> None:
        """Wake a request when there may be credit for it."""
        if self.by_member.get(member, 0) >= member_max:
            self.wait_for_less(member, waiter)
        else:
            self._line[waiter] = group_max
        self.pass_on()  # It may have been woken for credit of the group: then others may use it.

    def leave(self, member: str, waiter: W) -> None:
        """Forget a request; harmless if it does not wait."""
        own = self._own.get(member)
        if own is not None and own.pop(waiter, 0) is None and not own:
            del self._own[member]
        self._line.pop(waiter, None)

    def take(self, woken: list[W]) -> None:
        """Append the requests to be woken now; they do not wait any more."""
        members = list(self._own) if self._all else self._freed
        for member in members:
            woken += self._own.pop(member, ())
        line, total = self._line, self.total
        while line:
            waiter, group_max = next(iter(line.items()))
            if total >= group_max and not self._all:
                break
            del line[waiter]
            woken.append(waiter)
            total += 1
        if self._freed:
            self._freed = {}
        self._passed = self._all = False


class CreditProcess(Generic[W]):
    """The credit of all groups of a node."""

    def __init__(self, wanted: Callable[[], None]) -> None:
        self._wanted = wanted
        """Hook: there may be requests to wake. Called once; the shell calls `wakes` soon."""
        self._groups: dict[str, GroupCredit[W]] = {}
        self._touched: list[GroupCredit[W]] = []

    def find(self, group: str) -> GroupCredit[W] | None:
        """The sums of a group; None if no partition has it and nobody waits."""
        return self._groups.get(group)

    def count_in(self, group: str, part: InFlight) -> None:
        """See `GroupSums.count_in`."""
        credit = self._group(group)
        credit.partitions += part.count_in(credit)

    def count_out(self, group: str, part: InFlight) -> None:
        """See `GroupSums.count_out`."""
        if part.count_out():
            credit = self._groups[group]
            credit.partitions -= 1
            self._tidy(credit)

    def left(self, group: str, member: str, member_max: int, group_max: int) -> int:
        """The number of messages that a member may still be given; negative after a limit was lowered."""
        credit = self._groups.get(group)
        if credit is None:
            return min(member_max, group_max)
        return min(member_max - credit.by_member.get(member, 0), group_max - credit.total)

    def held(self, group: str, member: str) -> int:
        """Messages in flight of a member, over all partitions."""
        credit = self._groups.get(group)
        return 0 if credit is None else credit.by_member.get(member, 0)

    def wait(self, group: str, member: str, waiter: W, member_max: int, group_max: int) -> None:
        """Wake a request when there may be credit for it."""
        (self._groups.get(group) or self._group(group)).wait(member, waiter, member_max, group_max)

    def wait_for_less(self, group: str, member: str, waiter: W) -> None:
        """Wake a request when something of its member is settled."""
        self._group(group).wait_for_less(member, waiter)

    def leave(self, group: str, member: str, waiter: W) -> None:
        """Forget a request; harmless if it does not wait."""
        credit = self._groups.get(group)
        if credit is not None:
            credit.leave(member, waiter)
            if not credit.partitions:
                self._tidy(credit)

    def pass_on(self, group: str) -> None:
        """There may be credit that nobody uses: wake requests of the group."""
        credit = self._groups.get(group)
        if credit is not None:
            credit.pass_on()

    def changed(self, group: str) -> None:
        """The limits may have changed: wake all requests of the group."""
        credit = self._groups.get(group)
        if credit is not None:
            credit.change()

    def wakes(self) -> list[W]:
        """The requests to be woken now, in this order; they do not wait any more."""
        touched, self._touched = self._touched, []
        woken: list[W] = []
        for credit in touched:
            credit.take(woken)
            if not credit.partitions:
                self._tidy(credit)
        return woken

    def _group(self, name: str) -> GroupCredit[W]:
        """The sums of a group, made if need be."""
        credit = self._groups.get(name)
        if credit is None:
            credit = self._groups[name] = GroupCredit(name, self._touch)
        return credit

    def _tidy(self, credit: GroupCredit[W]) -> None:
        if credit.idle and self._groups.get(credit.name) is credit:
            del self._groups[credit.name]

    def _touch(self, credit: GroupCredit[W]) -> None:
        if not self._touched:
            self._wanted()
        self._touched.append(credit)
