"""`client.trace`: lives as typed results, in both forms of the SDK."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest

import tailrace
import tailrace.sync
from tailrace.errors import InvalidRequest, NotFound
from tailrace.testing import LocalBroker


def test_lives_are_typed(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)

    async def main() -> None:
        async with tailrace_broker.client() as client:
            async with client.producer("t") as producer:
                result = await producer.publish(b"v", key=b"k", headers={"traceparent": b"00-a"})
                await producer.publish(b"w")
            for found in (
                await client.trace("t", partition=0, offset=0),
                await client.trace("t", id=result.id),
                await client.trace("t", id=str(result.id)),
                await client.trace("t", id=result.id.bytes),
                await client.trace("t", key=b"k", since=result.append_time - timedelta(seconds=1)),
                await client.trace("t", until=result.append_time, limit=1),
            ):
                life = next(iter(found))
                assert isinstance(life.id, UUID)
                assert (life.id, life.offset, life.key, life.status) == (result.id, 0, b"k", "free")
                assert [event.event for event in life.events] == ["published", "appended"]
                assert life.events[1].time == result.append_time
                assert life.events[1].details == {"offset": 0}
                assert (life.traceparent, life.groups) == ("00-a", {})
                assert life.details["value_bytes"] == 1
            everything = await client.trace("t")
            assert (len(everything), everything.complete) == (2, True)
            assert not (await client.trace("t", limit=1)).complete
            with pytest.raises(NotFound):
                await client.trace("t", partition=0, offset=9)
            for bad in ("no uuid", b"short", 5):
                with pytest.raises(InvalidRequest, match="id"):
                    await client.trace("t", id=bad)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(main(), 30))


def test_the_blocking_form(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)
    with tailrace.sync.connect() as client:
        with client.producer("t") as producer:
            producer.publish(b"v")
        (life,) = client.trace("t", partition=0, offset=0)
        assert life.offset == 0


def test_a_consumed_message_tells_by_whom(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("t", partitions=1)

    async def main() -> None:
        async with tailrace_broker.client() as client:
            async with client.producer("t") as producer:
                await producer.publish(b"v")
            async with client.consumer("t", group="g", member="worker") as consumer:
                async for delivery in consumer:
                    await delivery.ack()
                    break
            (life,) = await client.trace("t", partition=0, offset=0)
            assert [event.event for event in life.events] == ["published", "appended", "delivered", "acked"]
            assert life.events[2].member == "worker"
            assert life.groups == {"g": "settled"}

    asyncio.run(asyncio.wait_for(main(), 30))
