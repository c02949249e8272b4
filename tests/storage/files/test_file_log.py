"""The file log beyond what every engine does: files, fences, torn tails, damage, full disks, readers.

Also covers `storage/snapshots.py`, `storage/files/file_store.py`, `storage/files/log_folder.py`,
`storage/files/log_reader.py`, `storage/files/mark.py`, `storage/files/opening.py`,
`storage/files/reservation.py` and `storage/files/scan.py`.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tailrace.errors import Corrupt, Full, InvalidRequest, StorageFault, Unavailable
from tailrace.format.frame import DATA, HEADER_BYTES, walk
from tailrace.ports import Recovery, Snapshot
from tailrace.sim.sim_disk import Crash, SimDisk
from tailrace.storage.disk import RealDisk
from tailrace.storage.files.file_log import FileLog
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.files.segment import decode_index
from tests.storage.frame_maker import FrameMaker, TestClock, unheard

LOG = "topic/0"
FIRST = f"{LOG}/{0:020d}.log"
END = 1 << 60


class Site:
    """A simulated disk with one log that can be opened again and again."""

    def __init__(self, segment_bytes: int = 1 << 16) -> None:
        self.disk = SimDisk(1)
        self.clock = TestClock()
        self.segment_bytes = segment_bytes

    def open(self) -> tuple[FileLog, Recovery]:
        log = FileStore(self.disk, self.clock, segment_bytes=self.segment_bytes).log(LOG, unheard)
        return log, log.recover()

    def open_again(self) -> tuple[FileLog, Recovery]:
        """After the power was cut."""
        self.disk.crash()
        return self.open()

    def write(self, path: str, position: int, data: bytes) -> None:
        handle = self.disk.open(path)
        self.disk.write(handle, [data], position)
        self.disk.sync(handle)
        self.disk.close(handle)


@pytest.fixture
def site() -> Site:
    return Site()


def offsets(log: FileLog, offset: int = 0, end: int = END) -> list[int]:
    return [
        header.base_offset
        for buffer in log.read(offset, end, 1 << 20)
        for header, _ in walk(buffer)
        if header.kind == DATA
    ]


# -------------------------------------------------------------------------------------- folder and lock


def test_second_store_is_refused_by_name_of_the_holder(tmp_path: Path) -> None:
    store = FileStore(tmp_path, TestClock())
    with pytest.raises(Unavailable, match=f"pid {os.getpid()} on "):
        FileStore(tmp_path, TestClock())
    store.close()
    FileStore(tmp_path, TestClock()).close()


@pytest.mark.parametrize("name", ["", "a//b", "../x", "a/..", "a\0b", "x" * 256])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    store = FileStore(tmp_path, TestClock())
    with pytest.raises(InvalidRequest):
        store.log(name, unheard)
    with pytest.raises(InvalidRequest):
        store.remove(name)
    store.close()


def test_files_of_a_log(tmp_path: Path) -> None:
    store, maker = FileStore(tmp_path, TestClock(), segment_bytes=4096), FrameMaker()
    log = store.log(LOG, unheard)
    log.recover()
    for _ in range(10):
        log.append([maker.data(800)], sync=True)
    folder = tmp_path / LOG
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sorted(sizes) == [
        f"{0:020d}.idx",
        f"{0:020d}.log",
        f"{3:020d}.idx",
        f"{3:020d}.log",
        f"{6:020d}.idx",
        f"{6:020d}.log",
        f"{9:020d}.log",
        "durable",
    ]
    frame = 2 * HEADER_BYTES + 832
    assert sizes[f"{0:020d}.log"] == 3 * frame
    assert sizes[f"{9:020d}.log"] == 4096
    store.close()
    assert (folder / f"{9:020d}.log").stat().st_size == frame


def test_space_is_reserved_as_a_segment_grows(tmp_path: Path) -> None:
    store, maker = FileStore(tmp_path, TestClock()), FrameMaker()
    log = store.log(LOG, unheard)
    log.recover()
    path, used = tmp_path / FIRST, 0
    reserved = []
    for size in (300, 60_000, 60_000, 500_000, 6_000_000, 6_000_000, 12_000_000):
        log.append([maker.data(size)], sync=True)
        used += size
        reserved.append(path.stat().st_size - used)
    assert reserved[0] < 70_000
    assert all(ahead < max(used, 70_000) for ahead in reserved[:4])
    assert max(reserved) < 8.1 * 1024 * 1024
    store.close()


@pytest.mark.parametrize(
    ("name", "most"), [("_groups~1/3", 12_000), ("a.dlq~7/0", 12_000), ("a~7/0", 70_000)]
)
def test_logs_that_mostly_stay_small_reserve_less(tmp_path: Path, name: str, most: int) -> None:
    store = FileStore(tmp_path, TestClock())
    log = store.log(name, unheard)
    log.recover()
    log.append([FrameMaker().data(300)], sync=True)
    assert most // 2 < (tmp_path / name / f"{0:020d}.log").stat().st_size < most
    store.close()


# -------------------------------------------------------------------------------------- the mark and syncs


def test_mark_is_written_at_most_once_a_second(site: Site) -> None:
    log, _ = site.open()
    maker = FrameMaker()
    log.append([maker.data()], sync=True)
    before = log.stats().syncs
    for _ in range(10):
        log.append([maker.data()], sync=True)
    assert log.stats().syncs == before + 10
    site.clock.time_us += 1_000_000
    log.append([maker.data()], sync=True)
    assert log.stats().syncs == before + 12


def test_torn_mark_falls_back_to_the_older_slot(site: Site) -> None:
    log, _ = site.open()
    maker = FrameMaker()
    for _ in range(4):
        site.clock.time_us += 2_000_000
        log.append([maker.data()], sync=True)
    for slot in (0, 4096):
        content = site.disk.content(f"{LOG}/durable")
        site.disk.flip(f"{LOG}/durable", slot + 20, 3)
        assert site.open()[1].end_entry == 4
        site.write(f"{LOG}/durable", 0, content)


def test_failed_sync_fences_for_ever(site: Site) -> None:
    log, _ = site.open()
    maker = FrameMaker()
    log.append([maker.data()], sync=True)
    site.disk.sync_fails_in = 0
    with pytest.raises(StorageFault) as caught:
        log.append([maker.data()], sync=True)
    assert caught.value.outcome == "unknown"
    for act in (lambda: log.append([maker.data()], sync=False), lambda: log.trim(0)):
        with pytest.raises(StorageFault, match="fenced") as caught:
            act()
        assert caught.value.outcome == "none", "nothing of it was tried"
    for act in (log.sync, log.flush):
        with pytest.raises(StorageFault, match="fenced") as caught:
            act()
        assert caught.value.outcome == "unknown", "what was appended before may be there or not"
    assert "fenced" in str(log.stats().fault)
    assert log.room() == 0
    assert offsets(log, 0, 10) == [0]
    syncs = log.stats().syncs
    log.close()
    assert log.stats().syncs == syncs, "a fenced log is never synced again"
    log, recovery = site.open()
    assert recovery.end_entry in (1, 2)
    log.append([FrameMaker(recovery.end_entry, recovery.end_offset).data()], sync=True)


class StopAtSync(SimDisk):
    """Its next sync waits until it is let go, and then fails."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.armed = False
        self.reached, self.let_go = threading.Event(), threading.Event()

    def sync(self, handle: int) -> None:
        if self.armed:
            self.armed = False
            self.reached.set()
            assert self.let_go.wait(10)
            self.sync_fails_in = 0
        super().sync(handle)


