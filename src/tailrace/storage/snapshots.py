"""Snapshot files: opaque state with one checksum over everything; each is whole or does not count."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import google_crc32c
import numpy as np

from tailrace.errors import Corrupt
from tailrace.format.frame import Buffer
from tailrace.ports import Disk, Snapshot
from tailrace.storage.files.log_folder import LogFolder
from tailrace.storage.storage_tuning import SNAPSHOTS_KEPT

_MAGIC = b"TRSN"
_VERSION = 1
_HEAD = struct.Struct("<4sIQQI")
_CRC = struct.Struct("<I")
_PREFIX, _SUFFIX = "snapshot-", ".snap"


def snapshot_name(entry: int) -> str:
    """File name of the snapshot as of an entry."""
    return f"{_PREFIX}{entry:020d}{_SUFFIX}"


def snapshot_entry(name: str) -> int | None:
    """The entry that a snapshot's file name states; None for any other file."""
    digits = name[len(_PREFIX) : -len(_SUFFIX)]
    if name.startswith(_PREFIX) and name.endswith(_SUFFIX) and digits.isdigit():
        return int(digits)
    return None


def _checksum(parts: Sequence[Buffer]) -> int:
    value = 0
    for part in parts:
        value = google_crc32c.extend(
            value, part if isinstance(part, bytes) else np.frombuffer(part, np.uint8)
        )
    return value


def encode_snapshot(snapshot: Snapshot) -> list[Buffer]:
    """The parts of a snapshot file: head, lengths of the chunks, the chunks (not copied), checksum."""
    chunks = [chunk for chunk in snapshot.chunks if len(chunk)]
    head = _HEAD.pack(_MAGIC, _VERSION, snapshot.entry, snapshot.offset, len(chunks))
    lengths = struct.pack(f"<{len(chunks)}Q", *map(len, chunks))
    parts: list[Buffer] = [head, lengths, *chunks]
    return [*parts, _CRC.pack(_checksum(parts))]


def decode_snapshot(raw: bytes) -> Snapshot:
    """Decode a snapshot file; raises `Corrupt`. Chunks are views; empty chunks are not stored."""
    view = memoryview(raw)
    if len(raw) < _HEAD.size + _CRC.size:
        raise Corrupt(f"the snapshot is cut short: {len(raw)} bytes")
    if _checksum([view[: -_CRC.size]]) != _CRC.unpack_from(raw, len(raw) - _CRC.size)[0]:
        raise Corrupt("the checksum of the snapshot is wrong")
    magic, version, entry, offset, count = _HEAD.unpack_from(raw)
    if magic != _MAGIC or version != _VERSION:
        raise Corrupt(f"the snapshot is of version {version}: this release reads {_VERSION}")
    lengths = struct.unpack_from(f"<{count}Q", raw, _HEAD.size)
    chunks: list[Buffer] = []
    at = _HEAD.size + 8 * count
    for length in lengths:
        chunks.append(view[at : at + length])
        at += length
    return Snapshot(entry, offset, chunks)


def load_snapshot(disk: Disk, path: str) -> Snapshot:
    """Read and check a snapshot file; raises `Corrupt` or OSError."""
    handle = disk.open(path)
    try:
        return decode_snapshot(disk.read(handle, 0, disk.size(handle)))
    finally:
        disk.close(handle)


class SnapshotShelf:
    """The good snapshots of a log; the two newest are kept."""

    def __init__(self, folder: LogFolder) -> None:
        self._folder = folder
        self.known: list[tuple[int, int]] = []
        """Entry and offset, newest first."""

    def take_over(self, snapshots: Sequence[Snapshot]) -> None:
        """The log was opened, and has these, newest first."""
        self.known = [(snapshot.entry, snapshot.offset) for snapshot in snapshots]

    def save(self, snapshot: Snapshot) -> None:
        """Store a snapshot durably, then remove all but this and the one before."""
        self._folder.save(snapshot_name(snapshot.entry), encode_snapshot(snapshot))
        others = [other for other in self.known if other[0] != snapshot.entry]
        self.known = sorted([(snapshot.entry, snapshot.offset), *others], reverse=True)[:SNAPSHOTS_KEPT]
        kept = {entry for entry, _ in self.known}
        self.drop(lambda entry: entry not in kept)

    def drop(self, unwanted: Callable[[int], bool]) -> None:
        """Remove snapshots whose entry is unwanted, damaged ones included."""
        names = self._folder.disk.list(self._folder.folder)
        gone = [name for name in names if (at := snapshot_entry(name)) is not None and unwanted(at)]
        self.known = [known for known in self.known if not unwanted(known[0])]
        if gone:
            self._folder.remove(*gone)
