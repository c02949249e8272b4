"""Topics of a group that are shared while its members are many, and divided again when they are few."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.core_tuning import CALM_US
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.groups.group_state import GroupState, PartitionHolding, StoredGroup
from tailrace.core.groups.rebalancing import draft_of, plan
from tailrace.core.model.group_facts import (
    Assigned,
    GroupCreated,
    MemberJoined,
    MemberLeft,
    OptionsChanged,
    TopicsDivided,
    TopicsShared,
)
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.internal_commands import (
    ChangeOptions,
    ConfirmReleased,
    Join,
    Leave,
    PassTime,
    ResizeTopics,
)
from tests.core.groups.test_coordinator import OPTIONS, Bench, join
from tests.core.turns import at
from tests.mixtures import mixtures

SECOND_US = 1_000_000


def pass_time(bench: Bench, seconds: float) -> list[Any]:
    """Time goes on, and the shell says so whenever something is due."""
    until_us, made = bench.now_us + int(seconds * SECOND_US), list[Any]()
    while (due_us := bench.group.due_us()) is not None and due_us <= until_us:
        bench.now_us = max(due_us, bench.now_us)
        made += bench.done(PassTime("g"))
    bench.now_us = until_us
    return made


def finish(bench: Bench, *members: str) -> None:
    """Members confirm all that they are to give up."""
    for member in members or list(bench.group.members):
        places = [
            place
            for place, held in bench.group.places.items()
            if held.revoking and (held.owner == member or member in held.leaving)
        ]
        bench.done(ConfirmReleased("g", member, places))


def crowd(bench: Bench, count: int, partitions: int = 3, **options: Any) -> None:
    for number in range(count):
        bench.join(f"m{number}", partitions=partitions, **options)
        bench.now_us += 1000


def test_partitions_have_one_member_each_while_there_are_enough() -> None:
    bench = Bench()
    crowd(bench, 3)
    finish(bench)
    assert not bench.group.shared
    assert sorted(bench.owners().values()) == ["m0", "m1", "m2"]


def test_one_member_more_than_partitions_and_the_topic_is_shared() -> None:
    bench = Bench()
    crowd(bench, 3)
    finish(bench)
    before = {place: held.generation for place, held in bench.group.places.items()}
    joined, shared = bench.join("m3", partitions=3)
    assert isinstance(joined, MemberJoined)
    assert shared == TopicsShared("g", ["t"], bench.now_us)
    assert bench.group.shared == {"t": None}
    assert bench.group.places == {place: PartitionHolding(generation=g) for place, g in before.items()}


def test_what_was_being_revoked_is_shared_at_once_and_nobody_waits_for_the_owner() -> None:
    bench = Bench()
    crowd(bench, 4)
    assert bench.group.shared == {"t": None}
    assert not any(held.revoking for held in bench.group.places.values())
    assert bench.group.due_us() is None


def test_shared_until_there_were_enough_partitions_for_ten_seconds() -> None:
    bench = Bench()
    crowd(bench, 4)
    left = bench.done(Leave("g", "m3"))
    assert [type(fact) for fact in left] == [MemberLeft], "not yet"
    assert bench.group.due_us() == bench.now_us + CALM_US
    assert pass_time(bench, 9.9) == []
    (divided,) = pass_time(bench, 0.1)
    assert isinstance(divided, TopicsDivided)
    assert divided.topics == ["t"]
    assert not bench.group.shared
    for held in bench.group.places.values():
        assert held.dividing
        assert {held.next, *held.leaving} == {"m0", "m1", "m2"}
    generations = {place: held.generation for place, held in bench.group.places.items()}
    finish(bench)
    assert sorted(bench.owners().values()) == ["m0", "m1", "m2"]
    assert {p: h.generation for p, h in bench.group.places.items()} == generations, "who has it goes on"


def test_a_member_that_comes_and_goes_around_the_limit_does_not_move_anything() -> None:
    bench = Bench()
    crowd(bench, 4)
    for _ in range(5):
        assert [type(fact) for fact in bench.done(Leave("g", "m3"))] == [MemberLeft]
        assert pass_time(bench, 9) == []
        assert [type(fact) for fact in bench.join("m3", partitions=3)] == [MemberJoined]
        assert pass_time(bench, 9) == []
    bench.done(Leave("g", "m3"))
    assert len(pass_time(bench, 11)) == 1


def test_a_join_while_it_is_divided_shares_it_again() -> None:
    bench = Bench()
    crowd(bench, 4)
    bench.done(Leave("g", "m3"))
    pass_time(bench, 10)
    finish(bench, "m0", "m1")
    made = bench.join("m4", partitions=3)
    assert [type(fact) for fact in made] == [MemberJoined, TopicsShared]
    assert not any(held.revoking for held in bench.group.places.values())


def test_the_next_owner_that_leaves_is_replaced_and_the_last_to_finish_need_not_confirm() -> None:
    bench = Bench()
    crowd(bench, 2, partitions=1)
    bench.join("m2", partitions=1)
    bench.done(Leave("g", "m1"))
    bench.done(Leave("g", "m0"))
    bench.join("m3", partitions=1)
    bench.done(Leave("g", "m3"))
    assert pass_time(bench, 10)[-1:] == [Assigned("g", [("t", 0, "m2", 1)], bench.now_us)], "it is alone"
    crowd(bench, 2, partitions=1)
    bench.done(ResizeTopics("g", [("t", 3)]))
    pass_time(bench, 10)
    heir = bench.group.places["t", 0].next
    bench.done(Leave("g", heir))
    held = bench.group.places["t", 0]
    assert held.next != heir
    assert heir not in held.leaving
    assert len(held.leaving) == 1
    bench.done(Leave("g", held.leaving[0]))
    assert bench.group.places["t", 0] == PartitionHolding(held.next, 1)


def test_who_does_not_finish_in_time_is_not_waited_for() -> None:
    bench = Bench()
    crowd(bench, 4, revoke_timeout_ms=5_000)
    bench.done(Leave("g", "m3"))
    pass_time(bench, 10)
    assert bench.group.due_us() == bench.now_us + 5 * SECOND_US
    finish(bench, "m0", "m1")
    (assigned,) = pass_time(bench, 5)
    assert isinstance(assigned, Assigned)
    assert not any(held.revoking for held in bench.group.places.values())


@pytest.mark.parametrize(
    "options", [{"ordering": "partition"}, {"assignment": "partitions"}, {"mode": "exclusive"}]
)
def test_never_shared(options: dict[str, Any]) -> None:
    bench = Bench()
    crowd(bench, 6, **options)
    assert not bench.group.shared


def test_topics_of_a_group_go_their_own_way() -> None:
    bench = Bench()
    for number in range(3):
        topics = [("wide", 4), ("narrow", 2)]
        bench.done(Join("g", f"m{number}", topics, GroupPolicy()))
    assert list(bench.group.shared) == ["narrow"]
    finish(bench)
    assert Counter(owner for (topic, _), owner in bench.owners().items() if topic == "wide") == {
        "m0": 2,
        "m1": 1,
        "m2": 1,
    }
    bench.done(ResizeTopics("g", [("narrow", 3)]))
    pass_time(bench, 10)
    finish(bench)
    assert not bench.group.shared
    assert all(bench.owners().values())


def test_a_member_of_other_topics_does_not_count() -> None:
    bench = Bench()
    bench.done(Join("g", "a", [("t", 1), ("u", 1)], GroupPolicy()))
    bench.done(Join("g", "b", [("u", 1)], GroupPolicy()))
    assert list(bench.group.shared) == ["u"]
    bench.done(Join("g", "b", [("t", 1)], GroupPolicy()))
    assert list(bench.group.shared) == ["u", "t"]
    assert bench.group.shared["u"] is not None


def test_a_topic_that_is_deleted_and_made_again_is_shared_anew() -> None:
    bench = Bench()
    crowd(bench, 4)
    bench.done(ResizeTopics("g", [("t", 0)]))
    assert bench.group.places == {}
    assert not bench.group.shared
    bench.done(ResizeTopics("g", [("t", 3)]))
    assert list(bench.group.shared) == ["t"]


# ---------------------------------------------------------------------------------------------------- options


def test_options_change_and_assignment_takes_its_way() -> None:
    bench = Bench()
    crowd(bench, 2)
    finish(bench)
    changed, shared = bench.done(ChangeOptions("g", {"assignment": "shared", "lease_ms": 5_000}))
    assert isinstance(changed, OptionsChanged)
    assert isinstance(shared, TopicsShared)
    assert (bench.group.policy.assignment, bench.group.policy.lease_ms) == ("shared", 5_000)
    assert pass_time(bench, 60) == [], "for good"
    bench.done(ChangeOptions("g", {"assignment": "auto"}))
    assert [type(fact) for fact in pass_time(bench, 10)] == [TopicsDivided]
    finish(bench)
    bench.done(ChangeOptions("g", {"assignment": "shared"}))
    bench.done(ChangeOptions("g", {"assignment": "partitions"}))
    assert not bench.group.shared
    finish(bench)
    assert all(bench.owners().values())
    crowd(bench, 6, assignment="partitions")
    assert not bench.group.shared
    assert list(bench.done(ChangeOptions("g", {"assignment": "auto"}))[1:]) == [
        TopicsShared("g", ["t"], bench.now_us)
    ]
    assert bench.done(ChangeOptions("g", {"assignment": "auto"})) == [], "nothing to change"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "stream"}, "mode is 'queue' and cannot be changed"),
        ({"ordering": "none", "lease_ms": 1_000}, "ordering is 'key' and cannot be changed"),
        ({"lease": 5}, "did you mean 'lease_ms'"),
        ({"lease_ms": 0, "max_attempts": "x"}, "lease_ms is from 10 to"),
        ({"heartbeat_ms": 60_000}, "heartbeat_ms = 60000 is more than session_ms = 20000"),
    ],
)
def test_options_that_cannot_be_changed(options: dict[str, Any], said: str) -> None:
    bench = Bench()
    bench.join("a", session_ms=20_000)
    assert said in bench.refused(ChangeOptions("g", options)).message
    assert "there is no group" in bench.refused(ChangeOptions("other", {"lease_ms": 50})).message


def test_an_option_with_its_default_moves_along() -> None:
    bench = Bench()
    bench.join("a")
    bench.done(ChangeOptions("g", {"session_ms": 1_000}))
    policy = bench.group.policy
    assert (policy.session_ms, policy.heartbeat_ms, policy.reconnect_grace_ms) == (1_000, 1_000, 1_000)


def test_a_member_is_compared_on_what_it_asks_for_and_told_how_to_change_it() -> None:
    bench = Bench()
    bench.join("a", lease_ms=5_000)
    bench.join("b")
    message = bench.refused(join("c", lease_ms=7_000, ordering="none")).message
    assert "lease_ms is 5000, not 7000" in message
    assert "tailrace group alter g -o lease_ms=7000" in message
    assert "ordering cannot be changed" in message
    assert "-o ordering" not in message


# ----------------------------------------------------------------------------------------------- any history

members = st.sampled_from(["a", "b", "c", "d", "e"])
joining = st.tuples(st.just("join"), members)
others = ("leave", "finish", "finish", "second", "long", "force", "grow", "alter", "other topic")
plays = mixtures([joining], [st.tuples(st.just(act), members) for act in others], 0, 30)


def perform(bench: Bench, act: str, member: str) -> None:
    bench.now_us += 1000
    partitions = bench.group.topics["t"].partitions
    if act == "join":
        bench.join(member, partitions=partitions)
    elif act == "other topic":
        bench.done(Join("g", member, [("t", partitions), ("u", 1)], GroupPolicy()))
    elif act == "leave":
        bench.done(Leave("g", member))
    elif act == "finish":
        finish(bench, member)
    elif act == "grow" and partitions < 6:
        bench.done(ResizeTopics("g", [("t", partitions + 1)]))
    elif act == "alter":
        bench.done(
            ChangeOptions("g", {"assignment": ("auto", "shared", "partitions")["abcde".index(member) % 3]})
        )
    else:
        pass_time(bench, {"second": 1, "long": 10, "force": 60}.get(act, 0))


@given(plays)
def test_any_history(history: list[tuple[str, str]]) -> None:
    bench = Bench()
    bench.join("a", partitions=2)
    for act, member in history:
        before = dict(bench.group.places)
        perform(bench, act, member)
        for place, held in before.items():
            now = bench.group.places[place]
            assert now.generation >= held.generation
            if now.owner and held.owner and now.owner != held.owner:
                assert now.generation > held.generation, "from one owner to another: a new generation"
        assert plan(draft_of(bench.group), bench.now_us) == [], "all that follows was decided"
    group = bench.group
    wanted = Counter(topic for member in group.members.values() for topic in member.topics)
    for topic, extent in group.topics.items():
        if group.policy.assignment == "auto" and wanted[topic] > extent.partitions:
            assert topic in group.shared, "more members than partitions"
        elif group.policy.assignment == "partitions":
            assert topic not in group.shared
    pass_time(bench, CALM_US / SECOND_US)
    finish(bench)
    if group.policy.assignment == "auto":
        crowded = {topic for topic, extent in group.topics.items() if wanted[topic] > extent.partitions}
        assert set(group.shared) == crowded
    for (topic, _), held in group.places.items():
        assert not held.revoking
        assert bool(held.owner) == (topic not in group.shared and wanted[topic] > 0)
    assert bench.replayed().snapshot() == bench.machine.snapshot()
    assert Coordinator.restore(OPTIONS, bench.machine.snapshot()).snapshot() == bench.machine.snapshot()


# -------------------------------------------------------------------------------------------- older releases


def test_groups_of_earlier_releases_stay_as_they_are() -> None:
    old = Coordinator(OPTIONS)
    for name, assignment in (("g", "partitions"), ("s", "shared")):
        policy = GroupPolicy(assignment=assignment)
        old.apply(GroupCreated(name, policy, [("t", 1)], 1, 5))
        old.apply(MemberJoined(name, "a", ["t"], "", 2))
    old.apply(Assigned("g", [("t", 0, "a", 1)], 2))
    for group in ("g", "s"):
        decision = old.decide(Join(group, "b", [("t", 1)], GroupPolicy(), {}), at(10))
        assert [type(fact) for fact in decision.facts] == [MemberJoined]
    stored = old.groups.by_name["s"].stored()
    fields = {name: getattr(stored, name) for name in stored.__struct_fields__}
    again = GroupState.of(StoredGroup(**{**fields, "places": [], "shared": None}))
    again.verify()
    assert again.stored() == stored
