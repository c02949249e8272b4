"""Constants of storage. Limits are for what is read from a disk and may be wrong. Policy only moves time,
memory and space. Sizes that are part of a format stand with the format."""

from __future__ import annotations

# ------------------------------------------------------------------------------------------------- limits

ENTRIES_MAX = 1 << 26
OFFSETS_MAX = 1 << 42
"""More than a segment of 4 GiB can hold: a frame has 128 bytes at least, and 192 bytes may hold 100,000
messages."""

# ------------------------------------------------------------------------------------------------- policy

SEGMENT_BYTES = 64 * 1024 * 1024
INTERNAL_SEGMENT_BYTES = 4 * 1024 * 1024
"""Segment size of internal logs, which are many and small."""
MARK_INTERVAL_US = 1_000_000
"""Between two writes of the durable mark."""
SNAPSHOTS_KEPT = 2
CACHED_SEGMENTS = 4
"""Newest segments that may stay in the page cache. Readers at the end are served from the hot tail, and
readers far behind read whole segments anyway."""
COPIED_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of frames that one read copies into memory; further frames are mapped."""
CHUNK = 4 * 1024 * 1024
"""Bytes that are read at once where a whole segment is."""
GLANCE = 64 * 1024
"""The same where only headers are looked for; see `frame_scan`."""
RESERVED_BYTES_MIN = 64 * 1024
RESERVED_BYTES_QUIET = 8 * 1024
"""The least for logs that mostly stay small: internal ones, and dead letters."""
RESERVED_BYTES_MAX = 8 * 1024 * 1024
"""Space that a log takes ahead of its writes."""
RESERVE_BYTES_MAX = 8 * 1024 * 1024
RESERVE_SHARE = 50
"""The reserve of a full disk takes at most one part in this many of a file system."""
PARTS = 8
"""Parts in which the reserve is released, so that other programs that fill the disk do not get all of it."""
SYNCS_AT_ONCE = 8
"""The file system writes its journal once for all that wait."""
