"""A simulated disk with the manners of a real one: after a crash, what was not synced may be there or not.

Each file has what reads show (the page cache) and what a crash leaves (the platter). Writes wait in between
until a sync. A crash applies any subset of their sectors. A failed sync drops them: the cache keeps showing
what the platter lacks and the next sync succeeds, until the pages are evicted, which `uncache` asks for and
which may happen at any read when memory is short. Names behave the same way: creations, renames and removals
wait for a sync of their folder.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from tailrace.format.frame import Buffer

SECTORS = (4, 8, 16, 64, 512)


class Crash(BaseException):
    """The machine stops in the middle of a disk operation; no handler of the code under test may catch it."""


class _File:
    __slots__ = ("cache", "platter", "waiting")

    def __init__(self) -> None:
        self.cache = bytearray()
        self.platter = bytearray()
        self.waiting: list[tuple[int, bytes | None]] = []
        """Writes (position, data) and changes of size (length, None) since the last sync."""


_NameStep = tuple[str, _File | None]
_NameSteps = list[_NameStep]
_Files = list[_File]
"""A name that appeared with a file, or that went (None)."""


def _apply(content: bytearray, position: int, data: Buffer) -> None:
    if len(content) < position + len(data):
        content.extend(bytes(position + len(data) - len(content)))
    content[position : position + len(data)] = data


def _resize(content: bytearray, length: int) -> None:
    if length < len(content):
        del content[length:]
    else:
        content.extend(bytes(length - len(content)))


class SimDisk:
    """See `Disk`. `random` decides what a crash leaves; faults are asked for through the attributes below."""

    def __init__(self, seed: int, *, written: Callable[[], None] = lambda: None) -> None:
        self.random = Random(seed)
        self.seen: Counter[str] = Counter()
        self.capacity: int | None = None
        """Bytes that all files together may have; None for no limit."""
        self.sync_fails_in: int | None = None
        """The sync after that many more fails."""
        self.write_fails_in: int | None = None
        """The write after that many more fails with EIO."""
        self.crash_in: int | None = None
        """The machine stops at the changing operation after that many more."""
        self.evicts_in: int | None = None
        """At the read after that many more, memory is short, and what the cache can do without goes."""
        self.stubborn = False
        """Advice to forget what is cached is not followed, and memory is never short."""
        self.written = written
        """Called after each write: another thread may come in."""
        self.lying = False
        """Syncs report success and do nothing."""
        self._folders: dict[str, dict[str, _File]] = {"": {}}
        self._durable: dict[str, dict[str, _File]] = {"": {}}
        self._adrift: dict[str, dict[str, _File]] = {}
        """Folders whose own names wait for a sync, with what is durable in them."""
        self._names_waiting: dict[str, list[_NameSteps]] = {}
        self._handles: dict[int, _File] = {}
        self._next_handle = 3

    # ---------------------------------------------------------------------------------- the port

    def open(self, path: str, *, create: bool = False) -> int:
        """See `Disk.open`."""
        folder, _, name = path.rpartition("/")
        names = self._folders.get(folder)
        if names is None:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        file = names.get(name)
        if file is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            self._step()
            file = names[name] = _File()
            self._names_waiting.setdefault(folder, []).append([(name, file)])
        handle = self._next_handle
        self._next_handle += 1
        self._handles[handle] = file
        return handle

    def close(self, handle: int) -> None:
        """See `Disk.close`."""
        self._file(handle)
        del self._handles[handle]

    def write(self, handle: int, parts: Sequence[Buffer], position: int) -> None:
        """See `Disk.write`; a full disk or a failing one takes a part of it."""
        file = self._file(handle)
        data = b"".join(parts)
        if self.crash_in == 0:
            file.waiting.append((position, data))
        self._step()
        if self.write_fails_in is not None:
            self.write_fails_in -= 1
            if self.write_fails_in < 0:
                self.write_fails_in = None
                self._put(file, position, data[: self.random.randrange(len(data) + 1)])
                self.seen["write failed"] += 1
                raise OSError(errno.EIO, "simulated input/output error")
        missing = self._missing(file, position + len(data))
        if missing:
            self._put(file, position, data[: max(len(data) - missing, 0)])
            self.seen["disk full"] += 1
            raise OSError(errno.ENOSPC, "simulated disk is full")
        self._put(file, position, data)
        self.written()

    def read(self, handle: int, position: int, length: int) -> bytes:
        """See `Disk.read`."""
        file = self._file(handle)
        if self.evicts_in is not None:
            self.evicts_in -= 1
            if self.evicts_in < 0:
                self.evict()
        return bytes(file.cache[position : position + length])

    def view(self, handle: int, position: int, length: int) -> memoryview:
        """See `Disk.view`."""
        return memoryview(self.read(handle, position, length))

    def map(self, handle: int, position: int, length: int) -> memoryview:
        """See `Disk.map`."""
        return self.view(handle, position, length)

    def sync(self, handle: int) -> None:
        """See `Disk.sync`."""
        file = self._file(handle)
        self._step()
        self._fail_sync(file)
        if self.lying:
            return
        for position, data in file.waiting:
            if data is None:
                _resize(file.platter, position)
            else:
                _apply(file.platter, position, data)
        file.waiting.clear()

    def allocate(self, handle: int, length: int) -> None:
        """See `Disk.allocate`."""
        file = self._file(handle)
        self._step()
        if length <= len(file.cache):
            return
        if self._missing(file, length):
            self.seen["disk full"] += 1
            raise OSError(errno.ENOSPC, "simulated disk is full")
        _resize(file.cache, length)
        file.waiting.append((length, None))

    def truncate(self, handle: int, length: int) -> None:
        """See `Disk.truncate`."""
        file = self._file(handle)
        self._step()
        _resize(file.cache, length)
        file.waiting.append((length, None))

    def size(self, handle: int) -> int:
        """See `Disk.size`."""
        return len(self._file(handle).cache)

    def rename(self, old: str, new: str) -> None:
        """See `Disk.rename`; both names are in one folder."""
        folder, _, name = old.rpartition("/")
        file = self._folders[folder].pop(name, None)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", old)
        self._step()
        target = new.rpartition("/")[2]
        self._folders[folder][target] = file
        self._names_waiting.setdefault(folder, []).append([(name, None), (target, file)])

    def uncache(self, path: str, position: int = 0) -> None:
        """See `Disk.uncache`."""
        folder, _, name = path.rpartition("/")
        if not self.stubborn:
            self._forget(self._folders[folder][name], position)

    def remove(self, path: str) -> None:
        """See `Disk.remove`; a folder goes at once and for good."""
        self._step()
        inside = [folder for folder in self._folders if folder == path or folder.startswith(path + "/")]
        for gone in inside:
            del self._folders[gone]
            self._durable.pop(gone, None)
            self._adrift.pop(gone, None)
            self._names_waiting.pop(gone, None)
        if inside:
            return
        folder, _, name = path.rpartition("/")
        if self._folders.get(folder, {}).pop(name, None) is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        self._names_waiting.setdefault(folder, []).append([(name, None)])

    def list(self, folder: str) -> list[str]:
        """See `Disk.list`."""
        names = set(self._folders.get(folder, ()))
        start = f"{folder}/" if folder else ""
        for other in self._folders:
            if other and other.startswith(start) and other != folder:
                names.add(other[len(start) :].partition("/")[0])
        return sorted(names)

    def make_folder(self, folder: str) -> None:
        """See `Disk.make_folder`; durable at once, as the port asks."""
        path = ""
        for part in folder.split("/"):
            path = f"{path}/{part}" if path else part
            if path not in self._folders:
                self._step()
            self._folders.setdefault(path, {})
            self._durable.setdefault(path, {})

    def exists(self, path: str) -> bool:
        """See `Disk.exists`."""
        folder, _, name = path.rpartition("/")
        return path in self._folders or name in self._folders.get(folder, ())

    def add_folder(self, folder: str) -> None:
        """See `Disk.add_folder`: until its parent is synced, a crash may take it with all that it holds."""
        assert folder.rpartition("/")[0] in self._durable, "a folder in one that may vanish itself"
        self._step()
        if folder not in self._folders:
            self._folders[folder] = {}
            self._adrift[folder] = {}

    def sync_all(self, handles: Sequence[int], folders: Sequence[str]) -> None:
        """See `Disk.sync_all`: in any order."""
        work: list[Callable[[], None]] = [partial(self.sync, handle) for handle in handles]
        work += [partial(self.sync_folder, folder) for folder in folders]
        self.random.shuffle(work)
        for each in work:
            each()

    def sync_folder(self, folder: str) -> None:
        """See `Disk.sync_folder`."""
        self._step()
        self._fail_sync(None)
        if self.lying:
            return
        for steps in self._names_waiting.pop(folder, []):
            self._rename_durably(folder, steps)
        for inner in [path for path in self._adrift if path.rpartition("/")[0] == folder]:
            self._durable[inner] = self._adrift.pop(inner)

    # ---------------------------------------------------------------------------------- what happens to it

    def crash(self) -> None:
        """Power loss: the cache is gone, and of what was not synced any part may have reached the platter."""
        sector = self.random.choice(SECTORS)
        for file in self._all_files():
            self._persist_some(file, sector)
        for folder, inside in self._adrift.items():
            if self.random.random() < 0.5:
                self._durable[folder] = inside
            else:
                self.seen["folder vanished"] += 1
        self._adrift.clear()
        for folder, waiting in self._names_waiting.items():
            if folder in self._durable:
                self._persist_names(folder, waiting)
        self._names_waiting.clear()
        self._folders = {folder: dict(names) for folder, names in self._durable.items()}
        for file in self._all_files():
            file.cache = bytearray(file.platter)
        self.restart()

    def restart(self) -> None:
        """The process ends, the machine goes on: only open files are lost."""
        self._handles.clear()
        self.crash_in = self.sync_fails_in = self.write_fails_in = self.evicts_in = None

    def enlarge(self) -> None:
        """There is room for everything."""
        self.capacity = None

    def obey(self) -> None:
        """No sync and no write fails any more."""
        self.sync_fails_in = self.write_fails_in = None

    def evict(self) -> None:
        """Memory is short: only what waits for a sync is kept in it."""
        self.evicts_in = None
        if not self.stubborn:
            for file in self._all_files():
                self._forget(file, 0)

    def content(self, path: str) -> bytes:
        """What a file reads as."""
        folder, _, name = path.rpartition("/")
        return bytes(self._folders[folder][name].cache)

    def flip(self, path: str, position: int, bit: int) -> None:
        """Damage at rest: one bit changes in the cache, on the platter and on the way there."""
        folder, _, name = path.rpartition("/")
        file = self._folders[folder][name]
        for content in (file.cache, file.platter):
            if position < len(content):
                content[position] ^= 1 << bit
        for number, (start, data) in enumerate(file.waiting):
            if data is not None and start <= position < start + len(data):
                changed = bytearray(data)
                changed[position - start] ^= 1 << bit
                file.waiting[number] = (start, bytes(changed))

    def used(self) -> int:
        """Bytes of all files."""
        return sum(len(file.cache) for names in self._folders.values() for file in names.values())

    # ---------------------------------------------------------------------------------- parts

    def _file(self, handle: int) -> _File:
        file = self._handles.get(handle)
        if file is None:
            raise OSError(errno.EBADF, "bad handle")
        return file

    def _put(self, file: _File, position: int, data: bytes) -> None:
        if data:
            _apply(file.cache, position, data)
            file.waiting.append((position, data))

    def _forget(self, file: _File, position: int) -> None:
        shown = bytearray(file.platter)
        for place, data in file.waiting:
            if data is None:
                _resize(shown, place)
            else:
                _apply(shown, place, data)
        kept = bytes(file.cache[:position])
        if shown[position:] != file.cache[position:]:
            self.seen["page forgotten"] += 1
        file.cache = shown
        _apply(file.cache, 0, kept)

    def _step(self) -> None:
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0:
                self.crash_in = None
                raise Crash

    def _missing(self, file: _File, length: int) -> int:
        """Bytes that are not free for a file to grow to `length`."""
        growth = length - len(file.cache)
        if self.capacity is None or growth <= 0:
            return 0
        return min(max(self.used() + growth - self.capacity, 0), growth)

    def _fail_sync(self, file: _File | None) -> None:
        if self.sync_fails_in is None:
            return
        self.sync_fails_in -= 1
        if self.sync_fails_in >= 0:
            return
        self.sync_fails_in = None
        self.seen["sync failed"] += 1
        if file is not None:
            self._persist_some(file, self.random.choice(SECTORS))
        raise OSError(errno.EIO, "simulated failure of a sync")

    def _persist_some(self, file: _File, sector: int) -> None:
        """Move a random part of what waits to the platter and drop the rest."""
        for position, data in file.waiting:
            fate = self.random.random()
            if fate < 0.3:
                continue
            if data is None:
                _resize(file.platter, position)
            elif fate < 0.6:
                _apply(file.platter, position, data)
            else:
                self._persist_sectors(file, position, data, sector)
        file.waiting.clear()

    def _persist_sectors(self, file: _File, position: int, data: bytes, sector: int) -> None:
        start = position - position % sector
        for place in range(start, position + len(data), sector):
            if self.random.random() < 0.5:
                piece = data[max(place - position, 0) : place + sector - position]
                _apply(file.platter, max(place, position), piece)
        self.seen["write torn"] += 1

    def _persist_names(self, folder: str, waiting: Sequence[_NameSteps]) -> None:
        fate = self.random.random()
        for steps in waiting:
            if fate < 0.3 or (fate > 0.6 and self.random.random() < 0.5):
                created = len(steps) == 1 and steps[0][1] is not None
                self.seen["file vanished" if created else "name change undone"] += 1
                continue
            self._rename_durably(folder, steps)

    def _rename_durably(self, folder: str, steps: _NameSteps) -> None:
        names = self._adrift[folder] if folder in self._adrift else self._durable[folder]
        for name, file in steps:
            if file is None:
                names.pop(name, None)
            else:
                names[name] = file

    def _all_files(self) -> _Files:
        found: dict[int, _File] = {}
        for place in (self._folders, self._durable, self._adrift):
            for names in place.values():
                found.update((id(file), file) for file in names.values())
        return list(found.values())
