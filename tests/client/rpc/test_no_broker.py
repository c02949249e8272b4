"""No broker, or not a broker: who connects is told at once and in words, waits only when asked to, and hears
in the log of a connection that is lost and made again.

Covers `connect.py`.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import tailrace
from tailrace import sync
from tailrace.broker.engine import Engine
from tailrace.broker.node import Node
from tailrace.client.rpc import transport
from tailrace.client.rpc.transport import NetworkVerbs
from tailrace.config import ServerOptions
from tailrace.errors import InvalidRequest, Unavailable
from tailrace.format.wire import PREAMBLE

SOON_S = 10.0
"""Far below the timeout of a call (30 s), and enough for a busy machine."""


@pytest.fixture
def free_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    begun_s = time.monotonic()
    yield
    assert time.monotonic() - begun_s < SOON_S


def options(folder: Path, port: int) -> ServerOptions:
    return ServerOptions(data=str(folder), listen=f"127.0.0.1:{port}", http_listen="127.0.0.1:0")


async def attempt(url: str, wait: float = 0.0) -> None:
    async with tailrace.connect(url, wait=wait):
        pass


def test_nobody_there_is_told_at_once_with_the_command_that_helps(free_port: int) -> None:
    url, command = f"tailrace://127.0.0.1:{free_port}", f"`tailrace serve --listen 127.0.0.1:{free_port}`"
    told = f"no broker at 127.0.0.1:{free_port}: nobody listens there; start one with {command}"
    with at_once(), pytest.raises(Unavailable) as caught:
        asyncio.run(attempt(url))
    assert (caught.value.message, caught.value.outcome) == (told, "none")
    with at_once(), pytest.raises(Unavailable, match="no broker at"), sync.connect(url):
        pass


def test_a_broker_that_comes_at_the_last_moment_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits two seconds asks until two seconds are over, on a clock of the test's own."""

    async def scenario() -> list[float]:
        loop = asyncio.get_running_loop()
        now, asked = 100.0, list[float]()

        async def pause(seconds: float) -> None:
            nonlocal now
            now += seconds

        async def nobody(self: NetworkVerbs, timeout_s: float) -> int:
            asked.append(now - 100.0)
            raise Unavailable("no broker")

        with monkeypatch.context() as patched:
            patched.setattr(loop, "time", lambda: now)
            patched.setattr(asyncio, "sleep", pause)
            patched.setattr(NetworkVerbs, "_connect", nobody)
            with pytest.raises(Unavailable):
                await NetworkVerbs([("127.0.0.1", 1)]).open(2.0)
        return asked

    asked = asyncio.run(scenario())
    assert asked[0] == 0.0
    assert asked[-1] == 2.0
    assert len(asked) < 20


def test_of_several_hosts_each_is_told(free_port: int) -> None:
    with pytest.raises(Unavailable) as caught:
        asyncio.run(attempt(f"tailrace://127.0.0.1:{free_port},no-such-host.invalid:7400"))
    assert f"no broker at 127.0.0.1:{free_port}: nobody listens there; " in caught.value.message
    assert "the host name 'no-such-host.invalid' is not known" in caught.value.message


def test_a_name_that_is_not_known_is_not_answered_with_a_broker_to_start() -> None:
    with pytest.raises(Unavailable, match="the host name 'no-such-host") as caught:
        asyncio.run(attempt("tailrace://no-such-host.invalid"))
    assert "serve" not in caught.value.message


