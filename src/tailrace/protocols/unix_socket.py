"""A Unix socket: made with its mode, in the place of one whose broker is dead, and removed at the end.

The mode is set before the socket gets its name, so that nobody else can connect in between. A socket that
nobody listens on is what a killed broker left, and is replaced; one that is answered is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from tailrace.protocols.edge_tuning import OWNER_ONLY

_PROBE_S = 1.0


class UnixSocket:
    """One socket with its name; `sock` is bound, and listens as soon as a server takes it."""

    def __init__(self, path: str, mode: int = OWNER_ONLY) -> None:
        """Bind; raises OSError with the path if the place is taken."""
        self.path = path
        _make_room(path)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(self.sock.fileno(), mode)
            self.sock.bind(path)
            os.chmod(path, mode)  # The umask may have taken bits away.
            found = os.stat(path)
        except OSError as error:
            self.sock.close()
            raise OSError(error.errno, error.strerror, path) from error
        self._identity = _identity(found)

    def allow(self, mode: int) -> None:
        """Change who may connect."""
        if self._ours():
            os.chmod(self.path, mode)

    def remove(self) -> None:
        """Remove the name, if it is still this socket's."""
        if self._ours():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def _ours(self) -> bool:
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return _identity(found) == self._identity


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    """The number of a file may be used again; then the time differs."""
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _make_room(path: str) -> None:
    """Remove a socket that nobody listens on."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError(errno.EEXIST, "there is something else with that name", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except FileNotFoundError:
            return
        except OSError as error:  # Busy, or not for this user: somebody is there.
            raise OSError(errno.EADDRINUSE, f"the socket cannot be taken over ({error})", path) from error
    raise OSError(errno.EADDRINUSE, "another process listens there", path)
