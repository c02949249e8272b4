"""The default storage engine: each log is a folder of segment files below one locked root."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from tailrace.errors import InvalidRequest, StorageFault, Unavailable
from tailrace.ports import Clock, Damaged, Disk, Losses
from tailrace.storage.disk import RealDisk
from tailrace.storage.files.file_log import FileLog
from tailrace.storage.files.key_search import Lock
from tailrace.storage.files.log_folder import TEMPORARY, LogFolder
from tailrace.storage.files.lost_ranges import accept_losses, find_losses
from tailrace.storage.files.mark import MARK_NAME
from tailrace.storage.files.segment import first_entry
from tailrace.storage.files.topic_folders import FolderShelf
from tailrace.storage.lock import FolderLock
from tailrace.storage.storage_tuning import INTERNAL_SEGMENT_BYTES, SEGMENT_BYTES


def _random_number() -> int:
    return secrets.randbits(63) | 1


class FileStore:
    """Logs below `root`, a path (locked while the store is open) or a `Disk`."""

    def __init__(
        self,
        root: str | Path | Disk,
        clock: Clock,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        nonce: Callable[[], int] = _random_number,
        lock: Callable[[], Lock] = threading.Lock,
    ) -> None:
        self._lock: FolderLock | None = None
        if isinstance(root, str | Path):
            disk = RealDisk(root)
            self._lock = FolderLock(disk.root)
            self._disk: Disk = disk
        else:
            self._disk = root
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._nonce = nonce
        self._make_lock = lock
        self._open: dict[str, FileLog] = {}
        self.folders = FolderShelf(self._disk)

    def log(self, name: str, damaged: Damaged) -> FileLog:
        """See `LogStore.log`. Refused while the log is open, because two writers would destroy it."""
        return self._log(name, damaged, known=False)

    def known_log(self, name: str, damaged: Damaged) -> FileLog:
        """See `LogStore.known_log`."""
        return self._log(name, damaged, known=True)

    def _log(self, name: str, damaged: Damaged, *, known: bool) -> FileLog:
        _check_name(name)
        other = self._open.get(name)
        if other is not None and not other.closed:
            raise Unavailable(f"the log {name} is open already: close it first")
        segment_bytes = self._segment_bytes
        if name.startswith("_"):
            segment_bytes = min(segment_bytes, INTERNAL_SEGMENT_BYTES)
        log = FileLog(
            self._disk,
            name,
            self._clock,
            damaged,
            segment_bytes=segment_bytes,
            nonce=self._nonce,
            known=known,
            lock=self._make_lock,
        )
        self._open[name] = log
        return log

    def find_losses(self, name: str, entries: Collection[int], snapshots: Collection[int]) -> Losses:
        """See `LogStore.find_losses`."""
        _check_name(name)
        with LogFolder(self._disk, name, self._clock).guarded("looking through"):
            return Losses(find_losses(self._disk, name, entries, snapshots, self._clock.now_us()).ranges)

    def accept_losses(self, name: str, entries: Collection[int], snapshots: Collection[int]) -> Losses:
        """See `LogStore.accept_losses`; `lost_ranges` gives the order of steps."""
        _check_name(name)
        known = self._open.get(name)
        if known is not None and not known.closed:
            raise Unavailable(f"the log {name} is open: close it first")
        folder = LogFolder(self._disk, name, self._clock)
        with folder.guarded("repairing"):
            plan = find_losses(self._disk, name, entries, snapshots, self._clock.now_us())
            return accept_losses(self._disk, folder, plan, self._nonce())

    def remove(self, name: str) -> None:
        """See `LogStore.remove`."""
        _check_name(name)
        known = self._open.pop(name, None)
        if known is not None:
            known.close()
        parent, _, _ = name.rpartition("/")
        try:
            self._disk.remove(name)
            self._disk.sync_folder(parent)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageFault(f"removing the log {name} failed: {error}") from error

    def save_note(self, name: str, data: bytes) -> None:
        """See `LogStore.save_note`; a file in the root."""
        file, disk = f"{name}.json", self._disk
        try:
            handle = disk.open(file + TEMPORARY, create=True)
            try:
                disk.truncate(handle, 0)
                disk.write(handle, [data], 0)
                disk.sync(handle)
            finally:
                disk.close(handle)
            disk.rename(file + TEMPORARY, file)
            disk.sync_folder("")
        except OSError as error:
            raise StorageFault(f"storing {file} failed: {error}") from error

    def load_note(self, name: str) -> bytes | None:
        """See `LogStore.load_note`."""
        file, disk = f"{name}.json", self._disk
        try:
            if file not in disk.list(""):
                return None
            handle = disk.open(file)
            try:
                return disk.read(handle, 0, disk.size(handle))
            finally:
                disk.close(handle)
        except OSError as error:
            raise StorageFault(f"reading {file} failed: {error}", outcome="none") from error

    def names(self) -> Iterable[str]:
        """See `LogStore.names`."""
        return list(self._walk(""))

    def _walk(self, folder: str) -> Iterator[str]:
        names = self._disk.list(folder)
        if folder and any(name == MARK_NAME or first_entry(name) is not None for name in names):
            yield folder
            return
        for name in names:
            yield from self._walk(f"{folder}/{name}" if folder else name)

    def close(self) -> None:
        """See `LogStore.close`; closes the logs that are still open."""
        try:
            for log in self._open.values():
                if not log.closed:
                    log.close()
        finally:
            self._open.clear()
            if self._lock is not None:
                self._lock.release()


def _check_name(name: str) -> None:
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part or len(part.encode()) > 255 for part in parts):
        raise InvalidRequest(
            f"{name!r} is not the name of a log: parts of up to 255 bytes, divided by slashes"
        )
