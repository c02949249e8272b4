"""Files missing from the data folder of a real broker: named, refused, never made anew; catalogs rebuilt.

Covers `cli/commands/rebuild_catalog.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tailrace import sync
from tailrace.errors import Corrupt
from tests.e2e.broker_process import SRC, BrokerProcess, NotReady

VALUES = [b"%d" % number for number in range(300)]


def ready(broker: BrokerProcess) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{broker.http_listen}/readyz", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tailrace.cli", *arguments]
    return subprocess.run(
        line, capture_output=True, text=True, env={"PYTHONPATH": SRC}, timeout=60, check=False
    )


def fill(broker: BrokerProcess, values: list[bytes] = VALUES) -> None:
    with sync.connect(broker.url) as client:
        client.admin().create_topic("orders", partitions=2, message_bytes_max=200_000)
        client.admin().create_topic("quick", partitions=1, storage="memory")
        client.groups().create("billing", ["orders"])
        with client.producer("orders") as producer:
            for value in values:
                producer.publish(value, partition=0)
                producer.publish(value, partition=1)
        client.groups().reset("billing", "orders", to={0: 10, 1: 10})


def read(broker: BrokerProcess, partition: int, topic: str = "orders") -> list[bytes]:
    """All values of a partition."""
    with sync.connect(broker.url) as client:
        reader = client.reader(topic, start="earliest", partitions=[partition], stop_at_end=True)
        with reader:
            return [message.value for message in reader]


def committed(broker: BrokerProcess) -> list[Any]:
    with sync.connect(broker.url) as client:
        return [row["committed"] for row in client.groups().describe("billing").partitions]


@pytest.mark.parametrize("clean", [True, False])
def test_a_missing_partition_folder(tmp_path: Path, clean: bool) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        fill(broker)
        if clean:
            broker.stop()
        else:
            broker.kill()
        gone = next((broker.data / "topics").glob("orders~*")) / "0"
        shutil.rmtree(gone)
        for _ in range(2):
            broker.start()
            status, text = ready(broker)
            assert status == 503
            assert "orders/0" in text
            assert not gone.exists()
            assert read(broker, 1) == VALUES
            with sync.connect(broker.url) as client, client.producer("orders") as producer:
                with pytest.raises(Corrupt):
                    producer.publish(b"x", partition=0).result()
                rows = client.groups().describe("billing").partitions
            assert [bool(row["fault"]) for row in rows] == [True, False]
            told = command("log", "accept-loss", "orders/0", "--dry-run", "--url", broker.url)
            assert "nothing says how many messages there were" in told.stdout
            broker.stop()


def test_a_missing_first_segment(tmp_path: Path) -> None:
    values = [b"%d" % number + bytes(100_000) for number in range(30)]
    with BrokerProcess(tmp_path / "data", storage_segment_bytes=1024 * 1024).start() as broker:
        fill(broker, values)
        broker.stop()
        folder = next((broker.data / "topics").glob("orders~*")) / "0"
        segments = sorted(folder.glob("*.log"))
        assert len(segments) > 2
        segments[0].unlink()
        broker.start()
        status, text = ready(broker)
        assert status == 503
        assert "orders/0" in text
        with pytest.raises(Corrupt):
            read(broker, 0)
        assert read(broker, 1) == values


def test_a_lost_catalog_is_rebuilt_by_a_command(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        fill(broker)
        assert command("log", "rebuild-catalog", str(broker.data)).returncode != 0, "it is in use"
        broker.stop()
        (broker.data / "catalog.json").unlink()
        before = sorted(path.name for path in (broker.data / "topics").iterdir())
        with pytest.raises(NotReady, match="rebuild-catalog") as refused:
            broker.start()
        assert '"outcome":"none"' in str(refused.value), "a start that changes nothing leaves nothing unknown"
        assert sorted(path.name for path in (broker.data / "topics").iterdir()) == before
        tried = command("log", "rebuild-catalog", str(broker.data), "--dry-run", "--json")
        assert tried.returncode == 0, tried.stderr
        assert not (broker.data / "catalog.json").exists()
        rows = {row["topic"]: row for row in map(json.loads, tried.stdout.splitlines())}
        assert {name: row["options"] for name, row in rows.items()} == {"_groups": "card", "orders": "card"}
        done = command("log", "rebuild-catalog", str(broker.data))
        assert done.returncode == 0, done.stderr
        broker.start()
        assert ready(broker)[0] == 200
        assert read(broker, 0) == VALUES
        assert committed(broker) == [10, 10]
        with sync.connect(broker.url) as client:
            assert client.admin().describe_topic("orders").options["message_bytes_max"] == 200_000


def test_options_that_are_lost_are_guessed_only_when_that_is_allowed(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        fill(broker)
        broker.stop()
        (broker.data / "catalog.json").write_text("{")
        for card in (broker.data / "topics").glob("*/topic.json"):
            card.unlink()
        with pytest.raises(NotReady, match="rebuild-catalog"):
            broker.start()
        refused = command("log", "rebuild-catalog", str(broker.data))
        assert refused.returncode != 0
        assert "--defaults" in refused.stderr
        assert (broker.data / "catalog.json").read_text() == "{"
        done = command("log", "rebuild-catalog", str(broker.data), "--defaults")
        assert done.returncode == 0, done.stderr
        assert (broker.data / "catalog.json.old").read_text() == "{"
        broker.start()
        assert ready(broker)[0] == 200
        assert read(broker, 1) == VALUES
        assert committed(broker) == [10, 10]


def test_an_older_catalog_put_back_loses_no_topic_and_no_group(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        with sync.connect(broker.url) as client:
            client.admin().create_topic("first", partitions=1)
        older = (broker.data / "catalog.json").read_bytes()
        fill(broker)
        broker.stop()
        (broker.data / "catalog.json").write_bytes(older)
        broker.start()
        status, text = ready(broker)
        assert status == 503
        assert "orders~" in text
        assert "_groups~" in text
        with sync.connect(broker.url) as client, pytest.raises(Corrupt, match="rebuild-catalog"):
            client.admin().create_topic("orders")
        broker.stop()
        done = command("log", "rebuild-catalog", str(broker.data), "--json")
        assert done.returncode == 0, done.stderr
        states = {row["topic"]: row["state"] for row in map(json.loads, done.stdout.splitlines())}
        assert states == {"first": "known", "orders": "registered", "_groups": "registered"}
        broker.start()
        assert ready(broker)[0] == 200
        assert read(broker, 0) == VALUES
        assert committed(broker) == [10, 10]


def test_topics_in_memory_are_made_anew_at_every_start(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        fill(broker)
        broker.stop()
        broker.start()
        assert ready(broker)[0] == 200
        assert read(broker, 0, "quick") == []
