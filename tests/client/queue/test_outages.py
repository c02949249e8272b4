"""Clients of several topics while the broker is away: they ask little meanwhile, and go on afterwards.

Covers `client/rpc/retries.py`.
"""

import asyncio
from typing import Any

import pytest

import tailrace
from tailrace.core.model.identifiers import Refusal
from tailrace.testing import LocalBroker
from tests.client.queue.test_consumer import on_broker
from tests.client.virtual_loop import VirtualLoop, rounds

DOWN = Refusal("unavailable", "not connected", "none")
TOPICS = ["t", "u", "v"]
OUTAGE_S = 30
TIMERS_MAX = 25
REQUESTS_MAX = 4 * OUTAGE_S * 12
"""At most four times a second for each thing that is asked for: topics, heartbeats, acknowledgements."""


class Outage:
    """The connection of a client breaks, and is away until it is told to be back."""

    def __init__(self, broker: LocalBroker, client: tailrace.Client) -> None:
        self._broker = broker
        self._verbs: Any = client._verbs
        self._submit = self._verbs.submit
        self.requests = 0

    async def last(self, seconds: int) -> None:
        """Be away for a while; nothing may pile up meanwhile."""
        self._verbs.submit = self._refuse
        self._broker._break_links()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        for _ in range(seconds * 2):
            await asyncio.sleep(0.5)
            timers = [timer for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
            assert len(timers) <= TIMERS_MAX, len(timers)
            assert len(asyncio.all_tasks()) <= TIMERS_MAX
        assert 0 < self.requests <= REQUESTS_MAX
        self._verbs.submit = self._submit

    def _refuse(self, request: Any, body: Any, respond: Any) -> None:
        self.requests += 1
        respond(DOWN, ())


async def fill(client: tailrace.Client, value: bytes) -> None:
    for topic in TOPICS:
        async with client.producer(topic) as producer:
            await producer.publish(value)


async def values(messages: Any, count: int) -> list[bytes]:
    async with asyncio.timeout(60):
        return sorted([(await anext(messages)).value for _ in range(count)])


@pytest.mark.parametrize("mode", ["queue", "exclusive", "stream", "broadcast"])
def test_a_consumer_of_several_topics_survives_an_outage(mode: str) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        for topic in TOPICS[1:]:
            broker.create_topic(topic, partitions=2)
        options: dict[str, Any] = {"group": None} if mode == "broadcast" else {"group": "g"}
        async with client.consumer(TOPICS, mode=mode, start="earliest", **options) as consumer:
            await fill(client, b"1")
            assert await values(consumer, 3) == [b"1"] * 3
            waiting = asyncio.ensure_future(values(consumer, 3))
            await rounds(20)
            await Outage(broker, client).last(OUTAGE_S)
            await fill(client, b"2")
            assert await waiting == [b"2"] * 3

    on_broker(scenario)


def test_whoever_asks_a_reader_again_and_again_during_an_outage_adds_nothing() -> None:
    """Each call that is given up by its caller, by a timeout of its own, asked once more for itself."""

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.reader("t") as reader:

            async def impatient() -> None:
                while True:
                    try:
                        await asyncio.wait_for(anext(reader), 0.1)
                        return
                    except TimeoutError:
                        pass

            asking = asyncio.ensure_future(impatient())
            await rounds(20)
            outage = Outage(broker, client)
            await outage.last(OUTAGE_S)
            assert outage.requests <= 5 * OUTAGE_S
            async with client.producer("t") as producer:
                await producer.publish(b"1")
            await asyncio.wait_for(asking, 60)

    on_broker(scenario)


def test_a_topic_that_is_ill_does_not_make_the_others_be_asked_again() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        broker.create_topic("u", partitions=1)
        verbs: Any = client._verbs
        submit, asked = verbs.submit, 0

        def ill(request: Any, body: Any, respond: Any) -> None:
            nonlocal asked
            if type(request).__name__ == "Lease" and request.topic == "u":
                asked += 1
                respond(Refusal("overloaded", "slow down", "none"), ())
            else:
                submit(request, body, respond)

        verbs.submit = ill
        async with (
            client.consumer(["t", "u"], "g", start="earliest") as consumer,
            client.producer("t") as producer,
        ):
            for number in range(200):
                await producer.publish(b"%d" % number)
                message = await asyncio.wait_for(anext(consumer), 60)
                message.ack_nowait()
                await asyncio.sleep(0.05)
        assert asked <= 60  # Within ten seconds.

    on_broker(scenario)


def test_extensions_do_not_pile_up_at_a_broker_that_does_not_answer() -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        await client.groups().create("g", "t", lease_ms=600, session_ms=60_000)
        async with client.producer("t") as producer:
            await producer.publish(b"1")
        async with client.consumer("t", "g") as consumer:
            message = await asyncio.wait_for(anext(consumer), 60)
            verbs: Any = client._verbs
            submit, asked = verbs.submit, 0

            def silent(request: Any, body: Any, respond: Any) -> None:
                nonlocal asked
                asked += type(request).__name__ == "Extend"

            verbs.submit = silent
            for _ in range(40):
                broker.clock.advance(0.1)
                await asyncio.sleep(0.1)
            assert 1 <= asked <= 2
            verbs.submit = submit
            assert message.lease

    on_broker(scenario)
