"""Runs of offsets against plain sets and dicts of offsets.

Also covers `core/collections/dense_spans.py` and `core/collections/span_blocks.py`.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.collections import span_blocks as under_test
from tailrace.core.collections.dense_spans import CHUNK
from tailrace.core.collections.span_map import Runs, SpanSet, count, flat, pairs, without

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
        firsts, ends, values = runs.frozen().columns()
        numbers = memoryview(firsts).cast("Q").tolist(), memoryview(ends).cast("Q").tolist()
        other.fill(*numbers, [values[i : i + 1] for i in range(len(values))])
        assert other.frozen().columns() == runs.frozen().columns()
        for offset in range(80):
            run = runs.at(offset)
            assert (run and run[2]) == plain.get(offset)
    finally:
        under_test.BLOCK_MAX = before


STRETCHES = st.tuples(
    st.integers(0, 3 * CHUNK), st.integers(1, 400), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9)
)
"""Where many spans begin, how many there are, how long and how far apart they are, and how irregular."""


def _spans(stretch: tuple[int, int, int, int, int]) -> list[int]:
    first, many, length, gap, odd = stretch
    found: list[int] = []
    for number in range(many):
        found += (first, first + length)
        first += length + gap + (odd if number % 7 == 3 else 0)
    return found


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["put_many", "cut_many", "tally"]), STRETCHES, VALUES),
            st.tuples(
                st.sampled_from(["put", "cut"]),
                st.tuples(st.integers(0, 5 * CHUNK), st.integers(1, 2 * CHUNK)),
                VALUES,
            ),
        ),
        max_size=12,
    )
)
def test_many_changes_at_once_are_as_one_after_the_other(
    steps: list[tuple[str, tuple[int, ...], bytes]],
) -> None:
    runs, plain = Runs(), dict[int, bytes]()
    for what, place, value in steps:
        spans = [place[0], sum(place)] if len(place) == 2 else _spans(place)  # type: ignore[arg-type]
        offsets = [offset for first, end in pairs(spans) for offset in range(first, end)]
        there = {offset: plain[offset] for offset in offsets if offset in plain}
        if what == "tally":
            assert runs.tally(spans) == (len(there), set(there.values()))
        elif what == "put_many":
            runs.put_many(spans, value)
        elif what == "put":
            runs.put(*spans, value)
        elif what == "cut_many":
            assert runs.cut_many(spans) == len(there)
        else:
            assert runs.cut(*spans) == runs_of(there)
        if what.startswith("put"):
            plain |= dict.fromkeys(offsets, value)
        elif what.startswith("cut"):
            plain = {offset: its for offset, its in plain.items() if offset not in there}
        runs.verify()
        expected = runs_of(plain)
        assert list(runs) == expected
        assert runs.first == min(plain, default=None)
        middle = (spans[0] + spans[-1]) // 2
        assert runs.within(middle, middle + CHUNK) == runs_of(
            {o: v for o, v in plain.items() if middle <= o < middle + CHUNK}
        )
        assert list(runs.since(middle)) == runs_of({o: v for o, v in plain.items() if o >= middle})
        at = runs.at(middle)
        assert (at and at[2]) == plain.get(middle)
        assert at is None or all(plain.get(o) == at[2] for o in range(at[0], at[1]))
        other = Runs()
        for first, end, its in expected:
            other.put(first, end, its)
        assert other.frozen().columns() == runs.frozen().columns()


def runs_of(plain: dict[int, bytes]) -> list[tuple[int, int, bytes]]:
    """The same as runs, in order."""
    found: list[tuple[int, int, bytes]] = []
    for offset, value in sorted(plain.items()):
        if found and found[-1][1] == offset and found[-1][2] == value:
            found[-1] = (found[-1][0], offset + 1, value)
        else:
            found.append((offset, offset + 1, value))
    return found


def test_a_chunk_forgets_the_values_that_it_does_not_have_any_more() -> None:
    runs = Runs()
    for number in range(5 * CHUNK):
        runs.put_many(
            [offset for first in range(0, 400, 2) for offset in (first, first + 1)], b"%6d" % number
        )
        runs.put(500, 501, b"stays ")
    runs.verify()
    assert list(runs)[-2:] == [(398, 399, b"%6d" % number), (500, 501, b"stays ")]


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


@given(st.lists(st.tuples(st.booleans(), STRETCHES), max_size=6), st.integers(0, 4 * CHUNK))
def test_spans_of_a_part_are_found_at_once(
    steps: list[tuple[bool, tuple[int, int, int, int, int]]], first: int
) -> None:
    spans = SpanSet()
    spans.add(CHUNK // 2, 3 * CHUNK)
    for adding, stretch in steps:
        if adding:
            spans.put_many(_spans(stretch))
        else:
            spans.cut_many(_spans(stretch))
    for length in (1, 700, CHUNK, 2 * CHUNK):
        assert spans.intersect(first, first + length) == list(spans.spans(first, first + length))
    other = SpanSet()
    for first, end, value in spans:
        other.put(first, end, value)
    assert spans.frozen().columns() == other.frozen().columns()
