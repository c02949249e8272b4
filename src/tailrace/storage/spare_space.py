"""Room of a data folder: the free space of its file system, and a file that holds some of it in reserve.

A broker on a full disk needs a little space to help itself: acknowledgements are facts to write, and segments
that retention or a trim frees are removed only after a snapshot is stored. The file `reserve` keeps that
space. It is released part by part when a write finds no space, and made again when there is plenty. Making it
also proves that quotas allow it, about which the free bytes of a file system say nothing. Losing the file
costs nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from tailrace.ports import Disk, Room
from tailrace.storage.files.log_folder import NO_SPACE
from tailrace.storage.storage_tuning import PARTS, RESERVE_BYTES_MAX, RESERVE_SHARE

RESERVE_NAME = "reserve"


class SpareSpace:
    """See `SpaceGauge`, for a folder of this machine; `disk` has the same root."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk

    def measure(self) -> Room:
        """See `SpaceGauge.measure`."""
        stats = os.statvfs(self._folder)
        total = stats.f_blocks * stats.f_frsize
        return Room(stats.f_bavail * stats.f_frsize, total, min(RESERVE_BYTES_MAX, total // RESERVE_SHARE))

    def hold(self) -> bool:
        """See `SpaceGauge.hold`."""
        wanted = self.measure().reserve_bytes
        try:
            handle = self._disk.open(RESERVE_NAME, create=True)
            try:
                self._disk.allocate(handle, wanted)
            finally:
                self._disk.close(handle)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            if RESERVE_NAME in self._disk.list(""):
                self._disk.remove(RESERVE_NAME)
            return False
        return True

    def release(self) -> None:
        """See `SpaceGauge.release`."""
        if RESERVE_NAME not in self._disk.list(""):
            return
        handle = self._disk.open(RESERVE_NAME)
        try:
            left = self._disk.size(handle) - self.measure().reserve_bytes // PARTS
            self._disk.truncate(handle, max(0, left))
        finally:
            self._disk.close(handle)
        if left <= 0:
            self._disk.remove(RESERVE_NAME)
