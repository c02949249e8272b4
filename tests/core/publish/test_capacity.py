"""Ephemeral topics in the core: what may be collected, and rings that refuse or overwrite."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.core.model.commands import Done, Publish, Published, TrimTopic
from tailrace.core.model.facts import Appended, Fact, Released, Trimmed
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import HAS_DELIVER_AT, BatchView, Refusal
from tailrace.core.model.internal_commands import (
    ApplyStaged,
    Delist,
    Enlist,
    GrantTo,
    MoveCursor,
    PublishBatch,
    ReleaseDue,
    StageBatch,
    Sweep,
)
from tailrace.core.model.queue_commands import SettleOffsets
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tailrace.core.publish import capacity
from tailrace.core.staged.staged_batches import attempt_number
from tests.core.oracle import hashes
from tests.core.turns import at

T0 = 1_700_000_000_000_000
ROW = 100
GROUPS = ("a", "b", "stream")


class Life:
    """A partition of rows of equal size whose facts are kept, and a model of what its groups have settled."""

    def __init__(self, **options: Any) -> None:
        self.options = TopicOptions(ephemeral=True, **options)
        self.partition = Partition(self.options)
        self.facts: list[Any] = []
        self.now_us = T0
        self.groups: dict[str, set[int]] = {}
        """The offsets that each group has not settled."""
        self.lost: dict[str, int] = {}

    def do(self, command: Any) -> Any:
        partition = self.partition
        before = partition.snapshot()
        decision = partition.decide(command, at(self.now_us, next_entry=len(self.facts)))
        assert partition.snapshot() == before, "decide only reads"
        for fact in decision.facts:
            partition.apply(fact)
            if isinstance(fact, Appended):
                new = range(fact.base_offset, fact.base_offset + fact.view.count)
                for unsettled in self.groups.values():
                    unsettled.update(new)
            if isinstance(fact, Trimmed):
                for group, unsettled in self.groups.items():
                    gone = {offset for offset in unsettled if offset < fact.offset}
                    self.lost[group] += len(gone)
                    unsettled -= gone
        self.facts += decision.facts
        self.check()
        return decision.reply

    def check(self) -> None:
        """The ring is within its bounds, and groups are where the model has them."""
        partition = self.partition
        partition.check()
        held = partition.end_offset - partition.start_offset
        assert partition.ring.nbytes(partition.start_offset) == held * ROW
        assert held <= (self.options.max_messages or held)
        assert held * ROW <= (self.options.max_bytes or held * ROW)
        assert partition.queues.names() == list(self.groups)
        for group, unsettled in self.groups.items():
            assert partition.queues.committed(group) == min(unsettled, default=partition.end_offset)
            assert partition.queues.figures(group)["collected"] == self.lost[group]

    def needed(self) -> int:
        """The first offset that some group needs."""
        partition = self.partition
        ends = [min(unsettled, default=partition.end_offset) for unsettled in self.groups.values()]
        return max(min(ends, default=0), partition.start_offset)

    def publish(self, count: int) -> Any:
        return self.do(PublishBatch(Publish("t", 0, 0, 0), BatchView(count, 0, count * ROW, 0)))

    def enlist(self, group: str, start: str = "earliest") -> None:
        if group in self.groups:
            return
        partition = self.partition
        first = partition.end_offset if start == "latest" else partition.start_offset
        self.groups[group] = set(range(first, partition.end_offset))
        self.lost[group] = 0
        mode = "stream" if group == "stream" else "queue"
        partition_command = Enlist(group, GroupPolicy(mode=mode, start=start))
        decision = partition.decide(partition_command, at(self.now_us))
        for fact in decision.facts:
            partition.apply(fact)
        self.facts += decision.facts
        assert self.do(GrantTo(group, "m", 1)) == Done()

    def settle(self, group: str, offset: int, count: int) -> None:
        """Messages from an offset above the start; of a stream those before it, too."""
        if group not in self.groups:
            return
        partition, unsettled = self.partition, self.groups[group]
        first = min(partition.start_offset + offset, partition.end_offset)
        end = min(first + count, partition.end_offset)
        if group == "stream":
            unsettled.clear()
            unsettled.update(range(end, partition.end_offset))
            self.do(MoveCursor(group, "m", 1, end))
        elif first < end:
            unsettled -= set(range(first, end))
            self.do(SettleOffsets("t", 0, group, [first, end]))

    def delist(self, group: str) -> None:
        self.groups.pop(group, None)
        self.do(Delist(group))

    def sweep(self, retention_offset: int, committed: int) -> None:
        self.do(Sweep(retention_offset, min(committed, self.partition.end_offset)))

    def rebuilt(self) -> None:
        """All facts, and a snapshot, give the same state."""
        replayed = Partition(self.options)
        for fact in self.facts:
            stored = isinstance(fact, Fact)
            replayed.apply(
                msgspec.msgpack.decode(msgspec.msgpack.encode(fact), type=Fact) if stored else fact
            )
        image = self.partition.snapshot()
        assert replayed.snapshot() == image
        assert Partition.restore(self.options, image).snapshot() == image


NAMES = st.sampled_from(GROUPS)
ENLIST = st.tuples(st.just("enlist"), NAMES, st.sampled_from(["earliest", "earliest", "latest"]))
SETTLE = st.tuples(st.just("settle"), NAMES, st.sampled_from([0, 0, 0, 1, 3]), st.integers(1, 8))
DELIST = st.tuples(st.just("delist"), NAMES)
SWEEP = st.tuples(st.just("sweep"), st.just(0), st.sampled_from([1, 5, 1000, 1000]))
PUBLISH = st.tuples(st.just("publish"), st.integers(1, 6))
ACTS = PUBLISH | PUBLISH | SETTLE | SETTLE | SWEEP | ENLIST | DELIST
LIVES = st.lists(ACTS, min_size=15, max_size=50)
BOUNDS = st.sampled_from(
    [{"max_messages": 10}, {"max_bytes": 12 * ROW}, {"max_bytes": 800, "max_messages": 9}]
)


def most(options: TopicOptions) -> int:
    """Messages that the ring holds at most."""
    return min(options.max_messages or 1 << 60, (options.max_bytes or 1 << 60) // ROW)


@given(LIVES)
def test_without_limits_nothing_goes_that_a_group_needs(acts: list[tuple[Any, ...]]) -> None:
    life = Life()
    for name, *arguments in acts:
        start, needed = life.partition.start_offset, life.needed()
        getattr(life, name)(*arguments)
        after = life.partition.start_offset
        if name == "sweep":
            assert after == max(start, min(needed, arguments[1], life.partition.end_offset))
        else:
            assert after == start
        assert not any(life.lost.values())
    life.rebuilt()


@given(LIVES, BOUNDS)
def test_a_ring_that_refuses_loses_nothing_and_has_room_for_what_is_settled(
    acts: list[tuple[Any, ...]], bounds: dict[str, int]
) -> None:
    life = Life(**bounds)
    for name, *arguments in acts:
        room = most(life.options) - (life.partition.end_offset - life.needed())
        reply = getattr(life, name)(*arguments)
        if name == "publish":
            if arguments[0] <= room:
                assert isinstance(reply, Published)
            else:
                assert isinstance(reply, Refusal)
                assert (reply.code, reply.details) == ("overloaded", {"retry_after_ms": 100})
        assert not any(life.lost.values())
    life.rebuilt()


@given(LIVES, BOUNDS)
def test_a_ring_that_overwrites_takes_all_and_counts_what_it_drops(
    acts: list[tuple[Any, ...]], bounds: dict[str, int]
) -> None:
    life = Life(on_full="overwrite", **bounds)
    for name, *arguments in acts:
        end, start, needed = life.partition.end_offset, life.partition.start_offset, life.needed()
        reply = getattr(life, name)(*arguments)
        if name == "publish":
            assert isinstance(reply, Published)
            must_go = end + arguments[0] - most(life.options)
            wanted = max(must_go, needed) if must_go > start else start
            assert life.partition.start_offset == wanted, "no more goes than has to, and what is settled"
    life.rebuilt()


@settings(max_examples=10)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=300), st.lists(st.integers(1, 60), max_size=20))
def test_bytes_of_very_many_batches(sizes: list[int], trims: list[int]) -> None:
    life = Partition(TopicOptions())
    total = 0
    for number in range(4 * capacity.CAPACITY_RUNS_MAX):
        size = sizes[number % len(sizes)]
        life.apply(Appended(number, BatchView(1, 0, size, 0), T0))
        total += size
    assert life.ring.nbytes(0) == total
    life.check()
    exact = [sizes[number % len(sizes)] for number in range(4 * capacity.CAPACITY_RUNS_MAX)]
    for offset in range(0, len(exact), 97):
        assert (
            abs(life.ring.nbytes(offset) - sum(exact[offset:]))
            <= 4 * total / capacity.CAPACITY_RUNS_MAX + 5000
        )
    for step in trims:
        before = life.ring.nbytes(life.start_offset + step)
        life.apply(Trimmed(life.start_offset + step))
        assert life.ring.nbytes(life.start_offset) == life.ring.nbytes(0) == before
    life.check()
    image = life.snapshot()
    assert Partition.restore(TopicOptions(), image).snapshot() == image


def test_what_is_larger_than_the_ring_never_fits() -> None:
    for on_full in ("refuse", "overwrite"):
        life = Life(max_messages=5, max_bytes=1000, on_full=on_full)
        reply = life.publish(6)
        assert (reply.code, reply.details) == ("too_large", {"size": 6, "limit": 5})
        reply = life.do(PublishBatch(Publish("t", 0, 0, 0), BatchView(1, 0, 1001, 0)))
        assert (reply.code, reply.details) == ("too_large", {"size": 1001, "limit": 1000})
        assert isinstance(life.publish(5), Published)


def test_a_full_ring_without_a_group_says_so() -> None:
    life = Life(max_messages=2)
    life.publish(2)
    assert "no group is enlisted" in life.publish(1).message
    life.enlist("a", "latest")
    assert life.publish(1) == Published(2, T0)
    assert life.partition.start_offset == 2


def test_a_refused_batch_keeps_its_number_and_a_retry_its_result() -> None:
    life = Life(max_messages=2)
    life.enlist("a")
    batch = BatchView(2, 0, 2 * ROW, 0)
    first, second = (PublishBatch(Publish("t", 0, 0, 0, 7, 0, number), batch) for number in (0, 1))
    assert life.do(first) == Published(0, T0)
    assert life.do(second).code == "overloaded"
    assert life.do(first) == Published(0, T0), "a retry is answered however full it is"
    life.settle("a", 0, 1)
    assert life.do(second).code == "overloaded"
    life.settle("a", 0, 2)
    assert life.do(second) == Published(2, T0)


def test_limits_beside_it_take_what_is_not_settled_and_count_it() -> None:
    life = Life(retention_count=3)
    life.enlist("a")
    life.publish(5)
    life.settle("a", 0, 1)
    life.sweep(2, 5)
    assert (life.partition.start_offset, life.lost["a"]) == (2, 1)
    assert life.do(TrimTopic("t", 0, 4)) == Done()
    assert life.lost["a"] == 3


def test_forever_again_collects_nothing_more() -> None:
    life = Life()
    life.enlist("a")
    life.publish(5)
    life.settle("a", 0, 5)
    life.partition.reconfigure(TopicOptions())
    life.sweep(0, 5)
    assert life.partition.start_offset == 0
    life.partition.reconfigure(TopicOptions(ephemeral=True))
    life.sweep(0, 5)
    assert life.partition.start_offset == 5


def delayed(life: Life, count: int) -> Any:
    times = hashes([str(number) for number in range(count)]).view("i8")[:, 0].copy()
    times[:] = life.now_us + 1000
    ids = hashes([str(number) for number in range(count)])
    batch = BatchView(count, HAS_DELIVER_AT, count * ROW, 0, deliver_at_us=times, ids=ids)
    return life.do(PublishBatch(Publish("t", 0, HAS_DELIVER_AT, 0), batch))


def release(life: Life, count: int) -> Any:
    refs, until_us, until_ref = life.partition.timetable.due(life.now_us, count)
    batch = BatchView(len(refs), HAS_DELIVER_AT, len(refs) * ROW, 0)
    return life.do(ReleaseDue(batch, 0, until_us, until_ref, refs))


@pytest.mark.parametrize("on_full", ["refuse", "overwrite"])
def test_delayed_messages_count_when_they_are_released(on_full: str) -> None:
    life = Life(max_messages=3, on_full=on_full)
    life.enlist("a")
    life.publish(3)
    assert delayed(life, 4).scheduled == [0, 1, 2, 3]
    life.now_us += 1000
    reply = release(life, 2)
    if on_full == "refuse":
        assert (reply.code, len(life.partition.timetable)) == ("overloaded", 4)
        assert life.partition.ring.room() == (0, capacity.ANY)
        life.settle("a", 0, 2)
        assert life.partition.ring.room() == (2, capacity.ANY)
        reply = release(life, 2)
    assert reply == Published(3, life.now_us)
    assert [type(fact) for fact in life.facts[-3:]] == [Appended, Released, Trimmed]
    assert life.partition.start_offset == 2
    assert life.lost["a"] == (0 if on_full == "refuse" else 2)
    life.rebuilt()


def test_a_decided_write_larger_than_the_ring_waits_until_it_is_empty() -> None:
    life = Life(max_messages=3)
    life.enlist("a")
    batch = BatchView(2, 0, 2 * ROW, 0)
    assert life.do(StageBatch("w", "x", BatchView(4, 0, 4 * ROW, 0), 0)).code == "too_large"
    assert life.do(StageBatch("w", "x", batch, 0, 0)) == Done()
    assert life.do(StageBatch("w", "x", batch, 0, 1)) == Done()
    life.publish(1)
    entries = life.partition.staging.entries([attempt_number("w", "x")])
    applying = ApplyStaged("w", 1, ["x"], entries, [batch, batch], [0, 0], [b"", b""])
    assert life.do(applying).code == "overloaded"
    life.options = TopicOptions(ephemeral=True)  # The model knows no exceptions.
    life.settle("a", 0, 1)
    assert life.do(applying) == Done()
    assert (life.partition.start_offset, life.partition.end_offset) == (1, 5)
    assert life.publish(1).code == "overloaded"
