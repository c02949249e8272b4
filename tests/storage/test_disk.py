"""What is special to the real disk and to the simulated one; `tests/conformance` has what they share.

Also covers `sim/sim_disk.py`.
"""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from tailrace.sim.sim_disk import SimDisk
from tailrace.storage.disk import RealDisk


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = RealDisk(tmp_path)
    handle = disk.open("file", create=True)
    real = os.pwritev

    def short(fd: int, parts: Sequence[bytes], position: int, flags: int = 0) -> int:
        return real(fd, [b"".join(parts)[:5]], position)

    monkeypatch.setattr(os, "pwritev", short)
    parts = [b"abc", b"", b"defgh", b"i", b"jklmnopq"]
    disk.write(handle, parts, 2)
    assert disk.read(handle, 2, 100) == b"".join(parts)


@pytest.mark.parametrize("cached_only", [False, True])
def test_bulk_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_only: bool) -> None:
    """In several calls, around the page cache where the system can do that."""
    calls: list[tuple[int, int]] = []
    real = os.pwritev

    def noted(fd: int, parts: Sequence[bytes], position: int, flags: int = 0) -> int:
        calls.append((sum(map(len, parts)), flags))
        if flags and cached_only:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(fd, parts, position, flags)

    monkeypatch.setattr(os, "pwritev", noted)
    disk = RealDisk(tmp_path)
    handle = disk.open("file", create=True)
    parts = [os.urandom(1 << 18), b"", os.urandom(5 << 20), os.urandom(3), os.urandom(28 << 20)]
    disk.write(handle, parts, 7)
    assert disk.read(handle, 7, 40 << 20) == b"".join(parts)
    assert max(size for size, _ in calls) == 1 << 20
    assert calls[0][1], "the cache is left alone"
    assert bool(calls[-1][1]) is not cached_only or not _dontcache(tmp_path)
    calls.clear()
    disk.write(handle, [os.urandom(2 << 20)], 0)
    assert calls == [(1 << 20, 0)] * 2


def _dontcache(folder: Path) -> bool:
    """Whether the system can write around its cache there."""
    handle = os.open(folder / "probe", os.O_RDWR | os.O_CREAT)
    try:
        os.pwritev(handle, [b"x"], 0, 0x80)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def test_modes(tmp_path: Path) -> None:
    disk = RealDisk(tmp_path / "root")
    disk.make_folder("folder")
    disk.open("folder/file", create=True)
    modes = [
        stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("root", "root/folder", "root/folder/file")
    ]
    assert modes == [0o700, 0o700, 0o600]


def test_allocate_where_the_file_system_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, start: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    disk = RealDisk(tmp_path)
    handle = disk.open("file", create=True)
    disk.allocate(handle, 100)
    disk.allocate(handle, 50)
    assert disk.size(handle) == 100


def test_crash_keeps_what_was_synced_and_nothing_else_for_sure() -> None:
    outcomes = set()
    for seed in range(40):
        disk = SimDisk(seed)
        disk.make_folder("log")
        handle = disk.open("log/file", create=True)
        disk.write(handle, [b"durable!"], 0)
        disk.sync(handle)
        disk.sync_folder("log")
        disk.write(handle, [b"tail" * 4], 8)
        disk.open("log/other", create=True)
        disk.crash()
        handle = disk.open("log/file")
        content = disk.read(handle, 0, 100)
        assert content[:8] == b"durable!"
        outcomes.add((content[8:], tuple(disk.list("log"))))
    assert len(outcomes) > 4
    assert (b"", ("file",)) in outcomes
    assert any(tail == b"tail" * 4 for tail, _ in outcomes)
    assert any(b"\0" in tail for tail, _ in outcomes)


def test_failed_sync_drops_the_data_and_the_next_one_lies() -> None:
    lost = 0
    for seed in range(20):
        disk = SimDisk(seed)
        handle = disk.open("file", create=True)
        disk.sync_folder("")
        disk.write(handle, [b"x" * 64], 0)
        disk.sync_fails_in = 0
        with pytest.raises(OSError, match="simulated"):
            disk.sync(handle)
        disk.sync(handle)
        assert disk.read(handle, 0, 64) == b"x" * 64
        disk.crash()
        lost += disk.content("file") != b"x" * 64
    assert lost > 0


def test_full_disk_takes_a_part() -> None:
    disk = SimDisk(1)
    handle = disk.open("file", create=True)
    disk.capacity = 10
    with pytest.raises(OSError, match="full") as caught:
        disk.write(handle, [b"a" * 20], 0)
    assert caught.value.errno == errno.ENOSPC
    assert disk.size(handle) == 10
    with pytest.raises(OSError, match="full"):
        disk.allocate(handle, 11)
    disk.write(handle, [b"b" * 10], 0)


def test_two_processes_make_the_same_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has looked before the other has made it: brokers of one folder that start at the same moment."""
    root = tmp_path / "data"
    root.mkdir()
    looks = iter((False,))
    is_folder = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: next(looks, True) and is_folder(path))
    RealDisk(root)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        RealDisk(tmp_path / "file")
