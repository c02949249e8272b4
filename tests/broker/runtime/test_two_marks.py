"""Two marks in `broker/runtime/partition_runtime.py`: what is stored waits for its commit, however late.

The partitions here override one method, `_stored`: the commit does not follow by itself, the test says when.
That is all that copies on other nodes will need. Whoever took *stored* for *committed* is found out here.
"""

from typing import Any

import pytest

from tailrace.broker import topics
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.turn import Reach
from tailrace.core.model.commands import (
    LATEST,
    DeleteTopic,
    Done,
    Fetch,
    FindOffsets,
    Offsets,
    Publish,
    Published,
    TrimTopic,
)
from tailrace.core.model.facts import Dying
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import RejectMessages, Settled
from tailrace.errors import Corrupt, Full
from tailrace.format import batch as arrow
from tailrace.format import frame
from tests.broker.queue_engine import QueueEngine, got, values
from tests.broker.runtime.test_partition_runtime import refusal_of, reply_of

MINUTE_US = 60_000_000


class LatePartition(QueuePartition):
    """A partition whose commit comes later than the write, once it is `late`."""

    late = False

    def _stored(self, reach: Reach) -> None:
        if not self.late:
            super()._stored(reach)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> QueueEngine:
    """A broker with the topic `t`, whose partition is late, and the group `g`, which has read nothing."""
    monkeypatch.setattr(topics, "QueuePartition", LatePartition)
    broker = QueueEngine()
    broker.create(durability="fsync")
    broker.enlist(ordering="none")
    runtime(broker).late = True
    return broker


def runtime(broker: QueueEngine, topic: str = "t") -> LatePartition:
    found = broker.runtime(topic)
    assert isinstance(found, LatePartition)
    return found


def agree(broker: QueueEngine, entries: int = 0) -> None:
    """Commit what is stored, or only so many entries behind the committed ones."""
    late = runtime(broker)
    late.commit(late.committed.entry + entries if entries else late.assurance.written.entry)
    broker.settle()


def stored(broker: QueueEngine) -> bool:
    """Whether everything that was decided is stored, and some of it is not committed."""
    late = runtime(broker)
    return late.entry == late.assurance.written.entry > late.committed.entry


def test_replies_and_refusals_leave_with_the_commit(broker: QueueEngine) -> None:
    first = broker.publish(b"a", producer_id=5)
    again = broker.publish(b"a", producer_id=5)
    conflict = broker.publish(b"b", expected_sequence=1)
    assert stored(broker)
    assert first == again == conflict == []
    agree(broker)
    assert reply_of(first) == reply_of(again) == Published(0, broker.clock.now_us())
    assert refusal_of(conflict).code == "sequence_conflict"


def test_commits_come_in_order_and_never_pass_what_is_stored(broker: QueueEngine) -> None:
    first, second = broker.publish(b"a"), broker.publish(b"b")
    broker.threads.holding = True
    third = broker.publish(b"c")
    agree(broker, 1)
    assert (len(first), len(second), len(third)) == (1, 0, 0)
    agree(broker, 1000)
    assert (len(second), len(third)) == (1, 0)
    broker.threads.run_held()
    broker.settle()
    assert third == []
    agree(broker)
    assert reply_of(third) == Published(2, broker.clock.now_us())


def test_nobody_reads_what_is_not_committed(broker: QueueEngine) -> None:
    waiting = broker.submit(Fetch("t", [(0, 0)], 1 << 20, 5_000))
    leasing = broker.begin_lease(wait_ms=5_000)
    broker.publish(b"a")
    assert stored(broker)
    assert broker.values() == []
    assert waiting == leasing == []
    assert broker.ask(FindOffsets("t", LATEST)) == Offsets([0])
    assert broker.engine.topics.describe("t").partitions[0]["end_offset"] == 0
    assert runtime(broker).stats().end_offset == 0
    agree(broker)
    broker.pass_s(0.1)
    assert len(waiting) == 1
    assert values(got(leasing)) == broker.values() == [b"a"]
    assert broker.ask(FindOffsets("t", LATEST)) == Offsets([1])
    assert runtime(broker).stats().end_offset == 1


