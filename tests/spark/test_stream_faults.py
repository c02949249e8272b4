"""Stream in, stream out, while workers and the broker are killed: each message once, in order per key."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tailrace import sync
from tests.e2e.broker_process import BrokerProcess, eventually
from tests.spark import process_tree
from tests.spark.driver_process import DriverProcess
from tests.spark.process_tree import Seen

KEYS = 20
WORKER_MODULE = "pyspark.worker"
TURN_S = 60.0
TURNS = 4

Message = tuple[bytes, bytes]
"""Key and value."""


def copying(folder: Path, **spec: Any) -> DriverProcess:
    """A driver process that copies `source` to `target`; see `copy_query`."""
    spec["checkpoint"] = str(folder / "checkpoint")
    return DriverProcess(folder / "driver.log", "-m", "tests.spark.copy_query", json.dumps(spec))


def publish(client: sync.Client, topic: str, count: int, counts: Counter[bytes], draw: random.Random) -> None:
    """Messages with keys, each with its number among those of its key."""
    messages: list[Message] = []
    for _ in range(count):
        key = b"key-%d" % draw.randrange(KEYS)
        messages.append((key, b"%s:%d" % (key, counts[key])))
        counts[key] += 1
    keys, values = zip(*messages, strict=True)
    with client.producer(topic) as producer:
        producer.send_many(values, keys=keys).result(30)


def assert_copied(client: sync.Client, topic: str, counts: Counter[bytes]) -> None:
    """The topic has all messages, each once, those of a key in their order."""
    found: dict[bytes, list[bytes]] = {}
    with client.reader(topic, start="earliest", stop_at_end=True) as reader:
        for message in reader:
            found.setdefault(bytes(message.key or b""), []).append(bytes(message.value or b""))
    wanted = {key: [b"%s:%d" % (key, n) for n in range(count)] for key, count in counts.items()}
    lost_or_twice = {key: (len(wanted.get(key, ())), len(found.get(key, ()))) for key in {*wanted, *found}}
    assert found == wanted, f"by key, wanted and found: {lost_or_twice}"


def workers(driver: DriverProcess) -> list[Seen]:
    """The processes in which tasks of a driver run Python code: forks of a daemon, with its command line."""
    running = [process for process in process_tree.tree(driver.pid) if _runs_tasks(process)]
    numbers = {process.pid for process in running}
    return [process for process in running if _parent(process) in numbers]


def _runs_tasks(process: Seen) -> bool:
    command = _read(process, "cmdline").split("\0")
    return "pyspark.daemon" in command and WORKER_MODULE in command


def _parent(process: Seen) -> int:
    stat = _read(process, "stat").rpartition(") ")[2].split()
    return int(stat[1]) if stat else 0


def _read(process: Seen, name: str) -> str:
    try:
        return Path(f"/proc/{process.pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.long
@pytest.mark.timeout(400)
def test_killed_workers_and_a_killed_broker_lose_and_repeat_nothing(
    own_broker: BrokerProcess, tmp_path: Path
) -> None:
    draw, counts = random.Random(4), Counter[bytes]()
    with sync.connect(own_broker.url) as client:
        for name, partitions in (("in", 4), ("out", 3)):
            client.admin().create_topic(name, partitions=partitions, durability="interval")
        read = {"max_rows_per_trigger": 200, "rows_per_partition": 80}
        spec = {"master": "local[2,3]", "url": own_broker.url, "source": "in", "target": "out", "read": read}
        publish(client, "in", 300, counts, draw)
        with copying(tmp_path, **spec) as driver:
            driver.answer()
            driver.tell("drain")
            driver.answer()
            for turn in range(TURNS):
                (tmp_path / "hold").touch()
                publish(client, "in", 300, counts, draw)
                driver.tell("drain")
                # A task stands in the middle of its rows: reading, working and writing are all under way.
                eventually((tmp_path / "held").exists, "a task is held", TURN_S)
                (tmp_path / "held").unlink()
                process_tree.kill(workers(driver))
                if turn == TURNS - 1:
                    own_broker.restart()
                said = driver.answer(TURN_S)
            assert said["failed_tasks"] >= TURNS, said
        assert_copied(client, "out", counts)
