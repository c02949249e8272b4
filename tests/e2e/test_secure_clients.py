"""Clients of a real broker with TLS, users and Unix sockets: who is taken, who is told what, who gives up.

Secrets of clients are looked for in everything that is written: logs of both sides, errors and their causes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace import sync
from tailrace.errors import InvalidRequest, TailraceError, Unauthenticated
from tailrace.spark.link import BrokerLink, link_to
from tailrace.spark.options import read_options
from tests.client.rpc.certificates import DAY, Authority
from tests.e2e.broker_process import SRC, BrokerProcess

LIMIT_S = 90.0
PASSWORD = "correct-horse/battery@staple"
ENCODED = "correct-horse%2Fbattery%40staple"


@pytest.fixture(autouse=True)
def no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


class SecureBroker:
    """A broker with TLS and its administrator."""

    def __init__(self, broker: BrokerProcess, authority: Authority) -> None:
        self.process = broker
        self.ca = str(authority.path)
        self.url = broker.url.replace("tailrace://", "tailraces://")
        self.token = (broker.data / "admin.token").read_text().strip()

    def client(self, **more: Any) -> tailrace.Client:
        return tailrace.connect(self.url, **{"ca": self.ca, "token": self.token, "timeout": 30, **more})


@contextlib.contextmanager
def secured(folder: Path, authority: Authority, *flags: str, clients: str = "none") -> Iterator[SecureBroker]:
    cert, key = authority.sign("server")
    settings = f'[tls]\ncertificate = "{cert}"\nkey = "{key}"\n'
    if clients != "none":
        settings += f'client_ca = "{authority.path}"\nclient_certificates = "{clients}"\n'
    config = folder / "tailrace.toml"
    config.write_text(settings)
    with BrokerProcess(folder / "data", "--config", str(config), *flags) as broker:
        broker.start()
        yield SecureBroker(broker, authority)
        broker.stop()


def play(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, LIMIT_S))


async def error_of(client: tailrace.Client) -> TailraceError:
    try:
        async with client:
            pass
    except TailraceError as error:
        return error
    raise AssertionError("it was taken")


def test_everything_that_a_client_may_do_works_over_tls(tmp_path: Path, authority: Authority) -> None:
    async def scenario(broker: SecureBroker) -> None:
        async with broker.client() as root:
            await root.access().add_user("anna", password=PASSWORD, administrator=True)
            await root.admin().create_topic("t", partitions=2)
        url = broker.url.replace("://", f"://anna:{ENCODED}@")
        async with tailrace.connect(f"{url}?ca={broker.ca}") as anna:
            assert (await anna.access().whoami()).user == "anna"
            async with anna.producer("t") as producer:
                await (await producer.send_many([b"x" * 100_000 + b"%d" % number for number in range(100)]))
            async with anna.consumer("t", "g") as consumer:
                for _ in range(100):
                    await (await anext(consumer)).ack()
            async with anna.reader("t", start="earliest", stop_at_end=True) as reader:
                assert len([message async for message in reader]) == 100

    with secured(tmp_path, authority) as broker:
        play(scenario(broker))
        with sync.connect(broker.url, token=broker.token, ca=broker.ca) as client:
            assert [topic.name for topic in client.admin().list_topics()] == ["t"]
        written = broker.process.words()
        assert PASSWORD not in written
        assert broker.token not in written


def test_what_is_wrong_is_told_by_the_client(tmp_path: Path, authority: Authority) -> None:
    async def scenario(broker: SecureBroker) -> None:
        port = broker.url.rpartition(":")[2]
        for url, given, kind, told in (
            (broker.url, {"ca": broker.ca}, Unauthenticated, "credentials"),
            (broker.url, {"ca": broker.ca, "token": "wrong"}, Unauthenticated, "of the argument token"),
            (broker.url, {"token": broker.token}, InvalidRequest, "by nobody that this machine trusts"),
            (f"tailrace://127.0.0.1:{port}", {"token": broker.token}, InvalidRequest, "speaks TLS"),
        ):
            error = await error_of(tailrace.connect(url, **given))
            assert isinstance(error, kind), error
            assert told in error.message
            assert broker.token not in error.message

    with secured(tmp_path, authority) as broker:
        play(scenario(broker))
    with BrokerProcess(tmp_path / "plain") as plain:
        plain.start()
        url = plain.url.replace("tailrace://", "tailraces://")

        async def confused() -> None:
            error = await error_of(tailrace.connect(url, ca=str(authority.path)))
            assert "does not speak TLS; tailrace://" in error.message

        play(confused())


def test_a_certificate_is_a_login(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.sign("worker", ["worker.example.com"])
    files = {"cert": str(cert), "key": str(key)}

    async def scenario(broker: SecureBroker) -> None:
        async with broker.client(**files) as root:
            await root.access().add_user("worker", certificates=["DNS:worker.example.com"])
        async with broker.client(token=None, **files) as worker:
            caller = await worker.access().whoami()
            assert (caller.user, caller.proof) == ("worker", "certificate")
        error = await error_of(broker.client())
        assert isinstance(error, Unauthenticated)
        assert "client certificate" in error.message

    with secured(tmp_path, authority, clients="required") as broker:
        play(scenario(broker))


@contextlib.asynccontextmanager
async def busy(client: tailrace.Client) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """A reader that waits, a consumer that waits, and one that works with a handler, on one client."""
    async with client.reader("t", start="latest") as reader, client.consumer("t", "waits") as consumer:
        tasks = [asyncio.ensure_future(anext(reader)), asyncio.ensure_future(anext(consumer))]
        yield tasks
        for task in tasks:
            task.cancel()


def test_a_token_that_is_revoked_ends_everything_that_waits(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    texts: list[str] = []

    async def scenario(broker: SecureBroker) -> None:
        async with broker.client() as root:
            await root.access().add_user("anna", administrator=True)
            made = await root.access().create_token("ci", user="anna")
            await root.admin().create_topic("t", partitions=1)
            client = broker.client(token=made.secret)
            async with client, client.producer("t") as producer:
                await producer.publish(b"before")
                async with contextlib.AsyncExitStack() as stack:
                    waiting = await stack.enter_async_context(busy(client))
                    with contextlib.suppress(TailraceError):
                        await root.access().revoke_token(made.id)
                        done, pending = await asyncio.wait(waiting, timeout=20)
                        assert not pending
                        for task in done:
                            error = task.exception()
                            if error is None:
                                continue  # The consumer got the message that was there.
                            assert isinstance(error, Unauthenticated), repr(error)
                            texts.append("".join(traceback.format_exception(error)))
                for call in (client.admin().list_topics(), producer.publish(b"after")):
                    with pytest.raises(Unauthenticated) as caught:
                        await call
                    texts.append(f"{caught.value!r} {caught.value.details}")
            written = broker.process.words() + caplog.text + "".join(texts)
            assert made.secret not in written
            assert broker.token not in written
            assert caplog.text.count("gives up") == 1

    with secured(tmp_path, authority) as broker:
        play(scenario(broker))


def test_commands_that_keep_running_end_when_their_token_does(tmp_path: Path) -> None:
    commands = (["consume", "t", "--group", "g"], ["read", "t", "--follow", "--from", "earliest"])
    with BrokerProcess(tmp_path / "data") as broker, contextlib.ExitStack() as stack:
        broker.start()
        with sync.connect(broker.url) as nobody:
            nobody.access().add_user("root", password=PASSWORD)
        url = broker.url.replace("://", f"://root:{ENCODED}@")
        with sync.connect(url) as root:
            root.admin().create_topic("t", partitions=1)
            root.groups().create("g", "t", start="earliest")
            with root.producer("t") as producer:
                producer.publish(b"first")
            for arguments in commands:
                made = root.access().create_token(arguments[0])
                process = stack.enter_context(_command(arguments, broker.url, made.secret))
                stack.callback(process.kill)
                assert process.stdout is not None
                assert b"first" in process.stdout.readline()
                root.access().revoke_token(made.id)
                told = process.communicate(timeout=30)[1].decode()
                assert process.returncode == 6
                assert "error: 127.0.0.1:" in told
                assert "of TAILRACE_TOKEN" in told
                assert made.secret not in told


def _command(arguments: list[str], url: str, token: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tailrace.cli", *arguments],
        env={**os.environ, "PYTHONPATH": SRC, "TAILRACE_URL": url, "TAILRACE_TOKEN": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_broker_whose_certificate_is_replaced_keeps_its_clients(
    tmp_path: Path, authority: Authority
) -> None:
    """An expired one keeps new clients out; those that wait come in as soon as there is a good one."""

    async def scenario(broker: SecureBroker) -> None:
        async with broker.client() as client:
            authority.sign("server", ends=-DAY / 2)
            broker.process.kill()
            broker.process.start()
            error = await error_of(broker.client())
            assert "has expired on" in error.message
            authority.sign("server")
            assert await client.admin(timeout=60).list_topics() == []

    with secured(tmp_path, authority) as broker:
        play(scenario(broker))


def test_a_unix_socket_of_a_real_broker(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tr") as short:
        path = f"{short}/tailrace.sock"
        with BrokerProcess(tmp_path / "data") as broker:
            broker.listen = f"127.0.0.1:0,unix:{path}"
            broker.start()

            async def scenario() -> None:
                async with tailrace.connect(f"unix:{path}") as client:
                    await client.access().add_user("root", password=PASSWORD)
                    assert (await client.access().whoami()).proof == "owner"

            play(scenario())


def test_links_of_spark_prove_themselves_and_show_no_secret(tmp_path: Path, authority: Authority) -> None:
    with secured(tmp_path, authority) as broker:
        given = {"url": broker.url, "token": broker.token, "ca": broker.ca, "topic": "t"}
        options = read_options(given)
        assert broker.token not in f"{options!r} {options.url} {options.url!r}"
        link = link_to(options.url, 10)
        assert link.topics() == []
        assert link_to(read_options(given).url, 10) is link
        assert broker.token not in f"{link.url} {vars(link)}"
        link.close()
        with pytest.raises(Unauthenticated) as caught:
            BrokerLink(read_options({**given, "token": "wrong-token"}).url, 1.0)
        assert "wrong-token" not in f"{caught.value.message}"
        assert link_to(options.url, 10) is not link
        link_to(options.url, 10).close()