class WatchedLock:
    """A lock that tells when somebody has to wait for it."""

    def __init__(self) -> None:
        self.waited_for = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waited_for.set()
            self._lock.acquire()

    def __exit__(self, *trouble: object) -> None:
        self._lock.release()


def run_and_catch(work: Callable[[], None], caught: list[StorageFault]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        except StorageFault as fault:
            caught.append(fault)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [1, 700], ids=["sync", "roll"])
def test_append_that_waits_for_a_flush_which_fails_is_not_acknowledged(seed: int, size: int) -> None:
    """The append has to wait for the lock, to sync or to roll; the sync of the other thread fails meanwhile.
    Another one of the same file would succeed."""
    disk = StopAtSync(seed)
    site = Site(segment_bytes=1024)
    site.disk = disk
    log, _ = site.open()
    lock = log._flushing = WatchedLock()  # type: ignore[assignment]
    maker = FrameMaker()
    log.append([maker.data()], sync=False)
    disk.armed = True
    flush_faults: list[StorageFault] = []
    flush = run_and_catch(log.flush, flush_faults)
    assert disk.reached.wait(10)
    faults: list[StorageFault] = []
    append = run_and_catch(lambda: log.append([maker.data(size)], sync=True), faults)
    assert lock.waited_for.wait(10)
    disk.let_go.set()
    for thread in (flush, append):
        thread.join(10)
    assert [fault.outcome for fault in flush_faults] == ["unknown"]
    assert [fault.outcome for fault in faults] == ["unknown" if size == 1 else "none"]
    with pytest.raises(StorageFault, match="fenced"):
        log.append([maker.data()], sync=False)
    disk.crash()
    _, recovery = site.open()
    assert recovery.fault is None
    assert recovery.end_entry <= (2 if size == 1 else 1)


