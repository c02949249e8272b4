"""The conditions of a measurement: cores, processor, disk, versions, load; and the refusal of unfit ones."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import msgspec

from bench.load import GB, MB

CORES = 2
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
SPACE_PER_CASE = 16 * GB
SPACE_NEEDED = 24 * GB
PROBE_WRITE_BYTES = 64 * 1024
PROBE_SECONDS_MAX = 3.0
FILL_BYTES = 512 * 1024 * 1024
PAGE_REPORTING = Path("/sys/module/page_reporting")
COOLING_S = 8.0


class Unfit(Exception):
    """This machine or folder cannot give a meaningful figure."""


class SyncProbe(msgspec.Struct, frozen=True):
    """How long fdatasync takes here after 64 KiB were written to a preallocated file."""

    median_ms: float
    p99_ms: float
    samples: int


def filesystem_of(path: Path, mountinfo: str) -> str:
    """Type of the file system that holds a path, by the longest mount point above it."""
    best, kind = "", "unknown"
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mount = before.split()[4].encode().decode("unicode_escape")
        holds = path == Path(mount) or Path(mount) in path.parents
        # A later line of the same mount point lies on top of the earlier one.
        if holds and len(mount) >= len(best):
            best, kind = mount, after.split()[0]
    return kind


def filesystem(path: Path) -> str:
    """Type of the file system that holds an existing path."""
    return filesystem_of(path.resolve(), Path("/proc/self/mountinfo").read_text())


def refuse_memory(kind: str) -> None:
    """A durability benchmark in memory is meaningless."""
    if kind in MEMORY_FILESYSTEMS:
        raise Unfit(f"the scratch folder is on {kind}: a benchmark of durability needs a real disk")


def space_budget(folder: Path) -> int:
    """Bytes that one case may write: bounded, and never more than half of what is free."""
    free = shutil.disk_usage(folder).free
    if free < SPACE_NEEDED:
        raise Unfit(f"{free / GB:.1f} GB are free for scratch data, {SPACE_NEEDED / GB:.0f} GB are needed")
    return min(SPACE_PER_CASE, free // 2)


def probe_sync(folder: Path, samples: int = 200) -> SyncProbe:
    """Measure fdatasync the way a log uses it: appends to a preallocated file, one sync each."""
    path = folder / "sync-probe"
    chunk = os.urandom(PROBE_WRITE_BYTES)
    took_ms: list[float] = []
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, samples * PROBE_WRITE_BYTES)
        os.fsync(descriptor)
        started = time.perf_counter()
        for index in range(samples):
            os.pwrite(descriptor, chunk, index * PROBE_WRITE_BYTES)
            before = time.perf_counter()
            os.fdatasync(descriptor)
            now = time.perf_counter()
            took_ms.append((now - before) * 1000)
            if now - started > PROBE_SECONDS_MAX:
                break
    finally:
        os.close(descriptor)
        path.unlink()
    took_ms.sort()
    p99 = took_ms[min(len(took_ms) - 1, int(len(took_ms) * 0.99))]
    return SyncProbe(round(statistics.median(took_ms), 3), round(p99, 3), len(took_ms))


def probe_fill(folder: Path) -> float:
    """MB a second at which a new file takes bytes that the page cache has no memory for yet."""
    path = folder / "fill-probe"
    chunk = os.urandom(1024 * 1024)
    started = time.perf_counter()
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(FILL_BYTES // len(chunk)):
                file.write(chunk)
        return FILL_BYTES / MB / (time.perf_counter() - started)
    finally:
        path.unlink()


def settle() -> None:
    """Bring every measurement to the same start: nothing dirty, and no warm memory left by the one before.

    On a virtual machine that gives free memory back to its host, pages that were freed a moment ago take
    bytes several times faster than those which the host has to find again. So wait until they are given back.
    """
    os.sync()
    if PAGE_REPORTING.exists():
        time.sleep(COOLING_S)


def pin() -> list[int]:
    """Keep this process and all its children on two cores, however many there are."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    if len(cores) < CORES:
        raise Unfit(f"{CORES} cores are needed, {len(cores)} can be used")
    os.sched_setaffinity(0, cores)
    return cores


def processor() -> str:
    """Model of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def conditions(folder: Path) -> dict[str, object]:
    """What every figure of a run has in common."""
    load_average = round(os.getloadavg()[0], 2)
    settle()
    fill = probe_fill(folder)
    settle()
    sync = probe_sync(folder)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cores_of_machine": os.cpu_count(),
        "cpu": processor(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB, 1),
        "kernel": platform.release(),
        "filesystem": filesystem(folder),
        "fdatasync_median_ms": sync.median_ms,
        "fdatasync_p99_ms": sync.p99_ms,
        "new_file_mb_s": round(fill),
        "free_memory": "given back to the host" if PAGE_REPORTING.exists() else "kept",
        "load_average_at_start": load_average,
        "python": platform.python_version(),
        "pyarrow": version("pyarrow"),
        "uvloop": version("uvloop"),
    }
