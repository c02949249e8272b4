"""Constants of the core. Limits are promises: what is beyond them is refused, or forgotten as documented.
Policy only moves time, memory and fairness. What is part of one structure (`core.collections`, the lanes) or
of a format stands there; limits of messages are in `core.model.identifiers`."""

from __future__ import annotations

# --------------------------------------------------------------------------------------- limits of requests

SPANS_MAX = 100_000
LEASES_MAX = 100_000
OFFSET_MAX = (1 << 63) - 1
DELAY_MS_MAX = 365 * 24 * 3_600_000
"""Of a message that is given back."""
ERROR_CHARACTERS_MAX = 1_000
CANCELLED_IDS_MAX = 10_000
"""Ids in one request to cancel."""
NAME_BYTES_MAX = 245
"""Of the name of a writer."""
TARGETS_MAX = 50_000
"""Targets of one decision."""
TARGET_BYTES_MAX = 512 * 1024
"""Bytes of the targets of one decision, grouped, so that it fits into the header of a request."""

# ------------------------------------------------------------------------------- limits of what is remembered

RESULTS_KEPT = 16
"""Batches of a producer that are recognised when they are sent again."""
PRODUCERS_MAX = 100_000
PRODUCER_IDLE_US_MAX = 7 * 24 * 3600 * 1_000_000
CANCELLED_KEPT_MIN = 100_000
"""Ids of a partition that are remembered for certain. At most twice as many are kept, and those of one
request."""
LEASES_REMEMBERED_MAX = 65_536
INDEX_ENTRIES_MAX = 65_536
"""Runs of the frame index."""
GROUPS_MAX = 10_000
MEMBERS_MAX = 10_000
"""Groups of one coordinator, and members of one group."""
SCHEDULES_MAX = 10_000
"""Schedules of one coordinator."""
WRITERS_MAX = 100_000
WRITER_IDLE_US = 7 * 86_400_000_000
"""If there are too many writers, those idle for this long are forgotten."""
STAGED_BYTES_MAX = 1024 * 1024 * 1024
"""Bytes of all attempts of a partition together; they are on the disk, not in memory."""
BATCH_COST = 64 * 1024
"""Bytes that a staged batch counts at least. This bounds many tiny batches, which are all applied in one
turn."""
STAGING_TTL_US = 3_600_000_000
"""An undecided attempt may be dropped when no batch was added to it for this long."""
MEMORY_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of all writers and the attempts of their last decisions, on one coordinator."""
EVENTS_MAX = 500
"""Events kept of one message: a message that is delivered for ever must not fill the memory."""
TEXT_MAX = 300
"""Characters of an error in an event."""

# ------------------------------------------------------------------------------------------------- policy

RETRY_AFTER_MS = 100
"""When a producer may come again that found a ring full."""
CAPACITY_RUNS_MAX = 512
TOGETHER_MAX = 3
"""From this delivery on, a message whose member ends with it is suspected and set apart."""
CALM_US = 10_000_000
"""How long there must have been enough partitions for all members before a shared topic is divided."""
WINDOW_ROWS = 32_768
"""Messages in the window of a key queue that were never delivered, at most."""
KEY_ROWS = 1_024
"""Messages of one key in the window, at most, so that a held key with many messages does not fill it. The
rest is found in the ledger when these are in flight."""
RUN_MIN = 4
BLOCK_ROWS = 128
"""Rows that a lane shows at a time: at first where keys matter, and at most."""
AHEAD_FRAMES = 64
"""A lane takes rows of a frame that another lane has opened only while it has rows of fewer frames than
this."""
LAPSED_MAX = 4_096
"""Messages that one selection finds expired, at most, so that a long expired backlog does not stop everything
else."""
DRAWN_MAX = 1_024
"""Selections without a lease that are remembered before all of them are forgotten."""
FEW_BOUNDS = 16
"""Up to this many bounds, spans are leased one by one."""
NEAR = 8_192
"""Up to this many offsets, all spans of a stretch are found at once; of a longer one mostly the beginning is
wanted."""
