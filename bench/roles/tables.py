"""Fills the tables of dedup ids and of keys, batch by batch, and says how long the worst put took."""

from __future__ import annotations

import os
import sys
import time

import msgspec

os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")  # As `tailrace serve` has it, before numpy is imported.

import numpy as np

from tailrace.core.publish.dedup import DedupWindow
from tailrace.core.publish.key_index import KeyIndex

BATCH = 500


class TableJob(msgspec.Struct, frozen=True):
    """Entries of each table."""

    entries: int


class Stall(msgspec.Struct, frozen=True):
    """The worst put of each table, in milliseconds of CPU time and of wall time."""

    dedup_ms: float
    dedup_wall_ms: float
    keys_ms: float
    keys_wall_ms: float


def work(job: TableJob) -> Stall:
    """One table after the other."""
    random = np.random.default_rng(7)
    dedup = DedupWindow(3_600_000, job.entries)
    keys = KeyIndex(job.entries)
    worst = [0.0] * 4
    for number in range(job.entries // BATCH):
        hashes = random.integers(1, 1 << 63, (BATCH, 2), np.int64).view(np.uint64)
        cpu, wall = time.thread_time(), time.perf_counter()
        dedup.add(hashes, number * BATCH, number)
        between, wall_between = time.thread_time(), time.perf_counter()
        keys.add(hashes)
        end, wall_end = time.thread_time(), time.perf_counter()
        taken = between - cpu, wall_between - wall, end - between, wall_end - wall_between
        worst = [max(pair) for pair in zip(worst, taken, strict=True)]
    return Stall(*(value * 1000 for value in worst))


if __name__ == "__main__":
    print(msgspec.json.encode(work(msgspec.json.decode(sys.argv[1], type=TableJob))).decode(), flush=True)
