"""A full disk as the node sees it, in virtual time: what is refused, what goes on, and when it is over.

`tests/e2e/test_full_disk.py` has the same with real file systems."""

import logging
from typing import Any

import pytest

from tailrace.broker.engine import Engine
from tailrace.core.model.commands import DescribeTopic, Done, Published, TrimTopic
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import Sweep
from tailrace.core.model.queue_commands import Settled
from tailrace.errors import Full
from tailrace.ports import Room
from tests.broker.queue_engine import QueueEngine

MIB = 1 << 20
RESERVE = 8 * MIB
TOTAL = 1000 * MIB


class Gauge:
    """Room as the test wants it."""

    def __init__(self) -> None:
        self.free = 500 * MIB
        self.can_hold = True
        self.released = 0

    def measure(self) -> Room:
        return Room(self.free, TOTAL, RESERVE)

    def hold(self) -> bool:
        return self.can_hold

    def release(self) -> None:
        self.released += 1


class WatchedEngine(QueueEngine):
    """A broker that watches its room."""

    def __init__(self, *, low: int = 50 * MIB, can_hold: bool = True) -> None:
        self.gauge = Gauge()
        self.gauge.can_hold = can_hold
        self._low = low
        super().__init__()

    def _start(self) -> Engine:
        return self.open_engine({"file": self.store}, gauge=self.gauge, free_bytes_low=self._low)

    def fill(self) -> Refusal:
        """Let a write find no space; the answer to it."""
        self.gauge.free = 0
        self.log().fail_next(Full("no space is left"))
        return refusal(self.publish(b"one too many"))


def refusal(answers: Any) -> Refusal:
    ((reply, _),) = answers
    assert isinstance(reply, Refusal), reply
    return reply


@pytest.fixture
def broker() -> WatchedEngine:
    broker = WatchedEngine()
    broker.create()
    broker.enlist()
    broker.send(b"a", b"b", b"c")
    return broker


def test_messages_are_refused_before_they_reach_a_log_and_the_rest_goes_on(broker: WatchedEngine) -> None:
    assert (broker.fill().code, broker.gauge.released) == ("full", 1)
    broker.pass_s(2)
    failures = broker.runtime().assurance.failures
    for _ in range(3):
        told = refusal(broker.publish(b"more"))
        assert (told.code, told.outcome, told.details) == ("full", "none", {"retry_after_ms": 1000})
        assert "no space is left on the disk of the data folder (0 MiB free of 1,000)" in told.message
        assert "trim or delete topics" in told.message
    assert broker.runtime().assurance.failures == failures, "the partition is not even asked"
    message, *_ = broker.lease()
    assert broker.ack(message) == Settled()
    assert broker.ask(TrimTopic("t", 0, 1)) == Done()
    (fault,) = broker.engine.faults()
    assert fault in told.message
    (row,) = broker.ask(DescribeTopic("t")).partitions
    assert row["fault"] == fault


def test_it_is_over_when_there_is_room_and_the_reserve_is_held_again(
    broker: WatchedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tailrace.storage")
    broker.fill()
    broker.pass_s(10)
    broker.gauge.free = 2 * RESERVE  # On the brink: it would be full again at once.
    broker.pass_s(10)
    assert broker.engine.pump.full
    broker.gauge.free, broker.gauge.can_hold = 3 * RESERVE, False  # A quota says no.
    broker.pass_s(10)
    assert broker.engine.pump.full
    broker.gauge.can_hold = True
    broker.pass_s(2)
    assert not broker.engine.pump.full
    assert broker.engine.faults() == []
    ((reply, _),) = broker.publish(b"d")
    assert isinstance(reply, Published)
    assert broker.values() == [b"a", b"b", b"c", b"d"]
    begun = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [("no space is left" in record.getMessage()) for record in begun] == [True]
    assert sum("there is space again" in text for text in caplog.messages) == 1


def test_a_burst_of_failures_gives_away_one_part_of_the_reserve_a_second(broker: WatchedEngine) -> None:
    broker.fill()
    for _ in range(5):
        broker.engine.pump.filled()
    broker.settle()
    assert broker.gauge.released == 1
    broker.pass_s(1.5)
    broker.engine.pump.filled()
    broker.settle()
    assert broker.gauge.released == 2


def test_a_start_without_room_for_the_reserve_is_full() -> None:
    broker = WatchedEngine(can_hold=False)
    broker.gauge.free = 0
    assert len(broker.engine.faults()) == 1
    broker.pass_s(30)
    assert broker.engine.pump.full
    broker.gauge.free, broker.gauge.can_hold = 500 * MIB, True
    broker.pass_s(5)
    broker.create()
    broker.send(b"a")


def test_low_space_is_a_warning_with_a_margin(
    broker: WatchedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tailrace.storage")
    assert broker.engine.space.warnings() == []
    for free in (49, 51, 49, 51):
        broker.gauge.free = free * MIB
        broker.pass_s(2)
        (warning,) = broker.engine.space.warnings()
        assert "MiB free of 1,000" in warning
        assert broker.engine.faults() == []
        assert b"tailrace_storage_low 1.0" in broker.engine.metrics.render()
    broker.send(b"goes on")
    broker.gauge.free = 60 * MIB
    broker.pass_s(2)
    assert broker.engine.space.warnings() == []
    assert len(caplog.messages) == 2, "once when it began, once when it was over"


def test_a_small_disk_warns_late(broker: WatchedEngine) -> None:
    small = WatchedEngine(low=5000 * MIB)
    small.gauge.free = 101 * MIB
    small.pass_s(2)
    assert small.engine.space.warnings() == []
    small.gauge.free = 99 * MIB
    small.pass_s(2)
    assert small.engine.space.warnings()


def test_figures(broker: WatchedEngine) -> None:
    broker.pass_s(2)
    page = broker.engine.metrics.render().decode()
    assert "tailrace_storage_full 0.0" in page
    assert "tailrace_storage_free_bytes 5.24288e+08" in page
    broker.fill()
    assert "tailrace_storage_full 1.0" in broker.engine.metrics.render().decode()


def test_what_was_trimmed_goes_although_nothing_more_is_written(broker: WatchedEngine) -> None:
    """Segments go when two snapshots are of later entries: the second one needs a later entry."""
    broker.fill()
    broker.pass_s(1)
    trimmed: list[int] = []
    log = broker.log()
    assert broker.ask(TrimTopic("t", 0, 3)) == Done()
    trim = log.trim

    def noting(offset: int, floor: int | None = None) -> None:
        trimmed.append(len(log._content.snapshots))
        trim(offset, floor)

    log.trim = noting  # type: ignore[method-assign]
    stats = log.stats()
    log.stats = lambda: type(stats)(**{**stats_of(stats), "segments": 2, "start_offset": 0})  # type: ignore[method-assign]
    broker.pass_s(20)
    assert 2 in trimmed
    assert len(trimmed) <= 6, "it is not tried for ever"


def stats_of(stats: Any) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in stats.__struct_fields__}


def test_the_beginning_can_be_recorded_again(broker: WatchedEngine) -> None:
    assert broker.ask(TrimTopic("t", 0, 2)) == Done()
    entry = broker.runtime().entry
    broker.tell(broker.runtime(), Sweep(0))
    assert broker.runtime().entry == entry
    broker.tell(broker.runtime(), Sweep(0, again=True))
    assert broker.runtime().entry == entry + 1
    assert broker.runtime().start_offset == 2
    broker.restart()
    assert broker.runtime().start_offset == 2
