"""Slices: nothing is lost or doubled when topics are cut, and a limit is shared by lag.

Covers `spark/source/slices.py`.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.spark.source.slices import Slice, cut, share

PLACES = st.tuples(st.sampled_from(("a", "b")), st.integers(0, 3))
SPANS = st.dictionaries(PLACES, st.tuples(st.integers(0, 50), st.integers(0, 60)))


@settings(max_examples=100)
@given(SPANS, st.integers(0, 20))
def test_slices_cover_every_offset_once_and_in_order(spans, rows_max):
    slices = cut(spans, rows_max)
    found = [(s.topic, s.partition, offset) for s in slices for offset in range(s.start, s.end)]
    wanted = [(*place, o) for place, (start, end) in sorted(spans.items()) for o in range(start, end)]
    assert found == wanted
    sizes = [s.end - s.start for s in slices]
    assert all(size > 0 for size in sizes)
    assert not rows_max or all(size <= rows_max for size in sizes)


def test_slices_of_a_partition_are_about_the_same_size():
    assert cut({("a", 0): (5, 15)}, 4) == [Slice("a", 0, 5, 8), Slice("a", 0, 8, 11), Slice("a", 0, 11, 15)]
    assert Slice("a", 0, 5, 8).name == "a/0 from 5 to 8"


@settings(max_examples=100)
@given(SPANS, st.integers(1, 40))
def test_a_limit_is_shared_by_lag(spans, rows_max):
    forward = {place: (start, max(start, end)) for place, (start, end) in spans.items()}
    taken = share(forward, rows_max)
    assert taken.keys() == forward.keys()
    total = sum(end - start for start, end in forward.values())
    assert sum(end - start for start, end in taken.values()) == min(total, rows_max)
    for place, (start, end) in taken.items():
        assert start == forward[place][0]
        lag = forward[place][1] - start
        assert end <= forward[place][1]
        assert end - start >= lag * min(rows_max, total) // max(total, 1)
