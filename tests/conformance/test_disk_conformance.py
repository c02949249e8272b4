"""One suite for every `Disk`: the real one and the simulated one have the same manners."""

import errno
from pathlib import Path

import pytest

from tailrace.ports import Disk
from tailrace.sim.sim_disk import SimDisk
from tailrace.storage.disk import RealDisk


@pytest.fixture(params=["real", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return RealDisk(tmp_path / "root") if request.param == "real" else SimDisk(1)


def test_write_read_size_truncate(disk: Disk) -> None:
    handle = disk.open("file", create=True)
    disk.write(handle, [b"abc", memoryview(b"defg"), bytearray(b"hi")], 3)
    assert disk.read(handle, 0, 100) == b"\0\0\0abcdefghi"
    assert disk.read(handle, 5, 2) == b"cd"
    assert disk.read(handle, 50, 2) == b""
    disk.allocate(handle, 20)
    assert disk.size(handle) == 20
    assert disk.read(handle, 11, 100) == b"i" + bytes(8)
    disk.truncate(handle, 4)
    disk.truncate(handle, 8)
    assert disk.read(handle, 0, 100) == b"\0\0\0a\0\0\0\0"
    disk.sync(handle)
    disk.close(handle)
    with pytest.raises(OSError, match=r"[Bb]ad") as caught:
        disk.sync(handle)
    assert caught.value.errno == errno.EBADF


def test_a_mapping_shows_the_file_and_outlives_its_handle(disk: Disk) -> None:
    handle = disk.open("file", create=True)
    data = bytes(range(256)) * 100
    disk.write(handle, [data], 0)
    views = [disk.map(handle, at, length) for at, length in ((0, 25_600), (4_097, 300), (25_000, 10_000))]
    assert len(disk.map(handle, 30_000, 10)) == 0
    disk.close(handle)
    assert views == [data, data[4_097:4_397], data[25_000:]]
    other = disk.open("other", create=True)
    disk.write(other, [views[1], views[2]], 0)
    assert disk.read(other, 0, 1000) == data[4_097:4_397] + data[25_000:]


def test_names(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        disk.open("missing")
    disk.make_folder("a/b")
    disk.make_folder("a/b")
    disk.close(disk.open("a/b/one", create=True))
    disk.close(disk.open("a/b/two", create=True))
    disk.rename("a/b/one", "a/b/two")
    disk.sync_folder("a/b")
    assert disk.list("a/b") == ["two"]
    assert disk.list("a") == ["b"]
    assert disk.list("nowhere") == []
    disk.remove("a/b/two")
    assert disk.list("a/b") == []
    with pytest.raises(FileNotFoundError):
        disk.remove("a/b/two")
    disk.remove("a")
    assert disk.list("") == []


def test_more_parts_than_one_call_takes(disk: Disk) -> None:
    handle = disk.open("file", create=True)
    parts = [bytes([number % 256]) * (number % 7) for number in range(3000)]
    disk.write(handle, parts, 1)
    assert disk.read(handle, 1, 100_000) == b"".join(parts)


def test_folders_and_files_that_are_synced_together(disk: Disk) -> None:
    assert not disk.exists("a")
    disk.add_folder("a")
    disk.add_folder("a")
    handles = [disk.open(f"a/{name}", create=True) for name in ("one", "two")]
    for handle in handles:
        disk.write(handle, [b"text"], 0)
    disk.sync_all(handles, ["", "a"])
    assert disk.exists("a")
    assert disk.exists("a/two")
    assert not disk.exists("a/three")
    for handle in handles:
        disk.close(handle)
    with pytest.raises(OSError, match=r"[Bb]ad"):
        disk.sync_all(handles, [""])


def test_a_folder_that_was_not_synced_may_vanish_whole() -> None:
    found = set()
    for seed in range(20):
        disk = SimDisk(seed)
        disk.add_folder("kept")
        disk.sync_folder("")
        disk.add_folder("a")
        handle = disk.open("a/file", create=True)
        disk.write(handle, [b"text"], 0)
        disk.sync_all([handle], ["a"])
        disk.crash()
        assert disk.exists("kept")
        found.add((disk.exists("a"), disk.exists("a/file")))
    assert found == {(False, False), (True, True)}
