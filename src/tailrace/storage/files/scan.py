"""The walk through a segment file: checked frames, and a look behind the first bad place.

A crash may leave any subset of the sectors that were not synced. So a bad frame is a *torn tail* if nothing
says that it had been synced, and *damage* if something does: the durable mark, or a barrier behind it
(`opening` has an example). Each append begins with a *barrier*, a frame without a body whose header says how
far the segment was synced before that append:

    entry, base_offset   those of the next frame
    append_time_us       the synced position
    producer_id          a random number of the segment, so that no message body can pose as a barrier
    leader_epoch         the entry at which the log once began, which tells a trimmed log from a whole one
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tailrace.errors import Corrupt
from tailrace.format.frame import (
    ALIGNMENT,
    BARRIER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Header,
    check_body,
    pack,
    parse,
)
from tailrace.ports import Disk
from tailrace.storage.storage_tuning import CHUNK

_ZEROS = bytes(CHUNK + HEADER_BYTES)
_BARRIER_START = MAGIC + bytes((VERSION, BARRIER))


Located = tuple[Header, int, memoryview]
"""A frame's header, position and body."""


class DamagedTail(NamedTuple):
    """The contents of a segment behind its first bad place."""

    used: int
    """Position behind the last byte that is not zero, or the bad place itself."""
    synced: int
    """The greatest synced position that a barrier there states."""


def barrier(entry: int, offset: int, synced: int, nonce: int, origin: int) -> bytes:
    """The packed barrier that starts an append."""
    return pack(Header(BARRIER, 0, 0, 0, entry, offset, 0, 0, origin, synced, nonce))


def damaged(path: str, position: int, reason: str) -> Corrupt:
    """The error that names a damaged place and the way to mend it."""
    return Corrupt(
        f"{path} is damaged at position {position}: {reason}; nothing was changed: "
        "restore the file from a replica or a backup, then open the log again",
        path=path,
        position=position,
    )


def scan(
    disk: Disk, handle: int, path: str, start: int, end: int, *, check: bool = True
) -> Iterator[Located]:
    """Every frame from `start` to `end`, barriers included; raises `Corrupt` at the first bad one.

    With `check`, bodies are checked too. Bodies are views into chunks of the file: keeping one keeps its
    chunk in memory.
    """
    view, base, position = memoryview(b""), start, start
    while position < end:
        at = position - base
        if len(view) - at < HEADER_BYTES:
            view, base, at = memoryview(disk.read(handle, position, min(CHUNK, end - position))), position, 0
        try:
            header = parse(view, at)
            size = header.size
            if at + size > len(view):
                length = min(max(CHUNK, size), end - position)
                view, base, at = memoryview(disk.read(handle, position, length)), position, 0
            if check:
                body = check_body(header, view, at)
            else:
                body = view[at + HEADER_BYTES : at + HEADER_BYTES + header.length]
                if at + size > len(view):
                    raise Corrupt(f"frame cut short at {at}")
        except Corrupt as error:
            raise damaged(path, position, error.message.replace(f" at {at}", "")) from None
        yield header, position, body
        position += size


def look_behind(disk: Disk, handle: int, position: int, end: int, nonce: int | None) -> DamagedTail:
    """Search the rest of a segment for bytes that are not zero, and for barriers (only those with its number,
    if that is known)."""
    used, synced = position, 0
    while position < end:
        chunk = disk.read(handle, position, min(CHUNK + HEADER_BYTES, end - position))
        if not chunk:
            break
        if not _ZEROS.startswith(chunk):
            used = position + len(chunk.rstrip(b"\0"))
            synced = max(synced, _synced_by_barriers(chunk, position, nonce))
        position += CHUNK
    return DamagedTail(used, synced)


def _synced_by_barriers(chunk: bytes, position: int, nonce: int | None) -> int:
    return max((header.append_time_us for _, header in barriers_in(chunk, position, nonce)), default=0)


def barriers_in(chunk: bytes, position: int, nonce: int | None) -> Iterator[tuple[int, Header]]:
    """The barriers in a piece of a segment that begins at `position`; only those with the segment's number,
    if that is known."""
    at = chunk.find(_BARRIER_START)
    while at >= 0:
        if (position + at) % ALIGNMENT == 0:
            try:
                header = parse(chunk, at)
            except Corrupt:
                header = None
            if (
                header is not None
                and nonce in (None, header.producer_id)
                and header.append_time_us <= position + at
            ):
                yield position + at, header
        at = chunk.find(_BARRIER_START, at + 1)
