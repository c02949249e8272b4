"""Delayed messages of a partition: publish, release, cancel, dedup, retries, and every way to rebuild it.

Also covers `core/delay/cancelled_ids.py` and `core/publish/delayed_dedup.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.collections.timing_wheel import TICK_US, ref_of
from tailrace.core.delay import cancelled_ids
from tailrace.core.model.commands import Done, Publish, Published
from tailrace.core.model.decision import Decision
from tailrace.core.model.facts import Appended, Delayed, Fact, Released, ScheduleCancelled
from tailrace.core.model.identifiers import HAS_DEDUP_ID, HAS_DELIVER_AT, BatchView, Refusal
from tailrace.core.model.internal_commands import PublishBatch, ReleaseDue
from tailrace.core.model.queue_commands import Cancelled, CancelScheduled
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tests.core.oracle import hashes
from tests.core.turns import at
from tests.mixtures import mixtures

T0 = 1_700_000_000_000_000
S = 1_000_000
WINDOW_MS = 120_000


def view(times: list[int], *, first_id: int = 1, dedup_ids: list[str | None] | None = None) -> BatchView:
    """A batch with these times of delivery; its ids count up."""
    ids = np.array([(7, first_id + row) for row in range(len(times))], np.uint64)
    columns = HAS_DELIVER_AT | (HAS_DEDUP_ID if dedup_ids else 0)
    return BatchView(
        len(times),
        columns,
        100 * len(times),
        T0,
        dedup_ids=hashes(dedup_ids) if dedup_ids else None,
        deliver_at_us=np.array(times, np.int64),
        ids=ids,
    )


class Life:
    """A partition, its facts, and what a shell does with it."""

    def __init__(self) -> None:
        self.partition = Partition(TopicOptions())
        self.facts: list[Any] = []
        self.entry = 0
        self.now_us = T0
        self.skew_us = 0
        """How far the wall clock is ahead of the partition's."""
        self.dedup_ids: dict[int, str | None] = {}
        """Of what was ever delayed, by ref."""

    def decide(self, command: Any) -> Decision:
        before = self.partition.snapshot()
        turn = at(self.now_us, next_entry=self.entry, wall_us=self.wall_us)
        decision = self.partition.decide(command, turn)
        assert self.partition.snapshot() == before, "decide only reads"
        return decision

    @property
    def wall_us(self) -> int:
        return self.now_us + self.skew_us

    def do(self, command: Any) -> Any:
        decision = self.decide(command)
        for fact in decision.facts:
            self.partition.apply(fact)
            self.facts.append(fact)
            self.entry += 1
        self.partition.check()
        return decision.reply

    def publish(
        self, *delays: int, first_id: int = 1, dedup_ids: list[str | None] | None = None, **options: Any
    ) -> Any:
        times = [self.wall_us + delay for delay in delays]
        batch = view(times, first_id=first_id, dedup_ids=dedup_ids)
        entry = self.entry
        reply = self.do(PublishBatch(Publish("t", 0, batch.columns, 0, **options), batch))
        if isinstance(reply, Published) and dedup_ids is not None:
            for place, row in enumerate(reply.scheduled or ()):
                self.dedup_ids[ref_of(entry, place)] = dedup_ids[row]
        return reply

    def releasable(self, limit: int = 1000) -> ReleaseDue | None:
        refs, until_us, until_ref = self.partition.timetable.due(self.wall_us, limit)
        if not len(refs):
            return None
        ids = [self.dedup_ids.get(ref) for ref in refs.tolist()]
        batch = view([0] * len(refs), dedup_ids=ids if any(ids) else None)
        return ReleaseDue(batch, 0, until_us, until_ref, refs)

    def release(self, limit: int = 1000) -> list[int]:
        """Refs of what was released."""
        command = self.releasable(limit)
        if command is None:
            return []
        reply = self.do(command)
        assert isinstance(reply, Published)
        assert command.refs is not None
        return [int(ref) for ref in command.refs]

    def cancel(self, *numbers: int, hints: list[int] | None = None) -> list[bool]:
        ids = [(7).to_bytes(8, "big") + number.to_bytes(8, "big") for number in numbers]
        reply = self.do(CancelScheduled("t", 0, ids, hints or []))
        assert isinstance(reply, Cancelled)
        return reply.done

    def rebuilt(self) -> list[Partition]:
        """From all facts, and from a snapshot of now."""
        replayed = Partition(TopicOptions())
        for fact in self.facts:
            replayed.apply(fact)
        return [replayed, Partition.restore(TopicOptions(), [b"".join(self.partition.snapshot())])]