def test_processes_hear_of_facts_that_are_committed(
    broker: QueueEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.publish(b"bad")
    agree(broker)
    (bad,) = broker.lease()
    heard: list[Any] = []
    processes = runtime(broker).processes
    tell = processes.committed
    monkeypatch.setattr(processes, "committed", lambda facts: (heard.extend(facts), tell(facts)))
    rejected = broker.submit(RejectMessages("t", 0, "g", bad.lease, [bad.offset, bad.offset + 1]))
    assert stored(broker)
    broker.pass_s(10)
    assert rejected == heard == []
    assert broker.engine.topics.host("t.dlq") is None, "its death may be dropped yet"
    agree(broker)
    assert [type(fact) for fact in heard] == [Dying]
    for _ in range(3):  # The steps of the dead letter, each of which writes something.
        broker.pass_s(1)
        agree(broker)
    assert reply_of(rejected) == Settled()
    assert broker.values("t.dlq") == [b"bad"]


def test_delayed_messages_are_released_when_they_are_committed(broker: QueueEngine) -> None:
    due_us = broker.clock.wall_us() + MINUTE_US
    ids = arrow.make_ids(1, broker.clock.now_us() // 1000, 7, 7)
    bits, body = arrow.encode([b"later"], ids=ids, timestamps=broker.clock.now_us(), deliver_at=[due_us])
    answers = broker.submit(Publish("t", 0, bits, frame.crc32c(body)), body)
    assert stored(broker)
    broker.pass_s(120)
    assert answers == []
    assert runtime(broker).state.end_offset == 0, "nothing was appended yet"
    agree(broker)
    broker.pass_s(1)
    agree(broker)
    assert broker.values() == [b"later"]


def test_an_assured_reply_waits_for_the_commit_and_for_the_sync(broker: QueueEngine) -> None:
    runtime(broker).late = False
    broker.create("i", durability="interval", sync_interval_ms=3_600_000)
    late = runtime(broker, "i")
    late.late = True
    broker.publish(b"a", topic="i")
    told: list[Any] = []
    broker.threads.holding = True
    late.answer(late.surely(lambda reply, parts: told.append(reply)), Done())
    broker.threads.run_held()
    broker.settle()
    assert told == [], "not committed"
    late.commit(1000)
    broker.settle()
    assert told == [], "not synced"
    broker.threads.run_held()
    broker.settle()
    assert told == [Done()]


def test_a_snapshot_holds_committed_facts_only(broker: QueueEngine) -> None:
    broker.publish(b"a")
    late = runtime(broker)
    late.shorten_replay()
    broker.settle()
    assert late.upkeep.saving
    agree(broker)
    assert not late.upkeep.saving


def test_a_trim_frees_nothing_before_it_is_committed(broker: QueueEngine) -> None:
    broker.publish(b"a", b"b")
    agree(broker)
    trimmed = broker.submit(TrimTopic("t", 0, 1))
    broker.pass_s(120)
    assert trimmed == []
    assert runtime(broker).upkeep.freed_offset == 0
    agree(broker)
    assert reply_of(trimmed) == Done()
    assert runtime(broker).upkeep.freed_offset == 1


def test_what_is_stored_and_not_committed_is_unknown_when_storage_fails(broker: QueueEngine) -> None:
    committed = broker.publish(b"a")
    agree(broker)
    first = broker.publish(b"b")
    broker.log().fail_next(Full("no space is left"))
    second = broker.publish(b"c")
    assert [len(answers) for answers in (committed, first, second)] == [1, 1, 1]
    assert (refusal_of(first).outcome, refusal_of(second).outcome) == ("unknown", "none")
    runtime(broker).late = False
    broker.pass_s(3)
    assert broker.values() == [b"a", b"b"], "the log has it: it came back"
    third = broker.publish(b"d")
    assert reply_of(third) == Published(2, broker.clock.now_us())
    broker.restart()
    assert broker.values() == [b"a", b"b", b"d"]


def test_a_deleted_topic_refuses_what_was_not_committed(broker: QueueEngine) -> None:
    answers = broker.publish(b"a")
    broker.ask(DeleteTopic("t"))
    broker.settle()
    refusal = refusal_of(answers)
    assert (refusal.code, refusal.outcome) == ("not_found", "unknown")


def test_a_repaired_log_refuses_what_was_not_committed(broker: QueueEngine) -> None:
    answers = broker.publish(b"a")
    late = runtime(broker)
    late.damaged(Corrupt("a planted fault"), late.log)
    reopened: list[Any] = []
    late.reopen(late.open_log, lambda result, error: reopened.append(result))
    broker.settle()
    late.mended(*reopened[0])
    assert isinstance(reply_of(answers), Refusal)
    assert refusal_of(answers).outcome == "unknown"
    assert broker.values() == [b"a"]