@pytest.mark.parametrize("client", ["async", "sync"])
def test_who_asks_to_wait_gets_the_broker_that_comes(
    tmp_path: Path, free_port: int, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tailrace.client")
    url, tried = f"tailrace://127.0.0.1:{free_port}", threading.Event()
    caplog.handler.addFilter(lambda record: tried.set() or True)

    def connect_blocking() -> None:
        with sync.connect(url, wait=60) as blocking:
            assert blocking.admin().list_topics() == []

    async def connect_async() -> None:
        async with tailrace.connect(url, wait=60) as aio:
            assert await aio.admin().list_topics() == []

    async def scenario() -> None:
        coming = asyncio.to_thread(connect_blocking) if client == "sync" else connect_async()
        task = asyncio.ensure_future(coming)
        assert await asyncio.to_thread(tried.wait, 30), "an attempt has failed"
        node = Node(options(tmp_path, free_port))
        await node.start()
        await task
        await node.stop()

    asyncio.run(scenario())
    assert "no broker at" in caplog.messages[0]
    assert f"connected to the broker at 127.0.0.1:{free_port}" in caplog.text


@pytest.mark.parametrize("wait", [-1, True, "long", float("inf"), float("nan")])
def test_the_wait_is_a_number_of_seconds(wait: float) -> None:
    with pytest.raises(InvalidRequest, match="wait: seconds"):
        tailrace.connect(wait=wait)


@pytest.mark.parametrize("url", ["127.0.0.1:7400", "tailrace:127.0.0.1:7400", "trailrace://127.0.0.1:7400"])
def test_a_mistyped_url_is_told_with_what_may_be_meant(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"unix:path or embedded:folder is needed, not"):
        tailrace.connect(url)


def test_a_broker_that_starts_says_so(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a client that waits for it is served once it has recovered."""
    recovering, go_on = threading.Event(), threading.Event()
    recover = Engine.recover

    def slow(engine: Engine, *more: object) -> None:
        recovering.set()
        assert go_on.wait(30)
        recover(engine)

    monkeypatch.setattr(Engine, "recover", slow)
    url = f"tailrace://127.0.0.1:{free_port}"

    async def scenario() -> None:
        node = Node(options(tmp_path, free_port))
        starting = asyncio.create_task(node.start())
        await asyncio.to_thread(recovering.wait, 30)
        with at_once(), pytest.raises(Unavailable, match="takes no connection now: the broker is starting"):
            await attempt(url)
        waiting = asyncio.create_task(attempt(url, wait=60))
        await asyncio.sleep(0)
        go_on.set()
        await starting
        await waiting
        await attempt(url)
        await node.stop()

    asyncio.run(scenario())


def test_a_start_that_fails_leaves_nobody_listening(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: Engine, *more: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Engine, "recover", fail)

    async def scenario() -> None:
        with pytest.raises(OSError, match="the disk is gone"):
            await Node(options(tmp_path, free_port)).start()
        with pytest.raises(Unavailable, match="nobody listens there"):
            await attempt(f"tailrace://127.0.0.1:{free_port}")

    asyncio.run(scenario())


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def against(script: Script) -> None:
    """Connect to something that is not a broker; fails, or the scenario is wrong."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await script(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        await NetworkVerbs([("127.0.0.1", port)]).open(wait_s=60, timeout_s=0.2)
    finally:
        server.close()
        for task in tasks:
            task.cancel()


def test_the_http_port_of_a_broker_is_told(tmp_path: Path, free_port: int) -> None:
    async def scenario() -> None:
        node = Node(options(tmp_path, free_port))
        await node.start()
        host, port = node.http_address
        try:
            with (
                at_once(),
                pytest.raises(InvalidRequest, match=rf"{host}:{port}: .*HTTP.*not the native port"),
            ):
                await attempt(f"tailrace://{host}:{port}", wait=60)
        finally:
            await node.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.9\r\n", b"-ERR unknown command 'TRLN'\r\n"])
def test_another_server_is_told_also_to_who_waits(greeting: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read()

    with at_once(), pytest.raises(InvalidRequest, match=r"127\.0\.0\.1:\d+: .*is not a Tailrace broker"):
        asyncio.run(against(speak))


def test_a_server_that_says_nothing_is_told() -> None:
    async def scenario() -> None:
        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(len(PREAMBLE))
            silent.set()
            await reader.read()

        silent = asyncio.Event()
        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        with pytest.raises(Unavailable, match=r"does not greet within 0\.2 s: is it a Tailrace broker"):
            await NetworkVerbs([address]).open(timeout_s=0.2)
        assert silent.is_set()
        server.close()

    asyncio.run(scenario())


def test_the_log_tells_of_loss_attempts_and_the_new_connection(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many attempts there are, few are told."""
    caplog.set_level(logging.DEBUG, "tailrace.client")
    monkeypatch.setattr(transport, "RECONNECT_PAUSE_S_MIN", 0.001)
    monkeypatch.setattr(transport, "RECONNECT_PAUSE_S_MAX", 0.001)
    attempts, enough = 0, asyncio.Event()
    connect = NetworkVerbs._connect

    async def counted(verbs: NetworkVerbs, timeout_s: float) -> int:
        nonlocal attempts
        attempts += 1
        if attempts == 50:
            enough.set()
        return await connect(verbs, timeout_s)

    monkeypatch.setattr(NetworkVerbs, "_connect", counted)
    where = f"127.0.0.1:{free_port}"

    async def scenario() -> None:
        node = Node(options(tmp_path, free_port))
        await node.start()
        async with tailrace.connect(f"tailrace://{where}", timeout=60) as client:
            assert not caplog.messages
            await node.stop()
            await enough.wait()
            node = Node(options(tmp_path, free_port))
            await node.start()
            assert await client.admin().list_topics() == []
        await node.stop()

    asyncio.run(scenario())
    told = [message for message in caplog.messages if where in message]
    assert told[0].startswith(f"lost the connection to the broker at {where}: ")
    assert told[1].startswith(f"no broker at {where}: nobody listens there")
    assert told[-1].startswith(f"connected to the broker at {where} after ")
    assert len(told) <= 3 + attempts // 50, told
    levels = {record.levelno for record in caplog.records[:2]}
    assert levels == {logging.WARNING}
    assert caplog.records[-1].levelno == logging.INFO


def test_a_client_that_is_closed_says_nothing(
    tmp_path: Path, free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tailrace.client")

    async def scenario() -> None:
        node = Node(options(tmp_path, free_port))
        await node.start()
        await attempt(f"tailrace://127.0.0.1:{free_port}")
        await node.stop()

    asyncio.run(scenario())
    assert not caplog.messages
