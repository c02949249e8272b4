"""Reserved space: a segment file is extended ahead of the writes, so that a sync writes data only.

Without reserved space every append would change the length of the file, and every sync would have to write
the file system's journal as well as the data.

As much is reserved as the segment has, within bounds, so that a partition with a few messages takes little
and a busy one reserves seldom. With segments of 64 MiB and the least of 64 KiB:

    bytes needed      1 KiB     66 KiB    200 KiB   20 MiB    63 MiB
    file length      65 KiB    132 KiB    400 KiB   28 MiB    64 MiB
                     └least┘   └─────double─────┘   └+8 MiB┘  └ a segment

The upper bound is there because opening after a crash reads all reserved space, to see that nothing was
written there. On a disk that is nearly full only what is needed is taken. A sealed segment is cut to its
length.
"""

from __future__ import annotations

from tailrace.core.model.topic_options import DEAD_LETTERS
from tailrace.ports import Disk
from tailrace.storage.files.log_folder import NO_SPACE
from tailrace.storage.storage_tuning import RESERVED_BYTES_MAX, RESERVED_BYTES_MIN, RESERVED_BYTES_QUIET


def least_of(name: str) -> int:
    """The least reservation in the log of this name (`topic-folder/partition`), in bytes."""
    topic = name.partition("/")[0].rpartition("~")[0]
    quiet = name.startswith("_") or topic.endswith(DEAD_LETTERS)
    return RESERVED_BYTES_QUIET if quiet else RESERVED_BYTES_MIN


def reserve(disk: Disk, handle: int, needed: int, segment_bytes: int, least: int) -> int:
    """Make the file of a segment long enough for `needed` bytes, and longer if the disk has space; returns
    its length."""
    ahead = min(max(needed, least), RESERVED_BYTES_MAX)
    wanted = min(needed + ahead, max(segment_bytes, needed))
    try:
        disk.allocate(handle, wanted)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        # Give back what the failed call took: it may be the space that is needed now.
        disk.truncate(handle, min(disk.size(handle), needed))
        disk.allocate(handle, needed)
        return needed
    return wanted
