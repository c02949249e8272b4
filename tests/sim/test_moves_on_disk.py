"""Every move between logs on the file engine, with the machine stopped at each step of the disk in turn.

The origin syncs each append, the target does so an hour later: the worst pair there is. Of what was not
synced, a crash leaves any part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tailrace.broker.engine import Engine
from tailrace.broker.runtime.assurance import Assurance
from tailrace.broker.runtime.clock import ManualClock
from tailrace.broker.runtime.maintenance import Maintenance
from tailrace.cluster.embedded import FileCoordinator
from tailrace.core.model.commands import Done, TrimTopic
from tailrace.core.model.group_commands import CreateGroup, GroupInfo, PutSchedule
from tailrace.core.model.queue_commands import FindUnsettled, Reopen, SettleOffsets
from tailrace.sim.sim_disk import Crash, SimDisk
from tailrace.storage.files.file_store import FileStore
from tests.broker.queue_engine import QueueEngine, values
from tests.broker.staged.test_staged_verbs import Writer

SEEDS = 3
LAZY = {"durability": "interval", "sync_interval_ms": 3_600_000}
EAGER = {"durability": "fsync"}
NOW_US = 1_800_000_030_000_000
"""Half past a minute."""


class OnDisk(QueueEngine):
    """A broker that starts at a given time."""

    def __init__(self, disk: SimDisk, now_us: int) -> None:
        self._now_us = now_us
        store = FileStore(disk, ManualClock(), segment_bytes=1 << 16)
        super().__init__(store, FileCoordinator(disk))

    def _start(self) -> Engine:
        self.clock.set_us(self._now_us)
        return super()._start()

    def log_segments(self) -> int:
        """How many files the log of `t` has."""
        return self.runtime().log.stats().segments


class Moving:
    """One data folder on a simulated disk, one broker after the other on it."""

    def __init__(self, seed: int) -> None:
        self.disk = SimDisk(seed)
        self.told: list[Any] = []
        """Answers that a client was given before the machine stopped."""
        self.broker = OnDisk(self.disk, NOW_US)

    def cut(self, step: int | None, act: Callable[[Moving], None]) -> bool:
        """Do something and stop the machine at that step of the disk, or after it; then start again. Whether
        it was done before that step came."""
        self.disk.crash_in = step
        try:
            act(self)
            self.broker.settle()
            done = True
        except Crash:
            done = False
        self.disk.crash()
        self.broker = OnDisk(self.disk, self.broker.clock.now_us() + 1)
        self.broker.settle()
        return done

    def letters(self) -> list[bytes]:
        """The dead letters of `t`."""
        found = self.broker.engine.topics.find("t.dlq")
        return [] if found is None else self.broker.values("t.dlq")

    def alive(self) -> list[bytes]:
        """What the group is given, once old leases are over."""
        self.broker.pass_s(120)
        return values(self.broker.lease())


def with_a_message(world: Moving) -> None:
    world.broker.create("t", **EAGER)
    world.broker.create("t.dlq", **LAZY)
    world.broker.enlist(ordering="none")
    world.broker.send(b"a")


def reject(world: Moving) -> None:
    (message,) = world.broker.lease()
    world.broker.reject(message)


def dead_or_alive(world: Moving, done: bool) -> None:
    alive, letters = world.alive(), world.letters()
    assert len(alive) + len(letters) == 1, (alive, letters)
    assert not (done and alive)


def with_a_letter(world: Moving) -> None:
    """The letter is on the list, and now its topic is the one that syncs."""
    world.broker.create("t", **LAZY)
    world.broker.create("t.dlq", **EAGER)
    world.broker.enlist(ordering="none")
    world.broker.send(b"a")
    reject(world)
    options = {"assignment": "shared", "ordering": "none"}
    assert isinstance(world.broker.ask(CreateGroup("_redrive", ["t.dlq"], options)), GroupInfo)


def redrive(world: Moving) -> None:
    for request in (Reopen("t", 0, "g", [0, 1]), SettleOffsets("t.dlq", 0, "_redrive", [0, 1])):
        assert world.broker.ask(request) == Done()


def listed_or_alive(world: Moving, done: bool) -> None:
    spans = world.broker.ask(FindUnsettled("t.dlq", 0, "_redrive")).spans
    assert spans or world.alive() == [b"a"]
    assert not (done and spans)


def with_targets(world: Moving) -> None:
    for name in ("t", "u"):
        world.broker.create(name, **LAZY)
    writer = Writer(world.broker)
    writer.stage("t", "zero", b"before")
    assert writer.decide(0, ("t", "zero")).applied


def write_version(world: Moving) -> None:
    writer = Writer(world.broker)
    assert writer.stage("t", "one", b"a") == writer.stage("u", "one", b"b") == Done()
    decision = writer.decide(1, ("t", "one"), ("u", "one"))
    assert decision.won
    assert decision.applied
    world.told.append(decision)


def all_or_nothing(world: Moving, done: bool) -> None:
    world.broker.pass_s(120)
    found = world.broker.values("t").count(b"a"), world.broker.values("u").count(b"b")
    assert found in ((0, 0), (1, 1))
    assert not world.told or found == (1, 1)


def with_a_schedule(world: Moving) -> None:
    world.broker.create("t", **LAZY)
    assert world.broker.ask(PutSchedule("s", "t", "* * * * *", value=b"tick")) == Done()


def tick(world: Moving) -> None:
    world.broker.pass_s(30)


def once(world: Moving, done: bool) -> None:
    world.broker.pass_s(31)
    assert world.broker.values("t") == [b"tick"]


def with_a_delayed_message(world: Moving) -> None:
    world.broker.create("t", **EAGER)
    at_us = world.broker.clock.now_us() + 10_000_000
    world.broker.publish(b"before")
    world.broker.send(b"a", deliver_at=[at_us])


def release(world: Moving) -> None:
    world.broker.pass_s(11)


def released_once(world: Moving, done: bool) -> None:
    world.broker.pass_s(20)
    assert world.broker.values("t").count(b"a") == 1


LARGE = [b"%d" % number + bytes(20_000) for number in range(8)]


def with_closed_segments(world: Moving) -> None:
    """Two snapshots know of every message, and none of a trim."""
    world.broker.create("t", **LAZY)
    for number, value in enumerate(LARGE):
        world.broker.send(value)
        if number >= 6:
            world.broker.runtime().upkeep.save_snapshot()
            world.broker.settle()
    assert world.broker.log_segments() > 2


def trim(world: Moving) -> None:
    assert world.broker.ask(TrimTopic("t", 0, 5)) == Done()
    world.broker.settle()
    assert world.broker.log_segments() < 3


def begins_where_it_says(world: Moving, done: bool) -> None:
    """The record of a trim may be lost; then nothing has gone."""
    assert world.broker.engine.faults() == []
    start = world.broker.runtime().start_offset
    assert start in (0, 5)
    assert world.broker.values("t", offset=start) == LARGE[start:]


Move = tuple[Callable[[Moving], None], Callable[[Moving], None], Callable[[Moving, bool], None]]
MOVES: dict[str, Move] = {
    "dead letter": (with_a_message, reject, dead_or_alive),
    "redrive": (with_a_letter, redrive, listed_or_alive),
    "staged version": (with_targets, write_version, all_or_nothing),
    "tick": (with_a_schedule, tick, once),
    "delayed release": (with_a_delayed_message, release, released_once),
    "trim": (with_closed_segments, trim, begins_where_it_says),
}


def cut_everywhere(move: str) -> int:
    """Stop at the first step, then at the second, until the move is over before; how many there were."""
    prepare, act, check = MOVES[move]
    for seed in range(SEEDS):
        step, done = 0, False
        while not done:
            world = Moving(seed)
            prepare(world)
            done = world.cut(step, act)
            check(world, done)
            step += 1
    return step


@pytest.mark.parametrize("move", MOVES)
def test_a_move_is_whole_wherever_the_machine_stops(move: str) -> None:
    assert cut_everywhere(move) > 2


@pytest.mark.parametrize("move", ["dead letter", "redrive", "staged version", "tick"])
def test_without_assurances_a_move_is_torn(move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Assurance, "surely", lambda self, respond: respond)
    with pytest.raises(AssertionError):
        cut_everywhere(move)


def _freed_when_written(upkeep: Maintenance) -> None:
    """Planted: segments go when the record of the trim is written, not when a snapshot has it."""
    captured = upkeep._asks.capture()
    assert captured is not None
    log, offset = captured.log, captured.start_offset
    upkeep._asks.in_order(lambda: log.trim(offset), upkeep.done)


def test_a_trim_that_outlives_its_record_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Maintenance, "free", _freed_when_written)
    with pytest.raises(AssertionError):
        cut_everywhere("trim")
