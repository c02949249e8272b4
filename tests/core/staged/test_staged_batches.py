"""Staged writes in the core: applied at most once and in order, refusals, and rebuilding the state.

Also covers `core/staged/staged_versions.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.collections.timing_wheel import AT, NEVER, REF, ROW_BITS
from tailrace.core.model import group_facts
from tailrace.core.model.commands import Done
from tailrace.core.model.facts import Appended, Delayed, Fact, StageApplied, Staged, StageDropped
from tailrace.core.model.group_facts import Target
from tailrace.core.model.identifiers import HAS_DEDUP_ID, HAS_DELIVER_AT, HAS_KEY, BatchView, Refusal
from tailrace.core.model.internal_commands import ApplyStaged, CheckStaged, DropStaged, ReleaseDue, StageBatch
from tailrace.core.model.queue_commands import DecideStaged, StagedDecision
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tailrace.core.staged import staged_batches, staged_versions
from tailrace.core.staged.staged_batches import attempt_number
from tailrace.core.staged.staged_versions import (
    ChooseStaged,
    FinishStaged,
    StagedVersions,
    grouped_of,
    targets_of,
)
from tests.core.turns import at
from tests.mixtures import mixtures

T0 = 1_700_000_000_000_000
HOUR_US = 3_600_000_000
WEEK_US = 7 * 24 * HOUR_US


def view(count: int = 1, nbytes: int = 100, columns: int = 0, **fields: Any) -> BatchView:
    return BatchView(count, columns, nbytes, T0, **fields)


def delayed(*times_us: int) -> BatchView:
    """Messages with a time each."""
    count = len(times_us)
    ids = np.arange(2 * count, dtype=np.uint64).reshape(-1, 2)
    return view(count, columns=HAS_DELIVER_AT, deliver_at_us=np.array(times_us, np.int64), ids=ids)


def parts_of(batch: BatchView, now_us: int) -> list[BatchView]:
    """A staged batch as the shell hands it back: rows that wait and rows that are due apart."""
    if batch.deliver_at_us is None:
        return [batch]
    late = batch.deliver_at_us > now_us
    pieces = [batch.take(np.flatnonzero(late)), batch.take(np.flatnonzero(~late))]
    return [piece for piece in pieces if piece.count]


class Life:
    """A partition whose facts are kept, each with the frame index that the shell would have given it."""

    def __init__(self, **options: Any) -> None:
        self.options = TopicOptions(**options)
        self.partition = Partition(self.options)
        self.facts: list[Any] = []
        self.now_us = T0

    def do(self, command: Any) -> Any:
        turn = at(self.now_us, next_entry=len(self.facts))
        before = self.partition.snapshot()
        decision = self.partition.decide(command, turn)
        assert self.partition.snapshot() == before, "decide only reads"
        for fact in decision.facts:
            self.partition.apply(fact)
            self.facts.append(fact)
        self.partition.check()
        return decision.reply

    def stage(
        self, attempt: str, number: int = 0, *, writer: str = "w", batch: BatchView | None = None
    ) -> Any:
        return self.do(StageBatch(writer, attempt, batch or view(), 7, number))

    def apply(self, version: int, *attempts: str, writer: str = "w") -> Any:
        stored = self.partition.staging.entries(attempt_number(writer, name) for name in attempts)
        views = [part for entry in stored for part in parts_of(self.facts[entry].view, self.now_us)]
        return self.do(
            ApplyStaged(writer, version, list(attempts), stored, views, [7] * len(views), [b""] * len(views))
        )

    def release(self) -> int:
        """Give offsets to all that is due; how many there were."""
        refs, until_us, until_ref = self.partition.timetable.due(self.now_us, 1000)
        if len(refs):
            self.do(ReleaseDue(view(len(refs)), 7, until_us, until_ref, refs))
        return len(refs)

    def drop(self, *attempts: str) -> Any:
        return self.do(DropStaged([attempt_number("w", name) for name in attempts]))

    def rebuilt(self, cut: int = 0) -> Partition:
        partition = Partition(self.options)
        for number, fact in enumerate(self.facts):
            if number == cut:
                partition = Partition.restore(self.options, partition.snapshot())
            if not isinstance(fact, Appended | Delayed | Staged):
                fact = msgspec.msgpack.decode(msgspec.msgpack.encode(fact), type=Fact)
            partition.apply(fact)
        return partition


def code(reply: Any) -> str | None:
    return reply.code if isinstance(reply, Refusal) else None


def test_staged_rows_get_offsets_only_when_their_version_is_applied() -> None:
    life = Life()
    assert life.stage("a") == Done()
    assert life.stage("a", 1) == Done()
    assert life.partition.end_offset == 0
    assert life.apply(3, "a") == Done()
    assert life.partition.end_offset == 2
    kinds = [type(fact) for fact in life.facts]
    assert kinds == [Staged, Staged, Appended, Appended, StageApplied]
    assert [fact.released for fact in life.facts[2:4]] == [True, True]
    assert life.partition.staging.lowest_entry() is None
    assert life.partition.staging.nbytes == 0


def test_a_version_is_applied_once() -> None:
    life = Life()
    life.stage("a")
    life.apply(3, "a")
    life.stage("a")
    assert life.apply(3, "a") == Done()
    assert life.apply(2, "a") == Done()
    assert life.partition.end_offset == 1
    life.apply(4, "a")
    assert life.partition.end_offset == 2
    assert life.partition.staging.applied_version("w") == 4


def test_a_batch_that_is_sent_again_is_not_stored_twice() -> None:
    life = Life()
    life.stage("a")
    life.stage("a", 1)
    facts = len(life.facts)
    assert life.stage("a") == Done()
    assert life.stage("a", 1) == Done()
    assert len(life.facts) == facts


def test_a_gap_in_an_attempt_is_refused() -> None:
    life = Life()
    assert code(life.stage("a", 1)) == "not_found"
    life.stage("a")
    assert life.stage("a", 2).details == {"batches": 1}
    assert code(life.stage("a", -1)) == "not_found"


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (view(columns=HAS_DEDUP_ID, dedup_ids=np.ones((1, 2), np.uint64)), "invalid_request"),
        (view(value_bytes_max=1 << 30), "too_large"),
        (BatchView(1, 0, 100, T0 + 2 * HOUR_US), "invalid_request"),
    ],
)
def test_what_cannot_be_staged_is_refused(batch: BatchView, expected: str) -> None:
    life = Life()
    assert code(life.stage("a", batch=batch)) == expected
    assert life.facts == []


@pytest.mark.parametrize("name", ["", "x" * 246, "a\nb", "\ud800"])
def test_names_are_checked(name: str) -> None:
    life = Life()
    assert code(life.stage(name)) == "invalid_request"
    assert code(life.stage("a", writer=name)) == "invalid_request"


def test_names_that_join_to_the_same_text_are_different() -> None:
    assert attempt_number("ab", "c") != attempt_number("a", "bc")


def test_staged_bytes_are_bounded_and_come_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged_batches, "STAGED_BYTES_MAX", 2000)
    monkeypatch.setattr(staged_batches, "BATCH_COST", 512)
    life = Life()
    assert life.stage("a", batch=view(nbytes=1200)) == Done()
    assert code(life.stage("b", batch=view(nbytes=900))) == "overloaded"
    assert life.stage("b", batch=view(nbytes=1)) == Done()
    assert code(life.stage("b", 1, batch=view(nbytes=1))) == "overloaded"
    life.drop("a")
    assert life.stage("b", 1, batch=view(nbytes=900)) == Done()


def test_keys_are_counted_when_rows_are_appended() -> None:
    life = Life(key_index=True, key_index_max=2)
    keys = np.array([[1, 2], [3, 4]], np.uint64)
    batch = view(2, columns=HAS_KEY, keys=keys)
    life.stage("a", batch=batch)
    assert life.partition.keys is not None
    assert len(life.partition.keys) == 0
    number = attempt_number("w", "a")
    assert len(life.partition.staging.entries([number])) == 1
    life.apply(1, "a")
    assert len(life.partition.keys) == 2
    other = np.array([[5, 6]], np.uint64)
    assert code(life.stage("b", batch=view(columns=HAS_KEY, keys=other))) == "overloaded"


def test_what_changed_since_it_was_read_is_not_applied() -> None:
    life = Life()
    life.stage("a")
    assert code(life.do(ApplyStaged("w", 1, ["a"], [], [], [], []))) == "unavailable"
    assert code(life.do(ApplyStaged("w", 1, ["a"], [5], [view()], [7], [b""]))) == "unavailable"
    assert life.partition.end_offset == 0


def test_delayed_rows_wait_for_their_time_after_their_version_is_applied() -> None:
    life = Life()
    soon, late = T0 + 1000, T0 + HOUR_US
    life.stage("a")
    life.stage("a", 1, batch=delayed(late, soon, T0, late))
    assert len(life.partition.timetable) == 0
    assert life.apply(1, "a") == Done()
    assert [type(fact) for fact in life.facts] == [
        Staged,
        Staged,
        Appended,
        Delayed,
        Appended,
        StageApplied,
    ]
    assert (life.partition.end_offset, len(life.partition.timetable)) == (2, 3)
    assert life.facts[3].released
    assert life.partition.lowest_entry() == 3, "the frame that they wait in is needed"
    rows = life.partition.timetable.wheel.first(NEVER, 10)
    assert [(int(at), ref & 0xFFFFF) for at, ref in rows[:, AT : REF + 1]] == [
        (soon, 1),
        (late, 0),
        (late, 2),
    ]
    life.now_us = soon
    assert (life.release(), life.partition.end_offset) == (1, 3)
    life.now_us = late
    assert (life.release(), life.partition.end_offset) == (2, 5)


def test_a_row_that_fell_due_since_it_was_read_comes_at_the_next_tick() -> None:
    life = Life()
    life.stage("a", batch=delayed(T0 + 1, T0 + 2))
    parts = parts_of(life.facts[0].view, T0)
    life.now_us = T0 + 1
    life.do(ApplyStaged("w", 1, ["a"], [0], parts, [7], [b""]))
    assert (life.partition.end_offset, len(life.partition.timetable)) == (0, 2)
    assert (life.release(), life.partition.end_offset) == (1, 1)


def test_what_was_due_before_the_decision_is_appended_with_the_rest() -> None:
    life = Life()
    life.stage("a", batch=delayed(T0 + 1, T0 + 2))
    life.now_us = T0 + 2
    life.apply(1, "a")
    assert (life.partition.end_offset, len(life.partition.timetable)) == (2, 0)


def test_a_lost_attempt_does_not_hold_up_the_version() -> None:
    life = Life()
    life.stage("b")
    assert life.apply(1, "gone", "b") == Done()
    assert life.partition.end_offset == 1


def test_attempts_are_checked_before_a_decision() -> None:
    life = Life()
    life.stage("a")
    life.stage("a", 1)
    numbers = [attempt_number("w", "a"), attempt_number("w", "b")]
    assert life.do(CheckStaged(numbers[:1], [2])) == Done()
    assert life.do(CheckStaged(numbers[:1], [-1])) == Done()
    assert life.do(CheckStaged(numbers[:1], [3])).details == {"missing": numbers[:1]}
    assert life.do(CheckStaged(numbers, [2, -1])).details == {"missing": numbers[1:]}


def test_an_attempt_expires_an_hour_after_its_last_batch() -> None:
    life = Life()
    life.stage("a")
    life.now_us += HOUR_US - 1
    assert life.partition.staging.expired(life.now_us) == []
    life.stage("a", 1)
    life.now_us += HOUR_US - 1
    assert life.partition.staging.expired(life.now_us) == []
    assert life.partition.staging.expired(life.now_us + 1) == [attempt_number("w", "a")]


def test_idle_writers_are_forgotten_when_there_are_too_many() -> None:
    life = Life()
    life.partition.staging.writers_max = 2
    for writer in "uvw":
        life.stage("a", writer=writer)
    life.apply(1, "a", writer="u")
    life.apply(1, "a", writer="v")
    assert life.stage("b", writer="u") == Done()
    assert code(life.stage("a", writer="x")) == "overloaded"
    life.apply(1, "a", writer="w")
    assert life.partition.staging.applied_version("u") == 1, "none is forgotten early"
    life.now_us += WEEK_US
    assert life.stage("a", writer="x") == Done()
    life.apply(1, "a", writer="x")
    assert [life.partition.staging.applied_version(writer) for writer in "uvwx"] == [-1, -1, 1, 1]


# ---------------------------------------------------------------------------------------------- decisions


class Machine:
    """Stands for the coordinator."""

    def __init__(self) -> None:
        self.decisions = StagedVersions()
        self.facts: list[Any] = []
        self.now_us = T0

    def do(self, command: Any) -> Any:
        before = self.decisions.packed()
        decision = self.decisions.decide(command, at(self.now_us))
        assert self.decisions.packed() == before
        for fact in decision.facts:
            self.decisions.apply(fact)
            self.facts.append(fact)
        self.decisions.verify()
        return decision.reply

    def decide(self, request: DecideStaged) -> Any:
        return self.do(ChooseStaged(request, {}))

    def choose(self, version: int, *attempts: str, writer: str = "w") -> Any:
        return self.decide(DecideStaged(writer, version, targets(*attempts)))


def targets(*attempts: str) -> list[Target]:
    return [("t", 0, attempt) for attempt in attempts]


def test_the_first_attempt_of_a_version_wins() -> None:
    machine = Machine()
    assert machine.choose(5, "a") == StagedDecision(5, targets("a"), True, False)
    assert machine.choose(5, "b") == StagedDecision(5, targets("a"), False, False)
    assert machine.choose(4, "a") == StagedDecision(5, targets("a"), False, False)
    assert machine.choose(5, "a") == StagedDecision(5, targets("a"), True, False), "the answer got lost"
    assert len(machine.facts) == 1


def test_the_next_version_waits_until_the_last_is_applied_everywhere() -> None:
    machine = Machine()
    machine.choose(5, "a")
    refusal = machine.choose(6, "b")
    assert (code(refusal), refusal.details) == ("unavailable", {"version": 5})
    assert [writer for writer, _ in machine.decisions.pending()] == ["w"]
    machine.do(FinishStaged("w", 4))
    assert code(machine.choose(6, "b")) == "unavailable"
    machine.do(FinishStaged("w", 5))
    machine.do(FinishStaged("w", 5))
    assert list(machine.decisions.pending()) == []
    assert machine.choose(5, "a").applied
    assert machine.choose(6, "b").won
    assert len(machine.facts) == 3


def test_bad_decisions_are_refused() -> None:
    machine = Machine()
    assert code(machine.choose(-1, "a")) == "invalid_request"
    assert code(machine.choose(1 << 63, "a")) == "invalid_request"
    assert code(machine.choose(1, "a", "a")) == "invalid_request"
    assert code(machine.choose(1, "a", writer="")) == "invalid_request"
    assert code(machine.choose(1, "")) == "invalid_request"
    assert code(machine.decide(DecideStaged("w", 1, targets("a"), [1, 2]))) == "invalid_request"
    many = [("t", number, "a") for number in range(staged_versions.TARGETS_MAX + 1)]
    assert code(machine.decide(DecideStaged("w", 1, many))) == "too_large"
    long = [("t" * 200, number, f"{number:0200}") for number in range(2000)]
    assert code(machine.decide(DecideStaged("w", 1, long))) == "too_large"
    twice = DecideStaged("w", 1, targets("a"), grouped=[("a", "t", [1, 0])])
    assert code(machine.decide(twice)) == "invalid_request"
    assert code(machine.decide(DecideStaged("w", 1, [], grouped=[("", "t", [1])]))) == "invalid_request"
    assert code(machine.decide(DecideStaged("w", 1, [], [1], [("a", "t", [1, 2])]))) == "invalid_request"
    assert machine.facts == []


def test_many_targets_are_decided_in_groups() -> None:
    machine = Machine()
    grouped = [(f"attempt-{task}", "topic", list(range(100))) for task in range(200)]
    asked = DecideStaged("w", 1, [], [1] * 20_000, grouped)
    assert machine.decide(asked) == StagedDecision(1, [], True, False, grouped)
    assert len(msgspec.msgpack.encode(machine.facts)) < 64 * 1024
    last = machine.decisions.last("w")
    assert last is not None
    assert last.targets == targets_of([], grouped)
    assert machine.decide(DecideStaged("w", 1, targets_of([], grouped))).won, "the form does not matter"
    assert not machine.decide(DecideStaged("w", 1, [], grouped=grouped[:-1])).won


@given(st.lists(st.tuples(st.sampled_from("tu"), st.integers(0, 3), st.sampled_from("ab")), max_size=20))
def test_groups_keep_the_order_of_targets(found: list[Target]) -> None:
    assert targets_of([], grouped_of(found)) == found


def test_old_writers_make_room_for_new_ones() -> None:
    machine = Machine()
    machine.decisions.bytes_max = 250
    machine.choose(1, "a", "b", writer="u")
    machine.choose(1, "a", "b", writer="v")
    machine.do(FinishStaged("u", 1))
    assert code(machine.choose(1, "a", writer="w")) == "overloaded"
    machine.now_us += WEEK_US
    assert machine.choose(1, "a", writer="w").won
    assert machine.decisions.last("u") is None
    assert machine.decisions.last("v") is not None, "pending decisions are never forgotten"


# ------------------------------------------------------------------------------------------------- any life

NAMES = st.sampled_from("abc")
DELAYS_US = st.lists(st.sampled_from([-1, 0, 1, 1000, HOUR_US, 2 * HOUR_US]), min_size=1, max_size=4)
OTHERS = (
    st.tuples(st.just("delay"), st.tuples(NAMES, DELAYS_US), st.sampled_from([0, 0, 0, 1])),
    st.tuples(st.just("release"), st.just(""), st.just(0)),
    st.tuples(st.just("apply"), st.lists(NAMES, unique=True, max_size=3), st.integers(0, 4)),
    st.tuples(st.just("drop"), NAMES, st.just(0)),
    st.tuples(st.just("pass"), st.just(""), st.sampled_from([0, 1000, HOUR_US])),
)
PLAYS = mixtures([st.tuples(st.just("stage"), NAMES, st.integers(0, 2))], OTHERS, 10, 40)


def expected(life: Life, version: int, *attempts: str) -> tuple[int, list[int]]:
    """What applying a version gives: how many messages now, and when the others are due."""
    if version <= life.partition.staging.applied_version("w"):
        return 0, []
    due, later = 0, []
    for entry in life.partition.staging.entries(attempt_number("w", name) for name in attempts):
        batch = life.facts[entry].view
        times = [0] * batch.count if batch.deliver_at_us is None else batch.deliver_at_us.tolist()
        later += [at for at in times if at > life.now_us]
        due += sum(at <= life.now_us for at in times)
    return due, later


def waits(life: Life) -> list[int]:
    """When those that wait are due, as told by the frames that the timetable says they are in."""
    refs = life.partition.timetable.wheel.first(NEVER, 1000)[:, REF].tolist()
    assert len(set(refs)) == len(refs)
    frames = [life.facts[ref >> ROW_BITS] for ref in refs]
    assert all(isinstance(fact, Delayed) for fact in frames)
    rows = [ref & (1 << ROW_BITS) - 1 for ref in refs]
    return sorted(int(fact.view.deliver_at_us[row]) for fact, row in zip(frames, rows, strict=True))


@given(PLAYS, st.integers(0, 60))
def test_a_partition_can_be_rebuilt_from_its_facts(steps: list[Any], cut: int) -> None:
    life = Life()
    applied: dict[int, int] = {}
    waiting: list[int] = []
    for what, name, number in steps:
        end = life.partition.end_offset
        if what == "stage":
            life.stage(name, number)
        elif what == "delay":
            have = len(life.partition.staging.entries([attempt_number("w", name[0])]))
            times = [life.now_us + delay_us for delay_us in name[1]]
            life.stage(name[0], max(0, have - number), batch=delayed(*times))
        elif what == "apply":
            due, later = expected(life, number, *name)
            life.apply(number, *name)
            assert life.partition.end_offset == end + due
            waiting += later
            if due or later:
                applied[number] = applied.get(number, 0) + 1
        elif what == "release":
            ripe = [at for at in waiting if at <= life.now_us]
            assert life.release() == len(ripe)
            waiting = [at for at in waiting if at > life.now_us]
            assert life.partition.end_offset == end + len(ripe)
        elif what == "drop":
            life.drop(name)
        else:
            life.now_us += number
        if what not in ("apply", "release"):
            assert life.partition.end_offset == end
        assert waits(life) == sorted(waiting)
    assert all(count == 1 for count in applied.values())
    assert list(applied) == sorted(applied)
    for partition in (life.rebuilt(), life.rebuilt(cut)):
        assert partition.snapshot() == life.partition.snapshot()
        partition.check()


@given(
    st.lists(
        st.tuples(
            st.sampled_from("uv"),
            st.integers(0, 5),
            st.sampled_from(["a", "b", "done"]),
            st.sampled_from([0, WEEK_US]),
        ),
        max_size=40,
    ),
    st.integers(0, 40),
)
def test_decisions_can_be_rebuilt_and_never_change(steps: list[Any], cut: int) -> None:
    machine = Machine()
    winners: dict[tuple[str, int], Any] = {}
    for writer, version, what, passed in steps:
        machine.now_us += passed
        if what == "done":
            machine.do(FinishStaged(writer, version))
            continue
        reply = machine.choose(version, what, writer=writer)
        if isinstance(reply, StagedDecision):
            assert winners.setdefault((writer, reply.version), reply.attempts) == reply.attempts
            assert reply.won == (reply.version == version and reply.attempts == targets(what))
    other = StagedVersions()
    for number, fact in enumerate(machine.facts):
        if number == cut:
            data = other.packed()
            other = StagedVersions()
            other.load(data)
        union = group_facts.StagedDecisionFact
        other.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(fact), type=union))
    assert other.packed() == machine.decisions.packed()
    assert list(other.pending()) == list(machine.decisions.pending())
    other.verify()


def test_drop_names_only_what_is_there() -> None:
    life = Life()
    life.stage("a")
    assert life.drop("b") == Done()
    assert life.drop("b", "a") == Done()
    assert life.facts[1:] == [StageDropped([attempt_number("w", "a")], T0)]
