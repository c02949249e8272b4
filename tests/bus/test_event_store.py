"""Streams of events: versions, conflicts, reading both ways, and subscribing from a position.

Also covers `client/read/key_pages.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

import tailrace
from tailrace.bus import EventStore
from tailrace.errors import InvalidRequest, SequenceConflict
from tailrace.testing import LocalBroker


class Opened(msgspec.Struct):
    owner: str


class Paid(msgspec.Struct):
    amount: int


def play(script: Callable[[tailrace.Client, EventStore], Awaitable[None]]) -> None:
    async def scenario() -> None:
        async with tailrace.connect() as client, EventStore(client, "accounts") as store:
            store.event(Opened)
            store.event(Paid, name="paid")
            await asyncio.wait_for(script(client, store), 10)

    asyncio.run(scenario())


def test_a_stream_is_read_in_both_directions(tailrace_broker: LocalBroker) -> None:
    async def script(client: tailrace.Client, store: EventStore) -> None:
        assert await store.append("alice", [Opened("Alice"), Paid(1)], expected=0) == 2
        await store.append("bob", [Opened("Bob")], expected=0)
        assert await store.append("alice", [Paid(2)], expected=2) == 3
        assert await store.append("alice", [Paid(3)]) == 0
        events = await store.read("alice")
        assert [(event.version, event.data) for event in events] == [
            (1, Opened("Alice")),
            (2, Paid(1)),
            (3, Paid(2)),
            (4, Paid(3)),
        ]
        assert [event.name for event in events] == ["Opened", "paid", "paid", "paid"]
        assert [event.version for event in await store.read("alice", since=2)] == [3, 4]
        newest = await store.read("alice", backwards=True, limit=2)
        assert [(event.version, event.data) for event in newest] == [(4, Paid(3)), (3, Paid(2))]
        assert await store.read("nobody") == []

    play(script)


def test_of_two_writers_one_wins_and_the_other_writes_nothing(tailrace_broker: LocalBroker) -> None:
    async def script(client: tailrace.Client, store: EventStore) -> None:
        await store.append("alice", [Opened("Alice")], expected=0)
        results = await asyncio.gather(
            *(store.append("alice", [Paid(n), Paid(n)], expected=1) for n in (1, 2, 3)),
            return_exceptions=True,
        )
        assert sorted(str(type(result).__name__) for result in results) == [
            "SequenceConflict",
            "SequenceConflict",
            "int",
        ]
        assert len(await store.read("alice")) == 3
        with pytest.raises(SequenceConflict):
            await store.append("alice", [Opened("again")], expected=0)
        with pytest.raises(InvalidRequest):
            await store.append("alice", [])

    play(script)


def test_a_subscription_begins_at_a_position_and_goes_on(tailrace_broker: LocalBroker) -> None:
    async def script(client: tailrace.Client, store: EventStore) -> None:
        await store.append("alice", [Opened("Alice"), Paid(1), Paid(2)])
        partition = (await store.read("alice"))[0].partition
        seen = []
        async for event in store.subscribe({partition: 1}):
            seen.append((event.stream, event.offset, event.data))
            if len(seen) == 2:
                await store.append("alice", [Paid(3)])
            if len(seen) == 3:
                break
        assert seen == [("alice", 1, Paid(1)), ("alice", 2, Paid(2)), ("alice", 3, Paid(3))]

    play(script)


def test_a_topic_without_a_key_index_holds_no_streams(tailrace_broker: LocalBroker) -> None:
    tailrace_broker.create_topic("accounts", partitions=1)
    with pytest.raises(InvalidRequest, match="key_index"):
        play(lambda client, store: asyncio.sleep(0))


def test_versions_survive_trimming(tailrace_broker: LocalBroker) -> None:
    async def script(client: tailrace.Client, store: EventStore) -> None:
        await store.append("alice", [Opened("Alice"), Paid(1), Paid(2)], expected=0)
        partition = (await store.read("alice"))[0].partition
        await store.append("alice", [Paid(3)], expected=3)
        await client.admin().trim_topic("accounts", partition, 2)
        events = await store.read("alice")
        assert [(event.version, event.data) for event in events] == [(3, Paid(2)), (4, Paid(3))]
        assert [event.version for event in await store.read("alice", since=3)] == [4]
        newest = await store.read("alice", backwards=True, limit=1)
        assert await store.append("alice", [Paid(4)], expected=newest[0].version) == 5
        assert [event.version for event in await store.read("alice")] == [3, 4, 5]

    play(script)


def test_versions_are_right_while_others_append_to_a_trimmed_stream(tailrace_broker: LocalBroker) -> None:
    async def script(client: tailrace.Client, store: EventStore) -> None:
        await store.append("alice", [Paid(number) for number in range(1, 4)])
        partition = (await store.read("alice"))[0].partition
        await client.admin().trim_topic("accounts", partition, 2)

        async def append() -> None:
            for number in range(4, 40):
                await store.append("alice", [Paid(number)])

        appending = asyncio.create_task(append())
        while not appending.done():
            events = await store.read("alice")
            assert [event.version for event in events] == [event.data.amount for event in events]
        await appending

    play(script)
