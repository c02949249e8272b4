"""SIGKILL under load, again and again: all that was acknowledged is there, once and in order."""

import asyncio
import random
from pathlib import Path

import pytest

import tailrace
from tests.e2e.broker_process import BrokerProcess
from tests.e2e.workload import Load
from tests.history.checker import check

TOPICS = {"synced": {"durability": "fsync"}, "written": {"durability": "interval", "sync_interval_ms": 50}}


async def killed(broker: BrokerProcess, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    async with tailrace.connect(broker.url) as client:
        for topic, options in TOPICS.items():
            await client.admin().create_topic(topic, partitions=3, **options)
    load = Load(broker.url, list(TOPICS), seed)
    load.start(producers=3)
    for _ in range(rounds):
        await load.until_acknowledged(rng.randrange(1, 400))
        await asyncio.sleep(rng.random() * 0.1)
        await asyncio.to_thread(broker.restart)
    await load.until_acknowledged(100)
    await load.finish()
    report = check(load.history).expect_clean()
    assert report.acknowledged > 100 * rounds
    # Clients retry for 40 s and the broker is away for less than one: nobody is left in doubt.
    assert report.unknown == 0


def test_what_was_acknowledged_survives_kills(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(killed(broker, rounds=10, seed=1))
        assert broker.stop() == 0


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(2, 8))
def test_many_kills(tmp_path: Path, seed: int) -> None:
    with BrokerProcess(tmp_path / "data", storage_segment_bytes=1 << 20).start() as broker:
        asyncio.run(killed(broker, rounds=30, seed=seed))
        assert broker.stop() == 0
