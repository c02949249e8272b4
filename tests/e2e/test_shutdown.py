"""The end of a broker: graceful, in time, with all that was acknowledged; and starts that must fail.

Covers `broker/node.py` and `storage/lock.py`.
"""

import asyncio
import time
from pathlib import Path

import pytest

import tailrace
from tests.e2e.broker_process import BrokerProcess, NotReady
from tests.e2e.workload import Load
from tests.history.checker import check


def test_partitions_that_never_held_a_message_do_not_hold_up_the_end(tmp_path: Path) -> None:
    async def create(url: str) -> None:
        async with tailrace.connect(url) as client:
            await client.admin().create_topic("empty", partitions=4)

    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(create(broker.url))
        assert broker.stop() == 0
        assert "Traceback" not in broker.words()
        broker.start()
        assert broker.stop() == 0


def test_termination_under_load_loses_nothing_and_clients_come_back(tmp_path: Path) -> None:
    async def run(broker: BrokerProcess) -> None:
        async with tailrace.connect(broker.url) as client:
            await client.admin().create_topic("synced", partitions=2)
            await client.admin().create_topic("written", partitions=2, durability="interval")
        load = Load(broker.url, ["synced", "written"], seed=7)
        load.start(producers=2)
        for _ in range(3):
            await load.until_acknowledged(300)
            before = time.monotonic()
            assert await asyncio.to_thread(broker.stop) == 0
            # Long polls are answered and connections closed at once; nobody waits for the drain time of 10 s.
            assert time.monotonic() - before < 5
            await asyncio.to_thread(broker.start)
        await load.until_acknowledged(300)
        await load.finish()
        report = check(load.history).expect_clean()
        assert report.unknown == 0

    with BrokerProcess(tmp_path / "data").start() as broker:
        asyncio.run(run(broker))
        assert broker.stop() == 0
        assert "Traceback" not in broker.words()


def test_second_broker_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        second = BrokerProcess(tmp_path / "data")
        second.log = tmp_path / "second.log"
        with pytest.raises(NotReady) as caught, second:
            second.start()
        text = str(caught.value)
        assert "is in use by pid" in text
        assert str(broker.pid) in text
        assert "Traceback" not in text
        assert broker.running


@pytest.mark.parametrize("flag", ["--listen", "--http-listen"])
def test_taken_port_is_told_with_its_flag(tmp_path: Path, flag: str) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        second = BrokerProcess(tmp_path / "other")
        if flag == "--listen":
            second.listen = broker.listen
        else:
            second.http_listen = broker.http_listen
        with pytest.raises(NotReady) as caught, second:
            second.start()
        text = str(caught.value)
        assert f"{flag} HOST:PORT" in text
        assert "is taken by another process" in text
        assert "Traceback" not in text
