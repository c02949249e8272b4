"""Conditions of a benchmark are measured, and memory is not taken for a disk."""

from pathlib import Path

import pytest

from bench.machine import Unfit, filesystem, filesystem_of, probe_sync, refuse_memory

MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/root rw
22 21 0:5 / /dev rw - devtmpfs udev rw
23 21 0:30 / /srv rw - xfs /dev/vdb rw
24 23 0:31 / /srv/my\\040scratch rw - tmpfs tmpfs rw
25 23 0:32 / /srv/over rw - tmpfs tmpfs rw
26 23 0:33 / /srv/over rw - btrfs /dev/vdc rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/dev/shm", "devtmpfs"),
        ("/srv/data", "xfs"),
        ("/srvother/data", "ext4"),
        ("/srv/my scratch/a/b", "tmpfs"),
        ("/srv/over/a", "btrfs"),
    ],
)
def test_file_system_of_a_path(path: str, kind: str) -> None:
    assert filesystem_of(Path(path), MOUNTS) == kind


def test_memory_is_refused() -> None:
    with pytest.raises(Unfit, match="tmpfs"):
        refuse_memory("tmpfs")
    refuse_memory("ext4")


def test_the_kernel_tells_the_file_system() -> None:
    assert filesystem(Path("/proc")) == "proc"


def test_sync_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    probe = probe_sync(tmp_path, samples=5)
    assert probe.samples == 5
    assert 0 < probe.median_ms <= probe.p99_ms
    assert list(tmp_path.iterdir()) == []
