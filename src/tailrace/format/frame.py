"""The frame: the unit of the log and of reads; a fixed header of 128 bytes, then a padded body.

A frame has `HEADER_BYTES` of header, `length` bytes of body, and zeros up to the next multiple of 64, so that
the Arrow buffers in the body stay aligned in the file. All numbers are little-endian.

There are two checksums (CRC32C) with different owners. `body_crc` covers the body and comes from the
producer, so it proves the payload end to end. `header_crc` covers the header, `body_crc` included, and comes
from the leader of the partition, because only the leader knows entry, offset, epoch and append time. `parse`
checks `header_crc` before it trusts a length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.core.model.identifiers import COLUMNS_ALL
from tailrace.errors import Corrupt

MAGIC = b"TRLF"
VERSION = 1
HEADER_BYTES = 128
ALIGNMENT = 64

DATA = 1
SCHEDULED = 2
FACTS = 3
EPOCH_START = 4
SNAPSHOT_MARK = 5
BARRIER = 6
STAGED = 7
LOST = 8
"""Replaces lost entries: `producer_id` is their number, `timestamp_max_us` the offset behind them."""
KINDS = frozenset((DATA, SCHEDULED, FACTS, EPOCH_START, SNAPSHOT_MARK, BARRIER, STAGED, LOST))

MORE = 1 << 15
"""Flag: the next frame belongs to the same group; a group applies whole or not at all."""
RELEASED = 1 << 8
"""Flag of a data frame: its rows were delayed or staged before, and their dedup ids were counted then."""

#        magic version kind flags | length body_crc | entry base | span count | epoch time | pid | pepoch pseq
# | max ts wall
_LAYOUT = struct.Struct("<4sBBHIIQQIIQqQIIqq")
_CRC = struct.Struct("<I")
_CRC_AT = HEADER_BYTES - 4
_FILL = bytes(_CRC_AT - _LAYOUT.size)
_ZEROS = bytes(ALIGNMENT)
_COPIED_MAX = 4096
LENGTH_MAX = 64 * 1024 * 1024

Buffer = bytes | bytearray | memoryview


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The decoded header. `flags` holds the column bits of the batch, RELEASED and MORE."""

    kind: int
    flags: int
    length: int
    body_crc: int
    entry: int
    base_offset: int = 0
    span: int = 0
    count: int = 0
    leader_epoch: int = 0
    append_time_us: int = 0
    producer_id: int = 0
    producer_epoch: int = 0
    producer_sequence: int = 0
    timestamp_max_us: int = 0
    wall_us: int = 0
    """The wall time of the decision; 0: the same as the append time."""

    @property
    def size(self) -> int:
        """Bytes of the whole frame on disk, padding included."""
        return HEADER_BYTES + self.length + -self.length % ALIGNMENT

    @property
    def columns(self) -> int:
        """The optional columns of the body, a bit each."""
        return self.flags & COLUMNS_ALL

    @property
    def end_offset(self) -> int:
        """The offset behind the last one of this frame."""
        return self.base_offset + self.span


class Frame(msgspec.Struct, frozen=True, eq=False):
    """A header with its packed bytes and a body that is never copied."""

    header: Header
    head: bytes
    body: Buffer
    keys: npt.NDArray[np.uint64] | None = None
    """The `key_hash` of each message, 0: no key; None if keys are not indexed. Not stored."""

    @property
    def size(self) -> int:
        """Bytes of the whole frame on disk, padding included."""
        return len(self.head) + len(self.body) + -len(self.body) % ALIGNMENT

    def parts(self) -> list[Buffer]:
        """The pieces to write, in order, for one vectored write."""
        pad = -self.header.length % ALIGNMENT
        return [self.head, self.body, _ZEROS[:pad]] if pad else [self.head, self.body]


