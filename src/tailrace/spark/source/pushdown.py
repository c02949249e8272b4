"""Filters that Spark pushes down: narrower slices, and rows chosen before they reach Spark.

Only comparisons of topic, partition, offset, timestamp and key with values of their own type are taken; all
others stay with Spark. What is taken is applied exactly, because Spark does not look at it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from tailrace.format.schema import TIME
from tailrace.spark.source.row_batches import Choose, Piece
from tailrace.spark.source.slices import Slice

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TYPES: Mapping[str, type] = {
    "topic": str,
    "partition": int,
    "offset": int,
    "timestamp": datetime,
    "key": bytes,
}
_BOUNDS: Mapping[type[Filter], str] = {
    GreaterThan: "above",
    GreaterThanOrEqual: "from",
    LessThan: "below",
    LessThanOrEqual: "to",
}
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "above": pc.greater,
    "from": pc.greater_equal,
    "below": pc.less,
    "to": pc.less_equal,
}


class Condition(msgspec.Struct, frozen=True):
    """One comparison of a column: in, not_in, above, from, below, to (with values), null or not_null. Times
    are microseconds. A null satisfies nothing but `null`."""

    column: str
    kind: str
    values: tuple[Any, ...] = ()

    def holds(self, value: Any) -> bool:
        """Whether a value that is not null satisfies it."""
        if self.kind in ("null", "not_null"):
            return self.kind == "not_null"
        if self.kind in ("in", "not_in"):
            return (value in self.values) == (self.kind == "in")
        bound = self.values[0]
        return bool(
            {
                "above": value > bound,
                "from": value >= bound,
                "below": value < bound,
                "to": value <= bound,
            }[self.kind]
        )


def understood(filters: Iterable[Filter]) -> tuple[list[Condition], list[Filter]]:
    """Filters as conditions, and those that stay with Spark."""
    taken: list[Condition] = []
    left: list[Filter] = []
    for given in filters:
        condition = _condition(given)
        if condition is None:
            left.append(given)
        else:
            taken.append(condition)
    return taken, left


def _condition(given: Filter) -> Condition | None:
    negated = isinstance(given, Not)
    inner: Any = given.child if isinstance(given, Not) else given
    path: tuple[str, ...] = getattr(inner, "attribute", ())
    if len(path) != 1 or path[0] not in _TYPES:
        return None
    column = path[0]
    if isinstance(inner, IsNull | IsNotNull):
        return Condition(column, "null" if isinstance(inner, IsNull) != negated else "not_null")
    values = inner.value if isinstance(inner, In) else [getattr(inner, "value", None)]
    known = [_value(column, value) for value in values]
    if any(value is None for value in known):
        return None
    if isinstance(inner, EqualTo | In):
        return Condition(column, "not_in" if negated else "in", tuple(known))
    bound = _BOUNDS.get(type(inner))
    return Condition(column, bound, tuple(known)) if bound and not negated else None


def _value(column: str, value: Any) -> Any:
    """A literal as it is compared; None when it is not of the column's own type."""
    if type(value) is not _TYPES[column]:
        return None
    if not isinstance(value, datetime):
        return value
    return None if value.tzinfo is None else (value - _EPOCH) // timedelta(microseconds=1)


def narrowed(slices: Iterable[Slice], conditions: Sequence[Condition]) -> list[Slice]:
    """The slices that can hold wanted rows, without the offsets that cannot be wanted."""
    kept = []
    for part in slices:
        for condition in conditions:
            part = _narrow(part, condition)
        if part.start < part.end:
            kept.append(part)
    return kept


def _narrow(part: Slice, condition: Condition) -> Slice:
    match condition.column:
        case "topic":
            return part if condition.holds(part.topic) else replace(part, end=part.start)
        case "partition":
            return part if condition.holds(part.partition) else replace(part, end=part.start)
        case "offset":
            start, end = _offsets(condition, part.start, part.end)
            return replace(part, start=start, end=max(start, end))
        case "timestamp" if condition.kind == "null":
            return replace(part, end=part.start)
    return part


def _offsets(condition: Condition, start: int, end: int) -> tuple[int, int]:
    match condition.kind:
        case "null":
            return start, start
        case "in":
            return max(start, min(condition.values)), min(end, max(condition.values) + 1)
        case "above":
            return max(start, condition.values[0] + 1), end
        case "from":
            return max(start, condition.values[0]), end
        case "below":
            return start, min(end, condition.values[0])
        case "to":
            return start, min(end, condition.values[0] + 1)
    return start, end


def since(conditions: Iterable[Condition]) -> int | None:
    """The earliest timestamp that can be wanted, in microseconds."""
    bounds = [
        min(condition.values)
        for condition in conditions
        if condition.column == "timestamp" and condition.kind in ("in", "above", "from")
    ]
    return max(bounds, default=None)


def row_filter(conditions: Sequence[Condition]) -> Choose | None:
    """What chooses rows by the conditions that slices cannot express; None when there are none."""
    needed = [c for c in conditions if c.column == "key" or (c.column == "timestamp" and c.values)]
    needed += [c for c in conditions if c.column == "offset" and c.kind in ("in", "not_in")]
    if not needed:
        return None

    def choose(piece: Piece) -> Any:
        mask = None
        for condition in needed:
            column = (
                pa.array(piece.offsets) if condition.column == "offset" else piece.column(condition.column)
            )
            found = _mask(condition, column)
            mask = found if mask is None else pc.and_(mask, found)
        return mask

    return choose


def _mask(condition: Condition, column: pa.Array) -> Any:
    if condition.kind in ("null", "not_null"):
        return pc.is_null(column) if condition.kind == "null" else pc.is_valid(column)
    kind = TIME if condition.column == "timestamp" else column.type
    if condition.kind in ("in", "not_in"):
        found = pc.is_in(column, value_set=pa.array(condition.values, kind))
        if condition.kind == "not_in":
            found = pc.invert(found)
    else:
        found = _COMPARISONS[condition.kind](column, pa.scalar(condition.values[0], kind))
    return pc.and_(pc.is_valid(column), pc.fill_null(found, False))
