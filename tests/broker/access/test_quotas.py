"""Quotas on a whole engine: requests, bytes, messages in flight, topics, storage and connections."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.broker.access import quotas as module
from tailrace.broker.access.quotas import Quotas
from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.broker.runtime.clock import ManualClock
from tailrace.cluster.embedded import MemoryCoordinator
from tailrace.core.access.identity_names import RIGHTS_ON
from tailrace.core.model.access import OWNER, Caller, Identities, Quota, Rule, User
from tailrace.core.model.commands import (
    CreateTopic,
    DeleteTopic,
    Fetch,
    ListTopics,
    Ping,
    Pong,
    Publish,
    Published,
    Reply,
    TopicInfo,
)
from tailrace.core.model.group_commands import Heartbeat
from tailrace.core.model.identifiers import Refusal
from tailrace.format import batch as arrow
from tailrace.format.frame import Buffer, crc32c
from tailrace.storage.memory_log import MemoryStore
from tests.broker.held_engine import HeldEngine
from tests.broker.queue_engine import QueueEngine, got

ANNA = Caller("anna", "token", "t1", "10.0.0.1")
BOB = Caller("acme/bob", "token", "t2", "10.0.0.2")
EVE = Caller("acme/eve", "token", "t3", "10.0.0.2")
CARL = Caller("carl", "token", "t4", "10.0.0.3")
OPEN = Caller("", "open", "", "10.0.0.9")


def identities(**bounds: dict[str, int]) -> Identities:
    """Users who may do everything but administer, and quotas by subject (`user_anna=...`)."""
    names = ("anna", "acme/bob", "acme/eve", "carl")
    rows = [Quota(subject=name.replace("_", ":", 1), **fields) for name, fields in bounds.items()]
    return Identities(
        users={name: User(name=name) for name in names},
        rules=(
            Rule(id=1, effect="allow", subject="everyone", rights=RIGHTS_ON["topic"], resource="topic"),
            Rule(id=2, effect="allow", subject="everyone", rights=RIGHTS_ON["group"], resource="group"),
        ),
        quotas={quota.subject: quota for quota in rows},
    )


def engine(**bounds: dict[str, int]) -> QueueEngine:
    broker = QueueEngine()
    broker.create()
    broker.engine.authority.put(identities(**bounds))
    return broker


def ask(broker: HeldEngine, request: Any, caller: Caller, body: Buffer = b"") -> Reply:
    ((reply, _),) = broker.submit(request, body, gate=OpenGate(caller))
    return reply


def refused(reply: Reply, bound: str) -> int:
    """Milliseconds to wait, of a refusal by this bound."""
    assert isinstance(reply, Refusal), reply
    assert (reply.code, reply.outcome, reply.details["quota"]) == ("overloaded", "none", bound)
    return int(reply.details["retry_after_ms"])


def publish(broker: HeldEngine, caller: Caller, nbytes: int = 100, topic: str = "t") -> Reply:
    columns, data = arrow.encode([bytes(nbytes)], ids=bytes(16), timestamps=1, dedup_ids=None)
    return ask(broker, Publish(topic, 0, columns, crc32c(data)), caller, data)


# -- requests and bytes


def test_requests_per_second_are_refused_with_the_time_to_wait() -> None:
    broker = engine(user_anna={"requests_per_second": 4})
    for _ in range(4):
        assert isinstance(ask(broker, ListTopics(), ANNA), object)
    assert refused(ask(broker, ListTopics(), ANNA), "requests_per_second") == 250
    broker.pass_s(0.249)
    assert refused(ask(broker, ListTopics(), ANNA), "requests_per_second") == 1
    broker.pass_s(0.001)
    assert not isinstance(ask(broker, ListTopics(), ANNA), Refusal)
    assert not isinstance(ask(broker, ListTopics(), CARL), Refusal), "others are not concerned"
    assert not isinstance(ask(broker, ListTopics(), OWNER), Refusal)


def test_a_refusal_is_counted_and_says_who_and_what() -> None:
    broker = engine(user_anna={"requests_per_second": 1})
    ask(broker, ListTopics(), ANNA)
    reply = ask(broker, ListTopics(), ANNA)
    assert isinstance(reply, Refusal)
    assert reply.message == "user 'anna' is at its quota of 1 requests per second: come back in 1000 ms"
    assert b'tailrace_refusals_total{code="overloaded"} 1.0' in broker.engine.metrics.render()


def test_all_accounts_are_charged_or_none() -> None:
    broker = engine(tenant_acme={"requests_per_second": 3}, **{"user_acme/bob": {"requests_per_second": 1}})
    assert not isinstance(ask(broker, ListTopics(), BOB), Refusal)
    for _ in range(5):
        refused(ask(broker, ListTopics(), BOB), "requests_per_second")
    for _ in range(2):
        assert not isinstance(ask(broker, ListTopics(), EVE), Refusal), "what Bob was refused is left"
    refused(ask(broker, ListTopics(), EVE), "requests_per_second")


def test_an_address_is_bound_also_while_there_are_no_users() -> None:
    broker = engine(**{"address_*": {"requests_per_second": 1}})
    broker.engine.authority.put(
        Identities(quotas={"address:*": Quota(subject="address:*", requests_per_second=1)})
    )
    assert not isinstance(ask(broker, ListTopics(), OPEN), Refusal)
    refused(ask(broker, ListTopics(), OPEN), "requests_per_second")
    other = Caller("", "open", "", "10.0.0.8")
    assert not isinstance(ask(broker, ListTopics(), other), Refusal)


def test_bytes_of_requests_are_refused_and_those_of_answers_are_owed() -> None:
    broker = engine(user_anna={"bytes_per_second": 10_000})
    assert isinstance(publish(broker, ANNA, 6_000), Published)
    wait_ms = refused(publish(broker, ANNA, 6_000), "bytes_per_second")
    assert 200 < wait_ms < 400, "body, and some for the header and the columns"
    assert not isinstance(ask(broker, ListTopics(), ANNA), Refusal), "there is enough for a small request"
    broker.pass_s(5)
    assert not isinstance(ask(broker, Fetch("t", [(0, 0)]), ANNA), Refusal)
    assert not isinstance(ask(broker, Fetch("t", [(0, 0)]), ANNA), Refusal)
    assert 200 < refused(ask(broker, Fetch("t", [(0, 0)]), ANNA), "bytes_per_second") < 400


def test_a_batch_above_the_burst_goes_when_nothing_was_used_and_leaves_a_debt() -> None:
    broker = engine(user_anna={"bytes_per_second": 1_000})
    assert isinstance(publish(broker, ANNA, 5_000), Published)
    assert 4_000 < refused(ask(broker, ListTopics(), ANNA), "bytes_per_second") < 5_000


def test_settlements_and_signs_of_life_are_refused_only_when_much_is_owed() -> None:
    broker = engine(user_anna={"requests_per_second": 2})
    for _ in range(2):
        ask(broker, ListTopics(), ANNA)
    refused(ask(broker, ListTopics(), ANNA), "requests_per_second")
    for _ in range(10):
        assert ask(broker, Ping(), ANNA) == Pong()
    heartbeat = Heartbeat("g", "m", 1)
    beaten = ask(broker, heartbeat, ANNA)
    assert isinstance(beaten, Refusal)
    assert beaten.code != "overloaded", "it is unknown, not refused"
    assert refused(ask(broker, Ping(), ANNA), "requests_per_second") == 500
    broker.pass_s(0.5)
    assert ask(broker, Ping(), ANNA) == Pong()


def test_a_new_quota_holds_at_once_and_keeps_what_was_used() -> None:
    broker = engine(user_anna={"requests_per_second": 100})
    for _ in range(100):
        ask(broker, ListTopics(), ANNA)
    broker.engine.authority.put(identities(user_anna={"requests_per_second": 10}))
    assert refused(ask(broker, ListTopics(), ANNA), "requests_per_second") == 100
    broker.engine.authority.put(identities())
    assert not broker.engine.quotas.active
    assert not isinstance(ask(broker, ListTopics(), ANNA), Refusal)


# -- messages in flight


def test_messages_in_flight_are_bound_over_the_groups_of_a_user() -> None:
    broker = engine(user_anna={"in_flight_max": 3})
    broker.enlist("g")
    broker.enlist("h", member="n")
    broker.send(*[b"%d" % number for number in range(10)])
    gate = OpenGate(ANNA)
    first = got(broker.begin_lease(count_max=2, gate=gate))
    second = got(broker.begin_lease(group="h", member="n", count_max=9, gate=gate))
    assert (len(first), len(second)) == (2, 1)
    waiting = broker.begin_lease(count_max=9, wait_ms=10_000, gate=gate)
    other = broker.begin_lease(group="h", member="n", count_max=9, wait_ms=10_000, gate=gate)
    broker.pass_s(1)
    assert waiting == other == []
    broker.ack(first[0])
    broker.settle()
    assert [message.value for message in got(waiting)] == [b"2"], "a member is woken by its own ack"
    broker.ack(second[0], group="h")
    broker.settle()
    assert [message.value for message in got(other)] == [b"1"]
    third = broker.begin_lease(group="h", member="n", count_max=9, wait_ms=10_000, gate=gate)
    broker.ack(*first[1:], *got(waiting))
    broker.settle()
    assert third == [], "nobody tells it what is settled in another group"
    broker.pass_s(0.1)
    assert len(got(third)) == 2


def test_a_lease_that_waits_for_the_quota_ends_in_its_time() -> None:
    broker = engine(user_anna={"in_flight_max": 1})
    broker.enlist()
    broker.send(b"a", b"b")
    gate = OpenGate(ANNA)
    assert len(got(broker.begin_lease(count_max=5, gate=gate))) == 1
    assert broker.lease(count_max=5, gate=gate) == []
    waiting = broker.begin_lease(count_max=5, wait_ms=1_000, gate=gate)
    broker.pass_s(1)
    assert got(waiting) == []
    assert not broker.engine.leasing.book.jobs
    assert len(got(broker.begin_lease(count_max=5))) == 1, "the owner of the broker is not bound"


# -- topics


def make(broker: HeldEngine, name: str, caller: Caller, **fields: Any) -> Reply:
    return ask(broker, CreateTopic(name, {"partitions": 1}, **fields), caller)


def test_topics_count_for_who_made_them() -> None:
    broker = engine(user_anna={"topics_max": 2})
    for name in ("a", "b"):
        assert isinstance(make(broker, name, ANNA), TopicInfo)
    assert refused(make(broker, "c", ANNA), "topics_max") == 60_000
    assert isinstance(make(broker, "a", ANNA, if_missing=True), TopicInfo), "it is there"
    assert isinstance(make(broker, "c", CARL), TopicInfo)
    assert isinstance(ask(broker, DeleteTopic("a"), ANNA), TopicInfo)
    assert isinstance(make(broker, "d", ANNA), TopicInfo)
    assert broker.engine.topics.catalog.topics["d"].owner == "anna"
    assert broker.engine.topics.catalog.topics["t"].owner == ""


def test_topics_of_a_tenant_count_by_their_names_whoever_makes_them() -> None:
    broker = engine(tenant_acme={"topics_max": 2})
    assert isinstance(make(broker, "acme/a", BOB), TopicInfo)
    assert isinstance(make(broker, "acme/b", EVE), TopicInfo)
    refused(make(broker, "acme/c", BOB), "topics_max")
    refused(make(broker, "acme/c", OWNER), "topics_max")
    broker.engine.router.change(CreateTopic("acme/a.dlq"), lambda reply, parts: None)
    broker.settle()
    assert "acme/a.dlq" in broker.engine.topics.catalog.topics, "those of the broker are made"


def test_many_topics_at_once_do_not_pass_the_bound_together() -> None:
    broker = engine(user_anna={"topics_max": 3})
    broker.threads.holding = True
    answers = [
        broker.submit(CreateTopic(f"n{number}", {"partitions": 1}), gate=OpenGate(ANNA))
        for number in range(8)
    ]
    broker.threads.holding = False
    while broker.threads.held:
        broker.threads.run_held()
        broker.settle()
    made = [isinstance(reply, TopicInfo) for ((reply, _),) in answers]
    assert made == [True] * 3 + [False] * 5


def test_the_owner_of_a_topic_survives_a_restart() -> None:
    coordinator = MemoryCoordinator()
    broker = HeldEngine(MemoryStore(), coordinator)
    broker.engine.authority.put(identities())
    make(broker, "a", ANNA)
    broker.restart()
    assert broker.engine.topics.catalog.topics["a"].owner == "anna"


# -- storage


def test_a_topic_takes_no_messages_while_its_owner_stores_too_much() -> None:
    broker = engine(user_anna={"storage_bytes_max": 5_000})
    make(broker, "mine", ANNA)
    make(broker, "other", ANNA)
    assert isinstance(publish(broker, CARL, 6_000, "mine"), Published)
    assert isinstance(publish(broker, CARL, 100, "mine"), Published), "it is measured every two seconds"
    broker.pass_s(2)
    for caller in (ANNA, CARL, OWNER):
        for topic in ("mine", "other"):
            reply = publish(broker, caller, 100, topic)
            assert refused(reply, "storage_bytes_max") == 5_000
            assert isinstance(reply, Refusal)
            assert reply.message.startswith(
                f"topic '{topic}' takes no messages: its owner is at the quota of"
            )
    assert isinstance(publish(broker, ANNA, 100, "t"), Published), "that is not her topic"
    assert isinstance(ask(broker, DeleteTopic("mine"), ANNA), TopicInfo)
    broker.pass_s(2)
    assert isinstance(publish(broker, ANNA, 100, "other"), Published)


def test_storage_of_a_tenant_counts_by_the_names_of_topics() -> None:
    broker = engine(tenant_acme={"storage_bytes_max": 5_000})
    make(broker, "acme/a", OWNER)
    make(broker, "acme/b", BOB)
    publish(broker, OWNER, 3_000, "acme/a")
    publish(broker, BOB, 3_000, "acme/b")
    broker.pass_s(2)
    refused(publish(broker, EVE, 1, "acme/b"), "storage_bytes_max")
    refused(publish(broker, OWNER, 1, "acme/a"), "storage_bytes_max")
    assert isinstance(publish(broker, OWNER, 1, "t"), Published)


# -- connections


def test_connections_are_counted_per_user_tenant_and_address_with_or_without_a_quota() -> None:
    quotas = Quotas(ManualClock(), tuple, lambda group, member: 0)
    assert quotas.admitted(BOB) is None
    quotas.put(identities(tenant_acme={"connections_max": 2}, **{"address_10.0.0.1": {"connections_max": 0}}))
    assert quotas.admitted(EVE) is None
    refusal = quotas.admitted(EVE)
    assert refusal is not None
    assert refused(refusal, "connections_max") == 1_000
    assert refused(quotas.admitted(ANNA) or Refusal("", "", "none", {}), "connections_max") == 1_000
    quotas.left(BOB)
    assert quotas.admitted(EVE) is None
    for _ in range(2):
        quotas.left(EVE)
    quotas.left(EVE)  # One too many does not count.
    assert quotas.admitted(BOB) is None
    assert quotas.admitted(OPEN) is None
    quotas.left(OPEN)


# -- memory


def test_accounts_of_invented_addresses_make_room_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACCOUNTS_MAX", 8)
    monkeypatch.setattr(module, "CALLERS_MAX", 8)
    broker = engine(user_anna={"requests_per_second": 1}, **{"address_*": {"requests_per_second": 1}})
    ask(broker, ListTopics(), ANNA)
    for number in range(100):
        reply = ask(broker, ListTopics(), Caller("", "open", "", f"10.1.0.{number}"))
        assert isinstance(reply, Refusal)
        assert reply.code == "unauthenticated"
    refused(ask(broker, ListTopics(), ANNA), "requests_per_second")
    broker.pass_s(2)
    assert not isinstance(ask(broker, ListTopics(), ANNA), Refusal)


@pytest.mark.parametrize("bounds", [{}, {"user_anna": {"requests_per_second": 1}}])
def test_only_an_active_quota_looks_at_callers(bounds: dict[str, dict[str, int]]) -> None:
    broker = engine(**bounds)
    assert broker.engine.quotas.active == bool(bounds)
