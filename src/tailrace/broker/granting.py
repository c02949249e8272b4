"""What coordinators decided, carried to the data partitions: groups enlisted, partitions granted, pauses.

A partition's log holds only who may lease from it. For every partition of every group the wanted state is
compared with what the partition has confirmed, and the difference is sent; all commands may be repeated, so
after a crash everything is simply sent again. A partition has confirmed when it has synced, whatever its
topic promises (`broker.assurance`): members are told of no grant, and coordinators forget no deletion, that a
power failure could take back. Each partition goes its own way: one that is slow or faulty keeps no other
waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from tailrace.broker.host import Topics
from tailrace.broker.pump import Pump
from tailrace.broker.seats import Standing
from tailrace.broker.shard import Shard
from tailrace.core.commands import Reply
from tailrace.core.group_commands import Place
from tailrace.core.inner_commands import Delist, Enlist, EvictMember, GrantTo, PauseLeases
from tailrace.core.model import Refusal
from tailrace.core.rosters import Group, Holding

log = logging.getLogger("tailrace.groups")

RETRY_US = 1_000_000


class Grant(NamedTuple):
    """What a partition shall know, or has confirmed: who has it, and whether the group leases at all."""

    member: str
    generation: int
    paused: bool


class _Carried:
    """One group: what its partitions have confirmed, and where something is under way."""

    def __init__(self) -> None:
        self.confirmed: dict[Place, Grant] = {}
        self.busy: set[Place] = set()
        self.retry = self.warned = False


class Granting:
    """Brings data partitions to what coordinators decided. `changed` is called with the name of a group when
    one of its partitions has confirmed something; `raised` when partitions are ahead of their coordinator."""

    def __init__(
        self,
        topics: Topics,
        pump: Pump,
        find: Callable[[str], Group | None],
        changed: Callable[[str], None],
        raised: Callable[[str, list[tuple[str, int, int]]], None],
    ) -> None:
        self._topics = topics
        self._pump = pump
        self._find = find
        self._changed = changed
        self._raised = raised
        self._groups: dict[str, _Carried] = {}
        self.deleted: Callable[[str, Place], Collection[int]] = lambda group, place: ()
        """The deleted groups of that name that a partition has still to forget."""
        self.enlisted: Callable[[str, Place], None] = lambda group, place: None
        """Called when a partition has confirmed that it has a group."""
        self.evicted: Callable[[str, str], None] = lambda group, member: None
        """Called with the group and the member that is gone."""

    def shard(self, place: Place) -> Shard | None:
        """The data partition of a place; None when the topic or the partition is not there."""
        host = self._topics.find(place[0])
        if host is None or place[1] >= len(host.shards):
            return None
        return host.shards[place[1]]

    def confirmed(self, group: str, place: Place) -> Grant | None:
        """What a partition has confirmed."""
        carried = self._groups.get(group)
        return None if carried is None else carried.confirmed.get(place)

    def settled(self, group: Group, member: str | None = None) -> bool:
        """Whether every partition that works has the group as it is, and those of a member are granted to
        it."""
        for place in group.all_places():
            shard, grant = self.shard(place), self.confirmed(group.name, place)
            if shard is None or shard.fault is not None:
                continue
            if grant is None or grant.paused != group.paused:
                return False
            held = group.places.get(place)
            if held is None or held.owner != member:
                continue
            if grant[:2] != (held.owner, held.generation):
                return False
        return True

    def standings(self, group: Group) -> dict[str, Standing]:
        """What every member of a group has, as far as the partitions have confirmed it."""
        standings = {name: Standing([], [], group.state_of(name)) for name in group.members}
        if group.shared:
            for (topic, number), generation in self._shared_generations(group).items():
                for name, member in group.members.items():
                    if topic in member.topics:
                        standings[name].owned.append((topic, number, generation))
            return standings
        for place, held in group.places.items():
            grant = self.confirmed(group.name, place)
            if not held.owner or grant is None or grant.member != held.owner:
                continue
            if grant.generation >= held.generation:  # Greater for a moment after a reset.
                standings[held.owner].owned.append((*place, grant.generation))
                if held.revoking:
                    standings[held.owner].revoking.append(place)
        if group.policy.mode == "exclusive" and not group.paused:
            # The next one is active when the partitions know it, not before.
            return {
                name: standing._replace(state="active" if standing.owned else "standby")
                for name, standing in standings.items()
            }
        return standings

    def _shared_generations(self, group: Group) -> dict[Place, int]:
        found = {}
        for place in group.all_places():
            shard = self.shard(place)
            if shard is not None and self.confirmed(group.name, place) is not None:
                grant = shard.state.queues.grant(group.name)
                if grant is not None:
                    found[place] = grant[1]
                elif shard.damage is not None:
                    found[place] = 0
        return found

    # -- carrying

    def knows(self, group: str) -> bool:
        """Whether it was adopted."""
        return group in self._groups

    def adopt(self, group: Group) -> None:
        """After recovery: what partitions have on disk they need not be told again."""
        self._groups[group.name] = _Carried()
        for place in group.all_places():
            shard = self.shard(place)
            if shard is not None and shard.fault is None:
                self.learn(group, place, shard)

    def learn(self, group: Group, place: Place, shard: Shard) -> None:
        """A partition was built from its log: what it has of a group there is all that it confirmed."""
        carried = self._groups.setdefault(group.name, _Carried())
        queues = shard.state.queues
        reached = queues.grant(group.name)
        same = group.id in (0, queues.id_of(group.name))
        if reached is not None and same and queues.policy(group.name) == group.policy:
            owned = ("", 0) if group.shared else reached
            carried.confirmed[place] = Grant(*owned, queues.is_paused(group.name))
        else:
            carried.confirmed.pop(place, None)

    def carry(self, group: Group) -> None:
        """Compare all partitions of a group with what is wanted, and send what is missing."""
        self._carry_all(group, self._groups.setdefault(group.name, _Carried()), group.all_places())

    def _carry_all(self, group: Group, carried: _Carried, places: Iterable[Place]) -> None:
        ahead: list[tuple[str, int, int]] = []
        for place in places:
            self._carry(group, carried, place, ahead)
        if ahead:
            self._raised(group.name, ahead)

    def _carry(
        self, group: Group, carried: _Carried, place: Place, ahead: list[tuple[str, int, int]]
    ) -> None:
        """One partition; into `ahead` when it is further than the coordinator knows: after a reset, or after
        a crash that took a decision from the coordinator which the partition had heard of already."""
        shard = self.shard(place)
        if place in carried.busy or shard is None:
            return
        held = group.places.get(place)
        have = carried.confirmed.get(place)
        owner, generation = ("", 0) if held is None else (held.owner, held.generation)
        want = Grant(owner, generation, group.paused)
        if shard.damage is not None:
            # It has nothing to lease and nothing to confirm any more. Its member has it all the same, and so
            # hears of the damage when it asks for messages.
            carried.confirmed[place] = want
            if want != have:
                self._changed(group.name)
        if shard.fault is not None:
            return
        reached = shard.state.queues.grant(group.name)
        old = self.deleted(group.name, place)
        if shard.state.queues.id_of(group.name) in old:
            reached = None  # That is of a group which was deleted before this one was made.
        if held is not None and reached is not None and _astray(reached, held):
            if reached[0] == held.owner and have is not None:
                carried.confirmed[place] = Grant(*reached, have.paused)
            ahead.append((*place, reached[1] + (reached[0] != held.owner)))
            return
        if want == have:
            return
        commands: list[Any] = []
        if have is None:
            commands += [Delist(group.name, number) for number in old]
            late = place[1] >= group.topics[place[0]].first
            if reached is None and place in group.enlisted:
                text = "%s/%d has lost its place in group %s: it begins with the first message that is there"
                log.error(text, *place, group.name)
                late = True
            start = shard.state.start_offset if late else None
            commands.append(Enlist(group.name, group.policy, start, group.id))
        if have is None or have.paused != want.paused:
            commands.append(PauseLeases(group.name, want.paused))
        if held is not None and (have is None or have[:2] != want[:2]) and want.generation:
            commands.append(GrantTo(group.name, want.member, want.generation))
        carried.busy.add(place)
        self._send(shard, commands, lambda problem: self._carried(carried, group.name, place, want, problem))

    def _send(self, shard: Shard, commands: list[Any], done: Callable[[Refusal | None], None]) -> None:
        """Give commands to a partition; `done` gets the first refusal, when all are answered."""
        left, problem = len(commands), None

        def answered(reply: Reply, parts: Any) -> None:
            nonlocal left, problem
            left -= 1
            if isinstance(reply, Refusal) and problem is None:
                problem = reply
            if not left:
                done(problem)

        for command in commands:
            shard.submit(command, b"", shard.surely(answered))

    def _carried(
        self, carried: _Carried, name: str, place: Place, want: Grant, problem: Refusal | None
    ) -> None:
        carried.busy.discard(place)
        if self._groups.get(name) is not carried:
            return  # Deleted meanwhile; its end is carried by itself.
        if problem is None:
            carried.confirmed[place] = want
            self.enlisted(name, place)
            carried.warned = False
            self._changed(name)
        else:
            carried.confirmed.pop(place, None)
            self._retry(carried, name, place, problem)
            return
        group = self._find(name)
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
            group = self._find(name)
            if group is not None and self._groups.get(name) is carried:
                self.carry(group)

        self._pump.at(self._pump.clock.now_us() + RETRY_US, again)

    def evict(self, group: Group, member: str, *, left: bool = False) -> None:
        """A member leaves, or one of a shared group is gone: give back what it has everywhere. Should that
        get lost, its leases end by themselves."""
        self.evicted(group.name, member)
        for place in group.all_places():
            shard = self.shard(place)
            if shard is not None:
                shard.submit(EvictMember(group.name, member, left=left), b"", _unheard)

    def forget(self, group: str) -> None:
        """A group was deleted: one that is made again under its name is another."""
        self._groups.pop(group, None)

    def forget_topic(self, topic: str) -> None:
        """A topic was deleted: one that is made again under its name is another."""
        for carried in self._groups.values():
            carried.confirmed = {
                place: have for place, have in carried.confirmed.items() if place[0] != topic
            }


def _astray(reached: tuple[str, int], held: Holding) -> bool:
    """Whether a partition is at a generation that the coordinator has not given it."""
    return reached[1] > held.generation or (reached[1] == held.generation and reached[0] != held.owner)


def _unheard(reply: object, parts: object) -> None:
    """Nobody waits for it."""
