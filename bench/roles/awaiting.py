"""Fifty clients of one process: each publishes and awaits, then each consumes and awaits its acks."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec
import uvloop

import tailrace
from bench.roles.costs import cpu_s

TOPIC, GROUP = "awaited", "workers"
WARM_S = 3.0
WARM_COUNT = 50
"""So often each has done its thing before the clock starts."""
BATCH = 500


class AwaitJob(msgspec.Struct, frozen=True, kw_only=True):
    """The one argument of this role, as JSON."""

    url: str
    pid: int
    clients: int
    partitions: int
    seconds: float
    backlog: int


class Awaited(msgspec.Struct, frozen=True):
    """Requests a second, and microseconds of the broker's CPU for each."""

    publish_rate: float
    publish_cpu_us: float
    ack_rate: float
    ack_cpu_us: float
    most: int
    """Acks of the busiest consumer, and of the least busy one."""
    least: int


async def measured(
    job: AwaitJob, works: Sequence[Callable[[], Awaitable[Any]]]
) -> tuple[float, float, list[int]]:
    """Let each do its thing again and again: how often a second, the CPU for it, and how often each."""
    counts = [0] * len(works)
    over, warm = False, asyncio.Event()

    async def repeat(number: int, work: Callable[[], Awaitable[Any]]) -> None:
        while not over:
            await work()
            counts[number] += 1
            if counts[number] == WARM_COUNT and min(counts) == WARM_COUNT:
                warm.set()

    tasks = [asyncio.create_task(repeat(number, work)) for number, work in enumerate(works)]
    await asyncio.sleep(WARM_S)
    await warm.wait()
    before, first, started = cpu_s(job.pid), list(counts), time.perf_counter()
    await asyncio.sleep(job.seconds)
    spent, seconds = cpu_s(job.pid) - before, time.perf_counter() - started
    done = [now - then for now, then in zip(counts, first, strict=True)]
    over = True
    await asyncio.gather(*tasks)
    return sum(done) / seconds, spent / max(1, sum(done)) * 1e6, done


async def fill(client: Any, count: int) -> None:
    """A backlog that lasts."""
    values = [os.urandom(100) for _ in range(BATCH)]
    async with client.producer(TOPIC) as producer:
        receipts = [await producer.send_many(values) for _ in range(count // BATCH)]
        for receipt in receipts:
            await receipt


async def measure(job: AwaitJob) -> None:
    """Both rates, over the same connections, and the report."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        clients = [await enter(tailrace.connect(job.url)) for _ in range(job.clients)]
        await clients[0].admin().create_topic(TOPIC, partitions=job.partitions, durability="interval")
        producers = [await enter(client.producer(TOPIC)) for client in clients]
        value = os.urandom(100)
        publishes = [partial(producer.publish, value) for producer in producers]
        publish_rate, publish_cpu_us, _ = await measured(job, publishes)
        await fill(clients[0], job.backlog)
        consumers = [await enter(client.consumer(TOPIC, GROUP, assignment="shared")) for client in clients]

        async def take(messages: Any) -> None:
            message = await anext(messages)
            await message.ack()

        acks = [partial(take, aiter(consumer)) for consumer in consumers]
        ack_rate, ack_cpu_us, done = await measured(job, acks)
        report = Awaited(publish_rate, publish_cpu_us, ack_rate, ack_cpu_us, max(done), min(done))
        print(msgspec.json.encode(report).decode(), flush=True)
        os._exit(0)  # Fifty consumers need not leave one by one.


if __name__ == "__main__":
    uvloop.run(measure(msgspec.json.decode(sys.argv[1], type=AwaitJob)))
