"""Filters: what is taken is exact, what is not understood stays with Spark.

Covers `spark/source/pushdown.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from tailrace.core.model.identifiers import HAS_KEY
from tailrace.format.schema import TIME
from tailrace.spark.source.pushdown import narrowed, row_filter, since, understood
from tailrace.spark.source.row_batches import Piece
from tailrace.spark.source.slices import Slice

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SMALL = st.integers(0, 9)
LITERALS = {
    "topic": st.sampled_from(("a", "b")),
    "partition": st.integers(-1, 3),
    "offset": SMALL,
    "timestamp": SMALL.map(lambda us: EPOCH + timedelta(microseconds=us)),
    "key": st.sampled_from((b"", b"k", b"l")),
}
BOUNDS = (GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)


@st.composite
def filters(draw: st.DrawFn) -> Any:
    column = draw(st.sampled_from(sorted(LITERALS)))
    path, value = (column,), LITERALS[column]
    kind = draw(st.sampled_from((EqualTo, In, IsNull, IsNotNull, *BOUNDS)))
    if kind in (IsNull, IsNotNull):
        return kind(path)
    made = kind(path, draw(st.lists(value, min_size=1, max_size=3)) if kind is In else draw(value))
    return Not(made) if kind in (EqualTo, In) and draw(st.booleans()) else made


ROWS = st.lists(st.tuples(SMALL, st.sampled_from((None, b"", b"k", b"l"))), min_size=1, max_size=8)


def satisfies(row: dict[str, Any], condition: Any) -> bool:
    """SQL's answer, null counting as no."""
    inner = condition.child if isinstance(condition, Not) else condition
    value = row[inner.attribute[0]]
    if isinstance(inner, IsNull | IsNotNull):
        return (value is None) == isinstance(inner, IsNull)
    if value is None:
        return False
    answers = {
        EqualTo: lambda bound: value == bound,
        In: lambda bound: value in bound,
        GreaterThan: lambda bound: value > bound,
        GreaterThanOrEqual: lambda bound: value >= bound,
        LessThan: lambda bound: value < bound,
        LessThanOrEqual: lambda bound: value <= bound,
    }
    return bool(answers[type(inner)](inner.value)) != isinstance(condition, Not)


@settings(max_examples=200)
@given(ROWS, st.lists(filters(), max_size=4), st.sampled_from(("a", "b")), st.integers(0, 2))
def test_what_is_taken_is_exactly_what_spark_would_keep(rows, given_filters, topic, partition):
    conditions, left = understood(given_filters)
    assert left == []
    part = Slice(topic, partition, 0, len(rows))
    kept = narrowed([part], conditions)
    choose = row_filter(conditions)
    found: list[int] = []
    for piece_of in kept:
        chosen = rows[piece_of.start : piece_of.end]
        columns = [
            pa.array([time for time, _ in chosen], TIME),
            pa.array([key for _, key in chosen], pa.binary()),
        ]
        batch = pa.RecordBatch.from_arrays(columns, names=["timestamp", "key"])
        offsets = np.arange(piece_of.start, piece_of.end)
        mask = None if choose is None else choose(Piece(batch, offsets, HAS_KEY, 0))
        found += offsets.tolist() if mask is None else offsets[np.asarray(mask.to_pylist())].tolist()
    wanted = [
        offset
        for offset, (time, key) in enumerate(rows)
        if all(
            satisfies(
                {
                    "topic": topic,
                    "partition": partition,
                    "offset": offset,
                    "timestamp": EPOCH + timedelta(microseconds=time),
                    "key": key,
                },
                condition,
            )
            for condition in given_filters
        )
    ]
    assert found == wanted
    bound = since(conditions)
    assert bound is None or all(rows[offset][0] >= bound for offset in wanted)


@pytest.mark.parametrize(
    "strange",
    [
        EqualTo(("value",), b"v"),
        EqualTo(("headers", "a"), b"v"),
        EqualTo(("offset",), "17"),
        EqualTo(("offset",), True),
        EqualTo(("offset",), None),
        In(("key",), [b"k", None]),
        EqualNullSafe(("key",), b"k"),
        GreaterThan(("timestamp",), datetime(2026, 1, 1)),
        Not(GreaterThan(("offset",), 3)),
        StringStartsWith(("topic",), "a"),
    ],
)
def test_what_is_not_understood_stays_with_spark(strange):
    wanted = EqualTo(("partition",), 1)
    conditions, left = understood([strange, wanted])
    assert len(conditions) == 1
    assert len(left) == 1
    assert left[0] is strange, "Spark compares by identity"


def test_times_are_compared_in_any_zone():
    time = datetime(1970, 1, 1, 2, 0, 0, 5, timezone(timedelta(hours=2)))
    (condition,), _ = understood([GreaterThan(("timestamp",), time)])
    assert condition.values == (5,)


def test_slices_that_cannot_match_are_not_read():
    slices = [Slice("a", 0, 0, 10), Slice("a", 1, 0, 10), Slice("b", 0, 0, 10)]
    conditions, _ = understood(
        [EqualTo(("partition",), 0), GreaterThanOrEqual(("offset",), 4), LessThan(("offset",), 6)]
    )
    assert narrowed(slices, conditions) == [Slice("a", 0, 4, 6), Slice("b", 0, 4, 6)]
