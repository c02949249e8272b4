"""The door of a data folder: the Unix socket through which others join the broker that works there.

Only the owner of the broker, the same user of the operating system, comes in, and may do everything: whoever
can write the files of the folder needs no door to change them. The socket is in the folder. Where that path
is too long for one, it is in a fresh folder that nobody else can enter, and a file in the data folder names
it.

Whoever opens the door holds the lock of the folder, so a socket that is there was left by a dead process. A
broker that cannot open its door works all the same, says so in the log, and nobody can join it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from typing import Protocol

from tailrace.client.rpc.door_path import ADDRESS_NAME, SOCKET_NAME, check_private, fits
from tailrace.core.model.access import OWNER, Caller, Origin
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import InvalidRequest
from tailrace.format.wire import Credentials

log = logging.getLogger("tailrace.door")

_PREFIX = "tailrace-"
_SHORTEST = "/tmp"  # nosec B108


class DoorListener(Protocol):
    """What listens at a door."""

    async def start_unix(self, path: str) -> None:
        """Listen on a Unix socket."""
        ...


class OwnersOnly:
    """`Authenticator` of a door: who has the socket's owner or root for a user may come in."""

    def authenticate(
        self, credentials: Credentials | None, origin: Origin, done: Callable[[Caller | Refusal], None]
    ) -> None:
        """The system has told who it is; nothing that the client says changes that."""
        if origin.uid in (os.geteuid(), 0):
            done(OWNER)
        else:
            text = (
                f"this broker is that of another user (uid {os.geteuid()}), and not open to uid {origin.uid}"
            )
            done(Refusal("unauthenticated", text, "none"))

    def still(self, caller: Caller, now_us: int) -> Refusal | None:
        """A process does not become another user's."""
        return None


class Door:
    """The door of one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)
        self._address = f"{self._folder}/{ADDRESS_NAME}"
        self._room = ""
        """The folder that was made for the socket, if one was."""
        self.path = ""
        """Where the socket is; empty while the door is closed."""

    async def open(self, listener: DoorListener) -> None:
        """Let others in; says in the log if that is not possible."""
        try:
            self._clear()
            path = f"{self._folder}/{SOCKET_NAME}"
            if not fits(path):
                path = self._away()
            await listener.start_unix(path)
            if self._room:
                self._write_address(path)
            self.path = path
        except OSError as error:
            self.close()
            log.warning("nobody can join the broker that works in %s: %s", self._folder, error)

    def close(self) -> None:
        """Remove what leads to the socket. Whoever listens there removes the socket itself."""
        self.path = ""
        if self._room:
            for name, remove in ((self._address, os.unlink), (self._room, os.rmdir)):
                with contextlib.suppress(FileNotFoundError):
                    remove(name)
            self._room = ""

    def _clear(self) -> None:
        """Remove what a dead broker left: the socket, and the folder that it made for one."""
        with contextlib.suppress(FileNotFoundError):
            path = f"{self._folder}/{SOCKET_NAME}"
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
        try:
            with open(self._address, encoding="utf-8", errors="surrogateescape") as file:
                old = file.read(4096).strip()
            os.unlink(self._address)
        except FileNotFoundError:
            return
        room = os.path.dirname(old)
        if os.path.basename(old) == SOCKET_NAME and os.path.basename(room).startswith(_PREFIX):
            with contextlib.suppress(FileNotFoundError, InvalidRequest):
                check_private(room, frozenset((os.geteuid(),)))
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(old)
                os.rmdir(room)

    def _away(self) -> str:
        """A path for the socket in a new folder of this user alone."""
        # Each is checked, and only mkdtemp makes anything in it.
        places = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), _SHORTEST]
        for place in places:
            if fits(f"{place}/{_PREFIX}12345678/{SOCKET_NAME}") and _is_safe(place):
                self._room = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
                return f"{self._room}/{SOCKET_NAME}"
        raise OSError(f"no folder for run-time files is safe and short enough: {', '.join(places)}")

    def _write_address(self, path: str) -> None:
        new = f"{self._address}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, os.fsencode(path) + b"\n")
        finally:
            os.close(handle)
        os.replace(new, self._address)


def _is_safe(place: str) -> bool:
    """Whether nobody else can rename or remove what this user makes in a folder."""
    try:
        found = os.stat(place)
    except OSError:
        return False
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0) and os.path.isabs(place)
    return mine and (not found.st_mode & 0o022 or bool(found.st_mode & stat.S_ISVTX))
