"""Connections of a client against scripted brokers on real sockets: greeting, loss, other hosts, probes.

Also covers `client/rpc/calls.py`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tailrace.client.rpc import calls
from tailrace.client.rpc.transport import NetworkVerbs
from tailrace.core.model.commands import ListTopics, Ping, Pong, Reply, TopicList
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import InvalidRequest, Unavailable
from tailrace.format import codec
from tailrace.format.wire import PREAMBLE, PREFIX, PREFIX_BYTES, PROTOCOL_VERSION, Welcome, prefix

Serve = Callable[["Peer"], Awaitable[None]]
LIMIT_S = 20.0


class Peer:
    """The broker's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def receive(self) -> tuple[int, bytes, bytes]:
        header_bytes, body_bytes, number = PREFIX.unpack(await self.reader.readexactly(PREFIX_BYTES))
        header = await self.reader.readexactly(header_bytes)
        return number, header, await self.reader.readexactly(body_bytes)

    def send(self, number: int, header: bytes, body: bytes = b"") -> None:
        self.writer.write(prefix(header, len(body), number) + body)

    async def greet(self, idle_ms: int = 60_000) -> None:
        assert await self.reader.readexactly(len(PREAMBLE)) == PREAMBLE
        number, _, _ = await self.receive()
        self.send(number, msgspec.msgpack.encode(Welcome(PROTOCOL_VERSION, "node", 1 << 20, 100, idle_ms)))

    async def echo(self) -> None:
        """Answer everything."""
        while True:
            number, header, _ = await self.receive()
            reply: Reply = Pong() if isinstance(codec.decode_request(header), Ping) else TopicList([])
            self.send(number, codec.encode_reply(reply))


class Broker:
    """A listening socket; each connection is served by the next script, the last one by all further ones."""

    def __init__(self, *scripts: Serve) -> None:
        self._scripts = list(scripts)
        self.connections = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "Broker":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await script(Peer(reader, writer))
        writer.close()


async def good(peer: Peer) -> None:
    await peer.greet()
    await peer.echo()


async def slam(peer: Peer) -> None:
    """Closes at once."""


