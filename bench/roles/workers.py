"""Ten workers with a connection each share a hundred jobs, and say how long it took them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import uvloop

import tailrace

GROUP = "workers"


class WorkJob(msgspec.Struct, frozen=True, kw_only=True):
    """The one argument of this role, as JSON: `options` are those of the group."""

    url: str
    options: dict[str, str]
    workers: int
    messages: int
    partitions: int
    handler_s: float


class Shared(msgspec.Struct, frozen=True):
    """Seconds when the jobs wait for the workers, and when the workers wait for the jobs; and how many jobs
    the busiest worker did."""

    backlog_s: float
    arriving_s: float
    most: int


class Round:
    """One round of work on a topic of its own."""

    def __init__(self, job: WorkJob, topic: str) -> None:
        self._job = job
        self._topic = topic
        self._first_s = self._last_s = 0.0
        self._over = asyncio.Event()
        self.done: Counter[int] = Counter()

    async def publish(self, client: Any) -> None:
        """Message i to partition i % partitions."""
        async with client.producer(self._topic) as producer:
            for number in range(self._job.messages):
                await producer.send(b"job %d" % number, partition=number % self._job.partitions)

    async def work(self, number: int) -> None:
        """One worker, until all is done."""

        async def handle(delivery: Any) -> None:
            self._first_s = self._first_s or time.perf_counter()
            await asyncio.sleep(self._job.handler_s)
            await delivery.ack()
            self._last_s = time.perf_counter()
            self.done[number] += 1
            if self.done.total() >= self._job.messages:
                self._over.set()

        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(tailrace.connect(self._job.url))
            consumer = await stack.enter_async_context(
                client.consumer(self._topic, GROUP + self._topic, **self._job.options)
            )
            running = asyncio.create_task(consumer.run(handle))
            await self._over.wait()
            consumer.stop()
            await running

    async def measure(self, client: Any, *, backlog: bool) -> float:
        """Seconds from the first hand-out to the last ack."""
        await client.admin().create_topic(self._topic, partitions=self._job.partitions)
        if backlog:
            await self.publish(client)
        workers = [asyncio.create_task(self.work(number)) for number in range(self._job.workers)]
        if not backlog:
            await self._all_joined(client)
            await self.publish(client)
        await asyncio.gather(*workers)
        return self._last_s - self._first_s

    async def _all_joined(self, client: Any) -> None:
        while True:
            known = {group.name: group for group in await client.groups().list()}
            group = known.get(GROUP + self._topic)
            if group is not None and group.member_count >= self._job.workers:
                return
            await asyncio.sleep(0.01)


async def measure(job: WorkJob) -> None:
    """Both rounds, and the report."""
    async with tailrace.connect(job.url) as client:
        backlog, arriving = Round(job, "backlog"), Round(job, "arriving")
        seconds = [await backlog.measure(client, backlog=True), await arriving.measure(client, backlog=False)]
        most = max(*backlog.done.values(), *arriving.done.values())
    print(msgspec.json.encode(Shared(*seconds, most)).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(measure(msgspec.json.decode(sys.argv[1], type=WorkJob)))
