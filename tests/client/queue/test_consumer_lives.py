"""Random lives of consumers on the real core: nothing is lost, keys stay in order, whatever happens."""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tailrace
from tailrace.errors import LeaseLost, Unavailable
from tailrace.testing import LocalBroker
from tests.client.queue.test_consumer import on_broker, wait
from tests.mixtures import dear, mixtures

MESSAGES = 40
OTHERS = ("nack", "back", "hold", "leave", "join", "time", "nap", "restart")
PLAYS = mixtures([st.just("ack")], [st.just(act) for act in OTHERS], 0, 40)


class Life:
    """Some consumers that take messages one by one and do something with each."""

    def __init__(self, broker: LocalBroker, client: tailrace.Client, assignment: str, dice: random.Random):
        self.broker = broker
        self.client = client
        self.dice = dice
        self.options: dict[str, Any] = {
            "assignment": assignment,
            "max_attempts": 1_000_000,
            "backoff_ms": 100,
            "backoff_max_ms": 200,
            "prefetch": dice.choice([0, 1, 5, 100]),
            "batch_size": dice.choice([1, 3, 50]),
            "revoke_timeout_ms": 400,
        }
        self.consumers: list[tailrace.Consumer] = []
        self.takes: dict[tailrace.Consumer, asyncio.Future[tailrace.Delivery]] = {}
        self.held: list[tailrace.Delivery] = []
        self.acked: dict[bytes | None, list[int]] = {}

    async def join(self) -> None:
        if len(self.consumers) < 3:
            self.consumers.append(await self.client.consumer("t", "g", **self.options).__aenter__())

    async def leave(self) -> None:
        if self.consumers:
            consumer = self.consumers.pop(self.dice.randrange(len(self.consumers)))
            taking = self.takes.pop(consumer, None)
            await consumer.__aexit__(None, None, None)
            if taking is not None:
                taking.cancel()
                await asyncio.wait([taking])

    async def take(self) -> tailrace.Delivery | None:
        """A message of one of the consumers, when there is one now."""
        if not self.consumers:
            return None
        consumer = self.dice.choice(self.consumers)
        taking = self.takes.get(consumer)
        if taking is None:
            taking = self.takes[consumer] = asyncio.ensure_future(anext(consumer))
        await self.broker.settle()
        if not taking.done():
            return None
        del self.takes[consumer]
        return taking.result()

    async def settle(self, delivery: tailrace.Delivery, act: str) -> None:
        try:
            if act == "nack":
                await delivery.nack()
            elif act == "back":
                await delivery.nack(failure=False)
            else:
                await delivery.ack()
                self.done(delivery)
        except (LeaseLost, Unavailable):
            pass  # It comes again. Unavailable: its consumer has left.

    def done(self, delivery: tailrace.Delivery) -> None:
        self.acked.setdefault(delivery.key, []).append(int(delivery.value or b""))

    async def step(self, act: str) -> None:
        if act == "join":
            await self.join()
        elif act == "leave":
            await self.leave()
        elif act == "time":
            await wait(self.broker, 0.3, 0.1)
        elif act == "nap":
            self.broker.clock.advance(31)  # Nobody extends anything meanwhile.
            await asyncio.sleep(1)
        elif act == "restart":
            self.broker.restart()
            await asyncio.sleep(1)
        elif act == "hold":
            if len(self.held) < 3 and (delivery := await self.take()) is not None:
                self.held.append(delivery)
            elif self.held:
                await self.settle(self.held.pop(0), "nack")
        elif (delivery := await self.take()) is not None:
            await self.settle(delivery, act)

    async def finish(self) -> None:
        """Settle everything that is left."""
        while self.held:
            await self.settle(self.held.pop(), "nack")
        while self.consumers:
            await self.leave()
        await self.join()
        for _ in range(20 * MESSAGES):
            delivery = await self.take()
            if delivery is not None:
                await self.settle(delivery, "ack")
            elif (await self.client.groups().describe("g")).lag == 0:
                break
            else:
                await wait(self.broker, 0.2, 0.1)
        await self.leave()


@pytest.mark.parametrize("assignment", ["partitions", "shared"])
@given(PLAYS, st.randoms(use_true_random=False))
@dear(15)
def test_nothing_is_lost_and_keys_stay_in_order(
    assignment: str, acts: list[str], dice: random.Random
) -> None:
    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            for number in range(MESSAGES):
                await producer.publish(b"%d" % number, key=b"k%d" % (number % 7))
        life = Life(broker, client, assignment, dice)
        await life.join()
        for act in acts:
            await life.step(act)
        await life.finish()
        assert (await client.groups().describe("g")).lag == 0
        done = sorted({number for numbers in life.acked.values() for number in numbers})
        assert done == list(range(MESSAGES))
        for key, numbers in life.acked.items() if "hold" not in acts else ():  # Who holds one overtakes it.
            assert numbers == sorted(set(numbers)), f"{key!r} was acknowledged in the order {numbers}"

    on_broker(scenario, partitions=2)
