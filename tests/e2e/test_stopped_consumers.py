"""Consumers as processes: stopped past their leases, or without a broker for a while."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tests.e2e.broker_process import SRC, BrokerProcess, eventually

LEASE_MS = 2000
OUTAGE_S = 5.0
CPU_S_MAX = 1.5
"""Of a consumer during the outage; one whose timers double takes all that there is."""

HOLDER = """
import asyncio
import sys

import tailrace


async def main():
    async with tailrace.connect(sys.argv[1]) as client, client.consumer("t", "g") as consumer:
        message = await anext(consumer)
        print("has", message.offset, flush=True)
        await asyncio.sleep(600)


asyncio.run(main())
"""


class Command:
    """A process and what it wrote."""

    def __init__(self, folder: Path, name: str, url: str, *words: str) -> None:
        self.log = folder / name
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words],
                env={**os.environ, "PYTHONPATH": SRC, "TAILRACE_URL": url},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def words(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, count: int, what: str) -> None:
        """Wait until it has written so many lines with these words."""

        def so() -> bool:
            assert self.process.poll() is None, self.words()
            return self.words().count(what) >= count

        eventually(so, f"{count} times {what!r}: {self.words()[-2000:]}", 40)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(*commands: Command) -> Iterator[None]:
    try:
        yield
    finally:
        for command in commands:
            command.process.kill()
            command.process.wait()


def on(broker: BrokerProcess, work: Any) -> Any:
    async def main() -> Any:
        async with tailrace.connect(broker.url, timeout=20) as client:
            return await asyncio.wait_for(work(client), 60)

    return asyncio.run(main())


async def publish(client: tailrace.Client, topic: str, *values: bytes) -> None:
    async with client.producer(topic) as producer:
        for value in values:
            await producer.send(value)


@pytest.mark.parametrize("mode", ["queue", "stream"])
def test_a_consumer_of_two_topics_lives_through_an_outage(tmp_path: Path, mode: str) -> None:
    async def create(client: tailrace.Client) -> None:
        for topic in ("a", "b"):
            await client.admin().create_topic(topic, partitions=2)
            await publish(client, topic, b"before")

    async def more(client: tailrace.Client) -> None:
        for topic in ("a", "b"):
            await publish(client, topic, b"after")

    options = ["-o", "start=earliest", "--mode", mode]
    with BrokerProcess(tmp_path / "data").start() as broker:
        on(broker, create)
        consume = ["-m", "tailrace.cli", "consume", "a", "b", *options]
        lasting = Command(tmp_path, "lasting.log", broker.url, *consume, "-g", "lasting")
        ended = Command(tmp_path, "ended.log", broker.url, *consume, "-g", "ended")
        with running(lasting, ended):
            for consumer in (lasting, ended):
                consumer.until(2, "before")
            broker.kill()
            began_s = lasting.cpu_s()
            time.sleep(OUTAGE_S)  # The outage itself; nothing is waited for.
            assert lasting.cpu_s() - began_s <= CPU_S_MAX
            ended.process.send_signal(signal.SIGTERM)
            ended.process.wait(20)
            broker.start()
            on(broker, more)
            lasting.until(2, "after")
            assert "Traceback" not in lasting.words() + ended.words()
            assert "never retrieved" not in lasting.words() + ended.words()


def test_a_stopped_process_is_not_given_its_expired_message_again(tmp_path: Path) -> None:
    async def fill(client: tailrace.Client) -> None:
        await client.admin().create_topic("t", partitions=1)
        options = {"lease_ms": LEASE_MS, "session_ms": 120_000, "assignment": "shared"}
        await client.groups().create("g", "t", **options)
        await publish(client, "t", b"1")

    async def take(client: tailrace.Client) -> tailrace.Delivery:
        async with client.consumer("t", "g") as consumer:
            message = await anext(consumer)
            await message.ack()
            return message

    with BrokerProcess(tmp_path / "data").start() as broker:
        on(broker, fill)
        holder = Command(tmp_path, "holder.log", broker.url, "-c", HOLDER, broker.url)
        with running(holder):
            holder.until(1, "has 0")
            holder.process.send_signal(signal.SIGSTOP)  # With the next poll under way.
            message = on(broker, take)
            assert (message.offset, message.deliveries, message.attempt) == (0, 2, 2)


def test_a_process_that_was_stopped_handles_nothing_that_it_has_lost(tmp_path: Path) -> None:
    """Its first handlers are quick: so it has messages in hand when one takes long, and it is stopped."""
    count, long = 100, 60

    async def fill(client: tailrace.Client) -> None:
        await client.admin().create_topic("t", partitions=1)
        await client.groups().create("g", "t", lease_ms=LEASE_MS, session_ms=120_000, ordering="none")
        await publish(client, "t", *(b"%d" % number for number in range(count)))

    async def expired(client: tailrace.Client) -> int:
        while True:
            (row,) = (await client.groups().describe("g")).partitions
            if row["failures"] and not row["in_flight"]:
                return int(row["failures"])
            await asyncio.sleep(0.05)

    with BrokerProcess(tmp_path / "data").start() as broker:
        on(broker, fill)
        hold = f"[ $TAILRACE_OFFSET -lt {long} ] || while test -e hold; do sleep 0.05; done"
        note = f'echo "$TAILRACE_OFFSET $TAILRACE_ATTEMPT" >> notes; {hold}'
        (tmp_path / "hold").touch()
        words = ["-m", "tailrace.cli", "consume", "t", "-g", "g", "--exec", note]
        consumer = Command(tmp_path, "consumer.log", broker.url, *words)
        notes = tmp_path / "notes"

        def runs() -> list[tuple[int, ...]]:
            lines = notes.read_text().splitlines() if notes.exists() else []
            return sorted(tuple(map(int, line.split())) for line in lines)

        with running(consumer):
            eventually(lambda: (long, 1) in runs(), "the long one is being handled", 40)
            consumer.process.send_signal(signal.SIGSTOP)
            failures = on(broker, expired)
            (tmp_path / "hold").unlink()
            consumer.process.send_signal(signal.SIGCONT)
            eventually(lambda: len(runs()) > count, "all are handled", 40)
            eventually(lambda: on(broker, lag) == 0, "all are settled", 20)
        assert failures >= 2, "it had messages in hand"
        # The one that was being handled was begun twice; the others that it had only under new leases.
        assert len(runs()) == count + 1
        assert {offset for offset, _ in runs()} == set(range(count))
        assert sum(attempt == 2 for _, attempt in runs()) == failures
        assert consumer.words().count("lease on") <= 1, consumer.words()


async def lag(client: tailrace.Client) -> int:
    return (await client.groups().describe("g")).lag
