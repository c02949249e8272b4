"""A segment: one file of frames, with its stats and its sparse index.

A segment file is named after its first entry: `00000000000000000042.log`. Its index has one `Point` per 64
KiB or more; the index of the active segment lives in memory only, that of a sealed one in `…0042.idx`. A
look-up finds the last point before its target and walks on from there, 64 KiB or one large frame at most:

    points    position 0      66,048        131,200       …
              offset   1,000  1,420         1,780
    offset 1,500 is wanted: begin at position 66,048

Indexes are derived data: one that is missing or does not pass its checksum is rebuilt from the frames.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

import numpy as np

from tailrace.errors import Corrupt
from tailrace.format.frame import BARRIER, DATA, LOST, Buffer, Header, crc32c
from tailrace.storage.files.key_rows import KeyRows, Rows, in_order, keys_name

INDEX_STEP = 64 * 1024
TIME_MIN = -(1 << 63)

_MAGIC = b"TRIX"
_VERSION = 1
#        magic version | first_entry end_entry base end | size data_bytes frames | time_max first_append
# last_append | points
_HEAD = struct.Struct("<4sI4Q3Q3qI")
_CRC = struct.Struct("<I")


class Point(NamedTuple):
    """A place in a segment at which a frame begins, with running values of the frames before it."""

    base_offset: int
    """Base offset of the first data frame at or after this place."""
    position: int
    entry: int
    time_max: int
    """Greatest message timestamp of the data frames before this place (of `LogReader._first`: with its
    frame)."""
    append_time_us: int
    data_bytes: int
    """Bytes of the data frames of this segment before this place."""


_COLUMNS = len(Point._fields)


class Points(Sequence[Point]):
    """The points of an index in one buffer, which takes a sixth of the memory of tuples."""

    __slots__ = ("_values", "last_position")

    def __init__(self, raw: bytes = b"") -> None:
        self._values = array("q", raw)
        self.last_position = self[-1].position if self._values else -INDEX_STEP

    def __len__(self) -> int:
        return len(self._values) // _COLUMNS

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> list[Point]: ...
    def __getitem__(self, index: int | slice) -> Point | list[Point]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index if index >= 0 else index + len(self)
        if not 0 <= at < len(self):
            raise IndexError(f"point {index} of {len(self)}")
        return Point(*self._values[at * _COLUMNS : (at + 1) * _COLUMNS])

    def append(self, point: Point) -> None:
        """Add a point in one step, so that readers in other threads never see a part of it."""
        self._values.extend(array("q", point))
        self.last_position = point.position

    def tobytes(self) -> bytes:
        """The points as an index file holds them."""
        return self._values.tobytes()


class Segment:
    """Stats of one segment. The writer raises `size` last, and readers never look beyond it."""

    __slots__ = (
        "base_offset",
        "data_bytes",
        "early",
        "end_entry",
        "end_offset",
        "first_append_us",
        "first_entry",
        "frames",
        "keys",
        "last_append_us",
        "points",
        "sealed",
        "size",
        "time_max",
        "unkeyed",
    )

    def __init__(self, first_entry: int, base_offset: int) -> None:
        self.first_entry = first_entry
        self.base_offset = base_offset
        self.end_entry = first_entry
        self.end_offset = base_offset
        self.size = 0
        self.data_bytes = 0
        self.frames = 0
        self.time_max = TIME_MIN
        self.first_append_us = 0
        self.last_append_us = 0
        self.sealed = False
        self.points: Points | None = Points()
        """None if the index of a sealed segment is on the disk only."""
        self.keys: KeyRows | None = None
        """Keys of the frames appended since the log was opened; None without any, or once sealed."""
        self.early: Rows | None = None
        """Keys of the frames before those, sorted."""
        self.unkeyed = 0
        """Position up to which the keys of the frames have not been read."""

    def begin_at(self, offset: int) -> None:
        """It has no messages, and the next one has this offset."""
        self.base_offset = self.end_offset = offset

    @property
    def name(self) -> str:
        """File name of the frames."""
        return log_name(self.first_entry)

    @property
    def index_name(self) -> str:
        """File name of the index."""
        return index_name(self.first_entry)

    @property
    def keys_name(self) -> str:
        """File name of the keys."""
        return keys_name(self.first_entry)

    def key_rows(self) -> Rows | None:
        """The keys of the whole segment, sorted; None if not all of them are in memory."""
        if self.unkeyed:
            return None
        late = None if self.keys is None else self.keys.rows()
        if self.early is None or late is None:
            return self.early if late is None else late
        return in_order(np.concatenate((self.early, late)))

    def note(self, header: Header, position: int) -> None:
        """Count a frame at `position`; the caller raises `size` when the bytes are in place."""
        if header.kind == BARRIER:
            return
        points = self.points
        assert points is not None, "a sealed segment does not grow"
        if position - points.last_position >= INDEX_STEP:
            append_time = max(header.append_time_us, self.last_append_us)
            points.append(
                Point(self.end_offset, position, header.entry, self.time_max, append_time, self.data_bytes)
            )
        if not self.first_append_us:
            self.first_append_us = header.append_time_us
        self.frames += 1
        # A frame without a time has 0 there, and times in the index must not go back.
        self.last_append_us = max(self.last_append_us, header.append_time_us)
        if header.kind == DATA:
            self.data_bytes += header.size
            self.end_offset = header.base_offset + header.span
            if header.timestamp_max_us > self.time_max:
                self.time_max = header.timestamp_max_us
        self.end_entry = header.entry + 1
        if header.kind == LOST:
            self.end_entry, self.end_offset = header.entry + header.producer_id, header.timestamp_max_us


def log_name(first_entry: int) -> str:
    """File name of the segment that begins at this entry."""
    return f"{first_entry:020d}.log"


def index_name(first_entry: int) -> str:
    """File name of that segment's index."""
    return f"{first_entry:020d}.idx"


