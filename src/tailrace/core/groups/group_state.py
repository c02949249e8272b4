"""The state of one group: its policy, its topics, its members, and the holder of each partition."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tailrace.core.core_tuning import CALM_US
from tailrace.core.model.group_commands import Place
from tailrace.core.model.group_options import GroupPolicy


class GroupMember(msgspec.Struct, frozen=True, array_like=True):
    """One member of a group."""

    id: str
    topics: tuple[str, ...]
    client: str
    joined_us: int


class PartitionHolding(msgspec.Struct, frozen=True, array_like=True):
    """The holder of one partition. While the partition is being revoked, `next` is the member that gets it
    (perhaps the owner again). A partition that is being divided after it was shared has no owner; `leaving`
    are the members that have not finished with it."""

    owner: str = ""
    generation: int = 0
    revoking: bool = False
    next: str = ""
    since_us: int = 0
    leaving: tuple[str, ...] = ()

    @property
    def dividing(self) -> bool:
        """Whether all members had the partition, and it is to be the next owner's alone."""
        return self.revoking and not self.owner

    @property
    def holder(self) -> str:
        """The owner when the present move is over."""
        return self.next if self.revoking else self.owner


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A topic of a group: the number of its partitions now, and when it was enlisted.

    Later partitions are read from their beginning, whatever the group's `start` says, so that nothing is
    missed.
    """

    partitions: int
    first: int
    id: int = 0
    """The id of the topic; 0 if it was written by a release that did not note it."""


class StoredGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group in a snapshot."""

    name: str
    policy: GroupPolicy
    created_us: int
    paused: bool
    topics: list[tuple[str, Extent]]
    members: list[GroupMember]
    places: list[tuple[str, int, PartitionHolding]]
    id: int = 0
    enlisted: list[Place] = []
    shared: list[tuple[str, int | None]] | None = None
    """None if it was written by a release in which a group shared all of its topics or none."""


class GroupState:
    """One group. Only `GroupMembership.apply` changes it."""

    def __init__(self, name: str, policy: GroupPolicy, created_us: int, number: int = 0) -> None:
        self.name = name
        self.id = number
        """Tells the group from earlier and later ones of the same name."""
        self.policy = policy
        self.created_us = created_us
        self.paused = False
        self.topics: dict[str, Extent] = {}
        self.members: dict[str, GroupMember] = {}
        self.places: dict[Place, PartitionHolding] = {}
        self.shared: dict[str, int | None] = {}
        """The shared topics, and since when each has had enough partitions to be divided. None: it has not
        enough, or is never divided."""
        self.enlisted: set[Place] = set()
        """Partitions that have confirmed that the group is enlisted there."""

    def all_places(self) -> Iterable[Place]:
        """Every partition of every topic."""
        return (
            (topic, number) for topic, extent in self.topics.items() for number in range(extent.partitions)
        )

    def owned(self, member: str) -> list[tuple[Place, PartitionHolding]]:
        """The partitions that a member owns, also while they are being revoked."""
        return [(place, holding) for place, holding in self.places.items() if holding.owner == member]

    def state_of(self, member: str) -> str:
        """The state of a member, for `Membership.state`."""
        if self.paused:
            return "paused"
        if self.policy.mode == "exclusive" and self.active() != member:
            return "standby"
        return "active"

    def active(self) -> str:
        """The active member of an exclusive group; "" if there is none."""
        return next((holding.owner for holding in self.places.values() if holding.owner), "")

    def due_us(self) -> int | None:
        """When `PassTime` changes something: a revocation times out, or a shared topic has had enough
        partitions for `CALM_US`."""
        timeout_us = self.policy.revoke_timeout_ms * 1000
        dues = [held.since_us + timeout_us for held in self.places.values() if held.revoking]
        dues += [since_us + CALM_US for since_us in self.shared.values() if since_us is not None]
        return min(dues, default=None)

    def stored(self) -> StoredGroup:
        """The group for a snapshot."""
        places = [(topic, number, held) for (topic, number), held in self.places.items()]
        topics, members = list(self.topics.items()), list(self.members.values())
        return StoredGroup(
            self.name,
            self.policy,
            self.created_us,
            self.paused,
            topics,
            members,
            places,
            self.id,
            sorted(self.enlisted),
            list(self.shared.items()),
        )

    @classmethod
    def of(cls, stored: StoredGroup) -> GroupState:
        """Restore the group from a snapshot."""
        group = cls(stored.name, stored.policy, stored.created_us, stored.id)
        group.enlisted = set(stored.enlisted)
        group.paused = stored.paused
        group.topics = dict(stored.topics)
        group.members = {member.id: member for member in stored.members}
        group.places = {(topic, number): held for topic, number, held in stored.places}
        if stored.shared is not None:
            group.shared = dict(stored.shared)
        elif stored.policy.assignment == "shared":
            group.shared = dict.fromkeys(group.topics)
            group.places = {place: PartitionHolding() for place in group.all_places()}
        return group

    def verify(self) -> None:
        """Assert the invariants."""
        assert set(self.places) == set(self.all_places())
        assert self.shared.keys() <= self.topics.keys()
        for (topic, _), held in self.places.items():
            if topic in self.shared:
                assert held == PartitionHolding(generation=held.generation), "what is shared has no owner"
            assert self.members.keys() >= set(held.leaving), "who is leaving is a member"
            assert held.next not in held.leaving
            assert held.dividing or not held.leaving
            assert not held.owner or held.owner in self.members, "an owner is a member"
            assert not held.holder or held.holder in self.members, "the next owner is a member"
            assert held.owner or not held.revoking or held.leaving, "what nobody has need not be revoked"
        if self.policy.mode == "exclusive":
            assert len({held.owner for held in self.places.values() if held.owner}) <= 1
