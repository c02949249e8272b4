"""Runs of offsets against plain sets and dicts of offsets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.core import spans as under_test
from tailrace.core.spans import Runs, SpanSet, count, flat, pairs, without

EDGES = st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: (pair[0], sum(pair)))
VALUES = st.sampled_from([b"a", b"b"])


@given(st.lists(st.tuples(st.booleans(), EDGES)))
def test_a_set_of_spans_is_a_set(steps: list[tuple[bool, tuple[int, int]]]) -> None:
    spans, plain = SpanSet(), set[int]()
    for adding, (first, end) in steps:
        if adding:
            spans.add(first, end)
            plain |= set(range(first, end))
        else:
            assert spans.remove(first, end) == len(plain & set(range(first, end)))
            plain -= set(range(first, end))
        spans.verify()
        assert spans.total == len(plain)
        assert spans.first == min(plain, default=None)
        assert [offset for first, end in spans.spans() for offset in range(first, end)] == sorted(plain)
    for offset in range(80):
        assert (offset in spans) == (offset in plain)
        part = [o for first, end in spans.intersect(offset, offset + 9) for o in range(first, end)]
        assert part == sorted(plain & set(range(offset, offset + 9)))


@given(st.lists(st.tuples(st.booleans(), EDGES, VALUES)), st.sampled_from([2, 3, 512]))
def test_runs_are_a_map_however_the_blocks_lie(
    steps: list[tuple[bool, tuple[int, int], bytes]], block_max: int
) -> None:
    before, under_test.BLOCK_MAX = under_test.BLOCK_MAX, block_max
    try:
        runs, plain = Runs(), dict[int, bytes]()
        for putting, (first, end), value in steps:
            if putting:
                runs.put(first, end, value)
                plain |= dict.fromkeys(range(first, end), value)
            else:
                taken = {o: v for start, stop, v in runs.cut(first, end) for o in range(start, stop)}
                assert taken == {o: plain.pop(o) for o in range(first, end) if o in plain}
            runs.verify()
            assert {o: v for start, stop, v in runs for o in range(start, stop)} == plain
        other = Runs()
        firsts, ends, values = runs.columns()
        numbers = memoryview(firsts).cast("Q").tolist(), memoryview(ends).cast("Q").tolist()
        other.fill(*numbers, [values[i : i + 1] for i in range(len(values))])
        assert other.columns() == runs.columns()
        for offset in range(80):
            run = runs.at(offset)
            assert (run and run[2]) == plain.get(offset)
    finally:
        under_test.BLOCK_MAX = before


def test_many_runs_split_into_blocks() -> None:
    spans = SpanSet()
    for number in range(20_000):
        spans.add(number * 7919 % 20_000 * 2, number * 7919 % 20_000 * 2 + 1)
    spans.verify()
    assert len(spans) == spans.total == 20_000
    for number in range(20_000):
        spans.add(number * 2 + 1, number * 2 + 2)
    spans.verify()
    assert list(spans) == [(0, 40_000, b"")]


def test_spans_travel_flat() -> None:
    assert flat([(0, 2), (2, 3), (7, 9)]) == [0, 3, 7, 9]
    assert list(pairs([0, 3, 7, 9])) == [(0, 3), (7, 9)]
    assert count([0, 3, 7, 9]) == 5
    assert without(0, 10, [(2, 4), (9, 12)]) == [(0, 2), (4, 9)]
    assert without(3, 5, [(0, 10)]) == []
    assert without(3, 5, [(7, 8)]) == [(3, 5)]
