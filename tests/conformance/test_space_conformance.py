"""What every `SpaceGauge` must do; of `storage.spare_space` also what it leaves on the disk.

Covers `storage/spare_space.py`.
"""

import errno
from pathlib import Path

import pytest

from tailrace.ports import Disk
from tailrace.sim.sim_disk import SimDisk
from tailrace.storage.disk import RealDisk
from tailrace.storage.spare_space import RESERVE_NAME, SpareSpace
from tailrace.storage.storage_tuning import PARTS


@pytest.fixture(params=["real", "simulated"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Disk:
    return RealDisk(tmp_path) if request.param == "real" else SimDisk(seed=1)


@pytest.fixture
def gauge(disk: Disk, tmp_path: Path) -> SpareSpace:
    return SpareSpace(tmp_path, disk)


def held(disk: Disk) -> int:
    if RESERVE_NAME not in disk.list(""):
        return 0
    handle = disk.open(RESERVE_NAME)
    try:
        return disk.size(handle)
    finally:
        disk.close(handle)


def test_room_is_told(gauge: SpareSpace) -> None:
    room = gauge.measure()
    assert 0 <= room.free_bytes <= room.total_bytes
    assert 0 < room.reserve_bytes <= room.total_bytes // 50


def test_the_reserve_is_held_let_go_in_parts_and_held_again(disk: Disk, gauge: SpareSpace) -> None:
    gauge.release()  # Harmless: there is none.
    wanted = gauge.measure().reserve_bytes
    assert gauge.hold()
    assert gauge.hold()
    assert held(disk) == wanted
    gauge.release()
    assert held(disk) == wanted - wanted // PARTS
    assert gauge.hold()
    assert held(disk) == wanted
    for _ in range(PARTS + 1):
        gauge.release()
    assert held(disk) == 0
    assert gauge.hold()
    assert held(disk) == wanted


def test_without_room_nothing_is_held(tmp_path: Path) -> None:
    disk = SimDisk(seed=1)
    disk.capacity = 4096
    gauge = SpareSpace(tmp_path, disk)
    assert not gauge.hold()
    assert held(disk) == 0
    disk.capacity = None
    assert gauge.hold()


@pytest.mark.parametrize(("number", "told"), [(errno.EDQUOT, False), (errno.EIO, True)])
def test_a_quota_is_no_room_and_another_error_is_told(
    disk: Disk, gauge: SpareSpace, monkeypatch: pytest.MonkeyPatch, number: int, told: bool
) -> None:
    def fail(handle: int, length: int) -> None:
        raise OSError(number, "injected")

    monkeypatch.setattr(disk, "allocate", fail)
    if told:
        with pytest.raises(OSError, match="injected"):
            gauge.hold()
    else:
        assert not gauge.hold()
