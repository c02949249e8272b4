"""Workers that are killed, and more workers than partitions, as real processes with a real broker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import tailrace
from tests.e2e.broker_process import BrokerProcess
from tests.e2e.group_workload import until

WORKER = """
import asyncio, sys, time
import tailrace

async def main(url, name, seconds):
    async def handle(message):
        print("start", name, message.value.decode(), time.monotonic(), message.deliveries, flush=True)
        await asyncio.sleep(float(seconds))
        print("done", name, message.value.decode(), time.monotonic(), flush=True)

    async with tailrace.connect(url) as client, client.consumer("t", "g", member=name) as consumer:
        print("ready", flush=True)
        await consumer.run(handle)

asyncio.run(main(*sys.argv[1:]))
"""


class Workers:
    """Processes that consume, and what they print."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, seconds: float) -> None:
        with (self._folder / f"{name}.txt").open("wb") as output:
            command = [sys.executable, "-c", WORKER, self._url, name, str(seconds)]
            self._processes[name] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def lines(self, kind: str) -> list[list[str]]:
        texts = [path.read_text() for path in sorted(self._folder.glob("*.txt"))]
        assert not [text for text in texts if "Traceback" in text], texts
        lines = [line.split() for text in texts for line in text.splitlines()]
        return [line for line in lines if line and line[0] == kind]

    async def until(self, kind: str, count: int, seconds: float = 30) -> list[list[str]]:
        async def so() -> bool:
            return len(self.lines(kind)) >= count

        await until(so, f"{count} lines {kind}", seconds)
        return self.lines(kind)

    def end(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        process = self._processes.pop(name)
        os.kill(process.pid, how)
        process.wait(10)

    def end_all(self) -> None:
        for name in list(self._processes):
            self.end(name)


async def publish(client: tailrace.Client, count: int) -> None:
    async with client.producer("t") as producer:
        for number in range(count):
            await producer.publish(b"%d" % number, partition=number % 3)


def test_what_a_killed_worker_had_is_with_another_one_within_seconds(tmp_path: Path) -> None:
    async def main(broker: BrokerProcess, workers: Workers) -> None:
        async with tailrace.connect(broker.url) as client:
            await client.admin().create_topic("t", partitions=3)
            workers.start("victim", 60)
            await workers.until("ready", 1)
            await publish(client, 1)
            await workers.until("start", 1)
            workers.start("other", 0)
            await workers.until("ready", 2)
            workers.end("victim")
            killed_s = time.monotonic()
            *_, started, deliveries = (await workers.until("start", 2))[0]
            assert float(started) - killed_s < 6, "three seconds of grace, and what a busy machine adds"
            assert float(started) - killed_s > 2.5
            assert deliveries == "2"

    with BrokerProcess(tmp_path / "data").start() as broker:
        workers = Workers(broker.url, tmp_path)
        try:
            asyncio.run(main(broker, workers))
        finally:
            workers.end_all()
        assert broker.stop() == 0


def test_ten_workers_on_three_partitions_come_and_go(tmp_path: Path) -> None:
    async def main(broker: BrokerProcess, workers: Workers) -> None:
        async with tailrace.connect(broker.url) as client:
            await client.admin().create_topic("t", partitions=3)
            await publish(client, 200)
            for number in range(10):
                workers.start(f"w{number}", 0.2)
            await workers.until("ready", 10, 60)
            await workers.until("done", 100, 60)
            busy = Counter(name for _, name, *_ in workers.lines("done"))
            assert len(busy) == 10, f"nobody idles: {busy}"
            for number in range(3):
                workers.end(f"w{number}", signal.SIGTERM)
            workers.end("w3")
            done = await workers.until("done", 200, 60)
            assert {int(value) for _, _, value, *_ in done} == set(range(200))
            group = await client.groups().describe("g")
            assert all(row["shared"] for row in group.partitions)

    with BrokerProcess(tmp_path / "data").start() as broker:
        workers = Workers(broker.url, tmp_path)
        try:
            asyncio.run(main(broker, workers))
        finally:
            workers.end_all()
        assert broker.stop() == 0
