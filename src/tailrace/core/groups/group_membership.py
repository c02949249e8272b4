"""The groups of one coordinator: the members, and the owner of each partition with its generation.

A partition that has an owner moves in three steps: *Revoking* (the owner is asked to finish); the owner's
confirmation, or its end, or the time-out; *Assigned* to the next owner under a higher generation. A free
partition is assigned at once. A partition that stays is named in no fact, so its owner does not notice.
Topics can also be shared by all members, and divided again: see `core.groups.rebalancing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from tailrace.core.core_tuning import GROUPS_MAX, MEMBERS_MAX
from tailrace.core.groups.group_deletions import GroupDeletions
from tailrace.core.groups.group_state import Extent, GroupMember, GroupState, PartitionHolding, StoredGroup
from tailrace.core.groups.rebalancing import crowded, draft_of, leaving, moved_on, plan, wishes
from tailrace.core.model import group_facts as facts
from tailrace.core.model.commands import Done
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.group_commands import Place
from tailrace.core.model.group_options import altered, contradictions
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import (
    ChangeOptions,
    ConfirmEnlisted,
    ConfirmReleased,
    DropGroup,
    Join,
    Leave,
    MakeGroup,
    PassTime,
    RaiseGenerations,
    ResizeTopics,
    SetPaused,
    Sizes,
)
from tailrace.core.model.turn_input import TurnInput
from tailrace.errors import AlreadyExists, Fenced, InvalidRequest, NotFound, Overloaded


class GroupMembership:
    """The groups of one coordinator."""

    COMMANDS: tuple[type, ...] = (
        MakeGroup,
        Join,
        Leave,
        ConfirmReleased,
        PassTime,
        ResizeTopics,
        RaiseGenerations,
        SetPaused,
        ChangeOptions,
        DropGroup,
        ConfirmEnlisted,
    )
    FACTS: tuple[type, ...] = facts.GroupFact.__args__

    def __init__(self, deletions: GroupDeletions) -> None:
        self.by_name: dict[str, GroupState] = {}
        self._deletions = deletions
        self._last_id = 0
        self._decide: dict[type, Callable[[GroupState, Any, int], Decision]] = {
            Leave: self._leave,
            ConfirmReleased: self._confirm,
            PassTime: self._pass_time,
            ChangeOptions: self._change_options,
            ResizeTopics: self._resize,
            RaiseGenerations: self._raise,
            SetPaused: self._pause,
            DropGroup: self._drop,
            ConfirmEnlisted: self._confirm_enlisted,
        }
        self._apply: dict[type, Callable[[GroupState, Any], None]] = {
            facts.TopicsEnlisted: self._topics_enlisted,
            facts.TopicsDropped: self._topics_dropped,
            facts.MemberJoined: self._member_joined,
            facts.MemberLeft: self._member_left,
            facts.Revoking: self._revoking,
            facts.Assigned: self._assigned,
            facts.GenerationsRaised: self._generations_raised,
            facts.PauseChanged: self._pause_changed,
            facts.GroupDeleted: self._group_deleted,
            facts.PlacesEnlisted: self._places_enlisted,
            facts.TopicsShared: self._topics_shared,
            facts.TopicsDivided: self._topics_divided,
            facts.PlacesLeft: self._places_left,
            facts.OptionsChanged: self._options_changed,
        }

    # ---------------------------------------------------------------------------------------------- decide

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        """Decide a command."""
        group, now_us = self.by_name.get(command.group), turn.now_us
        if isinstance(command, MakeGroup):
            return self._make(group, command, now_us)
        if isinstance(command, Join):
            return self._join(group, command, now_us)
        if group is None:
            return Decision(NOTHING, Refusal(NotFound.code, f"there is no group {command.group[:80]!r}"))
        return self._decide[type(command)](group, command, now_us)

    def _make(self, group: GroupState | None, command: MakeGroup, now_us: int) -> Decision:
        if group is None:
            full = self._full()
            return Decision(NOTHING, full) if full else Decision((self._created(command, now_us),), Done())
        if not command.if_missing:
            return Decision(NOTHING, Refusal(AlreadyExists.code, f"group {group.name!r} exists already"))
        new = _grown(group, command.topics, command.topic_ids)
        if not new:
            return Decision(NOTHING, Done())
        enlisted = facts.TopicsEnlisted(group.name, new, now_us, _of(new, command.topic_ids))
        draft = draft_of(group)
        draft.grow(new)
        return Decision((enlisted, *plan(draft, now_us)), Done())

    def _created(self, command: MakeGroup | Join, now_us: int) -> facts.GroupCreated:
        """The fact that creates a group. Its id follows the clock, so that it also differs from ids of a log
        that was replaced by an older one."""
        number = max(now_us, self._last_id + 1, self._deletions.last_id + 1)
        ids = _of(command.topics, command.topic_ids)
        return facts.GroupCreated(command.group, command.policy, command.topics, now_us, number, ids)

    def _full(self) -> Refusal | None:
        if len(self.by_name) < GROUPS_MAX:
            return None
        text = f"this coordinator has {GROUPS_MAX} groups, and that is the most there can be"
        return Refusal(Overloaded.code, text)

    def _join(self, group: GroupState | None, command: Join, now_us: int) -> Decision:
        made: list[Any] = []
        if group is None:
            full = self._full()
            if full is not None:
                return Decision(NOTHING, full)
            created = self._created(command, now_us)
            made.append(created)
            group = GroupState(command.group, command.policy, now_us, created.id)
            self._topics_enlisted(group, created)
        refusal = _unwelcome(group, command)
        if refusal is not None:
            return Decision(NOTHING, refusal)
        new = _grown(group, command.topics, command.topic_ids)
        if new:
            made.append(facts.TopicsEnlisted(group.name, new, now_us, _of(new, command.topic_ids)))
        topics = [topic for topic, _ in command.topics]
        known = group.members.get(command.member)
        if known is None or set(known.topics) != set(topics):
            made.append(facts.MemberJoined(group.name, command.member, topics, command.client, now_us))
        if made:
            draft = draft_of(group)
            draft.members[command.member] = tuple(topics)
            draft.grow(new)
            made += plan(draft, now_us)
        return Decision(tuple(made), Done())

    def _leave(self, group: GroupState, command: Leave, now_us: int) -> Decision:
        if command.member not in group.members:
            return Decision(NOTHING, Done())
        draft = draft_of(group)
        del draft.members[command.member]
        left = facts.MemberLeft(group.name, command.member, command.reason, now_us)
        return Decision((left, *plan(draft, now_us)), Done())

    def _confirm(self, group: GroupState, command: ConfirmReleased, now_us: int) -> Decision:
        given_up: dict[Place, PartitionHolding] = {}
        left: list[Place] = []
        for place in dict.fromkeys(command.places):
            held = group.places.get(place)
            if held is None or not held.revoking:
                continue
            if held.owner == command.member or held.leaving == (command.member,):
                given_up[place] = held
            elif command.member in held.leaving:
                left.append(place)
        made: list[Any] = []
        if left:
            made.append(facts.PlacesLeft(group.name, command.member, left, now_us))
        if given_up:
            made.append(facts.Assigned(group.name, moved_on(given_up), now_us))
        return Decision(tuple(made), Done())

    def _pass_time(self, group: GroupState, command: PassTime, now_us: int) -> Decision:
        since_us = now_us - group.policy.revoke_timeout_ms * 1000
        overdue = {
            place: held for place, held in group.places.items() if held.revoking and held.since_us <= since_us
        }
        made: list[Any] = []
        draft = draft_of(group)
        if overdue:
            moves = moved_on(overdue)
            made.append(facts.Assigned(group.name, moves, now_us))
            for topic, number, member, generation in moves:
                draft.places[topic, number] = PartitionHolding(member, generation)
        return Decision((*made, *plan(draft, now_us)), Done())

    def _change_options(self, group: GroupState, command: ChangeOptions, now_us: int) -> Decision:
        policy = altered(group.policy, command.options, group.name)
        if isinstance(policy, Refusal):
            return Decision(NOTHING, policy)
        if policy == group.policy:
            return Decision(NOTHING, Done())
        draft = draft_of(group)
        draft.policy = policy
        return Decision((facts.OptionsChanged(group.name, policy, now_us), *plan(draft, now_us)), Done())

    def _resize(self, group: GroupState, command: ResizeTopics, now_us: int) -> Decision:
        wanted = {topic for member in group.members.values() for topic in member.topics} | set(group.topics)
        ids = command.topic_ids
        gone = [
            topic
            for topic, count in command.topics
            if topic in group.topics and (_replaced(group, topic, ids) if count else _same(group, topic, ids))
        ]
        present = [(topic, count) for topic, count in command.topics if count and topic in wanted]
        new = _grown(group, present, ids, gone)
        made: list[Any] = []
        if gone:
            made.append(facts.TopicsDropped(group.name, gone, now_us))
        if new:
            made.append(facts.TopicsEnlisted(group.name, new, now_us, _of(new, ids)))
        if made:
            draft = draft_of(group)
            draft.drop(gone)
            draft.grow(new)
            made += plan(draft, now_us)
        return Decision(tuple(made), Done())

    def _raise(self, group: GroupState, command: RaiseGenerations, now_us: int) -> Decision:
        higher = [
            (topic, number, generation)
            for topic, number, generation in command.places
            if (held := group.places.get((topic, number))) is not None and held.generation < generation
        ]
        if not higher:
            return Decision(NOTHING, Done())
        return Decision((facts.GenerationsRaised(group.name, higher, now_us),), Done())

    def _pause(self, group: GroupState, command: SetPaused, now_us: int) -> Decision:
        if group.paused == command.paused:
            return Decision(NOTHING, Done())
        return Decision((facts.PauseChanged(group.name, command.paused, now_us),), Done())

    def _drop(self, group: GroupState, command: DropGroup, now_us: int) -> Decision:
        if group.members and not command.force:
            return Decision(NOTHING, in_use(group, "it is deleted"))
        return Decision((facts.GroupDeleted(group.name, now_us, group.id or -1),), Done())

    def _confirm_enlisted(self, group: GroupState, command: ConfirmEnlisted, now_us: int) -> Decision:
        new = [place for place in command.places if place[0] in group.topics and place not in group.enlisted]
        if not new:
            return Decision(NOTHING, Done())
        return Decision((facts.PlacesEnlisted(group.name, new, now_us),), Done(), soft=True)

    # ----------------------------------------------------------------------------------------------- apply

    def apply(self, fact: Any) -> None:
        """Apply a fact."""
        if isinstance(fact, facts.GroupCreated):
            group = self.by_name[fact.group] = GroupState(fact.group, fact.policy, fact.time_us, fact.id)
            self._last_id = max(self._last_id, fact.id)
            self._topics_enlisted(group, fact)
            return
        group = self.by_name[fact.group]
        self._apply[type(fact)](group, fact)
        if group.shared:
            _look_for_calm(group, fact.time_us)

    def _topics_enlisted(self, group: GroupState, fact: facts.TopicsEnlisted | facts.GroupCreated) -> None:
        draft = draft_of(group)
        draft.grow(fact.topics)
        group.places, group.shared = draft.places, draft.calm_us
        for topic, count in fact.topics:
            known = group.topics.get(topic)
            if known is None:
                group.topics[topic] = Extent(count, count, fact.topic_ids.get(topic, 0))
            else:
                group.topics[topic] = Extent(count, known.first, fact.topic_ids.get(topic, known.id))

    def _topics_dropped(self, group: GroupState, fact: facts.TopicsDropped) -> None:
        for topic in fact.topics:
            del group.topics[topic]
        draft = draft_of(group)
        draft.drop(fact.topics)
        group.places, group.shared = draft.places, draft.calm_us
        group.enlisted = {place for place in group.enlisted if place[0] not in fact.topics}

    def _member_joined(self, group: GroupState, fact: facts.MemberJoined) -> None:
        known = group.members.get(fact.member)
        joined_us = fact.time_us if known is None else known.joined_us
        group.members[fact.member] = GroupMember(fact.member, tuple(fact.topics), fact.client, joined_us)

    def _member_left(self, group: GroupState, fact: facts.MemberLeft) -> None:
        del group.members[fact.member]
        _let_go(group, fact.member, group.places)

    def _revoking(self, group: GroupState, fact: facts.Revoking) -> None:
        for topic, number, member in fact.moves:
            held = group.places[topic, number]
            since_us = held.since_us if held.revoking else fact.time_us
            group.places[topic, number] = PartitionHolding(
                held.owner, held.generation, True, member, since_us
            )

    def _assigned(self, group: GroupState, fact: facts.Assigned) -> None:
        for topic, number, member, generation in fact.moves:
            held = group.places[topic, number]
            assert generation > held.generation - (not held.owner), "a generation only grows"
            group.places[topic, number] = PartitionHolding(member, generation)

    def _topics_shared(self, group: GroupState, fact: facts.TopicsShared) -> None:
        group.shared.update(dict.fromkeys(fact.topics))
        for place, held in group.places.items():
            if place[0] in fact.topics:
                group.places[place] = PartitionHolding(generation=held.generation)

    def _topics_divided(self, group: GroupState, fact: facts.TopicsDivided) -> None:
        for topic in fact.topics:
            del group.shared[topic]
        members = wishes(group)
        for topic, number, member in fact.moves:
            held = group.places[topic, number]
            others = leaving(held, topic, member, members, topic in fact.topics)
            since_us = held.since_us if held.revoking else fact.time_us
            group.places[topic, number] = PartitionHolding(
                "", held.generation, True, member, since_us, others
            )

    def _places_left(self, group: GroupState, fact: facts.PlacesLeft) -> None:
        _let_go(group, fact.member, [(topic, number) for topic, number in fact.places])

    def _options_changed(self, group: GroupState, fact: facts.OptionsChanged) -> None:
        group.policy = fact.policy

    def _generations_raised(self, group: GroupState, fact: facts.GenerationsRaised) -> None:
        for topic, number, generation in fact.places:
            held = group.places[topic, number]
            group.places[topic, number] = msgspec.structs.replace(held, generation=generation)

    def _pause_changed(self, group: GroupState, fact: facts.PauseChanged) -> None:
        group.paused = fact.paused

    def _group_deleted(self, group: GroupState, fact: facts.GroupDeleted) -> None:
        del self.by_name[group.name]
        if fact.id:
            places = ((*place, group.topics[place[0]].id) for place in group.all_places())
            self._deletions.add(group.name, group.id, places)

    def _places_enlisted(self, group: GroupState, fact: facts.PlacesEnlisted) -> None:
        group.enlisted.update((topic, number) for topic, number in fact.places)

    # -------------------------------------------------------------------------------------------- snapshot

    def packed(self) -> bytes:
        """The state for a snapshot."""
        return msgspec.msgpack.encode([group.stored() for group in self.by_name.values()])

    def load(self, data: bytes) -> None:
        """Restore the state from a snapshot."""
        stored = msgspec.msgpack.decode(data, type=list[StoredGroup])
        self.by_name = {item.name: GroupState.of(item) for item in stored}
        self._last_id = max((group.id for group in self.by_name.values()), default=0)

    def verify(self) -> None:
        """Assert the invariants."""
        for name, group in self.by_name.items():
            assert group.name == name
            group.verify()


def in_use(group: GroupState, when: str) -> Refusal:
    """Refuse a command that would take a group away from its members."""
    count = len(group.members)
    have = f"group {group.name!r} has {count} member{'s' if count > 1 else ''}"
    text = f"{have}: stop them before {when}, or force it"
    return Refusal(InvalidRequest.code, text, details={"members": list(group.members)[:100]})


def _unwelcome(group: GroupState, command: Join) -> Refusal | None:
    """Why a client cannot become a member; None if it can."""
    refusal = contradictions(group.policy, command.options, group.name)
    if refusal is not None or command.member in group.members:
        return refusal
    if len(group.members) >= MEMBERS_MAX:
        text = f"group {group.name!r} has {MEMBERS_MAX} members, and that is the most there can be"
        return Refusal(Overloaded.code, text)
    if group.policy.mode == "exclusive" and not command.wait and group.members:
        active = group.active() or next(iter(group.members))
        text = f"group {group.name!r} is exclusive, and {active!r} is its consumer"
        return Refusal(Fenced.code, text, details={"member": active})
    return None


def _grown(group: GroupState, topics: Sizes, ids: dict[str, int], gone: Collection[str] = ()) -> Sizes:
    """The topics that the group is not on yet, or only with fewer partitions, or without their id."""
    return [
        (topic, count)
        for topic, count in dict(topics).items()
        if topic not in group.topics
        or topic in gone
        or group.topics[topic].partitions < count
        or (ids.get(topic) and not group.topics[topic].id)
    ]


def _same(group: GroupState, topic: str, ids: dict[str, int]) -> bool:
    """Whether a group is on this very topic, and not on another of the same name."""
    return 0 in (group.topics[topic].id, ids.get(topic, 0)) or group.topics[topic].id == ids[topic]


def _replaced(group: GroupState, topic: str, ids: dict[str, int]) -> bool:
    """Whether another topic has taken the name of one that a group is on."""
    return not _same(group, topic, ids)


def _of(topics: Sizes, ids: dict[str, int]) -> dict[str, int]:
    return {topic: ids[topic] for topic, _ in topics if topic in ids}


def _let_go(group: GroupState, member: str, places: Iterable[Place]) -> None:
    """A member has finished with partitions that are being divided."""
    for place in places:
        held = group.places[place]
        if member in held.leaving:
            others = tuple(other for other in held.leaving if other != member)
            group.places[place] = msgspec.structs.replace(held, leaving=others)


def _look_for_calm(group: GroupState, time_us: int) -> None:
    """Note since when shared topics have had enough partitions for all members that want them."""
    wanted = crowded(group.policy, wishes(group), group.places)
    for topic, since_us in group.shared.items():
        if topic in wanted:
            group.shared[topic] = None
        elif since_us is None:
            group.shared[topic] = time_us
