"""Groups for those who look after them: made, described, paused, reset and deleted."""

import pytest

from tailrace.core.model.commands import (
    EARLIEST,
    LATEST,
    AlterTopic,
    DeleteTopic,
    Done,
)
from tailrace.core.model.group_commands import (
    CreateGroup,
    DeleteGroup,
    DescribeGroup,
    GroupInfo,
    LeaveGroup,
    ListGroups,
    PauseGroup,
    ResetGroup,
    ResetPlan,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import Ack
from tests.broker.members import Members


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


@pytest.mark.parametrize("paused", [True, False])
def test_a_pause_is_done_when_every_partition_knows_of_it(paused: bool) -> None:
    group = Members(2)
    group.join("a")
    if not paused:
        group.broker.ask(PauseGroup("g", True))
    group.broker.threads.holding = True
    answers = group.broker.submit(PauseGroup("g", paused))
    group.broker.threads.run_held(1)  # Its coordinator's log; those of the partitions are slow.
    group.broker.pass_s(4.9)
    assert answers == []
    group.broker.pass_s(0.2)
    ((reply, _),) = answers
    assert (reply.code, reply.outcome) == ("timeout", "unknown"), "messages may go out as before"
    group.broker.threads.holding = False
    group.broker.threads.run_held()
    group.broker.settle()
    assert group.beat("a").state == ("paused" if paused else "active"), "it goes on by itself"
    assert group.broker.ask(PauseGroup("g", paused)) == Done()


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
    assert group.broker.runtime().state.queues.names() == []
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
    assert all(broker.runtime("t", number).state.queues.names() == [] for number in range(2))


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
    group = Members(1, assignment="partitions")
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
