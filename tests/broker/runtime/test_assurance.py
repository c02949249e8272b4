"""Answers that moves between logs rely on leave when they are synced, whatever the topic promises."""

from typing import Any

import msgspec
import pytest

from tailrace.core.model.commands import Done
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import BuryDone
from tailrace.core.model.queue_commands import FindUnsettled, Reopen, SettleOffsets, UnsettledFound
from tailrace.errors import StorageFault
from tests.broker.queue_engine import QueueEngine, values


def interval(**options: Any) -> QueueEngine:
    broker = QueueEngine()
    broker.create(durability="interval", sync_interval_ms=3_600_000, **options)
    broker.enlist(ordering="none")
    broker.send(b"a", b"b")
    return broker


def surely(broker: QueueEngine) -> list[Any]:
    """Say something about the partition as it is; the list gets it when it is synced."""
    told: list[Any] = []
    runtime = broker.runtime()
    runtime.answer(runtime.surely(lambda reply, parts: told.append(reply)), Done())
    broker.settle()
    return told


def test_an_assured_answer_waits_for_the_sync_and_all_share_it() -> None:
    broker = interval()
    broker.threads.holding = True
    syncs = broker.log().stats().syncs
    first, second = surely(broker), surely(broker)
    assert first == second == []
    broker.threads.run_held(1)
    broker.settle()
    assert first == [Done()]
    assert second == [Done()], "what was written when the sync began is synced for all"
    assert broker.log().stats().syncs == syncs + 1
    assert surely(broker) == [Done()], "nothing was written since"


def test_what_is_written_while_a_sync_runs_waits_for_the_next() -> None:
    broker = interval()
    broker.threads.holding = True
    surely(broker)
    broker.send(b"c")
    later = surely(broker)
    broker.threads.run_held(1)
    broker.settle()
    assert later == []
    broker.threads.run_held(1)
    broker.settle()
    assert later == [Done()]


def test_a_sync_that_fails_refuses_whoever_waits_for_it() -> None:
    broker = interval()
    broker.threads.holding = True
    told = surely(broker)
    broker.log().fail_next(StorageFault("fdatasync failed"))
    broker.threads.run_held()
    broker.settle()
    (reply,) = told
    assert isinstance(reply, Refusal)
    assert reply.outcome == "unknown"


def test_memory_topics_promise_nothing_and_sync_nothing() -> None:
    broker = interval()
    runtime = broker.runtime()
    runtime.reconfigure(msgspec.structs.replace(runtime.options, durability="memory"))
    broker.threads.holding = True
    assert surely(broker) == [Done()]


@pytest.mark.parametrize("request_", [Reopen("t", 0, "g", [0, 1]), SettleOffsets("t", 0, "g", [1, 2])])
def test_a_redrive_is_answered_when_it_is_synced(request_: Any) -> None:
    broker = interval()
    broker.ask(SettleOffsets("t", 0, "g", [0, 1]))
    broker.threads.holding = True
    answers = broker.submit(request_)
    assert answers == []
    broker.threads.run_held()
    broker.settle()
    assert answers == [(Done(), b"")]


def test_letters_are_listed_when_they_are_synced() -> None:
    """A letter is sent back by its offset: after a power failure another one could be there."""
    broker = interval()
    broker.threads.holding = True
    answers = broker.submit(FindUnsettled("t", 0, "g"))
    assert answers == []
    broker.threads.run_held()
    broker.settle()
    assert answers == [(UnsettledFound([0, 2]), b"")]


def test_a_message_on_its_way_to_the_dead_letters_cannot_be_redriven_yet() -> None:
    """Its dead letter is readable before the message is settled: were reopening it a success that changes
    nothing, the letter would be taken off the list, and the message then settled: lost."""
    broker = interval()
    (one, _) = broker.lease()
    broker.runtime().processes.end()
    broker.reject(one)
    assert broker.ask(Reopen("t", 0, "g", [0, 1])).code == "unavailable"
    broker.tell(broker.runtime(), BuryDone("g", [0, 1], "t.dlq", [0, 0]))
    assert broker.ask(Reopen("t", 0, "g", [0, 1])) == Done()
    assert values(broker.lease()) == [b"a"]
