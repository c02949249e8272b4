"""Atomic writes on a disk that loses power: whatever happens in whatever order, all or nothing, and once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tailrace.broker.runtime.clock import ManualClock
from tailrace.core.model.commands import Done
from tailrace.core.model.queue_commands import AbortStaged, DecideStaged, StagedDecision, StageRows
from tailrace.format import batch as arrow
from tailrace.format.frame import crc32c
from tailrace.sim.sim_disk import SimDisk
from tailrace.storage.files.file_store import FileStore
from tests.broker.held_engine import HeldEngine
from tests.mixtures import dear, mixtures

TOPICS = ("a", "b")
LATE_US = 30_000_000
SEGMENT_BYTES = 4096
"""Less than what the attempts called y write to a partition at once."""
Attempt = tuple[str, int, str]
"""Writer, version, name."""


class World:
    """A broker on a simulated disk, writers without memory, and what they were told."""

    def __init__(self, seed: int) -> None:
        self.disk = SimDisk(seed)
        self.broker = HeldEngine(self._store())
        for topic in TOPICS:
            self.broker.create(topic)
        self.broker.threads.holding = True
        self.staged: dict[tuple[Attempt, str], Any] = {}
        self.decisions: list[tuple[Attempt, Any]] = []
        self.aborts: list[tuple[Attempt, Any]] = []
        self.asked: set[Attempt] = set()

    def _store(self) -> FileStore:
        return FileStore(self.disk, ManualClock(), segment_bytes=SEGMENT_BYTES, nonce=lambda: 7)

    def crash(self, power: bool) -> None:
        """End the process, or the machine, in the middle of whatever it was doing."""
        threads = self.broker.threads
        threads.held.clear()
        threads.completed()
        if power:
            self.disk.crash()
        else:
            self.disk.restart()
        threads.holding = False
        self.broker.store = self._store()
        self.broker.engine = self.broker._start()
        threads.holding = True

    def run(self, steps: int) -> None:
        """Let storage do some of its work."""
        for _ in range(steps):
            self.broker.threads.run_held(1)
            self.broker.settle()

    def stage(self, attempt: Attempt) -> None:
        writer, version, name = attempt
        for topic in TOPICS:
            value, now_us = f"{writer}/{version}/{name}".encode(), self.broker.clock.now_us()
            columns, body = arrow.encode(
                [value, value + b"/late"],
                ids=bytes(32),
                timestamps=now_us,
                deliver_at=[now_us, now_us + LATE_US],
                headers=[[("fill", bytes(SEGMENT_BYTES))], []] if name == "y" else None,
            )
            request = StageRows(topic, 0, writer, f"{version}-{name}", columns, crc32c(body))
            self.staged[attempt, topic] = self.broker.submit(request, body)

    def decide(self, attempt: Attempt) -> None:
        writer, version, name = attempt
        if all(replies(self.staged.get((attempt, topic))) == [Done()] for topic in TOPICS):
            self.asked.add(attempt)
            request = DecideStaged(
                writer, version, [(topic, 0, f"{version}-{name}") for topic in TOPICS], [1, 1]
            )
            self.decisions.append((attempt, self.broker.submit(request)))

    def write(self, attempt: Attempt) -> None:
        """Stage and, once that is stored, decide."""
        self.stage(attempt)
        self.run(20)
        self.decide(attempt)

    def abort(self, attempt: Attempt) -> None:
        writer, version, name = attempt
        request = AbortStaged(writer, [(topic, 0, f"{version}-{name}") for topic in TOPICS])
        self.aborts.append((attempt, self.broker.submit(request)))

    def end(self) -> None:
        """No more faults: all that goes on by itself comes to its end."""
        self.broker.threads.holding = False
        self.broker.threads.run_held()
        self.broker.pass_s(90)

    def written(self, topic: str, *, late: bool = False) -> list[Attempt]:
        """The attempts whose message is there: the one that was due at once, or the delayed one."""
        found = []
        for value in self.broker.values(topic):
            writer, version, name, *delayed = value.decode().split("/")
            if bool(delayed) == late:
                found.append((writer, int(version), name))
        return found

    def check(self) -> None:
        first, second = (self.written(topic) for topic in TOPICS)
        assert sorted(first) == sorted(second), "all or nothing"
        for topic in TOPICS:
            assert sorted(self.written(topic, late=True)) == sorted(first), "delayed messages come, once"
        versions = [(writer, version) for writer, version, _ in first]
        assert len(set(versions)) == len(versions), "once"
        for found in (first, second):
            for writer in "uv":
                own = [version for name, version, _ in found if name == writer]
                assert own == sorted(own), "in order"
        assert set(first) <= self.asked, "nothing that nobody decided"
        for attempt, answers in self.decisions:
            for reply in replies(answers):
                if isinstance(reply, StagedDecision) and (reply.won or reply.version == attempt[1]):
                    assert reply.won is (attempt in first), "as it was told"
        staged = [home.state.staged for home in self.broker.engine.coordinators.runtimes()]
        assert not any(list(decisions.pending()) for decisions in staged)
        for topic in TOPICS:
            self.broker.runtime(topic).state.check()


def replies(answers: Any) -> list[Any]:
    return [reply for reply, _ in answers or ()]


ATTEMPTS = st.tuples(st.sampled_from("uv"), st.integers(1, 3), st.sampled_from("xy"))
ALWAYS = (st.tuples(st.just("write"), ATTEMPTS), st.tuples(st.just("run"), st.integers(5, 30)))
OTHERS = (
    st.tuples(st.just("stage"), ATTEMPTS),
    st.tuples(st.just("decide"), ATTEMPTS),
    st.tuples(st.just("abort"), ATTEMPTS),
    st.tuples(st.just("run"), st.integers(1, 6)),
    st.tuples(st.just("crash"), st.booleans()),
)


@dear(60)
@given(st.integers(0, 1 << 16), mixtures(ALWAYS, OTHERS, 10, 40))
def test_writes_are_atomic_whatever_happens(seed: int, steps: list[Any]) -> None:
    world = World(seed)
    for what, detail in steps:
        getattr(world, what)(detail)
    world.end()
    world.check()


def test_the_world_does_write_something() -> None:
    world = World(1)
    for attempt in (("u", 1, "x"), ("u", 2, "x"), ("v", 1, "y")):
        world.stage(attempt)
        world.run(100)
        world.decide(attempt)
        world.run(100)
    world.crash(power=True)
    world.end()
    world.check()
    assert len(world.written("a")) == 3
