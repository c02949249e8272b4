"""The durable mark: a small file that says how far a log was certainly synced.

Two slots in different sectors are written in turn, so that a torn write never destroys the older mark. The
mark may lag behind the log but never leads it. It tells damage from a torn tail where no barrier does.
"""

from __future__ import annotations

import struct

import msgspec

from tailrace.format.frame import Buffer, crc32c

MARK_NAME = "durable"
SLOT_BYTES = 4096
_MAGIC = b"TRDM"
_VERSION = 2
_LAYOUT = struct.Struct("<4sI8Q")
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
    """The number in the barriers of that segment; 0 before the first segment."""
    origin: int
    """The entry at which the log began."""
    first: int
    """The first entry that was not trimmed. A trim raises it before it removes files, so a log whose files
    begin behind it has lost some."""

    @property
    def first_of_all(self) -> bool:
        """Whether the mark says that the log is empty and begins at entry 0."""
        return not any(msgspec.structs.astuple(self)[1:])


def encode(sequence: int, mark: Mark) -> tuple[bytes, int]:
    """The bytes of a mark with this sequence number, and the position of its slot."""
    raw = _LAYOUT.pack(_MAGIC, _VERSION, sequence, *msgspec.structs.astuple(mark)[1:])
    return raw + _CRC.pack(crc32c(raw)), sequence % 2 * SLOT_BYTES


def first_slots() -> list[tuple[bytes, int]]:
    """Both slots of an empty log, each with its position."""
    return [encode(sequence, Mark(sequence, 0, 0, 0, 0, 0, 0, 0)) for sequence in (1, 2)]


def decode(data: Buffer) -> Mark | None:
    """The newest mark that passes its checksum; None when neither slot does."""
    found: Mark | None = None
    for start in (0, SLOT_BYTES):
        raw = bytes(data[start : start + SLOT_BYTES])
        if len(raw) < _LAYOUT.size + _CRC.size:
            continue
        magic, version, *fields = _LAYOUT.unpack_from(raw)
        if (magic, version) != (_MAGIC, _VERSION):
            continue
        if crc32c(raw[: _LAYOUT.size]) != _CRC.unpack_from(raw, _LAYOUT.size)[0]:
            continue
        mark = Mark(*fields)
        if found is None or mark.sequence > found.sequence:
            found = mark
    return found
