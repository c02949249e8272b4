"""Stream and broadcast consumers on the real core with virtual time: places, order, rebalances.

Also covers `client/read/stream_feed.py`.
"""

import asyncio
from typing import Any

import pytest

import tailrace
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Corrupt, InvalidRequest, Unavailable
from tailrace.testing import LocalBroker
from tests.client.queue.test_consumer import on_broker, wait


async def fill(client: tailrace.Client, count: int, partitions: int = 1, first: int = 0) -> None:
    async with client.producer("t") as producer:
        for number in range(first, first + count):
            await producer.publish(b"%d" % number, partition=number % partitions)


async def take(consumer: tailrace.StreamConsumer, count: int) -> list[int]:
    async with asyncio.timeout(5):
        return [int((await anext(consumer)).value or b"") for _ in range(count)]


async def committed(client: tailrace.Client) -> list[int]:
    return [state["committed"] for state in (await client.groups().describe("g")).partitions]


def test_a_group_goes_on_where_it_committed() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await fill(client, 10)
        async with client.consumer("t", "g", mode="stream", auto_commit_ms=0) as consumer:
            assert await take(consumer, 4) == [0, 1, 2, 3]
            assert consumer.position() == {("t", 0): 4}
            await consumer.commit()
            assert await committed(client) == [4]
            assert await take(consumer, 2) == [4, 5]
        assert await committed(client) == [4]
        async with client.consumer("t", "g", mode="stream") as consumer:
            assert await take(consumer, 6) == [4, 5, 6, 7, 8, 9]

    on_broker(scenario)


def test_auto_commit_stores_what_is_finished_and_not_what_is_in_hand() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await fill(client, 10)
        async with client.consumer("t", "g", mode="stream") as consumer:
            await take(consumer, 4)
            assert await committed(client) == [0]
            await wait(broker, 6)
            assert await committed(client) == [3]
            await take(consumer, 2)
        assert await committed(client) == [5]

        async def all_of_it() -> None:
            async with client.consumer("t", "g", mode="stream") as consumer:
                seen = []

                async def handler(message: tailrace.Message) -> None:
                    seen.append(int(message.value or b""))
                    if len(seen) == 5:
                        consumer.stop()

                await consumer.run(handler)
                assert seen == [5, 6, 7, 8, 9]

        await asyncio.wait_for(all_of_it(), 5)
        assert await committed(client) == [10]

    on_broker(scenario)


def test_batches_are_in_hand_as_a_whole() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            await producer.send_many([b"%d" % number for number in range(10)])
        async with client.consumer("t", "g", mode="stream") as consumer:
            batches = consumer.batches(4)
            assert len(await anext(batches)) == 4
            assert len(await anext(batches)) == 4
            await wait(broker, 6)
            assert await committed(client) == [4]
            await consumer.commit()
            assert await committed(client) == [8]

    on_broker(scenario)


def test_a_handler_that_fails_is_given_the_message_again() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await fill(client, 3)
        seen: list[bytes | None] = []

        async def broken() -> None:
            async with client.consumer("t", "g", mode="stream") as consumer:

                async def handler(message: tailrace.Message) -> None:
                    seen.append(message.value)
                    if message.value == b"1":
                        raise ValueError("no")

                await consumer.run(handler)

        for _ in range(2):
            with pytest.raises(ValueError, match="no"):
                await asyncio.wait_for(broken(), 5)
        assert seen == [b"0", b"1", b"1"]

    on_broker(scenario)


def test_seek_and_pause() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await fill(client, 10)
        async with client.consumer("t", "g", mode="stream") as consumer:
            assert await take(consumer, 6) == [0, 1, 2, 3, 4, 5]
            await consumer.seek({("t", 0): 2})
            assert consumer.position() == {("t", 0): 2}
            assert await take(consumer, 2) == [2, 3]
            consumer.pause()
            waiting = asyncio.ensure_future(anext(consumer))
            await broker.settle()
            assert not waiting.done()
            consumer.resume()
            assert (await asyncio.wait_for(waiting, 5)).value == b"4"
            for wrong in ({("t", 9): 0}, {("t", 0): -1}, {("t", 0): True}):
                with pytest.raises(InvalidRequest):
                    await consumer.seek(wrong)
            with pytest.raises(InvalidRequest, match="one handler"):
                await consumer.run(print, concurrency=2)

    on_broker(scenario)


def test_seek_when_assigned() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await fill(client, 10)

        async def assigned(places: set[Any]) -> None:
            await consumer.seek(dict.fromkeys(places, 7))

        consumer = client.consumer("t", "g", mode="stream", on_assigned=assigned)
        async with consumer:
            assert await take(consumer, 3) == [7, 8, 9]

    on_broker(scenario)


