"""Users of a real broker: what administrators change is felt by open connections within a second, and a
broker that is killed knows everybody afterwards."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.cluster.identity_file import EXPECTED, FILE
from tailrace.errors import Unauthenticated
from tests.e2e.broker_process import BrokerProcess, NotReady

PASSWORD = "correct horse"
FELT_S = 1.0


async def _until_refused(client: Any, error: type[Exception]) -> float:
    """Seconds until requests of a client are refused like this."""
    begin_s = time.monotonic()
    while True:
        try:
            await client.admin().list_topics()
        except error:
            return time.monotonic() - begin_s
        assert time.monotonic() - begin_s < 30


def _with(broker: BrokerProcess, user: str, password: str = PASSWORD) -> str:
    return broker.url.replace("://", f"://{user}:{password.replace(' ', '%20')}@")


def test_changes_are_felt_by_connections_that_are_open(tmp_path: Path) -> None:
    async def play(broker: BrokerProcess) -> None:
        async with tailrace.connect(broker.url) as nobody:
            await nobody.access().add_user("root", password=PASSWORD)
            assert await _until_refused(nobody, Unauthenticated) < FELT_S
        async with tailrace.connect(_with(broker, "root")) as root:
            await root.access().add_user("anna", password=PASSWORD)
            made = await root.access().create_token("ci", user="anna")
            by_token = tailrace.connect(broker.url, token=made.secret)
            by_password = tailrace.connect(_with(broker, "anna"))
            async with by_token as first, by_password as second:
                assert (await first.access().whoami()).user == "anna"
                assert (await second.access().whoami()).proof == "password"
                await root.access().revoke_token(made.id)
                assert await _until_refused(first, Unauthenticated) < FELT_S
                assert (await second.access().whoami()).user == "anna"
                await root.access().alter_user("anna", password="another secret")
                assert await _until_refused(second, Unauthenticated) < FELT_S
            async with tailrace.connect(_with(broker, "anna", "another secret")) as third:
                await third.access().whoami()
                await root.access().remove_user("anna")
                assert await _until_refused(third, Unauthenticated) < FELT_S
            assert (await root.access().whoami()).user == "root"

    with BrokerProcess(tmp_path / "data") as broker:
        broker.start()
        asyncio.run(play(broker))


def test_a_killed_broker_knows_everybody_and_one_that_lost_its_users_does_not_start(tmp_path: Path) -> None:
    async def add(broker: BrokerProcess) -> str:
        async with tailrace.connect(broker.url) as nobody:
            await nobody.access().add_user("root", password=PASSWORD)
        async with tailrace.connect(_with(broker, "root")) as root:
            return str((await root.access().create_token("ci")).secret)

    async def name(broker: BrokerProcess, token: str) -> str:
        async with tailrace.connect(broker.url, token=token) as client:
            return str((await client.access().whoami()).user)

    with BrokerProcess(tmp_path / "data") as broker:
        broker.start()
        token = asyncio.run(add(broker))
        broker.kill()
        broker.start()
        assert asyncio.run(name(broker, token)) == "root"
        broker.kill()
        (tmp_path / "data" / FILE).unlink()
        with pytest.raises(NotReady, match="is missing, and this broker had users"):
            broker.start()
        (tmp_path / "data" / EXPECTED).unlink()
        broker.start()
        written = broker.log.read_text()
        assert token not in written
        assert PASSWORD not in written
