"""The lock on a data folder, because two brokers on one folder would destroy each other's logs."""

from __future__ import annotations

import fcntl
import os
import socket

from tailrace.errors import Unavailable

LOCK_NAME = "LOCK"


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

    def release(self) -> None:
        """Release the lock; may be called twice."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
