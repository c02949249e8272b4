"""A steady life of a queue for a long time: keyed messages, some delayed, some given back, all settled."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import deque
from typing import Any

import msgspec
import uvloop

import tailrace
from tailrace.errors import LeaseLost

TOPIC, GROUP = "churn", "bench"
TICK_S = 0.01
DRAIN_S = 120.0
SETTLED_S = 0.5
UNACKNOWLEDGED_MAX = 64
"""Batches. A broker that falls behind slows the load down instead of growing this process."""
BEHIND_MAX = 50_000
"""Messages, delayed ones included. Where the consumer falls behind, because the machine has other things to
do, the load waits for it: a backlog is another experiment."""


class ChurnJob(msgspec.Struct, frozen=True, kw_only=True):
    """`rate` messages a second for `seconds`; a share of them delayed, and a share given back once."""

    url: str
    rate: int
    seconds: float
    partitions: int = 4
    value_bytes: int = 100
    keys: int = 10_000
    delayed_share: float = 0.05
    delay_s_max: float = 60.0
    nacked_share: float = 0.02
    nack_s_max: float = 5.0


class Churned(msgspec.Struct, frozen=True):
    """Counts at the end, when everything that was sent is settled. `lost` acknowledgements came too late: an
    earlier message of the key had been given back, or this process stood still. Those messages came again."""

    sent: int
    delayed: int
    nacked: int
    lost: int
    seconds: float


class Counts:
    """What has happened so far."""

    def __init__(self) -> None:
        self.sent = self.delayed = self.nacked = self.acked = self.lost = 0


async def produce(producer: Any, job: ChurnJob, counts: Counts, consuming: asyncio.Task[None]) -> float:
    """Send what is due, tick by tick; returns the seconds that it took. A consumer that fails ends it."""
    draw = random.Random(20260101)
    keys = [f"key-{number:06d}".encode() for number in range(job.keys)]
    values = [os.urandom(job.value_bytes) for _ in range(500)]
    receipts: deque[Any] = deque()
    began = time.perf_counter()
    while (passed := time.perf_counter() - began) < job.seconds:
        room = max(0, BEHIND_MAX - (counts.sent - counts.acked))
        due = min(int(passed * job.rate) - counts.sent, len(values), room)
        late = sum(draw.random() < job.delayed_share for _ in range(due))
        for count, delay_s in ((due - late, None), (late, draw.uniform(0.5, job.delay_s_max))):
            if count:
                chosen = draw.choices(keys, k=count)
                receipts.append(await producer.send_many(values[:count], keys=chosen, delay=delay_s))
        counts.sent += due
        counts.delayed += late
        while len(receipts) > UNACKNOWLEDGED_MAX:
            await receipts.popleft()
        await asyncio.sleep(TICK_S)
        if consuming.done():
            consuming.result()
    for receipt in receipts:
        await receipt
    return time.perf_counter() - began


async def consume(consumer: Any, job: ChurnJob, counts: Counts) -> None:
    """Acknowledge; give a share of the first deliveries back for a while."""
    draw = random.Random(20260102)
    while True:
        try:
            async for message in consumer:
                if message.deliveries == 1 and draw.random() < job.nacked_share:
                    await message.nack(delay=draw.uniform(0.0, job.nack_s_max), failure=False)
                    counts.nacked += 1
                    continue
                message.ack_nowait()
                counts.acked += 1
        except LeaseLost:  # Raised once for all that were lost since the last time, or by the nack itself.
            counts.lost += 1


async def until_settled(client: tailrace.Client) -> None:
    """Wait until the group has nothing left to do, delayed messages and those given back included."""
    while True:
        lag = (await client.groups().describe(GROUP)).lag
        if not lag and not await client.scheduled(TOPIC, limit=1):
            return
        await asyncio.sleep(SETTLED_S)


async def run(client: tailrace.Client, other: tailrace.Client, job: ChurnJob, counts: Counts) -> float:
    """Produce and consume for the time of the job, then wait until everything is settled."""
    async with client.producer(TOPIC) as producer, other.consumer(TOPIC, GROUP) as consumer:
        consuming = asyncio.create_task(consume(consumer, job, counts))
        print("{}", flush=True)
        seconds = await produce(producer, job, counts, consuming)
        await asyncio.wait_for(until_settled(client), job.delay_s_max + DRAIN_S)
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
        counts.lost += len(consumer.failures)
        consumer.failures.clear()
    return seconds


async def work(job: ChurnJob) -> None:
    """Run the load, and report."""
    counts = Counts()
    async with tailrace.connect(job.url) as client, tailrace.connect(job.url) as other:
        await client.admin().create_topic(
            TOPIC, partitions=job.partitions, durability="interval", if_missing=True
        )
        seconds = await run(client, other, job, counts)
    report = Churned(counts.sent, counts.delayed, counts.nacked, counts.lost, seconds)
    print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(work(msgspec.json.decode(sys.argv[1], type=ChurnJob)))