def test_append_without_a_sync_beside_a_flush_that_fails_may_have_happened(site: Site) -> None:
    log, _ = site.open()
    maker = FrameMaker()
    log.append([maker.data()], sync=False)

    def flush_fails() -> None:
        site.disk.written = lambda: None
        site.disk.sync_fails_in = 0
        with pytest.raises(StorageFault):
            log.flush()

    site.disk.written = flush_fails
    with pytest.raises(StorageFault, match="fenced") as caught:
        log.append([maker.data()], sync=False)
    assert caught.value.outcome == "unknown"


def test_opening_reads_the_disk_and_not_what_a_failed_sync_left_in_the_cache() -> None:
    """What was found must stay there, also when the page cache forgets on the way."""
    for seed in range(20):
        for reads in range(6):
            site = Site()
            site.disk = SimDisk(seed)
            log, _ = site.open()
            maker = FrameMaker()
            log.append([maker.data()], sync=True)
            site.disk.sync_fails_in = 0
            with pytest.raises(StorageFault):
                log.append([maker.data()], sync=True)
            site.disk.restart()
            site.disk.evicts_in = reads
            log, recovery = site.open()
            found = len(list(recovery.frames))
            assert found == recovery.end_entry
            assert offsets(log) == [header.base_offset for header, _ in site.open_again()[1].frames]


def test_reopening_makes_durable_what_a_failed_sync_only_showed() -> None:
    """The cache still shows the frame: whoever opens the log believes it, so it must be written again."""
    for seed in range(20):
        site = Site()
        site.disk = SimDisk(seed)
        site.disk.stubborn = True
        log, _ = site.open()
        site.disk.sync_fails_in = 3
        with pytest.raises(StorageFault):
            log.append([FrameMaker().data()], sync=True)
        site.disk.restart()
        _, recovery = site.open()
        shown = recovery.end_entry
        site.disk.crash()
        assert site.open()[1].end_entry == shown


# -------------------------------------------------------------------------------------- full disks


def test_full_disk_refuses_and_recovers(site: Site) -> None:
    log, _ = site.open()
    maker = FrameMaker()
    log.append([maker.data()], sync=True)
    site.disk.capacity = site.disk.used() + 50_000
    refused = maker.data(100_000)
    with pytest.raises(Full) as caught:
        log.append([refused], sync=True)
    assert caught.value.outcome == "none"
    assert offsets(log) == [0]
    log.append([FrameMaker(1, 10).data()], sync=True)
    site.disk.capacity = None
    log.append([FrameMaker(2, 20).data(100_000)], sync=True)
    assert offsets(log) == [0, 10, 20]
    site.disk.crash()
    assert site.open()[1].end_entry == 3


def test_write_error_is_taken_back(site: Site) -> None:
    log, _ = site.open()
    maker = FrameMaker()
    log.append([maker.data()], sync=True)
    site.disk.write_fails_in = 0
    with pytest.raises(StorageFault) as caught:
        log.append([maker.data(900), maker.data(900)], sync=True)
    assert (type(caught.value), caught.value.outcome) == (StorageFault, "none")
    site.disk.crash()
    log, recovery = site.open()
    assert (recovery.end_entry, recovery.cut_bytes) == (1, 0)
    log.append([FrameMaker(1, 10).data()], sync=True)


