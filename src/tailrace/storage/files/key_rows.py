"""Keys of a segment's messages: rows in memory while the segment is active, a sorted file once it is sealed.

A row gives, for one message, the hash of its key, its offset, and the position of its frame in the segment.
The hash is the stored `key_hash`, 64 bits: two keys may share one, so readers compare the key itself.
Messages without a key have no row.

The file of a sealed segment, `00000000000000000042.keys`, has its rows sorted by hash, then by offset, in
blocks of 128 rows with a checksum each. Its head holds the first hash of every block:

    head      block 0: 0x03…    block 1: 0x41…    block 2: 0x41…    block 3: 0x97…
    search    0x41… may begin in block 0 and ends in block 2: three blocks are read

So a search costs a few blocks, and eight bytes of head per block. The file is derived from the frames and
written without a sync: one that a crash left torn or empty does not pass its checksums, and is made again.

`KeyRows` has one writer. Readers in other threads see the rows up to `count`, which is raised last.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tailrace.errors import Corrupt
from tailrace.format.frame import ALIGNMENT, Buffer, crc32c
from tailrace.ports import Disk

ROW = np.dtype([("hash", "<u8"), ("offset", "<i8"), ("place", "<u4")])
"""A row of the file; `place` is the position in units of the alignment of frames."""
BLOCK_ROWS = 128
KEYS_SUFFIX = ".keys"

_MAGIC = b"TRKX"
_VERSION = 1
#        magic version | first_entry, bytes of the segment that are covered, rows
_HEAD = struct.Struct("<4sI3Q")
_CRC = struct.Struct("<I")
_BLOCK_BYTES = BLOCK_ROWS * ROW.itemsize + _CRC.size

Rows = npt.NDArray[Any]
Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


class Places(NamedTuple):
    """Messages of a segment, by ascending offset."""

    offsets: Numbers
    positions: Numbers


class KeyRows:
    """Rows in the order of the log: 8 bytes per message and 24 per frame."""

    __slots__ = ("_frame_count", "_frames", "_hashes", "count")

    def __init__(self) -> None:
        self._hashes: Hashes = np.empty(64, np.uint64)
        self._frames: Numbers = np.empty((16, 3), np.int64)
        """First row, its offset, position."""
        self._frame_count = 0
        self.count = 0

    def note(self, hashes: Hashes, base_offset: int, position: int) -> None:
        """Add the messages of a frame, which have consecutive offsets; a hash of 0 stands for no key."""
        count, frames = self.count, self._frame_count
        end = count + len(hashes)
        if end > len(self._hashes):
            self._hashes = _larger(self._hashes, count, end)
        if frames == len(self._frames):
            self._frames = _larger(self._frames, frames, frames + 1)
        self._hashes[count:end] = hashes
        self._frames[frames] = count, base_offset, position
        self._frame_count = frames + 1
        self.count = end

    def find(self, key_hash: int) -> Places:
        """Places of the messages with this hash."""
        count = self.count
        rows = np.flatnonzero(self._hashes[:count] == np.uint64(key_hash))
        return Places(*self._located(rows))

    def _located(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        frames = self._frames[: self._frame_count]
        if not len(frames):
            return rows, rows
        found = frames[frames[:, 0].searchsorted(rows, "right") - 1]
        return found[:, 1] + rows - found[:, 0], found[:, 2]

    def rows(self) -> Rows:
        """All rows, as the file has them."""
        count = self.count
        keyed = np.flatnonzero(self._hashes[:count])
        offsets, positions = self._located(keyed)
        rows = np.empty(len(keyed), ROW)
        rows["hash"], rows["offset"] = self._hashes[:count][keyed], offsets
        rows["place"] = positions // ALIGNMENT
        return in_order(rows)


def _larger(array: Any, used: int, needed: int) -> Any:
    larger = np.empty((max(2 * len(array), needed), *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


def in_order(rows: Rows) -> Rows:
    """Sort rows by hash; rows of one hash keep their order."""
    return rows[np.argsort(rows["hash"], kind="stable")]


def find_rows(rows: Rows, key_hash: int) -> Places:
    """Places of the messages with this hash among sorted rows."""
    hashes, wanted = rows["hash"], np.uint64(key_hash)
    found = rows[hashes.searchsorted(wanted, "left") : hashes.searchsorted(wanted, "right")]
    return _places(found)


def _places(rows: Rows) -> Places:
    return Places(rows["offset"].astype(np.int64), rows["place"].astype(np.int64) * ALIGNMENT)


def keys_name(first_entry: int) -> str:
    """File name of the keys of the segment that begins at this entry."""
    return f"{first_entry:020d}{KEYS_SUFFIX}"


def encode_keys(first_entry: int, size: int, rows: Rows) -> list[Buffer]:
    """Encode the file for the first `size` bytes of a segment, in parts."""
    blocks = [rows[at : at + BLOCK_ROWS].tobytes() for at in range(0, len(rows), BLOCK_ROWS)]
    head = _HEAD.pack(_MAGIC, _VERSION, first_entry, size, len(rows))
    head += rows["hash"][::BLOCK_ROWS].tobytes()
    parts: list[Buffer] = [head + _CRC.pack(crc32c(head))]
    parts += [block + _CRC.pack(crc32c(block)) for block in blocks]
    return parts


class KeyFile:
    """The file of a sealed segment, opened for one search; raises `Corrupt` if a checksum is wrong."""

    def __init__(self, disk: Disk, handle: int) -> None:
        self._disk, self._handle = disk, handle
        raw = disk.read(handle, 0, _HEAD.size)
        if len(raw) < _HEAD.size:
            raise Corrupt("the keys are cut short")
        magic, version, self.first_entry, self.size, self.count = _HEAD.unpack(raw)
        if magic != _MAGIC or version != _VERSION:
            raise Corrupt("the keys are of another version")
        blocks = -(-self.count // BLOCK_ROWS)
        if self.count * ROW.itemsize > disk.size(handle):
            raise Corrupt("the keys are cut short")
        rest = disk.read(handle, _HEAD.size, blocks * 8 + _CRC.size)
        self._fences = np.frombuffer(_checked(raw + rest, "head"), "<u8", blocks, _HEAD.size)
        self._start = _HEAD.size + len(rest)

    def find(self, key_hash: int) -> Places:
        """Places of the messages with this hash."""
        wanted = np.uint64(key_hash)
        # Rows of a hash may begin in the block before the first block that begins with the hash.
        first = max(int(self._fences.searchsorted(wanted, "left")) - 1, 0)
        end = int(self._fences.searchsorted(wanted, "right"))
        return find_rows(self.rows(first, end), key_hash)

    def rows(self, first: int = 0, end: int | None = None) -> Rows:
        """The rows of blocks [first, end), by default of all."""
        end = len(self._fences) if end is None else end
        if first >= end:
            return np.empty(0, ROW)
        count = min(end * BLOCK_ROWS, self.count) - first * BLOCK_ROWS
        length = count * ROW.itemsize + (end - first) * _CRC.size
        raw = self._disk.read(self._handle, self._start + first * _BLOCK_BYTES, length)
        if len(raw) < length:
            raise Corrupt("the keys are cut short")
        blocks = [
            _checked(raw[at : at + _BLOCK_BYTES], f"block {first + at // _BLOCK_BYTES}")
            for at in range(0, length, _BLOCK_BYTES)
        ]
        return np.frombuffer(b"".join(blocks), ROW)


def check_keys(disk: Disk, path: str, size: int | None = None) -> int:
    """Check a whole file, and that it covers `size` bytes of its segment if given; returns its length."""
    handle = disk.open(path)
    try:
        file = KeyFile(disk, handle)
        if size not in (None, file.size):
            raise Corrupt("the keys are not those of their segment")
        file.rows()
        return disk.size(handle)
    finally:
        disk.close(handle)


def _checked(raw: bytes, what: str) -> bytes:
    """Check the trailing checksum; returns the bytes before it."""
    if len(raw) < _CRC.size or crc32c(raw[: -_CRC.size]) != _CRC.unpack(raw[-_CRC.size :])[0]:
        raise Corrupt(f"the checksum of the keys is wrong in the {what}")
    return raw[: -_CRC.size]
