"""Consumers over the network against a real broker process: settled once, kills, a stopped process."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import tailrace
from tailrace.errors import LeaseLost
from tailrace.testing import ServerProcess

LIMIT_S = 60.0
SRC = str(Path(__file__).resolve().parents[2] / "src")
Scenario = Callable[[ServerProcess, tailrace.Client], Coroutine[Any, Any, None]]


def over_network(folder: Path, scenario: Scenario) -> None:
    async def main(server: ServerProcess) -> None:
        async with tailrace.connect(server.url, timeout=20) as client:
            await client.admin().create_topic("t", partitions=3, durability="interval")
            await scenario(server, client)

    with ServerProcess(folder) as server:
        asyncio.run(asyncio.wait_for(main(server), LIMIT_S))


async def fill(client: tailrace.Client, first: int, count: int) -> None:
    async with client.producer("t") as producer:
        await producer.send_many(
            [b"%d" % number for number in range(first, first + count)],
            keys=[b"k%d" % (number % 50) for number in range(first, first + count)],
        )


async def until_not(state: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Ask again and again; what another process does cannot be waited for in any other way."""
    async with asyncio.timeout(20):
        for pause in itertools.repeat(0.02):
            if not await state():
                return
            await asyncio.sleep(pause)


async def drained(client: tailrace.Client) -> None:
    async def lag() -> bool:
        return (await client.groups().describe("g")).lag > 0

    await until_not(lag)


async def no_failures(client: tailrace.Client) -> bool:
    return not any(state["failures"] for state in (await client.groups().describe("g")).partitions)


def test_two_members_settle_everything_once(tmp_path: Path) -> None:
    async def scenario(server: ServerProcess, client: tailrace.Client) -> None:
        await fill(client, 0, 10_000)
        seen: list[int] = []

        async def work(other: tailrace.Client) -> None:
            async with other.consumer("t", "g") as consumer:

                def handler(delivery: tailrace.Delivery) -> None:
                    seen.append(int(delivery.value or b""))

                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(consumer.run(handler, concurrency=4))
                    await drained(client)
                    consumer.stop()

        async with tailrace.connect(server.url) as second:
            await asyncio.gather(work(client), work(second))
        assert sorted(seen) == list(range(10_000))
        assert await no_failures(client)

    over_network(tmp_path, scenario)


def test_a_consumer_lives_through_kills_of_the_broker(tmp_path: Path) -> None:
    async def scenario(server: ServerProcess, client: tailrace.Client) -> None:
        seen: set[int] = set()
        acked: set[int] = set()
        async with client.consumer("t", "g", lease_ms=2000) as consumer:

            async def handler(delivery: tailrace.Delivery) -> None:
                seen.add(int(delivery.value or b""))
                try:
                    await delivery.ack()
                    acked.add(int(delivery.value or b""))
                except LeaseLost:
                    pass  # It comes again.

            running = asyncio.create_task(consumer.run(handler, concurrency=8))
            for round_ in range(2):
                await fill(client, 1000 * round_, 1000)
                await asyncio.to_thread(server.restart)
            await drained(client)
            consumer.stop()
            await running
        assert seen == acked == set(range(2000))

    over_network(tmp_path, scenario)


PROGRAM = """
import asyncio, os, signal, sys, tailrace
from tailrace.errors import LeaseLost

async def main():
    async with tailrace.connect(sys.argv[1]) as client:
        async with client.consumer("t", "g", lease_ms=500, session_ms=60_000) as consumer:
            message = await anext(consumer)
            print("holding", flush=True)
            sys.stdin.readline()
            try:
                await message.ack()
                print("settled", flush=True)
            except LeaseLost:
                print("lost", flush=True)
            async for message in consumer:
                await message.ack()
                print("again", message.attempt, flush=True)
                break

asyncio.run(asyncio.wait_for(main(), 50))
"""


def test_a_stopped_process_loses_its_lease_and_is_told(tmp_path: Path) -> None:
    async def scenario(server: ServerProcess, client: tailrace.Client) -> None:
        await fill(client, 0, 1)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PROGRAM,
            server.url,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": SRC},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert await process.stdout.readline() == b"holding\n"
            process.send_signal(signal.SIGSTOP)
            await until_not(lambda: no_failures(client))
            process.stdin.write(b"go\n")
            await process.stdin.drain()
            process.send_signal(signal.SIGCONT)
            assert await process.stdout.readline() == b"lost\n"
            assert await process.stdout.readline() == b"again 2\n"
            assert await asyncio.wait_for(process.wait(), 20) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    over_network(tmp_path, scenario)