def test_full_disk_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, maker = FileStore(tmp_path, TestClock(), segment_bytes=4096), FrameMaker()
    log = store.log(LOG, unheard)
    log.recover()
    log.append([maker.data()], sync=True)
    real = os.pwritev

    def full(fd: int, parts: list[bytes], position: int) -> int:
        real(fd, [b"".join(parts)[:200]], position)
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(Full):
        log.append([FrameMaker(1, 10).data()], sync=True)
    monkeypatch.setattr(os, "pwritev", real)
    log.append([FrameMaker(1, 10).data()], sync=True)
    assert offsets(log) == [0, 10]
    store.close()


# -------------------------------------------------------------------------------------- torn tails, damage


@pytest.mark.parametrize("steps", range(14))
def test_crash_in_the_first_append_of_a_log_that_begins_anywhere(steps: int) -> None:
    for seed in range(8):
        site = Site()
        site.disk = SimDisk(seed)
        log, _ = site.open()
        site.disk.crash_in = steps
        try:
            log.append([FrameMaker(17, 500).data(), FrameMaker(18, 510).data()], sync=True)
            acknowledged = True
        except Crash:
            acknowledged = False
        site.disk.crash()
        log, recovery = site.open()
        assert recovery.fault is None
        assert not acknowledged or recovery.end_entry == 19
        maker = FrameMaker(recovery.end_entry or 17, recovery.end_offset or 500)
        for _ in range(3):
            log.append([maker.data(30_000)], sync=True)
        site.disk.crash()
        log, recovery = site.open()
        assert recovery.fault is None
        assert (recovery.end_entry, recovery.end_offset) == (maker.entry, maker.offset)
        assert [header.entry for header, _ in recovery.frames] == list(range(17, maker.entry))


def test_torn_tail_is_cut_and_the_place_is_zero_again(site: Site) -> None:
    log, _ = site.open()
    maker = FrameMaker()
    log.append([maker.data()], sync=True)
    end = log.stats().bytes
    log.append([maker.data(500), maker.data(500)], sync=False)
    site.disk.restart()
    site.disk.flip(FIRST, end + 300, 0)
    log, recovery = site.open()
    assert (recovery.end_entry, recovery.fault) == (1, None)
    assert recovery.cut_bytes > 900
    log.append([FrameMaker(1, 10).data(1)], sync=True)
    assert not any(site.disk.content(FIRST)[log.stats().bytes :])
    assert [header.entry for header, _ in site.open()[1].frames] == [0, 1]


def test_group_that_is_not_whole_is_cut_whole(site: Site) -> None:
    log, _ = site.open()
    maker = FrameMaker()
    log.append([maker.data()], sync=True)
    log.append([maker.data(more=True), maker.data(200, more=True), maker.data(500)], sync=False)
    end = log.stats().bytes
    site.disk.restart()
    site.disk.flip(FIRST, end - 200, 0)
    _, recovery = site.open()
    assert recovery.end_entry == 1
    assert recovery.cut_bytes > 0


@pytest.mark.parametrize("frame", [0, 1, 2])
def test_damage_before_a_barrier_is_never_cut(site: Site, frame: int) -> None:
    log, _ = site.open()
    maker = FrameMaker()
    for _ in range(4):
        log.append([maker.data()], sync=True)
    step = log.stats().bytes // 4
    site.disk.restart()
    before = site.disk.content(FIRST)
    place = frame * step + HEADER_BYTES
    site.disk.flip(FIRST, place + 140, 5)
    log, recovery = site.open()
    assert recovery.fault is not None
    assert FIRST in recovery.fault
    assert f"position {place}" in recovery.fault
    assert (recovery.end_entry, recovery.cut_bytes) == (frame, 0)
    assert len(list(recovery.frames)) == frame
    assert offsets(log) == [number * 10 for number in range(frame)]
    with pytest.raises(Corrupt, match="restore the file"):
        log.append([FrameMaker(frame, frame * 10).data()], sync=True)
    with pytest.raises(Corrupt):
        log.truncate(0)
    log.close()
    assert "quarantine" in site.disk.list(LOG)
    site.disk.flip(FIRST, place + 140, 5)
    assert site.disk.content(FIRST) == before
    log, recovery = site.open()
    assert (recovery.fault, recovery.end_entry) == (None, 4)
    assert "quarantine" not in site.disk.list(LOG)


