"""Grants: data partitions are brought to what a coordinator decided, about groups, grants and pauses.

A coordinator decides who has which partition; the log of a data partition holds who may lease from it. The
two logs are brought together by a process that only compares. For each partition of each group there is a
*wanted* state, derived from the coordinator, and a *confirmed* state, which the partition has reported or has
taken, and has synced:

    orders/0, group billing      member   generation   shared   paused   policy
    confirmed                    bob      6            no       no       P1
    wanted                       ann      7            no       no       P2
                                 └──── GrantTo(ann, 7) ────┘    same     Enlist with P2

    differs      command sent to the partition
    policy       Enlist; before that, and confirmed, a Delist of each deleted group of the same name
    paused       PauseLeases
    the holding  GrantTo (member, generation, shared)

The steps of one partition; each answer waits for a sync, whatever the topic promises:

    ReportGroup ──▶ compare ──▶ commands, all at once ──▶ confirmed: the members are told
         ▲                      └─ refused: again after a pause, or at once when the partition is ahead
         └─ a new life · the partition was rebuilt · its group was reset

*Members are told last.* Ann hears of orders/0 only after orders/0 knows ann and has synced that, so her first
lease is not refused, and no power failure takes back what she was told.

*Nothing is remembered.* All commands may be repeated. A new life begins with reports; only a group that is
created in this life goes without. Until all partitions of a group have reported, or for `PATIENCE_US`, its
members are told nothing, so that nobody gives up what it has.

*A partition may be ahead* of its coordinator: a reset raises the generation on the partition, and a crash may
take a decision from the coordinator that the partition has heard of already. Then the coordinator is raised
above it (`RaiseGenerations`), because a generation never goes back.

Each partition goes its own way: one that is slow or faulty keeps no other waiting. A damaged one confirms
nothing any more. Its member gets it all the same, and so hears of the damage when it asks for messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from tailrace.core.groups.group_state import GroupState, PartitionHolding
from tailrace.core.model.commands import Reply
from tailrace.core.model.group_commands import Place
from tailrace.core.model.group_facts import GroupCreated, GroupFact, PlacesEnlisted
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.model.internal_commands import (
    ConfirmEnlisted,
    Delist,
    Enlist,
    GrantTo,
    GroupHeld,
    PauseLeases,
    RaiseGenerations,
    ReportGroup,
)
from tailrace.core.process.process import (
    After,
    Answered,
    Asked,
    Cancel,
    Due,
    Effect,
    Event,
    FactsStored,
    Log,
    Now,
    Submit,
    Tell,
)
from tailrace.errors import Corrupt, Fenced, NotFound, StorageFault

RETRY_US = 1_000_000
PATIENCE_US = 5_000_000
"""Longest time for which a silent partition keeps the members of its groups from being told anything."""
ILL = frozenset((Corrupt.code, StorageFault.code))


class Recheck(NamedTuple):
    """Ask for reports again: those of a group (None: of all), from a topic or one partition of it."""

    group: str | None = None
    topic: str | None = None
    partition: int | None = None


class MemberAssignment(NamedTuple):
    """The assignment of a member: the part of `Membership` whose changes it hears of."""

    owned: list[tuple[str, int, int]]
    revoking: list[Place]
    state: str


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


class Deletions(Protocol):
    """The deletions that a coordinator knows of."""

    def ids(self, group: str, place: Place) -> list[int]:
        """Ids of the groups of a name that a partition still has to forget."""
        ...


class _Carried:
    """A group on one partition of a topic with this id."""

    def __init__(self, topic_id: int) -> None:
        self.topic_id = topic_id
        self.number = 0
        """Tells what is under way from what was."""
        self.state: Literal["unknown", "asked", "known", "sent", "away"] = "unknown"
        self.again = False
        """Whether to ask for a report when what is under way has ended."""
        self.heard = self.out = False
        """Whether there was an answer in this life, and whether nobody should wait for the next."""
        self.confirmed: WantedGrant | None = None
        self.start_offset = 0
        self.want: WantedGrant | None = None
        self.left = 0
        self.forgetting: set[int] = set()
        self.forgotten: set[int] = set()
        """Ids of deleted groups of the same name that the partition is asked to forget, or has forgotten."""
        self.problem: Refusal | None = None

    @classmethod
    def of_new(cls, group: GroupState, place: TopicPartition) -> _Carried:
        """A group that was created in this life."""
        each = cls(group.topics[place.topic].id)
        each.state, each.heard = "known", True
        return each


class _CarriedGroup:
    """A group on all its partitions."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.places: dict[TopicPartition, _Carried] = {}
        self.retry = self.warned = self.late = False


