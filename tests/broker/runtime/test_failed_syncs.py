"""After a failed sync nobody is answered from what may be gone: no reader, no consumer, no group."""

import logging
from typing import Any

import pytest

from tailrace.broker.groups.group_reports import stats_of_all
from tailrace.core.model.commands import LATEST, Fetch, FindOffsets, Offsets, Published, Reply, TrimTopic
from tailrace.core.model.group_commands import DescribeGroup, Heartbeat, ListGroups, PauseGroup, ResetGroup
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_topic import home_of
from tailrace.core.model.queue_commands import (
    Ack,
    CancelScheduled,
    Commit,
    Committed,
    Extend,
    FindUnsettled,
    ListScheduled,
    Nack,
    ReadFacts,
    RejectMessages,
    Settled,
    Trace,
)
from tailrace.errors import Full, StorageFault
from tailrace.storage.memory_log import MemoryLog
from tests.broker.queue_engine import Got, QueueEngine, got, values

BROKEN = "fdatasync failed"


def working(**options: Any) -> QueueEngine:
    broker = QueueEngine()
    broker.create(**options)
    broker.enlist(max_attempts=1)
    return broker


def fail_sync(broker: QueueEngine, topic: str = "t") -> None:
    """The next sync fails behind the write: the frames are in the log all the same."""
    log, append = broker.log(topic), broker.log(topic).append

    def append_and_fail(frames: Any, *, sync: bool) -> None:
        if not sync:
            append(frames, sync=False)
            return
        append(frames, sync=False)
        log.fail_next(StorageFault(BROKEN))
        log.sync()

    log.append = append_and_fail  # type: ignore[method-assign]


def answer_of(answers: list[tuple[Reply, bytes]]) -> Reply:
    ((reply, _),) = answers
    return reply


def test_everything_but_fetches_of_what_was_synced_is_refused_as_unknown() -> None:
    broker = working()
    broker.send(b"a", b"b")
    (message, other) = broker.lease()
    fail_sync(broker)
    span = [message.offset, message.offset + 1]
    receipts = [(message.lease, span)]
    assert broker.ask(Ack("t", 0, "g", receipts)).outcome == "unknown"
    generation = 1
    asked = [
        Ack("t", 0, "g", receipts),
        Nack("t", 0, "g", other.lease, [1, 2]),
        RejectMessages("t", 0, "g", other.lease, [1, 2]),
        Extend("t", 0, "g", [other.lease], 1000),
        Committed("t", "g"),
        Commit("t", "g", "m", [(0, generation, 1)]),
        FindUnsettled("t", 0, "g", 0, 10),
        ListScheduled("t"),
        CancelScheduled("t", 0, [bytes(16)]),
        ReadFacts("t", 0, 0),
        Trace("t", partition=0, offset=0),
        ResetGroup("g", "t", timestamp_us=0, dry_run=True, force=True),
        TrimTopic("t", 0, 1),
        Fetch("t", [(0, 2)], 1 << 20, 60_000),
    ]
    for request in asked:
        reply = broker.ask(request)
        assert isinstance(reply, Refusal), request
        assert (reply.code, reply.outcome) == ("storage_fault", "unknown"), request
        assert BROKEN in reply.message
    lease = answer_of(broker.begin_lease(wait_ms=60_000))
    assert isinstance(lease, Refusal)
    assert (lease.code, lease.outcome) == ("storage_fault", "unknown")
    publish = answer_of(broker.publish(b"c"))
    assert isinstance(publish, Refusal)
    assert (publish.code, publish.outcome) == ("storage_fault", "unknown")
    assert broker.values() == [b"a", b"b"], "what was synced is read as ever"
    assert broker.ask(FindOffsets("t", LATEST)) == Offsets([2])
    (row,) = broker.ask(DescribeGroup("g")).partitions
    assert (row["committed"], row["lag"], row["in_flight"]) == (None, None, None)
    assert BROKEN in row["fault"]
    assert list(stats_of_all(broker.engine.topics)) == []


@pytest.mark.parametrize("request_of_all", [Committed("t", "g"), ListScheduled("t"), Trace("t", key=b"k")])
def test_what_is_asked_of_all_partitions_names_those_that_are_ill(request_of_all: Any) -> None:
    broker = working(partitions=3)
    fail_sync(broker)
    broker.publish(b"a")
    reply = broker.ask(request_of_all)
    assert isinstance(reply, Refusal)
    assert reply.message.startswith("t/0: ")
    assert BROKEN in reply.message
    assert reply.details["partitions"] == [0]
    assert not isinstance(broker.ask(Trace("t", partition=1, key=b"k")), Refusal), "one that is well answers"


def test_whoever_waits_hears_of_it_at_once() -> None:
    broker = working()
    fetch = broker.submit(Fetch("t", [(0, 0)], 1 << 20, 60_000))
    lease = broker.begin_lease(wait_ms=60_000)
    assert fetch == lease == []
    fail_sync(broker)
    broker.publish(b"a")
    assert {reply.code for reply in (answer_of(fetch), answer_of(lease))} == {"storage_fault"}


