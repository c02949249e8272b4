"""Messages in flight: of one group on one partition, and running sums of a group over all partitions.

The limits of a group hold over all partitions of all its topics, and are checked with every lease. So each
partition counts its own messages as facts are applied, and passes every change on to the sum of its group
while it is counted in. A state that is being rebuilt is not counted in; one that is dropped is counted out as
a whole.
"""

from __future__ import annotations

from collections.abc import Callable


class GroupFlights:
    """The sums of one group over all partitions."""

    __slots__ = ("by_member", "freed", "partitions", "total")

    def __init__(self, freed: Callable[[str], None]) -> None:
        self.by_member: dict[str, int] = {}
        self.total = 0
        self.partitions = 0
        """The number of partitions that are counted in."""
        self.freed = freed
        """Hook: a member has fewer messages in flight now."""

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
            self.freed(member)


class Flights:
    """The sums of all groups. `freed(group, member)` is called when a member has fewer messages in flight."""

    def __init__(self, freed: Callable[[str, str], None] = lambda group, member: None) -> None:
        self._freed = freed
        self._groups: dict[str, GroupFlights] = {}

    def find(self, group: str) -> GroupFlights | None:
        """The sums of a group; None if no partition has the group."""
        return self._groups.get(group)

    def count_in(self, group: str, part: InFlight) -> None:
        """Count in the messages of a group on one partition."""
        flights = self._groups.get(group)
        if flights is None:
            flights = self._groups[group] = GroupFlights(lambda member: self._freed(group, member))
        part.count_in(flights)

    def count_out(self, group: str, part: InFlight) -> None:
        """Count out the messages of a group on one partition; harmless if they were not counted in."""
        flights = part.count_out()
        if flights is not None and not flights.partitions:
            del self._groups[group]


class InFlight(dict[str, int]):
    """Messages in flight by member, of one group on one partition. Members without messages are left out."""

    __slots__ = ("_flights",)

    def __init__(self) -> None:
        super().__init__()
        self._flights: GroupFlights | None = None

    def add(self, member: str, many: int) -> None:
        """Change the count of a member by `many`, which may be negative."""
        left = self.get(member, 0) + many
        if left:
            self[member] = left
        else:
            del self[member]
        if self._flights is not None:
            self._flights.add(member, many)

    def end(self) -> None:
        """Set the counts of all members to zero."""
        for member, many in list(self.items()):
            self.add(member, -many)

    def count_in(self, flights: GroupFlights) -> None:
        """Become part of the sums."""
        if self._flights is None:
            self._flights = flights
            flights.partitions += 1
            for member, many in self.items():
                flights.add(member, many)

    def count_out(self) -> GroupFlights | None:
        """Leave the sums; return them, or None if this was no part of any."""
        flights, self._flights = self._flights, None
        if flights is not None:
            flights.partitions -= 1
            for member, many in self.items():
                flights.add(member, -many)
        return flights
