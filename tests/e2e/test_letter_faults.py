"""What waits in a broker that is killed: dying messages, delayed ones, and ticks of a schedule."""

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import pytest

import tailrace
from tailrace.client.messages import Message
from tests.e2e.broker_process import BrokerProcess
from tests.e2e.group_workload import GROUP, TOPIC, Members, Publisher, drained, history_of, until
from tests.e2e.test_group_faults import QUICK, play
from tests.history.record import now_ns

BAD = "k3"


async def read_all(client: tailrace.Client, topic: str) -> list[Message]:
    """A topic from its start to its end."""
    async with client.reader(topic, start="earliest", stop_at_end=True) as reader:
        return [message async for message in reader]


# ------------------------------------------------------------------------------ dead letters


async def dying(folder: Path, broker: BrokerProcess, client: tailrace.Client, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    kills: list[int] = []
    # A kill can cost any message one attempt: its lease was granted and nobody heard of it.
    options = {**QUICK, "session_ms": 6000, "max_attempts": rounds + 2, "backoff_ms": 5, "backoff_max_ms": 10}
    with Members(folder, broker.url, options=options, bad_key=BAD, work_ms=2) as members:
        members.start("m0", "m1")
        # Each bad message fails many times, one after the other: with more of them it would take too long.
        async with Publisher(broker.url, members, keys=10 * rounds, rate=150) as publisher:
            await members.at_work(20)
            for _ in range(rounds):
                dead = await dead_count(client)

                async def more(least: int = dead + rng.randrange(1, 4)) -> bool:
                    return await dead_count(client) >= least

                await until(more, "messages die")
                await asyncio.sleep(rng.random() * 0.05)  # Anywhere in the life of the next one.
                broker.kill()
                kills.append(now_ns())
                await asyncio.to_thread(broker.start)
            await members.at_work(20)
        await drained(client, timeout_s=100)
        counters = (await client.groups().describe(GROUP)).partitions
        await members.end()
        history = history_of(members, publisher, kills)
    history.expect_clean(may_die=frozenset({BAD}))
    bad = {row.spot for row in history.got if row.key == BAD}
    origins = Counter(origin(message) for message in await read_all(client, f"{TOPIC}.dlq"))
    assert origins == Counter(bad), "each dead message is there once, and no other"
    assert sum(row["dead_lettered"] for row in counters) == len(bad)
    listed = await client.dead_letters(TOPIC).list(limit=10_000)
    assert {(letter.partition, letter.offset) for letter in listed} == bad
    assert {letter.reason for letter in listed} == {"max_attempts"}


def origin(message: Message) -> tuple[int, int]:
    """Where a dead letter came from."""
    told = dict(message.headers)
    assert told["tailrace-group"] == GROUP.encode()
    return int(told["tailrace-origin-partition"]), int(told["tailrace-origin-offset"])


async def dead_count(client: tailrace.Client) -> int:
    return sum(row["dead_lettered"] for row in (await client.groups().describe(GROUP)).partitions)


def test_each_message_that_dies_is_in_the_dead_letters_once(tmp_path: Path) -> None:
    play(tmp_path, lambda broker, client: dying(tmp_path, broker, client, 2, seed=1))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(2, 6))
def test_messages_that_die_under_many_kills(tmp_path: Path, seed: int) -> None:
    play(tmp_path, lambda broker, client: dying(tmp_path, broker, client, 8, seed), limit_s=380)


# ------------------------------------------------------------------------------ delayed messages


def wall_us() -> int:
    return time.time_ns() // 1000


class Waiting:
    """Delayed messages that were published, by number, and those that were cancelled."""

    def __init__(self, client: tailrace.Client, seed: int) -> None:
        self._client = client
        self._rng = random.Random(seed)
        self.results: dict[int, tailrace.Result] = {}
        self.due_us: dict[int, int] = {}
        """Of one whose time had passed before it was stored: when it was due at the earliest."""
        self.cancelled: set[int] = set()

    async def publish(self, count: int, longest_s: float) -> None:
        """Publish some, due at any time from now on."""
        async with self._client.producer(TOPIC) as producer:
            for _ in range(count):
                number = len(self.results)
                delay = self._rng.random() * longest_s
                earliest_us = wall_us() + int(delay * 1e6)
                result = self.results[number] = await producer.publish(b"%d" % number, delay=delay)
                self.due_us[number] = result.deliver_at_us or earliest_us

    async def cancel(self, count: int) -> None:
        """Cancel some that are far from due; now and then twice."""
        soon_us = wall_us() + 300_000
        far = [number for number, due_us in self.due_us.items() if due_us > soon_us]
        for number in self._rng.sample(far, min(count, len(far))):
            for _ in range(self._rng.choice((1, 2))):
                if await self._client.cancel(self.results[number]):
                    self.cancelled.add(number)
                elif wall_us() < self.due_us[number]:
                    raise AssertionError(f"{number} is not due and cannot be cancelled")