def first_entry(name: str) -> int | None:
    """The first entry that a segment's file name states; None for any other file."""
    stem, dot, suffix = name.partition(".")
    if dot and suffix == "log" and len(stem) == 20 and stem.isdigit():
        return int(stem)
    return None


def last_false(points: Sequence[Point], holds: Callable[[Point], bool]) -> int:
    """Number of the last point before a condition turns true, which it does once; 0 if it holds from the
    start."""
    return max(bisect_right(points, False, key=holds) - 1, 0)


def encode_index(segment: Segment) -> bytes:
    """The index file of a segment."""
    points = segment.points
    assert points is not None, "the points of the segment are in memory when it is sealed"
    head = _HEAD.pack(
        _MAGIC,
        _VERSION,
        segment.first_entry,
        segment.end_entry,
        segment.base_offset,
        segment.end_offset,
        segment.size,
        segment.data_bytes,
        segment.frames,
        segment.time_max,
        segment.first_append_us,
        segment.last_append_us,
        len(points),
    )
    raw = head + points.tobytes()
    return raw + _CRC.pack(crc32c(raw))


def decode_index(raw: Buffer) -> Segment:
    """The sealed segment that an index file describes, its points loaded; raises `Corrupt`."""
    if len(raw) < _HEAD.size + _CRC.size:
        raise Corrupt(f"the index is cut short: {len(raw)} bytes")
    raw = bytes(raw)
    (stored,) = _CRC.unpack_from(raw, len(raw) - _CRC.size)
    if crc32c(raw[: -_CRC.size]) != stored:
        raise Corrupt("the checksum of the index is wrong")
    magic, version, first, end_entry, base, end, size, data_bytes, frames, *times, count = _HEAD.unpack_from(
        raw
    )
    if magic != _MAGIC or version != _VERSION or len(raw) != _HEAD.size + count * _COLUMNS * 8 + _CRC.size:
        raise Corrupt("the index is of another version")
    segment = Segment(first, base)
    segment.end_entry, segment.end_offset = end_entry, end
    segment.size, segment.data_bytes, segment.frames = size, data_bytes, frames
    segment.time_max, segment.first_append_us, segment.last_append_us = times
    segment.points = Points(raw[_HEAD.size : -_CRC.size])
    segment.sealed = True
    return segment
