"""The scrub: once in a period and when asked, in pieces, bounded, and it goes on after a restart.

Also covers `storage/files/scrub.py`.
"""

from pathlib import Path

import pytest

from tailrace.broker.engine import Engine
from tailrace.broker.upkeep import scrub_runner
from tailrace.core.model.damage_commands import Scrub, ScrubState
from tailrace.core.model.identifiers import Refusal
from tailrace.storage.files.file_store import FileStore
from tests.broker.held_engine import HeldEngine
from tests.storage.frame_maker import TestClock

PERIOD_S = 100
PERIOD_US = PERIOD_S * 1_000_000


class Scrubbed(HeldEngine):
    """A broker on files of small segments, which scrubs every 100 s."""

    period_us = PERIOD_US

    def __init__(self, root: Path) -> None:
        self.root = root
        super().__init__(self.files())

    def files(self) -> FileStore:
        return FileStore(self.root, TestClock(), segment_bytes=4096)

    def _start(self) -> Engine:
        return self.open_engine({"file": self.store}, scrub_period_us=self.period_us)

    def again(self) -> None:
        """End the process in an orderly way, and start another."""
        self.engine.drain()
        self.settle()
        self.store.close()
        self.threads.held.clear()
        self.store = self.files()
        self.engine = self._start()

    def state(self) -> ScrubState:
        reply = self.ask(Scrub(begin=False))
        assert isinstance(reply, ScrubState)
        return reply


@pytest.fixture
def broker(tmp_path: Path) -> Scrubbed:
    broker = Scrubbed(tmp_path)
    broker.create(partitions=2, ring_buffer_bytes=0)
    for number in range(40):
        broker.publish(b"%d" % number * 200, partition=number % 2)
    return broker


def flip(broker: Scrubbed, segment: int, position: int = 600) -> None:
    folder = broker.root / broker.runtime().name
    path = sorted(folder.glob("*.log"))[segment]
    raw = bytearray(path.read_bytes())
    raw[position] ^= 8
    path.write_bytes(raw)


def test_it_runs_once_in_a_period_and_finds_what_nobody_reads(broker: Scrubbed) -> None:
    flip(broker, 1)
    assert broker.engine.faults() == []
    broker.pass_s(PERIOD_S - 10)
    assert broker.state().total == 0
    broker.pass_s(15)
    first = broker.state()
    assert not first.running
    assert first.done == first.total == len(list(broker.engine.topics.runtimes()))
    assert first.bytes > 8_000
    assert len(first.damage) == 1
    assert broker.engine.faults()[0].startswith("t/0: ")
    text = broker.engine.metrics.render()
    assert b"tailrace_scrub_damage_total 1.0" in text
    assert b'tailrace_partition_quarantined{partition="0",topic="t"} 1.0' in text
    broker.pass_s(PERIOD_S - 20)
    assert broker.state() == first
    broker.pass_s(20)
    assert broker.state().begun_us == first.begun_us + PERIOD_US


def test_it_goes_on_after_a_restart(broker: Scrubbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub_runner, "STEP_BYTES", 5000)
    monkeypatch.setattr(scrub_runner, "NOTE_BYTES", 1)
    monkeypatch.setattr(scrub_runner, "PERIODIC_BYTES_PER_S", 100)
    broker.pass_s(PERIOD_S + 30)
    before = broker.state()
    assert before.running
    assert 0 < before.bytes < 10_000
    broker.period_us = 1000 * PERIOD_US
    broker.again()
    after = broker.state()
    assert after.running
    assert after.begun_us == before.begun_us
    broker.pass_s(6 * PERIOD_S)
    ended = broker.state()
    assert not ended.running
    assert not ended.damage
    total = sum(path.stat().st_size for path in broker.root.rglob("*.log"))
    assert ended.bytes < total
    broker.again()
    assert b"tailrace_scrub_last_timestamp_seconds 0.0" not in broker.engine.metrics.render()