async def delayed(broker: BrokerProcess, client: tailrace.Client, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    waiting = Waiting(client, seed)
    arrived: dict[int, list[tuple[int, int]]] = {}
    async with client.consumer(TOPIC, GROUP, **QUICK) as consumer:

        async def handler(delivery: tailrace.Delivery) -> None:
            times = (wall_us(), round(delivery.append_time.timestamp() * 1e6))
            arrived.setdefault(int(delivery.value or b""), []).append(times)
            await delivery.ack()

        running = asyncio.create_task(consumer.run(handler, concurrency=8))
        for _ in range(rounds):
            await waiting.publish(40, 2.5)
            await waiting.cancel(5)
            await asyncio.sleep(rng.random() * 0.3)  # Some have come by then, some have not.
            await asyncio.to_thread(broker.restart)
            await waiting.cancel(5)
        expected = waiting.results.keys() - waiting.cancelled

        async def all_there() -> bool:
            return arrived.keys() >= expected and not await client.scheduled(TOPIC)

        await until(all_there, "all delayed messages have come")
        await drained(client)
        consumer.stop()
        await running
    assert arrived.keys() == expected
    for number, times in arrived.items():
        due_us = waiting.due_us[number]
        for seen_us, appended_us in times:
            assert appended_us >= due_us, f"{number} was released early"
            assert seen_us >= due_us
    stored = Counter(int(message.value or b"") for message in await read_all(client, TOPIC))
    assert stored == Counter(expected), "released once each, and no cancelled one"
    assert waiting.cancelled
    late_s = max(times[0][0] - waiting.due_us[number] for number, times in arrived.items()) / 1e6
    assert late_s < 5


def test_delayed_messages_outlive_the_broker(tmp_path: Path) -> None:
    play(tmp_path, lambda broker, client: delayed(broker, client, 2, seed=1))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(2, 6))
def test_delayed_messages_under_many_kills(tmp_path: Path, seed: int) -> None:
    play(tmp_path, lambda broker, client: delayed(broker, client, 25, seed), limit_s=380)


# ------------------------------------------------------------------------------ schedules


async def ticking(broker: BrokerProcess, client: tailrace.Client, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    await client.schedules().put("every-second", TOPIC, "* * * * * *", value=b"tick")
    begun_s = time.time()
    away: list[tuple[float, float]] = []
    for _ in range(kills):
        # Close to a tick is where it may be published twice, or not at all.
        until_tick_s = 1 - time.time() % 1
        await asyncio.sleep(until_tick_s + rng.choice((0.0, 0.002, 0.01, 0.3)))
        killed_s = time.time()
        await asyncio.to_thread(broker.restart)
        away.append((killed_s, time.time()))
    over_s = time.time() + 1.2

    async def past() -> bool:
        found = await client.schedules().list("every-second")
        return found[0].last_time is not None and found[0].last_time.timestamp() >= over_s

    await until(past, "a tick after the last restart")
    await client.schedules().delete("every-second")
    ticks = [message.timestamp.timestamp() for message in await read_all(client, TOPIC)]
    assert all(tick == int(tick) for tick in ticks)
    assert ticks == sorted(set(ticks)), "once per tick, in order"
    # Only ticks during which the broker was away, and not the latest of them, may be missing.
    missing = set(range(int(begun_s) + 1, int(ticks[-1]) + 1)) - {int(tick) for tick in ticks}
    for tick in missing:
        assert any(killed_s - 1 <= tick <= ready_s for killed_s, ready_s in away), f"{tick} is missing"


def test_a_schedule_ticks_once_across_kills(tmp_path: Path) -> None:
    play(tmp_path, lambda broker, client: ticking(broker, client, 2, seed=1))


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(2, 4))
def test_a_schedule_under_many_kills(tmp_path: Path, seed: int) -> None:
    play(tmp_path, lambda broker, client: ticking(broker, client, 30, seed), limit_s=380)
