"""The timer wheel against a sorted list: the same rows come out in the same order, whatever happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.collections import timing_wheel as core
from tailrace.core.collections.timing_wheel import CANCELLED, REF_MAX, TICK_US, Rows, TimingWheel, ref_of

T0 = 1_700_000_000_000_000
DISTANCES = st.integers(-3 * TICK_US, 3 * TICK_US) | st.sampled_from(
    [TICK_US * 64**level + nudge for level in range(8) for nudge in (-1, 0, 1, 7)]
)
INSERTS = st.tuples(st.just("insert"), st.lists(DISTANCES, min_size=1, max_size=12))
MOVES = st.tuples(
    st.just("move"), st.sampled_from([0, 1, 9_999, 10_000, 640_000, 700_000, 41_000_000, 10**11])
)
DROPS = st.tuples(st.just("drop"), st.integers(1, 6))
CANCELS = st.tuples(st.just("cancel"), st.lists(st.integers(0, 200), min_size=1, max_size=4))
LIVES = st.lists(INSERTS | INSERTS | MOVES | DROPS | CANCELS, min_size=5, max_size=40)


def rows_of(entry: int, times: list[int]) -> Rows:
    return np.array([(at, ref_of(entry, row), entry, row) for row, at in enumerate(times)], np.int64)


class Plain:
    """What a wheel should hold: a list."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.dead: dict[int, int] = {}

    def waiting(self) -> list[tuple[int, int]]:
        return sorted((at, ref) for ref, at in self.rows.items())