def test_a_clock_that_was_put_back_does_not_put_it_off(broker: Scrubbed) -> None:
    broker.pass_s(PERIOD_S + 5)
    assert broker.state().total
    broker.clock.skew_us = -1000 * PERIOD_US
    broker.clock.start_again()
    broker.again()
    assert broker.state().total == 0
    broker.pass_s(PERIOD_S + 5)
    assert broker.state().total


def test_it_is_bounded(broker: Scrubbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub_runner, "STEP_BYTES", 5000)
    monkeypatch.setattr(scrub_runner, "ASKED_BYTES_PER_S", 2000)
    broker.ask(Scrub("t", 0))
    last = 0
    for _ in range(30):
        broker.pass_s(1)
        now = broker.state().bytes
        assert now - last <= 6_000
        last = now
    assert not broker.state().running


def test_one_partition_when_asked(broker: Scrubbed) -> None:
    flip(broker, 0)
    broker.ask(Scrub("t", 1))
    broker.pass_s(5)
    assert broker.state().damage == []
    broker.ask(Scrub("t"))
    broker.pass_s(5)
    (found,) = broker.state().damage
    assert found.startswith("t/0: ")
    broker.ask(Scrub("t", 0))
    broker.pass_s(5)
    assert len(broker.state().damage) == 1
    for wrong in (Scrub("nothing"), Scrub("t", 7)):
        reply = broker.ask(wrong)
        assert isinstance(reply, Refusal)
        assert reply.code == "not_found"


def test_a_damaged_snapshot_is_told_and_stops_nothing(broker: Scrubbed) -> None:
    broker.runtime().upkeep.save_snapshot()
    broker.settle()
    (path,) = (broker.root / broker.runtime().name).glob("*.snap")
    raw = bytearray(path.read_bytes())
    raw[-20] ^= 1
    path.write_bytes(raw)
    broker.ask(Scrub("t", 0))
    broker.pass_s(5)
    (found,) = broker.state().damage
    assert "the checksum of the snapshot is wrong" in found
    assert broker.engine.faults() == []


def test_whoever_asks_is_told_of_what_was_asked_for(
    broker: Scrubbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(broker, 0)
    monkeypatch.setattr(scrub_runner, "ASKED_BYTES_PER_S", 2000)
    monkeypatch.setattr(scrub_runner, "PERIODIC_BYTES_PER_S", 500)
    broker.pass_s(PERIOD_S + 1)
    assert broker.state().running
    broker.ask(Scrub("t", 0))
    broker.ask(Scrub("t", 1))
    first = broker.ask(Scrub("t", 0, begin=False))
    assert isinstance(first, ScrubState)
    assert (first.running, first.total) == (True, 1)
    broker.pass_s(30)
    well, ill = broker.ask(Scrub("t", 1, begin=False)), broker.ask(Scrub("t", 0, begin=False))
    assert isinstance(well, ScrubState)
    assert isinstance(ill, ScrubState)
    assert (well.running, well.done, well.damage) == (False, 1, [])
    assert well.bytes > 0
    assert not ill.running
    assert len(ill.damage) == 1
    assert broker.state().running, "the one that nobody asked for is slower, and not held up for ever"
    broker.ask(Scrub())
    begun = broker.state()
    broker.pass_s(60)
    asked = broker.state()
    assert (asked.running, asked.begun_us, asked.done) == (False, begun.begun_us, begun.total)
    never = broker.ask(Scrub("t", begin=False))
    assert never == ScrubState(False, 0, 0, 0)


def test_what_was_asked_for_is_kept_within_bounds(broker: Scrubbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub_runner, "ENDED_MAX", 2)
    for request in (Scrub("t", 0), Scrub("t", 1), Scrub("t"), Scrub("t", 1)):
        broker.ask(request)
        broker.pass_s(5)
    states = [broker.ask(Scrub("t", number, begin=False)) for number in (None, 0, 1)]
    assert [state.total for state in states if isinstance(state, ScrubState)] == [2, 0, 1]
