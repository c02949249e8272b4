"""Groups at work on a whole broker: members are told at once, and only of what the partitions know."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tailrace.broker import upkeep
from tailrace.broker.clock import ManualClock
from tailrace.broker.engine import Engine
from tailrace.broker.shard import Shard
from tailrace.core.commands import (
    EARLIEST,
    LATEST,
    AlterTopic,
    ClaimProducer,
    CreateTopic,
    DeleteTopic,
    DescribeTopic,
    Done,
    Fetch,
    ListTopics,
    Publish,
    TrimTopic,
)
from tailrace.core.coordinator import TOPIC, home_of
from tailrace.core.delivery_commands import Ack, Lease
from tailrace.core.group_commands import (
    CreateGroup,
    DeleteGroup,
    DescribeGroup,
    GroupInfo,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    ListGroups,
    Membership,
    PauseGroup,
    ResetGroup,
    ResetPlan,
)
from tailrace.core.inner_commands import GrantTo
from tailrace.core.model import Refusal
from tailrace.errors import Full, StorageFault
from tailrace.storage.file_store import FileStore
from tailrace.storage.memory_log import MemoryLog
from tests.broker.held_engine import HeldEngine


class Members:
    """A broker with a topic, and consumers that follow what they are told."""

    def __init__(self, partitions: int = 6, store: Any = None, **options: Any) -> None:
        self.broker = HeldEngine(store)
        self.broker.create(partitions=partitions)
        self.options = options
        self.known: dict[str, Membership] = {}

    def join(
        self, *members: str, group: str = "g", topics: tuple[str, ...] = ("t",), **fields: Any
    ) -> Membership:
        for member in members:
            request = JoinGroup(group, member, list(topics), self.options, **fields)
            self.known[member] = self.broker.ask(request)
            assert isinstance(self.known[member], Membership), self.known[member]
        return self.known[members[-1]]

    def beat(self, member: str, *, release: bool = True, group: str = "g") -> Membership:
        known = self.known[member]
        released = known.revoking if release else []
        reply = self.broker.ask(Heartbeat(group, member, known.version, released))
        assert isinstance(reply, Membership), reply
        self.known[member] = reply
        return reply

    def follow(self) -> None:
        """All members do what they are told until there is nothing more to do."""
        for _ in range(10):
            before = dict(self.known)
            for member in self.known:
                self.beat(member)
            if before == self.known:
                return
        raise AssertionError("no rest")

    def owned(self, member: str) -> set[tuple[str, int]]:
        return {(topic, number) for topic, number, _ in self.known[member].owned}

    def poll(self, member: str, wait_ms: int = 10_000) -> list[Any]:
        """The answers to a long poll: empty while it waits."""
        return self.broker.submit(Heartbeat("g", member, self.known[member].version, [], wait_ms))

    def partitions(self, group: str = "g") -> list[dict[str, Any]]:
        info = self.broker.ask(DescribeGroup(group))
        assert isinstance(info, GroupInfo), info
        return info.partitions

    def lease(self, member: str, number: int, generation: int | None = None, group: str = "g") -> Any:
        if generation is None:
            generation = next(g for _, n, g in self.known[member].owned if n == number)
        return self.broker.ask(Lease("t", group, member, [(number, generation)]))


# ---------------------------------------------------------------------------------------------- membership


def test_the_first_member_has_everything_in_the_answer_to_its_join() -> None:
    group = Members(3)
    joined = group.join("a")
    assert joined.owned == [("t", 0, 1), ("t", 1, 1), ("t", 2, 1)]
    assert (joined.revoking, joined.state, joined.options["lease_ms"]) == ([], "active", 30_000)
    for number in range(3):
        assert not isinstance(group.lease("a", number), Refusal), "a grant that is told is a grant that holds"


def test_a_partition_moves_when_its_owner_confirms() -> None:
    group = Members(4)
    group.join("a")
    waiting = group.poll("a")
    assert waiting == []
    assert group.join("b").owned == []
    ((told, _),) = waiting
    assert isinstance(told, Membership)
    assert (len(told.owned), len(told.revoking)) == (4, 2)
    group.known["a"] = told
    moving, b_waits = set(told.revoking), group.poll("b")
    assert group.beat("a", release=False).version == told.version, "nothing moves before that"
    kept = group.beat("a")
    assert (len(kept.owned), kept.revoking) == (2, [])
    ((granted, _),) = b_waits
    assert {(topic, number) for topic, number, _ in granted.owned} == moving
    assert {generation for _, _, generation in granted.owned} == {2}
    assert {generation for _, _, generation in kept.owned} == {1}, "what stays is not touched"
    group.known["b"] = granted
    number = next(iter(moving))[1]
    assert group.lease("a", number, 1).code == "fenced"
    assert not isinstance(group.lease("b", number), Refusal)


def test_members_are_balanced_within_one_whoever_comes_and_goes() -> None:
    group = Members(7)
    group.join("a", "b", "c")
    group.follow()
    assert sorted(len(group.owned(member)) for member in "abc") == [2, 2, 3]
    before = {member: group.owned(member) for member in "ac"}
    assert group.broker.ask(LeaveGroup("g", "b")) == Done()
    del group.known["b"]
    group.follow()
    assert all(before[member] <= group.owned(member) for member in "ac"), "nobody loses what it had"
    assert sorted(len(group.owned(member)) for member in "ac") == [3, 4]


def test_a_member_that_does_not_answer_is_taken_by_force() -> None:
    group = Members(2, revoke_timeout_ms=5_000)
    group.join("a", "b")
    for _ in range(4):
        group.broker.pass_s(1)
        group.beat("a", release=False)
        group.beat("b")
    assert group.owned("b") == set()
    group.broker.pass_s(1)
    group.beat("b")
    assert len(group.owned("b")) == len(group.beat("a").owned) == 1


def test_a_silent_member_is_taken_out_after_a_session() -> None:
    group = Members(2, session_ms=6_000)
    group.join("a", "b")
    group.follow()
    for _ in range(5):
        group.broker.pass_s(1)
        group.beat("a")
    assert len(group.owned("a")) == 1
    for _ in range(2):
        group.broker.pass_s(1)
        group.beat("a")
    assert len(group.owned("a")) == 2
    refusal = group.broker.ask(Heartbeat("g", "b"))
    assert (refusal.code, "join again" in refusal.message) == ("fenced", True)
    group.join("b")
    group.follow()
    assert len(group.owned("b")) == 1


def test_a_long_poll_alone_keeps_nobody_alive_for_long_and_polls_follow_each_other() -> None:
    group = Members(1, session_ms=10_000)
    group.join("a")
    first = group.poll("a", 60_000)
    second = group.poll("a", 60_000)
    assert (len(first), len(second)) == (1, 0), "the older one is answered"
    group.broker.pass_s(5)
    assert len(second) == 1
    group.broker.pass_s(6)
    assert group.broker.ask(Heartbeat("g", "a")).code == "fenced"


def test_a_member_that_joins_again_goes_on_with_what_it_had() -> None:
    group = Members(3)
    first = group.join("a")
    assert group.join("a") == first
    assert group.partitions()[0]["generation"] == 1


def test_the_broker_restarts_and_members_go_on() -> None:
    group = Members(4, session_ms=10_000)
    group.join("a", "b")
    group.follow()
    before = {member: group.known[member].owned for member in "ab"}
    group.broker.pass_s(1)
    group.broker.restart()
    group.broker.settle()
    versions = {member: group.known[member].version for member in "ab"}
    for _ in range(3):
        group.broker.pass_s(4)
        group.follow()
    assert {member: group.known[member].owned for member in "ab"} == before
    assert all(group.known[member].version > versions[member] for member in "ab")
    group.broker.restart()
    group.broker.pass_s(9)
    assert len(group.broker.ask(DescribeGroup("g")).members) == 2, "a whole session to come back"
    group.broker.pass_s(2)
    assert group.broker.ask(DescribeGroup("g")).members == []


def test_a_crash_before_the_partitions_knew_is_made_up_for() -> None:
    group = Members(3)
    group.join("a")
    broker = group.broker
    broker.threads.holding = True
    broker.submit(LeaveGroup("g", "a"))
    broker.threads.run_held(1)  # The coordinator has it on disk, no partition has.
    broker.threads.holding = False
    broker.restart()
    assert [broker.shard("t", number).state.queues.grant("g") for number in range(3)] == [("a", 1)] * 3
    broker.settle()
    assert [broker.shard("t", number).state.queues.grant("g") for number in range(3)] == [("", 2)] * 3
    assert group.lease("a", 0).code == "fenced"
    assert group.join("b").owned == [("t", 0, 3), ("t", 1, 3), ("t", 2, 3)]


def test_a_partition_that_heard_of_a_decision_which_a_crash_took_back_is_fenced_again() -> None:
    group = Members(1)
    group.join("a")
    group.broker.shard().submit(GrantTo("g", "b", 2), b"", lambda reply, parts: None)
    group.broker.settle()
    group.broker.restart()
    group.broker.settle()
    assert group.broker.shard().state.queues.grant("g") == ("a", 3)
    assert group.beat("a").owned == [("t", 0, 3)]
    assert group.lease("b", 0, 2).code == "fenced"


def test_a_broker_that_stood_still_blames_nobody() -> None:
    group = Members(2, session_ms=5_000)
    group.join("a")
    broker = group.broker
    broker.clock.set_us(broker.clock.now_us() + 60_000_000)
    broker.engine.pump.tick()
    broker.settle()
    assert len(group.beat("a").owned) == 2
    broker.pass_s(6)
    assert broker.ask(Heartbeat("g", "a")).code == "fenced"


def test_closing_answers_polls() -> None:
    group = Members(1)
    group.join("a")
    waiting = group.poll("a")
    group.broker.engine.drain()
    assert len(waiting) == 1


# ------------------------------------------------------------------------------------------------- kinds


def test_exclusive_has_one_active_consumer_and_the_next_takes_over() -> None:
    group = Members(3, mode="exclusive")
    assert group.join("a").state == "active"
    assert (group.join("b").state, group.join("b").owned) == ("standby", [])
    refusal = group.broker.ask(JoinGroup("g", "c", ["t"], group.options, wait=False))
    assert (refusal.code, refusal.details["member"]) == ("fenced", "a")
    waiting = group.poll("b")
    group.broker.ask(LeaveGroup("g", "a"))
    ((told, _),) = waiting
    assert (told.state, len(told.owned)) == ("active", 3)


def test_in_a_shared_group_everybody_has_everything() -> None:
    group = Members(2, assignment="shared")
    group.join("a", "b", "c")
    assert all(group.known[member].owned == [("t", 0, 0), ("t", 1, 0)] for member in "abc")


def test_what_a_leaver_had_in_a_shared_group_goes_to_the_others_without_a_failure() -> None:
    group = Members(1, assignment="shared", session_ms=5_000)
    group.broker.publish(b"1", b"2")
    group.join("a", "b")
    (first,) = group.lease("a", 0).grants
    assert group.lease("b", 0).grants == []
    for _ in range(3):
        group.broker.pass_s(2)
        group.beat("b")
    (again,) = group.lease("b", 0).grants
    assert (first.runs, again.runs) == ([(0, 2, 1, 0)], [(0, 2, 2, 0)])
    assert group.broker.ask(Ack("t", 0, "g", [(first.lease, [0, 2])])).lost != []


def test_groups_do_not_know_each_other() -> None:
    group = Members(2)
    group.broker.publish(b"1", b"2")
    group.join("a", group="g")
    group.join("a", group="h")
    one = group.lease("a", 0, 1, "g")
    two = group.lease("a", 0, 1, "h")
    assert [grant.runs for grant in one.grants] == [grant.runs for grant in two.grants] != []


def test_options_hold_for_the_whole_group() -> None:
    group = Members(1, lease_ms=5_000)
    group.join("a")
    ask = group.broker.ask
    assert "lease_ms is 5000, not 6000" in ask(JoinGroup("g", "b", ["t"], {"lease_ms": 6_000})).message
    assert isinstance(ask(JoinGroup("g", "b", ["t"])), Membership)
    refusal = ask(JoinGroup("x", "b", ["t"], {"lease_ms": 0, "mod": 1}))
    assert len(refusal.details["problems"]) == 2


def test_bad_requests() -> None:
    ask = Members(1).broker.ask
    assert ask(JoinGroup("g", "", ["t"])).code == "invalid_request"
    assert ask(JoinGroup("g", "a", [])).code == "invalid_request"
    assert ask(JoinGroup("g", "a", ["gone"])).code == "not_found"
    assert ask(JoinGroup("_x", "a", ["t"])).code == "invalid_request"
    assert ask(CreateGroup("_redrive", ["t"])).code == "invalid_request"
    assert ask(JoinGroup("a b", "a", ["t"])).code == "invalid_request"
    assert ask(Heartbeat("g", "a")).code == "not_found"
    assert ask(LeaveGroup("g", "a")).code == "not_found"
    assert ask(DescribeGroup("g")).code == "not_found"
    assert ask(DeleteGroup("g")).code == "not_found"
    assert ask(ResetGroup("g", "t")).code == "not_found"
    assert ask(ListGroups()).groups == []
    assert [topic.name for topic in ask(ListTopics(internal=True)).topics] == ["t"], "nothing was made for it"


# --------------------------------------------------------------------------------------- administration


def test_a_group_is_there_before_anybody_connects() -> None:
    group = Members(2)
    broker = group.broker
    broker.publish(b"before")
    made = broker.ask(CreateGroup("g", ["t"], {"start": "latest", "ordering": "partition"}))
    assert isinstance(made, GroupInfo)
    assert (made.created, made.topics, made.member_count) == (True, ["t"], 0)
    assert "priorities are ignored" in made.warnings[0]
    broker.publish(b"after")
    assert [row["lag"] for row in group.partitions()] == [1, 0]
    assert broker.ask(CreateGroup("g", ["t"])).code == "already_exists"
    broker.create("u")
    again = broker.ask(CreateGroup("g", ["u"], if_missing=True))
    assert (again.created, again.topics) == (False, ["t", "u"])
    assert [info.group for info in broker.ask(ListGroups()).groups] == ["g"]
    assert broker.ask(ListGroups(topic="other")).groups == []
    assert broker.ask(ListGroups(prefix="g")).groups[0].lag == 1


def test_own_groups_are_not_listed_and_not_deleted() -> None:
    broker = Members(1).broker
    broker.create("t.dlq")
    assert broker.ask(CreateGroup("_redrive", ["t.dlq"])).created
    assert broker.ask(ListGroups()).groups == []
    assert len(broker.ask(ListGroups(prefix="_")).groups) == 1
    assert broker.ask(DeleteGroup("_redrive")).code == "denied"


def test_describing_a_group() -> None:
    group = Members(2)
    group.broker.publish(b"1", b"2", b"3")
    group.join("a", client="host:1")
    group.broker.pass_s(7)
    leased = group.lease("a", 0)
    info = group.broker.ask(DescribeGroup("g"))
    (member,) = info.members
    assert (member["member"], member["client"], len(member["owned"])) == ("a", "host:1", 2)
    assert member["last_seen_us"] <= group.broker.clock.now_us() - 7_000_000
    row = info.partitions[0]
    assert (row["member"], row["generation"], row["committed"], row["end_offset"]) == ("a", 1, 0, 3)
    assert (row["lag"], row["in_flight"], row["oldest_age_ms"]) == (3, 3, 7_000)
    (grant,) = leased.grants
    group.broker.ask(Ack("t", 0, "g", [(grant.lease, [0, 3])]))
    row = group.partitions()[0]
    assert (row["committed"], row["lag"], row["in_flight"], row["oldest_age_ms"]) == (3, 0, 0, 0)


def test_pausing_stops_leases_and_members_are_told() -> None:
    group = Members(1)
    group.broker.publish(b"1")
    group.join("a")
    assert group.broker.ask(PauseGroup("g", True)) == Done()
    assert group.beat("a").state == "paused"
    assert group.lease("a", 0).grants == []
    group.broker.restart()
    group.broker.settle()
    assert group.broker.ask(PauseGroup("g", False)) == Done()
    assert group.beat("a").state == "active"
    assert len(group.lease("a", 0).grants) == 1


def test_deleting_a_group_leaves_nothing_behind() -> None:
    group = Members(2)
    group.broker.publish(b"1")
    group.join("a")
    (grant,) = group.lease("a", 0).grants
    group.broker.ask(Ack("t", 0, "g", [(grant.lease, [0, 1])]))
    assert group.broker.ask(DeleteGroup("g")).details == {"members": ["a"]}
    waiting = group.poll("a")
    assert group.broker.ask(DeleteGroup("g", force=True)) == Done()
    assert waiting[0][0].code == "not_found"
    assert group.broker.ask(DescribeGroup("g")).code == "not_found"
    assert group.broker.shard().state.queues.names() == []
    group.join("a")
    assert group.partitions()[0]["committed"] == 0, "a new group of the same name is another"


def test_a_group_deleted_just_before_a_crash_is_forgotten_after_it() -> None:
    group = Members(2)
    group.join("a")
    broker = group.broker
    broker.threads.holding = True
    broker.submit(DeleteGroup("g", force=True))
    broker.threads.run_held(1)
    broker.engine.pump.drain()
    broker.threads.holding = False
    broker.restart()
    broker.settle()
    assert broker.ask(ListGroups()).groups == []
    assert all(broker.shard("t", number).state.queues.names() == [] for number in range(2))


def test_new_partitions_are_read_from_their_beginning_and_shared_out() -> None:
    group = Members(2, start="latest")
    group.join("a", "b")
    group.follow()
    group.broker.ask(AlterTopic("t", {"partitions": 4}))
    group.broker.publish(b"1", partition=3)
    group.follow()
    assert [len(group.owned(member)) for member in "ab"] == [2, 2]
    assert [row["lag"] for row in group.partitions()] == [0, 0, 0, 1]


def test_a_deleted_topic_leaves_its_groups_and_a_new_one_of_that_name_starts_afresh() -> None:
    group = Members(2)
    group.broker.publish(b"1")
    group.join("a")
    group.broker.ask(DeleteTopic("t"))
    assert group.beat("a").owned == []
    group.broker.create(partitions=3)
    assert len(group.beat("a").owned) == 3
    assert not isinstance(group.lease("a", 2), Refusal)


# ------------------------------------------------------------------------------------------------ resets


def test_a_reset_shows_first_and_then_moves() -> None:
    group = Members(2)
    broker = group.broker
    first_us = broker.clock.now_us()
    broker.publish(b"1", b"2")
    broker.pass_s(10)
    broker.publish(b"3")
    broker.ask(CreateGroup("g", ["t"]))
    plan = broker.ask(ResetGroup("g", "t", LATEST, dry_run=True))
    assert plan == ResetPlan([(0, 0, 3), (1, 0, 0)], done=False)
    assert group.partitions()[0]["committed"] == 0
    assert broker.ask(ResetGroup("g", "t", LATEST)).done
    assert group.partitions()[0]["committed"] == 3
    assert broker.ask(ResetGroup("g", "t", first_us + 1)).changes == [(0, 3, 2), (1, 0, 0)]
    assert broker.ask(ResetGroup("g", "t", EARLIEST)).changes == [(0, 2, 0), (1, 0, 0)]
    assert broker.ask(ResetGroup("g", "t", offsets=[(0, 1)])).changes == [(0, 0, 1)]
    assert group.partitions()[0]["committed"] == 1
    assert broker.ask(ResetGroup("g", "t", offsets=[(0, 9), (5, 0)])).code == "invalid_request"
    assert broker.ask(ResetGroup("g", "t", -7)).code == "invalid_request"
    assert broker.ask(ResetGroup("g", "other")).code == "not_found"


def test_a_reset_under_members_must_be_forced_and_they_are_told() -> None:
    group = Members(1)
    group.broker.publish(b"1", b"2")
    group.join("a")
    (grant,) = group.lease("a", 0).grants
    assert group.broker.ask(ResetGroup("g", "t", LATEST)).code == "invalid_request"
    waiting = group.poll("a")
    assert group.broker.ask(ResetGroup("g", "t", EARLIEST, force=True)).done
    assert group.broker.ask(Ack("t", 0, "g", [(grant.lease, [0, 2])])).lost != []
    assert group.lease("a", 0).code == "fenced"
    group.known["a"] = waiting[-1][0] if waiting else group.beat("a")
    group.follow()
    assert group.known["a"].owned == [("t", 0, 2)]
    assert len(group.lease("a", 0).grants) == 1
    group.join("b")
    group.broker.ask(LeaveGroup("g", "a"))
    group.known.pop("a")
    group.follow()
    assert group.known["b"].owned[0][2] > 2


def test_members_of_a_shared_group_hear_of_a_reset_too() -> None:
    group = Members(1, assignment="shared")
    group.broker.publish(b"1")
    group.join("a")
    assert group.broker.ask(ResetGroup("g", "t", EARLIEST, force=True)).done
    assert group.beat("a").owned == [("t", 0, 1)]
    assert len(group.lease("a", 0).grants) == 1


# --------------------------------------------------------------------------------- the topic, and trouble


def test_the_internal_topic_is_made_at_first_need_and_nobody_else_may_touch_it() -> None:
    group = Members(1)
    ask = group.broker.ask
    assert ask(CreateTopic(TOPIC)).code == "invalid_request"
    group.join("a")
    assert [topic.name for topic in ask(ListTopics()).topics] == ["t"]
    assert [topic.name for topic in ask(ListTopics(internal=True)).topics] == [TOPIC, "t"]
    assert len(ask(DescribeTopic(TOPIC)).partitions) == 16
    for request in (
        Publish(TOPIC, 0, 0, 0),
        DeleteTopic(TOPIC),
        AlterTopic(TOPIC, {"partitions": 17}),
        TrimTopic(TOPIC, 0, 0),
        ClaimProducer(TOPIC, 0, 1),
        Fetch(TOPIC, [(0, 0)]),
        Lease(TOPIC, "g", "a", [(0, 0)]),
        JoinGroup("g", "a", [TOPIC]),
        CreateGroup("h", [TOPIC]),
    ):
        assert ask(request).code == "denied", request


class MemoryBroker(HeldEngine):
    """A broker without files."""

    def _start(self) -> Engine:
        engine = Engine(self.clock, self.threads, {"memory": self.store}, self.coordinator)
        engine.open()
        return engine


def test_a_broker_without_files_has_groups_too() -> None:
    broker = MemoryBroker()
    broker.create(storage="memory")
    assert len(broker.ask(JoinGroup("g", "a", ["t"])).owned) == 1
    options = broker.ask(DescribeTopic(TOPIC)).options
    assert (options["storage"], options["durability"]) == ("memory", "memory")


def test_the_log_of_a_coordinator_does_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "SNAPSHOT_INTERNAL_BYTES", 4096)
    group = Members(3, FileStore(tmp_path, ManualClock(), segment_bytes=8192))
    for _ in range(60):
        group.join("a")
        group.broker.ask(LeaveGroup("g", "a"))
    shard = coordinators(group)[home_of("g")]
    assert shard.entry > 100
    assert shard.stats().segments <= 4
    group.join("a")
    held = group.partitions()
    group.broker.restart()
    group.broker.settle()
    assert group.partitions() == held


def test_one_faulty_partition_keeps_no_other_from_its_members() -> None:
    group = Members(3)
    broker = group.broker
    broker.log("t", 1).fail_next(StorageFault("gone"))
    broker.publish(b"x", partition=1)
    assert broker.shard("t", 1).fault is not None
    joined = group.join("a")
    assert [number for _, number, _ in joined.owned] == [0, 2]


def test_a_full_disk_only_delays_a_grant() -> None:
    group = Members(2)
    group.broker.log("t", 1).fail_next(Full("no space", outcome="none"))
    answers = group.broker.submit(JoinGroup("g", "a", ["t"]))
    group.broker.pass_s(8)
    ((joined, _),) = answers
    group.known["a"] = joined
    group.follow()
    assert len(group.known["a"].owned) == 2


def test_a_coordinator_that_fails_refuses_its_groups_only() -> None:
    group = Members(1)
    group.join("a")
    home = home_of("g")
    other = next(f"h{number}" for number in range(50) if home_of(f"h{number}") != home)
    shard = coordinators(group)[home]
    assert isinstance(shard.log, MemoryLog)
    shard.log.fail_next(StorageFault("gone"))
    assert group.broker.ask(LeaveGroup("g", "a")).code == "storage_fault"
    assert isinstance(group.broker.ask(JoinGroup(other, "a", ["t"])), Membership)
    group.broker.restart()
    group.broker.settle()
    assert len(group.broker.ask(DescribeGroup("g")).members) == 1


def coordinators(group: Members) -> list[Shard]:
    return group.broker.engine.coordinators.shards()


class CountedWrites:
    """Frames that were written to the internal topic."""

    def __init__(self, shards: list[Shard]) -> None:
        self._shards = shards
        self._before = self._count()

    def _count(self) -> int:
        return sum(shard.entry for shard in self._shards)

    @property
    def frames(self) -> int:
        return self._count() - self._before


def test_a_rebalance_of_a_hundred_partitions_is_quick_and_written_in_a_few_frames() -> None:
    group = Members(100)
    group.join(*(f"m{number}" for number in range(10)))
    group.follow()
    before = {member: group.owned(member) for member in group.known}
    counted = CountedWrites(coordinators(group))
    data = [group.broker.shard("t", number).entry for number in range(100)]
    started = time.perf_counter()
    group.join("new")
    group.follow()
    assert time.perf_counter() - started < 1
    assert len(group.owned("new")) == 9
    assert counted.frames <= 11
    touched = [number for number in range(100) if group.broker.shard("t", number).entry != data[number]]
    assert {("t", number) for number in touched} == group.owned("new")
    assert all(group.owned(member) <= held for member, held in before.items())
    counts = Counter(len(group.owned(member)) for member in group.known)
    assert set(counts) == {9, 10}


@pytest.mark.parametrize("groups", [20])
def test_a_start_with_groups_on_a_real_disk_is_quick(tmp_path: Path, groups: int) -> None:
    store = FileStore(tmp_path, ManualClock(), segment_bytes=1 << 20)
    group = Members(3, store)
    for number in range(groups):
        group.join(f"m{number}", group=f"g{number}")
    started = time.perf_counter()
    group.broker.restart()
    group.broker.settle()
    assert time.perf_counter() - started < 1
    assert len(group.broker.ask(ListGroups()).groups) == groups
