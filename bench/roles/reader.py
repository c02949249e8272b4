"""Reader of a benchmark: counts what arrives until it has as many messages as it is told were sent."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import numpy as np
import pyarrow.compute as pc
import uvloop

import tailrace
from bench.load import Job, Load, Received
from bench.roles.producer import STAMP, latency

STALL_S = 60.0


class Tally:
    """What has arrived, and whether that is everything."""

    def __init__(self) -> None:
        self.received = 0
        self.value_bytes = 0
        self.first_count = 0
        self.first_at = self.last_at = 0.0
        self.expected: float = float("inf")
        self.complete = asyncio.Event()
        self.took_ns: list[int] = []

    def told(self) -> None:
        """The harness has written how many messages were sent."""
        self.expected = int(sys.stdin.readline() or 0)  # nothing at all: the harness is gone, so is the point
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        if self.received >= self.expected:
            self.finish()

    def finish(self) -> None:
        """All have arrived; now is later than the last receipt, never earlier."""
        self.last_at = time.perf_counter()
        self.complete.set()

    def report(self, load: Load) -> Received:
        """What is known by now."""
        seconds = self.last_at - self.first_at
        rate = (self.received - self.first_count) / seconds if seconds > 0 else 0.0
        took = latency(np.array(self.took_ns)) if load.mode == "paced" else None
        return Received(self.received, self.value_bytes, seconds, rate, took)


async def read_messages(reader: Any, tally: Tally) -> None:
    """`async for message in reader`."""
    messages = aiter(reader)
    message = await anext(messages)
    tally.first_at = time.perf_counter()
    tally.first_count = tally.received = 1
    tally.value_bytes = len(message.value)
    if tally.received >= tally.expected:
        tally.finish()
    async for message in messages:
        tally.value_bytes += len(message.value)
        tally.received += 1
        if tally.received >= tally.expected:
            tally.finish()


async def read_stamps(reader: Any, tally: Tally, warmup: int) -> None:
    """Messages of a paced producer: how long after it was due each arrived, the warm-up left out."""
    async for message in reader:
        now_ns = time.perf_counter_ns()
        number, due_ns = STAMP.unpack_from(message.value)
        if number >= warmup:
            tally.took_ns.append(now_ns - due_ns)
        tally.value_bytes += len(message.value)
        tally.received += 1
        if tally.received == 1:
            tally.first_at, tally.first_count = time.perf_counter(), 1
        if tally.received >= tally.expected:
            tally.finish()


async def read_batches(reader: Any, tally: Tally) -> None:
    """`async for batch in reader.batches()`."""
    async for batch in reader.batches():
        tally.value_bytes += pc.sum(pc.binary_length(batch.column("value"))).as_py()
        tally.received += batch.num_rows
        if not tally.first_at:
            tally.first_at, tally.first_count = time.perf_counter(), batch.num_rows
        if tally.received >= tally.expected:
            tally.finish()


def consume(reader: Any, load: Load, tally: Tally) -> Coroutine[Any, Any, None]:
    """The way of reading that the load asks for."""
    if load.mode == "paced":
        return read_stamps(reader, tally, int(load.rate * load.warmup_s))
    return read_messages(reader, tally) if load.reading == "messages" else read_batches(reader, tally)


async def until_complete(reading: asyncio.Task[None], tally: Tally) -> None:
    """Wait for the last message; give up when nothing has arrived for a while although more was sent."""
    complete = asyncio.create_task(tally.complete.wait())
    while True:
        before = tally.received
        await asyncio.wait({reading, complete}, timeout=STALL_S, return_when=asyncio.FIRST_COMPLETED)
        if complete.done():
            return
        if reading.done():
            reading.result()
            raise SystemExit("the reader ended by itself")
        if tally.expected < float("inf") and tally.received == before:
            complete.cancel()
            tally.last_at = time.perf_counter()
            return


async def read(job: Job) -> None:
    """Read the topic from its beginning, and print the report when it is complete or overdue."""
    tally = Tally()
    async with tailrace.connect(job.url) as client, client.reader(job.topic, start="earliest") as reader:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), tally.told)
        print("{}", flush=True)
        reading = asyncio.create_task(consume(reader, job.load, tally))
        await until_complete(reading, tally)
        print(msgspec.json.encode(tally.report(job.load)).decode(), flush=True)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


if __name__ == "__main__":
    uvloop.run(read(msgspec.json.decode(sys.argv[1], type=Job)))
