"""How the partitions of a group move: the topics that are shared, the next owners, and the facts for both.

A partition belongs to one member, or is shared by all members that want its topic. There are three moves:

    owner to owner      The owner is asked to finish (Revoking). When it has confirmed or is gone, or after
                        `revoke_timeout_ms`, the next owner has it under a higher generation (Assigned).
    owner to shared     At once, in the same generation: the owner continues, and the others may lease, too
                        (TopicsShared).
    shared to owner     Every partition gets its next owner, who continues to lease (TopicsDivided). The other
                        members are *leaving*: each is asked to finish, and confirms. When all have, or
                        after `revoke_timeout_ms`, the partition belongs to the next owner alone, in the same
                        generation (Assigned). Leases that others still have stay valid and hold their keys.

With `assignment = "auto"` a topic is shared as soon as more members want it than it has partitions. It is
divided again when there have been enough partitions for `CALM_US`, so that a member that comes and goes moves
nothing. A topic is never shared in a group with `ordering = "partition"`, nor in one whose mode has one owner
per partition.

Example: a topic with two partitions; (member, generation) for each.

    1 s     a joins                (a, 1) (a, 1)
    2 s     b joins                (a, 1) (a, 1, revoking: b is next)
            a confirms             (a, 1) (b, 2)
    3 s     c joins                shared, generations 1 and 2: three members, two partitions
    10 s    c leaves               shared; enough partitions since 10 s
    20 s    time passes            (a is next, 1; b is leaving) (b is next, 2; a is leaving)
            both confirm           (a, 1) (b, 2)

`plan` is a pure function of a group as it will be (a `Draft`): it returns the facts that lead from there to
where the group should be. Called again after these facts, it returns none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec

from tailrace.core.core_tuning import CALM_US
from tailrace.core.groups.assignment import assign, one_for_all
from tailrace.core.groups.group_state import GroupState, PartitionHolding
from tailrace.core.model import group_facts as facts
from tailrace.core.model.group_commands import Place
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.internal_commands import Sizes


class Draft(msgspec.Struct):
    """A group as it will be after the facts decided so far: its members in the order of joining, with the
    topics that they want, and the partitions of all its topics."""

    name: str
    policy: GroupPolicy
    members: dict[str, tuple[str, ...]]
    places: dict[Place, PartitionHolding]
    calm_us: dict[str, int | None]
    """The shared topics, and since when each has had enough partitions; see `GroupState.shared`."""

    def grow(self, topics: Sizes) -> None:
        """Add topics, or partitions of topics."""
        for topic, count in topics:
            if self.policy.assignment == "shared":
                self.calm_us.setdefault(topic, None)
            for number in range(count):
                self.places.setdefault((topic, number), PartitionHolding())

    def drop(self, topics: Collection[str]) -> None:
        """Remove topics."""
        self.places = {place: held for place, held in self.places.items() if place[0] not in topics}
        self.calm_us = {topic: since for topic, since in self.calm_us.items() if topic not in topics}


def draft_of(group: GroupState) -> Draft:
    """The group as it is."""
    members = wishes(group)
    return Draft(group.name, group.policy, members, dict(group.places), dict(group.shared))


def wishes(group: GroupState) -> dict[str, tuple[str, ...]]:
    """Members in the order of joining, with the topics that they want."""
    return {member.id: member.topics for member in group.members.values()}


def may_share(policy: GroupPolicy) -> bool:
    """Whether topics of a group become shared when more members want them than they have partitions."""
    return policy.assignment == "auto" and policy.mode == "queue" and policy.ordering != "partition"


def crowded(
    policy: GroupPolicy, members: dict[str, tuple[str, ...]], places: dict[Place, PartitionHolding]
) -> set[str]:
    """The topics that more members want than they have partitions; all topics of a group that always
    shares."""
    partitions = Counter(topic for topic, _ in places)
    if policy.assignment == "shared":
        return set(partitions)
    if not may_share(policy):
        return set()
    wanted = Counter(topic for topics in members.values() for topic in dict.fromkeys(topics))
    return {topic for topic, count in partitions.items() if wanted[topic] > count}


def plan(draft: Draft, now_us: int) -> list[Any]:
    """The facts that lead to the assignment that the members should have."""
    made: list[Any] = []
    if not draft.places:
        return made
    wanted = crowded(draft.policy, draft.members, draft.places)
    new = sorted(wanted - draft.calm_us.keys())
    if new:
        made.append(facts.TopicsShared(draft.name, new, now_us))
        draft.calm_us.update(dict.fromkeys(new))
    over = {
        topic
        for topic, since_us in draft.calm_us.items()
        if topic not in wanted and _is_over(draft.policy, since_us, now_us)
    }
    still = draft.calm_us.keys() - over
    alone = {place: held for place, held in draft.places.items() if place[0] not in still}
    return made + _moves(draft, alone, over, now_us)


def _is_over(policy: GroupPolicy, since_us: int | None, now_us: int) -> bool:
    """Whether a shared topic that need not be shared any more is divided now."""
    return not may_share(policy) or (since_us is not None and now_us - since_us >= CALM_US)


def _moves(draft: Draft, places: dict[Place, PartitionHolding], over: set[str], now_us: int) -> list[Any]:
    """Divide these partitions among the members; those of topics in `over` were shared until now."""
    members = draft.members
    holders = {place: held.holder if held.holder in members else "" for place, held in places.items()}
    spread = one_for_all if draft.policy.mode == "exclusive" else assign
    revoking: list[tuple[str, int, str]] = []
    dividing: list[tuple[str, int, str]] = []
    assigned: list[tuple[str, int, str, int]] = []
    for (topic, number), member in spread(members, holders).items():
        held = places[topic, number]
        if topic in over or held.dividing:
            if not leaving(held, topic, member, members, topic in over):
                assigned.append((topic, number, member, held.generation))
            elif topic in over or member != held.next:
                dividing.append((topic, number, member))
        elif held.owner not in members:
            if held.owner or member:
                assigned.append((topic, number, member, held.generation + 1))
        elif member != held.holder:
            revoking.append((topic, number, member))
    made: list[Any] = []
    if dividing or over:
        made.append(facts.TopicsDivided(draft.name, sorted(over), dividing, now_us))
    if revoking:
        made.append(facts.Revoking(draft.name, revoking, now_us))
    if assigned:
        made.append(facts.Assigned(draft.name, assigned, now_us))
    return made


def leaving(
    held: PartitionHolding, topic: str, member: str, members: dict[str, tuple[str, ...]], shared: bool
) -> tuple[str, ...]:
    """The members that have to finish with a partition before it belongs to `member` alone. It was `shared`
    until now, or is being divided already."""
    had = members if shared else (*held.leaving, held.next)
    return tuple(other for other in had if other != member and topic in members.get(other, ()))


def moved_on(given_up: dict[Place, PartitionHolding]) -> list[tuple[str, int, str, int]]:
    """The moves by which partitions that were given up go to their next owners."""
    return [
        (topic, number, held.next, held.generation + (not held.dividing))
        for (topic, number), held in given_up.items()
    ]
