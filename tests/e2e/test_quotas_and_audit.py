"""Quotas and the audit log with a real broker: clients go on at the pace of their quota, and all is told."""

import asyncio
import json
import stat
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.errors import Denied, Unauthenticated, Unavailable
from tests.e2e.broker_process import BrokerProcess, eventually

PASSWORD = "correct horse battery staple"


def as_root(broker: BrokerProcess) -> tailrace.Client:
    return tailrace.connect(f"tailrace://root:{PASSWORD.replace(' ', '%20')}@{broker.listen}")


def as_user(broker: BrokerProcess, token: str) -> tailrace.Client:
    return tailrace.connect(broker.url, token=token)


async def settle_in(broker: BrokerProcess, **quota: int) -> str:
    """Make an administrator, and Anna, who may do everything with topics and groups; her token."""
    async with tailrace.connect(broker.url) as client:
        await client.access().add_user("root", password=PASSWORD)
    async with as_root(broker) as client:
        access = client.access()
        await access.add_user("anna")
        await access.add_rule("allow", "user:anna", ["publish", "read", "consume", "settle"], "topic", "t*")
        await access.add_rule("allow", "user:anna", ["consume", "settle", "administer-group"], "group")
        if quota:
            await access.put_quota("user:anna", **quota)
        await client.admin().create_topic("t", partitions=2)
        return (await access.create_token("test", user="anna")).secret


def lines(broker: BrokerProcess) -> list[dict[str, Any]]:
    names = sorted(broker.data.glob("audit.log*"), reverse=True)
    return [json.loads(line) for path in names for line in path.read_text(encoding="ascii").splitlines()]


def test_a_producer_with_a_quota_on_bytes_goes_at_that_rate_without_an_error(tmp_path: Path) -> None:
    rate, count, size = 2_000_000, 600, 10_000

    async def run() -> None:
        token = await settle_in(broker, bytes_per_second=rate)
        async with as_user(broker, token) as client:
            began_s = time.monotonic()
            async with client.producer("t") as producer:
                # More than the time-out of its messages would allow if waiting for a quota counted.
                for _ in range(count):
                    await producer.send(bytes(size))
                await producer.flush()
            took_s = time.monotonic() - began_s
        least_s = (count * size - rate) / rate
        assert least_s <= took_s < 4 * least_s + 5
        async with as_root(broker) as client:
            info = await client.admin().describe_topic("t")
            assert sum(partition["end_offset"] for partition in info.partitions) == count

    with BrokerProcess(tmp_path / "data") as broker:
        broker.start()
        asyncio.run(run())


def test_a_reader_with_a_quota_on_bytes_goes_at_that_rate_without_an_error(tmp_path: Path) -> None:
    rate, count, size = 1_000_000, 500, 10_000

    async def run() -> None:
        token = await settle_in(broker, bytes_per_second=rate)
        async with as_root(broker) as client, client.producer("t") as producer:
            for _ in range(count):
                await producer.send(bytes(size))
        began_s = time.monotonic()
        async with as_user(broker, token) as client:
            options: dict[str, Any] = {"start": "earliest", "stop_at_end": True}
            async with client.reader("t", **options) as reader:
                assert sum([1 async for _ in reader]) == count
        took_s = time.monotonic() - began_s
        # Of the first second's worth and of what is owed for the last answer nobody waits for.
        assert (count * size - rate - 1_048_576) / rate * 0.9 <= took_s < 20

    with BrokerProcess(tmp_path / "data") as broker:
        broker.start()
        asyncio.run(run())


def test_a_consumer_with_a_quota_on_requests_gets_every_message_once(tmp_path: Path) -> None:
    count = 150

    async def run() -> None:
        token = await settle_in(broker, requests_per_second=30, in_flight_max=20)
        async with as_root(broker) as client, client.producer("t") as producer:
            for number in range(count):
                await producer.send(b"%d" % number)
        async with as_user(broker, token) as client:
            seen: list[bytes] = []
            async with client.consumer("t", group="g", start="earliest") as consumer:
                async for message in consumer:
                    seen.append(message.value or b"")
                    await message.ack()
                    if len(seen) == count:
                        break
        assert sorted(seen, key=int) == [b"%d" % number for number in range(count)]

    with BrokerProcess(tmp_path / "data") as broker:
        broker.start()
        asyncio.run(run())