def test_partitions_move_with_their_places() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await fill(client, 20, partitions=2)
        async with client.consumer("t", "g", mode="stream") as first:
            mine = await take(first, 20)
            assert sorted(mine) == list(range(20))
            async with client.consumer("t", "g", mode="stream") as second:
                await broker.settle()
                assert len(first.assignment()) == len(second.assignment()) == 1
                await fill(client, 2, partitions=2, first=20)
                last = await take(first, 1) + await take(second, 1)
                # The message that the first had in hand may have moved with its partition.
                assert {20, 21} & set(last)
            await broker.settle()
            assert len(first.assignment()) == 2

    on_broker(scenario, partitions=2)


def test_a_stream_goes_on_after_a_restart() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await fill(client, 3)
        async with client.consumer("t", "g", mode="stream") as consumer:
            assert await take(consumer, 3) == [0, 1, 2]
            broker.restart()
            await fill(client, 3, first=3)
            assert await take(consumer, 3) == [3, 4, 5]
            await consumer.commit()
        assert await committed(client) == [6]

    on_broker(scenario)


def test_what_was_trimmed_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await fill(client, 5)
        async with client.consumer("t", "g", mode="stream") as consumer:
            await client.admin().trim_topic("t", 0, 3)
            await consumer.seek({("t", 0): 0})
            assert await take(consumer, 2) == [3, 4]
        assert "trimmed unread" in caplog.text

    on_broker(scenario)


def test_expired_messages_are_shown_unless_told_otherwise() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            for number in range(4):
                await producer.publish(b"%d" % number, ttl=2 if number % 2 else None)
        for skip, expected in ((False, [0, 1, 2, 3]), (True, [0, 2])):
            options: dict[str, Any] = {"mode": "stream", "skip_expired": skip, "start": "earliest"}
            async with client.consumer("t", f"g{skip}", **options) as consumer:
                await broker.settle()
                await wait(broker, 6)
                assert await take(consumer, len(expected)) == expected

    on_broker(scenario)


@pytest.mark.parametrize("mode", ["stream", "broadcast"])
def test_what_expires_does_so_on_the_clock_of_the_test(mode: str) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            await producer.publish(b"0", ttl=5)
            await producer.publish(b"1")
            await producer.publish(b"2", ttl=7200)
        broker.clock.advance(3600)
        options: dict[str, Any] = {"mode": mode, "skip_expired": True, "start": "earliest"}
        async with client.consumer("t", "g" if mode == "stream" else None, **options) as consumer:
            assert await take(consumer, 2) == [1, 2]

    on_broker(scenario)


def test_a_stream_comes_to_damage_after_all_that_is_good_before_it() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await fill(client, 4, partitions=2)
        runtimes = broker._engine.topics.get("t").runtimes
        async with client.consumer("t", "g", mode="stream", auto_commit_ms=0) as consumer:
            runtimes[0].fault = Refusal("corrupt", "it is damaged behind that")
            await broker.settle()
            assert sorted(await take(consumer, 4)) == [0, 1, 2, 3]
            with pytest.raises(Corrupt, match="damaged behind that"):
                await take(consumer, 1)
            async with client.producer("t") as producer:
                await producer.publish(b"4", partition=1)
            assert await take(consumer, 1) == [4]  # The other partition goes on.
            with pytest.raises(Corrupt, match="damaged behind that"):
                await take(consumer, 1)

    on_broker(scenario, partitions=2)


def test_broadcast_has_no_group() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await fill(client, 4, partitions=2)
        async with client.consumer("t", mode="broadcast", start="earliest") as consumer:
            assert sorted(await take(consumer, 4)) == [0, 1, 2, 3]
            assert consumer.position() == {("t", 0): 2, ("t", 1): 2}
            with pytest.raises(InvalidRequest, match="no group"):
                await consumer.commit()
        async with client.consumer(["t"], mode="broadcast") as consumer:
            waiting = asyncio.ensure_future(anext(consumer))
            await broker.settle()
            await client.admin().alter_topic("t", partitions=3)
            async with client.producer("t") as producer:
                await producer.publish(b"9", partition=2)
            assert (await asyncio.wait_for(waiting, 60)).value == b"9"  # New partitions are found.
        assert await client.groups().list() == []
        with pytest.raises(Unavailable, match="closed"):
            await anext(consumer)
        with pytest.raises(InvalidRequest):
            client.consumer("t", "g", mode="broadcast")

    on_broker(scenario, partitions=2)
