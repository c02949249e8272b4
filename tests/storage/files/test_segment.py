"""The index of a segment: points in one buffer, found as in a list, and the same in memory and in a file."""

import tracemalloc

import pytest

from tailrace.format.frame import DATA, Header
from tailrace.storage.files.segment import (
    INDEX_STEP,
    Point,
    Points,
    Segment,
    decode_index,
    encode_index,
    last_false,
)


def filled(frames: int, size: int = INDEX_STEP) -> Segment:
    segment = Segment(10, 1_000_000)
    for number in range(frames):
        header = Header(
            DATA,
            0,
            size,
            0,
            10 + number,
            base_offset=1_000_000 + 5 * number,
            span=5,
            count=5,
            append_time_us=1_800_000_000_000_000 + number,
            timestamp_max_us=1_800_000_000_000_000 + number,
        )
        segment.note(header, segment.size)
        segment.size += header.size
    return segment


def test_points_are_a_sequence() -> None:
    points = Points()
    given = [Point(number, 100 * number, number + 7, -number, 5, 6) for number in range(10)]
    for point in given:
        points.append(point)
    assert list(points) == given
    assert (points[0], points[-1], points[3:5]) == (given[0], given[-1], given[3:5])
    assert points.last_position == 900
    assert last_false(points, lambda point: point.entry > 12) == 5
    for outside in (10, -11):
        with pytest.raises(IndexError):
            points[outside]


def test_an_index_is_read_back_as_it_was() -> None:
    segment = filled(100)
    assert segment.points is not None
    found = decode_index(encode_index(segment))
    assert found.points is not None
    assert list(found.points) == list(segment.points)
    assert len(found.points) == 100
    assert (found.end_entry, found.end_offset, found.size) == (110, 1_000_500, segment.size)


def test_the_index_of_a_full_segment_takes_little_memory() -> None:
    """Each partition keeps that of the segment it writes and of those read lately."""
    tracemalloc.start()
    segment = filled(1024)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert segment.points is not None
    assert len(segment.points) == 1024
    assert used < 100 * 1024
