"""A message that kills its worker, with real processes: it becomes a dead letter, and nothing else does."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tests.e2e.broker_process import SRC, BrokerProcess

WORKER = '''
"""A worker that a message kills: url, how it consumes, the options of its group."""

import asyncio
import json
import os
import signal
import sys

import tailrace

url, how, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


def handle(delivery):
    if delivery.value == b"killer":
        os.kill(os.getpid(), signal.SIGKILL)


async def awaited(delivery):
    handle(delivery)


async def main():
    async with tailrace.connect(url) as client, client.consumer("t", "g", **options) as consumer:
        if how == "batches":
            async for batch in consumer.batches(200):
                for delivery in batch:
                    handle(delivery)
                await batch.ack()
        elif how == "plain":
            await consumer.run(handle)
        else:
            await consumer.run(awaited, concurrency=8)


asyncio.run(main())
'''

MESSAGES = 1_000
WORKERS = 2
SESSIONS_END_FIRST = {"session_ms": 700, "heartbeat_ms": 200, "lease_ms": 30_000, "max_deliveries": 6}
LEASES_END_FIRST = {"session_ms": 60_000, "lease_ms": 500, "max_attempts": 6, "assignment": "shared"}


def spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as errors:
        return subprocess.Popen(command, env={"PYTHONPATH": SRC}, stderr=errors)


async def one_dead_letter(broker: BrokerProcess, how: str, options: dict[str, Any], folder: Path) -> Any:
    """Start workers again whenever they are killed, until everything is settled."""
    command = [sys.executable, "-c", WORKER, broker.url, how, json.dumps(options)]
    workers: list[subprocess.Popen[bytes]] = []
    starts = 0
    async with tailrace.connect(broker.url) as client:
        await client.admin().create_topic("t", partitions=3)
        await client.groups().create("g", "t", **options)
        async with client.producer("t") as producer:
            for number in range(MESSAGES):
                value = b"killer" if number == MESSAGES // 3 else b"%d" % number
                await producer.send(value, key=b"%d" % (number % 50))
        try:
            while (await client.groups().describe("g")).lag:
                workers = [worker for worker in workers if worker.poll() is None]
                while len(workers) < WORKERS:
                    workers.append(spawn(command, folder / "worker.log"))
                    starts += 1
                    assert starts < 60
                await asyncio.sleep(0.05)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        letters = await client.dead_letters("t").list()
    found = [(letter.message.value, letter.reason) for letter in letters]
    assert len(found) == 1, found
    assert found[0][0] == b"killer"
    return letters[0], starts


@pytest.mark.parametrize("how", ["plain", "awaited", "batches"])
def test_one_killer_among_a_thousand_gives_one_dead_letter(how: str, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        broker.start()
        letter, starts = asyncio.run(one_dead_letter(broker, how, SESSIONS_END_FIRST, tmp_path))
    assert (letter.reason, letter.deliveries, letter.attempts) == ("max_deliveries", 6, 0)
    assert starts >= 6


@pytest.mark.parametrize("how", ["plain", "batches"])
def test_also_where_leases_end_before_sessions(how: str, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        broker.start()
        letter, _ = asyncio.run(one_dead_letter(broker, how, LEASES_END_FIRST, tmp_path))
    # A lease that ends takes back what is in flight behind its messages, too: delivered, but not attempted.
    assert (letter.reason, letter.attempts) == ("max_attempts", 6)
    assert letter.deliveries >= 6
