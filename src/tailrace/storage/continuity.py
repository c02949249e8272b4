"""Checks on appends, for every engine: entries and offsets continue the log, groups of frames are whole."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.errors import InvalidRequest, StorageFault
from tailrace.format.frame import DATA, MORE, Frame


def first_numbers(frames: Sequence[Frame]) -> tuple[int, int]:
    """Entry and offset at which a log begins that never held a frame: its first append sets them."""
    offset = next((frame.header.base_offset for frame in frames if frame.header.kind == DATA), 0)
    return frames[0].header.entry, offset


def numbers_after(name: str, frames: Sequence[Frame], entry: int, offset: int) -> tuple[int, int]:
    """Entry and offset that follow `frames`, which must begin with the given ones.

    A gap raises `StorageFault` with outcome none: appends that wait behind a failed one end so.
    """
    for frame in frames:
        header = frame.header
        if header.entry != entry or (header.kind == DATA and header.base_offset != offset):
            raise StorageFault(
                f"{name}: entry {header.entry} at offset {header.base_offset} stands where entry {entry} "
                f"at offset {offset} belongs; nothing was written",
                outcome="none",
            )
        entry += 1
        if header.kind == DATA:
            offset += header.span
    if frames[-1].header.flags & MORE:
        raise InvalidRequest("an append ends with a frame that says MORE: groups are not split")
    return entry, offset
