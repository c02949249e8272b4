"""Works for groups in turn and reports what the broker spent on each message: its CPU, to the nanosecond."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvloop

import tailrace

BATCH = 500
STUCK_DELAY_S = 3600.0
PAUSE_SETTLE_S = 0.05
AHEAD = {"batch_size": 2000, "prefetch": 8000}
"""Leases of this size: with smaller ones most of the time goes into waking up for each, whatever waits."""


class CostJob(msgspec.Struct, frozen=True, kw_only=True):
    """The one argument of this role, as JSON."""

    url: str
    pid: int
    small: int
    large: int
    consumed: int
    stuck_every: int
    groups: int


class Costs(msgspec.Struct, frozen=True):
    """Seconds of the broker's processor time for one message."""

    small: float
    large: float
    stuck: float
    groups: float
    stuck_messages: int


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process in seconds."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


async def fill(client: Any, topic: str, count: int) -> None:
    """Publish plain batches and wait until they are stored."""
    values = [os.urandom(100) for _ in range(BATCH)]
    async with client.producer(topic) as producer:
        receipts = []
        for _ in range(count // BATCH):
            receipts.append(await producer.send_many(values))
            if len(receipts) >= 64:
                await receipts.pop(0)
        for receipt in receipts:
            await receipt


async def take(consumer: Any, count: int, stuck_every: int = 0) -> None:
    """Consume so many messages; of those that are to be stuck, each is put off for an hour."""
    taken = 0
    async for message in consumer:
        taken += 1
        if stuck_every and taken % stuck_every == 0:
            await message.nack(delay=STUCK_DELAY_S)
        else:
            message.ack_nowait()
        if taken >= count:
            return


async def small_cost(client: Any, job: CostJob) -> float:
    """10⁴ messages wait at a time: the group is paused while the next are published."""
    topic, group = "small", "small"
    await client.admin().create_topic(topic, partitions=1, durability="interval")
    groups = client.groups()
    spent, rounds = 0.0, max(1, job.consumed // job.small)
    async with client.consumer(topic, group, **AHEAD) as consumer:
        for _ in range(rounds):
            await groups.pause(group)
            await fill(client, topic, job.small)
            await asyncio.sleep(PAUSE_SETTLE_S)
            before = cpu_s(job.pid)
            await groups.resume(group)
            await take(consumer, job.small)
            spent += cpu_s(job.pid) - before
    return spent / (rounds * job.small)


async def large_cost(client: Any, job: CostJob, group: str, stuck_every: int = 0) -> float:
    """The same from a long backlog; stuck messages are made before the clock starts."""
    async with client.consumer("large", group, **AHEAD) as consumer:
        if stuck_every:
            await take(consumer, 2 * job.consumed, stuck_every)
        else:
            await take(consumer, job.small)  # The first leases warm up what is cold.
        before = cpu_s(job.pid)
        await take(consumer, job.consumed)
        return (cpu_s(job.pid) - before) / job.consumed


async def measure(job: CostJob) -> None:
    """All costs, one after the other, and the report."""
    async with tailrace.connect(job.url) as client:
        small = await small_cost(client, job)
        await client.admin().create_topic("large", partitions=1, durability="interval")
        await fill(client, "large", job.large)
        large = await large_cost(client, job, "alone")
        stuck = await large_cost(client, job, "stuck", job.stuck_every)
        for number in range(job.groups - 3):
            await client.groups().create(f"beside-{number}", ["large"])
        groups = await large_cost(client, job, "among")
        report = Costs(small, large, stuck, groups, 2 * job.consumed // job.stuck_every)
        print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(measure(msgspec.json.decode(sys.argv[1], type=CostJob)))
