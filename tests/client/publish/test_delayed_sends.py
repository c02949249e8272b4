"""Delayed messages from the SDK to the reader and back: delays, results, cancelling, and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

import tailrace
from tailrace import sync
from tailrace.client.messages import Stored
from tailrace.core.model.commands import Published
from tailrace.errors import InvalidRequest
from tailrace.testing import LocalBroker


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker() as local:
        local.create_topic("t", partitions=1)
        yield local


def texts(broker: LocalBroker) -> list[str]:
    return [(message.value or b"").decode() for message in broker.published("t")]


def test_a_delay_is_seconds_a_span_or_a_moment(broker: LocalBroker) -> None:
    async def scenario() -> list[tailrace.Result]:
        async with broker.client() as client, client.producer("t") as producer:
            at = broker.clock.now + timedelta(seconds=3)
            return [
                await producer.publish(b"a", delay=1),
                await producer.publish(b"b", delay=timedelta(milliseconds=2500), key=b"k"),
                await producer.publish(b"c", deliver_at=at),
                await producer.publish(b"now", delay=0),
                await producer.publish(b"past", deliver_at=datetime(2020, 1, 1, tzinfo=UTC)),
            ]

    start = broker.clock.now
    results = asyncio.run(scenario())
    assert [result.scheduled for result in results] == [True, True, True, False, False]
    assert [result.offset for result in results] == [None, None, None, 0, 1]
    assert [result.sequence for result in results] == [None, None, None, 1, 2]
    assert results[0].deliver_at == start + timedelta(seconds=1)
    assert results[3].deliver_at is None
    for seconds, expected in ((0.9, []), (0.2, ["a"]), (1.5, ["a", "b"]), (0.5, ["a", "b", "c"])):
        broker.clock.advance(seconds)
        assert texts(broker) == ["now", "past", *expected]
    message = broker.published("t")[2]
    assert (message.deliver_at, message.offset) == (results[0].deliver_at, 2)
    assert message.append_time >= start + timedelta(seconds=1)


def test_delays_count_from_the_time_of_the_broker_under_test(broker: LocalBroker) -> None:
    async def scenario() -> tailrace.Result:
        broker.clock.advance(timedelta(days=30))
        async with broker.client() as client, client.producer("t") as producer:
            return await producer.publish(b"later", delay=60)

    assert asyncio.run(scenario()).scheduled
    broker.clock.advance(59)
    assert texts(broker) == []
    broker.clock.advance(2)
    assert texts(broker) == ["later"]


def test_delayed_and_plain_messages_do_not_share_batches(broker: LocalBroker) -> None:
    async def scenario() -> list[tailrace.Result]:
        async with broker.client() as client, client.producer("t") as producer:
            receipts = [
                await producer.send(b"%d" % number, **({"delay": 5} if number % 3 == 0 else {}))
                for number in range(30)
            ]
            return [await receipt for receipt in receipts]

    results = asyncio.run(scenario())
    assert [result.scheduled for result in results] == [number % 3 == 0 for number in range(30)]
    assert [result.offset for result in results if not result.scheduled] == list(range(20))
    broker.clock.advance(6)
    assert sorted(map(int, texts(broker))) == list(range(30))
    assert len({result.id for result in results}) == 30


def test_many_at_once_and_tables(broker: LocalBroker) -> None:
    async def scenario() -> tuple[list[tailrace.Result], ...]:
        async with broker.client() as client, client.producer("t") as producer:
            plain = await producer.send_many([b"a", b"b"], delay=2)
            keyed = await producer.send_many([b"c", b"d"], keys=[b"k", None], delay=timedelta(seconds=1))
            at = [broker.clock.now + timedelta(seconds=3)] * 2
            table = pa.table({"value": pa.array([b"e", b"f"]), "deliver_at": pa.array(at)})
            return await plain, await keyed, await (await producer.send_table(table))

    for results in asyncio.run(scenario()):
        assert [(result.scheduled, result.offset) for result in results] == [(True, None)] * 2
    broker.clock.advance(4)
    assert texts(broker) == ["c", "d", "a", "b", "e", "f"]


@pytest.mark.parametrize(
    "fields",
    [
        {"delay": -1},
        {"delay": "soon"},
        {"delay": True},
        {"delay": float("nan")},
        {"delay": 1e12},
        {"delay": 1, "deliver_at": 5},
        {"deliver_at": datetime(2030, 1, 1)},
        {"deliver_at": -5},
        {"deliver_at": 1 << 62},
        {"delay": 1, "expected_sequence": 1},
        {"delay": 1, "key": b"k", "expected_key_sequence": 0},
    ],
)
def test_what_is_no_delay_is_refused(broker: LocalBroker, fields: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with broker.client() as client, client.producer("t") as producer:
            with pytest.raises(InvalidRequest, match=r"delay|deliver_at"):
                await producer.send(b"x", **fields)

    asyncio.run(scenario())


@pytest.mark.parametrize("delay", [1e12, 10**400, float("inf"), timedelta.max])
def test_a_delay_beyond_the_calendar_is_said_to_be_too_far(broker: LocalBroker, delay: Any) -> None:
    async def scenario() -> None:
        async with broker.client() as client, client.producer("t") as producer:
            with pytest.raises(InvalidRequest, match="delay: too far"):
                await producer.publish(b"x", delay=delay)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("cron", 5),
        ("zone", None),
        ("value", "text"),
        ("value", None),
        ("key", "text"),
        ("headers", {"a": "b"}),
        ("headers", 7),
        ("priority", 9),
        ("ttl", float("nan")),
        ("ttl", "1"),
    ],
)
def test_a_schedule_with_a_wrong_argument_is_refused_by_name(
    broker: LocalBroker, field: str, wrong: Any
) -> None:
    async def scenario() -> None:
        arguments: dict[str, Any] = {"cron": "0 0 * * *", "value": b"x", field: wrong}
        async with broker.client() as client:
            with pytest.raises(InvalidRequest, match=f"^{field}: "):
                await client.schedules().put("s", "t", **arguments)
            assert await client.schedules().list() == []

    asyncio.run(scenario())


def test_an_id_to_cancel_is_a_uuid_and_a_limit_is_told_by_its_name(broker: LocalBroker) -> None:
    async def scenario() -> None:
        async with broker.client() as client:
            text: Any = "0192f0c1-0000-7000-8000-000000000000"
            with pytest.raises(InvalidRequest, match=r"^id: "):
                await client.cancel_id("t", text)
            for limit in (0, 1001, 2.0):
                wrong: Any = limit
                with pytest.raises(InvalidRequest, match=r"^limit: 1 to 1000"):
                    await client.scheduled("t", limit=wrong)

    asyncio.run(scenario())


def test_cancel_and_list(broker: LocalBroker) -> None:
    async def scenario() -> None:
        async with broker.client() as client, client.producer("t") as producer:
            first = await producer.publish(b"a", delay=10, headers={"h": b"1"})
            second = await producer.publish(b"b", delay=5, key=b"k")
            waiting = await client.scheduled("t")
            assert [(item.value, item.key) for item in waiting] == [(b"b", b"k"), (b"a", None)]
            assert waiting[1].headers == [("h", b"1")]
            assert waiting[0].deliver_at == second.deliver_at
            assert await client.cancel(first)
            assert await client.cancel(first), "as often as one likes"
            assert [item.value for item in await client.scheduled("t", limit=5)] == [b"b"]
            broker.clock.advance(11)
            await broker.settle()
            assert not await client.cancel(second), "too late"
            assert await client.scheduled("t") == []

    asyncio.run(scenario())
    assert texts(broker) == ["b"]


def test_a_waiting_reader_gets_it_and_a_restart_does_not_matter(broker: LocalBroker) -> None:
    async def scenario() -> list[bytes | None]:
        async with broker.client() as client:
            async with client.producer("t") as producer:
                await producer.publish(b"a", delay=60)
            broker.restart()
            async with client.reader("t", start="latest") as reader:
                wanted = asyncio.ensure_future(anext(aiter(reader)))
                await broker.settle()
                assert not wanted.done()
                broker.clock.advance(61)
                await broker.settle()
                return [(await wanted).value]

    assert asyncio.run(scenario()) == [b"a"]


def test_a_duplicate_is_told_where_the_message_is_once_it_was_released(broker: LocalBroker) -> None:
    async def scenario() -> list[tuple[bool, int | None]]:
        results = []
        async with broker.client() as client, client.producer("t") as producer:
            await producer.publish(b"before")
            await producer.publish(b"a", delay=5, dedup_id=b"a")
            for restart in (False, False, True):
                result = await producer.publish(b"again", dedup_id=b"a")
                results.append((result.duplicate, result.offset))
                broker.clock.advance(6)
                await broker.settle()
                if restart:
                    broker.restart()
                    result = await producer.publish(b"again", delay=1, dedup_id=b"a")
                    results.append((result.duplicate, result.offset))
        return results

    assert asyncio.run(scenario()) == [(True, None), (True, 1), (True, 1), (True, 1)]


def test_the_blocking_twin(broker: LocalBroker) -> None:
    with sync.connect(broker.url) as client, client.producer("t") as producer:
        sent = producer.send(b"a", delay=5)
        assert producer.send(b"now").result().offset == 0
        result = sent.result()
        assert (result.scheduled, result.offset) == (True, None)
        many = producer.send_many([b"b", b"c"], delay=timedelta(seconds=1)).result()
        assert client.cancel(many[0])
        assert [item.value for item in client.scheduled("t")] == [b"c", b"a"]
        with pytest.raises(InvalidRequest):
            producer.send(b"x", delay=-1)
        with pytest.raises(InvalidRequest):
            producer.send(b"x", delay=1, expected_sequence=5)
        broker.clock.advance(6)
    assert texts(broker) == ["now", "c", "a"]


def test_results_of_a_batch_of_which_some_wait() -> None:
    ids = bytes(16 * 6)
    stored = Stored("t", 0, ids, Published(10, 5, [(1, 3), (4, -1)], [0, 3]), [7] * 6)
    found = [stored.result(row) for row in range(6)]
    assert [result.offset for result in found] == [None, 3, 10, None, None, 11]
    assert [result.scheduled for result in found] == [True, False, False, True, False, False]
    assert [result.duplicate for result in found] == [False, True, False, False, True, False]
