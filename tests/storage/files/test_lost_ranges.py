"""Lost ranges of a log of files: damage anywhere is accepted, the rest stays, and no cut in between hurts."""

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from tailrace.errors import Corrupt, StorageFault
from tailrace.format.frame import BARRIER, DATA, LOST, Frame, walk
from tailrace.ports import Losses, LostRange, Snapshot
from tailrace.sim.sim_disk import Crash, SimDisk
from tailrace.storage.files import lost_ranges
from tailrace.storage.files.file_log import FileLog
from tailrace.storage.files.file_store import FileStore
from tailrace.storage.files.mark import MARK_NAME
from tailrace.storage.files.segment import first_entry, log_name
from tests.storage.frame_maker import FrameMaker, TestClock, unheard

LOG = "topic/0"
END = 1 << 60


class Site:
    """A log of several segments on a simulated disk, whose frames are known."""

    def __init__(self, seed: int = 1) -> None:
        self.disk = SimDisk(seed)
        self.clock = TestClock()
        self.maker = FrameMaker()
        self.frames: list[Frame] = []
        self.store = self.new_store()

    def new_store(self) -> FileStore:
        return FileStore(self.disk, self.clock, segment_bytes=4096)

    def fill(self, appends: int = 12) -> None:
        log = self.store.log(LOG, unheard)
        log.recover()
        for number in range(appends):
            some = [self.maker.data(300), self.maker.data(500)]
            if number % 3 == 0:
                some.append(self.maker.facts())
            log.append(some, sync=True)
            self.frames += some
        log.close()

    def segments(self) -> list[int]:
        return sorted(e for name in self.disk.list(LOG) if (e := first_entry(name)) is not None)

    def path(self, first: int) -> str:
        return f"{LOG}/{log_name(first)}"

    def flip(self, path: str, position: int) -> None:
        self.disk.flip(path, position, 3)

    def accept(self, *entries: int) -> Losses:
        return self.store.accept_losses(LOG, entries, ())

    def opened(self) -> tuple[FileLog, list[tuple[int, int, int]], list[int]]:
        log = self.store.known_log(LOG, unheard)
        recovery = log.recover()
        assert recovery.fault is None, recovery.fault
        found = [(header.kind, header.entry, header.base_offset) for header, _ in recovery.frames]
        return log, found, list(recovery.lost)

    def survivors(self, losses: list[LostRange]) -> list[tuple[int, int, int]]:
        gone = [(lost.first_entry, lost.end_entry) for lost in losses]
        spans = [(lost.first_offset, lost.end_offset) for lost in losses]
        return [
            (header.kind, header.entry, header.base_offset)
            for header in (frame.header for frame in self.frames)
            if not any(first <= header.entry < end for first, end in gone)
            and not (header.kind == DATA and any(a <= header.base_offset < b for a, b in spans))
        ]

    def go_on(self, log: FileLog, losses: Losses) -> None:
        """What is left can be read, nothing is used twice, and the log takes more."""
        stats = log.stats()
        assert stats.end_offset >= self.maker.offset
        maker = FrameMaker(log._end_entry, stats.end_offset)
        log.append([maker.data()], sync=True)
        here = [
            header.base_offset
            for part in log.read(0, END, 1 << 24)
            for header, _ in walk(part)
            if header.kind == DATA
        ]
        wanted = [offset for kind, _, offset in self.survivors(losses.ranges) if kind == DATA]
        assert here == [*wanted, stats.end_offset]
        log.loss_recorded()
        log.close()
        again, _, lost = self.opened()
        assert not lost
        again.close()


def frames_of(site: Site, first: int) -> list[tuple[int, int, int]]:
    """Kind, position and size of what stands in a segment."""
    found, position = [], 0
    for header, _ in walk(site.disk.content(site.path(first))):
        found.append((header.kind, position, header.size))
        position += header.size
    return found


def places(site: Site) -> list[tuple[int, int]]:
    """A byte of the header and one of the body of every frame, and one of every barrier."""
    found = []
    for first in site.segments():
        for kind, position, size in frames_of(site, first):
            found.append((first, position + 40))
            if kind != BARRIER:
                found.append((first, position + 130 if size > 130 else position + 60))
    return found


