"""Schedules delayed messages, and reports how late they come, or only that they are stored."""

from __future__ import annotations

import asyncio
import random
import struct
import sys
import time

import msgspec
import numpy as np
import uvloop

import tailrace
from bench.load import Latency
from bench.roles.producer import latency

DUE = struct.Struct("<q")
BATCH = 500


class TimerJob(msgspec.Struct, frozen=True, kw_only=True):
    """`count` messages that are due between `after_s` and `after_s + spread_s` from now, in random order."""

    url: str
    count: int
    after_s: float
    spread_s: float
    value_bytes: int = 100
    watch: bool = True


class Scheduled(msgspec.Struct, frozen=True):
    """All are stored; `lateness` once they have come."""

    scheduled: int
    seconds: float
    lateness: Latency | None = None


async def schedule(client: tailrace.Client, job: TimerJob) -> float:
    """Publish the delayed messages; the value begins with the time when it is due, in microseconds."""
    draw = random.Random(20260101)
    padding = b"x" * (job.value_bytes - DUE.size)
    began = time.perf_counter()
    start_us = time.time_ns() // 1000 + int(job.after_s * 1e6)
    async with client.producer("timers", linger_ms=100) as producer:
        for _ in range(job.count // BATCH * BATCH):
            due_us = start_us + int(draw.random() * job.spread_s * 1e6)
            await producer.send(DUE.pack(due_us) + padding, deliver_at=due_us)
    return time.perf_counter() - began


async def watch(client: tailrace.Client, job: TimerJob) -> Latency:
    """How long after its time each message arrived at a reader."""
    late_ns: list[int] = []
    async with client.reader("timers", start="earliest") as reader:
        async for message in reader:
            assert message.value is not None
            late_ns.append(time.time_ns() - DUE.unpack_from(message.value)[0] * 1000)
            if len(late_ns) >= job.count // BATCH * BATCH:
                break
    assert min(late_ns) >= 0, "a message came before its time"
    return latency(np.array(late_ns))


async def work(job: TimerJob) -> None:
    """Schedule, and watch."""
    async with tailrace.connect(job.url) as client:
        await client.admin().create_topic("timers", partitions=1, durability="interval")
        seconds = await schedule(client, job)
        lateness = await asyncio.wait_for(watch(client, job), 300) if job.watch else None
        report = Scheduled(job.count // BATCH * BATCH, seconds, lateness)
        print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(work(msgspec.json.decode(sys.argv[1], type=TimerJob)))
