"""How much a consumer leases ahead on the real core, in virtual time: batches, failures, no prefetch.

Covers `client/queue/lease_polls.py` and `client/queue/lease_prefetch.py`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

import tailrace
from tailrace.client.queue import lease_polls
from tailrace.core.collections.span_map import count
from tailrace.core.model.queue_commands import GiveBack, Lease
from tailrace.testing import LocalBroker
from tests.client.queue.test_consumer import known_as_fast, on_broker, publish, spy
from tests.client.queue.test_standstill import batch_of

NO_PANDAS = """
import asyncio, sys
import tailrace
from tailrace.testing import LocalBroker

async def main():
    with LocalBroker() as broker:
        broker.create_topic("t", partitions=1)
        async with broker.client() as client:
            async with client.producer("t") as producer:
                for number in range(40):
                    await producer.send(b"%d" % number, key=b"%d" % (number % 2), priority=number % 3)
            async with client.consumer("t", "g", priority_mode="strict", backoff_ms=0) as consumer:
                for number in range(44):
                    message = await anext(consumer)
                    await (message.nack(delay=0) if number % 9 == 8 else message.ack())
            async with client.reader("t", start="earliest", stop_at_end=True) as reader:
                async for batch in reader.batches():
                    assert batch.num_rows
        assert broker.group("g").partitions[0]["lag"] == 0
asyncio.run(main())
print(sorted({"pandas"} & sys.modules.keys()))
"""


def test_neither_broker_nor_consumer_imports_pandas_while_messages_wait() -> None:
    pytest.importorskip("pandas")
    done = subprocess.run([sys.executable, "-c", NO_PANDAS], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_what_went_back_is_forgotten_while_a_poll_of_another_topic_waits() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        broker.create_topic("quiet", partitions=1)
        await batch_of(client, 1)
        async with client.consumer(["t", "quiet"], "g", max_attempts=100) as consumer:
            known_as_fast(consumer)
            for _ in range(30):
                known_as_fast(consumer)
                await (await anext(consumer)).nack(delay=0)
            await broker.settle()
            kept = consumer._intake._polls._going_back
            assert sum(len(entries) for entries in kept.values()) <= 2

    on_broker(scenario)


def test_batches_grow_when_most_of_their_time_is_the_same_for_any_size() -> None:
    """A transaction of 200 ms, whatever is in it: what came for a batch is not given back before it."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await batch_of(client, 1200)
        sizes: list[int] = []
        async with client.consumer("t", "g") as consumer:
            async for batch in consumer.batches(500):
                sizes.append(len(batch))
                broker.clock.advance(0.2 + 0.00001 * len(batch))
                await batch.ack()
                if sum(sizes) == 1200 or len(sizes) > 20:
                    break
        assert max(sizes) == 500, sizes

    on_broker(scenario)


def test_without_prefetch_less_is_asked_for_after_failures_and_later_more_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_polls, "_WASTE_WINDOW", 10)

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await batch_of(client, 200, key=b"k")
        async with client.consumer("t", "g", prefetch=0, batch_size=20) as consumer:
            known_as_fast(consumer)
            for _ in range(3):
                await (await anext(consumer)).nack(delay=0)
            seen = spy(client)
            for _ in range(150):
                known_as_fast(consumer)
                message = await anext(consumer)
                in_hand = consumer._intake._hand.count
                asked = [request.count_max for request in seen if isinstance(request, Lease)]
                await message.ack()
                late = [request.count_max for request in seen if isinstance(request, Lease)]
                assert late == asked or not in_hand, "nothing is leased ahead"
            assert asked[0] < 5
            assert asked[-1] == 20

    on_broker(scenario)


def test_more_is_asked_for_when_most_of_what_was_leased_ahead_is_gone() -> None:
    """At 5 ms for a message about twenty are held. Each time, urgent ones are asked for, too."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await batch_of(client, 500)
        seen = spy(client)
        async with client.consumer("t", "g") as consumer:
            for _ in range(500):
                message = await anext(consumer)
                broker.clock.advance(0.005)
                await message.ack()
        asked = [request.above for request in seen if isinstance(request, Lease)]
        assert asked.count(None) <= 500 / 20 / 0.75 + 6, "and a few for the beginning"
        assert len(asked) <= 2 * asked.count(None) + 2

    on_broker(scenario)


def test_an_urgent_message_goes_next_when_the_one_of_its_key_before_it_was_handed_out() -> None:
    """It came together with that one and others, and none of them was urgent while it had to wait."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            await producer.send(b"first", key=b"k", priority=4)
            for _ in range(4):
                await producer.send(b"other", priority=4)
            await producer.send(b"urgent", key=b"k", priority=1)
        async with client.consumer("t", "g", ordering="key", priority_mode="strict") as consumer:
            pace = consumer._intake.pace
            pace.message_ms = pace._latest_ms = 15.0
            handled = []
            for _ in range(6):
                message = await anext(consumer)
                handled.append(message.value)
                broker.clock.advance(0.015 if len(handled) > 1 else 0.03)
                await message.ack()
        assert handled == [b"first", b"urgent", *[b"other"] * 4]

    on_broker(scenario)


