"""Members that come, go silent, lose their connection and come back; topics that switch while they do."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.core.model.group_commands import (
    AlterGroup,
    GroupInfo,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    Membership,
    PutSchedule,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_topic import home_of
from tailrace.core.model.queue_commands import Ack, Lease
from tailrace.errors import Full
from tailrace.storage.memory_log import MemoryLog
from tests.broker.members import Members, coordinators


class Connected(Members):
    """Members on connections of their own."""

    def ask_on(self, gate: OpenGate, request: Any) -> Any:
        replies: list[Any] = []
        self.broker.engine.gateway.submit(request, b"", lambda reply, parts: replies.append(reply), gate)
        self.broker.settle()
        return replies[0] if replies else None

    def join_on(self, gate: OpenGate, member: str, incarnation: str = "") -> None:
        request = JoinGroup("g", member, ["t"], self.options, incarnation=incarnation)
        self.known[member] = self.ask_on(gate, request)
        assert isinstance(self.known[member], Membership)

    def beat_on(self, gate: OpenGate, member: str, wait_ms: int = 0) -> Any:
        return self.ask_on(gate, Heartbeat("g", member, self.known[member].version, [], wait_ms))

    def close(self, gate: OpenGate) -> None:
        for job in list(gate.fetches):
            job.drop()
        self.broker.settle()

    def there(self) -> set[str]:
        group = self.broker.engine.coordination.find("g")
        assert group is not None
        return set(group.members)


def test_a_closed_connection_ends_the_session_after_its_grace() -> None:
    group = Connected(1)
    gone, there = OpenGate(), OpenGate()
    group.broker.publish(b"1")
    group.join_on(gone, "a")
    assert len(group.lease("a", 0).grants) == 1
    group.join_on(there, "b")
    group.close(gone)
    group.broker.pass_s(2.9)
    assert group.there() == {"a", "b"}
    group.broker.pass_s(0.2)
    assert group.there() == {"b"}
    group.known["b"] = group.beat_on(there, "b")
    (grant,) = group.lease("b", 0).grants
    assert grant.runs == [(0, 1, 2, 0)], "a delivery that was not settled, and no failure"


def test_who_comes_back_in_time_goes_on() -> None:
    group = Connected(1)
    first, second = OpenGate(), OpenGate()
    group.broker.publish(b"1")
    group.join_on(first, "a")
    (grant,) = group.lease("a", 0).grants
    group.close(first)
    group.broker.pass_s(2.5)
    assert isinstance(group.beat_on(second, "a"), Membership)
    group.broker.pass_s(20)
    assert group.there() == {"a"}
    assert group.broker.ask(Ack("t", 0, "g", [(grant.lease, [0, 1])])).lost == []


def test_the_end_of_an_older_connection_means_nothing() -> None:
    group = Connected(1)
    first, second = OpenGate(), OpenGate()
    group.join_on(first, "a", "me")
    group.join_on(second, "a", "me")
    group.close(first)
    group.broker.pass_s(10)
    assert group.there() == {"a"}
    group.close(second)
    group.broker.pass_s(3.1)
    assert group.there() == set()


def test_a_poll_that_waits_does_not_keep_a_closed_connection() -> None:
    group = Connected(1)
    gate, replies = OpenGate(), list[Any]()
    group.join_on(gate, "a")
    poll = Heartbeat("g", "a", group.known["a"].version, [], 3_000)
    group.broker.engine.gateway.submit(poll, b"", lambda reply, parts: replies.append(reply), gate)
    group.broker.settle()
    assert replies == []
    for job in list(gate.fetches):
        job.hang_up()
    assert len(replies) == 1


def test_who_is_closed_while_it_joins_is_gone_as_soon() -> None:
    group = Connected(1)
    gate = OpenGate()
    request = JoinGroup("g", "a", ["t"], {})
    group.broker.engine.gateway.submit(request, b"", lambda reply, parts: None, gate)
    for job in list(gate.fetches):
        job.drop()
    group.broker.settle()
    assert group.there() == {"a"}
    group.broker.pass_s(3.1)
    assert group.there() == set()


def test_silence_still_takes_a_session_and_leaving_none() -> None:
    group = Connected(2)
    gate = OpenGate()
    group.join_on(gate, "a")
    group.join_on(OpenGate(), "b")
    group.broker.pass_s(29)
    group.beat_on(gate, "a")
    group.broker.pass_s(1.1)
    assert group.there() == {"a"}
    group.broker.ask(LeaveGroup("g", "a"))
    assert group.there() == set()
    assert not gate.fetches, "nothing of it is left on the connection"


@pytest.mark.parametrize("grace_ms", [0, 500])
def test_the_grace_is_an_option(grace_ms: int) -> None:
    group = Connected(1, reconnect_grace_ms=grace_ms)
    gate = OpenGate()
    group.join_on(gate, "a")
    group.close(gate)
    group.broker.pass_s(grace_ms / 1000 + 0.001)
    assert group.there() == set()


def test_a_restart_of_the_broker_gives_everybody_a_session() -> None:
    group = Connected(1)
    gate = OpenGate()
    group.join_on(gate, "a")
    group.broker.restart()
    group.close(gate)
    group.broker.pass_s(25)
    assert group.there() == {"a"}
    assert isinstance(group.beat_on(OpenGate(), "a"), Membership)
    group.broker.pass_s(10)
    assert group.there() == {"a"}


def test_a_coordinator_that_is_opened_again_gives_everybody_a_session() -> None:
    group = Connected(1)
    gate = OpenGate()
    group.join_on(gate, "a")
    group.broker.pass_s(20)
    waiting = group.poll("a")
    home = coordinators(group)[home_of("g")]
    assert isinstance(home.log, MemoryLog)
    home.log.fail_next(Full("no space", outcome="none"))
    assert group.broker.ask(AlterGroup("g", {"max_attempts": 7})).code == "full"
    assert [reply.code for reply, _ in waiting] == ["unavailable"], "it joins again"
    group.broker.pass_s(28)
    assert group.there() == {"a"}, "it was seen 48 s ago, and the session began 28 s ago"
    assert isinstance(group.beat_on(gate, "a"), Membership)
    group.close(gate)
    group.broker.pass_s(3.1)
    assert group.there() == set(), "its connection is known again"


def test_who_died_while_the_broker_was_away_is_gone_after_a_session() -> None:
    """The tick of a schedule is hours away: that is no reason to sleep until then."""
    group = Connected(3)
    group.broker.ask(PutSchedule("yearly", "t", "0 0 29 2 *", value=b"v"))
    group.broker.publish(b"1")
    group.join_on(OpenGate(), "a")
    group.broker.restart()
    group.broker.restart()
    group.join("b")
    group.broker.pass_s(31)
    assert group.there() == set(), "neither has shown itself"
    group.join("c")
    assert group.owned("c") == {("t", number) for number in range(3)}
    assert len(group.lease("c", 0).grants) == 1


def test_a_broker_that_closes_ends_no_sessions() -> None:
    group = Connected(1)
    gate = OpenGate()
    group.join_on(gate, "a")
    group.broker.engine.drain()
    group.close(gate)
    group.broker.pass_s(5)
    assert group.there() == {"a"}


# ------------------------------------------------------------------------------------------------------- auto


def test_more_members_than_partitions_share_them_and_few_divide_them() -> None:
    group = Members(2)
    group.join("a", "b")
    group.follow()
    assert not group.owned("a") & group.owned("b")
    before = group.known["a"].owned
    group.join("c")
    group.follow()
    everything = {("t", 0), ("t", 1)}
    assert group.owned("a") == group.owned("b") == group.owned("c") == everything
    assert set(before) <= set(group.known["a"].owned), "the generation stays"
    assert [row["shared"] for row in group.partitions()] == [True, True]
    group.broker.ask(LeaveGroup("g", "c"))
    del group.known["c"]
    group.broker.pass_s(9.9)
    group.follow()
    assert group.owned("a") == everything
    group.broker.pass_s(0.2)
    generations = {(topic, number): g for topic, number, g in group.known["a"].owned}
    group.follow()
    assert {len(group.owned("a")), len(group.owned("b"))} == {1}
    assert group.owned("a") | group.owned("b") == everything
    assert all(generations[topic, number] == g for topic, number, g in group.known["a"].owned)
    assert [row["shared"] for row in group.partitions()] == [False, False]
    assert all(row["member"] for row in group.partitions())


def test_the_switch_goes_on_after_a_restart() -> None:
    group = Members(2)
    group.join("a", "b", "c")
    group.follow()
    group.broker.restart()
    group.follow()
    assert group.owned("c") == {("t", 0), ("t", 1)}
    group.broker.ask(LeaveGroup("g", "c"))
    del group.known["c"]
    group.broker.pass_s(5)
    group.broker.restart()
    group.broker.pass_s(5.1)
    group.beat("a", release=False)
    group.broker.restart()
    group.follow()
    assert {len(group.owned("a")), len(group.owned("b"))} == {1}
    group.broker.publish(b"1", b"2")
    leased = [group.lease(member, place[1]) for member in "ab" for place in group.owned(member)]
    assert sum(len(reply.grants) for reply in leased) == 1


def test_nobody_pauses_at_the_switch() -> None:
    group = Members(1)
    group.join("a")
    waiting = group.broker.submit(Lease("t", "g", "a", [(0, 1)], wait_ms=10_000))
    group.join("b")
    assert waiting == [], "a request that waits goes on waiting"
    group.broker.publish(b"1")
    assert len(waiting[0][0].grants) == 1
    group.follow()
    waiting = group.broker.submit(Lease("t", "g", "a", [(0, 1)], wait_ms=60_000))
    group.broker.ask(LeaveGroup("g", "b"))
    del group.known["b"]
    for _ in range(3):
        group.broker.pass_s(5)
        group.beat("a")
    assert waiting == []
    group.broker.publish(b"2")
    assert len(waiting[0][0].grants) == 1


# --------------------------------------------------------------------------------------------------- altering


def test_altered_options_reach_partitions_and_members() -> None:
    group = Members(2)
    group.broker.publish(b"1", b"2")
    group.join("a")
    waiting = group.poll("a")
    info = group.broker.ask(AlterGroup("g", {"lease_ms": 1_000, "in_flight_max": 1}))
    assert isinstance(info, GroupInfo)
    assert (info.options["lease_ms"], info.options["in_flight_max"]) == (1_000, 1)
    (told, _), *_ = waiting
    assert told.options["lease_ms"] == 1_000, "members hear of it at once"
    group.known["a"] = told
    (grant,) = group.lease("a", 0).grants
    assert grant.runs == [(0, 1, 1, 0)]
    assert grant.deadline_us - group.broker.engine.topics.get("t").runtimes[0].time_us() == 1_000_000
    group.broker.restart()
    assert group.broker.engine.coordination.find("g").policy.lease_ms == 1_000
    policies = {
        runtime.state.queues.policy("g").lease_ms for runtime in group.broker.engine.topics.get("t").runtimes
    }
    assert policies == {1_000}


def test_an_alteration_is_answered_when_it_is_durable() -> None:
    group = Members(1)
    group.join("a")
    group.broker.threads.holding = True
    answers = group.broker.submit(AlterGroup("g", {"max_attempts": 7}))
    assert answers == []
    while group.broker.threads.held:  # Its coordinator, then the partition.
        assert answers == []
        group.broker.threads.run_held(1)
        group.broker.settle()
    assert answers[0][0].options["max_attempts"] == 7


@pytest.mark.parametrize(
    ("options", "code"),
    [({"mode": "stream"}, "invalid_request"), ({"lease": 1}, "invalid_request"), ({}, "invalid_request")],
)
def test_alterations_that_are_refused(options: dict[str, Any], code: str) -> None:
    group = Members(1)
    group.join("a")
    reply = group.broker.ask(AlterGroup("g", options))
    assert isinstance(reply, Refusal)
    assert reply.code == code
    assert group.broker.ask(AlterGroup("nobody", {"lease_ms": 50})).code == "not_found"
    assert group.broker.ask(AlterGroup("_redrive", {"lease_ms": 50})).code == "denied"
