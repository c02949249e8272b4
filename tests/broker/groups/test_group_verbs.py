"""Groups at work on a whole broker: members are told at once, and only of what the partitions know.

Also covers `broker/groups/group_processes.py`, `broker/groups/group_directory.py`,
`core/model/group_commands.py` and `core/model/internal_topic.py`.
"""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tailrace.broker.engine import Engine
from tailrace.broker.partition import coordinator_partition
from tailrace.broker.partition.coordinator_partition import CoordinatorPartition
from tailrace.broker.runtime.clock import ManualClock
from tailrace.core.model.commands import (
    EARLIEST,
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
from tailrace.core.model.group_commands import (
    CreateGroup,
    DeleteGroup,
    DescribeGroup,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    ListGroups,
    Membership,
    PauseGroup,
    ResetGroup,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import GrantTo, PassTime
from tailrace.core.model.internal_topic import TOPIC, home_of
from tailrace.core.model.queue_commands import Ack, Lease
from tailrace.errors import Full, StorageFault
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.memory_log import MemoryLog
from tests.broker.held_engine import HeldEngine
from tests.broker.members import Members, coordinators

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


def test_of_two_with_one_name_the_later_has_the_seat_and_the_other_is_told() -> None:
    group = Members(2)
    ask, version = group.broker.ask, group.join("a", incarnation="1").version
    first = group.broker.submit(Heartbeat("g", "a", version, [], 10_000, "1"))
    polled = group.broker.submit(
        Lease(
            "t",
            "g",
            "a",
            [(number, generation) for _, number, generation in group.known["a"].owned],
            wait_ms=9_000,
        )
    )
    assert len(group.join("a", incarnation="2").owned) == 2
    refusals: list[Any] = [
        *(reply for reply, _ in first),
        ask(Heartbeat("g", "a", version, [], 10_000, "1")),
        ask(LeaveGroup("g", "a", "1")),
        ask(JoinGroup("g", "a", ["t"], incarnation="1", again=True)),
    ]
    assert [(refusal.code, refusal.details) for refusal in refusals] == [("fenced", {"superseded": True})] * 4
    assert "needs a name of its own" in refusals[0].message
    assert [type(reply) for reply, _ in polled] == [Refusal], "it must not take messages for nobody"
    second = group.broker.submit(Heartbeat("g", "a", group.known["a"].version, [], 10_000, "2"))
    assert second == [], "it waits undisturbed"
    assert isinstance(ask(JoinGroup("g", "a", ["t"], incarnation="2", again=True)), Membership)
    group.broker.restart()
    assert isinstance(ask(JoinGroup("g", "a", ["t"], incarnation="2", again=True)), Membership)
    assert ask(Heartbeat("g", "a", incarnation="1")).code == "fenced"
    assert isinstance(ask(Heartbeat("g", "a")), Membership), "those who do not say which they are"
    assert ask(LeaveGroup("g", "a", "2")) == Done()


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
    assert [broker.runtime("t", number).state.queues.grant("g") for number in range(3)] == [("a", 1)] * 3
    broker.settle()
    assert [broker.runtime("t", number).state.queues.grant("g") for number in range(3)] == [("", 2)] * 3
    assert group.lease("a", 0).code == "fenced"
    assert group.join("b").owned == [("t", 0, 3), ("t", 1, 3), ("t", 2, 3)]


def test_a_partition_that_heard_of_a_decision_which_a_crash_took_back_is_fenced_again() -> None:
    group = Members(1)
    group.join("a")
    group.broker.runtime().submit(GrantTo("g", "b", 2), b"", lambda reply, parts: None)
    group.broker.settle()
    group.broker.restart()
    group.broker.settle()
    assert group.broker.runtime().state.queues.grant("g") == ("a", 3)
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
        return self.open_engine({"memory": self.store})


def test_a_broker_without_files_has_groups_too() -> None:
    broker = MemoryBroker()
    broker.create(storage="memory")
    assert len(broker.ask(JoinGroup("g", "a", ["t"])).owned) == 1
    options = broker.ask(DescribeTopic(TOPIC)).options
    assert (options["storage"], options["durability"]) == ("memory", "memory")


def test_the_log_of_a_coordinator_does_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_partition, "INTERNAL_BYTES", 1024)
    group = Members(1, FileStore(tmp_path, ManualClock(), segment_bytes=2048))
    for _ in range(20):
        group.join("a")
        group.broker.ask(LeaveGroup("g", "a"))
    runtime = coordinators(group)[home_of("g")]
    assert runtime.entry >= 40
    assert runtime.stats().segments <= 4
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
    assert broker.runtime("t", 1).fault is not None
    joined = group.join("a")
    # Its owner hears of it when it asks for messages there; the others have theirs.
    assert [number for _, number, _ in joined.owned] == [0, 1, 2]
    broker.publish(b"y", partition=2)
    places = [(number, generation) for _, number, generation in joined.owned]
    leases = broker.ask(Lease("t", "g", "a", places))
    assert [grant.partition for grant in leases.grants] == [2]
    assert broker.ask(Lease("t", "g", "a", places[1:2])).code == "storage_fault"


def test_a_partition_whose_sync_fails_when_it_is_granted_is_told_of_to_its_owner() -> None:
    group = Members(1)
    group.broker.log().fail_next(StorageFault("gone"))
    joined = group.broker.submit(JoinGroup("g", "a", ["t"]))
    group.broker.pass_s(3)
    membership = joined[0][0]
    assert isinstance(membership, Membership)
    ((topic, partition, generation),) = membership.owned
    request = Lease(topic, "g", "a", [(partition, generation)], wait_ms=60_000)
    assert group.broker.ask(request).code == "storage_fault"


@pytest.mark.parametrize("assignment", ["partitions", "shared"])
def test_a_damaged_partition_has_an_owner_who_is_told_of_the_damage(assignment: str) -> None:
    members = Members(partitions=1, assignment=assignment)
    members.broker.runtime().fault = Refusal("corrupt", "it is damaged")
    ((topic, partition, generation),) = members.join("a").owned
    request = Lease(topic, "g", "a", [(partition, generation)], wait_ms=60_000)
    assert members.broker.ask(request) == Refusal("corrupt", "it is damaged")


def test_a_full_disk_only_delays_a_grant() -> None:
    group = Members(2)
    group.broker.log("t", 1).fail_next(Full("no space", outcome="none"))
    answers = group.broker.submit(JoinGroup("g", "a", ["t"]))
    group.broker.pass_s(8)
    ((joined, _),) = answers
    assert isinstance(joined, Membership)
    group.known["a"] = joined
    group.follow()
    assert len(group.known["a"].owned) == 2


@pytest.mark.parametrize("assignment", ["partitions", "shared"])
def test_a_reset_that_a_full_disk_took_back_leaves_members_that_can_lease(assignment: str) -> None:
    group = Members(1, assignment=assignment)
    group.join("a")
    broker = group.broker
    broker.publish(b"x")
    broker.log().fail_next(Full("no space", outcome="none"))
    broker.threads.holding = True
    answers = broker.submit(ResetGroup("g", "t", timestamp_us=EARLIEST, force=True))
    broker.engine.coordination.settle("g")  # Members are told of what is not on the disk yet.
    broker.settle()
    broker.threads.holding = False
    for _ in range(10):
        broker.threads.run_held()
        broker.settle()
    ((refused, _),) = answers
    assert isinstance(refused, Refusal)
    broker.pass_s(3)
    group.follow()
    assert len(group.lease("a", 0).grants) == 1


def test_a_full_disk_only_delays_what_is_taken_by_force() -> None:
    group = Members(2, session_ms=3_600_000)
    group.join("a", "b")
    runtime = coordinators(group)[home_of("g")]
    assert isinstance(runtime.log, MemoryLog)
    asked: list[object] = []
    submit = runtime.submit

    def noted(work: Any, body: Any, respond: Any) -> None:
        asked.append(work)
        submit(work, body, respond)

    runtime.submit = noted  # type: ignore[method-assign]
    runtime.log.fail_next(Full("no space", outcome="none"))
    group.broker.pass_s(120)
    assert 2 <= len([work for work in asked if isinstance(work, PassTime)]) < 30
    group.beat("b")
    assert len(group.owned("b")) == 1


def test_a_coordinator_that_fails_refuses_its_groups_only() -> None:
    group = Members(1)
    group.join("a")
    home = home_of("g")
    other = next(f"h{number}" for number in range(50) if home_of(f"h{number}") != home)
    runtime = coordinators(group)[home]
    assert isinstance(runtime.log, MemoryLog)
    runtime.log.fail_next(StorageFault("gone"))
    assert group.broker.ask(LeaveGroup("g", "a")).code == "storage_fault"
    assert isinstance(group.broker.ask(JoinGroup(other, "a", ["t"])), Membership)
    group.broker.restart()
    group.broker.settle()
    assert len(group.broker.ask(DescribeGroup("g")).members) == 1


def test_a_group_whose_coordinator_is_opened_again_is_not_unknown() -> None:
    """Its partitions would forget it, and it could not be deleted properly any more."""
    group = Members(1)
    group.join("a")
    broker, home = group.broker, coordinators(group)[home_of("g")]
    assert isinstance(home.log, MemoryLog)
    home.log.fail_next(Full("no space", outcome="none"))
    broker.threads.holding = True
    broker.submit(PauseGroup("g", paused=True))
    broker.threads.run_held(1)
    broker.settle()
    assert home.lost is not None
    deleted = broker.submit(DeleteGroup("g", force=True))
    broker.threads.holding = False
    broker.threads.run_held()
    broker.pass_s(2)
    assert deleted[0][0].code == "full"
    assert broker.engine.coordination.unknown.find() == {}
    assert group.partitions()[0]["member"] == "a"


class CountedWrites:
    """Frames that were written to the internal topic."""

    def __init__(self, runtimes: list[CoordinatorPartition]) -> None:
        self._runtimes = runtimes
        self._before = self._count()

    def _count(self) -> int:
        return sum(runtime.entry for runtime in self._runtimes)

    @property
    def frames(self) -> int:
        return self._count() - self._before


def test_a_rebalance_of_a_hundred_partitions_is_quick_and_written_in_a_few_frames() -> None:
    group = Members(100)
    group.join(*(f"m{number}" for number in range(10)))
    group.follow()
    before = {member: group.owned(member) for member in group.known}
    counted = CountedWrites(coordinators(group))
    data = [group.broker.runtime("t", number).entry for number in range(100)]
    started = time.process_time()
    group.join("new")
    group.follow()
    assert time.process_time() - started < 1
    assert len(group.owned("new")) == 9
    assert counted.frames <= 11
    touched = [number for number in range(100) if group.broker.runtime("t", number).entry != data[number]]
    assert {("t", number) for number in touched} == group.owned("new")
    assert all(group.owned(member) <= held for member, held in before.items())
    counts = Counter(len(group.owned(member)) for member in group.known)
    assert set(counts) == {9, 10}


def test_a_start_with_groups_writes_nothing_and_is_quick() -> None:
    group = Members(20)
    for number in range(20):
        group.join(f"m{number}", group=f"g{number}")
    runtimes = [*coordinators(group), *(group.broker.runtime("t", number) for number in range(20))]
    before = [runtime.entry for runtime in runtimes]
    started = time.process_time()
    group.broker.restart()
    group.broker.settle()
    assert time.process_time() - started < 1
    again = [*coordinators(group), *(group.broker.runtime("t", number) for number in range(20))]
    assert [runtime.entry for runtime in again] == before
    assert len(group.broker.ask(ListGroups()).groups) == 20
