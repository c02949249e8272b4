"""Workers whose handlers fail now and then on messages with keys, until all of them are done."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import uvloop

import tailrace

TOPIC, GROUP = "failing", "failing"


class FailingJob(msgspec.Struct, frozen=True, kw_only=True):
    """The one argument of this role, as JSON."""

    url: str
    messages: int
    keys: int
    failures: float
    workers: int
    backoff_ms: int


class Worked(msgspec.Struct, frozen=True):
    """How often handlers were called, how often they failed, and what the group counts as deliveries."""

    calls: int
    failed: int
    deliveries: int


class Jobs:
    """What is to be done, and what of it fails at the first attempt."""

    def __init__(self, job: FailingJob) -> None:
        draw = random.Random(20260101)
        self.doomed = {b"%d" % number for number in range(job.messages) if draw.random() < job.failures}
        self.over = asyncio.Event()
        self.left = {b"%d" % number for number in range(job.messages)}
        self.calls = self.failed = 0

    async def handle(self, delivery: Any) -> None:
        """The handler: as fast as can be."""
        self.calls += 1
        if delivery.value in self.doomed:
            self.doomed.discard(delivery.value)
            self.failed += 1
            raise ValueError("the first attempt fails")
        self.left.discard(delivery.value)
        if not self.left:
            self.over.set()


async def measure(job: FailingJob) -> None:
    """Publish, work, report."""
    logging.getLogger("tailrace").setLevel(logging.CRITICAL)  # Every failure would be told with its trace.
    jobs = Jobs(job)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(tailrace.connect(job.url))
        await client.admin().create_topic(TOPIC, partitions=3)
        async with client.producer(TOPIC) as producer:
            for number in range(job.messages):
                await producer.send(b"%d" % number, key=b"key %d" % (number % job.keys))
        running = []
        for _ in range(job.workers):
            own = await stack.enter_async_context(tailrace.connect(job.url))
            consumer = await stack.enter_async_context(own.consumer(TOPIC, GROUP, backoff_ms=job.backoff_ms))
            running.append((consumer, asyncio.create_task(consumer.run(jobs.handle))))
        await jobs.over.wait()
        for consumer, task in running:
            consumer.stop()
            await task
            await consumer.commit()
        group = await client.groups().describe(GROUP)
        deliveries = sum(row["deliveries"] for row in group.partitions)
    print(msgspec.json.encode(Worked(jobs.calls, jobs.failed, deliveries)).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(measure(msgspec.json.decode(sys.argv[1], type=FailingJob)))
