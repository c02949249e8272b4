"""Reading: from any offset and time, across segments, after a trim, at the end, and while topics grow.

Covers `broker/queue/time_lookup.py`.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import tailrace
from tailrace.broker.node import EmbeddedVerbs
from tailrace.client.client import Client
from tailrace.client.rpc.machine_clock import MachineClock
from tailrace.client.sdk_tuning import REFRESH_MS
from tailrace.errors import InvalidRequest, NotFound
from tests.e2e.broker_process import BrokerProcess

COUNT = 400
SIZE = 20_000
START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker with small segments; each test has topics of its own."""
    folder = tmp_path_factory.mktemp("reading")
    with BrokerProcess(folder / "data", storage_segment_bytes=1 << 20).start() as running:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.words()


def with_client(broker: BrokerProcess, test: Callable[[Client], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), tailrace.connect(broker.url) as client:
            await test(client)

    asyncio.run(run())


def payload(number: int) -> bytes:
    return b"%d:" % number + b"." * SIZE


async def numbers(client: Client, topic: str, **options: object) -> list[int]:
    """The numbers of all messages up to the present end."""
    async with client.reader(topic, stop_at_end=True, **options) as reader:  # type: ignore[arg-type]
        return [int((message.value or b"").partition(b":")[0]) async for message in reader]


async def fill(client: Client, topic: str, **options: object) -> None:
    """A topic of one partition with 8 MB in batches of different sizes: about eight segments."""
    await client.admin().create_topic(topic, partitions=1, ring_buffer_bytes=1 << 20, **options)
    async with client.producer(topic) as producer:
        number = 0
        rng = random.Random(topic)
        while number < COUNT:
            rows = min(rng.choice((1, 2, 7)), COUNT - number)
            await producer.send_many([payload(number + row) for row in range(rows)])
            number += rows


def test_any_offset_across_segments_from_disk_and_memory(broker: BrokerProcess) -> None:
    async def check(client: Client) -> None:
        await fill(client, "offsets")
        (row,) = (await client.admin().describe_topic("offsets")).partitions
        assert row["segments"] >= 7
        assert await numbers(client, "offsets", start="earliest") == list(range(COUNT))
        rng = random.Random(1)
        for offset in [0, 1, COUNT - 2, COUNT - 1, COUNT, *(rng.randrange(COUNT) for _ in range(25))]:
            async with client.reader("offsets", start=offset, stop_at_end=True) as reader:
                found = []
                async for message in reader:
                    assert message.value == payload(message.offset)
                    found.append(message.offset)
                    if len(found) == 12:
                        break
            assert found == list(range(offset, min(offset + 12, COUNT)))
        assert await numbers(client, "offsets", start="latest") == []

    with_client(broker, check)


def test_offsets_outside_are_refused_with_the_bounds(broker: BrokerProcess) -> None:
    async def check(client: Client) -> None:
        await client.admin().create_topic("bounds", partitions=1)
        async with client.producer("bounds") as producer:
            await producer.send_many([payload(number) for number in range(5)])
        async with client.reader("bounds", start=6) as reader:
            with pytest.raises(NotFound, match="beyond the end, 5") as caught:
                await anext(aiter(reader))
        assert (caught.value.start_offset, caught.value.end_offset) == (0, 5)
        with pytest.raises(InvalidRequest, match="no partition 3"):
            async with client.reader("bounds", partitions=[3], start="earliest"):
                pass
        with pytest.raises(NotFound, match="no topic 'missing'"):
            async with client.reader("missing"):
                pass

    with_client(broker, check)


def test_points_in_time_go_by_the_running_maximum(broker: BrokerProcess) -> None:
    async def check(client: Client) -> None:
        rng = random.Random(2)
        times = [START + timedelta(seconds=at + rng.choice((0, 0, -40, 25))) for at in range(COUNT)]
        await client.admin().create_topic("times", partitions=1)
        async with client.producer("times") as producer:
            at = 0
            while at < COUNT:
                rows = min(rng.choice((1, 3, 10)), COUNT - at)
                values = [payload(number) for number in range(at, at + rows)]
                await producer.send_many(values, timestamps=times[at : at + rows])
                at += rows
        for _ in range(60):
            asked = START + timedelta(seconds=rng.uniform(-50, COUNT + 50))
            # The first message from which on something at or after that time has been seen.
            wanted = next((offset for offset, time in enumerate(times) if time >= asked), COUNT)
            assert await client.admin().find_offsets("times", asked) == [wanted], asked
        asked = times[200]
        wanted = next(offset for offset, time in enumerate(times) if time >= asked)
        assert await numbers(client, "times", start=asked) == list(range(wanted, COUNT))

    with_client(broker, check)


def test_trim_moves_the_start_and_frees_segments(broker: BrokerProcess) -> None:
    async def check(client: Client) -> None:
        await fill(client, "trimmed")
        (before,) = (await client.admin().describe_topic("trimmed")).partitions
        await client.admin().trim_topic("trimmed", 0, 350)
        # A reader that stands before the start is told where that is.
        async with client.reader("trimmed", start=0) as early:
            with pytest.raises(NotFound, match="the log starts at 350") as caught:
                await anext(aiter(early))
            assert caught.value.start_offset == 350
            await early.seek(caught.value.start_offset)
            assert (await anext(aiter(early))).offset == 350
        assert await numbers(client, "trimmed", start="earliest") == list(range(350, COUNT))
        assert await numbers(client, "trimmed", start=START) == list(range(350, COUNT))
        with pytest.raises(InvalidRequest, match="beyond the end"):
            await client.admin().trim_topic("trimmed", 0, COUNT + 1)
        # Space comes back when two snapshots cover what goes.
        await client.admin().trim_topic("trimmed", 0, 380)
        async with asyncio.timeout(10):
            while True:
                (row,) = (await client.admin().describe_topic("trimmed")).partitions
                if row["segments"] < before["segments"] - 2:
                    break
                await asyncio.sleep(0.05)
        assert row["start_offset"] == 380
        assert await numbers(client, "trimmed", start="earliest") == list(range(380, COUNT))

    with_client(broker, check)


def test_everything_trimmed_and_started_again(broker: BrokerProcess) -> None:
    async def check(client: Client) -> None:
        await client.admin().create_topic("empty", partitions=1)
        async with client.producer("empty") as producer:
            await producer.send_many([payload(number) for number in range(5)])
            await producer.flush()
            await client.admin().trim_topic("empty", 0, 5)
            assert await numbers(client, "empty", start="earliest") == []
            assert (await producer.publish(payload(5))).offset == 5
        assert await numbers(client, "empty", start="earliest") == [5]

    with_client(broker, check)


def test_long_poll_wakes_up(broker: BrokerProcess) -> None:
    async def check(client: Client) -> None:
        await client.admin().create_topic("poll", partitions=3)
        loop = asyncio.get_running_loop()
        async with client.reader("poll") as reader, client.producer("poll") as producer:
            for number in range(30):
                waiting = loop.create_task(anext(aiter(reader)))  # type: ignore[arg-type]
                await asyncio.sleep(0.005)
                assert not waiting.done()
                sent_s = loop.time()
                await producer.send(payload(number), partition=number % 3)
                message = await waiting
                assert message.value == payload(number)
                assert loop.time() - sent_s < 2
            # Cancelling a wait loses nothing.
            waiting = loop.create_task(anext(aiter(reader)))  # type: ignore[arg-type]
            await asyncio.sleep(0.005)
            waiting.cancel()
            await producer.publish(payload(99))
            assert (await anext(aiter(reader))).value == payload(99)

    with_client(broker, check)


def test_new_partitions_are_readable(broker: BrokerProcess) -> None:
    async def check(client: Client) -> None:
        await client.admin().create_topic("growing", partitions=1)
        async with client.producer("growing") as producer:
            await producer.publish(payload(0))
        await client.admin().alter_topic("growing", partitions=4)
        async with client.producer("growing") as producer:
            for partition in range(4):
                await producer.publish(payload(partition + 1), partition=partition)
        assert sorted(await numbers(client, "growing", start="earliest")) == [0, 1, 2, 3, 4]
        assert await numbers(client, "growing", start="earliest", partitions=[3]) == [4]
        with pytest.raises(InvalidRequest, match="only grow"):
            await client.admin().alter_topic("growing", partitions=2)

    with_client(broker, check)


def test_running_reader_notices_new_partitions(broker: BrokerProcess) -> None:
    async def check(client: Client) -> None:
        await client.admin().create_topic("noticed", partitions=1)
        async with client.reader("noticed", start="earliest") as reader:
            async with client.producer("noticed") as producer:
                await producer.publish(payload(0))
            assert (await anext(aiter(reader))).value == payload(0)
            await client.admin().alter_topic("noticed", partitions=2)
            reader._refreshed_ms -= REFRESH_MS + 1  # As if that much time had passed.
            async with client.producer("noticed") as producer:
                await producer.publish(payload(1), partition=1)
                await producer.publish(payload(2), partition=0)
                found = {(await anext(aiter(reader))).value}
                await producer.publish(payload(3), partition=0)
                found |= {(await anext(aiter(reader))).value, (await anext(aiter(reader))).value}
        assert found == {payload(1), payload(2), payload(3)}

    with_client(broker, check)


@pytest.mark.parametrize(
    ("options", "later_s", "start"),
    [
        ({"retention_count": 100}, 0, 300),
        ({"retention_bytes": 50 * (SIZE + 400)}, 0, 350),
        ({"retention_ms": 60_000}, 30, 0),
        ({"retention_ms": 60_000}, 61, COUNT),
    ],
    ids=["count", "bytes", "too young", "age"],
)
def test_retention_trims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], later_s: int, start: int
) -> None:
    async def run() -> None:
        verbs = EmbeddedVerbs(str(tmp_path), MachineClock())
        await verbs.open()

        async def opened(timeout_s: float) -> EmbeddedVerbs:
            return verbs

        async with asyncio.timeout(30), Client(opened, 30.0) as client:
            await client.admin().create_topic("kept", partitions=1, **options)
            async with client.producer("kept") as producer:
                for number in range(0, COUNT, 10):
                    await producer.send_many([payload(number + row) for row in range(10)])
            engine = verbs._host.engine
            (runtime,) = engine.topics.get("kept").runtimes
            time_us = runtime.time_us() + later_s * 1_000_000
            monkeypatch.setattr(runtime, "time_us", lambda: time_us)
            runtime.sweep()
            # What follows in the same queue comes back when the sweep has looked.
            swept = asyncio.Event()
            runtime.run_in_order(lambda: None, lambda result, error: swept.set())
            await swept.wait()
            await client.admin().trim_topic("kept", 0, 0)
            found = await numbers(client, "kept", start="earliest")
        # Whole batches go, never more than asked.
        assert start - 10 < found[0] <= start if found else start == COUNT
        assert found == list(range(COUNT))[COUNT - len(found) :]

    asyncio.run(run())
