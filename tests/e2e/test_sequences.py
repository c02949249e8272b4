"""Racing writers and lost answers: one winner per number, and a retry gives the first result."""

import asyncio
import random
from pathlib import Path

import pytest

import tailrace
from tailrace.errors import SequenceConflict
from tailrace.format.wire import PREFIX, PREFIX_BYTES
from tests.e2e.broker_process import BrokerProcess
from tests.e2e.proxy import Pipe, Proxy
from tests.e2e.workload import Load
from tests.history.checker import check

TAG = b"\xa7publish"
"""How a publish begins in msgpack: the tag as a string of seven bytes."""


def test_racing_writers_win_each_number_once(tmp_path: Path) -> None:
    numbers = 60
    conflicts: list[tuple[int, SequenceConflict]] = []

    async def writer(url: str, name: int, start: asyncio.Barrier) -> list[tuple[int, int]]:
        """Try to take every number; returns (number, offset) of those that were taken."""
        won = []
        async with tailrace.connect(url) as client, client.producer("t") as producer:
            await start.wait()
            number = 1
            while number <= numbers:
                payload = b"%d-%d" % (name, number)
                try:
                    result = await producer.publish(payload, partition=0, expected_sequence=number)
                except SequenceConflict as error:
                    conflicts.append((number, error))
                    number = error.current_sequence + 1
                else:
                    won.append((number, result.offset))
                    number += 1
        return won

    async def run(url: str) -> None:
        async with tailrace.connect(url) as client:
            await client.admin().create_topic("t", partitions=1)
            start = asyncio.Barrier(6)
            results = await asyncio.gather(*(writer(url, name, start) for name in range(6)))
            winners = {}
            for name, won in enumerate(results):
                for number, offset in won:
                    assert offset == number - 1
                    assert number not in winners, f"{number} was won twice"
                    winners[number] = name
            assert sorted(winners) == list(range(1, numbers + 1))
            assert conflicts, "there was no race"
            assert all(error.outcome == "none" for _, error in conflicts)
            assert all(error.current_sequence >= number for number, error in conflicts)
            async with client.reader("t", start="earliest", stop_at_end=True) as reader:
                values = [m.value async for m in reader]
            assert values == [b"%d-%d" % (winners[number], number) for number in sorted(winners)]

    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(run(broker.url))


@pytest.mark.parametrize("conditional", [False, True])
def test_retry_after_a_lost_answer_gives_the_first_result(tmp_path: Path, conditional: bool) -> None:
    """The connection is cut after the request was forwarded, with its answer on the way; several times."""

    async def run(broker: BrokerProcess) -> None:
        losses = 3
        async with Proxy(broker.address) as proxy, tailrace.connect(proxy.url) as client:
            await client.admin().create_topic("t", partitions=1)
            lost: list[bytes] = []

            def cut_answers(pipe: Pipe, way: str, piece: bytes) -> bool:
                if way == "down" and b"published" in piece and len(lost) < losses:
                    lost.append(piece)
                    return False
                return True

            async with client.producer("t") as producer:
                first = await producer.publish(b"first")
                proxy.watch = cut_answers
                options = {"expected_sequence": first.sequence + 1} if conditional else {}
                result = await producer.publish(b"second", **options)
                proxy.watch = None
                third = await producer.publish(b"third")
            assert len(lost) == losses, "the answer was never lost"
            assert (first.offset, result.offset, third.offset) == (0, 1, 2)
            assert not result.duplicate
            async with client.reader("t", start="earliest", stop_at_end=True) as reader:
                found = [m async for m in reader]
            assert [m.value for m in found] == [b"first", b"second", b"third"]
            # The first result, not just the same place: the time of the first append too.
            assert found[1].append_time == result.append_time

    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(run(broker))


def test_request_cut_in_the_middle_is_sent_again(tmp_path: Path) -> None:
    async def run(broker: BrokerProcess) -> None:
        async with Proxy(broker.address) as proxy, tailrace.connect(proxy.url) as client:
            await client.admin().create_topic("t", partitions=1)
            cut = []

            def cut_requests(pipe: Pipe, way: str, piece: bytes) -> bool:
                if way == "up" and TAG in piece[: PREFIX_BYTES + 20] and len(cut) < 2:
                    cut.append(PREFIX.unpack_from(piece)[1])
                    return False
                return True

            proxy.watch = cut_requests
            async with client.producer("t") as producer:
                result = await producer.publish(b"x" * 500_000)
            assert result.offset == 0
            assert len(cut) == 2

    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(run(broker))


async def cuts_under_load(broker: BrokerProcess, cuts: int, seed: int) -> None:
    rng = random.Random(seed)
    async with tailrace.connect(broker.url) as client:
        await client.admin().create_topic("synced", partitions=3)
        await client.admin().create_topic("written", partitions=2, durability="interval")
    async with Proxy(broker.address) as proxy:
        load = Load(proxy.url, ["synced", "written"], seed)
        load.start(producers=3)
        for _ in range(cuts):
            await load.until_acknowledged(rng.randrange(1, 150))
            proxy.delay_s = rng.choice((0.0, 0.0, 0.01))
            # Some connections only, or all; sometimes bytes vanish for a moment before the cut.
            if rng.random() < 0.3:
                proxy.holes = {rng.choice(("up", "down"))}
                await asyncio.sleep(0.02)
            for pipe in list(proxy.pipes):
                if rng.random() < 0.7:
                    pipe.cut()
            if proxy.holes:
                proxy.cut()  # A stream with a hole is of no use any more.
            proxy.holes = set()
        proxy.delay_s = 0.0
        await load.until_acknowledged(100)
        await load.finish()
        assert proxy.accepted > cuts
    report = check(load.history).expect_clean()
    assert report.unknown == 0


def test_cut_connections_under_load(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(cuts_under_load(broker, cuts=15, seed=5))
        assert broker.stop() == 0
        assert "Traceback" not in broker.words()


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(20, 26))
def test_many_cut_connections(tmp_path: Path, seed: int) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(cuts_under_load(broker, cuts=200, seed=seed))
        assert broker.stop() == 0
