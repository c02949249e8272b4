"""Ten members of a group at work, an eleventh joins: how long until all is balanced, and who had to wait?"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import msgspec
import uvloop

import tailrace

TOPIC, GROUP = "members", "bench"
TICK_S = 0.01
STEADY_S = 2.0


class MemberJob(msgspec.Struct, frozen=True, kw_only=True):
    """So many partitions and members, and messages a second over all partitions."""

    url: str
    partitions: int
    members: int
    rate: int


class Rebalanced(msgspec.Struct, frozen=True):
    """Seconds until the assignment was balanced again, and the longest silence of a partition that stayed."""

    seconds: float
    kept_gap_ms: float
    kept: int
    moved: int


class Member:
    """A consumer that notes when each of its partitions last had a message."""

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self.seen: dict[int, list[float]] = {}

    async def work(self) -> None:
        """Consume for ever."""
        async for message in self.consumer:
            self.seen.setdefault(message.partition, []).append(time.perf_counter())
            message.ack_nowait()

    def owned(self) -> set[int]:
        """Partitions that it has."""
        return {partition for _, partition in self.consumer.assignment()}


async def publish(producer: Any, job: MemberJob) -> None:
    """A steady stream over all partitions in turn."""
    sent, began = 0, time.perf_counter()
    while True:
        due = int((time.perf_counter() - began) * job.rate)
        while sent < due:
            await producer.send(b"x" * 100, partition=sent % job.partitions)
            sent += 1
        await asyncio.sleep(TICK_S)


def balanced(members: list[Member], partitions: int) -> bool:
    """Every partition has one owner, and no member has two more than another."""
    owned = [member.owned() for member in members]
    sizes = [len(places) for places in owned]
    return sum(sizes) == len(set().union(*owned)) == partitions and max(sizes) - min(sizes) <= 1


async def until_balanced(members: list[Member], partitions: int) -> float:
    """Wait; returns the moment."""
    async with asyncio.timeout(60):
        while not balanced(members, partitions):  # noqa: ASYNC110 - nobody tells when all of them know
            await asyncio.sleep(TICK_S / 2)
    return time.perf_counter()


async def work(job: MemberJob) -> None:
    """Join one by one, settle, let one more join, and report."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(tailrace.connect(job.url))
        await client.admin().create_topic(TOPIC, partitions=job.partitions, durability="interval")
        members: list[Member] = []
        tasks = []
        producer = await stack.enter_async_context(client.producer(TOPIC, linger_ms=1.0))

        async def join() -> None:
            own = await stack.enter_async_context(tailrace.connect(job.url))
            member = Member(await stack.enter_async_context(own.consumer(TOPIC, GROUP)))
            members.append(member)
            tasks.append(asyncio.create_task(member.work()))

        for _ in range(job.members):
            await join()
        await until_balanced(members, job.partitions)
        tasks.append(asyncio.create_task(publish(producer, job)))
        await asyncio.sleep(STEADY_S)
        before = [member.owned() for member in members]
        started = time.perf_counter()
        await join()
        seconds = await until_balanced(members, job.partitions) - started
        await asyncio.sleep(STEADY_S / 2)
        report = _report(members, before, started, seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        print(msgspec.json.encode(report).decode(), flush=True)


def _report(members: list[Member], before: list[set[int]], started: float, seconds: float) -> Rebalanced:
    gap, kept = 0.0, 0
    for member, owned in zip(members, before, strict=False):
        for partition in owned & member.owned():
            kept += 1
            times = [at for at in member.seen[partition] if at > started - 0.2]
            gap = max(gap, *(after - at for at, after in pairwise(times)))
    moved = sum(len(owned) for owned in before) - kept
    return Rebalanced(seconds, gap * 1000, kept, moved)


if __name__ == "__main__":
    uvloop.run(work(msgspec.json.decode(sys.argv[1], type=MemberJob)))
