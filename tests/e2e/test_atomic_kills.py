"""SIGKILL under atomic writes: every version is there once on every partition, whoever was told what."""

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

import tailrace
from tailrace.errors import TailraceError
from tests.e2e.broker_process import BrokerProcess

PLACES = [("a", 0), ("a", 1), ("b", 0)]


class Progress:
    """How many versions are written, and whether that is enough."""

    def __init__(self) -> None:
        self.enough = False
        self._count = 0
        self._more = asyncio.Condition()

    async def add(self) -> None:
        async with self._more:
            self._count += 1
            self._more.notify_all()

    async def more(self, versions: int) -> None:
        """Wait until so many more are written."""
        async with self._more:
            goal = self._count + versions
            await self._more.wait_for(lambda: self._count >= goal)


async def write(url: str, writer: str, progress: Progress) -> int:
    """Write version after version, each until it is known to be decided; returns the last."""
    version = 0
    async with tailrace.connect(url, timeout=5, wait=30) as client:
        while not progress.enough:
            version += 1
            while True:
                try:
                    async with client.atomic(writer, version) as tx:
                        for topic, partition in PLACES:
                            await tx.send(topic, b"%s/%d" % (writer.encode(), version), partition=partition)
                except TailraceError:
                    continue  # Not known what became of it: the same version again.
                break
            assert tx.won is not None
            await progress.add()
    return version


async def read(url: str) -> dict[tuple[str, int], list[bytes]]:
    found: dict[tuple[str, int], list[bytes]] = {place: [] for place in PLACES}
    async with tailrace.connect(url) as client:
        for topic in "ab":
            async with client.reader(topic, start="earliest", stop_at_end=True) as reader:
                async for message in reader:
                    assert message.value is not None
                    found[topic, message.partition].append(message.value)
    return found


async def killed(broker: BrokerProcess, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    async with tailrace.connect(broker.url) as client:
        await client.admin().create_topic("a", partitions=2)
        await client.admin().create_topic("b", partitions=1, durability="interval")
    progress = Progress()
    writers = {name: asyncio.create_task(write(broker.url, name, progress)) for name in ("u", "v")}
    for _ in range(rounds):
        await progress.more(2)
        await asyncio.sleep(rng.random() * 0.05)  # Somewhere within the next writes.
        await asyncio.to_thread(broker.restart)
    await progress.more(2)
    progress.enough = True
    last = {name: await task for name, task in writers.items()}
    found = await read(broker.url)
    wanted = Counter(b"%s/%d" % (n.encode(), v) for n in last for v in range(1, last[n] + 1))
    for place, values in found.items():
        assert Counter(values) == wanted, place
        for name in last:
            own = [int(value.split(b"/")[1]) for value in values if value.startswith(name.encode())]
            assert own == sorted(own), "versions of a writer are applied in order"
    assert sum(last.values()) > 2 * rounds


def test_versions_survive_kills(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(asyncio.wait_for(killed(broker, rounds=2, seed=1), 60))
        assert broker.stop() == 0


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(2, 5))
def test_many_kills_under_atomic_writes(tmp_path: Path, seed: int) -> None:
    with BrokerProcess(tmp_path / "data", storage_segment_bytes=1 << 20).start() as broker:
        asyncio.run(asyncio.wait_for(killed(broker, rounds=20, seed=seed), 200))
        assert broker.stop() == 0