def test_a_death_that_is_not_durable_does_not_reach_the_dead_letters() -> None:
    """A dead letter is on its way when the second death cannot be synced. The partition steps down, and its
    process with it; the restart finds what is durable."""
    broker = working()
    broker.send(b"dies", b"lives")
    first, second = broker.lease()
    broker.threads.holding = True
    rejected = broker.submit(RejectMessages("t", 0, "g", first.lease, [0, 1]))
    broker.threads.run_held(1)
    broker.settle()
    assert answer_of(rejected) == Settled()
    assert broker.threads.held, "its dead letter is on its way"
    fail_sync(broker)
    lost = broker.submit(RejectMessages("t", 0, "g", second.lease, [1, 2]))
    broker.threads.holding = False
    broker.threads.run_held()
    broker.pass_s(600)
    assert answer_of(lost).outcome == "unknown"
    assert broker.values("t.dlq") == []
    broker.restart()  # Which finds both deaths: what could not be synced was written all the same.
    broker.settle()
    assert broker.values("t.dlq") == [b"dies", b"lives"]


def _written(broker: QueueEngine) -> Any:
    log, append = broker.log(), MemoryLog.append

    def written(frames: Any, *, sync: bool) -> None:
        error, log._next_error = log._next_error, None
        append(log, frames, sync=sync)
        log._next_error = error

    return written


def test_what_an_interval_topic_acknowledged_and_could_not_sync_is_not_shown() -> None:
    broker = working(durability="interval", sync_interval_ms=100)
    broker.send(b"synced")
    broker.pass_s(0.3)
    broker.log().append = _written(broker)  # type: ignore[method-assign]
    broker.log().fail_next(StorageFault(BROKEN))
    broker.send(b"written")
    assert broker.values() == [b"synced", b"written"]
    broker.pass_s(0.3)
    assert broker.values() == [b"synced"]
    for offset in (1, 2):
        reply = broker.ask(Fetch("t", [(0, offset)], 1 << 20, 0))
        assert isinstance(reply, Refusal)
        assert (reply.code, reply.outcome) == ("storage_fault", "unknown")
    assert broker.ask(FindOffsets("t", LATEST)) == Offsets([2]), "whoever reads up to the end is told"


def test_a_read_under_way_when_the_sync_fails_does_not_show_it_either() -> None:
    broker = working(durability="interval", sync_interval_ms=100, ring_buffer_bytes=0)
    broker.send(b"synced")
    broker.pass_s(0.3)
    broker.log().append = _written(broker)  # type: ignore[method-assign]
    broker.log().fail_next(StorageFault(BROKEN))
    broker.send(b"written")
    broker.threads.holding = True
    fetch = broker.submit(Fetch("t", [(0, 1)], 1 << 20, 0))
    assert len(broker.threads.held) == 1, "it is read from the log"
    broker.pass_s(0.3)
    broker.threads.held.append(broker.threads.held.pop(0))  # the sync fails first
    broker.threads.run_held(1)
    broker.settle()
    broker.threads.holding = False
    broker.threads.run_held()
    broker.settle()
    reply = answer_of(fetch)
    assert isinstance(reply, Refusal)
    assert reply.code == "storage_fault"


def test_a_coordinator_whose_sync_failed_knows_nothing_and_says_so() -> None:
    broker = working()
    other = next(f"h{number}" for number in range(50) if home_of(f"h{number}") != home_of("g"))
    broker.enlist(other)
    runtime = broker.engine.topics.coordinators()[home_of("g")]
    assert isinstance(runtime.log, MemoryLog)
    runtime.log.fail_next(StorageFault(BROKEN))
    assert broker.ask(PauseGroup("g", True)).outcome == "unknown"
    assert runtime.fault is not None
    for request in (DescribeGroup("g"), ListGroups(), Heartbeat("g", "m", 0, [])):
        reply = broker.ask(request)
        assert isinstance(reply, Refusal), request
        assert (reply.code, reply.outcome) == ("storage_fault", "unknown")
    assert broker.ask(DescribeGroup(other)).group == other
    broker.restart()
    broker.settle()
    assert broker.ask(DescribeGroup("g")).member_count == 1


def test_a_full_disk_leaves_nothing_to_answer_from_until_the_log_is_read_again() -> None:
    broker = working()
    broker.send(b"a", b"b")
    first, _ = broker.lease()
    broker.threads.holding = True
    broker.log().fail_next(Full("no space is left"))
    ack = broker.submit(Ack("t", 0, "g", [(first.lease, [0, 1])]))
    committed = broker.submit(Committed("t", "g"))
    assert ack == committed == [], "both wait for the disk"
    broker.threads.run_held(1)
    broker.settle()
    assert {answer.code for answer in (answer_of(ack), answer_of(committed))} == {"full"}
    assert broker.ask(Committed("t", "g")).code == "full"
    assert broker.values() == [b"a", b"b"]
    broker.threads.holding = False
    broker.threads.run_held()
    broker.pass_s(1.1)
    assert broker.ask(Committed("t", "g")) == Offsets([0])
    assert values(_leased(broker)) == []


def _leased(broker: QueueEngine) -> list[Got]:
    return got(broker.begin_lease())


def test_after_the_restart_it_is_a_partition_like_any_other() -> None:
    broker = working()
    broker.send(b"a")
    (message,) = broker.lease()
    fail_sync(broker)
    broker.ask(Ack("t", 0, "g", [(message.lease, [0, 1])]))
    broker.restart()
    broker.settle()
    assert broker.engine.faults() == []
    assert isinstance(answer_of(broker.publish(b"b")), Published)


def test_a_failed_sync_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    broker = working()
    fail_sync(broker)
    broker.publish(b"a")
    broker.publish(b"b")
    (text,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert text.startswith("t/0 steps down: ")
    assert BROKEN in text
