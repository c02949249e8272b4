"""One suite for every engine behind `LogStore` and `PartitionLog`: the docstrings of the ports as tests.

Covers `storage/continuity.py` and `storage/memory_log.py`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tailrace.errors import Corrupt, InvalidRequest, StorageFault, Unavailable
from tailrace.format.frame import DATA, LOST, STAGED, Buffer, Frame, Header, walk
from tailrace.ports import LogStore, PartitionLog, Recovery, Snapshot
from tailrace.sim.sim_disk import SimDisk
from tailrace.storage.files import log_reader
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.memory_log import MemoryLog, MemoryStore
from tests.storage.frame_maker import FrameMaker, TestClock, unheard

END = 1 << 60
MakeStore = Callable[[], LogStore]


@pytest.fixture(params=["file on a real disk", "file on a simulated disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LogStore:
    if request.param == "memory":
        return MemoryStore()
    disk = tmp_path / "data" if "real" in request.param else SimDisk(1)
    # small segments, so that every test goes over several
    return FileStore(disk, TestClock(), segment_bytes=2048)


def opened(store: LogStore, name: str = "topic/0") -> PartitionLog:
    log = store.log(name, unheard)
    assert log.recover().fault is None
    return log


def reopened(store: LogStore, log: PartitionLog, name: str = "topic/0") -> tuple[PartitionLog, Recovery]:
    log.close()
    again = store.log(name, unheard)
    return again, again.recover()


def data_of(buffers: Sequence[Buffer]) -> list[tuple[Header, bytes]]:
    return [
        (header, bytes(body)) for buffer in buffers for header, body in walk(buffer) if header.kind == DATA
    ]


def same(found: Sequence[tuple[Header, Buffer]], frames: Sequence[Frame]) -> bool:
    got = [(header, bytes(body)) for header, body in found]
    return got == [(frame.header, bytes(frame.body)) for frame in frames]


def filled(store: LogStore, count: int = 40) -> tuple[PartitionLog, list[Frame]]:
    log, maker = opened(store), FrameMaker()
    frames = [maker.facts() if number % 5 == 4 else maker.data() for number in range(count)]
    for number in range(0, count, 2):
        log.append(frames[number : number + 2], sync=number % 4 == 0)
    return log, frames


def data_frames(frames: Sequence[Frame]) -> list[Frame]:
    return [frame for frame in frames if frame.header.kind == DATA]


def test_new_log_is_empty(store: LogStore) -> None:
    log = store.log("topic/0", unheard)
    recovery = log.recover()
    assert (recovery.snapshot, recovery.end_entry, recovery.end_offset, recovery.cut_bytes) == (None, 0, 0, 0)
    assert list(recovery.frames) == []
    assert list(log.read(0, END, 1000)) == []
    assert log.find_time(0) is None
    assert log.retention_offset(bytes_max=0, append_time_us=1, count_max=0) == 0
    assert log.stats().end_offset == 0


def test_recover_comes_first_and_once(store: LogStore) -> None:
    log = store.log("topic/0", unheard)
    with pytest.raises(StorageFault):
        log.append([FrameMaker().data()], sync=True)
    log.recover()
    with pytest.raises(InvalidRequest):
        log.recover()


def test_frames_come_back_after_reopening(store: LogStore) -> None:
    log, frames = filled(store)
    log, recovery = reopened(store, log)
    assert same(list(recovery.frames), frames)
    assert (recovery.end_entry, recovery.end_offset) == (40, 320)
    assert recovery.cut_bytes == 0
    assert recovery.fault is None
    maker = FrameMaker(40, 320)
    log.append([maker.data()], sync=True)
    assert log.stats().end_offset == 330


def test_log_may_begin_anywhere(store: LogStore) -> None:
    log, maker = opened(store), FrameMaker(17, 500)
    frame = maker.data()
    log.append([frame], sync=True)
    assert same(data_of(log.read(0, END, 1)), [frame])
    _, recovery = reopened(store, log)
    assert same(list(recovery.frames), [frame])
    assert (recovery.end_entry, recovery.end_offset) == (18, 510)


def test_gaps_are_refused_and_leave_nothing(store: LogStore) -> None:
    log, _ = filled(store, 4)
    before = log.stats()
    for frame in (FrameMaker(9, 40).data(), FrameMaker(4, 50).data(), FrameMaker(3, 40).data()):
        with pytest.raises(StorageFault) as caught:
            log.append([frame], sync=True)
        assert caught.value.outcome == "none"
    assert log.stats().end_offset == before.end_offset
    log.append([FrameMaker(4, 40).data()], sync=True)


def test_group_is_not_split(store: LogStore) -> None:
    log, maker = opened(store), FrameMaker()
    log.append([maker.data(more=True), maker.facts(more=True), maker.data()], sync=True)
    with pytest.raises(InvalidRequest):
        log.append([maker.data(more=True)], sync=True)
    _, recovery = reopened(store, log)
    assert [header.entry for header, _ in recovery.frames] == [0, 1, 2]


def test_empty_append_and_sync_are_harmless(store: LogStore) -> None:
    log = opened(store)
    log.append([], sync=True)
    log.sync()
    log.flush()
    assert log.stats().end_offset == 0


def test_flush_beside_appends(store: LogStore) -> None:
    """Rolls, syncs and appends go on while another thread flushes; nothing is lost or out of place."""
    log = opened(store)
    maker = FrameMaker()
    going = True

    def flush() -> None:
        while going:
            log.flush()

    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(flush)
        try:
            for number in range(300):
                log.append([maker.data(), maker.data()], sync=number % 7 == 0)
        finally:
            going = False
        flushing.result()
    log.flush()
    _, recovery = reopened(store, log)
    assert [header.entry for header, _ in recovery.frames] == list(range(600))


@pytest.mark.parametrize("bytes_max", [1, 300, 1500, 1 << 20])
def test_read_from_every_offset(store: LogStore, bytes_max: int) -> None:
    log, frames = filled(store)
    data = data_frames(frames)
    for offset in range(0, 320, 7):
        expected = [frame for frame in data if frame.header.end_offset > offset]
        buffers = log.read(offset, END, bytes_max)
        got = data_of(buffers)
        assert got, offset
        assert same(got, expected[: len(got)])
        assert len(got) == 1 or sum(map(len, buffers)) <= bytes_max
    assert len(data_of(log.read(0, END, 1 << 20))) == len(data)


def test_read_returns_as_many_as_fit(store: LogStore) -> None:
    log, maker = opened(store), FrameMaker()
    log.append([maker.data(50) for _ in range(6)], sync=True)
    size = 128 + 64
    assert len(data_of(log.read(0, END, 3 * size))) == 3
    assert len(data_of(log.read(0, END, 3 * size - 1))) == 2


def test_read_stops_at_the_end_that_is_given(store: LogStore) -> None:
    log, frames = filled(store)
    data = data_frames(frames)
    for end in (0, 10, 50, 160, 320):
        expected = [frame for frame in data if frame.header.end_offset <= end]
        assert same(data_of(log.read(0, end, 1 << 20)), expected)
    assert list(log.read(320, END, 1000)) == []


def test_reads_go_on_over_facts(store: LogStore) -> None:
    log, maker = opened(store), FrameMaker()
    frames = [maker.data(), *[maker.facts(400, base=900, span=50) for _ in range(20)], maker.data()]
    for frame in frames:
        log.append([frame], sync=False)
    assert same(data_of(log.read(5, END, 1)), frames[:1])
    assert same(data_of(log.read(10, END, 1)), frames[-1:])


def test_large_frame(store: LogStore) -> None:
    log, maker = opened(store), FrameMaker()
    frames = [maker.data(), maker.data(100_000), maker.data()]
    for frame in frames:
        log.append([frame], sync=True)
    assert same(data_of(log.read(10, END, 1)), frames[1:2])
    log, recovery = reopened(store, log)
    assert same(list(recovery.frames), frames)


def test_bodies_of_any_buffer(store: LogStore) -> None:
    log, maker = opened(store), FrameMaker()
    frame = maker.data()
    views = [Frame(frame.header, frame.head, memoryview(bytearray(frame.body)))]
    log.append(views, sync=True)
    assert same(data_of(log.read(0, END, 1)), [frame])


def test_find_time(store: LogStore) -> None:
    log, maker = opened(store), FrameMaker()
    stamps = [5, 3, 10, 10, 4, 50, 20, 60, 1]
    frames = [maker.data(500, stamp=stamp) for stamp in stamps]
    for frame in frames:
        log.append([frame], sync=False)
    for time in range(62):
        first = next(
            (frame.header.base_offset for frame in frames if frame.header.timestamp_max_us >= time), None
        )
        assert log.find_time(time) == first, time


@pytest.mark.parametrize("facts_between", [False, True])
def test_retention_offset(store: LogStore, facts_between: bool) -> None:
    log, maker = opened(store), FrameMaker()
    frames = []
    for number in range(30):
        frames.append(maker.data(300, time=number * 10))
        log.append([frames[-1]], sync=False)
        if facts_between and number % 3 == 0:
            log.append([maker.facts()], sync=False)

    def expected(keep: Callable[[int, Frame], bool]) -> int:
        return next((frame.header.base_offset for at, frame in enumerate(frames) if keep(at, frame)), 300)

    size = frames[0].size
    for bytes_max in (0, 1, size, size * 7 - 1, size * 7, size * 29, size * 30, size * 99):
        found = log.retention_offset(bytes_max=bytes_max, append_time_us=None, count_max=None)
        assert found == expected(lambda at, _, most=bytes_max: (30 - at) * size <= most)  # type: ignore[misc]
    for time in (0, 1, 10, 155, 290, 291):
        found = log.retention_offset(bytes_max=None, append_time_us=time, count_max=None)
        assert found == expected(lambda _, frame, age=time: frame.header.append_time_us >= age)  # type: ignore[misc]
    for count in (0, 5, 10, 95, 300, 1000):
        found = log.retention_offset(bytes_max=None, append_time_us=None, count_max=count)
        assert found == expected(lambda _, frame, most=count: frame.header.base_offset >= 300 - most)  # type: ignore[misc]
    assert log.retention_offset(bytes_max=size * 20, append_time_us=150, count_max=200) == 150
    assert log.retention_offset(bytes_max=None, append_time_us=None, count_max=None) == 0


def test_snapshots_bound_the_replay(store: LogStore) -> None:
    log, frames = filled(store)
    log.save_snapshot(Snapshot(9, 80, [b"old"]))
    log.save_snapshot(Snapshot(24, 200, [b"new", bytearray(b"er"), memoryview(b" state")]))
    log, recovery = reopened(store, log)
    assert recovery.snapshot is not None
    assert (recovery.snapshot.entry, recovery.snapshot.offset) == (24, 200)
    assert b"".join(recovery.snapshot.chunks) == b"newer state"
    assert same(list(recovery.frames), frames[25:])
    with pytest.raises(InvalidRequest):
        log.save_snapshot(Snapshot(40, 320, [b"of the future"]))


def test_snapshot_of_everything_leaves_nothing_to_replay(store: LogStore) -> None:
    log, _ = filled(store)
    log.save_snapshot(Snapshot(39, 320, [b"all"]))
    _, recovery = reopened(store, log)
    assert list(recovery.frames) == []
    assert (recovery.end_entry, recovery.end_offset) == (40, 320)


def test_log_may_begin_with_a_snapshot(store: LogStore) -> None:
    log = opened(store)
    log.save_snapshot(Snapshot(99, 1000, [b"state"]))
    log, recovery = reopened(store, log)
    assert (recovery.end_entry, recovery.end_offset) == (100, 1000)
    with pytest.raises(StorageFault):
        log.append([FrameMaker(7, 0).data()], sync=True)
    log.append([FrameMaker(100, 1000).data()], sync=True)
    _, recovery = reopened(store, log)
    assert recovery.snapshot is not None
    assert [header.entry for header, _ in recovery.frames] == [100]


def test_trim_needs_two_snapshots_and_stops_at_the_older(store: LogStore) -> None:
    log, frames = filled(store)
    log.trim(320)
    log.save_snapshot(Snapshot(30, 240, [b"one"]))
    log.trim(320)
    assert log.stats().start_offset == 0
    log.save_snapshot(Snapshot(35, 280, [b"two"]))
    log.trim(320)
    start = log.stats().start_offset
    assert 0 < start <= 250
    assert same(
        data_of(log.read(0, END, 1 << 20)), [f for f in data_frames(frames) if f.header.base_offset >= start]
    )
    log, recovery = reopened(store, log)
    assert log.stats().start_offset == start
    assert same(list(recovery.frames), frames[36:])


def test_a_sealed_segment_can_be_trimmed_whole(store: LogStore) -> None:
    log, maker = opened(store), FrameMaker()
    log.seal()
    frames = [maker.data() for _ in range(3)]
    log.append(frames, sync=False)
    log.save_snapshot(Snapshot(2, maker.offset, [b"one"]))
    log.seal()
    log.seal()
    more = maker.facts()
    log.append([more], sync=False)
    log.save_snapshot(Snapshot(3, maker.offset, [b"two"]))
    assert same(data_of(log.read(0, END, 1 << 20)), frames)
    log.trim(maker.offset)
    assert log.stats().start_offset == log.stats().end_offset == maker.offset
    log, recovery = reopened(store, log)
    assert (recovery.end_entry, recovery.end_offset) == (4, maker.offset)
    last = maker.data()
    log.append([last], sync=True)
    assert same(data_of(log.read(0, END, 1 << 20)), [last])


def mixed(store: LogStore, count: int = 60) -> tuple[PartitionLog, list[Frame]]:
    """A log in which every third frame holds messages without offsets."""
    log, maker = opened(store), FrameMaker()
    kinds = (maker.data, maker.scheduled, maker.facts, lambda: maker.scheduled(700, kind=STAGED))
    frames = [kinds[number % 4]() for number in range(count)]
    for number in range(0, count, 3):
        log.append(frames[number : number + 3], sync=False)
    return log, frames


@pytest.mark.parametrize("copied_bytes", [log_reader.COPIED_BYTES_MAX, 2000, 0])
def test_frames_by_their_index(store: LogStore, copied_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_reader, "COPIED_BYTES_MAX", copied_bytes)
    log, frames = mixed(store)
    for wanted in ([0], [59], [7, 3, 41], [1, 5, 9, 13, 57], list(range(60)), [8, 8], []):
        assert same(log.read_entries(wanted), [frames[entry] for entry in wanted])
    log, recovery = reopened(store, log)
    assert same(list(recovery.frames), frames)
    assert same(log.read_entries([57, 1]), [frames[57], frames[1]])
    with pytest.raises(StorageFault):
        log.read_entries([1, 60])


def test_messages_without_offsets_are_not_read_by_offset(store: LogStore) -> None:
    log, frames = mixed(store)
    assert same(data_of(log.read(0, END, 1 << 20)), data_frames(frames))
    assert log.stats().end_offset == 10 * len(data_frames(frames))
    log.truncate(30)
    assert same(log.read_entries([29]), [frames[29]])
    with pytest.raises(StorageFault):
        log.read_entries([30])


def test_trim_leaves_the_floor(store: LogStore) -> None:
    log, frames = mixed(store)
    end = log.stats().end_offset
    log.save_snapshot(Snapshot(58, end, [b"one"]))
    log.save_snapshot(Snapshot(59, end, [b"two"]))
    log.trim(end, 0)
    assert log.stats().start_offset == 0
    log.trim(end, 33)
    assert 0 < log.stats().start_offset <= 90
    assert same(log.read_entries([33, 45]), [frames[33], frames[45]])
    log.trim(end)
    assert log.stats().start_offset > 90
    with pytest.raises(StorageFault):
        log.read_entries([33])
    log, recovery = reopened(store, log)
    assert (recovery.end_entry, recovery.end_offset) == (60, end)


def test_trim_keeps_what_is_above_the_offset(store: LogStore) -> None:
    log, _ = filled(store)
    log.save_snapshot(Snapshot(38, 320, [b"one"]))
    log.save_snapshot(Snapshot(39, 320, [b"two"]))
    log.trim(100)
    assert log.stats().start_offset <= 100
    assert data_of(log.read(100, END, 1))[0][0].base_offset <= 100


@pytest.mark.parametrize("entry", [0, 1, 13, 20, 39])
def test_truncate(store: LogStore, entry: int) -> None:
    log, frames = filled(store)
    log.save_snapshot(Snapshot(10, 80, [b"state"]))
    log.truncate(entry)
    offset = max((frame.header.end_offset for frame in data_frames(frames[:entry])), default=0)
    assert log.stats().end_offset == offset
    assert same(data_of(log.read(0, END, 1 << 20)), data_frames(frames[:entry]))
    maker = FrameMaker(entry, offset)
    fresh = [maker.data(77), maker.data(33)]
    log.append(fresh, sync=True)
    log, recovery = reopened(store, log)
    after = recovery.snapshot.entry + 1 if recovery.snapshot else 0
    assert after == (11 if entry > 10 else 0)
    assert same(list(recovery.frames), [*frames[:entry], *fresh][after:])


def test_truncate_behind_the_end_and_before_the_start(store: LogStore) -> None:
    log, maker = opened(store), FrameMaker(10, 0)
    log.append([maker.data()], sync=True)
    log.truncate(11)
    log.truncate(500)
    assert log.stats().end_offset == 10
    with pytest.raises(InvalidRequest):
        log.truncate(9)


def test_truncate_below_the_only_snapshots_of_a_trimmed_log_is_refused(store: LogStore) -> None:
    log, _ = filled(store)
    log.save_snapshot(Snapshot(30, 240, [b"one"]))
    log.save_snapshot(Snapshot(35, 280, [b"two"]))
    log.trim(320)
    with pytest.raises(InvalidRequest):
        log.truncate(30)
    assert log.stats().end_offset == 320
    log.truncate(31)


def test_one_log_is_open_once(store: LogStore) -> None:
    log = opened(store)
    with pytest.raises(Unavailable):
        store.log("topic/0", unheard)
    log.close()
    opened(store)


def test_closed_log_refuses_writes(store: LogStore) -> None:
    log, _ = filled(store, 2)
    log.close()
    log.close()
    with pytest.raises(StorageFault):
        log.append([FrameMaker(2, 20).data()], sync=True)
    with pytest.raises(StorageFault):
        log.sync()


def test_names_and_remove(store: LogStore) -> None:
    first, second = opened(store, "a/0"), opened(store, "b/1")
    second.append([FrameMaker().data()], sync=True)
    assert sorted(store.names()) == ["a/0", "b/1"]
    first.close()
    store.remove("b/1")
    store.remove("never/0")
    assert list(store.names()) == ["a/0"]
    assert opened(store, "b/1").stats().end_offset == 0
    store.close()


def test_stats(store: LogStore) -> None:
    log, frames = filled(store)
    stats = log.stats()
    assert (stats.start_offset, stats.end_offset, stats.fault) == (0, 320, None)
    assert stats.bytes >= sum(frame.size for frame in frames)
    assert stats.segments >= 1
    log.truncate(20)
    assert log.stats().bytes < stats.bytes
    log.append(frames[20:], sync=False)
    before = stats.syncs
    log.append([FrameMaker(40, 320).data()], sync=True)
    assert log.stats().syncs > before


# -------------------------------------------------------------------------------------- damage and loss


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_whoever_opened_a_log_hears_of_its_damage_once(kind: str) -> None:
    disk, maker, heard = SimDisk(1), FrameMaker(), list[PartitionLog]()
    store: LogStore = FileStore(disk, TestClock()) if kind == "file" else MemoryStore()
    log = store.log("topic/0", lambda error, log: heard.append(log))
    log.recover()
    frames = [maker.data() for _ in range(3)]
    log.append(frames, sync=True)
    if isinstance(log, MemoryLog):
        log.damage(1)
    else:
        (name,) = [name for name in disk.list("topic/0") if name.endswith(".log")]
        content = bytes(disk.content(f"topic/0/{name}"))
        disk.flip(f"topic/0/{name}", content.index(bytes(frames[1].body)), 0)
    for _ in range(2):
        with pytest.raises(Corrupt):
            log.read(10, END, 1)
        assert heard == [log]
    with pytest.raises(Corrupt):
        log.append([maker.data()], sync=True)
    assert len(data_of(log.read(0, 10, 1))) == 1
    assert heard == [log]


def accepted(store: LogStore, log: PartitionLog, *entries: int) -> tuple[PartitionLog, Recovery]:
    log.close()
    store.accept_losses("topic/0", entries, ())
    again = store.known_log("topic/0", unheard)
    return again, again.recover()


def test_a_log_that_is_cut_behind_lost_messages_keeps_their_numbers(store: LogStore) -> None:
    log, frames = filled(store)  # Of the 40, every fifth has facts.
    log, _ = accepted(store, log, 38)
    log.truncate(39)
    assert log.stats().end_offset == frames[38].header.end_offset == 320
    _, recovery = reopened(store, log)
    assert (recovery.end_entry, recovery.end_offset) == (39, 320)


def test_entries_of_no_use_are_given_up_and_their_numbers_stay(store: LogStore) -> None:
    log, frames = filled(store)
    gone = next(frame.header for frame in data_frames(frames)[3:])
    with pytest.raises(Unavailable):
        store.accept_losses("topic/0", (gone.entry,), ())
    found = store.find_losses("topic/0", (gone.entry,), ())
    assert [(lost.first_entry, lost.end_entry) for lost in found.ranges] == [(gone.entry, gone.entry + 1)]
    assert [(lost.first_offset, lost.end_offset) for lost in found.ranges] == [
        (gone.base_offset, gone.end_offset)
    ]
    again, recovery = accepted(store, log, gone.entry)
    assert recovery.fault is None
    assert list(recovery.lost) == [gone.base_offset, gone.end_offset]
    headers = [header for header, _ in recovery.frames]
    assert [header.entry for header in headers] == [frame.header.entry for frame in frames]
    (lost,) = [header for header in headers if header.kind == LOST]
    assert (lost.entry, lost.producer_id, lost.base_offset) == (gone.entry, 1, gone.base_offset)
    assert lost.timestamp_max_us == gone.end_offset
    kept = [frame for frame in data_frames(frames) if frame.header.entry != gone.entry]
    offset, read = 0, []
    while some := data_of(again.read(offset, END, 1 << 20)):
        read += some
        offset = some[-1][0].end_offset
    assert same(read, kept)
    assert (again.stats().end_offset, recovery.end_entry) == (frames[-2].header.end_offset, len(frames))


def test_a_loss_is_told_until_it_is_recorded(store: LogStore) -> None:
    log, frames = filled(store)
    again, recovery = accepted(store, log, data_frames(frames)[0].header.entry)
    again, second = reopened(store, again)
    assert list(second.lost) == list(recovery.lost) == [0, 10]
    again.loss_recorded()
    _, third = reopened(store, again)
    assert list(third.lost) == []


def test_a_log_that_is_well_has_lost_nothing(store: LogStore) -> None:
    log, frames = filled(store)
    assert store.find_losses("topic/0", (), ()).ranges == []
    again, recovery = accepted(store, log)
    assert list(recovery.lost) == []
    assert same(list(recovery.frames), frames)
    again.close()


def test_a_scrub_goes_through_what_is_closed_in_pieces(store: LogStore) -> None:
    log, _ = filled(store)
    entry: int | None = 0
    pieces = []
    while entry is not None:
        found = log.scrub(entry, 500)
        assert found.next_entry is None or found.next_entry > entry
        assert not found.problems
        entry = found.next_entry
        pieces.append(found.bytes)
    assert len(pieces) > 3
    assert sum(pieces) > 2000


def test_a_note_is_kept(store: LogStore) -> None:
    assert store.load_note("place") is None
    store.save_note("place", b"here")
    store.save_note("place", b"there")
    assert store.load_note("place") == b"there"
    assert list(store.names()) == []
