"""Space for a segment, reserved ahead of the writes: a sync then writes data only.

As much is reserved as the segment has, within bounds: a partition with a few messages takes little, a busy
one reserves seldom. After a crash all of it is read, to see that nothing was written there, so it is less
than a segment. On a disk that is nearly full only what is needed is taken.
"""

from __future__ import annotations

from tailrace.core.model.topic_options import DEAD_LETTERS
from tailrace.ports import Disk
from tailrace.storage.files.log_folder import NO_SPACE

RESERVED_BYTES_MIN = 64 * 1024
RESERVED_BYTES_QUIET = 8 * 1024
"""The least for logs that mostly stay small: the broker's own, and dead letters."""
RESERVED_BYTES_MAX = 8 * 1024 * 1024


def least_of(name: str) -> int:
    """What is reserved at least in the log of that name (`topic-folder/partition`)."""
    topic = name.partition("/")[0].rpartition("~")[0]
    quiet = name.startswith("_") or topic.endswith(DEAD_LETTERS)
    return RESERVED_BYTES_QUIET if quiet else RESERVED_BYTES_MIN


def reserve(disk: Disk, handle: int, needed: int, segment_bytes: int, least: int) -> int:
    """Make the file of a segment long enough for `needed` bytes, and longer where there is room; returns how
    long."""
    ahead = min(max(needed, least), RESERVED_BYTES_MAX)
    wanted = min(needed + ahead, max(segment_bytes, needed))
    try:
        disk.allocate(handle, wanted)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        # What it got before it failed is given back: it may be what is missing.
        disk.truncate(handle, min(disk.size(handle), needed))
        disk.allocate(handle, needed)
        return needed
    return wanted
