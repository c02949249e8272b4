"""How much a consumer leases ahead on the real core, in virtual time: batches, failures, and one at a time."""

from __future__ import annotations

import pytest

import tailrace
from tailrace.client import polls
from tailrace.core.delivery_commands import Lease
from tailrace.testing import LocalBroker
from tests.client.test_consumer import known_as_fast, on_broker, spy
from tests.client.test_standstill import batch_of


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
    monkeypatch.setattr(polls, "_WASTE_WINDOW", 10)

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
