"""A broker that was started with few open files takes as many as it may, and warns before they run out.

Covers `broker/upkeep/open_files.py`.
"""

import asyncio
import json
import resource
import urllib.request
from pathlib import Path

import tailrace
from tailrace.broker.upkeep.open_files import FILES_MAX
from tests.e2e.broker_process import BrokerProcess, eventually

SHELL = "bash", "-c"


def limited(limits: str) -> list[str]:
    """A prefix that starts the command below these limits."""
    return [*SHELL, f'{limits} && exec "$@"', "limited"]


def test_the_limit_of_a_shell_is_not_that_of_a_broker(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        broker.start(limited("ulimit -Sn 64"))
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft, _ = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
        assert soft == (FILES_MAX if hard == resource.RLIM_INFINITY else hard)

        async def many() -> None:
            async with tailrace.connect(broker.url) as client:
                await client.admin().create_topic("many", partitions=100)
                async with client.producer("many") as producer:
                    for partition in range(100):
                        await producer.publish(b"message", partition=partition)

        asyncio.run(many())


def test_files_that_run_out_are_told_before(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        broker.start(limited("ulimit -n 128"))
        assert _warnings(broker) == []

        async def many() -> None:
            async with tailrace.connect(broker.url) as client:
                await client.admin().create_topic("many", partitions=90)

        asyncio.run(many())
        (text,) = _warnings(broker)
        assert "files are open of the 128 that the system permits" in text
        eventually(lambda: "files are open of the 128" in broker.words(), "the warning in the log")


def _warnings(broker: BrokerProcess) -> list[str]:
    with urllib.request.urlopen(f"http://{broker.http_listen}/readyz", timeout=30) as answer:
        told: list[str] = json.load(answer)["warnings"]
    return told
