"""Messages in flight: of one group on one partition, by member, as part of sums over all partitions.

The limits of a group hold over all partitions of all its topics, and are checked with every lease. So each
partition counts its own messages as facts are applied, and passes every change on to the sums of its group
while it is counted in. A state that is being rebuilt is not counted in; one that is dropped is counted out as
a whole. The sums are `core.process.credit_process`.
"""

from __future__ import annotations

from typing import Protocol


class MemberSums(Protocol):
    """The sums of one group."""

    def add(self, member: str, many: int) -> None:
        """Change the sum of a member by `many`, which may be negative."""
        ...


class GroupSums(Protocol):
    """The sums of all groups."""

    def count_in(self, group: str, part: InFlight) -> None:
        """Count in the messages of a group on one partition; harmless if they are counted in."""
        ...

    def count_out(self, group: str, part: InFlight) -> None:
        """Count out the messages of a group on one partition; harmless if they are not counted in."""
        ...


class InFlight(dict[str, int]):
    """Messages in flight by member, of one group on one partition. Members without messages are left out."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        super().__init__()
        self._sums: MemberSums | None = None

    def add(self, member: str, many: int) -> None:
        """Change the count of a member by `many`, which may be negative."""
        left = self.get(member, 0) + many
        if left:
            self[member] = left
        else:
            del self[member]
        if self._sums is not None:
            self._sums.add(member, many)

    def end(self) -> None:
        """Set the counts of all members to zero."""
        for member, many in list(self.items()):
            self.add(member, -many)

    def count_in(self, sums: MemberSums) -> bool:
        """Become part of sums; false if this is part of some."""
        if self._sums is not None:
            return False
        self._sums = sums
        for member, many in self.items():
            sums.add(member, many)
        return True

    def count_out(self) -> bool:
        """Leave the sums; false if this was no part of any."""
        sums, self._sums = self._sums, None
        if sums is None:
            return False
        for member, many in self.items():
            sums.add(member, -many)
        return True
