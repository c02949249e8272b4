"""Partitions with messages: what is stored is not readable before it is committed; which kind holds what.

Also covers `broker/partition/coordinator_partition.py`.
"""

import pytest

from tailrace.broker.partition.coordinator_partition import CoordinatorPartition
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.model.commands import Fetch, Published
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_topic import TOPIC
from tailrace.core.partition import Partition
from tailrace.errors import Denied, StorageFault
from tests.broker.held_engine import values_of
from tests.broker.queue_engine import QueueEngine, got, values


def working() -> QueueEngine:
    broker = QueueEngine()
    broker.create()
    broker.enlist()
    return broker


def test_what_is_stored_and_not_committed_is_neither_answered_nor_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = working()
    runtime, commit = broker.runtime(), broker.runtime().commit
    stored: list[int] = []
    monkeypatch.setattr(runtime, "commit", stored.append)
    first, second = broker.publish(b"a"), broker.publish(b"b")
    fetched = broker.submit(Fetch("t", [(0, 0)], 1 << 20, 1000))
    leased = broker.begin_lease(wait_ms=1000)
    assert (first, second, leased, fetched) == ([], [], [], [])
    assert stored == [runtime.assurance.written.entry - 1, runtime.assurance.written.entry]
    assert (runtime.end_offset, runtime.state.end_offset) == (0, 2)
    commit(stored[0])
    broker.settle()
    assert [type(reply) for reply, _ in first] == [Published]
    assert [values_of(data) for _, data in fetched] == [[b"a"]]
    assert [message.value for message in got(leased)] == [b"a"]
    assert second == []
    commit(stored[1])
    broker.settle()
    assert [type(reply) for reply, _ in second] == [Published]
    assert values(broker.lease()) == [b"b"]


def test_a_failure_refuses_what_was_stored_and_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = working()
    runtime = broker.runtime()
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "commit", lambda entry: None)
        first = broker.publish(b"a")
    assert first == []
    broker.log().fail_next(StorageFault("gone"))
    second = broker.publish(b"b")
    for ((reply, _),) in (first, second):
        assert isinstance(reply, Refusal)
        assert reply.code == "storage_fault"
    assert runtime.end_offset == 0


def test_topics_hold_queues_and_the_internal_topic_holds_coordinators() -> None:
    broker = working()
    topics = broker.engine.topics
    assert [(type(queue), type(queue.state)) for queue in topics.queues()] == [(QueuePartition, Partition)]
    kinds = {(type(home), type(home.state)) for home in topics.coordinators()}
    assert kinds == {(CoordinatorPartition, Coordinator)}
    assert list(topics.runtimes()) == [*topics.queues(), *topics.coordinators()]
    assert [host.info.name for host in topics.hosts()] == ["t", TOPIC]
    assert topics.find(TOPIC) is None
    with pytest.raises(Denied):
        topics.get(TOPIC)