def test_one_flipped_bit_anywhere_costs_one_append_at_most() -> None:
    model = Site()
    model.fill()
    assert len(model.segments()) >= 3
    reached = set()
    for first, position in places(model):
        site = Site()
        site.fill()
        site.flip(site.path(first), position)
        damaged = site.store.find_losses(LOG, (), ())
        losses = site.accept()
        assert losses.ranges == damaged.ranges
        entries = sum(lost.end_entry - lost.first_entry for lost in losses.ranges)
        reached.add(entries)
        assert entries <= 3, f"{first} at {position}: {losses.ranges}"
        assert all(lost.exact for lost in losses.ranges)
        log, found, lost = site.opened()
        assert [item for item in found if item[0] != LOST] == site.survivors(losses.ranges)
        span = sum(lost.end_offset - lost.first_offset for lost in losses.ranges)
        assert sum(end - begin for begin, end in zip(lost[::2], lost[1::2], strict=True)) == span
        for name in losses.kept:
            assert site.disk.content(name)
        site.go_on(log, losses)
    assert {0, 1} <= reached


def test_frames_outside_of_the_damage_stay_byte_for_byte_where_they_are() -> None:
    site = Site()
    site.fill()
    first = site.segments()[1]
    _, position, size = [item for item in frames_of(site, first) if item[0] == DATA][1]
    before = site.disk.content(site.path(first))
    site.flip(site.path(first), position + 200)
    site.accept()
    after = site.disk.content(site.path(first))
    assert after[:position] + after[position + size :] == before[:position] + before[position + size :]


@pytest.mark.parametrize("which", ["first", "middle", "last", "all", "folder"])
def test_missing_files_are_accepted_and_their_offsets_never_used_again(which: str) -> None:
    site = Site()
    site.fill()
    segments = site.segments()
    gone = {"first": segments[:1], "middle": segments[1:2], "last": segments[-1:], "all": segments}.get(which)
    for first in segments if gone is None else gone:
        site.disk.remove(site.path(first))
    if which == "folder":
        for name in site.disk.list(LOG):
            site.disk.remove(f"{LOG}/{name}")
    site.disk.sync_folder(LOG)
    log = site.store.known_log(LOG, unheard)
    assert log.recover().fault is not None
    log.close()
    losses = site.accept()
    assert losses.ranges
    log, _, lost = site.opened()
    assert lost[-1] == max(end for end in (item.end_offset for item in losses.ranges))
    site.go_on(log, losses)


def cut(site: Site, *, to: int) -> None:
    """The last segment was put back as it was when it had so many appends."""
    last = site.segments()[-1]
    content = site.disk.content(site.path(last))
    size = len(content)
    used = len(content.rstrip(b"\0")) + 63 & ~63
    barriers = [at for at in range(0, used, 64) if content[at : at + 6] == b"TRLF\1\6"]
    keep = barriers[to]
    handle = site.disk.open(site.path(last))
    site.disk.write(handle, [bytes(size - keep)], keep)
    site.disk.sync(handle)
    site.disk.close(handle)


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("which", ["last", "all", "all but snapshots", "end"])
def test_after_a_kill_the_mark_is_no_upper_bound(which: str, snapshot: bool) -> None:
    """It was written before the last appends."""
    site = Site()
    site.fill()
    site.clock.time_us += 2_000_000
    log = site.store.known_log(LOG, unheard)
    log.recover()
    if snapshot:
        log.save_snapshot(Snapshot(site.maker.entry - 1, site.maker.offset, [b"state"]))
    for number in range(5):
        some = [site.maker.data(300, span=7), site.maker.facts()]
        log.append(some, sync=True)
        site.frames += some
        if not number:
            site.clock.time_us += 2_000_000
    if which == "end":
        cut(site, to=1)
    else:
        segments = site.segments()
        for first in segments[-1:] if which == "last" else segments:
            site.disk.remove(site.path(first))
        if which == "all but snapshots":
            site.disk.remove(f"{LOG}/{MARK_NAME}")
        site.disk.sync_folder(LOG)
    site.store = site.new_store()
    log = site.store.known_log(LOG, unheard)
    if log.recover().fault is None:
        assert which == "end"
        pytest.fail("the mark proves nothing here")
    log.close()
    losses = site.accept()
    assert not losses.ranges[-1].exact
    log, replayed, lost = site.opened()
    assert LOST in [kind for kind, _, _ in replayed], "a snapshot does not know how far the loss goes"
    assert lost[-1] == losses.ranges[-1].end_offset
    if snapshot or which != "all but snapshots":
        assert log._end_entry > site.maker.entry
    site.go_on(log, losses)


def test_the_end_of_the_last_segment_without_a_mark_takes_an_upper_bound() -> None:
    site = Site()
    site.fill()
    last = site.segments()[-1]
    whole = site.disk.content(site.path(last))
    barriers = [position for kind, position, _ in frames_of(site, last) if kind == BARRIER]
    handle = site.disk.open(site.path(last))
    # Everything from the second barrier on is noise; the mark says that it was synced.
    site.disk.write(handle, [b"\x55" * (len(whole) - barriers[1])], barriers[1])
    site.disk.sync(handle)
    site.disk.close(handle)
    losses = site.accept()
    log, _, _ = site.opened()
    site.go_on(log, losses)


