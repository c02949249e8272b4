"""The plan of a stream read: offsets as Spark stores them, limits, growth, loss, tasks.

Covers `spark/source/stream_plan.py` and `spark/source/log_spans.py`.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.model.commands import EARLIEST, LATEST, TopicInfo
from tailrace.errors import InvalidRequest, StorageFault
from tailrace.spark.options import Point, ReadOptions
from tailrace.spark.source import stream_plan as plan
from tailrace.spark.source.log_spans import Place
from tailrace.spark.source.slices import Slice, cut
from tailrace.spark.source.stream_plan import Head, Reached


def head(*ends: int, id: int = 1, starts: tuple[int, ...] = (), faults: tuple[str | None, ...] = ()) -> Head:
    return Head(id, list(starts or (0,) * len(ends)), list(ends), list(faults or (None,) * len(ends)))


def at(*offsets: int, id: int = 1) -> Reached:
    return Reached(id, dict(enumerate(offsets)))


def step(position: plan.Position, heads: plan.Heads, rows_max: int = 0) -> dict[str, Reached]:
    """One trigger, without any loss."""
    aligned, losses = plan.align(position, heads)
    assert losses == []
    return plan.advance(position, aligned, heads, rows_max)


def through_spark(position: plan.Position) -> dict[str, Reached]:
    return plan.decode(json.loads(json.dumps(plan.encode(position))))


ENDS = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 10**12)), min_size=1, max_size=6)
TOPICS = st.dictionaries(st.sampled_from(("a", "b", "c.d", "é")), ENDS, max_size=3)


@st.composite
def standings(draw: st.DrawFn) -> tuple[dict[str, Reached], dict[str, Head]]:
    """Topics and a position in them; some partitions, or whole topics, are new."""
    heads, position = {}, {}
    for number, (topic, ends) in enumerate(draw(TOPICS).items()):
        heads[topic] = head(*ends, id=number)
        known = draw(st.integers(0, len(ends)))
        if draw(st.booleans()):
            offsets = {p: draw(st.integers(0, ends[p])) for p in range(known)}
            position[topic] = Reached(number, offsets)
    return position, heads


# ------------------------------------------------------------------------------------------ the checkpoint


@given(standings())
def test_a_position_survives_the_checkpoint_and_is_always_the_same_text(
    standing: tuple[dict[str, Reached], dict[str, Head]],
) -> None:
    position, _ = standing
    assert through_spark(position) == position
    shuffled = {
        topic: Reached(position[topic].id, dict(reversed(position[topic].offsets.items())))
        for topic in reversed(list(position))
    }
    assert json.dumps(plan.encode(shuffled)) == json.dumps(plan.encode(position))


def test_the_shape_of_the_checkpoint() -> None:
    stored = plan.encode({"orders": at(1500, 1498, id=7)})
    assert stored == {"version": 1, "topics": {"orders": {"id": 7, "offsets": {"0": 1500, "1": 1498}}}}


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"0": 17}, "version None"),
        ({"version": 2, "topics": {}}, "version 2"),
        ({"version": 1, "topics": {"a": {"0": 5}}}, "not Tailrace's"),
        ({"version": 1}, "not Tailrace's"),
    ],
)
def test_foreign_offsets_are_refused(stored: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        plan.decode(stored)


# ----------------------------------------------------------------------------------------------- the start


def begun(heads: plan.Heads, start: Point, found: dict[Place, int] | None = None) -> plan.Aligned:
    options = ReadOptions(url="tailrace://nowhere", topics=list(heads), start=start)
    return plan.begin(heads, options, lambda place, us: (found or {})[place])


def test_a_new_checkpoint_begins_where_the_option_says() -> None:
    heads = {"a": head(10, 20, starts=(3, 0)), "b": head(5, id=2)}
    assert begun(heads, EARLIEST) == ({"a": at(3, 0), "b": at(0, id=2)}, [])
    assert begun(heads, LATEST) == ({"a": at(10, 20), "b": at(5, id=2)}, [])
    assert begun(heads, 4) == ({"a": at(4, 4), "b": at(4, id=2)}, [])
    assert begun(heads, {"a": {1: 7, 0: LATEST}}) == ({"a": at(10, 7), "b": at(0, id=2)}, [])
    position, losses = begun(heads, 2)
    assert position == {"a": at(3, 2), "b": at(2, id=2)}
    assert losses == ["offsets 2 to 2 of a/0 are gone"]


def test_a_time_counts_only_up_to_the_heads_that_are_known() -> None:
    found = {("a", 0): 4, ("a", 1): 25}
    time = datetime(2026, 1, 1, tzinfo=UTC)
    assert begun({"a": head(10, 20)}, time, found).position == {"a": at(4, 20)}


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (11, "a/0 has no offset 11"),
        ({"b": {0: 1}}, "'b' is not among"),
        ({"a": {2: 1}}, "'a' has no partition 2"),
        ({"a": {0: -5}}, "no offset -5"),
    ],
)
def test_a_start_that_is_not_there_is_refused(start: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        begun({"a": head(10, 20)}, start)
    assert caught.value.message.startswith("start: ")


# ------------------------------------------------------------------------------------------ the next batch


@given(standings())
def test_without_a_limit_a_batch_ends_at_the_heads(
    standing: tuple[dict[str, Reached], dict[str, Head]],
) -> None:
    position, heads = standing
    end = step(position, heads)
    for topic, one in heads.items():
        reached = end[topic].offsets if topic in end else {}
        assert [reached.get(p, 0) for p in range(len(one.ends))] == one.ends


@given(standings(), st.integers(1, 60))
def test_a_limit_is_kept_and_used_up_and_everything_is_read_once(
    standing: tuple[dict[str, Reached], dict[str, Head]], rows_max: int
) -> None:
    position, heads = standing
    heads = {topic: head(*(end % 13 for end in one.ends), id=one.id) for topic, one in heads.items()}
    position = {
        topic: Reached(one.id, {p: min(o, heads[topic].ends[p]) for p, o in one.offsets.items()})
        for topic, one in position.items()
    }
    wanted = {
        (topic, p, offset)
        for topic, one in heads.items()
        for p, stop in enumerate(one.ends)
        for offset in range(position[topic].offsets.get(p, 0) if topic in position else 0, stop)
    }
    seen: list[tuple[str, int, int]] = []
    while True:
        end = through_spark(step(position, heads, rows_max))
        spans = plan.spans_between(position, end)
        rows = [(t, p, offset) for (t, p), (first, stop) in spans.items() for offset in range(first, stop)]
        assert len(rows) == min(rows_max, len(wanted) - len(seen))
        if not rows:
            assert plan.encode(end) == plan.encode(position)
            break
        seen += rows
        position = end
    assert len(seen) == len(set(seen)) == len(wanted)
    assert set(seen) == wanted


@given(standings(), st.integers(1, 10**6))
def test_no_partition_waits_for_a_busier_one(
    standing: tuple[dict[str, Reached], dict[str, Head]], rows_max: int
) -> None:
    position, heads = standing
    behind = plan.spans_between(position, step(position, heads))
    taken = plan.spans_between(position, step(position, heads, rows_max))
    if rows_max >= len(behind):
        assert taken.keys() == behind.keys()
    assert sum(end - first for first, end in taken.values()) <= rows_max
    assert all(first == behind[place][0] and end <= behind[place][1] for place, (first, end) in taken.items())


def test_who_is_further_behind_gets_more() -> None:
    end = step({"a": at(0, 0, 0)}, {"a": head(900, 90, 10)}, 100)
    shares = list(end["a"].offsets.values())
    assert sum(shares) == 100
    assert shares[0] > 80 > 20 > shares[1] > shares[2] >= 1


def test_new_partitions_and_topics_begin_at_0_and_are_no_news_while_they_are_empty() -> None:
    position = {"a": at(5)}
    assert step(position, {"a": head(5, 0), "b": head(0, 0, id=2)}) == position
    end = step(position, {"a": head(5, 0, 3), "b": head(0, 2, id=2)})
    assert end == {"a": Reached(1, {0: 5, 2: 3}), "b": Reached(2, {1: 2})}
    assert plan.spans_between(position, end) == {("a", 2): (0, 3), ("b", 1): (0, 2)}


# ------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize(
    ("heads", "words", "goes_on"),
    [
        ({}, "topic 'a' was deleted", {}),
        ({"a": head(9, 9, id=2)}, "topic 'a' was deleted and made anew", {"a": at(9, 9, id=2)}),
        ({"a": head(0, 0, id=2)}, "topic 'a' was deleted and made anew", {"a": Reached(2, {})}),
        (
            {"a": head(9, 9, starts=(7, 0))},
            "a/0 begins at 7: offsets 5 to 6 were trimmed",
            {"a": at(9, 9)},
        ),
        ({"a": head(9, 2)}, "a/1 ends at 2, but was read up to 6: its end was lost", {"a": at(9, 2)}),
        (
            {"a": head(5, 6, 8, starts=(0, 0, 4))},
            "a/2 begins at 4: offsets 0 to 3 were trimmed",
            {"a": at(5, 6, 8)},
        ),
    ],
)
def test_what_is_lost_is_named_and_the_rest_can_be_read(
    heads: dict[str, Head], words: str, goes_on: dict[str, Reached]
) -> None:
    position = {"a": at(5, 6)}
    aligned, losses = plan.align(position, heads)
    assert losses == [words]
    end = plan.advance(position, aligned, heads)
    assert end == goes_on
    # What was lost is told once: the position that is stored now has no loss any more.
    assert plan.align(through_spark(end), heads).losses == []
    spans, _ = plan.readable(plan.spans_between(position, end), end, heads)
    for (topic, partition), (first, stop) in spans.items():
        assert heads[topic].starts[partition] <= first < stop <= heads[topic].ends[partition]


def test_rows_that_were_trimmed_do_not_count_for_the_limit() -> None:
    position, heads = {"a": at(0)}, {"a": head(1_000, starts=(900,))}
    aligned, _ = plan.align(position, heads)
    assert plan.advance(position, aligned, heads, 10) == {"a": at(910)}


def test_a_partition_with_a_fault_is_no_loss() -> None:
    heads = {"a": head(0, faults=("the disk failed",))}
    with pytest.raises(StorageFault, match="a/0 cannot be read: the disk failed"):
        plan.align({"a": at(5)}, heads)


def test_a_batch_that_is_read_again_is_compared_with_what_is_there() -> None:
    start, end = {"a": at(0, 0), "b": at(2, id=2)}, {"a": at(10, 10), "b": at(5, id=2)}
    spans = plan.spans_between(start, end)
    heads = {"a": head(10, 10), "b": head(5, id=2)}
    assert plan.readable(spans, end, heads) == (spans, [])
    left, losses = plan.readable(spans, end, {"a": head(10, 8, starts=(4, 0)), "b": head(5, id=3)})
    assert left == {("a", 0): (4, 10), ("a", 1): (0, 8)}
    assert losses == [
        "a/0 begins at 4: offsets 0 to 3 were trimmed",
        "a/1 ends at 8, but was read up to 10: its end was lost",
        "topic 'b' was deleted and made anew",
    ]
    assert plan.readable(spans, end, {})[0] == {}


# -------------------------------------------------------------------------------------------------- tasks


@given(
    st.dictionaries(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), st.integers(0, 30), max_size=12),
    st.integers(1, 40),
)
def test_small_neighbours_are_one_task_in_the_same_order(
    rows: dict[tuple[str, int], int], rows_max: int
) -> None:
    slices = cut({place: (5, 5 + count) for place, count in rows.items()})
    bundles = plan.bundle(slices, rows_max)
    assert [piece for bundle in bundles for piece in bundle.slices] == slices
    sizes = [sum(piece.end - piece.start for piece in bundle.slices) for bundle in bundles]
    for bundle, size in zip(bundles, sizes, strict=True):
        assert size <= rows_max or len(bundle.slices) == 1
    for bundle, size in zip(bundles[1:], sizes, strict=False):
        assert size + bundle.slices[0].end - bundle.slices[0].start > rows_max


def test_a_few_rows_of_many_partitions_are_one_task() -> None:
    slices = [Slice("a", partition, 0, 10) for partition in range(100)]
    assert len(plan.bundle(slices)) == 1


def test_heads_come_from_the_description_of_a_topic() -> None:
    rows: list[dict[str, Any]] = [
        {"partition": 1, "start_offset": 2, "end_offset": 9, "fault": "broken", "bytes": 7},
        {"partition": 0, "start_offset": 0, "end_offset": 4, "fault": None, "bytes": 7},
    ]
    assert Head.of(TopicInfo("a", 3, {}, rows)) == Head(3, [0, 2], [4, 9], [None, "broken"])
