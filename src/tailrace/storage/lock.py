"""The lock on a data folder, because two brokers on one folder would destroy each other's logs."""

from __future__ import annotations

import fcntl
import os
import socket
import weakref

from tailrace.errors import Unavailable

LOCK_NAME = "LOCK"
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """Holds the file `LOCK` of a folder until `release`, or until the process ends."""

    def __init__(self, root: str) -> None:
        self.path = f"{root}/{LOCK_NAME}"
        self._handle: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._handle, 512, 0).decode(errors="replace").strip() or "an unknown process"
            os.close(self._handle)
            self._handle = None
            raise Unavailable(f"the data folder {root} is in use by {holder}", path=self.path) from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Release the lock; may be called twice. In a forked child it lets go of its part, so that the child
        does not keep the folder when the parent is gone."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _after_fork() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_after_fork)