def test_a_delayed_batch_has_no_offsets_until_it_is_due() -> None:
    life = Life()
    assert life.publish(5 * S, 2 * S) == Published(-1, T0, None, [0, 1])
    assert life.partition.end_offset == 0
    assert life.partition.timetable.next_due_us() == T0 + 2 * S
    life.now_us += 2 * S - 1
    assert life.release() == [], "never early"
    life.now_us += 1
    assert life.release() == [ref_of(0, 1)]
    assert life.partition.end_offset == 1
    life.now_us += 3 * S
    assert life.release() == [ref_of(0, 0)]
    assert life.partition.timetable.next_due_us() is None
    assert [type(fact) for fact in life.facts] == [Delayed, Appended, Released, Appended, Released]
    assert all(fact.released for fact in life.facts if isinstance(fact, Appended))


def test_what_is_due_in_the_past_is_due_now() -> None:
    life = Life()
    assert life.publish(0, -5 * S) == Published(0, T0)
    assert [type(fact) for fact in life.facts] == [Appended]
    reply = life.publish(0, S, -1, 1)
    assert reply == Published(2, T0, None, [1, 3])
    scheduled, appended = life.facts[1:]
    assert (scheduled.view.count, scheduled.entry, appended.view.count) == (2, 1, 2)
    assert scheduled.view.deliver_at_us.tolist() == [T0 + S, T0 + 1]
    assert life.partition.end_offset == 4


def test_rows_of_a_mixed_batch_go_to_their_frames() -> None:
    life = Life()
    batch = view([T0, T0 + S, T0, T0 + S], dedup_ids=["a", "b", "a", "c"])
    decision = life.decide(PublishBatch(Publish("t", 0, batch.columns, 0), batch))
    assert decision.keep is not None
    assert decision.late is not None
    assert (decision.keep.tolist(), decision.late.tolist()) == ([0], [1, 3])
    assert decision.reply == Published(0, T0, [(2, 0)], [1, 3])


def test_a_delay_beyond_all_bounds() -> None:
    life = Life()
    life.publish(200 * 365 * 86_400 * S, 1)
    life.now_us += TICK_US
    assert life.release() == [ref_of(0, 1)]
    life.now_us += 200 * 365 * 86_400 * S
    assert life.release() == [ref_of(0, 0)]


def test_nobody_can_expect_a_place_for_a_delayed_message() -> None:
    life = Life()
    for expected in ({"expected_sequence": 1}, {"expected_key_sequences": [0]}):
        reply = life.publish(S, **expected)
        assert isinstance(reply, Refusal)
        assert reply.code == "invalid_request"
    assert life.publish(-1, expected_sequence=1) == Published(0, T0)
    assert life.publish(S, expected_key_sequences=[-1]) == Published(-1, T0, None, [0])


def test_cancel_is_permanent_and_idempotent() -> None:
    life = Life()
    life.publish(S, S, 2 * S)
    assert life.cancel(2, 99) == [True, False]
    assert life.cancel(2) == [True]
    assert life.cancel(3, hints=[T0 + 2 * S]) == [True]
    assert life.cancel(1, hints=[T0 + 2 * S]) == [False], "another time, another message"
    assert [type(fact) for fact in life.facts] == [Delayed, ScheduleCancelled, ScheduleCancelled]
    life.now_us += 5 * S
    assert life.release() == [ref_of(0, 0)]
    assert life.partition.timetable.next_due_us() is None
    assert life.cancel(1, 2, 3) == [False, True, True], "its time has passed, and it is still cancelled"
    life.publish(S, first_id=50)
    life.now_us += 5 * S
    life.release()
    life.partition = Partition.restore(TopicOptions(), [b"".join(life.partition.snapshot())])
    assert life.cancel(1, 2, 3, 50, 99) == [False, True, True, False, False]


