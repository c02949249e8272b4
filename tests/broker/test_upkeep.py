"""Upkeep: when a partition takes a snapshot of itself, by what was written since the last one."""

from typing import Any

import pytest

from tailrace.broker import upkeep
from tailrace.core.delivery_commands import Ack
from tests.broker.queue_engine import QueueEngine


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> QueueEngine:
    monkeypatch.setattr(upkeep, "SNAPSHOT_FACT_BYTES", 4_000)
    monkeypatch.setattr(upkeep, "SNAPSHOT_DATA_BYTES", 40_000)
    broker = QueueEngine()
    broker.create()
    broker.enlist()
    return broker


def saved(broker: QueueEngine) -> list[int]:
    """Entries of the snapshots that are taken from now on."""
    log, save = broker.log(), broker.log().save_snapshot
    entries: list[int] = []

    def noting(snapshot: Any) -> None:
        entries.append(snapshot.entry)
        save(snapshot)

    log.save_snapshot = noting  # type: ignore[method-assign]
    return entries


def test_facts_alone_lead_to_snapshots_as_often_as_they_are_worth_it(broker: QueueEngine) -> None:
    broker.send(*(b"%d" % number for number in range(100)))
    entries = saved(broker)
    for _ in range(100):
        (message,) = broker.lease(count_max=1)
        broker.ask(Ack("t", 0, "g", [(message.lease, [message.offset, message.offset + 1])]))
    assert 3 < len(entries) < 20
    broker.restart()
    assert broker.lease() == []
    assert broker.shard().state.queues.figures("g")["acked"] == 100


def test_data_alone_does_not_count_as_facts(broker: QueueEngine) -> None:
    entries = saved(broker)
    broker.send(bytes(20_000))
    assert entries == []
    broker.send(bytes(30_000))
    assert len(entries) == 1


def test_a_state_that_cannot_be_stored_does_not_keep_the_broker_from_closing(broker: QueueEngine) -> None:
    broker.send(b"a")

    def broken() -> Any:
        raise TypeError("a number is no number")

    broker.shard().state.freeze = broken  # type: ignore[method-assign]
    for _ in range(2):
        broker.shard().upkeep.save_snapshot()
    closed: list[bool] = []
    broker.engine.close(lambda: closed.append(True))
    broker.settle()
    assert closed == [True]
    assert broker.log().closed


def test_the_pause_of_a_snapshot_is_measured(broker: QueueEngine) -> None:
    broker.send(b"a")
    broker.shard().upkeep.save_snapshot()
    broker.settle()
    text = broker.engine.metrics.render().decode()
    assert "tailrace_snapshot_pause_seconds_count 1.0" in text
