"""Fills a topic with rows for Spark: random keys and values, none of them twice, and reports how many."""

from __future__ import annotations

import os
import sys
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import uvloop

import tailrace

TABLE_ROWS = 4_000
WINDOW = 16


class Filling(msgspec.Struct, frozen=True, kw_only=True):
    """The one argument of this role, as JSON."""

    url: str
    topic: str
    rows: int
    value_bytes: int
    keys: int


class Filled(msgspec.Struct, frozen=True):
    """What it reports when everything is stored."""

    rows: int


def table(rows: int, value_bytes: int, keys: int, draw: np.random.Generator) -> pa.RecordBatch:
    """Rows with a key of many and a value that no compression can shrink."""
    ends = np.arange(rows + 1, dtype=np.int32) * np.int32(value_bytes)
    random = pa.py_buffer(os.urandom(rows * value_bytes))
    values = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), random])
    named = pa.array([b"key-%06d" % number for number in draw.integers(keys, size=rows)], pa.binary())
    return pa.record_batch({"key": named, "value": values})


async def fill(job: Filling) -> None:
    """Do the job and print the report."""
    draw = np.random.default_rng(20260101)
    waiting: deque[Any] = deque()
    async with tailrace.connect(job.url) as client, client.producer(job.topic) as producer:
        for first in range(0, job.rows, TABLE_ROWS):
            rows = table(min(TABLE_ROWS, job.rows - first), job.value_bytes, job.keys, draw)
            waiting.append(await producer.send_table(rows))
            if len(waiting) >= WINDOW:
                await waiting.popleft()
        for receipts in waiting:
            await receipts
    print(msgspec.json.encode(Filled(job.rows)).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(fill(msgspec.json.decode(sys.argv[1], type=Filling)))
