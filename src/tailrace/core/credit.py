"""How many messages are in flight: of one group on one partition, and running sums over all partitions.

The limits of a group count over every partition of all its topics, and are looked at with every lease. So
each partition counts its own as facts happen, and passes every change on to the sum of its group, if it is
counted in: a state that is being rebuilt is not, and one that is dropped or gone is counted out as a whole.
"""

from __future__ import annotations

from collections.abc import Callable


class GroupFlights:
    """The sums of one group."""

    __slots__ = ("by_member", "freed", "partitions", "total")

    def __init__(self, freed: Callable[[str], None]) -> None:
        self.by_member: dict[str, int] = {}
        self.total = 0
        self.partitions = 0
        """How many are counted in."""
        self.freed = freed
        """Called with a member that has fewer messages now."""

    def add(self, member: str, many: int) -> None:
        """So many more, or fewer."""
        left = self.by_member.get(member, 0) + many
        assert left >= 0, f"{member} has {left} messages in flight"
        if left:
            self.by_member[member] = left
        else:
            self.by_member.pop(member, None)
        self.total += many
        if many < 0:
            self.freed(member)


class Flights:
    """The sums of all groups; `freed` is called with a group and a member that has fewer messages now."""

    def __init__(self, freed: Callable[[str, str], None] = lambda group, member: None) -> None:
        self._freed = freed
        self._groups: dict[str, GroupFlights] = {}

    def find(self, group: str) -> GroupFlights | None:
        """The sums of a group; None when no partition has it."""
        return self._groups.get(group)

    def count_in(self, group: str, part: InFlight) -> None:
        """A partition has a group."""
        flights = self._groups.get(group)
        if flights is None:
            flights = self._groups[group] = GroupFlights(lambda member: self._freed(group, member))
        part.count_in(flights)

    def count_out(self, group: str, part: InFlight) -> None:
        """A partition does not have it any more, or is not there itself; harmless when it was not counted."""
        flights = part.count_out()
        if flights is not None and not flights.partitions:
            del self._groups[group]


class InFlight(dict[str, int]):
    """Messages in flight by member, of one group on one partition; nobody who has none is in it."""

    __slots__ = ("_flights",)

    def __init__(self) -> None:
        super().__init__()
        self._flights: GroupFlights | None = None

    def add(self, member: str, many: int) -> None:
        """A member has so many more, or fewer."""
        left = self.get(member, 0) + many
        if left:
            self[member] = left
        else:
            del self[member]
        if self._flights is not None:
            self._flights.add(member, many)

    def end(self) -> None:
        """Nobody has anything any more."""
        for member, many in list(self.items()):
            self.add(member, -many)

    def count_in(self, flights: GroupFlights) -> None:
        """Be part of the sums from now on."""
        if self._flights is None:
            self._flights = flights
            flights.partitions += 1
            for member, many in self.items():
                flights.add(member, many)

    def count_out(self) -> GroupFlights | None:
        """Be part of the sums no more; which those were."""
        flights, self._flights = self._flights, None
        if flights is not None:
            flights.partitions -= 1
            for member, many in self.items():
                flights.add(member, -many)
        return flights
