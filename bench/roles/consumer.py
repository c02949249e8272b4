"""Consumer of a benchmark: leases, acknowledges every message, and reports when it has all that were sent."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import msgspec
import uvloop

import tailrace
from bench.load import Job
from bench.roles.producer import STAMP
from bench.roles.reader import Tally, until_complete


async def consume_plain(consumer: Any, tally: Tally) -> None:
    """`async for message in consumer: message.ack_nowait()`."""
    async for message in consumer:
        tally.value_bytes += len(message.value)
        tally.received += 1
        message.ack_nowait()
        if tally.received == 1:
            tally.first_at, tally.first_count = time.perf_counter(), 1
        if tally.received >= tally.expected:
            tally.finish()


async def consume_stamps(consumer: Any, tally: Tally, warmup: int) -> None:
    """Messages of a paced producer: how long after it was due each arrived; all are acknowledged."""
    async for message in consumer:
        now_ns = time.perf_counter_ns()
        number, due_ns = STAMP.unpack_from(message.value)
        message.ack_nowait()
        if number >= warmup:
            tally.took_ns.append(now_ns - due_ns)
        tally.value_bytes += len(message.value)
        tally.received += 1
        if tally.received == 1:
            tally.first_at, tally.first_count = time.perf_counter(), 1
        if tally.received >= tally.expected:
            tally.finish()


async def consume(job: Job) -> None:
    """Work for a group from the beginning of the topic, and print the report when all is acknowledged."""
    load, tally = job.load, Tally()
    options = dict(load.group_options)
    async with tailrace.connect(job.url) as client:
        consumer = client.consumer(job.topic, load.group, **options)
        async with consumer:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), tally.told)
            print("{}", flush=True)
            if load.mode == "paced":
                work = consume_stamps(consumer, tally, int(load.rate * load.warmup_s))
            else:
                work = consume_plain(consumer, tally)
            consuming = asyncio.create_task(work)
            await until_complete(consuming, tally)
            consuming.cancel()
            await asyncio.gather(consuming, return_exceptions=True)
        # Everything is acknowledged only now: the time counts.
        tally.last_at = max(tally.last_at, time.perf_counter())
        print(msgspec.json.encode(tally.report(load)).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(consume(msgspec.json.decode(sys.argv[1], type=Job)))