def test_a_frame_that_is_whole_and_of_no_use_is_given_up_by_its_index() -> None:
    site = Site()
    site.fill()
    facts = next(frame.header.entry for frame in site.frames if frame.header.kind != DATA)
    losses = site.accept(facts)
    assert [(lost.first_entry, lost.end_entry) for lost in losses.ranges] == [(facts, facts + 1)]
    log, found, lost = site.opened()
    assert (LOST, facts) in [item[:2] for item in found]
    assert not lost
    site.go_on(log, losses)


def test_a_snapshot_that_cannot_be_used_is_put_aside() -> None:
    site = Site()
    site.fill()
    log, _, _ = site.opened()
    log.save_snapshot(Snapshot(5, 40, [b"x"]))
    log.close()
    losses = site.store.accept_losses(LOG, (), (5,))
    assert [name.rpartition("/")[2] for name in losses.kept] == ["lost-snapshot-00000000000000000005.snap"]
    log, found, _ = site.opened()
    assert found[0][1] == 0
    log.close()


@pytest.mark.parametrize("what", ["body", "header", "missing", "tail"])
def test_a_crash_at_any_step_leaves_the_log_damaged_or_repaired(what: str) -> None:
    outcomes = set()
    for cut in range(200):
        site = Site(seed=cut)
        site.fill()
        segments = site.segments()
        first = segments[1] if what != "tail" else segments[-1]
        data = [item for item in frames_of(site, first) if item[0] == DATA]
        if what == "missing":
            site.disk.remove(site.path(first))
            site.disk.sync_folder(LOG)
        elif what == "tail":
            site.flip(site.path(first), data[-1][1] + 20)
        else:
            site.flip(site.path(first), data[1][1] + (200 if what == "body" else 20))
        planned = site.store.find_losses(LOG, (), ())
        assert planned.ranges
        site.disk.crash_in = cut
        try:
            site.accept()
            outcomes.add("done")
            crashed = False
        except Crash:
            crashed = True
        site.disk.crash()
        site.disk.restart()
        site.store = site.new_store()
        log = site.store.known_log(LOG, unheard)
        recovery = log.recover()
        damaged = recovery.fault is not None
        try:
            found = [] if damaged else [header.entry for header, _ in recovery.frames]
        except Corrupt:
            damaged = True
        log.close()
        if damaged:
            outcomes.add("damaged")
            site.accept()
            log, _, lost = site.opened()
        else:
            outcomes.add("repaired")
            assert found
            log, _, lost = site.opened()
        for item in planned.ranges:
            inside = any(
                a <= item.first_offset and item.end_offset <= b
                for a, b in zip(lost[::2], lost[1::2], strict=True)
            )
            assert inside or item.first_offset == item.end_offset, (cut, what, item, lost)
        site.go_on(log, Losses(planned.ranges))
        if not crashed:
            break
    assert outcomes == {"done", "damaged", "repaired"}


def test_reading_goes_over_a_lost_range_in_order() -> None:
    site = Site()
    site.fill()
    first = site.segments()[1]
    _, position, _ = next(item for item in frames_of(site, first) if item[0] == DATA)
    site.flip(site.path(first), position + 200)
    losses = site.accept()
    log, _, _ = site.opened()
    headers = [header for header, _ in log.scan(0, END)]
    assert [header.entry for header in headers] == sorted(header.entry for header in headers)
    (lost,) = losses.ranges
    (part,) = log.read(lost.first_offset, lost.end_offset + 10, 1) or [b""]
    assert next(header for header, _ in walk(part)).base_offset == lost.end_offset
    assert all(one.entry < other.entry for one, other in pairwise(headers))
    assert MARK_NAME in site.disk.list(LOG)
    log.close()


def _offsets_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = lost_ranges._filling

    def short(walked: lost_ranges.Walked, hole: lost_ranges.Hole, nonce: int) -> bytes:
        return fill(walked, msgspec.structs.replace(hole, end_offset=hole.first_offset), nonce)

    monkeypatch.setattr(lost_ranges, "_filling", short)


def _damaged_bytes_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_ranges, "_bytes", lambda disk, path, start, end: b"")


def _loss_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_ranges, "_joined", lambda spans: [])


PLANTED = [_offsets_used_again, _damaged_bytes_not_kept, _loss_not_noted]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__.strip("_"))
def test_planted_bug_is_caught(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, Corrupt, StorageFault)):
        test_one_flipped_bit_anywhere_costs_one_append_at_most()
