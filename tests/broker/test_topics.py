"""Topics of a node: changes happen wholly or not at all, deleted data goes, and those who wait are told.

Also covers `broker/topic_host.py`.
"""

from typing import Any

import pytest

from tailrace.cluster.embedded import MemoryCoordinator
from tailrace.core.catalog.catalog import Catalog
from tailrace.core.model.commands import (
    AlterTopic,
    CreateTopic,
    DeleteTopic,
    DescribeTopic,
    Fetch,
    FindOffsets,
    ListTopics,
    Publish,
    Published,
    TopicInfo,
    TopicList,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Full, StorageFault
from tailrace.ports import Damaged
from tailrace.storage.memory_log import MemoryLog, MemoryStore
from tests.broker.held_engine import HeldEngine


class Coordinator(MemoryCoordinator):
    """Fails when told."""

    broken = False
    saves = 0

    def save(self, catalog: Catalog) -> None:
        self.saves += 1
        if self.broken:
            raise StorageFault("the catalog could not be stored", outcome="none")
        super().save(catalog)


class Store(MemoryStore):
    """Fails when told: to open that log, or to remove it."""

    broken = ""

    def log(self, name: str, damaged: Damaged) -> MemoryLog:
        if name.endswith(self.broken or "!"):
            raise StorageFault(f"{name} cannot be opened")
        return super().log(name, damaged)

    def remove(self, name: str) -> None:
        if name.endswith(self.broken or "!"):
            raise StorageFault(f"{name} cannot be removed")
        super().remove(name)


def make() -> tuple[HeldEngine, Store, Coordinator]:
    store, coordinator = Store(), Coordinator()
    return HeldEngine(store, coordinator), store, coordinator


def names(broker: HeldEngine, **filters: Any) -> list[str]:
    reply = broker.ask(ListTopics(**filters))
    assert isinstance(reply, TopicList)
    return [topic.name for topic in reply.topics]


def test_create_list_describe() -> None:
    broker, _, _ = make()
    assert broker.create("b", partitions=2).created
    broker.create("a")
    assert names(broker) == ["a", "b"]
    assert names(broker, prefix="b") == ["b"]
    broker.publish(b"1", b"2", topic="b", partition=1)
    info = broker.ask(DescribeTopic("b"))
    ends = [
        (row["partition"], row["start_offset"], row["end_offset"], row["fault"]) for row in info.partitions
    ]
    assert ends == [(0, 0, 0, None), (1, 0, 2, None)]
    again = broker.ask(CreateTopic("a", {}, if_missing=True))
    assert isinstance(again, TopicInfo)
    assert not again.created
    assert broker.ask(CreateTopic("a")).code == "already_exists"
    assert broker.ask(DescribeTopic("c")).code == "not_found"
    assert broker.ask(CreateTopic("d", {"partitons": 3})).code == "invalid_request"


def test_topics_survive_a_restart() -> None:
    broker, _, _ = make()
    broker.create("t", partitions=2)
    broker.publish(b"1", partition=1)
    broker.restart()
    assert names(broker) == ["t"]
    assert broker.values(partition=1) == [b"1"]


def test_partitions_are_added_while_producers_send() -> None:
    broker, _, _ = make()
    broker.create("t")
    broker.threads.holding = True
    altered = broker.submit(AlterTopic("t", {"partitions": 3, "message_bytes_max": 5}))
    early = broker.publish(b"1")
    refused = broker.publish(b"2", partition=2)
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert isinstance(altered[0][0], TopicInfo)
    assert isinstance(early[0][0], Published)
    assert isinstance(refused[0][0], Refusal)
    assert isinstance(broker.publish(b"2", partition=2)[0][0], Published)
    too_large = broker.publish(b"123456")[0][0]
    assert isinstance(too_large, Refusal)
    assert too_large.code == "too_large"
    assert broker.ask(AlterTopic("t", {"partitions": 1})).code == "invalid_request"


@pytest.mark.parametrize("cause", ["catalog", "log"])
def test_a_creation_that_fails_leaves_nothing_and_can_be_repeated(cause: str) -> None:
    broker, store, coordinator = make()
    coordinator.broken, store.broken = cause == "catalog", "/1" if cause == "log" else ""
    reply = broker.ask(CreateTopic("t", {"partitions": 2}))
    assert isinstance(reply, Refusal)
    assert names(broker) == []
    assert list(store.names()) == []
    coordinator.broken, store.broken = False, ""
    broker.create("t", partitions=2)
    assert isinstance(broker.publish(b"1", partition=1)[0][0], Published)
    broker.restart()
    assert broker.values(partition=1) == [b"1"]


def together(broker: HeldEngine, *requests: CreateTopic) -> list[Any]:
    """Requests that come while the first is under way, and their answers."""
    broker.threads.holding = True
    answers = [broker.submit(request) for request in requests]
    assert not any(answers)
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    return [reply for ((reply, _),) in answers]


def test_topics_that_wait_together_are_made_together() -> None:
    broker, _, coordinator = make()
    saves = coordinator.saves
    replies = together(broker, *(CreateTopic(f"t{number}", {"partitions": 2}) for number in range(40)))
    assert [reply.name for reply in replies] == [f"t{number}" for number in range(40)]
    assert len({reply.id for reply in replies}) == 40
    assert coordinator.saves - saves == 2, "one for the first, one for all that waited"
    broker.restart()
    assert len(names(broker)) == 40


def test_the_same_topic_asked_for_twice_at_once_is_made_once() -> None:
    broker, _, _ = make()
    first, other, again, twice = together(
        broker,
        CreateTopic("first"),
        CreateTopic("a"),
        CreateTopic("a", if_missing=True),
        CreateTopic("a"),
    )
    assert (other.created, again.created) == (True, False)
    assert other.id == again.id != first.id
    assert isinstance(twice, Refusal)
    assert twice.code == "already_exists"


def test_one_topic_that_cannot_be_made_does_not_fail_those_that_waited_with_it() -> None:
    broker, store, _ = make()
    store.broken = "/4"
    sizes = {"first": 1, "a": 1, "large": 5, "c": 1}
    replies = together(broker, *(CreateTopic(name, {"partitions": count}) for name, count in sizes.items()))
    assert [type(reply) for reply in replies] == [TopicInfo, TopicInfo, Refusal, TopicInfo]
    assert names(broker) == ["a", "c", "first"]
    store.broken = ""
    assert isinstance(broker.ask(CreateTopic("large", {"partitions": 5})), TopicInfo)
    ids = [host.info.id for host in broker.engine.topics.hosts()]
    assert len(set(ids)) == len(ids)


def test_partitions_that_cannot_be_added_leave_the_others_alone() -> None:
    broker, _, coordinator = make()
    broker.create("t")
    broker.publish(b"1")
    coordinator.broken = True
    assert isinstance(broker.ask(AlterTopic("t", {"partitions": 2})), Refusal)
    assert isinstance(broker.ask(DeleteTopic("t")), Refusal)
    coordinator.broken = False
    assert broker.values() == [b"1"]
    assert isinstance(broker.ask(AlterTopic("t", {"partitions": 2})), TopicInfo)


def test_a_deleted_topic_is_gone_with_its_data_and_its_entry() -> None:
    broker, store, coordinator = make()
    broker.create("t")
    broker.create("other")
    broker.publish(b"1")
    assert isinstance(broker.ask(DeleteTopic("t")), TopicInfo)
    assert names(broker) == ["other"]
    assert [name.split("~")[0] for name in store.names()] == ["other"]
    assert coordinator.load().removing == ()
    assert broker.engine.topics.catalog.removing == ()
    broker.create("t")
    assert broker.values() == []
    assert broker.publish(b"2")[0][0] == Published(0, broker.clock.now_us())


def test_two_deletions_at_once_remove_each_only_its_own() -> None:
    broker, store, coordinator = make()
    broker.create("a")
    broker.create("b")
    broker.threads.holding = True
    first, second = broker.submit(DeleteTopic("a")), broker.submit(DeleteTopic("b"))
    while broker.threads.held:
        broker.threads.run_held(1)
        broker.settle()
    assert isinstance(first[0][0], TopicInfo)
    assert isinstance(second[0][0], TopicInfo)
    assert list(store.names()) == []
    assert coordinator.load() == Catalog({}, 3, (), ((1, 3),), 6)


def test_topics_that_are_deleted_together_store_the_catalog_together() -> None:
    broker, store, coordinator = make()
    together(broker, *(CreateTopic(f"t{number}", {"partitions": 2}) for number in range(40)))
    saves = coordinator.saves
    replies = together(broker, *(DeleteTopic(f"t{number}") for number in range(40)), DeleteTopic("t7"))
    assert [type(reply) for reply in replies] == [TopicInfo] * 40 + [Refusal]
    assert coordinator.saves - saves <= 6, "for the first and for the others: gone, and removed"
    assert names(broker) == []
    assert list(store.names()) == []
    assert coordinator.load().removing == ()


def test_one_deletion_that_leaves_data_does_not_keep_that_of_others(caplog: pytest.LogCaptureFixture) -> None:
    broker, store, coordinator = make()
    together(broker, *(CreateTopic(name, {"partitions": 1 + (name == "b")}) for name in "abcd"))
    store.broken = "/1"
    replies = together(broker, *(DeleteTopic(name) for name in "abcd"))
    assert [type(reply) for reply in replies] == [TopicInfo] * 4
    assert [removal.folder.split("~")[0] for removal in coordinator.load().removing] == ["b"]
    assert {name.split("~")[0] for name in store.names()} <= {"b"}
    assert "next start" in caplog.text


def test_a_removal_that_fails_is_finished_at_the_next_start(caplog: pytest.LogCaptureFixture) -> None:
    broker, store, coordinator = make()
    broker.create("t")
    store.broken = "/0"
    assert isinstance(broker.ask(DeleteTopic("t")), TopicInfo)
    assert len(coordinator.load().removing) == 1
    assert "next start" in caplog.text
    broker.restart()  # and fails again, which is no reason not to start
    assert len(coordinator.load().removing) == 1
    store.broken = ""
    broker.restart()
    assert coordinator.load().removing == ()
    assert list(store.names()) == []


def test_a_crash_between_deletion_and_removal_is_repaired() -> None:
    broker, store, coordinator = make()
    broker.create("t")
    broker.publish(b"1")
    broker.threads.holding = True
    broker.submit(DeleteTopic("t"))
    broker.threads.run_held(1)
    broker.settle()
    assert len(coordinator.load().removing) == 1
    broker.restart()
    assert coordinator.load().removing == ()
    assert list(store.names()) == []


def test_those_who_wait_for_a_deleted_topic_are_told() -> None:
    broker, _, _ = make()
    broker.create("t")
    broker.publish(b"1")
    reader = broker.submit(Fetch("t", [(0, 1)], 100, 60_000))
    broker.threads.holding = True
    written = broker.publish(b"2")
    deleted = broker.submit(DeleteTopic("t"))
    broker.threads.run_held(1)  # the append
    broker.settle()
    assert isinstance(written[0][0], Published)
    broker.pass_s(1)
    reader = broker.submit(Fetch("t", [(0, 2)], 100, 60_000))
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    assert isinstance(deleted[0][0], TopicInfo)
    for answers in (reader, broker.publish(b"3"), broker.submit(FindOffsets("t", -1))):
        assert isinstance(answers[0][0], Refusal)
        assert answers[0][0].code == "not_found"


def test_a_topic_is_deleted_while_one_of_its_logs_is_opened_anew() -> None:
    broker, store, coordinator = make()
    broker.create("t")
    broker.publish(b"1")
    log = broker.log()
    broker.threads.holding = True
    log.fail_next(Full("no space is left"))
    refused = broker.publish(b"2")
    broker.threads.run_held()
    broker.settle()
    assert isinstance(refused[0][0], Refusal)
    assert len(broker.threads.held) == 1, "the log is about to be opened anew"
    deleted = broker.submit(DeleteTopic("t"))
    broker.threads.run_held(2)  # both are done before anybody hears of either
    broker.settle()
    while broker.threads.held:
        broker.threads.run_held(1)
        broker.settle()
    assert isinstance(deleted[0][0], TopicInfo)
    assert list(store.names()) == []
    assert coordinator.load().removing == ()


def test_many_changes_that_change_nothing_need_no_depth() -> None:
    broker, _, _ = make()
    broker.threads.holding = True
    answers = [broker.submit(CreateTopic("t", {}, if_missing=True)) for _ in range(3000)]
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    replies: list[Any] = [reply for ((reply, _),) in answers]
    assert [reply.created for reply in replies] == [True] + [False] * 2999


def test_closing_snapshots_and_refuses() -> None:
    broker, _, _ = make()
    broker.create("t")
    broker.publish(b"1", producer_id=5)
    waiting = broker.submit(Fetch("t", [(0, 1)], 100, 60_000))
    closed: list[bool] = []
    broker.engine.close(lambda: closed.append(True))
    broker.settle()
    assert closed == [True]
    assert len(waiting) == 1  # with nothing, instead of an hour later
    assert broker.ask(DescribeTopic("t")).code == "unavailable"
    broker.restart()
    assert broker.publish(b"1", producer_id=5)[0][0] == Published(0, broker.clock.now_us())


def test_closing_lets_the_change_under_way_end_and_begins_no_other() -> None:
    broker, _, coordinator = make()
    for name in "ab":
        broker.create(name)
    broker.threads.holding = True
    requests = [DeleteTopic("a"), CreateTopic("c"), CreateTopic("d"), DeleteTopic("b")]
    answers = [broker.submit(request) for request in requests]
    closed: list[bool] = []
    broker.engine.close(lambda: closed.append(True))
    assert not closed, "a change is under way"
    while broker.threads.held:
        broker.threads.run_held(1)
        broker.settle()
    assert closed == [True]
    assert not broker.threads.held, "nothing is begun when everything is closed"
    broker.threads.close()
    broker.threads.run = refused_work  # type: ignore[method-assign]
    broker.settle()
    assert [type(answer[0][0]) for answer in answers] == [TopicInfo, Refusal, Refusal, Refusal]
    assert [removal.folder.split("~")[0] for removal in coordinator.load().removing] == ["a"]
    broker.restart()
    broker.threads.holding = False
    assert names(broker) == ["b"]
    assert coordinator.load().removing == ()


def refused_work(log: object, work: object, done: object) -> None:
    raise AssertionError("the storage threads are closed")


def test_closing_without_topics_calls_back() -> None:
    closed: list[bool] = []
    broker, _, _ = make()
    broker.engine.close(lambda: closed.append(True))
    assert closed == [True]


def test_bad_requests_are_refused_alone() -> None:
    broker, _, _ = make()
    broker.create("t")
    codes = [
        broker.ask(Fetch("t", [], 100, 0)).code,
        broker.ask(Fetch("t", [(0, 0)], 0, 0)).code,
        broker.ask(Fetch("t", [(1, 0)], 1, 0)).code,
        broker.ask(Fetch("t", [(0, 1)], 1, 0)).code,
        broker.ask(Fetch("t", [(0, -1)], 1, 0)).code,
        broker.ask(FindOffsets("t", -3)).code,
        broker.ask(Publish("t", 0, 0, 1), b"not a batch").code,
        broker.ask(Publish("t", -1, 0, 1), b"not a batch").code,
    ]
    bad, missing = "invalid_request", "not_found"
    assert codes == [bad, bad, missing, missing, missing, bad, bad, missing]
    assert isinstance(broker.publish(b"1")[0][0], Published)
