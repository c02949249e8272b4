"""Fills a partition with events of many streams, one of which has a single event, and reads that one."""

from __future__ import annotations

import sys
import time

import msgspec
import uvloop

import tailrace
from tailrace.bus import EventStore

TOPIC = "events"
BATCH = 500
STREAMS = 100_000
VALUE = b"x" * 100


class StreamJob(msgspec.Struct, frozen=True, kw_only=True):
    """Events in the partition, and reads of the one."""

    url: str
    events: int
    reads: int


class StreamReads(msgspec.Struct, frozen=True):
    """How long each read took, in milliseconds, sorted."""

    took_ms: list[float]


async def work(job: StreamJob) -> StreamReads:
    """Fill, append the one event in the middle, fill on, read."""
    async with tailrace.connect(job.url, timeout=120) as client:
        await client.admin().create_topic(TOPIC, partitions=1, key_index=True)
        async with EventStore(client, TOPIC) as store, client.producer(TOPIC) as producer:
            store.event(dict, name="opened")
            for first in range(0, job.events, BATCH):
                if first == job.events // BATCH // 2 * BATCH:
                    await store.append("once", [{"number": 1}], expected=0)
                keys = [b"stream-%d" % (number * 7919 % STREAMS) for number in range(first, first + BATCH)]
                await producer.send_many([VALUE] * BATCH, keys=keys)
            await producer.flush()
            took = []
            for _ in range(job.reads):
                began = time.perf_counter()
                (event,) = await store.read("once")
                took.append((time.perf_counter() - began) * 1000)
                assert event.version == 1
    return StreamReads(sorted(took))


if __name__ == "__main__":
    answer = uvloop.run(work(msgspec.json.decode(sys.argv[1], type=StreamJob)))
    print(msgspec.json.encode(answer).decode(), flush=True)
