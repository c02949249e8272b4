"""The vocabulary of the core: identifiers, limits, hashes, and the views of batches and frames.

Three numbers are easily confused. An *entry index* counts the frames of one log. An *offset* counts the
messages of one partition. A *sequence* is an offset + 1, so that 0 is free to mean "append anywhere".
Intervals are half-open everywhere: ``[first, end)``. Times are microseconds since 1970 UTC, and their names
end in ``_us``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mmh3
import msgspec
import numpy as np
import numpy.typing as npt

KEY_BYTES_MAX = 64 * 1024
HEADER_BYTES_MAX = 64 * 1024
VALUE_BYTES_MAX = 16 * 1024 * 1024
DEDUP_ID_BYTES_MAX = 1024
BATCH_ROWS_MAX = 100_000
BATCH_BYTES_MAX = 48 * 1024 * 1024
TIMESTAMP_AHEAD_US_MAX = 3_600_000_000
PRIORITY_MAX = 4
PRIORITY_DEFAULT = 2
ANY_KEY_SEQUENCE = -1

# Optional columns of a batch, one bit each; the same bits stand in the frame header.
HAS_KEY = 1 << 0
HAS_HEADERS = 1 << 1
HAS_PRIORITY = 1 << 2
HAS_DELIVER_AT = 1 << 3
HAS_EXPIRES_AT = 1 << 4
HAS_DEDUP_ID = 1 << 5
HAS_OFFSET_DELTA = 1 << 6
COLUMNS_ALL = (1 << 7) - 1


class TopicPartition(NamedTuple):
    """The name of a partition: its topic, and its number there."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


Times = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
"""Shape (rows, 2): a 128-bit hash per row; a row without the field is all zero."""


class Command(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all requests and replies: it gives them one shape, nothing else."""


class BatchView(msgspec.Struct, frozen=True, eq=False):
    """A batch body as the core sees it: sizes and hashes, never payload bytes.

    ``keys`` and ``dedup_ids`` are filled only where the topic needs them. ``timestamp_max_us`` is the
    greatest timestamp of the batch; the ``*_bytes_max`` fields are the sizes of its largest key, headers and
    value. ``deliver_at_us`` (0 = at once) and ``ids`` (16 bytes as two big-endian halves) are present if the
    batch has delayed messages.
    """

    count: int
    columns: int
    nbytes: int
    timestamp_max_us: int
    key_bytes_max: int = 0
    header_bytes_max: int = 0
    value_bytes_max: int = 0
    keys: Hashes | None = None
    dedup_ids: Hashes | None = None
    deliver_at_us: Times | None = None
    ids: Hashes | None = None
    priorities: npt.NDArray[np.uint8] | None = None
    """None if all messages have the default; may be a view of the body."""

    def take(self, rows: npt.NDArray[np.int64]) -> BatchView:
        """The view of a batch of only these rows; sizes stay upper bounds."""
        return msgspec.structs.replace(
            self,
            count=len(rows),
            keys=None if self.keys is None else self.keys[rows],
            dedup_ids=None if self.dedup_ids is None else self.dedup_ids[rows],
            deliver_at_us=None if self.deliver_at_us is None else self.deliver_at_us[rows],
            ids=None if self.ids is None else self.ids[rows],
            priorities=None if self.priorities is None else self.priorities[rows],
        )


class CutBody(Protocol):
    """The immutable body of a batch of which some rows may be left out when it is stored."""

    def nbytes(self, rows: Times) -> int:
        """The size of a body of only these rows, in this order."""
        ...


class Columns(msgspec.Struct, frozen=True, eq=False):
    """The columns of one data frame that decisions about delivery need. A frame never changes once appended.

    A column that the frame does not have is None. `offsets` is present only if the frame has gaps.
    `key_hashes` is 0 for a row without a key, `expires_us` is 0 for a row that does not expire.
    """

    base_offset: int
    end_offset: int
    append_time_us: int
    offsets: Times | None = None
    priorities: npt.NDArray[np.uint8] | None = None
    key_hashes: npt.NDArray[np.uint64] | None = None
    expires_us: Times | None = None
    nbytes: int = 0
    """The size of the frame, from which the average size of a row is taken."""


class CachedFrames(Protocol):
    """The committed frames that the shell has cached now, for decisions about delivery.

    A decision may look only at cached frames. If it needs another one, it names it as missing; the shell
    loads the frame and asks again. Frames are immutable, so decisions still depend on nothing but the log.
    """

    def columns(self, offset: int) -> Columns | None:
        """The frame that holds an offset; None if it is not cached."""
        ...

    def reach(self, offset: int, bytes_max: int) -> int:
        """The end of the run of cached frames that begins at `offset` (which may lie inside the first frame),
        of at most `bytes_max` bytes but at least one frame; `offset` itself if its frame is not cached."""
        ...


HASH_OF_EMPTY = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
"""Replaces the hash of all zeros (that of the empty string), which means "no such field" in `Hashes`."""


def hash128(data: bytes) -> tuple[int, int]:
    """The hash of a key or dedup id for the tables of the core: murmur3 x64 128, seed 0, as two unsigned
    halves; never all zero."""
    low, high = mmh3.hash64(data, 0, True, signed=False)
    return (low, high) if low or high else HASH_OF_EMPTY


def key_hash(key: bytes) -> int:
    """The stored ``key_hash``: the low 64 bits of murmur3 x64 128, seed 0."""
    low: int = mmh3.hash64(key, 0, True, signed=False)[0]
    return low


def partition_of(data: bytes, partitions: int) -> int:
    """The partition of a key, or of a dedup id if there is no key: murmur3 x86 32, seed 0, unsigned."""
    digest: int = mmh3.hash(data, 0, signed=False)
    return digest % partitions


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """An expected refusal, as a value: it travels as a reply, and becomes an exception only in the SDK."""

    code: str
    message: str
    outcome: str = "none"
    details: dict[str, Any] = {}