def test_damage_on_a_full_disk_is_still_named(site: Site) -> None:
    log, _ = site.open()
    log.append([FrameMaker().data()], sync=True)
    log.close()
    site.disk.flip(FIRST, 300, 0)
    site.disk.capacity = site.disk.used()
    log, recovery = site.open()
    assert recovery.fault is not None
    with pytest.raises(Corrupt, match="could not be noted"):
        log.append([FrameMaker(0, 0).data()], sync=True)


def test_last_synced_frame_is_protected_by_the_mark(site: Site) -> None:
    log, _ = site.open()
    log.append([FrameMaker().data()], sync=True)
    log.close()
    site.disk.flip(FIRST, 300, 0)
    _, recovery = site.open()
    assert recovery.fault is not None


def test_cut_file_is_damage(site: Site) -> None:
    log, _ = site.open()
    maker = FrameMaker()
    for _ in range(3):
        log.append([maker.data()], sync=True)
    log.close()
    handle = site.disk.open(FIRST)
    site.disk.truncate(handle, 500)
    _, recovery = site.open()
    assert recovery.fault is not None
    assert recovery.end_entry == 1


def test_missing_last_segment_is_damage() -> None:
    site = Site(2048)
    log, _ = site.open()
    maker = FrameMaker()
    for _ in range(8):
        log.append([maker.data(500)], sync=True)
    log.close()
    last = max(name for name in site.disk.list(LOG) if name.endswith(".log"))
    site.disk.remove(f"{LOG}/{last}")
    _, recovery = site.open()
    assert recovery.fault is not None
    assert last in recovery.fault


def test_missing_middle_segment_is_damage() -> None:
    site = Site(2048)
    log, _ = site.open()
    maker = FrameMaker()
    for _ in range(8):
        log.append([maker.data(500)], sync=True)
    log.close()
    names = [name for name in site.disk.list(LOG) if name.endswith(".log")]
    site.disk.remove(f"{LOG}/{names[1]}")
    log, recovery = site.open()
    assert recovery.fault is not None
    assert offsets(log) == [0, 10]


def test_damaged_sealed_segment_is_found_on_the_way() -> None:
    site = Site(2048)
    log, _ = site.open()
    maker = FrameMaker()
    for _ in range(8):
        log.append([maker.data(500)], sync=True)
    log.close()
    site.disk.flip(FIRST, HEADER_BYTES * 2 + 100, 1)
    log, recovery = site.open()
    assert recovery.fault is None
    with pytest.raises(Corrupt, match=FIRST):
        list(recovery.frames)
    with pytest.raises(Corrupt):
        log.append([FrameMaker(8, 80).data()], sync=True)
    log.close()
    log, recovery = site.open()
    assert recovery.fault is not None, "the note makes the file suspect"
    assert (recovery.end_entry, offsets(log)) == (0, [])


def test_damaged_frame_ends_a_read_that_has_good_ones() -> None:
    site = Site()
    log, _ = site.open()
    maker = FrameMaker()
    log.append([maker.data() for _ in range(4)], sync=True)
    site.disk.flip(FIRST, HEADER_BYTES + 2 * 256 + HEADER_BYTES + 3, 1)
    assert offsets(log) == [0, 10]
    with pytest.raises(Corrupt, match=f"position {HEADER_BYTES + 2 * 256}"):
        log.read(20, END, 1000)


@pytest.mark.parametrize("way", ["missing", "damaged", "of another segment"])
def test_index_is_derived(way: str) -> None:
    site = Site(2048)
    log, _ = site.open()
    maker = FrameMaker()
    for _ in range(12):
        log.append([maker.data(500)], sync=True)
    log.close()
    indexes = [f"{LOG}/{name}" for name in site.disk.list(LOG) if name.endswith(".idx")]
    for index, other in zip(indexes, indexes[1:] + indexes[:1], strict=True):
        if way == "missing":
            site.disk.remove(index)
        elif way == "damaged":
            site.disk.flip(index, 30, 1)
        else:
            site.write(index, 0, site.disk.content(other))
    log, recovery = site.open()
    assert [header.entry for header, _ in recovery.frames] == list(range(12))
    assert offsets(log) == [number * 10 for number in range(12)]
    assert log.find_time(7) == 70
    assert [f"{LOG}/{name}" for name in site.disk.list(LOG) if name.endswith(".idx")] == indexes
    for index in indexes:
        assert decode_index(site.disk.content(index)).name.removesuffix("log") in index