def step(wheel: TimingWheel, plain: Plain, act: Any, entry: int, now_us: int) -> int:
    kind, what = act
    if kind == "insert":
        rows = rows_of(entry, [now_us + max(distance, 0) for distance in what])
        wheel.insert(rows)
        plain.rows.update({int(row[1]): int(row[0]) for row in rows})
    elif kind == "move":
        now_us += what
        wheel.advance(now_us)
        plain.dead = {ref: at for ref, at in plain.dead.items() if at // TICK_US > wheel.position}
    elif kind == "drop":
        due = [(at, ref) for at, ref in plain.waiting() if at <= wheel.position * TICK_US][:what]
        if due:
            wheel.drop(*due[-1])
            for _, ref in due:
                del plain.rows[ref]
    else:
        refs = [sorted(plain.rows)[number] for number in what if number < len(plain.rows)]
        if refs:
            wheel.cancel(refs)
            for ref in set(refs):
                plain.dead[ref] = plain.rows.pop(ref)
    return now_us


def pairs(rows: Rows) -> list[tuple[int, int]]:
    return [(int(row[0]), int(row[1])) for row in rows]


@given(LIVES, st.integers(0, 40))
def test_a_wheel_is_a_sorted_list(life: list[Any], cut: int) -> None:
    wheel, plain, now_us = TimingWheel(), Plain(), T0
    wheel.advance(T0)
    for entry, act in enumerate(life):
        now_us = step(wheel, plain, act, entry, now_us)
        wheel.verify()
        waiting = plain.waiting()
        assert len(wheel) == len(waiting)
        assert wheel.next_us() == (waiting[0][0] if waiting else None)
        assert wheel.oldest_ref() == min(plain.rows, default=None)
        assert max(plain.rows, default=-1) <= wheel.newest_ref() < ref_of(entry + 1, 0)
        for until_us in (now_us, now_us + 650_000, now_us + 10**12):
            due = [pair for pair in waiting if pair[0] <= until_us]
            assert pairs(wheel.first(until_us, 1000)) == due
            assert pairs(wheel.first(until_us, 3)) == due[:3]
            if due:
                at, ref = due[len(due) // 2]
                assert pairs(wheel.first(at, 1000, ref)) == due[: len(due) // 2 + 1]
                behind, recent = wheel.between((at, ref), until_us, ref_of(entry, 0))
                assert sorted(pairs(behind)) == due[len(due) // 2 + 1 :]
                early = due[: len(due) // 2 + 1]
                assert sorted(pairs(recent)) == [p for p in early if p[1] >= ref_of(entry, 0)]
        if entry == cut:
            copy = TimingWheel()
            copy.load(wheel.buffers())
            copy.verify()
            assert copy.buffers() == wheel.buffers()
            wheel = copy


def test_a_large_slot_is_sorted_out_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "BLOCK_ROWS", 16)
    monkeypatch.setattr(core, "MOVED_BLOCKS", 2)
    random, wheel, width = np.random.default_rng(5), TimingWheel(), 64 * 64 * TICK_US
    start = T0 // width * width + width
    wheel.advance(start - 1)
    times = (start + random.integers(0, 5_000_000, 1000)).tolist()
    for entry in range(10):
        wheel.insert(rows_of(entry, times[100 * entry : 100 * entry + 100]))
    left = sorted((at, ref_of(number // 100, number % 100)) for number, at in enumerate(times))
    wheel.cancel([left[500][1], left[3][1]])
    del left[500], left[3]
    for now_us in range(start, start + 5_100_000, 7 * TICK_US):
        assert pairs(wheel.first(now_us, 10)) == [pair for pair in left if pair[0] <= now_us][:10]
        assert pairs(wheel.first(now_us + 10**6, 2000)) == [p for p in left if p[0] <= now_us + 10**6]
        assert wheel.next_us() == (left[0][0] if left else None)
        assert wheel.oldest_ref() == min((ref for _, ref in left), default=None)
        copy = TimingWheel()
        copy.load(wheel.buffers())
        wheel.advance(now_us)
        copy.advance(now_us)
        assert copy.buffers() == wheel.buffers()
        due = [pair for pair in left if pair[0] <= now_us]
        if due:
            wheel.drop(*due[-1])
        left = left[len(due) :]
        wheel.verify()
        if left:
            entry, row = divmod(left[-1][1], 1 << 20)
            assert wheel.find(entry, row) == [left[-1][1]]
    assert not left
    assert len(wheel) == 0


def test_rows_are_found_by_id() -> None:
    wheel = TimingWheel()
    wheel.advance(T0)
    wheel.insert(rows_of(5, [T0 + 1, T0 + 5_000_000, T0 + 10**12]))
    for row, at in enumerate((T0 + 1, T0 + 5_000_000, T0 + 10**12)):
        assert wheel.find(5, row) == wheel.find(5, row, at) == [ref_of(5, row)]
    assert wheel.find(5, 1, T0 + 10**12) == []
    wheel.cancel([ref_of(5, 1)])
    assert wheel.find(5, 1) == [ref_of(5, 1) | CANCELLED]
    wheel.advance(T0 + 6_000_000)
    assert wheel.find(5, 1) == [], "a tombstone goes when its time has come"


def test_a_snapshot_does_not_change_when_the_wheel_does() -> None:
    wheel = TimingWheel()
    wheel.insert(rows_of(1, [T0 + number for number in range(100)]))
    taken = wheel.buffers()
    before = [bytes(part) for part in taken]
    wheel.insert(rows_of(2, [T0 + number for number in range(100)]))
    wheel.cancel([ref_of(1, 3)])
    wheel.advance(T0 + 50)
    wheel.drop(T0 + 50, REF_MAX)
    assert [bytes(part) for part in taken] == before


def test_many_rows_take_few_bytes_and_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "BLOCK_ROWS", 64)
    wheel, random = TimingWheel(), np.random.default_rng(1)
    wheel.advance(T0)
    for entry in range(100):
        wheel.insert(rows_of(entry, (T0 + random.integers(0, 3_600_000_000, 100)).tolist()))
    wheel.verify()
    parts = wheel.buffers()
    assert sum(len(part) for part in parts) < 10_000 * 33 + 5000
    now_us, seen = T0, 0
    while (next_us := wheel.next_us()) is not None:
        now_us = max(next_us, now_us + 7_000_000)
        rows = wheel.first(now_us, 500)
        wheel.advance(now_us)
        wheel.drop(int(rows[-1, 0]), int(rows[-1, 1]))
        seen += len(rows)
    assert seen == 10_000