def test_an_urgent_message_that_came_while_no_poll_waited_goes_first() -> None:
    """There had been none, and a poll had waited for some; but what it brought was enough for a while, so
    none waited when this one came, and nobody knew of it."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await batch_of(client, 4, priority=2)
        async with client.consumer("t", "g", priority_mode="strict") as consumer:
            pace = consumer._intake.pace
            pace.message_ms = pace._latest_ms = 15.0
            handled = []
            for _ in range(4):
                message = await anext(consumer)
                handled.append(message.value)
                message.ack_nowait()
                broker.clock.advance(0.06)
                if len(handled) == 2:
                    for value in (b"urgent", b"urgent, too"):
                        await publish(client, value, priority=0)
                        await broker.settle()
                    assert consumer._intake._hand.count == 3, "one is not leased yet"
        assert handled == [b"0", b"1", b"urgent", b"urgent, too"]

    on_broker(scenario)


@pytest.mark.parametrize("mode", ["strict", "weighted"])
def test_urgent_ones_are_asked_for_by_the_batch_when_a_fast_handler_stands_still(mode: str) -> None:
    """What it would handle in a moment at its former pace may be more than a request can ask for."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await batch_of(client, 60)
        seen = spy(client)
        async with client.consumer("t", "g", prefetch=20, batch_size=10, priority_mode=mode) as consumer:
            for _ in range(3):
                known_as_fast(consumer)
                await (await anext(consumer)).ack()
            known_as_fast(consumer)
            await asyncio.sleep(10 * lease_polls.SOON_MS / 1000)
            await broker.settle()
            await anext(consumer)
        asked = [request for request in seen if isinstance(request, Lease)]
        assert any(request.above for request in asked)
        assert max(request.count_max for request in asked) <= 10

    on_broker(scenario)


def test_without_prefetch_nothing_is_asked_for_while_something_is_in_hand() -> None:
    """Urgent messages neither: that would be leasing ahead."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await batch_of(client, 60)
        seen = spy(client)
        async with client.consumer("t", "g", prefetch=0, batch_size=20) as consumer:
            known_as_fast(consumer)
            for _ in range(60):
                message = await anext(consumer)
                broker.clock.advance(0.02)
                await message.ack()
        asked = [request.above for request in seen if isinstance(request, Lease)]
        assert asked.count(None) == len(asked) > 1

    on_broker(scenario)


def test_slow_messages_among_quick_ones_are_no_reason_to_give_back() -> None:
    """They made all that was in hand look late: it went back and came again, up to five times, and the work
    for that kept the slow ones slow."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        for _ in range(200):
            await batch_of(client, 20)
        seen = spy(client)
        async with client.consumer("t", "g") as consumer:
            for number in range(4000):
                message = await anext(consumer)
                broker.clock.advance(0.03 if number % 50 == 0 else 0.00001)
                message.ack_nowait()
        back = [spans for request in seen if isinstance(request, GiveBack) for _, spans in request.leases]
        assert sum(map(count, back)) < 400

    on_broker(scenario)


def test_what_goes_back_for_a_hungry_member_is_not_asked_for_before_it_has_arrived() -> None:
    """Asked for in the same turn of the broker, it would come back here and never reach the one who waits."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        for number in range(3):
            await publish(client, b"%d" % number, key=b"k", priority=4)
        seen: list[str] = []
        release = asyncio.Event()

        async def handle(message: tailrace.Delivery) -> None:
            await release.wait()

        watch(client, seen)
        async with client.consumer("t", "g", priority_mode="strict") as consumer:
            known_as_fast(consumer)
            work = asyncio.create_task(consumer.run(handle, concurrency=2))
            await broker.settle()
            await publish(client, *(b"more urgent",) * 5, priority=3)
            await broker.settle()
            intake = consumer._intake
            seen.clear()
            intake.pace.message_ms = 20.0  # What is in hand is not started at once.
            intake._share({("t", 0)}, intake.started(), intake.settlement.now_ms())
            intake._polls.ask()
            assert "sent GiveBack" in seen
            await broker.settle()
            back = seen.index("told GiveBack")
            assert "sent Lease" not in seen[:back]
            assert "sent Lease" in seen[back:], "more urgent messages than the ones it has are wanted still"
            release.set()
            work.cancel()
            await asyncio.wait([work])

    on_broker(scenario)


def watch(client: tailrace.Client, seen: list[str]) -> None:
    """Write down what is sent, but for polls that only withdraw another, and what is answered."""
    verbs: Any = client._verbs
    submit = verbs.submit

    def watched(request: Any, body: Any, respond: Any) -> None:
        name = type(request).__name__

        def told(reply: Any, parts: Any) -> None:
            seen.append(f"told {name}")
            respond(reply, parts)

        if not isinstance(request, Lease) or request.count_max:
            seen.append(f"sent {name}")
        submit(request, body, told)

    verbs.submit = watched