class _GrantTag(NamedTuple):
    what: Literal["report", "send", "raise", "retry", "patience"]
    group: str
    id: int
    place: TopicPartition | None = None
    number: int = 0


class GrantProcess:
    """Compares and sends, for all groups of one coordinator."""

    WATCHES: frozenset[type] = frozenset(GroupFact.__args__) - {PlacesEnlisted}

    def __init__(self, home: TopicPartition, groups: Mapping[str, GroupState], deletions: Deletions) -> None:
        self._home = home
        self._groups = groups
        self._deletions = deletions
        self._carried: dict[str, _CarriedGroup] = {}
        self._number = 0

    # -- questions of those who answer members

    def ready(self, group: GroupState) -> bool:
        """Whether the members of a group may be told what they have."""
        carried = self._of(group)
        return carried is not None and (carried.late or all(each.heard for each in carried.places.values()))

    def _of(self, group: GroupState) -> _CarriedGroup | None:
        """What is known of this group, and not of an earlier one of its name."""
        carried = self._carried.get(group.name)
        return carried if carried is not None and carried.id == group.id else None

    def settled(self, group: GroupState, member: str | None = None) -> bool:
        """Whether every working partition has the group with its options, and has confirmed the grants to a
        member."""
        carried = self._of(group)
        if carried is None:
            return False
        for place in _places(group):
            each = carried.places.get(place)
            if each is not None and each.out:
                continue
            grant = None if each is None else each.confirmed
            if grant is None or grant.paused != group.paused or grant.policy != group.policy:
                return False
            want = _wanted(group, place)
            if (want.shared or want.member == member) and grant.holding != want.holding:
                return False
        return True

    def assignments(self, group: GroupState) -> dict[str, MemberAssignment]:
        """The assignment of every member of a group, as far as the partitions have confirmed it."""
        found = {name: MemberAssignment([], [], group.state_of(name)) for name in group.members}
        carried = self._of(group) or _CarriedGroup(group.id)
        for place, held in group.places.items():
            each = carried.places.get(TopicPartition(*place))
            grant = None if each is None else each.confirmed
            if grant is None or grant.generation < held.generation:  # Greater for a moment after a reset.
                continue
            for name in _takers(group, place[0], held, grant):
                found[name].owned.append((*place, grant.generation))
                if held.revoking and (held.owner or name != held.next):
                    found[name].revoking.append(place)
        if group.policy.mode == "exclusive" and not group.paused:
            # A new active member is active when the partitions know it, not before.
            return {
                name: each._replace(state="active" if each.owned else "standby")
                for name, each in found.items()
            }
        return found

    # -- steps

    def step(self, event: Event, now: Now) -> Sequence[Effect]:
        """See `Process.step`."""
        if isinstance(event, Answered):
            return self._answered(event.tag, event.reply) if isinstance(event.tag, _GrantTag) else ()
        if isinstance(event, Due):
            return self._due(event.tag) if isinstance(event.tag, _GrantTag) else ()
        if isinstance(event, FactsStored):
            born = {fact.id for fact in event.facts if isinstance(fact, GroupCreated)}
            names = dict.fromkeys(fact.group for fact in event.facts)
            return [effect for name in names for effect in self._carry(name, born, new=True)]
        if isinstance(event, Asked):
            return self._recheck(event.request)
        born = {group.id for group in self._groups.values()}
        return [effect for name in list(self._groups) for effect in self._carry(name, born)]  # Begun.

    def _recheck(self, recheck: Recheck) -> Sequence[Effect]:
        effects: list[Effect] = []
        for name, carried in list(self._carried.items()):
            if recheck.group not in (None, name):
                continue
            found = False
            for place, each in carried.places.items():
                if recheck.topic not in (None, place.topic) or recheck.partition not in (
                    None,
                    place.partition,
                ):
                    continue
                found = True
                if each.state in ("asked", "sent"):
                    each.again = True
                else:
                    each.state = "unknown"
            if found:
                effects += self._carry(name)
        return effects

    def _due(self, tag: _GrantTag) -> Sequence[Effect]:
        carried = self._carried.get(tag.group)
        if carried is None or carried.id != tag.id:
            return ()
        if tag.what == "patience":
            carried.late = True
            return (Tell(tag.group),)
        carried.retry = False
        return self._carry(tag.group)

    def _carry(self, name: str, born: Collection[int] = (), *, new: bool = False) -> list[Effect]:
        """Compare all partitions of a group with the wanted state, and send the differences. A group is
        carried from when its creation is durable (`born`), because then the deletion of the one before is,
        too: that one is forgotten on the partitions first, and must not come back. No partition has reported
        a `new` group, so none is asked."""
        group, carried = self._groups.get(name), self._carried.get(name)
        if group is None:
            self._carried.pop(name, None)
            return []
        effects: list[Effect] = []
        if carried is None or carried.id != group.id:
            if group.id not in born:
                return []
            carried = self._carried[name] = _CarriedGroup(group.id)
            if new:
                carried.late = True
                carried.places = {place: _Carried.of_new(group, place) for place in _places(group)}
            else:
                effects.append(After(_GrantTag("patience", name, group.id), PATIENCE_US))
        places: dict[TopicPartition, _Carried] = {}
        for place in _places(group):
            each, topic_id = carried.places.get(place), group.topics[place.topic].id
            places[place] = _Carried(topic_id) if each is None or each.topic_id != topic_id else each
        carried.places = places
        return effects + self._carry_to(group, carried, places)

    def _carry_to(
        self, group: GroupState, carried: _CarriedGroup, places: Mapping[TopicPartition, _Carried]
    ) -> list[Effect]:
        effects: list[Effect] = []
        ahead: list[tuple[str, int, int]] = []
        for place, each in places.items():
            if each.state == "unknown":
                each.state = "asked"
                tag = self._tag("report", group, place, each)
                effects.append(Submit(tag, place, ReportGroup(group.name), topic_id=each.topic_id))
            elif each.state == "known":
                want = _wanted(group, place)
                have = each.confirmed
                if have is not None and _astray(have, want):
                    same = (have.member, have.shared) == (want.member, want.shared)
                    ahead.append((*place, have.generation + (not same)))
                elif have != want:
                    effects += self._send(group, place, each, want)
        if ahead:
            raised = RaiseGenerations(group.name, ahead)
            tag = _GrantTag("raise", group.name, group.id)
            effects.append(Submit(tag, self._home, raised, sure=False))
        return effects

    def _send(
        self, group: GroupState, place: TopicPartition, each: _Carried, want: WantedGrant
    ) -> Iterator[Effect]:
        """Send what differs; all commands at once, for they are decided in order."""
        have = each.confirmed
        commands: list[Delist | Enlist | PauseLeases | GrantTo] = []
        old = set(self._deletions.ids(group.name, place)) - each.forgotten
        if old and (have is None or have.policy != want.policy):
            # First of all, or the group would go on where a deleted one has stopped.
            commands += [Delist(group.name, number) for number in sorted(old)]
            yield from self._all(group, place, each, commands)
            each.forgetting = old
            return
        if have is None or have.policy != want.policy:
            late = place.partition >= group.topics[place.topic].first
            if have is None and place in group.enlisted:
                text = f"{place} has lost its place in group {group.name}"
                yield Log("error", f"{text}: it begins with the first message that is there")
                late = True
            start = each.start_offset if late else None
            commands.append(Enlist(group.name, group.policy, start, group.id))
        if have is None or have.paused != want.paused:
            commands.append(PauseLeases(group.name, want.paused))
        if have is None or have.holding != want.holding:
            commands.append(GrantTo(group.name, *want.holding))
        each.want = want
        yield from self._all(group, place, each, commands)

    def _all(
        self, group: GroupState, place: TopicPartition, each: _Carried, commands: Sequence[Any]
    ) -> Iterator[Effect]:
        each.state, each.left, each.problem, each.forgetting = "sent", len(commands), None, set()
        tag = self._tag("send", group, place, each)
        for command in commands:
            yield Submit(tag, place, command, topic_id=each.topic_id)

    def _tag(
        self, what: Literal["report", "send"], group: GroupState, place: TopicPartition, each: _Carried
    ) -> _GrantTag:
        self._number += 1
        each.number = self._number
        return _GrantTag(what, group.name, group.id, place, each.number)

    def _answered(self, tag: _GrantTag, reply: Reply | GroupHeld) -> Sequence[Effect]:
        group, carried = self._groups.get(tag.group), self._carried.get(tag.group)
        if tag.what == "raise" and carried is not None and carried.id == tag.id:
            return self._retry(carried, tag) if isinstance(reply, Refusal) else ()
        if group is None or carried is None or tag.place is None or not tag.id == carried.id == group.id:
            return ()  # The group was deleted meanwhile; `DeletionProcess` carries that.
        each = carried.places.get(tag.place)
        if each is None or each.number != tag.number:
            return ()  # Its topic was.
        if tag.what == "report":
            effects = self._reported(group, tag.place, each, reply)
            if not carried.late and all(other.heard for other in carried.places.values()):
                carried.late = True
                effects.append(Cancel(_GrantTag("patience", group.name, group.id)))
        else:
            each.left -= 1
            if isinstance(reply, Refusal) and each.problem is None:
                each.problem = reply
            if each.left:
                return ()
            effects = self._confirmed(group, tag.place, each)
        if each.state == "unknown" and (each.problem is None or each.problem.code != Fenced.code):
            return effects + self._retry(carried, tag)
        if each.again:
            each.again, each.state = False, "unknown"
        return effects + self._carry_to(group, carried, {tag.place: each})

    def _reported(
        self, group: GroupState, place: TopicPartition, each: _Carried, held: Reply | GroupHeld
    ) -> list[Effect]:
        if isinstance(held, Refusal):
            each.problem = held
            if held.code == NotFound.code:  # Its topic is unknown: somebody will ask again when that changes.
                each.state, each.heard, each.out, each.confirmed = "away", True, True, None
                return [Tell(group.name)]
            return self._refused(group, place, each, held)
        assert isinstance(held, GroupHeld)
        each.state, each.heard, each.out, each.confirmed = "known", True, False, None
        each.start_offset = held.start_offset
        # A grant of a deleted group of the same name is none.
        gone = group.id not in (0, held.id) or held.id in self._deletions.ids(group.name, place)
        if held.policy is not None and not gone:
            each.confirmed = WantedGrant(held.member, held.generation, held.shared, held.paused, held.policy)
            return self._tell(group, place)
        return [Tell(group.name)]

    def _confirmed(self, group: GroupState, place: TopicPartition, each: _Carried) -> list[Effect]:
        if each.problem is not None:
            return self._refused(group, place, each, each.problem)
        if each.forgetting:
            each.state, each.forgotten = "known", each.forgotten | each.forgetting
            return []
        each.state, each.confirmed, each.out = "known", each.want, False
        self._carried[group.name].warned = False
        return self._tell(group, place)

    def _tell(self, group: GroupState, place: TopicPartition) -> list[Effect]:
        """A partition has the group: tell those who wait, and the coordinator if it does not know yet."""
        effects: list[Effect] = [Tell(group.name)]
        if place not in group.enlisted:
            # If it is lost, the next life confirms it again.
            effects.append(Submit("enlisted", self._home, ConfirmEnlisted(group.name, [place]), sure=False))
        return effects

    def _refused(
        self, group: GroupState, place: TopicPartition, each: _Carried, problem: Refusal
    ) -> list[Effect]:
        each.heard = True
        if problem.code in ILL:
            each.state, each.out, each.confirmed = "known", True, _wanted(group, place)
        else:
            each.state, each.confirmed = "unknown", None
        return [Tell(group.name)]

    def _retry(self, carried: _CarriedGroup, tag: _GrantTag) -> list[Effect]:
        if carried.retry:
            return []
        carried.retry = True
        effects: list[Effect] = [After(_GrantTag("retry", tag.group, carried.id), RETRY_US)]
        problem = carried.places[tag.place].problem if tag.place is not None else None
        if not carried.warned and problem is not None:
            text = f"group {tag.group} on {tag.place}: {problem.message}; it is tried again"
            effects.append(Log("warning", text))
            carried.warned = True
        return effects


def _places(group: GroupState) -> Iterator[TopicPartition]:
    return (TopicPartition(*place) for place in group.all_places())


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


def _astray(have: WantedGrant, want: WantedGrant) -> bool:
    """Whether a partition has a grant that the coordinator has not given. Within one generation a partition
    may become shared, or belong to one member again."""
    if have.generation != want.generation:
        return have.generation > want.generation
    return have.member != want.member and not (have.shared or want.shared)
