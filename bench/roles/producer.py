"""Producer of a benchmark: sends what its job says and reports when all of it is acknowledged."""

from __future__ import annotations

import asyncio
import os
import random
import struct
import sys
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np
import uvloop

import tailrace
from bench.load import Job, Latency, Load, Produced

STAMP = struct.Struct("<Qq")
"""Head of a paced message: its number, and the nanosecond of the monotonic clock at which it was due."""
START_DELAY_NS = 200_000_000
TICK_S = 0.001


def values_of(load: Load) -> list[bytes]:
    """One batch of values that no compression can shrink."""
    return [os.urandom(load.value_bytes) for _ in range(load.batch)]


class Allowance:
    """How much longer a load goes on."""

    def __init__(self, load: Load) -> None:
        bound = load.bytes_max // load.value_bytes
        self.count = bound if load.count is None else min(load.count, bound)
        # A load with a count is over when the count is reached, however long that takes.
        self._end = time.perf_counter() + load.seconds if load.count is None else float("inf")

    def rest(self, sent: int, wanted: int) -> int:
        """How many of the wanted messages may still be sent."""
        return max(0, min(wanted, self.count - sent)) if time.perf_counter() < self._end else 0


async def send(producer: Any, load: Load) -> Produced:
    """`await producer.send(value)` in a loop: whatever batching there is, the SDK does."""
    values = values_of(load)
    sent, started, allowance = 0, time.perf_counter(), Allowance(load)
    while rest := allowance.rest(sent, len(values)):
        for value in values[:rest]:
            await producer.send(value)
        sent += rest
    await producer.flush()
    return Produced(sent, time.perf_counter() - started)


async def send_many(producer: Any, load: Load) -> Produced:
    """Whole batches, with at most `window` of them unacknowledged."""
    values = values_of(load)
    unacknowledged: deque[Any] = deque()
    sent, started, allowance = 0, time.perf_counter(), Allowance(load)
    while rest := allowance.rest(sent, len(values)):
        unacknowledged.append(await producer.send_many(values if rest == len(values) else values[:rest]))
        sent += rest
        if len(unacknowledged) >= load.window:
            await unacknowledged.popleft()
    for receipt in unacknowledged:
        await receipt
    await producer.flush()
    return Produced(sent, time.perf_counter() - started)


async def send_varied(producer: Any, load: Load) -> Produced:
    """Whole batches of messages with keys or priorities, drawn anew for each batch."""
    values = values_of(load)
    draw = random.Random(20260101)
    keys = [f"key-{number:06d}".encode() for number in range(load.keys)]
    unacknowledged: deque[Any] = deque()
    sent, started, allowance = 0, time.perf_counter(), Allowance(load)
    while rest := allowance.rest(sent, len(values)):
        columns: dict[str, Any] = {}
        if keys:
            columns["keys"] = draw.choices(keys, k=rest)
        if load.priorities:
            columns["priorities"] = draw.choices(range(5), k=rest)
        unacknowledged.append(await producer.send_many(values[:rest], **columns))
        sent += rest
        if len(unacknowledged) >= load.window:
            await unacknowledged.popleft()
    for receipt in unacknowledged:
        await receipt
    await producer.flush()
    return Produced(sent, time.perf_counter() - started)


async def publish(producer: Any, load: Load) -> Produced:
    """One message at a time: the next is sent when the one before is acknowledged."""
    values = values_of(load)
    took_ns: list[int] = []
    sent, started, allowance = 0, time.perf_counter(), Allowance(load)
    while allowance.rest(sent, 1):
        before = time.perf_counter_ns()
        await producer.publish(values[sent % len(values)])
        took_ns.append(time.perf_counter_ns() - before)
        sent += 1
    return Produced(sent, time.perf_counter() - started, latency(np.array(took_ns)))


async def paced(producer: Any, load: Load) -> Produced:
    """An open loop: message i is due at t0 + i / rate, whatever became of the messages before it.

    Latencies count from the moment a message was due, not from the moment it could be sent, so a broker that
    stalls the producer does not thereby hide the stall. Receipts are awaited in the order of sending.
    """
    padding = os.urandom(load.value_bytes - STAMP.size)
    total = min(int(load.rate * load.seconds), load.bytes_max // load.value_bytes)
    receipts: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
    interval_ns = 1e9 / load.rate
    start_ns = time.perf_counter_ns() + START_DELAY_NS
    collector = asyncio.create_task(_collect(receipts, total))
    number = 0
    while number < total:
        due_count = min(total, int((time.perf_counter_ns() - start_ns) / interval_ns) + 1)
        while number < due_count:
            due_ns = start_ns + int(number * interval_ns)
            receipts.put_nowait((due_ns, await producer.send(STAMP.pack(number, due_ns) + padding)))
            number += 1
        await asyncio.sleep(TICK_S)
    took_ns = await collector
    seconds = (time.perf_counter_ns() - start_ns) / 1e9
    return Produced(total, seconds, latency(took_ns[int(load.rate * load.warmup_s) :]))


async def _collect(receipts: asyncio.Queue[tuple[int, Any]], total: int) -> np.ndarray[Any, Any]:
    took_ns = np.zeros(total, np.int64)
    for number in range(total):
        due_ns, receipt = await receipts.get()
        await receipt
        took_ns[number] = time.perf_counter_ns() - due_ns
    return took_ns


def latency(took_ns: np.ndarray[Any, Any]) -> Latency:
    """The distribution of times in nanoseconds."""
    if not len(took_ns):
        raise SystemExit("the run was too short: no message after the warm-up")
    p50, p99 = np.percentile(took_ns, [50, 99]) / 1e6
    return Latency(len(took_ns), float(p50), float(p99), float(took_ns.max()) / 1e6)


MODES = {
    "send": send,
    "send_many": send_many,
    "send_varied": send_varied,
    "publish": publish,
    "paced": paced,
}


async def produce(job: Job) -> None:
    """Do the job and print the report."""
    options: dict[str, Any] = {} if job.load.linger_ms is None else {"linger_ms": job.load.linger_ms}
    async with tailrace.connect(job.url) as client, client.producer(job.topic, **options) as producer:
        report = await MODES[job.load.mode](producer, job.load)
        print(msgspec.json.encode(report).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(produce(msgspec.json.decode(sys.argv[1], type=Job)))
