"""Segments are freed only when what says so is durable: a stored snapshot that has the trim."""

from typing import Any

import pytest

from tailrace.core.model.commands import Done, TrimTopic
from tailrace.errors import Full
from tests.broker.queue_engine import QueueEngine


def trims(broker: QueueEngine) -> list[tuple[int, int]]:
    """What is freed from now on: up to where, and where the newest stored snapshot lets the log begin."""
    log, trim, runtime = broker.log(), broker.log().trim, broker.runtime()
    seen: list[tuple[int, int]] = []

    def noting(offset: int, floor: int | None = None) -> None:
        stored = runtime.machine.restore(runtime.options, log._content.snapshots[0].chunks)
        seen.append((offset, stored.start_offset))
        trim(offset, floor)

    log.trim = noting  # type: ignore[method-assign]
    return seen


def run_all(broker: QueueEngine) -> None:
    """Storage does one piece of work after the other."""
    while broker.threads.held:
        broker.threads.run_held(1)
        broker.settle()


def filled(**options: Any) -> QueueEngine:
    """A broker with four messages, which nobody has yet, and two snapshots."""
    broker = QueueEngine()
    broker.create(**options)
    broker.enlist()
    for number in range(4):
        broker.send(b"%d" % number)
        if number % 2:
            broker.runtime().upkeep.save_snapshot()
            broker.settle()
    return broker


@pytest.mark.parametrize("fails", [False, True], ids=["stored", "failed"])
def test_a_snapshot_under_way_does_not_vouch_for_a_later_trim(fails: bool) -> None:
    """An interval topic answers when the record is written: the snapshot that is under way lacks it."""
    broker = filled(durability="interval", sync_interval_ms=3_600_000)
    broker.send(b"more")
    freed = trims(broker)
    broker.threads.holding = True
    broker.runtime().upkeep.save_snapshot()
    answer: list[Any] = []
    broker.runtime().submit(TrimTopic("t", 0, 3), b"", lambda reply, parts: answer.append(reply))
    broker.settle()
    broker.threads.run_held(1)
    broker.settle()
    broker.runtime().upkeep.free()
    if fails:
        broker.log().fail_next(Full("no space is left"))
    run_all(broker)
    assert answer == [Done()]
    assert freed
    assert all(offset <= said for offset, said in freed), freed
    assert freed[-1] == (3, 3), "and goes as soon as one is stored that has it"


def test_a_trim_that_a_full_disk_took_back_frees_nothing() -> None:
    broker = filled()
    freed = trims(broker)
    broker.threads.holding = True
    trim = broker.submit(TrimTopic("t", 0, 3))
    broker.runtime().upkeep.free()
    broker.log().fail_next(Full("no space is left"))
    run_all(broker)
    assert getattr(trim[0][0], "code", None) == "full"
    assert all(offset <= said for offset, said in freed), freed
    broker.threads.holding = False
    broker.pass_s(2)
    assert broker.values()[0] == b"0"


@pytest.mark.parametrize("options", [{"retention_count": 1}, {"ephemeral": True}], ids=["count", "ephemeral"])
def test_sweeps_free_what_was_trimmed(options: dict[str, Any]) -> None:
    broker = filled(durability="interval", **options)
    freed = trims(broker)
    broker.ack(*broker.lease())
    broker.pass_s(130)
    assert freed
    assert all(offset <= said for offset, said in freed), freed
    assert freed[-1][0] == broker.runtime().start_offset >= 3