def test_only_the_latest_cancelled_messages_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cancelled_ids, "CANCELLED_KEPT_MIN", 3)
    life = Life()
    for number in range(1, 12):
        life.publish(S, first_id=number)
        assert life.cancel(number) == [True]
        life.now_us += 5 * S
        assert len(life.partition.timetable.cancelled) < 2 * 3 + 1
        assert life.cancel(*range(1, number + 1))[-3:] == [True] * min(number, 3)
    assert life.cancel(1, 2) == [False, False], "forgotten: there is a bound"
    for other in life.rebuilt():
        assert other.snapshot() == life.partition.snapshot()


def test_a_cancel_while_a_bucket_drains_leaves_the_rest() -> None:
    life = Life()
    life.publish(*[S] * 10)
    life.now_us += S
    assert life.release(limit=3) == [ref_of(0, row) for row in range(3)]
    command = life.releasable(limit=3)
    assert life.cancel(5, 9) == [True, True]
    assert life.do(command) == Done(), "it would have made a cancelled message visible"
    assert life.cancel(2) == [False], "it is out already"
    assert life.release() == [ref_of(0, row) for row in (3, 5, 6, 7, 9)]
    assert life.partition.end_offset == 8


def test_a_release_that_misses_a_newcomer_does_not_happen() -> None:
    life = Life()
    life.publish(2)
    life.publish(5)
    life.now_us += 1
    life.publish(2, first_id=50)
    life.now_us += 10
    _, until_us, until_ref = life.partition.timetable.due(life.now_us, 10)
    stale = ReleaseDue(view([0, 0]), 0, until_us, until_ref, np.array([ref_of(0, 0), ref_of(1, 0)]))
    assert life.do(stale) == Done()
    assert len(life.release()) == 3


def test_bad_cancels_are_refused() -> None:
    life = Life()
    for ids, hints in (([b"short"], []), ([], []), ([bytes(16)], [1, 2])):
        reply = life.do(CancelScheduled("t", 0, ids, hints))
        assert isinstance(reply, Refusal)
        assert reply.code == "invalid_request"


def test_dedup_ids_count_from_when_they_were_scheduled() -> None:
    life = Life()
    assert life.publish(300 * S, dedup_ids=["a"]) == Published(-1, T0, None, [0])
    assert life.publish(0, dedup_ids=["a"]) == Published(-1, T0, [(0, -1)])
    assert life.publish(9 * S, dedup_ids=["a"]) == Published(-1, T0, [(0, -1)])
    assert life.publish(0, dedup_ids=["b"]) == Published(0, T0)
    assert life.publish(S, S, dedup_ids=["b", "c"]) == Published(-1, T0, [(0, 0)], [1])
    life.now_us += WINDOW_MS * 1000 - 1
    assert life.publish(0, dedup_ids=["a"]).duplicates == [(0, -1)]
    life.now_us += 1
    assert life.publish(0, dedup_ids=["a"]) == Published(1, life.now_us)
    life.now_us += 200 * S
    assert life.release() == [ref_of(2, 0), ref_of(0, 0)], "its id came again later, but it was accepted"


def test_a_duplicate_of_a_released_message_is_told_its_offset() -> None:
    life = Life()
    life.publish(0, 0)
    assert life.publish(S, 2 * S, dedup_ids=["a", "b"]).scheduled == [0, 1]
    life.now_us += S
    life.release()
    assert life.publish(0, dedup_ids=["a"]) == Published(2, life.now_us, [(0, 2)])
    assert life.publish(S, S, dedup_ids=["b", "a"]).duplicates == [(0, -1), (1, 2)]
    for again in life.rebuilt():
        life.partition = again
        assert life.publish(0, dedup_ids=["a"]).duplicates == [(0, 2)]
    life.now_us = T0 + WINDOW_MS * 1000
    assert life.publish(300 * S, dedup_ids=["a"]).scheduled == [0], "its window is over"
    assert life.publish(0, dedup_ids=["a"]).duplicates == [(0, -1)], "the new one still waits"


def test_only_released_ids_that_still_count_take_memory() -> None:
    life = Life()
    life.publish(1000 * S, S, dedup_ids=["old", "young"])
    life.now_us += S
    life.release()
    life.now_us += 1000 * S
    life.release()
    assert life.partition.end_offset == 2
    assert life.partition.timetable.dedup.landed() == 1


