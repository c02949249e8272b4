"""What is known of one group: its policy, its topics, its members, and who holds each partition."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tailrace.core.model.group_commands import Place
from tailrace.core.model.group_options import GroupPolicy

CALM_US = 10_000_000
"""So long there must have been enough partitions for all members before a topic is shared no more."""


class GroupMember(msgspec.Struct, frozen=True, array_like=True):
    """Somebody who consumes."""

    id: str
    topics: tuple[str, ...]
    client: str
    joined_us: int


class PartitionHolding(msgspec.Struct, frozen=True, array_like=True):
    """Who has a partition. While it is being revoked, `next` is who gets it (it may be the owner again). One
    that was shared until now has no owner then, and `leaving` are those who have not finished with it."""

    owner: str = ""
    generation: int = 0
    revoking: bool = False
    next: str = ""
    since_us: int = 0
    leaving: tuple[str, ...] = ()

    @property
    def dividing(self) -> bool:
        """Whether all members had it, and it is to be the next owner's alone."""
        return self.revoking and not self.owner

    @property
    def holder(self) -> str:
        """Who has it when all that is under way is over."""
        return self.next if self.revoking else self.owner


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """A topic of a group: its partitions now, and how many of them were there when it was enlisted.

    Those that came later are read from their beginning, whatever the group's `start` says: nothing is missed.
    """

    partitions: int
    first: int
    id: int = 0
    """Of the topic; 0: of a release that did not note it."""


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
    """None: of a release in which a group shared all of its topics or none."""


class GroupState:
    """One group. Only `Groups.apply` changes it."""

    def __init__(self, name: str, policy: GroupPolicy, created_us: int, number: int = 0) -> None:
        self.name = name
        self.id = number
        """Tells it from another of the same name, before or after it."""
        self.policy = policy
        self.created_us = created_us
        self.paused = False
        self.topics: dict[str, Extent] = {}
        self.members: dict[str, GroupMember] = {}
        self.places: dict[Place, PartitionHolding] = {}
        self.shared: dict[str, int | None] = {}
        """The topics from which every member takes, and since when each has enough partitions to be divided;
        None: it has not, or is never divided."""
        self.enlisted: set[Place] = set()
        """Partitions that have confirmed that they have the group."""

    def all_places(self) -> Iterable[Place]:
        """Every partition of every topic."""
        return (
            (topic, number) for topic, extent in self.topics.items() for number in range(extent.partitions)
        )

    def owned(self, member: str) -> list[tuple[Place, PartitionHolding]]:
        """What a member has, whether it is being revoked or not."""
        return [(place, holding) for place, holding in self.places.items() if holding.owner == member]

    def state_of(self, member: str) -> str:
        """What `Membership.state` says."""
        if self.paused:
            return "paused"
        if self.policy.mode == "exclusive" and self.active() != member:
            return "standby"
        return "active"

    def active(self) -> str:
        """The active member of an exclusive group; "" when there is none."""
        return next((holding.owner for holding in self.places.values() if holding.owner), "")

    def due_us(self) -> int | None:
        """When time itself changes something: the first place under revocation is taken by force, or a shared
        topic has had enough partitions for `CALM_US`."""
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
        """The group that a snapshot holds."""
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
