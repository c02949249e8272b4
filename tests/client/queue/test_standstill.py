"""A process that stood still: what it had leased is over, and is not handed out any more."""

import asyncio
from typing import Any

import msgspec
import pytest

import tailrace
import tailrace.sync
from tailrace.core.model.queue_commands import GiveBack, Lease
from tailrace.testing import LocalBroker
from tests.client.queue.test_consumer import known_as_fast, on_broker, publish
from tests.client.queue.test_membership import Script, make
from tests.client.virtual_loop import rounds, run

LEASE_S = 30
STOPPED_S = LEASE_S + 1
GROUP: dict[str, Any] = {"session_ms": 600_000, "max_attempts": 100}


async def batch_of(client: tailrace.Client, count: int, **fields: Any) -> None:
    """Messages of one frame, so that they are leased together."""
    async with client.producer("t") as producer:
        for number in range(count):
            await producer.send(b"%d" % number, **fields)


@pytest.mark.parametrize("prefetch", [0, 100])
def test_iteration_hands_out_nothing_whose_lease_is_over(prefetch: int) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await batch_of(client, 5)
        async with client.consumer("t", "g", prefetch=prefetch, **GROUP) as consumer:
            known_as_fast(consumer)
            first = await anext(consumer)
            await first.ack()
            broker.clock.advance(STOPPED_S)
            for _ in range(4):
                message = await asyncio.wait_for(anext(consumer), 60)
                assert message.attempt == 2
                await message.ack()  # Never LeaseLost.
        assert broker.group("g").partitions[0]["lag"] == 0

    on_broker(scenario)


def test_a_loop_that_never_waits_is_told_in_the_middle_of_a_batch() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await batch_of(client, 100)
        async with client.consumer("t", "g", **GROUP) as consumer:
            for number in range(100):
                message = await anext(consumer)
                assert message.value == b"%d" % number
                message.ack_nowait()
                if number == 40:
                    await consumer.commit()
                    broker.clock.advance(STOPPED_S)
            await consumer.commit()  # Nothing was acknowledged too late.

    on_broker(scenario)


def test_batches_leave_it_out() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await batch_of(client, 6)
        seen: list[bytes | None] = []
        async with client.consumer("t", "g", **GROUP) as consumer:
            async for batch in consumer.batches(3):
                await batch.ack()
                seen += [message.value for message in batch]
                if len(seen) == 3:
                    broker.clock.advance(STOPPED_S)
                if len(seen) == 6:
                    break
        assert sorted(seen) == [b"%d" % number for number in range(6)]

    on_broker(scenario)


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_handlers_are_not_called_with_it(concurrency: int) -> None:
    """Messages of one key wait for each other in the runner; others in the buffer."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await batch_of(client, 6, key=b"k")
        seen: list[tuple[bytes | None, int]] = []
        done = asyncio.Event()

        async with client.consumer("t", "g", **GROUP) as consumer:
            known_as_fast(consumer)

            async def handler(message: tailrace.Delivery) -> None:
                seen.append((message.value, message.attempt))
                await rounds(3)
                if len(seen) == 2:
                    await message.ack()
                    broker.clock.advance(STOPPED_S)
                if len(seen) == 6:
                    done.set()

            running = asyncio.ensure_future(consumer.run(handler, concurrency=concurrency))
            await asyncio.wait_for(done.wait(), 60)
            consumer.stop()
            await running
            assert consumer.failures == []
        assert seen == [(b"0", 1), (b"1", 1), *((b"%d" % number, 2) for number in range(2, 6))]

    on_broker(scenario)


def test_blocking_consumers_leave_it_out(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)
    with tailrace.sync.connect() as client:
        with client.producer("t") as producer:
            for number in range(5):
                producer.send(b"%d" % number)
        with client.consumer("t", "g", **GROUP) as consumer:
            known_as_fast(consumer._inner)
            next(consumer).ack()

            async def stand_still() -> None:  # On the loop of the client, which does nothing else meanwhile.
                tailrace_broker.clock.advance(STOPPED_S)

            consumer._portal.call(stand_still)
            for _ in range(4):
                message = next(consumer)
                assert message.attempt == 2
                message.ack()
    assert tailrace_broker.group("g").partitions[0]["lag"] == 0


def test_an_answer_that_is_looked_at_late_is_given_back() -> None:
    """The broker leased to a process that stood still: it must not work on that."""

    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            taking = asyncio.ensure_future(anext(consumer))
            await rounds()
            request, respond = script.waiting[Lease].pop(0)
            late: list[Any] = []
            script.waiting[Lease].append((request, lambda *answer: late.append(answer)))
            await asyncio.sleep(10)
            script.grant(b"a")  # It waited for ten seconds; then nobody looked.
            await asyncio.sleep(LEASE_S)
            reply, parts = late[0]
            respond(msgspec.structs.replace(reply, waited_ms=10_000), parts)
            await rounds()
            assert not taking.done()
            (back,) = script.of(GiveBack)
            assert back.leases == [(7, [0, 1])]
            await rounds()
            script.grant(b"b", lease=8)
            assert (await taking).value == b"b"

    run(scenario())


def test_an_answer_after_a_long_wait_counts_from_its_lease() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            taking = asyncio.ensure_future(anext(consumer))
            await asyncio.sleep(LEASE_S + 5)
            script.grant(b"a")
            assert (await taking).value == b"a"

    run(scenario())


def test_a_message_that_comes_again_is_held_once() -> None:
    """What the older lease had of it is not handed out, and not extended."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await publish(client, b"a")
        async with client.consumer("t", "g", prefetch=10, **GROUP) as consumer:
            first = await anext(consumer)
            await broker.settle()  # Another poll is under way.
            broker.clock.advance(STOPPED_S)
            again = await asyncio.wait_for(anext(consumer), 60)
            assert (again.attempt, first.lease == again.lease) == (2, False)
            leases = consumer._intake.settlement.leases
            assert [lease.id for lease in leases.of() if not lease.done] == [again.lease]
            await again.ack()

    on_broker(scenario)