def test_the_window_is_full_whoever_fills_it() -> None:
    partition = Life()
    partition.partition = Partition(TopicOptions(dedup_max=3))
    assert partition.publish(S, S, dedup_ids=["a", "b"]).scheduled == [0, 1]
    assert partition.publish(0, dedup_ids=["c"]).base_offset == 0
    reply = partition.publish(0, dedup_ids=["d"])
    assert isinstance(reply, Refusal)
    assert (reply.code, reply.details["limit"]) == ("overloaded", 3)
    assert 0 < reply.details["retry_after_ms"] <= WINDOW_MS
    partition.now_us += WINDOW_MS * 1000
    assert partition.publish(0, dedup_ids=["d"]).base_offset == 1


def test_a_retry_of_an_idempotent_producer_gets_the_first_answer() -> None:
    life = Life()
    batches: list[tuple[list[int], list[str | None] | None]] = [
        ([S, 2 * S], None),
        ([0, S, 0], None),
        ([S, S], ["a", None]),
        ([S, 0, S], ["a", "b", "c"]),
        ([0, S, S, 0], ["b", "c", "d", "e"]),
        ([0, 0], None),
        ([S, S], ["a", "c"]),
        ([S, 0], ["x", "b"]),
    ]
    answers = []
    for number, (delays, ids) in enumerate(batches):
        batch = view([T0 + delay for delay in delays], first_id=100 * number, dedup_ids=ids)
        publish = Publish("t", 0, batch.columns, 0, 5, 0, number)
        answers.append((PublishBatch(publish, batch), life.do(PublishBatch(publish, batch))))
        life.now_us += 10
    assert all(isinstance(reply, Published) for _, reply in answers)
    for later_us in (0, 500_000, 10 * S):
        life.now_us += later_us
        life.release()
        for command, reply in answers:
            decision = life.decide(command)
            assert decision.facts == ()
            assert decision.reply == reply, command.publish.producer_sequence


def test_the_oldest_frame_that_waits_is_the_floor() -> None:
    life = Life()
    assert life.partition.lowest_entry() is None
    life.publish(S)
    life.publish(9 * S, first_id=10)
    life.publish(5 * S, first_id=20)
    assert life.partition.lowest_entry() == 0
    life.now_us += S
    life.release()
    assert life.partition.lowest_entry() == 1
    life.cancel(10)
    assert life.partition.lowest_entry() == 2
    life.cancel(20)
    assert life.partition.lowest_entry() is None


def test_a_retry_is_told_the_same_of_released_messages() -> None:
    life = Life()
    life.publish(S, dedup_ids=["a"])
    life.now_us += S
    life.release()
    batch = view([T0 + 5 * S, T0 + 5 * S], first_id=50, dedup_ids=["a", "b"])
    command = PublishBatch(Publish("t", 0, batch.columns, 0, 5, 0, 0), batch)
    reply = life.do(command)
    assert reply == Published(-1, life.now_us, [(0, 0)], [1])
    life.now_us += 10 * S
    life.release()
    assert life.decide(command).reply == reply


DELAYS = st.integers(-1, 5) | st.sampled_from([9_999, 10_000, 640_000, 5 * S, 3600 * S])
PUBLISHING = st.tuples(st.just("publish"), st.lists(DELAYS, min_size=1, max_size=4), st.integers(0, 12))
OTHERS = (
    st.tuples(st.just("pass"), st.sampled_from([0, 1, 9_999, S, 60 * S, 4000 * S]), st.just(0)),
    st.tuples(st.just("release"), st.sampled_from([1, 3, 1000]), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(1, 60), st.just(0)),
)
PLAYS = mixtures([PUBLISHING], OTHERS, 5, 40)


@given(PLAYS, st.integers(0, 40))
def test_any_life_can_be_rebuilt_and_releases_each_message_once_in_order(life_: list[Any], cut: int) -> None:
    life, waiting, dead, number = Life(), dict[int, tuple[int, int]](), set[int](), 1
    middle, rest = life.partition.snapshot(), 0
    for step, (act, what, more) in enumerate(life_):
        if step == cut:
            middle, rest = [bytes(part) for part in life.partition.snapshot()], len(life.facts)
        if act == "publish":
            ids = [str(more + row) if more < 8 else None for row in range(len(what))]
            entry = life.entry
            reply = life.publish(*what, first_id=number, dedup_ids=ids if more < 8 else None)
            for place, row in enumerate(reply.scheduled or ()):
                waiting[ref_of(entry, place)] = life.now_us + what[row], number + row
            number += len(what)
        elif act == "pass":
            life.now_us += what
        elif act == "release":
            due = sorted((at, ref) for ref, (at, _) in waiting.items() if at <= life.now_us)[:what]
            assert life.release(what) == [ref for _, ref in due]
            for _, ref in due:
                del waiting[ref]
        else:
            refs = [ref for ref, (_, name) in waiting.items() if name == what]
            done = life.cancel(what)
            assert done == [bool(refs) or what in dead], "cancelled once, cancelled for good"
            for ref in refs:
                del waiting[ref]
                dead.add(what)
    assert len(life.partition.timetable) == len(waiting)
    resumed = Partition.restore(TopicOptions(), middle)
    for fact in life.facts[rest:]:
        resumed.apply(_stored(fact))
    for other in (*life.rebuilt(), resumed):
        other.check()
        assert other.snapshot() == life.partition.snapshot()


