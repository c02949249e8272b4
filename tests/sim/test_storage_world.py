"""The storage world holds over fixed seeds, and each planted bug is caught: the test of the tests.

Covers `sim/bit_flips.py`, `sim/log_checks.py` and `sim/worlds/storage_world.py`.
"""

from collections import Counter
from collections.abc import Callable

import pytest

from tailrace.sim.__main__ import run_world
from tailrace.sim.log_checks import LogViolation
from tailrace.sim.sim_disk import SimDisk
from tailrace.sim.worlds import storage_world
from tailrace.storage.files import file_log, log_folder, log_reader, opening, scan
from tailrace.storage.files.file_log import FileLog
from tailrace.storage.files.log_folder import LogFolder
from tests.sim.planted import Plant, first_caught, title

SEEDS = 220
BUG_SEEDS = 60


def test_every_seed_holds_and_every_state_is_reached(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_world("storage", range(SEEDS)), capsys.readouterr().out


def test_same_seed_same_run() -> None:
    assert storage_world.run(7) == storage_world.run(7)


def _no_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(header: scan.Header, data: bytes, position: int = 0) -> memoryview:
        start = position + scan.HEADER_BYTES
        return memoryview(data)[start : start + header.length]

    monkeypatch.setattr(scan, "check_body", unchecked)
    monkeypatch.setattr(log_reader, "check_body", unchecked)


def _sync_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(self: LogFolder, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError:
            step()

    monkeypatch.setattr(LogFolder, "_fencing", twice)


def _folder_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogFolder, "sync_names", lambda self: None)


def _acknowledged_before_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileLog, "sync", lambda self: None)


def _unproven_tail_not_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_log, "write_again", lambda disk, handle, position, end: None)


def _damage_cut_like_a_torn_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_synced(*args: object) -> scan.DamagedTail:
        return scan.look_behind(*args)._replace(synced=0)  # type: ignore[arg-type]

    monkeypatch.setattr(opening, "look_behind", nothing_synced)
    monkeypatch.setattr(opening, "read_mark", lambda disk, folder: None)


def _barriers_behind_damage_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_synced_by_barriers", lambda chunk, position, nonce: 0)


def _every_barrier_taken_for_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    found = scan._synced_by_barriers

    def all_of_it(chunk: bytes, position: int, nonce: int | None) -> int:
        return position + len(chunk) if found(chunk, position, nonce) else 0

    monkeypatch.setattr(scan, "_synced_by_barriers", all_of_it)


def _mark_not_lowered_before_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    write = log_folder.MarkFile.write

    def once(self: log_folder.MarkFile, mark: log_folder.Mark, *, both: bool = False) -> None:
        if not both:
            write(self, mark)

    monkeypatch.setattr(log_folder.MarkFile, "write", once)


def _fence_checked_before_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(self: FileLog) -> None:
        self._require_writable("unknown")
        active = self._active
        with self._flushing:
            if active is not None and self._synced != active.size:
                self._folder.disk.sync(self._handle)
                self._synced = active.size

    monkeypatch.setattr(FileLog, "sync", sync)


def _refused_for_certain_after_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = LogFolder.require_usable
    monkeypatch.setattr(LogFolder, "require_usable", lambda self, *, outcome: refuse(self, outcome="none"))


def _cache_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_log, "drop_cache", lambda disk, folder: None)


def _damage_found_by_reading_is_not_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileLog, "_found", lambda self, error: None)


def _quarantine_without_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogFolder, "quarantine", lambda self, error: setattr(self, "fault", error))


BUGS = [
    _damage_found_by_reading_is_not_quarantined,
    _quarantine_without_a_note,
    _no_checksums,
    _sync_tried_again,
    _folder_not_synced,
    _acknowledged_before_sync,
    _unproven_tail_not_rewritten,
    _damage_cut_like_a_torn_tail,
    _barriers_behind_damage_ignored,
    _every_barrier_taken_for_synced,
    _mark_not_lowered_before_a_cut,
    _fence_checked_before_the_lock,
    _refused_for_certain_after_the_write,
    _cache_not_dropped,
]


@pytest.mark.parametrize("plant", BUGS, ids=title)
def test_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert first_caught(storage_world.run, range(BUG_SEEDS), by=Exception) is not None


def test_a_failing_seed_and_an_unreached_state_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tailrace.sim import __main__ as command

    def broken(seed: int) -> Counter[str]:
        if seed == 3:
            raise LogViolation("broken on purpose")
        return Counter(quiet=1)

    monkeypatch.setitem(command.WORLDS, "broken", command.World(broken, frozenset({"quiet"})))
    monkeypatch.setitem(command.WORLDS, "idle", command.World(lambda seed: Counter(), frozenset({"never"})))
    assert not run_world("broken", range(10))
    assert "seed 3 FAILED" in capsys.readouterr().out
    assert not run_world("idle", range(200))
    assert "NEVER REACHED: never" in capsys.readouterr().out


def test_flip_of_a_missing_byte_changes_nothing() -> None:
    disk = SimDisk(1)
    handle = disk.open("file", create=True)
    disk.write(handle, [b"abc"], 0)
    disk.flip("file", 10, 0)
    assert disk.content("file") == b"abc"
