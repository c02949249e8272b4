"""The folder of one log: all changes of its files, and the fence that a failed sync leaves.

*The fence.* When a sync fails, the kernel drops the pages that it could not write, and the next sync succeeds
without them:

    write b ──▶ sync: error              b is in the page cache only, and counts as clean
    write c ──▶ sync: ok                 c is on the disk, b is not, and never will be
    a broker that believed the second sync would acknowledge c, and b with it

So the first failed sync fences the log for good: nothing is written or synced again until the log is opened
anew, which reads what is really on the disk. Every sync goes through `LogFolder.sync` or `sync_names`, which
refuse behind the fence. Two syncs of one file never run side by side, because the kernel reports an error to
one of them only; `FileLog` has a lock for that.

*Small files* beside the frames are written in one of three ways:

    save           temporary file, sync, rename, sync of the folder: whole or not at all. Snapshots, repairs
    write_whole    synced in place; its name becomes durable with the next `sync_names`. Indexes
    put_derived    temporary file and rename, without a sync. Keys: they have checksums of their own, and
                   can be made again from the frames

*Quarantine* is the other end of a log's writing life: damage was found. Writes are refused from then on, the
damaged file stays as it is, and a note beside it names the file and the position, so that the next opening
does not take the place for a torn tail.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tailrace.errors import Corrupt, Full, Outcome, StorageFault
from tailrace.format.frame import Buffer
from tailrace.ports import Clock, Disk
from tailrace.storage.files.mark import MARK_NAME, SLOT_BYTES, Mark, encode

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
TEMPORARY = ".tmp"
QUARANTINE_NAME = "quarantine"


class LogFolder:
    """Changes the files of one log; keeps the fence and counts syncs."""

    def __init__(self, disk: Disk, folder: str, clock: Clock) -> None:
        self.disk = disk
        self.folder = folder
        self.clock = clock
        self.fault: StorageFault | None = None
        self.syncs = 0
        self.sync_us = 0

    def path(self, name: str) -> str:
        """Path of a file of the log on the disk."""
        return f"{self.folder}/{name}"

    def sync(self, handle: int) -> None:
        """Sync a file; a failure fences the log."""
        began = self.clock.now_us()
        self._fencing(lambda: self.disk.sync(handle))
        self.syncs += 1
        self.sync_us += self.clock.now_us() - began

    def sync_names(self) -> None:
        """Make creations, renames and removals durable; a failure fences the log."""
        self._fencing(lambda: self.disk.sync_folder(self.folder))

    def _fencing(self, step: Callable[[], None]) -> None:
        self.require_usable(outcome="unknown")
        try:
            step()
        except OSError as error:
            self.fault = StorageFault(f"{self.folder} is fenced, a sync failed: {error}; open the log again")
            raise self.fault from error

    @contextmanager
    def guarded(self, act: str, *, untouched: bool = False) -> Iterator[None]:
        """Fence the log on an OSError that the block did not handle: nobody knows what the step left behind.
        With `untouched` the step can be begun anew, and a full disk is reported as `Full`."""
        try:
            yield
        except OSError as error:
            fault = self.fence(act, error)
            raise (refused(f"{act} {self.folder}", error) if untouched else fault) from error

    def fence(self, act: str, error: OSError) -> StorageFault:
        """Refuse everything from now on; returns the error to raise."""
        self.fault = StorageFault(f"{act} {self.folder} failed: {error}; open the log again")
        return self.fault

    def require_usable(self, *, outcome: Outcome) -> None:
        """Raise the error that fenced or quarantined the log, if any. Pass outcome `none` only if nothing of
        the request has been written."""
        fault = self.fault
        if fault is not None:
            raise type(fault)(fault.message, outcome=outcome, **fault.details)

    def write_whole(self, name: str, parts: Sequence[Buffer]) -> None:
        """Write and sync a small file; its name becomes durable with `sync_names`."""
        handle = self.disk.open(self.path(name), create=True)
        try:
            self.disk.truncate(handle, 0)
            self.disk.write(handle, parts, 0)
            self.sync(handle)
        finally:
            self.disk.close(handle)

    def save(self, name: str, parts: Sequence[Buffer]) -> None:
        """Store a file durably, whole or not at all; a full disk leaves nothing behind."""
        temporary = name + TEMPORARY
        try:
            self.write_whole(temporary, parts)
        except OSError as error:
            if temporary in self.disk.list(self.folder):
                self.disk.remove(self.path(temporary))
            raise refused(f"writing {self.path(name)}", error) from error
        self.disk.rename(self.path(temporary), self.path(name))
        self.sync_names()

    def put_derived(self, name: str, parts: Sequence[Buffer]) -> None:
        """Store a derived file without a sync: its own checksums tell whether it is whole. A failure leaves
        nothing behind."""
        temporary = self.path(name + TEMPORARY)
        handle = self.disk.open(temporary, create=True)
        try:
            self.disk.truncate(handle, 0)
            self.disk.write(handle, parts, 0)
        except OSError:
            self.disk.remove(temporary)
            raise
        finally:
            self.disk.close(handle)
        self.disk.rename(temporary, self.path(name))

    def remove(self, *names: str) -> None:
        """Remove the files that exist, durably."""
        present = set(self.disk.list(self.folder))
        for name in names:
            if name in present:
                self.disk.remove(self.path(name))
        self.sync_names()

    def quarantine(self, error: Corrupt) -> None:
        """Refuse writes from now on, and leave a note beside the damaged file. A missing folder is not made
        for it."""
        self.fault = error
        if not self.disk.list(self.folder):
            return
        name = str(error.path).rpartition("/")[2]
        note = f"{name}\nposition {error.position}\n{error.message}\n"
        try:
            # Not through `sync`, which refuses from now on.
            handle = self.disk.open(self.path(QUARANTINE_NAME), create=True)
            try:
                self.disk.truncate(handle, 0)
                self.disk.write(handle, [note.encode()], 0)
                self.disk.sync(handle)
            finally:
                self.disk.close(handle)
            self.disk.sync_folder(self.folder)
        except OSError as trouble:
            # the note is not needed: the damage will be found again
            self.fault = Corrupt(f"{error.message}; it could not be noted: {trouble}", **error.details)


class MarkFile:
    """The open mark file of a log."""

    def __init__(self, folder: LogFolder, newest: Mark | None) -> None:
        self._folder = folder
        self._sequence = newest.sequence if newest else 0
        self._handle = folder.disk.open(folder.path(MARK_NAME), create=True)
        self.written_us = 0
        if newest is None:
            folder.disk.allocate(self._handle, 2 * SLOT_BYTES)

    def write(self, mark: Mark, *, both: bool = False) -> None:
        """Store a mark durably. `both` replaces both slots, which is needed when the mark goes back, before
        bytes are cut."""
        anew = both and not self._sequence  # there is no older mark that a torn write could destroy
        for _ in range(2 if both else 1):
            self._sequence += 1
            raw, position = encode(self._sequence, mark)
            self._folder.disk.write(self._handle, [raw], position)
            if not anew:
                self._folder.sync(self._handle)
        if anew:
            self._folder.sync(self._handle)
        self.written_us = self._folder.clock.now_us()

    def close(self) -> None:
        """Close the file."""
        self._folder.disk.close(self._handle)


def refused(act: str, error: OSError) -> StorageFault:
    """The error for a step that was undone as a whole."""
    if error.errno in NO_SPACE:
        return Full(f"{act}: no space is left")
    return StorageFault(f"{act} failed: {error}", outcome="none")
