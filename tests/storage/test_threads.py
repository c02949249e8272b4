"""Storage threads: order per log, group commit, one wake-up per batch, slow logs and readers apart."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import Full, StorageFault, Unavailable
from tailrace.format.frame import Frame
from tailrace.storage.disk import RealDisk
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.memory_log import MemoryLog, MemoryStore
from tailrace.storage.threads import InlineThreads, StorageThreads
from tests.storage.frame_maker import FrameMaker, TestClock, unheard


class Owner:
    """Stands for the event loop: is woken, fetches, calls back."""

    def __init__(self) -> None:
        self.woken = threading.Semaphore(0)
        self.wakes = 0
        self.results: list[tuple[str, Any, Exception | None]] = []

    def notify(self) -> None:
        self.wakes += 1
        self.woken.release()

    def done(self, name: str) -> Any:
        return lambda result, error: self.results.append((name, result, error))

    def drain(self, threads: StorageThreads | InlineThreads, count: int) -> None:
        while len(self.results) < count:
            assert self.woken.acquire(timeout=10)
            for done, result, error in threads.completed():
                done(result, error)


class GatedLog:
    """A memory log whose appends wait for a gate and are counted."""

    def __init__(self) -> None:
        self._log = open_log()
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.calls: list[tuple[int, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def append(self, frames: Sequence[Frame], *, sync: bool) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        self.calls.append((len(frames), sync))
        self._log.append(frames, sync=sync)


@pytest.fixture
def owner() -> Owner:
    return Owner()


def open_log(name: str = "log") -> MemoryLog:
    log = MemoryStore().log(name, unheard)
    log.recover()
    return log


@pytest.mark.parametrize("kind", [StorageThreads, InlineThreads])
def test_work_of_a_log_runs_in_order(kind: type[StorageThreads] | type[InlineThreads], owner: Owner) -> None:
    threads, log, maker = kind(owner.notify), open_log(), FrameMaker()
    for number in range(30):
        threads.append(log, [maker.data()], number % 2 == 0, owner.done(f"append {number}"))
        threads.run(log, lambda: log.stats().end_offset, owner.done(f"run {number}"))
    owner.drain(threads, 60)
    assert [name for name, _, _ in owner.results] == [
        f"{what} {number}" for number in range(30) for what in ("append", "run")
    ]
    assert [result for _, result, _ in owner.results[1::2]] == [10 * number for number in range(1, 31)]
    assert all(error is None for _, _, error in owner.results)
    threads.close()


def test_waiting_appends_become_one(owner: Owner) -> None:
    threads, log, maker = StorageThreads(owner.notify), GatedLog(), FrameMaker()
    threads.append(log, [maker.data()], False, owner.done("first"))
    assert log.entered.wait(10)
    for number in range(5):
        threads.append(log, [maker.data(), maker.data()], number == 3, owner.done(str(number)))
    log.gate.set()
    owner.drain(threads, 6)
    assert log.calls == [(1, False), (10, True)]
    threads.close()


def test_append_is_reported_before_slow_work_behind_it(owner: Owner) -> None:
    threads, log, gate = StorageThreads(owner.notify), GatedLog(), threading.Event()
    threads.run(log, log.gate.wait, owner.done("first"))
    threads.append(log, [FrameMaker().data()], True, owner.done("append"))
    threads.run(log, lambda: gate.wait(10), owner.done("slow"))
    log.gate.set()
    owner.drain(threads, 2)
    assert [name for name, _, _ in owner.results] == ["first", "append"]
    gate.set()
    owner.drain(threads, 3)
    threads.close()


def test_failed_join_fails_for_all_and_for_those_behind(owner: Owner) -> None:
    threads, log, maker = StorageThreads(owner.notify), GatedLog(), FrameMaker()
    log.fail_next(Full("no space"))
    for number in range(3):
        threads.append(log, [maker.data()], True, owner.done(str(number)))
    log.gate.set()
    owner.drain(threads, 3)
    errors = [error for _, _, error in owner.results]
    assert any(isinstance(error, Full) for error in errors)
    assert all(isinstance(error, StorageFault) and error.outcome == "none" for error in errors)
    threads.append(log, [FrameMaker().data()], True, owner.done("again"))
    owner.drain(threads, 4)
    assert owner.results[-1][2] is None
    threads.close()


def test_slow_log_delays_no_other(owner: Owner) -> None:
    threads, slow, fast = StorageThreads(owner.notify, count=2), GatedLog(), open_log()
    threads.append(slow, [FrameMaker().data()], True, owner.done("slow"))
    assert slow.entered.wait(10)
    maker = FrameMaker()
    for number in range(20):
        threads.append(fast, [maker.data()], True, owner.done(str(number)))
    owner.drain(threads, 20)
    assert "slow" not in [name for name, _, _ in owner.results]
    slow.gate.set()
    owner.drain(threads, 21)
    threads.close()


def test_reads_run_beside_appends_and_report_errors(owner: Owner) -> None:
    threads, log = StorageThreads(owner.notify, count=1), GatedLog()
    threads.append(log, [FrameMaker().data()], True, owner.done("append"))
    assert log.entered.wait(10)

    def broken() -> None:
        raise ValueError("broken")

    threads.read(lambda: 42, owner.done("read"))
    threads.read(broken, owner.done("broken"))
    owner.drain(threads, 2)
    results = {name: (result, str(error)) for name, result, error in owner.results}
    assert results == {"read": (42, "None"), "broken": (None, "broken")}
    log.gate.set()
    owner.drain(threads, 3)
    threads.close()


def test_owner_is_woken_once_until_it_fetches(owner: Owner) -> None:
    threads = InlineThreads(owner.notify)
    log = open_log()
    for number in range(10):
        threads.run(log, lambda: None, owner.done(str(number)))
    assert owner.wakes == 1
    assert len(threads.completed()) == 10
    assert threads.completed() == []
    threads.run(log, lambda: None, owner.done("more"))
    assert owner.wakes == 2


@pytest.mark.parametrize("kind", [StorageThreads, InlineThreads])
def test_close_finishes_what_was_submitted(
    kind: type[StorageThreads] | type[InlineThreads], owner: Owner
) -> None:
    threads, log, maker = kind(owner.notify), open_log(), FrameMaker()
    for number in range(50):
        threads.append(log, [maker.data()], True, owner.done(str(number)))
        threads.read(lambda: None, owner.done("read"))
    threads.close()
    threads.close()
    for done, result, error in threads.completed():
        done(result, error)
    assert len(owner.results) == 100
    assert log.stats().end_offset == 500
    for act in (
        lambda: threads.append(log, [maker.data()], True, owner.done("late")),
        lambda: threads.read(lambda: None, owner.done("late")),
    ):
        with pytest.raises(Unavailable):
            act()


def test_many_logs_on_a_real_disk(owner: Owner, tmp_path: Path) -> None:
    threads, store = (
        StorageThreads(owner.notify),
        FileStore(RealDisk(tmp_path), TestClock(), segment_bytes=8192),
    )
    logs = [store.log(f"topic/{number}", unheard) for number in range(12)]
    for log in logs:
        log.recover()
    makers = [FrameMaker() for _ in logs]
    for _ in range(10):
        for log, maker in zip(logs, makers, strict=True):
            threads.append(log, [maker.data(500)], True, owner.done("append"))
    owner.drain(threads, 120)
    assert all(error is None for _, _, error in owner.results)
    assert {log.stats().end_offset for log in logs} == {100}
    threads.forget(logs[0])
    threads.close()
    store.close()


def test_a_log_may_be_forgotten_while_the_threads_close(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop hears that a log was closed while another thread releases everything."""
    threads, logs = StorageThreads(owner.notify), [open_log(str(number)) for number in range(3)]
    for log in logs:
        threads.append(log, [FrameMaker().data()], False, owner.done("append"))
    owner.drain(threads, 3)
    lanes = list(threads._lanes.values())
    while any(lane.busy for lane in lanes):
        threading.Event().wait(0)
    enqueue = threads._enqueue

    def enqueue_and_forget(lane: Any, item: Any) -> None:
        enqueue(lane, item)
        threads.forget(logs[-1])

    monkeypatch.setattr(threads, "_enqueue", enqueue_and_forget)
    threads.close()
    assert len(threads._lanes) == 2
