"""What is known of one group: its policy, its topics, its members, and who holds each partition."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tailrace.core.group_commands import Place
from tailrace.core.policy import GroupPolicy


class Member(msgspec.Struct, frozen=True, array_like=True):
    """Somebody who consumes."""

    id: str
    topics: tuple[str, ...]
    client: str
    joined_us: int


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """Who has a partition. While it is being revoked, `next` is who gets it (it may be the owner again)."""

    owner: str = ""
    generation: int = 0
    revoking: bool = False
    next: str = ""
    since_us: int = 0

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
    members: list[Member]
    places: list[tuple[str, int, Holding]]
    id: int = 0
    enlisted: list[Place] = []


class Group:
    """One group. Only `Groups.apply` changes it."""

    def __init__(self, name: str, policy: GroupPolicy, created_us: int, number: int = 0) -> None:
        self.name = name
        self.id = number
        """Tells it from another of the same name, before or after it."""
        self.policy = policy
        self.created_us = created_us
        self.paused = False
        self.topics: dict[str, Extent] = {}
        self.members: dict[str, Member] = {}
        self.places: dict[Place, Holding] = {}
        """Empty when the assignment is shared."""
        self.enlisted: set[Place] = set()
        """Partitions that have confirmed that they have the group."""

    @property
    def shared(self) -> bool:
        """Whether every member takes from every partition."""
        return self.policy.assignment == "shared"

    def all_places(self) -> Iterable[Place]:
        """Every partition of every topic."""
        return (
            (topic, number) for topic, extent in self.topics.items() for number in range(extent.partitions)
        )

    def owned(self, member: str) -> list[tuple[Place, Holding]]:
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

    def revoke_due_us(self) -> int | None:
        """When the first place under revocation is taken by force."""
        since = min((held.since_us for held in self.places.values() if held.revoking), default=None)
        return None if since is None else since + self.policy.revoke_timeout_ms * 1000

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
        )

    @classmethod
    def of(cls, stored: StoredGroup) -> Group:
        """The group that a snapshot holds."""
        group = cls(stored.name, stored.policy, stored.created_us, stored.id)
        group.enlisted = set(stored.enlisted)
        group.paused = stored.paused
        group.topics = dict(stored.topics)
        group.members = {member.id: member for member in stored.members}
        group.places = {(topic, number): held for topic, number, held in stored.places}
        return group

    def verify(self) -> None:
        """Assert the invariants."""
        assert set(self.places) == (set() if self.shared else set(self.all_places()))
        for held in self.places.values():
            assert not held.owner or held.owner in self.members, "an owner is a member"
            assert not held.holder or held.holder in self.members, "the next owner is a member"
            assert held.owner or not held.revoking, "what nobody has need not be revoked"
        if self.policy.mode == "exclusive":
            assert len({held.owner for held in self.places.values() if held.owner}) <= 1
