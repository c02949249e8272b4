"""From the options `start` and `end` to spans of offsets, for readers that know what can be read. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta

from tailrace.core.model.commands import EARLIEST, LATEST
from tailrace.errors import InvalidRequest, NotFound
from tailrace.spark.options import Point, ReadOptions

Place = tuple[str, int]
"""Topic and partition."""
Span = tuple[int, int]
"""First offset, and the first that does not belong to it any more."""
AtTime = Callable[[Place, int], int]
"""The first offset of a partition whose timestamp is at or above a time in microseconds."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def topics_of(options: ReadOptions, known: Iterable[str], where: str) -> list[str]:
    """The topics to read; raises `NotFound` for those that are not there."""
    names = set(known)
    if options.pattern:
        found = [name for name in names if re.fullmatch(options.pattern, name) and not name.startswith("_")]
        if not found:
            raise NotFound(f"topic_pattern: no topic in {where} matches {options.pattern!r}")
        return sorted(found)
    absent = [name for name in options.topics if name not in names]
    if absent:
        raise NotFound(f"topic: there is no topic {absent[0]!r} in {where}")
    return sorted(set(options.topics))


def spans_of(
    options: ReadOptions, extents: Mapping[Place, Span], at_time: AtTime, end_is: str = "it ends"
) -> tuple[dict[Place, Span], list[str]]:
    """What to read of each partition, of which `extents` says what there is, and in words what is asked for
    and gone. `end_is` says in an error what an end means."""
    spans, losses = {}, []
    for name, point in (("start", options.start), ("end", options.end)):
        _check_named(name, point, extents)
    for place, extent in extents.items():
        start = _offset("start", options.start, place, extent, at_time, end_is)
        end = _offset("end", options.end, place, extent, at_time, end_is)
        if start < min(extent[0], end):
            stop = min(extent[0], end)
            losses.append(f"offsets {start} to {stop - 1} of {place[0]}/{place[1]} are gone")
            start = stop
        spans[place] = start, max(start, end)
    return spans, losses


def _check_named(name: str, point: Point, extents: Mapping[Place, Span]) -> None:
    if not isinstance(point, dict):
        return
    topics = {topic for topic, _ in extents}
    for topic, offsets in point.items():
        if topic not in topics:
            raise InvalidRequest(f"{name}: topic {topic!r} is not among those that are read")
        for partition in offsets:
            if (topic, partition) not in extents:
                raise InvalidRequest(f"{name}: topic {topic!r} has no partition {partition}")


def _offset(name: str, point: Point, place: Place, extent: Span, at_time: AtTime, end_is: str) -> int:
    start, end = extent
    if isinstance(point, datetime):
        found = at_time(place, (point - _EPOCH) // timedelta(microseconds=1))
        return min(max(found, start), end)
    if isinstance(point, dict):
        point = point.get(place[0], {}).get(place[1], EARLIEST if name == "start" else LATEST)
    if point == EARLIEST:
        return start
    if point == LATEST:
        return end
    if not 0 <= point <= end:
        raise InvalidRequest(f"{name}: {place[0]}/{place[1]} has no offset {point}: {end_is} at {end}")
    return point
