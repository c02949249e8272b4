"""The router of one node finds partitions by name, and refuses those that are not there."""

from typing import Any

import pytest

from tailrace.core.model.commands import CreateTopic, DeleteTopic, Done, TopicInfo
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.model.internal_commands import Look
from tests.broker.queue_engine import QueueEngine


def submit(broker: QueueEngine, target: TopicPartition, topic_id: int = 0, *, sure: bool = False) -> Any:
    answers: list[Any] = []
    broker.engine.router.submit(
        target, topic_id, Look(), b"", lambda reply, parts: answers.append(reply), sure=sure
    )
    broker.settle()
    return answers


@pytest.mark.parametrize(
    ("target", "topic_id", "found"),
    [
        (TopicPartition("t", 0), 0, True),
        (TopicPartition("t", 0), 1, True),
        (TopicPartition("t", 0), 2, False),
        (TopicPartition("t", 1), 0, False),
        (TopicPartition("nowhere", 0), 0, False),
    ],
)
def test_by_name_and_id(target: TopicPartition, topic_id: int, found: bool) -> None:
    broker = QueueEngine()
    broker.create()
    (reply,) = submit(broker, target, topic_id)
    if found:
        assert reply == Done()
    else:
        assert reply == Refusal("not_found", f"there is no partition {target}")


def test_a_sure_answer_waits_for_the_sync() -> None:
    broker = QueueEngine()
    broker.create(durability="interval")
    broker.publish(b"a")
    broker.threads.holding = True
    assert submit(broker, TopicPartition("t", 0)) == [Done()]
    answers = submit(broker, TopicPartition("t", 0), sure=True)
    assert answers == []
    broker.threads.run_held()
    broker.settle()
    assert answers == [Done()]


def test_topics_are_changed_internal_ones_too() -> None:
    broker = QueueEngine()
    answers: list[Any] = []
    for request in (CreateTopic("_hidden", {"partitions": 1}), DeleteTopic("_nothing")):
        broker.engine.router.change(request, lambda reply, parts: answers.append(reply))  # type: ignore[arg-type]
        broker.settle()
    assert isinstance(answers[0], TopicInfo)
    assert "_hidden" in broker.engine.router.catalog.topics
    assert answers[1].code == "not_found"
