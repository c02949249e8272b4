"""Upkeep: when partitions take snapshots of themselves, and that what a restart replays stays bounded.

Also covers `broker/runtime/replay_debt.py`.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tailrace.broker.runtime.replay_debt import FRAME_US, LOG_BYTES_PER_SNAPSHOT_BYTE, ReplayBounds
from tailrace.errors import Full
from tailrace.format.frame import Buffer, Header
from tailrace.storage.memory_log import MemoryLog
from tests.broker.queue_engine import QueueEngine

Replayed = dict[str, int]
BOUNDS = ReplayBounds()
FRAMES_MAX = BOUNDS.us_max / min(FRAME_US.values())
"""So many frames of the cheapest kind may be replayed."""


@pytest.fixture
def broker() -> QueueEngine:
    broker = QueueEngine()
    broker.create()
    broker.enlist()
    return broker


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Replayed:
    """Frames that were replayed since it was last cleared, by log."""
    counts: Replayed = {}
    recover = MemoryLog.recover

    def counting(log: MemoryLog) -> Any:
        recovery = recover(log)

        def frames() -> Iterator[tuple[Header, Buffer]]:
            for item in recovery.frames:
                counts[log._name] = counts.get(log._name, 0) + 1
                yield item

        return type(recovery)(
            recovery.snapshot,
            frames(),
            recovery.end_entry,
            recovery.end_offset,
            recovery.cut_bytes,
            recovery.fault,
        )

    monkeypatch.setattr(MemoryLog, "recover", counting)
    return counts


def work(broker: QueueEngine, messages: int, topic: str = "t") -> None:
    """Messages one by one, each leased and acknowledged: three frames for each."""
    for number in range(messages):
        broker.send(b"%d" % number, topic=topic)
        (message,) = broker.lease(topic=topic, count_max=1)
        broker.ack(message, topic=topic)


def saved(broker: QueueEngine) -> list[int]:
    """Entries of the snapshots that are taken from now on."""
    log, save = broker.log(), broker.log().save_snapshot
    entries: list[int] = []

    def noting(snapshot: Any) -> None:
        entries.append(snapshot.entry)
        save(snapshot)

    log.save_snapshot = noting  # type: ignore[method-assign]
    return entries


def test_what_a_restart_replays_does_not_grow_with_the_number_of_kills(
    broker: QueueEngine, replayed: Replayed
) -> None:
    seen = []
    for _ in range(12):
        work(broker, 300)
        broker.pass_s(2)
        broker.restart()  # Without a clean stop.
        seen.append(sum(replayed.values()))
        replayed.clear()
        assert broker.runtime().state.queues.figures("g")["acked"] == 300 * len(seen)
    assert max(seen) < FRAMES_MAX
    assert seen[-1] <= 2 * seen[0] + 100


def test_kills_too_close_to_each_other_for_a_snapshot_of_their_own_add_up(
    broker: QueueEngine, replayed: Replayed
) -> None:
    """Each run alone writes less than is worth a snapshot; what was replayed at the start counts with it."""
    seen = []
    for _ in range(20):
        work(broker, 100)
        broker.pass_s(0.3)
        broker.restart()
        seen.append(sum(replayed.values()))
        replayed.clear()
    assert max(seen) < FRAMES_MAX


def test_the_bound_is_for_the_whole_broker_and_not_for_each_partition(replayed: Replayed) -> None:
    broker = QueueEngine()
    broker.create(partitions=40)
    for _ in range(5):
        for partition in range(40):
            for _ in range(40):
                broker.send(b"x", partition=partition)
        broker.pass_s(3)
    broker.restart()
    assert sum(replayed.values()) < FRAMES_MAX


def test_a_busy_partition_takes_no_more_than_one_snapshot_a_second(broker: QueueEngine) -> None:
    broker.engine.replay_bounds = ReplayBounds(us_max=BOUNDS.us_min)
    entries = saved(broker)
    for _ in range(20):
        work(broker, 60)
        broker.pass_s(0.1)
    assert 2 <= len(entries) <= 3


def test_a_large_state_is_not_written_again_for_a_little_log(broker: QueueEngine) -> None:
    broker.send(*(b"%d" % number for number in range(4_000)))
    for message in broker.lease(count_max=4_000):
        broker.nack(message, delay_ms=3_600_000)
    broker.pass_s(2)
    entries = saved(broker)
    size = broker.runtime().upkeep.debt.snapshot_bytes
    assert size > 50_000
    before = broker.log().stats().bytes
    for _ in range(30):
        work(broker, 100)
        broker.pass_s(2)
    written = broker.log().stats().bytes - before
    assert 1 <= len(entries) <= written / (LOG_BYTES_PER_SNAPSHOT_BYTE * size) + 1


def test_an_idle_broker_takes_no_snapshots(broker: QueueEngine) -> None:
    work(broker, 2_000)
    broker.pass_s(2)
    entries = saved(broker)
    broker.pass_s(600)
    assert entries == []


def test_a_snapshot_that_cannot_be_stored_is_tried_again_but_not_at_once(broker: QueueEngine) -> None:
    log = broker.log()
    save, tries = log.save_snapshot, []

    def failing(snapshot: Any) -> None:
        tries.append(snapshot.entry)
        if len(tries) < 3:
            raise Full("no space is left", outcome="none")
        save(snapshot)

    log.save_snapshot = failing  # type: ignore[method-assign]
    work(broker, 2_000)
    broker.pass_s(30)
    assert len(tries) == 1
    broker.pass_s(150)
    assert len(tries) == 3
    assert broker.runtime().upkeep.debt.us < BOUNDS.us_max


def test_a_quarantined_partition_does_not_keep_others_from_their_snapshots(broker: QueueEngine) -> None:
    broker.create("other")
    broker.enlist(topic="other", group="h")
    work(broker, 1_500)
    broker.runtime().fail(OSError("the disk is gone"))
    for number in range(7_000):
        broker.send(b"%d" % number, topic="other")
    broker.pass_s(2)
    assert broker.runtime("other").upkeep.debt.snapshot_bytes > 0


def test_appends_do_not_wait_for_a_snapshot(broker: QueueEngine) -> None:
    """Only the frames that it covers are waited for; it is encoded and stored on a thread of its own."""
    runtime, lanes = broker.runtime(), []
    run = broker.threads.run

    def noting(log: object, work: Any, done: Any) -> None:
        lanes.append(log is runtime.log)
        run(log, work, done)

    broker.threads.run = noting  # type: ignore[method-assign]
    broker.send(b"a")
    lanes.clear()
    runtime.upkeep.save_snapshot()
    broker.settle()
    assert lanes == [False, False]  # The sync and the snapshot, both beside the appends.


def test_a_topic_that_is_deleted_is_closed_behind_its_snapshot(broker: QueueEngine) -> None:
    broker.send(b"a")
    broker.threads.holding = True
    broker.runtime().upkeep.save_snapshot()
    closed: list[bool] = []
    log = broker.log()
    broker.runtime().retire(lambda result, error: closed.append(log.closed))
    while not closed:
        assert broker.threads.held
        broker.threads.run_held(1)
        broker.settle()
    assert closed == [True]


def test_a_state_that_cannot_be_stored_does_not_keep_the_broker_from_closing(broker: QueueEngine) -> None:
    broker.send(b"a")

    def broken() -> Any:
        raise TypeError("a number is no number")

    broker.runtime().state.freeze = broken  # type: ignore[method-assign]
    for _ in range(2):
        broker.runtime().upkeep.save_snapshot()
    closed: list[bool] = []
    broker.engine.close(lambda: closed.append(True))
    broker.settle()
    assert closed == [True]
    assert broker.log().closed


def test_the_pause_of_a_snapshot_is_measured(broker: QueueEngine) -> None:
    broker.send(b"a")
    broker.runtime().upkeep.save_snapshot()
    broker.settle()
    text = broker.engine.metrics.render().decode()
    assert "tailrace_snapshot_pause_seconds_count 1.0" in text
