"""The clock of a client: what the broker does early or late says nothing about the time."""

import asyncio
import time
from typing import Any

import tailrace
from tailrace.client.queue.consumer_options import ConsumerOptions
from tailrace.client.read.stream_consumer import StreamConsumer
from tailrace.core.model.group_commands import Heartbeat
from tailrace.core.model.queue_commands import Extend
from tailrace.testing import LocalBroker
from tailrace.testing.local_broker import open_local
from tests.client.queue.test_consumer import on_broker
from tests.client.queue.test_membership import Script, make, take
from tests.client.virtual_loop import run


class WallClock:
    """See `ClientClock`: the time of expiry stands still, that of leases is the loop's."""

    def __init__(self) -> None:
        self._wall_ns = time.time_ns()

    def wall_ns(self) -> int:
        return self._wall_ns

    def elapsed_ms(self) -> float:
        return asyncio.get_running_loop().time() * 1000


class FarVerbs:
    """See `BrokerVerbs`: a broker with another clock than the client's, as over a network."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.clock = WallClock()

    def submit(self, request: Any, body: Any, respond: Any) -> None:
        self._inner.submit(request, body, respond)


def test_heartbeats_that_are_answered_early_do_not_make_messages_expire() -> None:
    """The broker does so when a session is shorter than two heartbeats."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        verbs = FarVerbs(await open_local(broker.name))
        group = {"session_ms": 5000, "heartbeat_ms": 3000, "start": "earliest"}
        own = ConsumerOptions(mode="stream", member="m", skip_expired=True, group=group)
        async with StreamConsumer(verbs, ["t"], "g", 5.0, own) as consumer:
            for _ in range(600):  # A minute, of which twelve seconds would be imagined.
                broker.clock.advance(0.1)
                await asyncio.sleep(0.1)
            async with client.producer("t") as producer:
                expires_us = verbs.clock.wall_ns() // 1000 + 5_000_000
                await producer.publish(b"alive", expires_at=expires_us)
            assert (await asyncio.wait_for(anext(consumer), 60)).value == b"alive"

    on_broker(scenario)


def test_heartbeats_that_are_answered_at_once_do_not_make_leases_older() -> None:
    async def scenario() -> None:
        script = Script()
        async with make(script) as consumer:
            await take(script, consumer, b"a")
            for _ in range(600):
                await asyncio.sleep(0.1)
                for _, respond in script.waiting.pop(Heartbeat, []):
                    respond(script.membership(), ())
            assert len(script.of(Heartbeat)) > 500
            assert 3 <= len(script.of(Extend)) <= 4  # Every 15 seconds.

    run(scenario())


def test_a_clock_that_a_test_moves_is_the_time_of_leases_and_of_what_is_published() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        broker.clock.advance(86_400)
        async with client.producer("t") as producer:
            result = await producer.publish(b"1")
        async with client.consumer("t", "g", lease_ms=10_000) as consumer:
            message = await asyncio.wait_for(anext(consumer), 60)
            assert abs((message.timestamp - broker.clock.now).total_seconds()) < 1
            assert message.id == result.id
            for _ in range(6):
                await broker.advance(9)  # Extended in time, again and again.
            assert message.attempt == 1
            await message.ack()

    on_broker(scenario)
