"""The real disk: the `Disk` port on plain system calls below one root folder.

Handles are file descriptors. Files are 0600 and folders 0700, because they hold what users sent.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pyarrow as pa

from tailrace.format.frame import Buffer
from tailrace.storage.storage_tuning import SYNCS_AT_ONCE

_PARTS_MAX = os.sysconf("SC_IOV_MAX")
_CALL_BYTES_MAX = 1024 * 1024
"""Bytes of one system call. For larger ones the kernel allocates large pieces of memory, which in a virtual
machine it mostly has to request first: that is 13 times as slow."""
_BULK_BYTES = 32 * 1024 * 1024
"""Writes from this size on do not stay in the page cache: they would evict everything else."""
_DONTCACHE = 0x80
"""RWF_DONTCACHE: drop pages as soon as they are on the disk. In Linux since 6.14, on some file systems."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ: read pages, with an error if that fails. In Linux since 5.14."""
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_FILE_MODE = 0o600
_FOLDER_MODE = 0o700
_PROBE_BYTES = 1024 * 1024


class RealDisk:
    """Files below `root`, which is created if it is missing."""

    def __init__(self, root: str | Path) -> None:
        self.root = os.path.abspath(root)
        self._pool: ThreadPoolExecutor | None = None
        if not os.path.isdir(self.root):
            os.makedirs(self.root, _FOLDER_MODE, exist_ok=True)  # Another process may make it now, too.
            self._sync_path(os.path.dirname(self.root))

    def _path(self, path: str) -> str:
        return f"{self.root}/{path}"

    def open(self, path: str, *, create: bool = False) -> int:
        """Open for reading and writing; returns the descriptor."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return os.open(self._path(path), flags, _FILE_MODE)

    def close(self, handle: int) -> None:
        """Close a descriptor."""
        os.close(handle)

    def write(self, handle: int, parts: Sequence[Buffer], position: int) -> None:
        """One pwritev for a small write; continues after short writes."""
        total = sum(map(len, parts))
        written = 0
        if total <= _CALL_BYTES_MAX and len(parts) <= _PARTS_MAX:
            written = os.pwritev(handle, parts, position)
        if written < total:
            _write_rest(handle, parts, position, written, bulk=total >= _BULK_BYTES)

    def read(self, handle: int, position: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""
        data = os.pread(handle, length, position)
        if len(data) == length or not data:
            return data
        pieces = [data]
        got = len(data)
        while got < length:
            data = os.pread(handle, length - got, position + got)
            if not data:
                break
            pieces.append(data)
            got += len(data)
        return b"".join(pieces) if len(pieces) > 1 else pieces[0]

    def view(self, handle: int, position: int, length: int) -> memoryview:
        """Read into memory of Arrow's pool, which reuses pages where malloc would map and fault new ones."""
        view = memoryview(pa.allocate_buffer(length)).cast("B")
        got = 0
        while got < length:
            count = os.preadv(handle, [view[got:]], position + got)
            if not count:
                break
            got += count
        return view[:got]

    def map(self, handle: int, position: int, length: int) -> memoryview:
        """Map the pages; the mapping ends with its last view. Touching a page that the disk cannot read would
        kill the process, so all of them are read first."""
        length = min(length, os.fstat(handle).st_size - position)
        if length <= 0:
            return memoryview(b"")
        skip = position % mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(handle, skip + length, access=mmap.ACCESS_READ, offset=position - skip)
        try:
            pages.madvise(_POPULATE_READ)
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise OSError(errno.EIO, "a page cannot be read") from error
            if error.errno not in _UNSUPPORTED:
                raise
            probe = bytearray(min(length, _PROBE_BYTES))
            for at in range(position, position + length, len(probe)):
                os.preadv(handle, [probe], at)
        return memoryview(pages)[skip:]

    def sync(self, handle: int) -> None:
        """fdatasync."""
        os.fdatasync(handle)

    def allocate(self, handle: int, length: int) -> None:
        """posix_fallocate; if the file system does not support it, the file is only extended."""
        try:
            os.posix_fallocate(handle, 0, length)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            if os.fstat(handle).st_size < length:
                os.ftruncate(handle, length)

    def truncate(self, handle: int, length: int) -> None:
        """Cut or extend the file to `length`."""
        os.ftruncate(handle, length)

    def size(self, handle: int) -> int:
        """Length of the file."""
        return os.fstat(handle).st_size

    def rename(self, old: str, new: str) -> None:
        """Replace `new` by `old` atomically."""
        os.replace(self._path(old), self._path(new))

    def uncache(self, path: str, position: int = 0) -> None:
        """posix_fadvise(DONTNEED), if the system has it. It drops whole pages, and none that is dirty."""
        if hasattr(os, "posix_fadvise"):
            handle = os.open(self._path(path), os.O_RDONLY | os.O_CLOEXEC)
            try:
                start = position - position % mmap.PAGESIZE
                os.posix_fadvise(handle, start, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)

    def remove(self, path: str) -> None:
        """Unlink a file, or a whole folder."""
        full = self._path(path)
        if os.path.isdir(full) and not os.path.islink(full):
            shutil.rmtree(full)
        else:
            os.unlink(full)

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted; empty if there is no such folder."""
        try:
            return sorted(os.listdir(self._path(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make_folder(self, folder: str) -> None:
        """Create a folder and its parents, each synced into its parent."""
        path = self.root
        for part in folder.split("/"):
            parent, path = path, f"{path}/{part}"
            try:
                os.mkdir(path, _FOLDER_MODE)
            except FileExistsError:
                continue
            self._sync_path(parent)

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return os.path.exists(self._path(path))

    def add_folder(self, folder: str) -> None:
        """mkdir; the name becomes durable with a sync of the parent."""
        with suppress(FileExistsError):
            os.mkdir(self._path(folder), _FOLDER_MODE)

    def sync_all(self, handles: Sequence[int], folders: Sequence[str]) -> None:
        """Sync in threads: the file system writes its journal once for all that wait."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(SYNCS_AT_ONCE, "storage-sync")
        begun = [self._pool.submit(self.sync, handle) for handle in handles]
        begun += [self._pool.submit(self.sync_folder, folder) for folder in folders]
        wait(begun)
        for each in begun:
            each.result()

    def sync_folder(self, folder: str) -> None:
        """fsync of a directory."""
        self._sync_path(self._path(folder))

    @staticmethod
    def _sync_path(path: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_rest(handle: int, parts: Sequence[Buffer], position: int, written: int, *, bulk: bool) -> None:
    """Write the rest of `parts` after their first `written` bytes."""
    rest = deque(memoryview(part).cast("B") for part in parts)
    flags = _DONTCACHE if bulk else 0
    while True:
        skip = written
        while rest and skip >= len(rest[0]):
            skip -= len(rest.popleft())
        if not rest:
            return
        rest[0] = rest[0][skip:]
        position += written
        try:
            written = os.pwritev(handle, _first(rest), position, flags)
        except OSError as error:
            if not flags or error.errno not in _UNSUPPORTED:
                raise
            written = flags = 0  # Unsupported here: through the cache.
            continue
        if written == 0:
            raise OSError(errno.EIO, "pwritev wrote nothing")


def _first(parts: Iterable[memoryview]) -> list[memoryview]:
    """The first parts, as much as one system call takes."""
    taken: list[memoryview] = []
    room = _CALL_BYTES_MAX
    for part in islice(parts, _PARTS_MAX):
        taken.append(part[:room])
        room -= len(taken[-1])
        if not room:
            break
    return taken