def _stored(fact: Any) -> Any:
    """A small fact as it comes back from the log."""
    if isinstance(fact, Appended | Delayed):
        return fact
    return msgspec.msgpack.decode(msgspec.msgpack.encode(fact), type=Fact)


@given(PLAYS)
def test_duplicates_are_told_where_the_first_one_is(plays: list[Any]) -> None:
    life, offsets, first, number = Life(), dict[int, int](), dict[str, tuple[int, int | None, int]](), 1
    # `first` has by id: when it was taken, its offset or None, and its ref.
    for act, what, more in plays:
        if act == "publish":
            ids = [str((more + row) % 8) for row in range(len(what))]
            entry, end = life.entry, life.partition.end_offset
            reply = life.publish(*what, first_id=number, dedup_ids=[*ids])
            told, late = dict(reply.duplicates or ()), 0
            for row, (name, delay) in enumerate(zip(ids, what, strict=True)):
                time_us, offset, ref = first.get(name, (T0 - WINDOW_MS * 1000, None, -1))
                if life.now_us - time_us < WINDOW_MS * 1000:
                    assert told.pop(row) == (offsets.get(ref, -1) if offset is None else offset)
                elif delay > 0:
                    first[name] = life.now_us, None, ref_of(entry, late)
                    late += 1
                else:
                    first[name], end = (life.now_us, end, -1), end + 1
            assert not told
            number += len(what)
        elif act == "pass":
            life.now_us += what
        elif act == "release":
            end = life.partition.end_offset
            offsets.update((ref, end + row) for row, ref in enumerate(life.release(what)))
        else:
            life.cancel(what)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("publish"), st.lists(st.integers(-2 * S, 20 * S), min_size=1, max_size=5)),
            st.tuples(st.just("pass"), st.integers(0, 10 * S)),
            st.tuples(st.just("wall"), st.sampled_from((-3600 * S, -5 * S, 0, 5 * S, 3600 * S))),
            st.tuples(st.just("release"), st.integers(1, 4)),
            st.tuples(st.just("cancel"), st.integers(1, 20)),
        ),
        max_size=40,
    )
)
def test_messages_are_due_by_the_wall_clock_wherever_the_partition_is(story: list[tuple[str, Any]]) -> None:
    """The wall clock jumps at will: nothing is released before it shows its time, nothing is left behind."""
    life, due, number = Life(), dict[int, int](), 1
    for act, value in story:
        if act == "publish":
            entry = life.entry
            reply = life.publish(*value, first_id=number)
            assert reply.scheduled == ([row for row, delay in enumerate(value) if delay > 0] or None)
            for place, row in enumerate(reply.scheduled or ()):
                due[ref_of(entry, place)] = life.wall_us + value[row]
            number += len(value)
        elif act == "pass":
            life.now_us += value
        elif act == "wall":
            life.skew_us = value
        elif act == "cancel":
            life.cancel(value)
            waiting = {int(ref) for ref in life.partition.timetable.wheel.first(1 << 62, 1000)[:, 1]}
            due = {ref: at_us for ref, at_us in due.items() if ref in waiting}
        else:
            ready = sorted((at_us, ref) for ref, at_us in due.items() if at_us <= life.wall_us)
            assert life.release(value) == [ref for _, ref in ready[:value]]
            for _, ref in ready[:value]:
                del due[ref]
    assert len(life.partition.timetable) == len(due)
    for again in life.rebuilt():
        assert again.snapshot() == life.partition.snapshot()