def padded(length: int) -> int:
    """Length rounded up to the frame alignment."""
    return (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def crc32c(data: Buffer) -> int:
    """CRC32C of a contiguous buffer. Memoryviews go through numpy, because the library refuses them."""
    if not isinstance(data, bytes):
        # Up to this size a copy costs less than wrapping by numpy.
        data = bytes(data) if len(data) < _COPIED_MAX else np.frombuffer(data, np.uint8)  # type: ignore[assignment]
    value: int = google_crc32c.value(data)
    return value


def pack(header: Header) -> bytes:
    """The 128 bytes of a header, checksum included."""
    raw = _LAYOUT.pack(
        MAGIC,
        VERSION,
        header.kind,
        header.flags,
        header.length,
        header.body_crc,
        header.entry,
        header.base_offset,
        header.span,
        header.count,
        header.leader_epoch,
        header.append_time_us,
        header.producer_id,
        header.producer_epoch,
        header.producer_sequence,
        header.timestamp_max_us,
        header.wall_us,
    )
    raw += _FILL
    return raw + _CRC.pack(google_crc32c.value(raw))


def make(header: Header, body: Buffer = b"") -> Frame:
    """A frame with a header whose `length` and `body_crc` already describe the body."""
    assert header.length == len(body), f"header says {header.length} bytes, the body has {len(body)}"
    return Frame(header, pack(header), body)


def parse(data: Buffer, position: int = 0) -> Header:
    """Decode and check the header at `position`; raises only `Corrupt`, with the reason."""
    raw = bytes(data[position : position + HEADER_BYTES])
    if len(raw) < HEADER_BYTES:
        raise Corrupt(
            f"header cut short at {position}: {len(raw)} of {HEADER_BYTES} bytes", position=position
        )
    if raw[:4] != MAGIC:
        raise Corrupt(f"no frame at {position}: magic is {raw[:4].hex()}", position=position)
    (stored,) = _CRC.unpack_from(raw, _CRC_AT)
    if google_crc32c.value(raw[:_CRC_AT]) != stored:
        raise Corrupt(f"header checksum is wrong at {position}", position=position)
    fields = _LAYOUT.unpack_from(raw)
    if fields[1] != VERSION:
        raise Corrupt(
            f"frame version {fields[1]} at {position}: this release reads {VERSION}", position=position
        )
    if fields[2] not in KINDS or fields[4] > LENGTH_MAX:
        raise Corrupt(
            f"frame kind {fields[2]}, length {fields[4]} at {position} make no sense", position=position
        )
    return Header(*fields[2:])


def check_body(header: Header, data: Buffer, position: int = 0) -> memoryview:
    """The body of the frame at `position`; its CRC and the zeros behind it are checked."""
    start = position + HEADER_BYTES
    view = memoryview(data)
    body = view[start : start + header.length]
    padding = -header.length % ALIGNMENT
    tail = view[start + header.length : start + header.length + padding]
    if len(body) < header.length or len(tail) < padding:
        raise Corrupt(f"frame cut short at {position}", position=position)
    if crc32c(body) != header.body_crc:
        raise Corrupt(f"body checksum is wrong in the frame at {position}", position=position)
    if padding and tail != _ZEROS[:padding]:
        raise Corrupt(f"padding is not zero in the frame at {position}", position=position)
    return body


def data_frames(data: Buffer) -> Iterator[Frame]:
    """The data frames of contiguous bytes whose bodies were checked when they were read. Heads are copied as
    they are: to pack each again would take as long as to parse it."""
    view, position, end = memoryview(data), 0, len(data)
    while position < end:
        header = parse(view, position)
        start, size = position + HEADER_BYTES, header.size
        if header.kind == DATA:
            yield Frame(header, bytes(view[position:start]), view[start : start + header.length])
        position += size


def walk(data: Buffer, *, check: bool = True) -> Iterator[tuple[Header, memoryview]]:
    """All frames of contiguous bytes, in order; raises `Corrupt` at the first damaged one."""
    view, position, end = memoryview(data), 0, len(data)
    while position < end:
        header = parse(view, position)
        if check:
            yield header, check_body(header, view, position)
        else:
            start = position + HEADER_BYTES
            yield header, view[start : start + header.length]
        position += header.size
