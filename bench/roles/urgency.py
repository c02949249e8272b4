"""One worker, a long queue, and urgent messages now and then: how long do those wait for its handler?"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any

import msgspec
import uvloop

import tailrace

URGENT = b"urgent"


class UrgencyJob(msgspec.Struct, frozen=True, kw_only=True):
    """The one argument of this role, as JSON."""

    url: str
    ordinary: int
    urgent: int
    every_s: float
    handler_s: float


class Waited(msgspec.Struct, frozen=True):
    """Milliseconds between the ack of an urgent message and the start of its handler, by priority mode."""

    strict_max_ms: float
    strict_median_ms: float
    weighted_max_ms: float
    weighted_median_ms: float


async def measure_mode(client: Any, job: UrgencyJob, mode: str) -> list[float]:
    """All waits in one mode, in seconds. A handler that starts before the ack has arrived did not wait."""
    await client.admin().create_topic(mode, partitions=1)
    started: dict[bytes, float] = {}

    async def handle(delivery: Any) -> None:
        started.setdefault(delivery.value, time.perf_counter())
        await asyncio.sleep(job.handler_s)

    async with client.producer(mode) as producer:
        receipts = [await producer.send(b"ordinary %d" % number) for number in range(job.ordinary)]
        for receipt in receipts:
            await receipt
        acked: dict[bytes, float] = {}
        async with client.consumer(mode, f"{mode}-workers", priority_mode=mode) as consumer:
            running = asyncio.create_task(consumer.run(handle))
            for number in range(job.urgent):
                await asyncio.sleep(job.every_s)
                value = URGENT + b" %d" % number
                await producer.publish(value, priority=0)
                acked[value] = time.perf_counter()
            while len(started.keys() & acked.keys()) < job.urgent:  # noqa: ASYNC110 - the handler is timed
                await asyncio.sleep(job.handler_s)
            consumer.stop()
            await running
    return [max(0.0, started[value] - at) for value, at in acked.items()]


async def measure(job: UrgencyJob) -> None:
    """Both modes, and the report."""
    async with tailrace.connect(job.url) as client:
        strict = await measure_mode(client, job, "strict")
        weighted = await measure_mode(client, job, "weighted")
    figures = (max(strict), statistics.median(strict), max(weighted), statistics.median(weighted))
    print(msgspec.json.encode(Waited(*(1000 * seconds for seconds in figures))).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(measure(msgspec.json.decode(sys.argv[1], type=UrgencyJob)))
