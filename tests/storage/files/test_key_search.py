"""Messages by key in the file log, against a list: over segments, restarts, crashes, trims and damage.

Also covers `storage/files/key_rows.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from tailrace.format import batch
from tailrace.format.frame import DATA, Frame, Header, crc32c, pack, walk
from tailrace.format.gathering import hash_of_key, key_rows_of
from tailrace.ports import KeyPlaces, Snapshot
from tailrace.sim.sim_disk import Crash, SimDisk
from tailrace.storage.files.file_log import FileLog
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.files.key_rows import BLOCK_ROWS, KeyFile, KeyRows, encode_keys, find_rows
from tailrace.storage.files.segment import Segment
from tests.storage.frame_maker import TestClock, unheard

LOG = "topic/0"
END = 1 << 60


class KeyedLog:
    """A log of messages with keys on a simulated disk, and the same as a list."""

    def __init__(self, seed: int, segment_bytes: int = 1 << 14) -> None:
        self.random = Random(seed)
        self.disk = SimDisk(seed)
        self.segment_bytes = segment_bytes
        self.rows: list[tuple[int, bytes | None]] = []
        """Offset and key of what was acknowledged."""
        self.begin = 0
        self.end_entry = self.end_offset = 0
        self.open()

    def open(self) -> None:
        store = FileStore(self.disk, TestClock(), segment_bytes=self.segment_bytes)
        self.log: FileLog = store.log(LOG, unheard)
        recovery = self.log.recover()
        assert recovery.fault is None, recovery.fault
        self.end_entry, self.end_offset = recovery.end_entry, recovery.end_offset
        known = {offset for offset, _ in self.rows}
        for header, body in recovery.frames:
            if header.kind == DATA and header.base_offset not in known:
                keys = batch.decode(body, header.columns).column("key").to_pylist()
                self.rows += [(header.base_offset + row, key) for row, key in enumerate(keys)]

    def frame(self, keys: list[bytes | None]) -> Frame:
        ids = batch.make_ids(len(keys), 1, 7, 7)
        columns, body = batch.encode([b"v" * 20] * len(keys), ids=ids, timestamps=5, keys=keys)
        hashes = np.array([0 if key is None else hash_of_key(key) for key in keys], np.uint64)
        place = self.end_entry, self.end_offset, len(keys), len(keys), 1, self.end_entry
        header = Header(DATA, columns, len(body), crc32c(body), *place)
        self.end_entry, self.end_offset = self.end_entry + 1, self.end_offset + len(keys)
        return Frame(header, pack(header), body, hashes)

    def append(self, *batches: list[bytes | None], sync: bool = True) -> None:
        base = self.end_offset
        self.log.append([self.frame(keys) for keys in batches], sync=sync)
        flat = [key for keys in batches for key in keys]
        self.rows += [(base + row, key) for row, key in enumerate(flat)]

    def trim(self, offset: int) -> None:
        for _ in range(2):
            self.append([b"filler"])
            self.log.save_snapshot(Snapshot(self.end_entry - 1, self.end_offset, [b"state"]))
        self.log.trim(offset)
        self.begin = max(self.begin, offset)

    def find(self, key: bytes, begin: int, end: int, skip: int, count: int) -> KeyPlaces:
        for _ in range(10_000):
            places = self.log.find_key(hash_of_key(key), begin, end, skip, count)
            if places is not None:
                return places
            self.log.index_keys(3000)
        raise AssertionError("the keys are never known")

    def check(self, key: bytes, *, skip: int = 0, count: int = 1 << 30, end: int = END) -> None:
        places = self.find(key, self.begin, end, skip, count)
        mine = [offset for offset, other in self.rows if other == key and self.begin <= offset < end]
        newest_first = mine[::-1]
        assert places.offsets.tolist() == newest_first[skip : skip + count][::-1]
        assert places.passed == min(skip, len(mine)) or count == 0
        frames = self.log.read_places(places, 1 << 30)
        held = {
            header.base_offset + row
            for item in frames
            for header, body in walk(b"".join(item.parts()))
            for row, found in enumerate(batch.decode(body, header.columns).column("key").to_pylist())
            if found == key
        }
        assert set(places.offsets.tolist()) <= held

    def key_files(self) -> list[str]:
        return [f"{LOG}/{name}" for name in self.disk.list(LOG) if name.endswith(".keys")]


KEYS = [b"a", b"b", b"c", b"", b"a longer key than the others", b"once"]


def step(site: KeyedLog) -> None:
    """One of the things that happen to a log."""
    random = site.random
    act = random.choice(
        ("append",) * 8 + ("restart", "crash", "trim", "flip", "cut", "lose", "full", "truncate")
    )
    files = site.key_files()
    if act == "append":
        batches = [[random.choice([*KEYS[:5], None]) for _ in range(random.randint(1, 40))] for _ in range(3)]
        site.append(*batches[: random.randint(1, 3)])
    elif act == "restart":
        site.log.close()
        site.open()
    elif act == "crash":
        site.disk.crash_in = random.randint(0, 12)
        kept = list(site.rows)
        try:
            for _ in range(6):
                site.append([random.choice(KEYS[:5]) for _ in range(30)])
                kept = list(site.rows)
        except Crash:
            pass
        site.disk.crash_in = None
        site.disk.crash()
        site.rows = kept
        site.open()
    elif act == "trim":
        site.trim(random.randint(site.begin, site.end_offset))
    elif act == "flip" and files:
        path = random.choice(files)
        size = site.disk.size(handle := site.disk.open(path))
        site.disk.close(handle)
        site.disk.flip(path, random.randrange(size + 1), random.randrange(8))
    elif act == "cut" and files:
        handle = site.disk.open(random.choice(files))
        site.disk.truncate(handle, random.randrange(site.disk.size(handle) + 1))
        site.disk.close(handle)
    elif act == "lose" and files:
        site.disk.remove(random.choice(files))
    elif act == "full":
        site.disk.capacity = 0
        for key in KEYS:
            site.check(key)
        site.disk.capacity = None


@pytest.mark.parametrize("seed", range(60))
def test_every_key_is_found_whatever_happened_to_the_log(seed: int) -> None:
    site = KeyedLog(seed)
    random = site.random
    for _ in range(40):
        step(site)
        key = random.choice(KEYS)
        end = random.choice((END, random.randint(0, site.end_offset + 1)))
        site.check(key, skip=random.choice((0, 1, 7)), count=random.choice((0, 1, 5, 1 << 30)), end=end)
    for key in KEYS:
        site.check(key)


def test_a_cut_at_the_end_takes_its_keys_with_it() -> None:
    site = KeyedLog(1, segment_bytes=8192)
    for number in range(30):
        site.append([b"a", b"b", b"%d" % number])
    site.log.truncate(10)
    site.rows = site.rows[:30]
    site.end_entry, site.end_offset = 10, 30
    site.check(b"a")
    for number in range(30):
        site.append([b"c", b"b", b"%d" % number])
    site.check(b"a")
    site.check(b"c")
    site.log.close()
    site.open()
    site.check(b"a")
    site.check(b"c")


def test_a_closed_segment_has_its_keys_in_a_file_that_goes_with_it() -> None:
    site = KeyedLog(1, segment_bytes=8192)
    for _ in range(60):
        site.append([b"a", b"b"])
    segments = [name for name in site.disk.list(LOG) if name.endswith(".log")]
    assert site.key_files() == [f"{LOG}/{name[:20]}.keys" for name in segments[:-1]]
    site.trim(site.end_offset)
    left = [name for name in site.disk.list(LOG) if name.endswith(".log")]
    assert len(left) < len(segments)
    assert site.key_files() == [f"{LOG}/{name[:20]}.keys" for name in left[:-1]]


def test_what_was_never_indexed_is_indexed_when_it_is_asked_for() -> None:
    """Logs that were written before there were files of keys."""
    site = KeyedLog(1, segment_bytes=8192)
    for _ in range(60):
        site.append([b"a", b"b"])
    files = site.key_files()
    site.log.close()
    for path in files:
        site.disk.remove(path)
    site.open()
    assert site.log.find_key(hash_of_key(b"a"), 0, END, 0, 1 << 30) is None
    site.check(b"a")
    assert site.key_files() == files


def test_the_open_segment_is_indexed_in_the_background_after_a_start() -> None:
    site = KeyedLog(1, segment_bytes=1 << 20)
    for _ in range(60):
        site.append([b"a", b"b"])
    site.log.close()
    site.open()
    steps = 1
    while not site.log.index_keys(4000):
        steps += 1
    assert steps > 5
    assert site.log.find_key(hash_of_key(b"a"), 0, END, 0, 1 << 30) is not None
    site.check(b"a")


class RolledWhileRead(Segment):
    """A segment that the writer seals in the middle of a look at its keys."""

    __slots__ = ()
    between: Callable[[], None] = staticmethod(lambda: None)
    fields = ("early", "keys", "unkeyed", "sealed")

    def __getattribute__(self, name: str) -> Any:
        if name in RolledWhileRead.fields:
            RolledWhileRead.between()
        return super().__getattribute__(name)


@pytest.mark.parametrize("number", range(8))
def test_a_segment_that_is_sealed_while_it_is_searched_loses_no_key(number: int) -> None:
    site = KeyedLog(1, segment_bytes=8192)
    site.append([b"a", b"b"])
    site.log.close()
    site.open()
    site.append([b"a", b"c"])
    site.check(b"a")
    segment = site.log._reader.segments[-1]
    assert segment.early is not None
    assert segment.keys is not None
    segment.__class__ = RolledWhileRead
    looks = 0

    def between() -> None:
        nonlocal looks
        looks += 1
        if looks == number + 1:
            RolledWhileRead.between = staticmethod(lambda: None)
            while not segment.sealed:
                site.append([b"d"] * 20)

    RolledWhileRead.between = staticmethod(between)
    try:
        places = site.log.find_key(hash_of_key(b"a"), 0, 4, 0, 10)
    finally:
        RolledWhileRead.between = staticmethod(lambda: None)
    assert places is not None
    assert places.offsets.tolist() == [0, 2]


def test_keys_stay_in_memory_while_the_disk_is_full() -> None:
    site = KeyedLog(1, segment_bytes=8192)
    for _ in range(60):
        site.append([b"a", b"b"])
    for path in site.key_files():
        site.disk.remove(path)
    site.disk.capacity = 0
    site.check(b"a")
    assert not site.key_files()


def test_a_scrub_names_a_damaged_file() -> None:
    site = KeyedLog(1, segment_bytes=8192)
    for _ in range(60):
        site.append([b"a", b"b"])
    path = site.key_files()[0]
    site.disk.flip(path, 50, 1)
    entry: int | None = 0
    problems: list[str] = []
    while entry is not None:
        scrubbed = site.log.scrub(entry, 1 << 30)
        entry = scrubbed.next_entry
        problems += scrubbed.problems
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}: the checksum of the keys is wrong")
    assert path not in site.key_files()
    site.check(b"a")


def test_a_search_reads_what_the_key_has_and_not_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that a search reads do not grow with the segments, but for a few per segment."""

    def cost(messages: int) -> tuple[int, int]:
        site = KeyedLog(1, segment_bytes=1 << 16)
        site.append([b"once"])
        for number in range(messages // 20):
            site.append([b"%d" % (20 * number + row) for row in range(20)], sync=False)
        read = 0
        real_read, real_view = site.disk.read, site.disk.view

        def count_read(handle: int, position: int, length: int) -> bytes:
            nonlocal read
            data = real_read(handle, position, length)
            read += len(data)
            return data

        def count_view(handle: int, position: int, length: int) -> memoryview:
            nonlocal read
            data = real_view(handle, position, length)
            read += len(data)
            return data

        monkeypatch.setattr(site.disk, "read", count_read)
        monkeypatch.setattr(site.disk, "view", count_view)
        site.check(b"once")
        return read, len(site.key_files()) + 1

    few, many = cost(2000), cost(20_000)
    assert few[1] == 4
    assert many[1] > 30
    assert few[0] < 4 * 6000
    assert many[0] < many[1] * 6000, "of each segment of 64 KiB one block of keys is read, and one frame"


def test_rows_in_memory_and_in_a_file_find_the_same() -> None:
    random = Random(3)
    rows = KeyRows()
    model: dict[int, list[tuple[int, int]]] = {}
    offset = position = 0
    for _ in range(400):
        hashes = [
            random.choice((0, 1, 2, 1 << 63, random.getrandbits(64))) for _ in range(random.randint(1, 9))
        ]
        rows.note(np.array(hashes, np.uint64), offset, position)
        for row, value in enumerate(hashes):
            model.setdefault(value, []).append((offset + row, position))
        offset += len(hashes) + random.choice((0, 0, 1 << 33))
        position += 64 * random.randint(2, 50)
    disk = SimDisk(1)
    handle = disk.open("keys", create=True)
    disk.write(handle, encode_keys(0, position, rows.rows()), 0)
    file = KeyFile(disk, handle)
    assert file.count > 5 * BLOCK_ROWS
    for value, places in model.items():
        if value:
            for found in (rows.find(value), file.find(value), find_rows(file.rows(), value)):
                assert list(zip(found.offsets.tolist(), found.positions.tolist(), strict=True)) == places
    assert not len(file.find(0).offsets)
    assert not len(file.find(12345).offsets)


def test_the_broker_and_the_stored_body_agree_on_hashes() -> None:
    site = KeyedLog(1)
    item = site.frame([b"", None, b"x"])
    ((offset, hashes),) = key_rows_of(item.header, item.body)
    assert offset == 0
    assert hashes.tolist() == [hash_of_key(b""), 0, hash_of_key(b"x")]
