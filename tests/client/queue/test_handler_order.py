"""Any handler on any consumer: `run` handles the messages of a key in order, one at a time, to their end.

Covers `client/queue/handler_runner.py`.
"""

import asyncio
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import tailrace
from tailrace.errors import LeaseLost
from tailrace.testing import LocalBroker
from tests.client.queue.test_consumer import on_broker, partition
from tests.mixtures import dear

MESSAGES = 24
SETTLES = ("ack", "nack", "give back", "reject")
groups = st.fixed_dictionaries(
    {
        "ordering": st.sampled_from(["key", "partition"]),
        "assignment": st.sampled_from(["partitions", "shared"]),
        "max_attempts": st.sampled_from([1, 2, 5]),
        "backoff_ms": st.sampled_from([0, 100]),
        "in_flight_max": st.sampled_from([3, 1000]),
    }
)
consumers = st.fixed_dictionaries(
    {"prefetch": st.sampled_from([0, 1, 5, 2000]), "batch_size": st.sampled_from([1, 3, 500])}
)


class Handler:
    """Does anything with a message, and keeps what it did and how that ended."""

    def __init__(self, acts: tuple[str, ...], settles: bool, dice: random.Random) -> None:
        self.acts = acts
        self.settles = settles
        self.dice = dice
        self.at_work = 0
        self.begun: list[int] = []
        self.over: list[int] = []

    async def __call__(self, delivery: tailrace.Delivery) -> None:
        assert self.at_work == 0, "one of a key at a time"
        self.at_work += 1
        self.begun.append(delivery.offset)
        try:
            for _ in range(self.dice.randrange(3)):
                await asyncio.sleep(0)
            act = "ack" if self.dice.random() < 0.7 else self.dice.choice(self.acts)
            if not self.settles:
                if act in ("nack", "give back"):
                    raise ValueError(act)
            elif act == "ack":
                await delivery.ack()
            elif act == "reject":
                await delivery.reject("no")
            else:
                await delivery.nack(failure=act == "nack")
            if act in ("ack", "reject"):
                self.over.append(delivery.offset)
        except LeaseLost:
            pass
        finally:
            self.at_work -= 1


@dear(20)
@given(
    groups,
    consumers,
    st.integers(1, 4),
    st.sets(st.sampled_from(SETTLES), min_size=1),
    st.booleans(),
    st.integers(0, 1 << 32),
)
def test_a_key_is_handled_in_order_whatever_the_handler_does(
    group: dict[str, Any],
    consumer: dict[str, Any],
    concurrency: int,
    acts: set[str],
    settles: bool,
    seed: int,
) -> None:
    handler = Handler(tuple(sorted(acts)), settles, random.Random(seed))

    async def scenario(broker: LocalBroker, client: tailrace.Client) -> None:
        async with client.producer("t") as producer:
            for number in range(MESSAGES):
                await producer.send(b"%d" % number, key=b"k")
        async with client.consumer("t", "g", **group, **consumer) as taking:
            run = taking.run(handler, concurrency=concurrency, settle=not settles)
            task = asyncio.create_task(run)
            for _ in range(2_000):
                await broker.advance(0.5)
                if task.done() or (await partition(client))["lag"] == 0:
                    break
            assert (await partition(client))["lag"] == 0
            taking.stop()
            await task

    on_broker(scenario)
    assert handler.over == sorted(handler.over)
    first = list(dict.fromkeys(handler.begun))
    assert first == list(range(MESSAGES))
