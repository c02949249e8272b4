"""Peers that speak garbage, vanish or break off at any byte leave nothing in the log, on either side."""

import asyncio
import gc
import logging
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest
import uvloop

from tailrace.broker.runtime.clock import SystemClock
from tailrace.client.rpc.calls import ask
from tailrace.client.rpc.transport import NetworkVerbs
from tailrace.core.model.commands import ListTopics, Pong, TopicList
from tailrace.errors import TailraceError
from tailrace.format import codec
from tailrace.format.wire import PREAMBLE, PROTOCOL_VERSION, Hello, Welcome, prefix
from tailrace.protocols.http import HttpListener
from tailrace.protocols.native import Limits, Listener

LIMIT_S = 60.0
TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(189))
HELLO = PREAMBLE + prefix(msgspec.msgpack.encode(Hello([PROTOCOL_VERSION], "peer")), 0, 0)
ASKED = HELLO + prefix(codec.encode_request(ListTopics()), 0, 1)
WELCOME = prefix(msgspec.msgpack.encode(Welcome(PROTOCOL_VERSION, "node", 1 << 20, 100, 60_000)), 0, 0)
ANSWERED = WELCOME + prefix(codec.encode_reply(TopicList([])), 0, 1)
WORDS = [
    b"",
    b"\n",
    b"garbage\n",
    b"garbage\r\n\r\n",
    b"GET",
    b"GET / HTTP/1.1\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 50,
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc",
    b"\xff\xfe" * 50 + b"\r\n\r\n",
    b"A" * 20_000,
    b"X" * 400_000,
    TLS_HELLO,
    TLS_HELLO[:20],
    HELLO[:4],
    HELLO,
    HELLO + b"\xff" * 100,
    HELLO + prefix(b"\xc1\xc1", 0, 1),
    ASKED,
    ASKED * 2,
]
NEW_LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(params=NEW_LOOPS, ids=["asyncio", "uvloop"])
def play(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """Runs a scenario on a loop; whatever is said about peers fails the test, unretrieved futures too."""

    def run(scenario: Coroutine[Any, Any, None]) -> None:
        loop = request.param()
        noise: list[Any] = []
        loop.set_exception_handler(lambda loop, context: noise.append(context))
        try:
            loop.run_until_complete(asyncio.wait_for(scenario, LIMIT_S))
            gc.collect()
            loop.run_until_complete(asyncio.sleep(0))
        finally:
            loop.close()
        assert noise == []

    yield run
    gc.collect()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert capfd.readouterr().err == ""


def call(address: tuple[str, int], words: bytes, ending: str) -> None:
    """A peer says something and goes away, in a thread of its own."""
    with socket.create_connection(address, 10) as peer:
        try:
            if ending == "before":
                peer.shutdown(socket.SHUT_RD)
            peer.sendall(words)
            if ending == "reset":
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif ending == "half":
                peer.shutdown(socket.SHUT_WR)
                peer.settimeout(10)
                while peer.recv(65536):
                    pass
            elif ending == "late":  # Takes the beginning of the answer, then resets.
                peer.settimeout(0.05)
                peer.recv(10)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass  # The listener may be quicker.


ENDINGS = ("close", "reset", "half", "late", "before")


async def visit(address: tuple[str, int], ending: str) -> None:
    for words in WORDS:
        await asyncio.to_thread(call, address, words, ending)


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_http_port_says_nothing_about_its_peers(play: Any, ending: str) -> None:
    async def scenario() -> None:
        listener = HttpListener(reasons=list, metrics=lambda: b"x 1\n" * 1000, request_seconds=0.2)
        address = await listener.start("127.0.0.1", 0)
        await visit(address, ending)
        while listener._tasks:
            await asyncio.wait(set(listener._tasks))
        await listener.close()

    play(scenario())


class Verbs:
    """See `protocols.native.Verbs`: answers at once."""

    def submit(self, request: Any, body: Any, respond: Any, gate: Any) -> None:
        respond(TopicList([]) if isinstance(request, ListTopics) else Pong(), ())

    def gather(self, gathering: bool, later: bool = False) -> None:
        pass


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_native_port_says_nothing_about_its_peers(play: Any, ending: str) -> None:
    async def scenario() -> None:
        listener = Listener(Verbs(), SystemClock(), Limits(drain_ms=100), "node")
        address = await listener.start("127.0.0.1", 0)
        await visit(address, ending)
        await listener.stop(0.1)

    play(scenario())


async def broken_off(answer: bytes, reset: bool) -> None:
    """A broker that says this much and is gone: the client knows what to say to whoever asked, and no one
    else."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(len(HELLO))
        writer.write(answer)
        if reset:
            await asyncio.sleep(0)
            writer.transport.abort()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    verbs = NetworkVerbs([server.sockets[0].getsockname()[:2]])
    try:
        await verbs.open(0.05)
        await ask(verbs, ListTopics(), 0.05)
    except TailraceError:
        pass
    await verbs.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_broker_that_is_gone_at_any_byte_makes_no_noise(play: Any, reset: bool) -> None:
    async def scenario() -> None:
        for end in range(len(ANSWERED) + 1):
            await broken_off(ANSWERED[:end], reset)
        for nonsense in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 64, TLS_HELLO, bytes(64)):
            await broken_off(nonsense, reset)
            await broken_off(WELCOME + nonsense, reset)
        for at in range(len(WELCOME)):
            await broken_off(WELCOME[:at] + bytes([WELCOME[at] ^ 0x55]) + WELCOME[at + 1 :], reset)

    play(scenario())


def test_a_broker_that_is_gone_before_anybody_awaits_its_greeting_makes_no_noise(play: Any) -> None:
    """The connection is made and lost while the client is still on its way to look at it."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        for _ in range(50):
            verbs = NetworkVerbs([address])
            opening = loop.create_task(verbs.open(5))
            await asyncio.sleep(0.001)
            opening.cancel()
            await asyncio.wait([opening])
            await verbs.close()
        server.close()
        await server.wait_closed()

    play(scenario())