def within(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario()

    asyncio.run(bounded())


async def ask(verbs: NetworkVerbs, request: Any = Ping()) -> Any:  # noqa: B008
    answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    verbs.submit(request, b"", lambda reply, parts: answer.set_result(reply))
    return await answer


async def ask_until_answered(verbs: NetworkVerbs) -> Any:
    return await calls.ask(verbs, ListTopics(), LIMIT_S)


def refusing(code: str) -> Serve:
    async def refuse(peer: Peer) -> None:
        await peer.reader.readexactly(len(PREAMBLE))
        await peer.receive()
        peer.send(0, codec.encode_reply(Refusal(code, "go away")))

    return refuse


def test_pipelined_requests_are_answered_each_with_its_own() -> None:
    async def backwards(peer: Peer) -> None:
        await peer.greet()
        requests = [await peer.receive() for _ in range(3)]
        for number, header, _ in reversed(requests):
            listing = isinstance(codec.decode_request(header), ListTopics)
            peer.send(number, codec.encode_reply(TopicList([]) if listing else Pong()))
        await peer.echo()

    async def scenario() -> None:
        async with Broker(backwards) as broker:
            verbs = NetworkVerbs([broker.address])
            await verbs.open(5)
            replies = await asyncio.gather(ask(verbs), ask(verbs, ListTopics()), ask(verbs))
            assert list(replies) == [Pong(), TopicList([]), Pong()]
            await verbs.close()
            assert (await ask(verbs)).message == "the client is closed"

    within(scenario)


def test_a_broken_connection_leaves_doubt_and_is_made_again() -> None:
    async def drop(peer: Peer) -> None:
        await peer.greet()
        await peer.receive()

    async def scenario() -> None:
        async with Broker(drop, good) as broker:
            verbs = NetworkVerbs([broker.address])
            await verbs.open(5)
            lost = await ask(verbs)
            assert (lost.code, lost.outcome) == ("unavailable", "unknown")
            down = await ask(verbs)
            assert (down.code, down.outcome) == ("unavailable", "none")
            assert await ask_until_answered(verbs) == TopicList([])
            assert broker.connections == 2
            await verbs.close()

    within(scenario)


def test_a_broker_that_greets_and_hangs_up_is_not_asked_without_end() -> None:
    greeted, many = 0, asyncio.Event()

    async def hang_up(peer: Peer) -> None:
        nonlocal greeted
        await peer.greet()
        greeted += 1
        if greeted > 8:
            many.set()

    async def scenario() -> None:
        async with Broker(hang_up) as broker:
            verbs = NetworkVerbs([broker.address])
            await verbs.open(5)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await many.wait()
            assert greeted > 1
            await verbs.close()

    within(scenario)


def test_an_answer_that_cannot_be_read_breaks_the_connection_and_is_not_lost() -> None:
    async def garble(peer: Peer) -> None:
        await peer.greet()
        number, _, _ = await peer.receive()
        peer.send(number, b"\xc1 this is no reply")
        await peer.echo()

    async def scenario() -> None:
        async with Broker(garble, good) as broker:
            verbs = NetworkVerbs([broker.address])
            await verbs.open(5)
            reply = await ask(verbs)
            assert (reply.code, reply.outcome) == ("unavailable", "unknown")
            assert await ask_until_answered(verbs) == TopicList([])
            await verbs.close()

    within(scenario)


def test_the_next_host_is_tried_whatever_is_wrong_with_the_first() -> None:
    async def scenario() -> None:
        async with Broker(slam) as slamming, Broker(refusing("overloaded")) as busy, Broker(good) as fine:
            verbs = NetworkVerbs([("127.0.0.1", 1), slamming.address, busy.address, fine.address])
            await verbs.open(5)
            assert await ask(verbs) == Pong()
            assert (slamming.connections, busy.connections, fine.connections) == (1, 1, 1)
            await verbs.close()

    within(scenario)


def test_a_refusal_for_good_is_told_at_once() -> None:
    async def scenario() -> None:
        async with Broker(refusing("invalid_request")) as broker:
            with pytest.raises(InvalidRequest, match="go away"):
                await NetworkVerbs([broker.address]).open(5)
            assert broker.connections == 1

    within(scenario)


@pytest.mark.parametrize("header", [b"\x93\xa4http", b"\x96\xa7welcome\x01\xa2\xff\xfe\x01\x01\x01"])
def test_what_is_no_broker_is_told(header: bytes) -> None:
    async def web(peer: Peer) -> None:
        await peer.reader.readexactly(4)
        peer.send(0, header)
        await peer.reader.read()

    async def scenario() -> None:
        async with Broker(web) as broker:
            with pytest.raises(InvalidRequest, match="not a Tailrace broker"):
                await NetworkVerbs([broker.address]).open(5)

    within(scenario)


def test_nobody_there_is_told_with_advice() -> None:
    async def scenario() -> None:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1: .*tailrace serve"):
            await NetworkVerbs([("127.0.0.1", 1)]).open(0.05)

    within(scenario)


def test_a_silent_broker_is_probed_then_left() -> None:
    async def silent(peer: Peer) -> None:
        await peer.greet(idle_ms=150)
        await peer.reader.read()

    async def scenario() -> None:
        async with Broker(silent, good) as broker:
            verbs = NetworkVerbs([broker.address])
            await verbs.open(5)
            reply = await ask(verbs)
            assert (reply.code, reply.outcome) == ("unavailable", "unknown")
            assert await ask_until_answered(verbs) == TopicList([])
            await verbs.close()

    within(scenario)


def test_an_idle_connection_is_kept_alive_by_probes() -> None:
    probes = 0
    enough = asyncio.Event()

    async def count(peer: Peer) -> None:
        nonlocal probes
        await peer.greet(idle_ms=150)
        while True:
            number, _, _ = await peer.receive()
            probes += 1
            peer.send(number, codec.encode_reply(Pong()))
            if probes == 3:
                enough.set()

    async def scenario() -> None:
        async with Broker(count) as broker:
            verbs = NetworkVerbs([broker.address])
            await verbs.open(5)
            await enough.wait()
            assert broker.connections == 1
            await verbs.close()

    within(scenario)
