"""The envelope of a body: one Arrow IPC record-batch message, written and inspected without pyarrow.

An encapsulated message is `FF FF FF FF`, the length of the metadata, the metadata (a flatbuffer) and the
buffers. For a given set of columns the flatbuffer has a constant shape in which only numbers vary, so
`assemble` packs it in one call; pyarrow takes several times as long for a small batch. `inspect` reads the
metadata of any writer just far enough to know every length before pyarrow allocates or inflates anything.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from tailrace.core.model.identifiers import BATCH_BYTES_MAX, BATCH_ROWS_MAX
from tailrace.errors import InvalidRequest, TooLarge
from tailrace.format.frame import ALIGNMENT, Buffer
from tailrace.format.schema import counts

CONTINUATION = 0xFFFFFFFF
_V5 = 4
_RECORD_BATCH = 3
_PADS = [bytes(length) for length in range(ALIGNMENT)]

Part = tuple[int, Sequence[Buffer]]
"""One Arrow buffer: its length and the pieces that it consists of."""


@cache
def _template(columns: int) -> tuple[struct.Struct, tuple[bytes, bytes, bytes, bytes]]:
    """The layout of the head for a set of columns, and its constant pieces.

    Positions count from the start of the metadata, 8 bytes into the message, so alignment is the same. There
    are two tables, each behind its vtable, then two vectors of pairs of int64. Optional fields are not
    written.
    """
    nodes, buffers = counts(columns)
    nodes_at = 76  # the length word of a vector; its elements are aligned to 8
    buffers_at = nodes_at + 4 + 16 * nodes + 4
    end = 8 + buffers_at + 4 + 16 * buffers
    size = -(-end // ALIGNMENT) * ALIGNMENT
    first = struct.pack("<II", CONTINUATION, size - 8)
    first += struct.pack("<I", 16)  # 0: root, the Message at 16
    first += struct.pack("<6H", 12, 20, 16, 18, 4, 8)  # 4: vtable: version, header_type, header, bodyLength
    first += struct.pack("<iI", 16 - 4, 48 - 20)  # 16: Message: its vtable, its header (24: bodyLength)
    second = struct.pack("<HBx", _V5, _RECORD_BATCH)  # 32: version, header type
    second += struct.pack("<5H2x", 10, 20, 8, 4, 16)  # 36: vtable: length, nodes, buffers
    second += struct.pack("<iI", 48 - 36, nodes_at - 52)  # 48: RecordBatch: its vtable, nodes (56: length)
    third = struct.pack("<I8xI", buffers_at - 64, nodes)  # 64: buffers; 76: count of nodes
    fourth = struct.pack("<4xI", buffers)
    pieces = f"{len(first)}sq{len(second)}sq{len(third)}s"
    layout = struct.Struct(f"<{pieces}{2 * nodes}q8s{2 * buffers}q{size - end}x")
    assert layout.size == size
    return layout, (first, second, third, fourth)


@cache
def head_bytes(columns: int) -> int:
    """Length of the head that `assemble` writes, up to the buffers."""
    return _template(columns)[0].size


def assemble(columns: int, rows: int, nodes: Sequence[int], parts: Sequence[Part]) -> bytes:
    """The message of uncompressed buffers; `nodes` are pairs of length and null count, flat."""
    layout, (first, second, third, fourth) = _template(columns)
    pieces: list[Buffer] = [b""]
    places: list[int] = []
    at = 0
    for length, data in parts:
        places.append(at)
        places.append(length)
        if length:
            pieces.extend(data)
            pad = -length % ALIGNMENT
            if pad:
                pieces.append(_PADS[pad])
            at += length + pad
    pieces[0] = layout.pack(first, at, second, rows, third, *nodes, fourth, *places)
    body = b"".join(pieces)
    if len(body) != layout.size + at:
        raise InvalidRequest("values: a memoryview must consist of single bytes")
    return body


class MessageLayout(NamedTuple):
    """The metadata of a message, every length of it checked against the bytes that are there."""

    rows: int
    nodes: tuple[int, ...]
    buffers: tuple[int, ...]
    """Pairs of position (from the start of the body of the message) and length."""
    start: int
    """The position at which the buffers begin."""
    compressed: bool
    own: bool = False
    """Whether the metadata equals, except for its numbers, that of `assemble`."""


def inspect(data: Buffer, columns: int, *, bytes_max: int = BATCH_BYTES_MAX) -> MessageLayout:
    """Read and check the metadata; raises `InvalidRequest` or `TooLarge` if pyarrow must not see the rest."""
    if len(data) > bytes_max:
        raise TooLarge(f"batch: {len(data)} bytes, at most {bytes_max} are allowed", limit=bytes_max)
    try:
        return _inspect(memoryview(data).cast("B"), columns, bytes_max)
    except (struct.error, IndexError, TypeError) as error:
        raise InvalidRequest(f"batch: not an Arrow record batch message ({error})") from None


def _inspect(data: memoryview, columns: int, bytes_max: int) -> MessageLayout:
    found = _own(data, columns) or _foreign(data, columns)
    body = len(data) - found.start
    if not 0 < found.rows <= BATCH_ROWS_MAX:
        kind = TooLarge if found.rows > 0 else InvalidRequest
        raise kind(f"batch: {found.rows} rows, 1 to {BATCH_ROWS_MAX} are allowed")
    numbers = iter(found.nodes)
    for length, nulls in zip(numbers, numbers, strict=True):
        if not 0 <= nulls <= length <= bytes_max:
            raise InvalidRequest(f"batch: a column declares {length} rows and {nulls} nulls")
    end = 0
    numbers = iter(found.buffers)
    for at, length in zip(numbers, numbers, strict=True):
        if length < 0 or at < 0 or at % 8 or at + length > body or (length and at < end):
            raise InvalidRequest(f"batch: a buffer at {at} of {length} bytes is misaligned or out of bounds")
        if length:
            end = at + length
    if found.compressed:
        _check_inflated(data[found.start :], found.buffers, bytes_max)
    return found


def _own(data: memoryview, columns: int) -> MessageLayout | None:
    """The quick way for messages that `assemble` wrote: one unpack shows whether the head is ours."""
    layout, constants = _template(columns)
    if len(data) < layout.size:
        return None
    first, body, second, rows, third, *numbers = layout.unpack_from(data)
    split = 2 * counts(columns)[0]
    if (first, second, third, numbers[split]) != constants or body != len(data) - layout.size:
        return None
    return MessageLayout(rows, tuple(numbers[:split]), tuple(numbers[split + 1 :]), layout.size, False, True)


def _foreign(data: memoryview, columns: int) -> MessageLayout:
    """The slow way, through the tables of the flatbuffer."""
    marker, size = struct.unpack_from("<II", data)
    start = size + 8
    if marker != CONTINUATION or size % 8 or start > len(data):
        raise InvalidRequest("batch: no encapsulated Arrow message, or its metadata is cut short")
    meta = data[8:start]
    message = _Table(meta, struct.unpack_from("<I", meta)[0])
    if message.number("<h", 0) != _V5 or message.number("<B", 1) != _RECORD_BATCH:
        raise InvalidRequest("batch: the message is not a record batch of Arrow metadata version 5")
    body = message.number("<q", 3)
    if body != len(data) - start:
        raise InvalidRequest(f"batch: {body} bytes of buffers are declared, {len(data) - start} are there")
    batch = message.table(2)
    nodes, buffers = counts(columns)
    if batch.place(4):
        raise InvalidRequest("batch: variadic buffers are not part of the schema")
    return MessageLayout(
        batch.number("<q", 0),
        batch.pairs(1, nodes, "nodes"),
        batch.pairs(2, buffers, "buffers"),
        start,
        batch.place(3) != 0,
    )


def _check_inflated(body: memoryview, buffers: tuple[int, ...], bytes_max: int) -> None:
    """Limit the bytes that inflating will allocate. A buffer starts with its inflated length, or -1:
    stored."""
    total = 0
    numbers = iter(buffers)
    for at, length in zip(numbers, numbers, strict=True):
        if not length:
            continue
        if length < 8:
            raise InvalidRequest(f"batch: a compressed buffer of {length} bytes has no length word")
        (inflated,) = struct.unpack_from("<q", body, at)
        if inflated < -1:
            raise InvalidRequest(f"batch: a compressed buffer declares {inflated} bytes")
        total += length - 8 if inflated == -1 else inflated
    if total > bytes_max:
        raise TooLarge(f"batch: {total} bytes decompressed, at most {bytes_max} are allowed", limit=bytes_max)


class _Table:
    """A flatbuffer table; access is bounds-checked, because struct reads nothing outside of a memoryview."""

    __slots__ = ("at", "meta", "slots", "vtable")

    def __init__(self, meta: memoryview, at: int) -> None:
        (back,) = struct.unpack_from("<i", meta, at)
        self.meta, self.at, self.vtable = meta, at, at - back
        if self.vtable < 0:
            raise InvalidRequest("batch: the metadata points outside of itself")
        (size,) = struct.unpack_from("<H", meta, self.vtable)
        self.slots = (size - 4) // 2

    def place(self, slot: int) -> int:
        """The position of a field; 0 if it is absent."""
        if slot >= self.slots:
            return 0
        (offset,) = struct.unpack_from("<H", self.meta, self.vtable + 4 + 2 * slot)
        return self.at + offset if offset else 0

    def number(self, form: str, slot: int) -> int:
        """A scalar field; 0 if it is absent."""
        place = self.place(slot)
        value: int = struct.unpack_from(form, self.meta, place)[0] if place else 0
        return value

    def target(self, slot: int) -> int:
        """The position to which an offset field points; refuses an absent field."""
        place = self.place(slot)
        if not place:
            raise InvalidRequest("batch: the metadata lacks a field")
        offset: int = struct.unpack_from("<I", self.meta, place)[0]
        return place + offset

    def table(self, slot: int) -> _Table:
        """A field that is a table."""
        return _Table(self.meta, self.target(slot))

    def pairs(self, slot: int, count: int, what: str) -> tuple[int, ...]:
        """A vector of exactly `count` structs of two int64, flat."""
        at = self.target(slot)
        (found,) = struct.unpack_from("<I", self.meta, at)
        if found != count:
            raise InvalidRequest(f"batch: {found} {what}, the columns declared need {count}")
        return struct.unpack_from(f"<{2 * count}q", self.meta, at + 4)
