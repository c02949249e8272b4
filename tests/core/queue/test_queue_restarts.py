"""Groups on a partition: snapshots and replay give the same state, and decisions change nothing.

Covers `core/queue/ledger_snapshot.py`.
"""

from __future__ import annotations

from tailrace.core.model import internal_commands as inner
from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import TrimTopic
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tests.core.desk import SECOND, Desk, keyed, plain
from tests.core.turns import at

# --------------------------------------------------------------------------------------------------- restarts


def busy_desk() -> Desk:
    """A bit of everything."""
    desk = Desk(*keyed("abc-abc-abc-"), max_attempts=3)
    desk.do(inner.Enlist("other", GroupPolicy(assignment="shared", ordering="none")))
    desk.lease(count=4, lease_ms=1000)
    desk.lease(count=4)
    desk.ack(4, 5)
    desk.nack(5, 6, delay_ms=5000, error="no")
    desk.do(wire.RejectMessages("t", 0, "g", 2, [6, 7], "poison", "broken"))
    desk.wait(1)
    desk.publish(*keyed("abcabc"))
    desk.lease(count=3)
    desk.do(inner.LeaseRun("other", "eve", 0, 1 << 63, 7, 1 << 20, 18))
    desk.do(wire.Ack("t", 0, "other", [(1 << 63, [0, 2, 4, 7])]))
    desk.do(TrimTopic("t", 0, 1))
    return desk


def test_a_snapshot_and_a_replay_give_the_same_bytes() -> None:
    desk = busy_desk()
    image = b"".join(desk.partition.snapshot())
    replayed = Partition(TopicOptions())
    for fact in desk.facts:
        replayed.apply(fact)
    assert b"".join(replayed.snapshot()) == image
    restored = Partition.restore(TopicOptions(), [image])
    restored.check()
    assert b"".join(restored.snapshot()) == image


def test_a_restored_partition_goes_on_as_if_nothing_had_happened() -> None:
    desk = busy_desk()
    restored = Partition.restore(TopicOptions(), desk.partition.snapshot())
    twins = (desk.partition, restored)
    number = 100
    for step in range(60):
        desk.now_us += 700_000
        number += 1
        for command in (
            inner.ExpireLeases(),
            inner.LeaseRun("g", "ada", 1, number, 3, 1 << 20, 18, 2000),
            inner.LeaseRun("g", "ada", 1, 1000 + number, 1, 1 << 20, 18, 2000, alone=True),
            wire.Ack("t", 0, "g", [(1000 + number, [0, 18])]),
            wire.Nack("t", 0, "g", number, [0, 6], 500)
            if step % 3
            else wire.Ack("t", 0, "g", [(number, [0, 9])]),
            wire.Ack("t", 0, "g", [(number, [9, 18])]),
            inner.BuryDone("g", [0, 18], "t.dlq", []),
        ):
            decisions = [twin.decide(command, desk.turn()) for twin in twins]
            assert decisions[0].reply == decisions[1].reply
            assert decisions[0].facts == decisions[1].facts
            for twin, decision in zip(twins, decisions, strict=True):
                for fact in decision.facts:
                    twin.apply(fact)
        assert b"".join(twins[0].snapshot()) == b"".join(twins[1].snapshot())
    assert desk.partition.queues.committed("g") == 18, "everything is settled in the end"


def test_settled_messages_take_no_room() -> None:
    desk = Desk(*plain(5000))
    size = sum(len(buffer) for buffer in desk.partition.queues.buffers())
    for _ in range(50):
        spans = desk.lease(count=100)
        desk.ack(spans[0], spans[-1] + 1)
    desk.wait(31)
    desk.publish(*plain(1))
    desk.ack(*desk.lease(), 5001)
    assert sum(len(buffer) for buffer in desk.partition.queues.buffers()) < size + 100


def test_decide_only_reads() -> None:
    desk = busy_desk()
    before = desk.partition.snapshot()
    for later in (0, 90, 3600, 10):
        now_us = desk.now_us + later * SECOND
        for command in (
            inner.LeaseRun("g", "ada", 1, 999, 100, 1 << 20, 18),
            inner.ExpireLeases(),
            inner.GrantTo("g", "bob", 5),
            wire.Reopen("t", 0, "g", [4, 5]),
        ):
            first, second = (desk.partition.decide(command, at(now_us, desk.shelf)) for _ in range(2))
            assert (first.facts, first.reply) == (second.facts, second.reply)
    assert b"".join(desk.partition.snapshot()) == b"".join(before)