def test_connections_above_the_quota_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        token = await settle_in(broker, connections_max=2)
        async with as_user(broker, token) as one, as_user(broker, token):
            with pytest.raises(Unavailable, match="2 open connections"):
                async with as_user(broker, token):
                    pass
            await one.admin().list_topics()
        async with as_user(broker, token) as again:
            await again.admin().list_topics()

    with BrokerProcess(tmp_path / "data") as broker:
        broker.start()
        asyncio.run(run())


def test_the_audit_log_tells_logins_refusals_and_administration(tmp_path: Path) -> None:
    async def run() -> str:
        token = await settle_in(broker)
        with pytest.raises(Unauthenticated):
            async with tailrace.connect(f"tailrace://root:wrong@{broker.listen}"):
                pass
        async with as_user(broker, token) as client:
            for _ in range(50):
                with pytest.raises(Denied):
                    await client.admin().delete_topic("t")
        return token

    with BrokerProcess(tmp_path / "data") as broker:
        broker.start()
        token = asyncio.run(run())
        assert broker.stop() == 0
        text = "".join(path.read_text() for path in broker.data.glob("audit.log*"))
        assert token not in text
        assert token.rpartition("_")[2] not in text
        assert PASSWORD not in text
        assert "wrong" not in text.replace("the credentials are wrong", "")
        found = lines(broker)
        assert stat.S_IMODE((broker.data / "audit.log").stat().st_mode) == 0o600
    first = found[0]
    assert (first["request"], first["proof"], first["outcome"]) == ("add_user", "open", "ok")
    assert first["address"] == "127.0.0.1"
    logins = [(line["user"], line["outcome"]) for line in found if line["what"] == "login"]
    assert ("root", "ok") in logins
    assert ("anna", "ok") in logins
    assert ("root", "unauthenticated") in logins
    made = [line for line in found if line["what"] == "administration" and line.get("user") == "root"]
    asked = [line["request"] for line in made]
    assert asked == ["add_user", "add_rule", "add_rule", "create_topic", "create_token"]
    refused = [line for line in found if line["what"] == "refused"]
    assert {line["request"] for line in refused} == {"delete_topic"}
    assert sum(line.get("count", 1) for line in refused) == 50, "the first, and 49 that were counted"
    assert [line["time"] for line in found] == sorted(line["time"] for line in found)


def test_the_audit_log_is_rotated_and_bounded(tmp_path: Path) -> None:
    async def run() -> None:
        async with tailrace.connect(broker.url) as client:
            for _ in range(120):
                await client.admin().create_topic("t", partitions=1, storage="memory")
                await client.admin().delete_topic("t")

    settings = {"audit_bytes_max": 65_536, "audit_files_max": 2}
    with BrokerProcess(tmp_path / "data", **settings) as broker:
        broker.start()
        (broker.data / "audit.log").write_text("x" * 65_000 + "\n")
        asyncio.run(run())
        assert broker.stop() == 0
        sizes = {path.name: path.stat().st_size for path in broker.data.glob("audit.log*")}
        assert set(sizes) == {"audit.log", "audit.log.1"}
        assert all(size <= 65_536 for size in sizes.values())
        text = (broker.data / "audit.log").read_text()
        assert len([json.loads(line) for line in text.splitlines()]) > 200


def test_a_broker_whose_audit_log_cannot_be_written_goes_on_and_says_so(tmp_path: Path) -> None:
    def page(name: str) -> str:
        with urllib.request.urlopen(f"http://{broker.http_listen}/{name}", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    async def run() -> None:
        async with tailrace.connect(broker.url) as client:
            await client.admin().create_topic("t", partitions=1)

    with BrokerProcess(tmp_path / "data") as broker:
        (broker.data / "audit.log").mkdir(parents=True)
        broker.start()
        asyncio.run(run())
        eventually(lambda: "audit.log cannot be written" in page("readyz"), "the warning is in /readyz")
        assert "tailrace_audit_failing 1.0" in page("metrics")
        asyncio.run(run_again(broker))
        (broker.data / "audit.log").rmdir()
        eventually(lambda: "tailrace_audit_failing 0.0" in page("metrics"), "it is written again")
        assert broker.stop() == 0
        assert [line["request"] for line in lines(broker)] == ["create_topic", "delete_topic"]


async def run_again(broker: BrokerProcess) -> None:
    async with tailrace.connect(broker.url) as client:
        await client.admin().delete_topic("t")
