"""The durable mark: a small file that says up to where a log had certainly been synced.

Two slots in different sectors are written in turn, so that a torn write never loses the older statement. The
mark may lag behind, never lead: it is what tells damage from a torn tail when no barrier does.
"""

from __future__ import annotations

import struct

import msgspec

from tailrace.format.frame import Buffer, crc32c

MARK_NAME = "durable"
SLOT_BYTES = 4096
_MAGIC = b"TRDM"
_VERSION = 1
_LAYOUT = struct.Struct("<4sI7Q")
_CRC = struct.Struct("<I")


class Mark(msgspec.Struct, frozen=True):
    """Everything before `position` of the segment that begins with entry `segment` is on the disk, and all
    segments before it."""

    sequence: int
    segment: int
    position: int
    entry: int
    """All frames below this index are durable; exact when all of the segment was synced."""
    offset: int
    """All offsets below this one are durable; exact in the same case."""
    nonce: int
    """The number that the barriers of that segment carry; 0 when there is no segment yet."""
    origin: int
    """The entry with which the log began."""


def encode(sequence: int, mark: Mark) -> tuple[bytes, int]:
    """The bytes of the mark with that number, and the position of the slot they belong to."""
    raw = _LAYOUT.pack(_MAGIC, _VERSION, sequence, *msgspec.structs.astuple(mark)[1:])
    return raw + _CRC.pack(crc32c(raw)), sequence % 2 * SLOT_BYTES


def decode(data: Buffer) -> Mark | None:
    """The newest mark that passes its checksum; None when neither slot does."""
    found: Mark | None = None
    for start in (0, SLOT_BYTES):
        raw = bytes(data[start : start + _LAYOUT.size + _CRC.size])
        if len(raw) < _LAYOUT.size + _CRC.size:
            continue
        if crc32c(raw[: _LAYOUT.size]) != _CRC.unpack_from(raw, _LAYOUT.size)[0]:
            continue
        magic, version, *fields = _LAYOUT.unpack_from(raw)
        if magic != _MAGIC or version != _VERSION:
            continue
        mark = Mark(*fields)
        if found is None or mark.sequence > found.sequence:
            found = mark
    return found
