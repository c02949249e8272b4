"""Where the door of a data folder is: the Unix socket through which others join the broker that works there.

It is `embedded.sock` in the folder. Where that path is too long for a socket, it is in a folder of its own
for run-time files, and `embedded.address` in the data folder names it.
"""

from __future__ import annotations

import os
import stat

from tailrace.client.sdk_tuning import ADDRESS_BYTES_MAX, SOCKET_PATH_BYTES_MAX
from tailrace.errors import InvalidRequest

SOCKET_NAME = "embedded.sock"
ADDRESS_NAME = "embedded.address"


def fits(path: str) -> bool:
    """Whether a Unix socket can have this path."""
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def data_folder(text: str) -> str:
    """The whole path of a data folder as it was named; raises `InvalidRequest`."""
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise InvalidRequest(f"url: nobody knows the home folder that {text!r} means")
    return os.path.abspath(expanded)


def find_door(folder: str) -> tuple[str, frozenset[int]]:
    """The path of a folder's door, and the users whose broker may be behind it. FileNotFoundError if there
    is none, `InvalidRequest` if somebody else could have put it there."""
    owners = frozenset((os.geteuid(), 0, os.stat(folder).st_uid))
    path = f"{folder}/{SOCKET_NAME}"
    if fits(path) and os.path.exists(path):
        return path, owners
    address = f"{folder}/{ADDRESS_NAME}"
    handle = os.open(address, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in owners or found.st_mode & 0o022:
            raise InvalidRequest(f"{address} may be somebody else's: it is not followed", path=address)
        text = os.read(handle, ADDRESS_BYTES_MAX)
    finally:
        os.close(handle)
    path = os.fsdecode(text).strip()
    if not os.path.isabs(path) or not fits(path):
        raise InvalidRequest(f"{address} does not hold the path of a socket", path=address)
    check_private(os.path.dirname(path), owners)
    return path, owners


def check_private(folder: str, owners: frozenset[int]) -> None:
    """Raise `InvalidRequest` unless only one of these users can change what is in a folder."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners or found.st_mode & 0o077:
        raise InvalidRequest(f"{folder} is not a folder of this user alone", path=folder)
