"""`PartitionLog.scan` and `entry_at` on every engine: order, bounds, bodies on demand, trims on the way.

Covers `storage/files/frame_scan.py`.
"""

import pytest

from tailrace.errors import Corrupt
from tailrace.format.frame import DATA, FACTS, HEADER_BYTES
from tailrace.ports import LogStore, Snapshot
from tailrace.sim.sim_disk import SimDisk
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.memory_log import MemoryLog
from tests.conformance.test_log_conformance import END, filled, opened, reopened, store
from tests.storage.frame_maker import FrameMaker, TestClock

__all__ = ["store"]  # the fixture: every engine


def test_every_kind_of_frame_comes_in_order_with_its_body(store: LogStore) -> None:
    log, frames = filled(store)
    found = [(header, bytes(body())) for header, body in log.scan(0, END)]
    assert found == [(frame.header, bytes(frame.body)) for frame in frames]
    assert {header.kind for header, _ in found} == {DATA, FACTS}


@pytest.mark.parametrize(("first", "end"), [(0, 1), (7, 23), (39, 40), (40, 50), (5, 5)])
def test_bounds_are_half_open(store: LogStore, first: int, end: int) -> None:
    log, _ = filled(store)
    wanted = [entry for entry in range(40) if first <= entry < end]
    assert [header.entry for header, _ in log.scan(first, end)] == wanted
    log, _ = reopened(store, log)
    assert [header.entry for header, _ in log.scan(first, end)] == wanted


def test_a_new_log_has_nothing_to_scan(store: LogStore) -> None:
    log = opened(store)
    assert list(log.scan(0, END)) == []
    assert log.entry_at(0) == 0


def test_what_is_appended_after_the_start_may_be_left_out_but_nothing_before(store: LogStore) -> None:
    log, maker = opened(store), FrameMaker()
    log.append([maker.data()], sync=False)
    walk = log.scan(0, END)
    assert next(walk)[0].entry == 0
    log.append([maker.data()], sync=False)
    assert [header.entry for header, _ in walk] in ([], [1])
    assert [header.entry for header, _ in log.scan(0, END)] == [0, 1]


def test_large_bodies_are_read_when_asked_for(store: LogStore) -> None:
    log, maker = opened(store), FrameMaker()
    frames = [maker.data(200_000), maker.facts(), maker.data(90_000), maker.facts(10)]
    log.append(frames, sync=True)
    for frame, (header, body) in zip(frames, log.scan(0, END), strict=True):
        assert header == frame.header
        if header.entry != 2:
            assert bytes(body()) == bytes(frame.body)


def test_the_entry_at_a_time_is_not_behind_it(store: LogStore) -> None:
    log, maker = opened(store), FrameMaker()
    for number in range(60):
        frames = [maker.facts(), maker.data(1000, time=1000 + 10 * number)]
        log.append(frames, sync=False)
    headers = [header for header, _ in log.scan(0, END)]
    for time in (0, 1000, 1005, 1300, 1590):
        at = log.entry_at(time)
        wanted = next(
            header.entry for header in headers if header.kind == DATA and header.append_time_us >= time
        )
        assert at <= wanted
    assert log.entry_at(10_000) == 120
    assert log.entry_at(1590) > 60, "not far from it"


def test_a_scan_survives_a_trim(store: LogStore) -> None:
    log, _ = filled(store)
    walk = log.scan(0, END)
    first = next(walk)[0].entry
    for entry in (20, 35):
        log.save_snapshot(Snapshot(entry, 0, [b"s"]))
    log.trim(150)
    rest = [header.entry for header, _ in walk]
    assert first == 0
    assert rest == sorted(rest)
    assert rest[-20:] == list(range(20, 40))
    again = [header.entry for header, _ in log.scan(0, END)]
    assert again == list(range(again[0], 40))
    assert again[0] > 0


def test_damage_is_reported_where_a_body_is_read() -> None:
    disk = SimDisk(1)
    log = opened(FileStore(disk, TestClock(), segment_bytes=1 << 20))
    assert not isinstance(log, MemoryLog)
    maker = FrameMaker()
    log.append([maker.data(1000), maker.data(1000)], sync=True)
    (name,) = [name for name in disk.list("topic/0") if name.endswith(".log")]
    handle = disk.open(f"topic/0/{name}")
    disk.write(handle, [b"X"], 2 * HEADER_BYTES + 10)
    disk.close(handle)
    for header, body in log.scan(0, END):
        if header.entry:
            assert len(body()) == 1000
        else:
            with pytest.raises(Corrupt, match="body checksum"):
                body()
