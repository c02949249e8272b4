"""Groups, dead letters, delays and virtual time of the broker for tests; docs/testing.md shows their use.

Covers `client/admin/group_admin.py`.
"""

import asyncio
import time
from datetime import timedelta

import pytest

import tailrace
import tailrace.sync
from tailrace.errors import InvalidRequest, NotFound
from tailrace.testing import LocalBroker


async def publish(*values: bytes, topic: str = "t", **fields: object) -> None:
    async with tailrace.connect() as client, client.producer(topic) as producer:
        for value in values:
            await producer.publish(value, **fields)  # type: ignore[arg-type]


@pytest.fixture
def broker(tailrace_broker: LocalBroker) -> LocalBroker:
    """With a topic `t` of one partition."""
    tailrace_broker.create_topic("t", partitions=1)
    return tailrace_broker


def test_groups_are_made_and_shown_without_a_client(broker: LocalBroker) -> None:
    broker.create_topic("u", partitions=2)
    made = broker.create_group("g", ["t", "u"], lease_ms=500)
    assert (made.name, made.topics, made.options["lease_ms"]) == ("g", ["t", "u"], 500)
    broker.create_group("h", "t", ordering="partition")
    asyncio.run(publish(b"a", b"b"))
    assert [(group.name, group.lag) for group in broker.groups()] == [("g", 2), ("h", 2)]
    shown = broker.group("g")
    places = [(row["topic"], row["partition"], row["lag"]) for row in shown.partitions]
    assert places == [("t", 0, 2), ("u", 0, 0), ("u", 1, 0)]
    assert "strict" in broker.group("h").warnings[0]
    with pytest.raises(NotFound):
        broker.group("nobody")
    with pytest.raises(InvalidRequest, match="lease_ms"):
        broker.create_group("i", "t", lease_ms=0)


def test_members_are_shown(broker: LocalBroker) -> None:
    async def main() -> None:
        async with broker.client() as client, client.consumer("t", "g", member="me") as consumer:
            assert consumer.assignment() == {("t", 0)}
            (group,) = broker.groups()
            assert [member["member"] for member in group.members] == ["me"]
            assert group.partitions[0]["member"] == "me"
        assert broker.group("g").members == []

    asyncio.run(main())


def test_groups_survive_a_restart(broker: LocalBroker) -> None:
    broker.create_group("g", "t")
    asyncio.run(publish(b"a", b"b"))

    async def take_one() -> bytes | None:
        async with broker.client() as client, client.consumer("t", "g") as consumer:
            delivery = await anext(consumer)
            await delivery.ack()
            return delivery.value

    assert asyncio.run(take_one()) == b"a"
    broker.restart()
    assert broker.group("g").lag == 1
    assert asyncio.run(take_one()) == b"b"


def test_dead_letters_of_a_topic(broker: LocalBroker) -> None:
    assert broker.dead_letters("t") == []
    asyncio.run(publish(b"a", b"b", key=b"k"))

    async def main() -> None:
        async with broker.client() as client, client.consumer("t", "g") as consumer:
            await (await anext(consumer)).reject("no")
            await (await anext(consumer)).reject("never", poison=True)
            await broker.settle()
            letters = broker.dead_letters("t")
            assert [(letter.reason, letter.error, letter.offset) for letter in letters] == [
                ("rejected", "no", 0),
                ("poison", "never", 1),
            ]
            assert await client.dead_letters("t").purge() == 2
        # Those that nobody has to look at any more are shown as well.
        assert [letter.error for letter in broker.dead_letters("t")] == ["no", "never"]

    asyncio.run(main())


def test_scheduled_shows_what_waits_by_its_time(broker: LocalBroker) -> None:
    asyncio.run(publish(b"late", delay=20))
    asyncio.run(publish(b"soon", delay=timedelta(seconds=10)))
    assert [message.value for message in broker.scheduled("t")] == [b"soon", b"late"]
    broker.clock.advance(10.01)
    assert [message.value for message in broker.scheduled("t")] == [b"late"]
    assert [message.value for message in broker.published("t")] == [b"soon"]
    with pytest.raises(NotFound):
        broker.scheduled("nowhere")


def test_a_leap_of_time_ends_leases_and_sessions(broker: LocalBroker) -> None:
    asyncio.run(publish(b"a"))

    async def main() -> None:
        async with broker.client() as client, client.consumer("t", "g", lease_ms=5_000) as consumer:
            delivery = await anext(consumer)
            broker.clock.advance(3600)
            await broker.settle()
            with pytest.raises(tailrace.errors.LeaseLost):
                await delivery.ack()
            again = await anext(consumer)
            assert again.value == b"a"
            assert again.deliveries > 1
            await again.ack()

    asyncio.run(main())


def test_advancing_step_by_step_keeps_leases_and_sessions(broker: LocalBroker) -> None:
    """An hour of virtual time: the consumer extends its lease and shows itself all the while."""
    asyncio.run(publish(b"a"))

    async def main() -> None:
        async with broker.client() as client, client.consumer("t", "g", lease_ms=5_000) as consumer:
            delivery = await anext(consumer)
            start = broker.clock.now
            await broker.advance(timedelta(hours=1))
            assert broker.clock.now - start == timedelta(hours=1)
            await delivery.ack()
        assert broker.group("g").partitions[0]["deliveries"] == 1

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 20


def test_back_offs_pass(broker: LocalBroker) -> None:
    asyncio.run(publish(b"a"))
    seen: list[int] = []

    async def main() -> None:
        async with broker.client() as client, client.consumer("t", "g", backoff_ms=60_000) as consumer:

            async def fail_twice(delivery: tailrace.Delivery) -> None:
                seen.append(delivery.attempt)
                if delivery.attempt < 3:
                    raise ValueError

            task = asyncio.create_task(consumer.run(fail_twice))
            await broker.settle()
            assert seen == [1]
            await broker.advance(29)
            assert seen == [1]  # the wait is shortened by half at most
            await broker.advance(31)
            assert seen == [1, 2]
            await broker.advance(60)
            assert seen == [1, 2, 3]
            consumer.stop()
            await task

    asyncio.run(main())


def test_blocking_consumers_react_before_advance_returns(broker: LocalBroker) -> None:
    asyncio.run(publish(b"a"))
    with tailrace.sync.connect() as client, client.consumer("t", "g", backoff_ms=1_000) as consumer:
        next(iter(consumer)).nack()
        broker.clock.advance(1)
        again = next(iter(consumer))
        assert again.attempt == 2
        again.ack()
    assert broker.group("g").lag == 0