# -------------------------------------------------------------------------------------- snapshots


def test_damaged_snapshot_falls_back(site: Site) -> None:
    log, _ = site.open()
    maker = FrameMaker()
    log.append([maker.data() for _ in range(10)], sync=True)
    for entry in (3, 5, 7):
        log.save_snapshot(Snapshot(entry, 0, [b"state %d" % entry]))
    log.close()
    names = [name for name in site.disk.list(LOG) if name.endswith(".snap")]
    assert names == [f"snapshot-{5:020d}.snap", f"snapshot-{7:020d}.snap"]
    site.disk.flip(f"{LOG}/{names[1]}", 30, 2)
    log, recovery = site.open()
    assert recovery.snapshot is not None
    assert (recovery.snapshot.entry, b"".join(recovery.snapshot.chunks)) == (5, b"state 5")
    assert [header.entry for header, _ in recovery.frames] == [6, 7, 8, 9]
    log.save_snapshot(Snapshot(9, 0, [b"state 9"]))
    assert [name for name in site.disk.list(LOG) if name.endswith(".snap")] == [
        f"snapshot-{5:020d}.snap",
        f"snapshot-{9:020d}.snap",
    ]


def test_trimmed_log_without_a_usable_snapshot_is_a_fault() -> None:
    site = Site(2048)
    log, _ = site.open()
    maker = FrameMaker()
    for _ in range(12):
        log.append([maker.data(500)], sync=True)
    log.save_snapshot(Snapshot(9, 100, [b"one"]))
    log.save_snapshot(Snapshot(10, 110, [b"two"]))
    log.trim(100)
    assert log.stats().start_offset > 0
    log.close()
    for name in site.disk.list(LOG):
        if name.endswith(".snap"):
            site.disk.flip(f"{LOG}/{name}", 9, 0)
    log, recovery = site.open()
    assert recovery.fault is not None
    assert "no snapshot is usable" in recovery.fault
    with pytest.raises(Corrupt):
        log.append([FrameMaker(12, 120).data()], sync=True)


def test_snapshot_on_a_full_disk_leaves_the_log_usable(site: Site) -> None:
    log, _ = site.open()
    log.append([FrameMaker().data()], sync=True)
    site.disk.capacity = site.disk.used() + 10
    with pytest.raises(Full):
        log.save_snapshot(Snapshot(0, 0, [b"x" * 1000]))
    assert not [name for name in site.disk.list(LOG) if "snap" in name]
    log.append([FrameMaker(1, 10).data()], sync=True)


# -------------------------------------------------------------------------------------- readers and writer


def test_readers_beside_appends_trims_and_truncation(tmp_path: Path) -> None:
    """Readers see whole true frames at any moment, whatever the writer does."""
    store = FileStore(RealDisk(tmp_path), TestClock(), segment_bytes=16384)
    log = store.log(LOG, unheard)
    log.recover()
    maker, failures, ended = FrameMaker(), [], threading.Event()

    def check(offset: int) -> Iterator[int]:
        for buffer in log.read(offset, END, 5000):
            for header, body in walk(buffer):
                if header.kind == DATA:
                    assert bytes(body) == bytes([header.entry % 251]) * header.length
                    yield header.end_offset

    def reader() -> None:
        offset = 0
        try:
            while not ended.is_set():
                offset = max(check(offset), default=0)
                log.find_time(offset // 10)
                log.retention_offset(bytes_max=20_000, append_time_us=None, count_max=None)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(400):
        log.append([maker.data(700)], sync=False)
        if number % 50 == 49:
            log.truncate(maker.entry - 20)
            maker.entry -= 20
            maker.offset -= 200
        if number % 60 == 59:
            log.save_snapshot(Snapshot(maker.entry - 40, 0, [b"s"]))
            log.trim(maker.offset)
    ended.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert log.stats().start_offset > 0
    store.close()
