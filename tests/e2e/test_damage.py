"""A byte of a closed segment changes below a real broker: it shows, and the loss can be accepted.

Covers `cli/commands/log_repair.py`.
"""

import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.errors import Corrupt, NotFound
from tests.e2e.broker_process import SRC, BrokerProcess

MESSAGES = 60
BODY = 50_000


def ready(broker: BrokerProcess) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://{broker.http_listen}/readyz", timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def metric(broker: BrokerProcess, name: str) -> float:
    with urllib.request.urlopen(f"http://{broker.http_listen}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(name):
                return float(line.rpartition(" ")[2])
    raise AssertionError(f"there is no metric {name}")


def cli(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tailrace.cli", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"PYTHONPATH": SRC}
    )
    return done.returncode, done.stdout + (done.stderr if done.returncode else "")


def flip(broker: BrokerProcess, fraction: float = 0.5) -> None:
    """Change a byte in the middle of the first segment, which is closed."""
    path = min((broker.data / "topics" / "a~1" / "0").glob("*.log"))
    position = int(path.stat().st_size * fraction)
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 8]))


async def fill(broker: BrokerProcess) -> None:
    async with tailrace.connect(broker.url) as client:
        await client.admin().create_topic("a", partitions=1, ring_buffer_bytes=0)
        await client.groups().create("g", ["a"], start="earliest")
        async with client.producer("a") as producer:
            for number in range(MESSAGES):
                await producer.publish(b"%05d" % number + bytes(BODY))


async def read_all(broker: BrokerProcess) -> tuple[list[int], list[list[int]]]:
    """The offsets that a reader gets, and the ranges that it is told to be lost."""
    offsets: list[int] = []
    lost: list[list[int]] = []
    async with (
        tailrace.connect(broker.url) as client,
        client.reader("a", start="earliest", stop_at_end=True) as reader,
    ):
        while True:
            try:
                async for message in reader:
                    offsets.append(message.offset)
                return offsets, lost
            except NotFound as error:
                lost.append(error.details["lost"])


async def consume(broker: BrokerProcess, count: int) -> set[int]:
    got: set[int] = set()
    async with tailrace.connect(broker.url) as client, client.consumer("a", group="g") as consumer:
        async for message in consumer:
            got.add(message.offset)
            await message.ack()
            if len(got) == count:
                return got
    return got


@pytest.mark.parametrize("restarted", [False, True])
def test_damage_shows_and_its_loss_can_be_accepted(tmp_path: Path, restarted: bool) -> None:
    with BrokerProcess(tmp_path / "data", storage_segment_bytes=1 << 20) as broker:
        broker.start()
        asyncio.run(fill(broker))
        assert ready(broker)[0] == 200
        flip(broker)
        with pytest.raises(Corrupt):
            asyncio.run(read_all(broker))
        if restarted:
            broker.kill()
            broker.start()
        status, told = ready(broker)
        assert status == 503
        assert told["reasons"][0].startswith("a/0: ")
        assert metric(broker, 'tailrace_partition_quarantined{partition="0",topic="a"}') == 1
        code, text = cli("topic", "describe", "a", "--json", "--url", broker.url)
        assert code == 0
        assert "is damaged at position" in json.loads(text)["partitions"][0]["fault"]
        code, text = cli("group", "describe", "g", "--json", "--url", broker.url)
        assert code == 0
        assert "is damaged at position" in json.loads(text)["partitions"][0]["fault"]
        code, text = cli("log", "scrub", "a/0", "--url", broker.url)
        assert code == 15, text
        code, text = cli("log", "accept-loss", "a/0", "--url", broker.url)
        assert code == 2, text  # Nobody can be asked.
        code, text = cli("log", "accept-loss", "a/0", "--dry-run", "--json", "--url", broker.url)
        plan = json.loads(text)
        assert (code, plan["done"]) == (0, False)
        code, text = cli("log", "accept-loss", "a/0", "--yes", "--json", "--url", broker.url)
        assert code == 0, text
        report = json.loads(text)
        assert report["done"]
        assert report["ranges"] == plan["ranges"]
        for name in report["kept"]:
            assert (broker.data / "topics" / name).stat().st_size > 0
        asyncio.run(_after(broker, report))
        broker.kill()
        broker.start()
        assert ready(broker)[0] == 200
        offsets, lost = asyncio.run(read_all(broker))
        assert len(offsets) + sum(end - first for first, end in lost) == MESSAGES + 1
        code, text = cli("log", "scrub", "--url", broker.url)
        assert code == 0, text


async def _after(broker: BrokerProcess, report: dict[str, Any]) -> None:
    assert ready(broker)[0] == 200
    async with tailrace.connect(broker.url) as client:
        async with client.producer("a") as producer:
            result = await producer.publish(b"more")
        assert result.offset == MESSAGES
    lost = sum(row["end_offset"] - row["first_offset"] for row in report["ranges"])
    assert lost >= 1
    offsets, told = await read_all(broker)
    assert sum(end - first for first, end in told) == lost
    assert len(offsets) == MESSAGES + 1 - lost
    got = await consume(broker, MESSAGES + 1 - lost)
    assert got == set(offsets)
    async with tailrace.connect(broker.url) as client:
        (row,) = (await client.groups().describe("g")).partitions
    assert (row["collected"], row["lag"]) == (lost, 0)


def test_loss_is_accepted_without_a_broker(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", storage_segment_bytes=1 << 20) as broker:
        broker.start()
        asyncio.run(fill(broker))
        flip(broker)
        with pytest.raises(Corrupt):
            asyncio.run(read_all(broker))
        broker.stop()
        code, text = cli("log", "accept-loss", "a/0", "--yes", "--json", "--data", str(broker.data))
        assert code == 0, text
        broker.start()
        asyncio.run(_after(broker, json.loads(text)))
