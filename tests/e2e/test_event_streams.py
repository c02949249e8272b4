"""Streams of events on a real broker: over many segments, after kills, and with index files that are gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import tailrace
from tailrace.bus import EventStore
from tailrace.testing.server_process import ServerProcess

STREAMS, ROUNDS = 40, 60


@pytest.fixture
def broker(tmp_path: Path) -> ServerProcess:
    config = tmp_path / "tailrace.toml"
    config.write_text("[storage]\nsegment_bytes = 1048576\n")
    return ServerProcess(tmp_path, "--config", str(config))


async def fill(url: str) -> None:
    async with tailrace.connect(url) as client:
        await client.admin().create_topic("accounts", partitions=1, key_index=True, if_missing=True)
        async with EventStore(client, "accounts") as store:
            store.event(dict, name="paid")
            for number in range(ROUNDS):
                event = {"round": number, "text": "x" * 1000}
                await asyncio.gather(*(store.append(f"s{stream}", [event]) for stream in range(STREAMS)))


async def check(url: str, rounds: int) -> None:
    async with tailrace.connect(url) as client, EventStore(client, "accounts") as store:
        store.event(dict, name="paid")
        for stream in ("s0", f"s{STREAMS - 1}"):
            events = await store.read(stream)
            assert [event.version for event in events] == list(range(1, rounds + 1))
            assert [event.data["round"] for event in events] == [n % ROUNDS for n in range(rounds)]
        newest = await store.read("s7", backwards=True, limit=3)
        assert [event.version for event in newest] == [rounds, rounds - 1, rounds - 2]
        page = await store.read("s7", since=10, limit=5)
        assert [event.version for event in page] == [11, 12, 13, 14, 15]
        assert await store.read("nobody") == []


def test_streams_are_whole_after_kills_and_without_index_files(broker: ServerProcess) -> None:
    with broker:
        asyncio.run(fill(broker.url))
        asyncio.run(check(broker.url, ROUNDS))
        broker.kill()
        broker.restart()
        asyncio.run(check(broker.url, ROUNDS))
        asyncio.run(fill(broker.url))
        broker.kill()
        files = sorted(broker.data.rglob("*.keys"))
        assert len(files) > 2
        files[0].unlink()
        files[1].write_bytes(b"\xff" * 3000)
        broker.restart()
        asyncio.run(check(broker.url, 2 * ROUNDS))
        assert files[0].exists()
        assert files[1].read_bytes()[:4] == b"TRKX"
