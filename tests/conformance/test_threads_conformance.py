"""One suite for every `Threads`: those of the broker, those without threads, and the simulated late ones."""

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tailrace.errors import StorageFault
from tailrace.format import frame
from tailrace.ports import PartitionLog, Threads
from tailrace.sim.late_storage import CutStore, LateThreads
from tailrace.storage.threads import InlineThreads, StorageThreads
from tests.broker.held_engine import HeldThreads
from tests.storage.frame_maker import FrameMaker, unheard

Outcome = tuple[object, Exception | None]


class Bench:
    """One kind of threads, a log for them, and the owner who takes their completions."""

    def __init__(self, kind: str) -> None:
        self.store = CutStore(lambda name, end_offset: None)
        self._told = threading.Event()
        self._later: list[tuple[int, int, Callable[[], None]]] = []
        self._now_us = 0
        self.threads: Threads
        if kind == "real":
            self.threads = StorageThreads(self._told.set)
        elif kind == "inline":
            self.threads = InlineThreads(self._told.set)
        elif kind == "held":
            self.threads = HeldThreads()
        else:
            self.threads = LateThreads(Random(7), self._at, self.store, self._told.set, Counter())

    def _at(self, delay_us: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self._now_us + delay_us, len(self._later), act))

    def log(self, name: str) -> PartitionLog:
        log = self.store.log(name, unheard)
        log.recover()
        return log

    def wait(self, done: Callable[[], bool]) -> None:
        """Let work go on, and hand out what is completed, until something is so."""
        while not done():
            if self._later:
                self._now_us, _, act = heapq.heappop(self._later)
                act()
            elif isinstance(self.threads, StorageThreads):
                assert self._told.wait(60.0)
                self._told.clear()
            for told, result, error in self.threads.completed():
                told(result, error)


@pytest.fixture(params=["real", "inline", "held", "late"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(request.param)
    yield made
    made.threads.close()


class Heard:
    """What was told, in order, each with its name."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.outcomes: dict[str, Outcome] = {}

    def of(self, name: str) -> Callable[[Any, Exception | None], None]:
        def told(result: Any, error: Exception | None) -> None:
            assert name not in self.outcomes, f"{name} is told twice"
            self.order.append(name)
            self.outcomes[name] = result, error

        return told


def test_work_on_one_log_is_done_in_order(bench: Bench) -> None:
    log, heard = bench.log("t/0"), Heard()
    ends: list[int] = []
    made = FrameMaker()
    for number in range(6):
        if number % 3 == 2:
            bench.threads.run(log, lambda: ends.append(log.stats().end_offset), heard.of(str(number)))
        else:
            bench.threads.append(log, [made.data(span=1)], number % 2 == 0, heard.of(str(number)))
    bench.wait(lambda: len(heard.order) == 6)
    assert heard.order == ["0", "1", "2", "3", "4", "5"]
    assert ends == [2, 4]
    assert all(error is None for _, error in heard.outcomes.values())
    found = [header.base_offset for part in log.read(0, 4, 1 << 20) for header, _ in frame.walk(part)]
    assert found == [0, 1, 2, 3]


def test_an_error_is_told_to_its_own_work_alone(bench: Bench) -> None:
    log, heard = bench.log("t/0"), Heard()

    def broken() -> object:
        raise StorageFault("the disk says no")

    bench.threads.run(log, broken, heard.of("broken"))
    bench.threads.run(log, lambda: 5, heard.of("well"))
    bench.threads.read(broken, heard.of("broken read"))
    bench.threads.read(lambda: 6, heard.of("read"))
    bench.wait(lambda: len(heard.order) == 4)
    assert heard.outcomes["well"] == (5, None)
    assert heard.outcomes["read"] == (6, None)
    for name in ("broken", "broken read"):
        result, error = heard.outcomes[name]
        assert result is None
        assert isinstance(error, StorageFault)


def test_what_is_told_comes_before_what_ends_later(bench: Bench) -> None:
    log, heard = bench.log("t/0"), Heard()

    def work() -> None:
        bench.threads.tell(heard.of("told"), "news")

    bench.threads.run(log, work, heard.of("work"))
    bench.wait(lambda: len(heard.order) == 2)
    assert heard.order == ["told", "work"]
    assert heard.outcomes["told"] == ("news", None)


def test_completions_are_taken_once(bench: Bench) -> None:
    log, heard = bench.log("t/0"), Heard()
    bench.threads.run(log, lambda: 1, heard.of("one"))
    bench.wait(lambda: len(heard.order) == 1)
    assert list(bench.threads.completed()) == []
    bench.threads.forget(log)
    bench.threads.run(log, lambda: 2, heard.of("two"))
    bench.wait(lambda: len(heard.order) == 2)
    assert heard.outcomes["two"] == (2, None)
