"""Makes many topics: one after the other, or all at once; or publishes a few messages to each of them."""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import uvloop

import tailrace

AT_ONCE = 100


class AdminJob(msgspec.Struct, frozen=True, kw_only=True):
    """So many topics; `messages` of them to each partition, in topics of one partition each."""

    url: str
    topics: int
    at_once: bool = False
    messages: int = 0


class AdminDone(msgspec.Struct, frozen=True):
    """How long making the topics took."""

    seconds: float


async def work(job: AdminJob) -> AdminDone:
    """Make them, and use them."""
    options = {"partitions": 1} if job.messages else {}
    names = [f"topic-{'c' if job.at_once else 'o'}-{number}" for number in range(job.topics)]
    async with tailrace.connect(job.url, timeout=120) as client:
        admin = client.admin()
        began = time.perf_counter()
        if job.at_once:
            await asyncio.gather(*(admin.create_topic(name, **options) for name in names))
        else:
            for name in names:
                await admin.create_topic(name, **options)
        seconds = time.perf_counter() - began
        for name in names if job.messages else ():
            async with client.producer(name) as producer:
                await producer.send_many([b"x" * 100] * job.messages)
            if int(name.rpartition("-")[2]) % AT_ONCE == 0:
                await _fail_one(client, name)
    return AdminDone(seconds)


async def _fail_one(client: tailrace.Client, topic: str) -> None:
    """A group that rejects the first message: `_groups` and dead letters are part of what is measured."""
    async with client.consumer(topic, "rejecting") as consumer:
        async for message in consumer:
            await message.reject("no use")
            return


if __name__ == "__main__":
    answer = uvloop.run(work(msgspec.json.decode(sys.argv[1], type=AdminJob)))
    print(msgspec.json.encode(answer).decode(), flush=True)
