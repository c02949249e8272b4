"""The identities of one node in a file, replaced whole and durably at every change, and its first token.

    access.json        everybody that the broker knows, with a checksum over the bytes of it
    access.expected    there as soon as there was a user: says that access.json must be there
    admin.token        the token of the first administrator, if the broker had to make one itself

An `access.json` that is lost or damaged must never look like "no users", because a broker without users lets
everybody in. So the first save that has a user makes `access.expected` behind it; without its `access.json`
the broker refuses to start. Steps of a save, each durable before the next:

    access.json.new ──▶ its real name ──▶ access.expected, if it is missing

A crash before the last step leaves users without the second file: the next load makes it. The way out when
`access.json` is gone for good is to remove `access.expected`, too: that takes a user of the operating system
who may write to the folder.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import msgspec

from tailrace.core.model.access import Identities
from tailrace.errors import Corrupt, Full, Outcome, StorageFault
from tailrace.format.frame import crc32c
from tailrace.ports import Disk

FILE = "access.json"
EXPECTED = "access.expected"
TOKEN_FILE = "admin.token"
VERSION = 1
TOKEN_FILE_BYTES_MAX = 4096
ADVICE = (
    f"restore {FILE} from a backup; to start without any users, move it away if it is there, and remove "
    f"{EXPECTED}: then everybody who reaches this broker may do everything until there is a user"
)
_TEXT = f"This broker has users. They are in {FILE}; without that file beside this one it does not start.\n"


class _StoredIdentities(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: a version, the checksum of the identities' text, and that text."""

    version: int
    crc: int
    identities: msgspec.Raw


class FileIdentities:
    """`IdentityStore` on a disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def load(self) -> Identities | None:
        """The identities; None if there never were any. A file that is damaged, or missing although there
        were users, raises `Corrupt`."""
        data = read_small(self._disk, FILE)
        if data is None:
            if self._disk.exists(EXPECTED):
                raise _corrupt(f"{FILE} is missing, and this broker had users")
            return None
        try:
            identities = decode_identities(data)
        except Corrupt as error:
            raise _corrupt(f"{FILE}: {error.message}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError):  # The latter repeats what is in the file.
            raise _corrupt(f"{FILE} is damaged") from None
        if identities.users and not self._disk.exists(EXPECTED):
            replace_file(self._disk, EXPECTED, _TEXT.encode())
        return identities

    def save(self, identities: Identities) -> None:
        """Store them. A failure before the file has its name changes nothing."""
        replace_file(self._disk, FILE, encode_identities(identities))
        if identities.users and not self._disk.exists(EXPECTED):
            replace_file(self._disk, EXPECTED, _TEXT.encode(), outcome="unknown")


class MemoryIdentities:
    """`IdentityStore` that lives as long as the object; for tests and memory-only brokers."""

    def __init__(self) -> None:
        self._identities: Identities | None = None

    def load(self) -> Identities | None:
        """The identities as last saved."""
        return self._identities

    def save(self, identities: Identities) -> None:
        """Keep the identities."""
        self._identities = identities


class FirstToken:
    """The file with the token of the first administrator, see `broker.access.first_administrator`. `private`
    tells of a file whether it belongs to the user of the broker and nobody else can read it."""

    def __init__(self, disk: Disk, private: Callable[[str], bool]) -> None:
        self._disk = disk
        self._private = private

    def load(self) -> str | None:
        """The token in the file; None without a file. Raises `StorageFault` if others can read it."""
        if not self._disk.exists(TOKEN_FILE):
            return None
        if not self._private(TOKEN_FILE):
            text = (
                f"{TOKEN_FILE} can be read by others, or belongs to another user: remove it, and start again"
            )
            raise StorageFault(text, outcome="none")
        data = read_small(self._disk, TOKEN_FILE, TOKEN_FILE_BYTES_MAX)
        return None if data is None else data.decode("ascii", "replace").strip()

    def save(self, token: str) -> None:
        """Store it durably and whole, readable for the user of the broker only."""
        replace_file(self._disk, TOKEN_FILE, f"{token}\n".encode())


def encode_identities(identities: Identities) -> bytes:
    """The content of the file."""
    text = msgspec.json.encode(identities)
    return msgspec.json.encode(_StoredIdentities(VERSION, crc32c(text), msgspec.Raw(text)))


def decode_identities(data: bytes) -> Identities:
    """The identities in a file; raises `Corrupt` if its checksum is wrong, and `msgspec.DecodeError` if it
    does not hold identities."""
    stored = msgspec.json.decode(data, type=_StoredIdentities)
    if crc32c(bytes(stored.identities)) != stored.crc:
        raise Corrupt("the checksum is wrong")
    if stored.version != VERSION:
        raise Corrupt(f"it is of version {stored.version}, this release reads {VERSION}")
    return msgspec.json.decode(stored.identities, type=Identities)


def _corrupt(text: str) -> Corrupt:
    return Corrupt(text, outcome="none", path=FILE, position=0, hint=ADVICE)


def read_small(disk: Disk, path: str, bytes_max: int | None = None) -> bytes | None:
    """The beginning of a file, by default all of it; None if there is no such file."""
    try:
        handle = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        size = disk.size(handle)
        return disk.read(handle, 0, size if bytes_max is None else min(size, bytes_max))
    finally:
        disk.close(handle)


def replace_file(disk: Disk, path: str, data: bytes, outcome: Outcome = "none") -> None:
    """Write a new file, sync it, rename it, sync the folder. A file left over under the new name may have
    been made by somebody else, who could read it; so it is removed first."""
    new = f"{path}.new"
    try:
        if disk.exists(new):
            disk.remove(new)
        handle = disk.open(new, create=True)
        try:
            disk.write(handle, [data], 0)
            disk.sync(handle)
        finally:
            disk.close(handle)
        outcome = "unknown"
        disk.rename(new, path)
        disk.sync_folder("")
    except OSError as error:
        if outcome == "none" and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Full(f"storing {path}: no space is left") from error
        raise StorageFault(f"{path} could not be stored: {error}", outcome=outcome) from error
