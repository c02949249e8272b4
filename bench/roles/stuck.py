"""Leaves a partition with many delayed and many stuck messages, then lets the broker take snapshots of it."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import uvloop

import tailrace
from bench.roles.timers import TimerJob, schedule

GROUP = "stuck"
DELAY_S = 3600.0
AT_ONCE = 500
SNAPSHOT_S = 0.25
"""Time to write one, so that the next is one of its own."""


class StuckJob(msgspec.Struct, frozen=True, kw_only=True):
    """So many of each, and so many snapshots."""

    url: str
    scheduled: int
    stuck: int
    snapshots: int


class Stuck(msgspec.Struct, frozen=True):
    """What the broker holds now."""

    waiting: int


async def put_off(client: tailrace.Client, count: int) -> None:
    """Publish messages, and give every one of them back for an hour."""
    async with client.producer("timers") as producer:
        for _ in range(count // AT_ONCE):
            await producer.send_many([b"x" * 100] * AT_ONCE)
    async with client.consumer("timers", GROUP, ordering="none") as consumer:
        left: int = count // AT_ONCE * AT_ONCE
        async for batch in consumer.batches(AT_ONCE):
            # One by one, as a handler would: every stuck message has a record of its own.
            await asyncio.gather(*(message.nack(delay=DELAY_S) for message in batch))
            left -= len(batch)
            if left <= 0:
                return


async def work(job: StuckJob) -> None:
    """Fill, then ask for snapshots: a trim takes one before it frees anything."""
    async with tailrace.connect(job.url, timeout=120) as client:
        await client.admin().create_topic("timers", partitions=1, durability="interval")
        await schedule(client, TimerJob(url=job.url, count=job.scheduled, after_s=7200, spread_s=3600))
        await put_off(client, job.stuck)
        for _ in range(job.snapshots):
            # Nothing lies below 0: only the snapshot is taken.
            await client.admin().trim_topic("timers", 0, 0)
            await asyncio.sleep(SNAPSHOT_S)
        group = await client.groups().describe(GROUP)
        print(
            msgspec.json.encode(Stuck(sum(row["waiting"] for row in group.partitions))).decode(), flush=True
        )


if __name__ == "__main__":
    uvloop.run(work(msgspec.json.decode(sys.argv[1], type=StuckJob)))
