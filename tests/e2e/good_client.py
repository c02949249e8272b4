"""A well-behaved client in a process of its own: publishes and reads all the time, and tells how that went.

`python -m tests.e2e.good_client URL` answers each line on its standard input with one line of JSON about the
time since the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import tailrace

ROOT = Path(__file__).parents[2]
TOPIC = "good"
PATIENCE_S = 10.0


class Lap(NamedTuple):
    """What happened since the last look."""

    published: int
    read: int
    worst_ms: float
    failures: list[str]


class _Life:
    def __init__(self) -> None:
        self.published = self.read = 0
        self.worst_ms = 0.0
        self.failures: list[str] = []
        self.busy = asyncio.Event()

    def lap(self) -> Lap:
        lap = Lap(self.published, self.read, self.worst_ms, self.failures)
        self.__init__()  # type: ignore[misc]
        return lap

    async def publish(self, url: str) -> None:
        loop = asyncio.get_running_loop()
        number = 0
        async with tailrace.connect(url) as client, client.producer(TOPIC) as producer:
            while True:
                began_s = loop.time()
                try:
                    await producer.publish(b"%d" % number)
                    await client.admin().describe_topic(TOPIC)
                except tailrace.errors.TailraceError as error:
                    self.failures.append(repr(error))
                number += 1
                self.published += 1
                self.busy.set()
                self.worst_ms = max(self.worst_ms, (loop.time() - began_s) * 1000)
                await asyncio.sleep(0.005)

    async def follow(self, url: str) -> None:
        expected = 0
        async with tailrace.connect(url) as client, client.reader(TOPIC, start="earliest") as reader:
            async for message in reader:
                if message.offset != expected or message.value != b"%d" % expected:
                    self.failures.append(f"{message!r} instead of {expected}")
                expected += 1
                self.read += 1


async def _main(url: str) -> None:
    async with tailrace.connect(url) as client:
        await client.admin().create_topic(TOPIC, partitions=1)
    life = _Life()
    tasks = [asyncio.create_task(life.publish(url)), asyncio.create_task(life.follow(url))]
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line == "lap\n":
            with contextlib.suppress(TimeoutError):  # An attack may be over sooner than a publish.
                await asyncio.wait_for(life.busy.wait(), PATIENCE_S)
            for task in tasks:
                if task.done():
                    life.failures.append(repr(task.exception()))
            print(json.dumps(life.lap()), flush=True)
    os._exit(0)


class GoodClient:
    """The process, seen from a test."""

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.good_client", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"},
        )
        self.lap()

    def lap(self) -> Lap:
        """How it went since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"lap\n")
        self._process.stdin.flush()
        values: list[Any] = json.loads(self._process.stdout.readline())
        return Lap(*values)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
