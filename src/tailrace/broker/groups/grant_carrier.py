"""The grant carrier: brings data partitions to what coordinators decided, about groups, grants and pauses.

A coordinator decides who has which partition; the log of a data partition holds who may lease from it. The
two logs are brought together by a loop that only compares. For each partition of each group there is a
*wanted* state, derived from the coordinator, and a *confirmed* state, which the partition has synced:

    orders/0, group billing      member   generation   shared   paused   policy
    confirmed                    bob      6            no       no       P1
    wanted                       ann      7            no       no       P2
                                 └──── GrantTo(ann, 7) ────┘    same     Enlist with P2

    differs      command sent to the partition
    policy       Enlist, after a Delist of each deleted group of the same name that is still there
    paused       PauseLeases
    the holding  GrantTo (member, generation, shared)

When all replies have come, wanted becomes confirmed, and the members are told in the next turn: ann hears of
orders/0 only after orders/0 knows ann, so her first lease is not refused.

*Nothing is remembered.* All commands may be repeated. After a start, or when a partition was rebuilt from its
log, its state is read anew (`learn`) and the difference is sent again.

*Confirmed means synced*, whatever the topic promises (`broker.runtime.assurance`): members are told of no
grant that a power failure could take back.

*A partition may be ahead* of its coordinator: a reset raises the generation on the partition, and a crash may
take a decision from the coordinator that the partition has heard of already. Then the coordinator is raised
above it (`raised`), because a generation never goes back.

Each partition goes its own way: one that is slow or faulty keeps no other waiting. A refused command is sent
again after `RETRY_US`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from tailrace.broker.groups.member_sessions import MemberAssignment
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.topics import Topics
from tailrace.core.groups.group_state import GroupState, PartitionHolding
from tailrace.core.model.commands import Reply
from tailrace.core.model.group_commands import Place
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import Delist, Enlist, EvictMember, GrantTo, PauseLeases

log = logging.getLogger("tailrace.groups")

RETRY_US = 1_000_000


class WantedGrant(NamedTuple):
    """What a partition has to know, or has confirmed: its member, or that all members share it; whether the
    group is paused; the options of the group."""

    member: str
    generation: int
    shared: bool
    paused: bool
    policy: GroupPolicy

    @property
    def holding(self) -> tuple[str, int, bool]:
        """The part that concerns members: member, generation, shared."""
        return self[:3]


class _Carried:
    """One group: the confirmed grants of its partitions, and the partitions with commands under way."""

    def __init__(self) -> None:
        self.confirmed: dict[Place, WantedGrant] = {}
        self.busy: set[Place] = set()
        self.retry = self.warned = False


class GrantAsks(NamedTuple):
    """What coordinators know."""

    find: Callable[[str], GroupState | None]
    """A group by name."""
    deleted: Callable[[str, Place], Collection[int]]
    """Ids of the deleted groups of this name that a partition has still to forget."""


class GrantTells(NamedTuple):
    """Who hears of partitions that have answered."""

    changed: Callable[[str], None]
    """A partition of this group has confirmed something."""
    raised: Callable[[str, list[tuple[str, int, int]]], None]
    """Partitions of this group are ahead of their coordinator."""
    enlisted: Callable[[str, Place], None]
    """A partition has confirmed that it has a group."""
    evicted: Callable[[str, str], None]
    """A member of a group is gone."""


class GrantCarrier:
    """Compares and sends."""

    def __init__(self, topics: Topics, pump: Pump, asks: GrantAsks, tells: GrantTells) -> None:
        self._topics = topics
        self._pump = pump
        self._asks = asks
        self._tells = tells
        self._groups: dict[str, _Carried] = {}

    def runtime(self, place: Place) -> QueuePartition | None:
        """The runtime of a data partition; None when the topic or the partition does not exist."""
        host = self._topics.find(place[0])
        if host is None or place[1] >= len(host.runtimes):
            return None
        return host.runtimes[place[1]]

    def confirmed(self, group: str, place: Place) -> WantedGrant | None:
        """The grant that a partition has confirmed; None without any."""
        carried = self._groups.get(group)
        return None if carried is None else carried.confirmed.get(place)

    def settled(self, group: GroupState, member: str | None = None) -> bool:
        """Whether every working partition has the group with its options, and has confirmed the grants to a
        member."""
        for place in group.all_places():
            runtime, grant = self.runtime(place), self.confirmed(group.name, place)
            if runtime is None or runtime.fault is not None:
                continue
            if grant is None or grant.paused != group.paused or grant.policy != group.policy:
                return False
            want = _wanted(group, place)
            if (want.shared or want.member == member) and grant.holding != want.holding:
                return False
        return True

    def standings(self, group: GroupState) -> dict[str, MemberAssignment]:
        """The assignment of every member of a group, as far as the partitions have confirmed it."""
        standings = {name: MemberAssignment([], [], group.state_of(name)) for name in group.members}
        for place, held in group.places.items():
            grant = self.confirmed(group.name, place)
            if grant is None or grant.generation < held.generation:  # Greater for a moment after a reset.
                continue
            for name in _takers(group, place[0], held, grant):
                standings[name].owned.append((*place, grant.generation))
                if held.revoking and (held.owner or name != held.next):
                    standings[name].revoking.append(place)
        if group.policy.mode == "exclusive" and not group.paused:
            # A new active member is active when the partitions know it, not before.
            return {
                name: standing._replace(state="active" if standing.owned else "standby")
                for name, standing in standings.items()
            }
        return standings

    # -- carrying

    def knows(self, group: str) -> bool:
        """Whether a group was adopted."""
        return group in self._groups

    def adopt(self, group: GroupState) -> None:
        """After recovery: read from the partitions what they have confirmed."""
        self._groups[group.name] = _Carried()
        for place in group.all_places():
            runtime = self.runtime(place)
            if runtime is not None and runtime.fault is None:
                self.learn(group, place, runtime)

    def learn(self, group: GroupState, place: Place, runtime: QueuePartition) -> None:
        """A partition was built from its log: what it has of a group is what it has confirmed."""
        carried = self._groups.setdefault(group.name, _Carried())
        queues = runtime.state.queues
        reached = queues.grant(group.name)
        same = group.id in (0, queues.id_of(group.name))
        policy = queues.policy(group.name)
        if reached is not None and same and policy is not None:
            shared = queues.is_shared(group.name)
            carried.confirmed[place] = WantedGrant(*reached, shared, queues.is_paused(group.name), policy)
        else:
            carried.confirmed.pop(place, None)

    def carry(self, group: GroupState) -> None:
        """Compare all partitions of a group with the wanted state, and send the differences."""
        self._carry_all(group, self._groups.setdefault(group.name, _Carried()), group.all_places())

    def _carry_all(self, group: GroupState, carried: _Carried, places: Iterable[Place]) -> None:
        ahead: list[tuple[str, int, int]] = []
        for place in places:
            self._carry(group, carried, place, ahead)
        if ahead:
            self._tells.raised(group.name, ahead)

    def _carry(
        self, group: GroupState, carried: _Carried, place: Place, ahead: list[tuple[str, int, int]]
    ) -> None:
        """Compare one partition and send the difference; add it to `ahead` when it is ahead of the
        coordinator."""
        runtime = self.runtime(place)
        if place in carried.busy or runtime is None:
            return
        have, want = carried.confirmed.get(place), _wanted(group, place)
        if runtime.damage is not None:
            # A damaged partition confirms nothing any more. Its member gets it all the same, and so hears of
            # the damage when it asks for messages.
            carried.confirmed[place] = want
            if want != have:
                self._tells.changed(group.name)
        if runtime.fault is not None:
            return
        queues = runtime.state.queues
        reached = queues.grant(group.name)
        old = self._asks.deleted(group.name, place)
        if queues.id_of(group.name) in old:
            reached = None  # A grant of a deleted group of the same name.
        if reached is not None and _astray(reached, queues.is_shared(group.name), want):
            same = (reached[0], queues.is_shared(group.name)) == (want.member, want.shared)
            if same and have is not None:
                carried.confirmed[place] = have._replace(member=reached[0], generation=reached[1])
            ahead.append((*place, reached[1] + (not same)))
            return
        if want == have:
            return
        commands: list[Any] = []
        if have is None or have.policy != want.policy:
            commands += [Delist(group.name, number) for number in old]
            late = place[1] >= group.topics[place[0]].first
            if reached is None and place in group.enlisted:
                text = "%s/%d has lost its place in group %s: it begins with the first message that is there"
                log.error(text, *place, group.name)
                late = True
            start = runtime.state.start_offset if late else None
            commands.append(Enlist(group.name, group.policy, start, group.id))
        if have is None or have.paused != want.paused:
            commands.append(PauseLeases(group.name, want.paused))
        if have is None or have.holding != want.holding:
            commands.append(GrantTo(group.name, *want.holding))
        carried.busy.add(place)
        self._send(
            runtime, commands, lambda problem: self._carried(carried, group.name, place, want, problem)
        )

    def _send(
        self, runtime: QueuePartition, commands: list[Any], done: Callable[[Refusal | None], None]
    ) -> None:
        """Submit commands to a partition; `done` gets the first refusal, or None, when all are answered."""
        left, problem = len(commands), None

        def answered(reply: Reply, parts: Any) -> None:
            nonlocal left, problem
            left -= 1
            if isinstance(reply, Refusal) and problem is None:
                problem = reply
            if not left:
                done(problem)

        for command in commands:
            runtime.submit(command, b"", runtime.surely(answered))

    def _carried(
        self, carried: _Carried, name: str, place: Place, want: WantedGrant, problem: Refusal | None
    ) -> None:
        carried.busy.discard(place)
        if self._groups.get(name) is not carried:
            return  # The group was deleted meanwhile; `DeletionCarrier` carries that.
        if problem is None:
            carried.confirmed[place] = want
            self._tells.enlisted(name, place)
            carried.warned = False
            self._tells.changed(name)
        else:
            carried.confirmed.pop(place, None)
            self._retry(carried, name, place, problem)
            return
        group = self._asks.find(name)
        if group is not None and place[0] in group.topics:
            self._carry_all(group, carried, [place])

    def _retry(self, carried: _Carried, name: str, place: Place, problem: Refusal) -> None:
        if carried.retry:
            return
        if not carried.warned:
            log.warning("group %s on %s/%d: %s; it is tried again", name, *place, problem.message)
        carried.retry = carried.warned = True

        def again(now_us: int) -> None:
            carried.retry = False
            group = self._asks.find(name)
            if group is not None and self._groups.get(name) is carried:
                self.carry(group)

        self._pump.at(self._pump.clock.now_us() + RETRY_US, again)

    def evict(self, group: GroupState, member: str, *, left: bool = False) -> None:
        """A member leaves or is gone: give back its leases on all partitions. A crash may lose this; then the
        leases time out. Partitions of its own get their next owner by `carry`; this is for those that are or
        were shared."""
        self._tells.evicted(group.name, member)
        for place in group.all_places():
            runtime = self.runtime(place)
            if runtime is not None and runtime.state.queues.has_leases(group.name, member):
                runtime.submit(EvictMember(group.name, member, left=left), b"", _unheard)

    def forget(self, group: str) -> None:
        """A group was deleted: forget its confirmed grants, for a new group of that name is another one."""
        self._groups.pop(group, None)

    def forget_topic(self, topic: str) -> None:
        """A topic was deleted: forget its confirmed grants, for a new topic of that name is another one."""
        for carried in self._groups.values():
            carried.confirmed = {
                place: have for place, have in carried.confirmed.items() if place[0] != topic
            }


def _wanted(group: GroupState, place: Place) -> WantedGrant:
    held = group.places[place]
    shared = place[0] in group.shared or held.dividing
    return WantedGrant(held.owner, held.generation, shared, group.paused, group.policy)


def _takers(group: GroupState, topic: str, held: PartitionHolding, grant: WantedGrant) -> list[str]:
    """The members that may lease from a partition, as far as the partition has confirmed that."""
    if topic not in group.shared:
        names = [*held.leaving, held.next] if held.dividing else [held.owner]
        return [name for name in names if name and (grant.shared or grant.member == name)]
    if grant.shared:
        return [name for name, member in group.members.items() if topic in member.topics]
    return [grant.member] if grant.member in group.members else []


def _astray(reached: tuple[str, int], shared: bool, want: WantedGrant) -> bool:
    """Whether a partition has a grant that the coordinator has not given. Within one generation a partition
    may become shared, or belong to one member again."""
    if reached[1] != want.generation:
        return reached[1] > want.generation
    return reached[0] != want.member and not (shared or want.shared)


def _unheard(reply: object, parts: object) -> None:
    """Ignore the reply."""
