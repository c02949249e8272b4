"""Consumers of a group that shares its partitions when it has to, or whose options change; killed ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import tailrace.sync
from tailrace.client.queue.delivery import Delivery
from tailrace.errors import InvalidRequest
from tailrace.testing import LocalBroker


@pytest.fixture
def broker(tailrace_broker: LocalBroker) -> LocalBroker:
    """With a topic `t` of two partitions."""
    tailrace_broker.create_topic("t", partitions=2)
    return tailrace_broker


async def publish(broker: LocalBroker, count: int, key: bytes | None = None) -> None:
    async with broker.client() as client, client.producer("t") as producer:
        for number in range(count):
            await producer.publish(b"%d" % number, key=key, partition=number % 2)


async def take(broker: LocalBroker, consumer: Any) -> Delivery:
    """The next message of a consumer."""
    waiting = asyncio.ensure_future(anext(consumer))
    await broker.settle()
    return await waiting


def test_members_beyond_the_partitions_get_work_and_nobody_loses_any(broker: LocalBroker) -> None:
    async def main() -> None:
        await publish(broker, 20)
        async with broker.client() as client:
            members = [client.consumer("t", "g", prefetch=0, batch_size=1) for _ in range(5)]
            for member in members:
                await member.__aenter__()
            await broker.settle()
            taken = [await take(broker, member) for member in members]
            assert len({(message.partition, message.offset) for message in taken}) == 5
            assert all(row["shared"] for row in broker.group("g").partitions)
            for message in taken:
                await message.ack()
            for member in members[2:]:
                await member.__aexit__(None, None, None)
            await broker.advance(10.1)
            rows = broker.group("g").partitions
            assert [row["shared"] for row in rows] == [False, False]
            assert {row["member"] for row in rows} == {members[0].member, members[1].member}
            assert len(members[0].assignment()) == len(members[1].assignment()) == 1
            for member in members[:2]:
                await (await take(broker, member)).ack()
                await member.__aexit__(None, None, None)
        assert sum(row["deliveries"] for row in broker.group("g").partitions) == 7

    asyncio.run(main())


def test_a_handler_under_way_keeps_its_key_across_both_switches(broker: LocalBroker) -> None:
    async def main() -> None:
        async with broker.client() as client, client.producer("t") as producer:
            for number in range(6):
                await producer.publish(b"%d" % number, key=b"k", partition=0)
        async with broker.client() as client:
            options = {"prefetch": 0, "batch_size": 1}
            first = client.consumer("t", "g", **options)
            others = [client.consumer("t", "g", **options) for _ in range(2)]
            async with first:
                message = await take(broker, first)
                for other in others:
                    await other.__aenter__()
                await broker.settle()
                waiting = [asyncio.ensure_future(anext(other)) for other in others]
                await broker.advance(1)
                assert not any(task.done() for task in waiting), "its key is in flight"
                await message.ack()
                await broker.settle()
                done = [task for task in waiting if task.done()]
                assert [task.result().value for task in done] == [b"1"]
                held = done[0].result()
                for task in waiting:
                    task.cancel()
                idle = others[0] if waiting[1] in done else others[1]
                busy = others[1] if idle is others[0] else others[0]
                await idle.__aexit__(None, None, None)
                await broker.advance(12)
                follow = asyncio.ensure_future(anext(first))
                await broker.advance(1)
                owner = next(row["member"] for row in broker.group("g").partitions if row["partition"] == 0)
                if owner == first.member:
                    assert not follow.done(), "the other one is still at it"
                await held.ack()
                await broker.settle()
                if owner == first.member:
                    assert (await follow).value == b"2"
                follow.cancel()
                await busy.__aexit__(None, None, None)

    asyncio.run(main())


def test_altered_options_reach_a_consumer_that_runs(broker: LocalBroker) -> None:
    async def main() -> None:
        await publish(broker, 2)
        async with broker.client() as client, client.consumer("t", "g", prefetch=0, batch_size=1) as consumer:
            first = await take(broker, consumer)
            altered = await client.groups().alter("g", lease_ms=2_000, max_attempts=9)
            assert (altered.options["lease_ms"], altered.options["max_attempts"]) == (2_000, 9)
            await broker.settle()
            second = await take(broker, consumer)
            await broker.advance(40)
            assert not [row for row in broker.group("g").partitions if row["failures"]], "both were extended"
            await first.ack()
            await second.ack()
            with pytest.raises(InvalidRequest, match="ordering is 'key' and cannot be changed"):
                await client.groups().alter("g", ordering="none")

    asyncio.run(main())


def test_a_member_is_compared_only_on_what_it_gives(broker: LocalBroker) -> None:
    broker.create_group("g", "t", lease_ms=5_000)

    async def main() -> None:
        async with broker.client() as client:
            async with client.consumer("t", "g", max_attempts=5):
                pass
            with pytest.raises(InvalidRequest, match="tailrace group alter g -o lease_ms=6000"):
                await client.consumer("t", "g", lease_ms=6_000).__aenter__()

    asyncio.run(main())


def test_what_a_killed_worker_held_is_with_another_one_after_the_grace(broker: LocalBroker) -> None:
    async def main() -> None:
        await publish(broker, 1)
        killed = await broker.client().__aenter__()
        async with broker.client() as client, client.consumer("t", "g") as other:
            victim = killed.consumer("t", "g")
            await victim.__aenter__()
            await broker.settle()
            waiting = {who: asyncio.ensure_future(anext(who)) for who in (victim, other)}
            await broker.settle()
            if waiting[other].done():
                await waiting[other].result().ack()
                return
            await killed.close()
            await broker.advance(2.9)
            assert not waiting[other].done()
            await broker.advance(0.2)
            message = await waiting[other]
            assert (message.attempt, message.deliveries) == (1, 2)

    asyncio.run(main())


def test_a_consumer_whose_connection_breaks_goes_on_with_its_leases(broker: LocalBroker) -> None:
    async def main() -> None:
        await publish(broker, 1)
        async with broker.client() as client, client.consumer("t", "g", prefetch=0, batch_size=1) as consumer:
            message = await take(broker, consumer)
            for _ in range(3):
                with broker._lock:
                    broker._break_links()
                await asyncio.sleep(0)
                await asyncio.gather(*consumer._intake.membership._tasks._tasks)
                await broker.advance(2)
            await broker.advance(10)
            assert len(broker.group("g").members) == 1
            await message.ack()

    asyncio.run(main())


def test_the_blocking_form_alters_too(broker: LocalBroker) -> None:
    broker.create_group("g", "t")
    with tailrace.sync.connect(broker.url) as client:
        assert client.groups().alter("g", assignment="shared").options["assignment"] == "shared"
    assert all(row["shared"] for row in broker.group("g").partitions)
