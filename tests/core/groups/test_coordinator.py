"""The coordinator as a state machine: joins, leaves, confirmations and time-outs in any order.

Also covers `core/groups/group_membership.py` and `core/groups/group_state.py`.
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.groups.assignment import assign
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.groups.group_state import GroupState
from tailrace.core.model.commands import Done
from tailrace.core.model.group_commands import DeleteSchedule, Place, PutSchedule
from tailrace.core.model.group_facts import Assigned, CoordinationFact, MemberJoined, Revoking
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import (
    ConfirmReleased,
    DropGroup,
    Join,
    Leave,
    Look,
    MakeGroup,
    PassTime,
    RaiseGenerations,
    ResizeTopics,
    SetPaused,
    TickDone,
)
from tailrace.core.model.internal_topic import PARTITIONS, home_of
from tailrace.core.model.topic_options import TopicOptions
from tailrace.errors import Corrupt
from tailrace.format import codec
from tests.core.turns import at
from tests.mixtures import mixtures

OPTIONS = TopicOptions()
decode = codec.facts_decoder(CoordinationFact)


class Bench:
    """A coordinator whose facts are kept, encoded and replayed."""

    def __init__(self) -> None:
        self.machine = Coordinator(OPTIONS)
        self.facts: list[Any] = []
        self.now_us = 1_000_000

    def do(self, command: Any) -> Any:
        decision = self.machine.decide(command, at(self.now_us))
        for fact in decision.facts:
            self.machine.apply(fact)
        self.facts += decision.facts
        self.machine.check()
        return decision.reply

    def done(self, command: Any) -> list[Any]:
        """The facts of a command that must succeed."""
        before = len(self.facts)
        reply = self.do(command)
        assert reply == Done(), reply
        return self.facts[before:]

    def refused(self, command: Any) -> Refusal:
        before = len(self.facts)
        reply = self.do(command)
        assert isinstance(reply, Refusal), reply
        assert len(self.facts) == before
        return reply

    def join(self, member: str, *, partitions: int = 6, **fields: Any) -> list[Any]:
        return self.done(join(member, partitions=partitions, **fields))

    @property
    def group(self) -> GroupState:
        return self.machine.groups.by_name["g"]

    def owners(self) -> dict[Place, str]:
        return {place: held.owner for place, held in self.group.places.items()}

    def confirm_all(self) -> None:
        for member in list(self.group.members):
            places = [place for place, held in self.group.owned(member) if held.revoking]
            self.done(ConfirmReleased("g", member, places))

    def replayed(self) -> Coordinator:
        again = Coordinator(OPTIONS)
        for fact in decode(codec.encode_facts(self.facts)):
            again.apply(fact)
        return again


def join(member: str, *, partitions: int = 6, topic: str = "t", wait: bool = True, **options: Any) -> Join:
    return Join("g", member, [(topic, partitions)], GroupPolicy(**options), options, wait, "host")


members = st.sampled_from(["a", "b", "c", "d"])
joining = st.tuples(st.just("join"), members)
others = ("leave", "confirm", "confirm one", "time-out", "grow")
plays = mixtures([joining], [st.tuples(st.just(act), members) for act in others], 0, 30)


def perform(bench: Bench, act: str, member: str) -> None:
    bench.now_us += 1_000_000
    partitions = bench.group.topics["t"].partitions
    if act == "join":
        bench.join(member, partitions=partitions)
    elif act == "leave":
        bench.done(Leave("g", member))
    elif act in ("confirm", "confirm one"):
        places = [place for place, held in bench.group.owned(member) if held.revoking]
        bench.done(ConfirmReleased("g", member, places if act == "confirm" else places[:1]))
    elif act == "time-out":
        bench.now_us += bench.group.policy.revoke_timeout_ms * 1000
        bench.done(PassTime("g"))
        assert not any(held.revoking for held in bench.group.places.values())
    elif partitions < 12:
        bench.done(ResizeTopics("g", [("t", partitions + 1)]))


@given(plays)
def test_any_history(history: list[tuple[str, str]]) -> None:
    bench = Bench()
    bench.join("a")
    for act, member in history:
        before = dict(bench.group.places)
        perform(bench, act, member)
        after = bench.group.places
        for place, held in before.items():
            now = after[place]
            assert now.generation >= held.generation
            assert (now.owner == held.owner) or now.generation == held.generation + 1, (
                "a new owner, a new one"
            )
            if held.owner != now.owner and held.owner in bench.group.members:
                assert held.revoking, "only what was revoked is taken from a member"
                assert act in ("confirm", "confirm one", "time-out")
        if act == "leave" and not any(held.revoking for held in before.values()):
            stayed = [place for place, held in before.items() if held.owner != member]
            assert all(after[place].owner == before[place].owner for place in stayed)
    bench.confirm_all()
    counts = Counter(dict.fromkeys(bench.group.members, 0))
    counts.update(owner for owner in bench.owners().values() if owner)
    assert not counts or max(counts.values()) - min(counts.values()) <= 1
    assert all(bench.owners().values()) == bool(counts)
    assert bench.replayed().snapshot() == bench.machine.snapshot()
    assert Coordinator.restore(OPTIONS, bench.machine.snapshot()).snapshot() == bench.machine.snapshot()


def test_a_join_moves_only_what_must_move_in_a_few_facts() -> None:
    bench = Bench()
    for number in range(10):
        bench.join(f"m{number}", partitions=100)
        bench.confirm_all()
    before = dict(bench.group.places)
    joined, revoking = bench.join("new", partitions=100)
    assert isinstance(joined, MemberJoined)
    assert isinstance(revoking, Revoking)
    assert len(revoking.moves) == 9
    moving = {(topic, number) for topic, number, _ in revoking.moves}
    for member in list(bench.group.members):
        places = [place for place, held in bench.group.owned(member) if held.revoking]
        facts = bench.done(ConfirmReleased("g", member, places))
        assert len(facts) <= 1
    after = bench.group.places
    assert all(after[place] == held for place, held in before.items() if place not in moving)
    assert all(after[place].owner == "new" and after[place].generation == before[place].generation + 1
               for place in moving)  # fmt: skip


def test_what_is_free_is_assigned_at_once_and_a_leaver_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.join("a", partitions=3)
    assert set(bench.owners().values()) == {"a"}
    _, assigned = bench.done(Leave("g", "a"))
    assert isinstance(assigned, Assigned)
    assert [(member, generation) for _, _, member, generation in assigned.moves] == [("", 2)] * 3
    assert bench.done(Leave("g", "a")) == []
    bench.join("b", partitions=3)
    assert {(held.owner, held.generation) for held in bench.group.places.values()} == {("b", 3)}


def test_joining_again_changes_nothing() -> None:
    bench = Bench()
    bench.join("a")
    assert bench.join("a") == []
    assert [type(fact) for fact in bench.done(join("a", topic="u", partitions=2))] != []
    assert set(bench.group.topics) == {"t", "u"}


def test_somebody_who_comes_and_goes_while_places_are_revoked_does_no_harm() -> None:
    bench = Bench()
    bench.join("a", partitions=4)
    bench.join("b", partitions=4)
    bench.done(Leave("g", "b"))
    assert all(held.owner == held.holder == "a" for held in bench.group.places.values())
    bench.confirm_all()
    assert sorted(held.generation for held in bench.group.places.values()) == [1, 1, 2, 2]


def test_only_the_owner_can_confirm_and_only_what_is_revoked() -> None:
    bench = Bench()
    bench.join("a", partitions=4)
    bench.join("b", partitions=4)
    moving = [place for place, held in bench.group.places.items() if held.revoking]
    staying = [place for place, held in bench.group.places.items() if not held.revoking]
    assert bench.done(ConfirmReleased("g", "b", moving)) == []
    assert bench.done(ConfirmReleased("g", "a", [*staying, ("t", 99), ("x", 0)])) == []
    (assigned,) = bench.done(ConfirmReleased("g", "a", [*moving, *moving]))
    assert len(assigned.moves) == 2
    assert bench.done(ConfirmReleased("g", "a", moving)) == []


def test_by_force_only_after_the_time_out() -> None:
    bench = Bench()
    bench.join("a", partitions=2, revoke_timeout_ms=5000)
    bench.join("b", partitions=2, revoke_timeout_ms=5000)
    due_us = bench.group.due_us()
    assert due_us == bench.now_us + 5_000_000
    bench.now_us = due_us - 1
    assert bench.done(PassTime("g")) == []
    bench.now_us = due_us
    assert len(bench.done(PassTime("g"))) == 1
    assert bench.group.due_us() is None
    assert sorted(bench.owners().values()) == ["a", "b"]


def test_exclusive_has_one_active_member() -> None:
    bench = Bench()
    bench.join("a", mode="exclusive")
    assert "'a' is its consumer" in bench.refused(join("b", mode="exclusive", wait=False)).message
    bench.join("b", mode="exclusive")
    assert (bench.group.state_of("a"), bench.group.state_of("b")) == ("active", "standby")
    assert bench.group.due_us() is None
    bench.done(Leave("g", "a", reason="silent"))
    assert set(bench.owners().values()) == {"b"}
    assert bench.group.state_of("b") == "active"


def test_shared_groups_have_no_owners() -> None:
    bench = Bench()
    assert len(bench.join("a", assignment="shared")) == 2
    assert [type(fact) for fact in bench.join("b", assignment="shared")] == [MemberJoined]
    assert set(bench.owners().values()) == {""}
    assert list(bench.group.shared) == ["t"]
    assert len(list(bench.group.all_places())) == 6


def test_generations_follow_the_partitions() -> None:
    bench = Bench()
    bench.join("a", partitions=2)
    bench.done(RaiseGenerations("g", [("t", 0, 7), ("t", 1, 1), ("gone", 0, 9)]))
    assert [held.generation for held in bench.group.places.values()] == [7, 1]
    assert bench.done(RaiseGenerations("g", [("t", 0, 7)])) == []
    bench.done(Leave("g", "a"))
    assert [held.generation for held in bench.group.places.values()] == [8, 2]


def test_options_of_a_group_hold_for_all() -> None:
    bench = Bench()
    bench.join("a", lease_ms=5000)
    assert "lease_ms is 5000, not 6000" in bench.refused(join("b", lease_ms=6000)).message
    assert bench.group.members.keys() == {"a"}
    bench.join("b")


def test_making_pausing_and_deleting() -> None:
    bench = Bench()
    bench.done(MakeGroup("g", GroupPolicy(), [("t", 3)]))
    assert bench.refused(MakeGroup("g", GroupPolicy(), [("t", 3)])).code == "already_exists"
    assert bench.done(MakeGroup("g", GroupPolicy(), [("t", 3)], if_missing=True)) == []
    assert len(bench.done(MakeGroup("g", GroupPolicy(), [("u", 1)], if_missing=True))) == 1
    assert len(bench.done(SetPaused("g", True))) == 1
    assert bench.done(SetPaused("g", True)) == []
    bench.join("a", partitions=3)
    assert bench.group.state_of("a") == "paused"
    assert bench.refused(DropGroup("g")).details == {"members": ["a"]}
    bench.done(DropGroup("g", force=True))
    assert bench.refused(SetPaused("g", False)).code == "not_found"
    assert bench.replayed().snapshot() == bench.machine.snapshot()


def test_topics_grow_vanish_and_come_back() -> None:
    bench = Bench()
    bench.join("a", partitions=2)
    bench.done(ResizeTopics("g", [("t", 4), ("unknown", 3)]))
    assert (bench.group.topics["t"].partitions, bench.group.topics["t"].first) == (4, 2)
    assert set(bench.owners().values()) == {"a"}
    bench.done(ResizeTopics("g", [("t", 0)]))
    assert (bench.group.topics, bench.group.places) == ({}, {})
    bench.done(ResizeTopics("g", [("t", 3)]))
    assert set(bench.owners().values()) == {"a"}, "a member still wants it"


def test_a_group_is_independent_of_another_on_the_same_topic() -> None:
    bench = Bench()
    bench.join("a")
    other = Join("h", "a", [("t", 6)], GroupPolicy())
    bench.done(other)
    bench.done(Leave("g", "a"))
    assert all(held.owner == "a" for held in bench.machine.groups.by_name["h"].places.values())


def test_schedules() -> None:
    bench = Bench()
    put = PutSchedule("s", "t", "* * * * *", "UTC", b"v", b"k", [("h", b"1")], 1, 60_000)
    bench.done(put)
    assert bench.done(put) == []
    known = bench.machine.recurrences.by_name["s"]
    assert (known.put, known.after_us) == (put, bench.now_us)
    assert len(bench.done(TickDone("s", 60_000_000))) == 1
    assert bench.done(TickDone("s", 60_000_000)) == [], "a tick happens once"
    assert bench.done(TickDone("gone", 60_000_000)) == []
    assert bench.machine.recurrences.by_name["s"].after_us == 60_000_000
    assert bench.replayed().snapshot() == bench.machine.snapshot()
    assert Coordinator.restore(OPTIONS, bench.machine.snapshot()).snapshot() == bench.machine.snapshot()
    bench.done(DeleteSchedule("s"))
    assert bench.refused(DeleteSchedule("s")).code == "not_found"


def test_time_never_goes_back_and_looking_changes_nothing() -> None:
    bench = Bench()
    bench.join("a")
    bench.now_us -= 500_000
    (fact, *_) = bench.join("b")
    assert fact.time_us == 1_000_000
    assert bench.done(Look()) == []


def test_groups_have_a_home_and_damaged_snapshots_are_told_apart() -> None:
    assert {home_of(f"group-{number}") for number in range(200)} == set(range(PARTITIONS))
    with pytest.raises(Corrupt):
        Coordinator.restore(OPTIONS, [b"\x00rubbish"])


def test_balance_is_what_the_assignment_says() -> None:
    bench = Bench()
    for member in ("a", "b", "c"):
        bench.join(member, partitions=7)
        bench.confirm_all()
    assert assign({member: ["t"] for member in "abc"}, bench.owners()) == bench.owners()
