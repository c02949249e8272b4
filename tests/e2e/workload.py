"""Load for tests with faults: producers that send in every way, readers that never stop, and the drain.

Everything is noted in one `History`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import tailrace
from tailrace.client.client import Client
from tailrace.client.messages import Message
from tailrace.client.publish.producer import Producer
from tailrace.errors import TailraceError
from tests.history.record import (
    Drained,
    History,
    Outcome,
    Read,
    Sent,
    Value,
    decode_value,
    encode_value,
    now_ns,
)

TIMEOUT_S = 40.0


class Load:
    """Producers and readers on one broker, until `stop` is set."""

    def __init__(self, url: str, topics: Sequence[str], seed: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self.topics = topics
        self.history = History()
        self.stop = asyncio.Event()
        self.acknowledged = 0
        self._seed = seed
        self._timeout_s = timeout_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, producers: int, *, pause_s: float = 0.002) -> None:
        """Start producers of every kind on every topic, and a reader on each topic."""
        for topic in self.topics:
            self._tasks.append(asyncio.create_task(self._read(topic)))
            for number in range(producers):
                name = f"{topic}.{number}"
                self._tasks.append(asyncio.create_task(self._produce(topic, name, pause_s)))

    async def until_acknowledged(self, more: int, timeout_s: float = 30.0) -> None:
        """Wait until so many more messages are acknowledged: then the broker works (again)."""
        wanted = self.acknowledged + more
        async with asyncio.timeout(timeout_s):
            while self.acknowledged < wanted:
                self._raise_early()
                await asyncio.sleep(0.005)

    def _raise_early(self) -> None:
        for task in self._tasks:
            if task.done() and task.exception() is not None:
                task.result()

    async def finish(self) -> None:
        """Stop the producers and wait for their results, drain every topic, and let the readers catch up."""
        self.stop.set()
        async with tailrace.connect(self.url, timeout=self._timeout_s, wait=self._timeout_s) as client:
            async with asyncio.timeout(2 * self._timeout_s):
                await asyncio.gather(*(task for task in self._tasks if task.get_name() == "producer"))
                for topic in self.topics:
                    await drain(client, topic, self.history)
                await self._caught_up()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _caught_up(self) -> None:
        """Every running reader reaches the end that the drain saw."""
        while True:
            self._raise_early()
            last: dict[tuple[str, int], int] = {}
            for read in self.history.reads:
                if read.reader == "follower":
                    last[read.topic, read.partition] = read.offset + 1
            ends = {(row.topic, row.partition): row.end for row in self.history.drains if row.end}
            if all(last.get(place, 0) >= end for place, end in ends.items()):
                return
            await asyncio.sleep(0.02)

    # -- readers -------------------------------------------------------------------------------------------

    async def _read(self, topic: str) -> None:
        async with (
            tailrace.connect(self.url, timeout=self._timeout_s, wait=self._timeout_s) as client,
            client.reader(topic, start="earliest") as reader,
        ):
            async for message in reader:
                self.history.note(_read("follower", message))

    # -- producers -----------------------------------------------------------------------------------------

    async def _produce(self, topic: str, name: str, pause_s: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("producer")
        rng = random.Random(f"{self._seed}/{name}")
        counter = 0
        waiting: set[asyncio.Task[None]] = set()
        async with (
            tailrace.connect(self.url, timeout=self._timeout_s, wait=self._timeout_s) as client,
            client.producer(topic, timeout=self._timeout_s) as producer,
        ):
            while not self.stop.is_set():
                count = rng.choice((1, 1, 1, 3, 40))
                values = [Value(name, counter + at) for at in range(count)]
                counter += count
                sent = await self._send(producer, topic, values, rng)
                if sent is not None:
                    waiting.add(sent)
                if len(waiting) > rng.choice((1, 4, 30)):
                    done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    for finished in done:
                        finished.result()
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * pause_s)
            await asyncio.gather(*waiting)

    async def _send(
        self, producer: Producer, topic: str, values: list[Value], rng: random.Random
    ) -> asyncio.Task[None] | None:
        """Send one way or another; the result is awaited here or by a task of its own."""
        payloads = [encode_value(value, rng.choice((0, 20, 3000))) for value in values]
        call_ns = now_ns()
        if len(values) > 1:
            awaitable = await producer.send_many(payloads)
            return asyncio.create_task(self._settle(awaitable, topic, values, call_ns))
        fields = rng.choice(({}, {"key": b"k%d" % rng.randrange(9)}, {"partition": 0}))
        if rng.random() < 0.3:
            await self._settle(producer.publish(payloads[0], **fields), topic, values, call_ns)
            return None
        receipt = await producer.send(payloads[0], **fields)
        return asyncio.create_task(self._settle(receipt, topic, values, call_ns))

    async def _settle(self, awaitable: object, topic: str, values: list[Value], call_ns: int) -> None:
        try:
            outcome = await awaitable  # type: ignore[misc]
        except TailraceError as error:
            kind: Outcome = "fail" if error.outcome == "none" and len(values) == 1 else "unknown"
            for value in values:
                self.history.note(Sent(value, topic, kind, None, None, call_ns, now_ns()))
            return
        results = outcome if isinstance(outcome, list) else [outcome]
        for value, result in zip(values, results, strict=True):
            self.history.note(Sent(value, topic, "ok", result.partition, result.offset, call_ns, now_ns()))
        self.acknowledged += len(values)


async def drain(client: Client, topic: str, history: History, reader_name: str = "drain") -> None:
    """Read a topic from its start to its end and note all of it."""
    found = await client.admin().describe_topic(topic)
    async with client.reader(topic, start="earliest", stop_at_end=True) as reader:
        async for message in reader:
            history.note(_read(reader_name, message))
    for row in found.partitions:
        history.note(Drained(topic, row["partition"], row["start_offset"], row["end_offset"], reader_name))


def _read(reader: str, message: Message) -> Read:
    value = decode_value(message.value)
    return Read(reader, message.topic, message.partition, message.offset, value, now_ns())
