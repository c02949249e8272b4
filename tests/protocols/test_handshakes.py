"""Handshakes that are cut off at each byte, dribbled, replayed, oversized or never finished: bounded memory
and time, and others get in all the while.
"""

import asyncio
import contextlib
import gc
import logging
import os
import random
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tailrace.broker.runtime.clock import ManualClock
from tailrace.protocols import doorway
from tailrace.protocols.doorway import Doorway
from tailrace.protocols.edge_tuning import GREETING_US, HANDSHAKES_MAX
from tailrace.protocols.native import Limits, Listener
from tests.protocols.test_noise import ASKED, ENDINGS, WORDS, call
from tests.protocols.test_noise import HELLO as GREETING
from tests.protocols.test_tls import HELLO, PING, Place, PongVerbs, greet, ping, place_in, play

BATCH = 50


def client_hello(context: ssl.SSLContext | None = None) -> bytes:
    """The first message of a client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = context or ssl.create_default_context()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


async def usable(place: Place) -> None:
    """Somebody with manners gets in."""
    reader, writer = await place.connect()
    await greet(reader, writer)
    await ping(reader, writer)
    writer.close()


async def cut_off(address: tuple[str, int], words: bytes, reset: bool) -> None:
    """Say so much and go away."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(words)
    if reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
    else:
        writer.write_eof()
        async with asyncio.timeout(20):
            try:
                while await reader.read(65536):
                    pass
            except OSError:
                pass
        writer.close()


async def in_batches(count: int, one: Callable[[int], Awaitable[None]]) -> None:
    for first in range(0, count, BATCH):
        await asyncio.gather(*(one(number) for number in range(first, min(first + BATCH, count))))


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not check():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0)


@pytest.mark.parametrize("reset", [False, True], ids=["ended", "reset"])
def test_a_handshake_that_is_cut_off_at_each_byte(tmp_path: Path, reset: bool) -> None:
    hello = client_hello()
    assert len(hello) > 200

    async def scenario() -> None:
        async with place_in(tmp_path) as place:
            await in_batches(len(hello) + 1, lambda end: cut_off(place.address, hello[:end], reset))
            await until(lambda: place.listener.doorway.guests == 0)
            assert place.listener.doorway.handshakes == 0
            assert not place.listener.links
            await usable(place)

    play(scenario())


@pytest.mark.parametrize("reset", [False, True], ids=["ended", "reset"])
def test_a_greeting_that_is_cut_off_at_each_byte(reset: bool) -> None:
    async def scenario() -> None:
        listener = Listener(PongVerbs(), ManualClock(), Limits(drain_ms=100), "node")
        address = await listener.start("127.0.0.1", 0)
        await in_batches(len(ASKED) + 1, lambda end: cut_off(address, ASKED[:end], reset))
        await until(lambda: not listener.links)
        assert (listener.doorway.guests, listener.greeted) == (0, 0)
        await listener.stop(0.1)

    play(scenario())


def test_a_greeting_inside_tls_that_is_cut_off_at_each_byte(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with place_in(tmp_path) as place:

            async def one(end: int) -> None:
                _, writer = await place.connect()
                writer.write(GREETING[:end])
                writer.transport.abort() if end % 2 else writer.close()

            await in_batches(len(GREETING) + 1, one)
            await until(lambda: not place.listener.links and place.listener.doorway.guests == 0)
            assert (place.listener.greeted, place.listener.doorway.handshakes) == (0, 0)
            await usable(place)

    play(scenario())


def test_a_handshake_that_is_dribbled_byte_by_byte_succeeds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with place_in(tmp_path) as place:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = place.context.wrap_bio(incoming, outgoing, server_hostname="localhost")
            reader, writer = await asyncio.open_connection(*place.address)
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            async def dribble() -> None:
                for byte in outgoing.read():
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0)

            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    await dribble()
                    incoming.write(await reader.read(65536))
            client.write(HELLO)
            await dribble()
            answer = b""
            while not answer:
                incoming.write(await reader.read(65536))
                try:
                    answer = client.read(1000)
                except ssl.SSLWantReadError:
                    continue
            assert b"welcome" in answer
            writer.close()

    play(scenario())


def test_a_client_that_stops_in_its_handshake_has_little_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorway, "HANDSHAKE_S", 0.1)

    async def scenario() -> None:
        async with place_in(tmp_path) as place:
            reader, writer = await asyncio.open_connection(*place.address)
            writer.write(client_hello())
            async with asyncio.timeout(10):
                try:
                    while await reader.read(65536):
                        pass
                except ConnectionResetError:
                    pass
            writer.close()
            await until(lambda: place.listener.doorway.guests == 0)

    play(scenario())


def test_a_recorded_handshake_is_worth_nothing(tmp_path: Path) -> None:
    """Everything that a client sent, greeting included, sent again: nobody is greeted, nothing is asked."""

    async def scenario() -> None:
        async with place_in(tmp_path) as place:
            recorded: list[bytes] = []

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there = await asyncio.open_connection(*place.address)

                async def pump(
                    source: asyncio.StreamReader, sink: asyncio.StreamWriter, note: list[bytes] | None
                ) -> None:
                    while chunk := await source.read(65536):
                        if note is not None:
                            note.append(chunk)
                        sink.write(chunk)
                    sink.close()

                await asyncio.gather(pump(reader, there[1], recorded), pump(there[0], writer, None))

            server = await asyncio.start_server(relay, "127.0.0.1", 0)
            address = server.sockets[0].getsockname()
            reader, writer = await asyncio.open_connection(
                *address, ssl=place.context, server_hostname="localhost"
            )
            await greet(reader, writer)
            await ping(reader, writer)
            writer.close()
            await until(lambda: not place.listener.links)
            known = len(place.noting.origins)
            for _ in range(3):
                again_reader, again = await asyncio.open_connection(*place.address)
                for chunk in recorded:
                    again.write(chunk)
                try:
                    while await again_reader.read(65536):
                        pass
                except ConnectionResetError:
                    pass
                again.close()
            assert len(place.noting.origins) == known == 1
            server.close()

    play(scenario())


def test_oversized_and_broken_handshakes_end_at_once(tmp_path: Path) -> None:
    hello = client_hello()
    rng = random.Random(7)
    huge = b"\x16\x03\x01\xff\xff\x01\xff\xff\xfa\x03\x03"
    words = [huge + bytes(100_000), b"\x16\x03\x01\x40\x00\x01\xff\xff\xfa\x03\x03" + bytes(200_000)]
    for _ in range(150):
        broken = bytearray(hello)
        for _ in range(rng.randrange(1, 5)):
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        words.append(bytes(broken))

    async def scenario() -> None:
        async with place_in(tmp_path) as place:
            await in_batches(len(words), lambda number: cut_off(place.address, words[number], False))
            await until(lambda: place.listener.doorway.guests == 0)
            await usable(place)

    play(scenario())


def test_half_open_handshakes_do_not_keep_others_out(tmp_path: Path) -> None:
    """One address opens more handshakes than there are slots, and none of them goes on."""

    async def scenario() -> None:
        async with place_in(tmp_path) as place:
            hello = client_hello()
            stuck = []
            for number in range(HANDSHAKES_MAX + 100):
                reader, writer = await asyncio.open_connection(*place.address, local_addr=("127.0.0.2", 0))
                writer.write(hello[: len(hello) - number % 3])
                stuck.append((reader, writer))
            await until(lambda: place.listener.doorway.handshakes == HANDSHAKES_MAX)
            began_s = asyncio.get_running_loop().time()
            for _ in range(20):
                await usable(place)
            assert asyncio.get_running_loop().time() - began_s < 5
            assert place.listener.doorway.handshakes <= HANDSHAKES_MAX
            assert place.listener.doorway.turned_out >= 1
            for _, writer in stuck:
                writer.transport.abort()
            await until(lambda: place.listener.doorway.guests == 0)

    play(scenario())


def test_silent_connections_lose_their_places_to_new_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        place = Place(tmp_path)
        clock = ManualClock()
        place.listener.doorway = Doorway(clock, guests_max=100)
        place.address = await place.listener.start("127.0.0.1", 0)
        silent = [
            await asyncio.open_connection(*place.address, local_addr=("127.0.0.3", 0)) for _ in range(300)
        ]
        await usable(place)
        assert place.listener.doorway.guests <= 100
        assert place.listener.doorway.turned_out >= 200
        clock.set_us(clock.now_us() + GREETING_US + 1)
        place.listener.doorway.sweep()
        assert place.listener.doorway.guests == 0
        for reader, writer in silent:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        await place.listener.stop(0.1)

    play(scenario())


def spoil(place: Place, ending: str) -> None:
    """A peer finishes its handshake, greets, and then sends no TLS any more, or goes away rudely."""
    with socket.create_connection(place.address, 10) as plain:
        secured = place.context.wrap_socket(plain, server_hostname="localhost")
        with contextlib.suppress(OSError):
            secured.sendall(HELLO)
            assert secured.recv(4)
            if ending == "garbage":
                os.write(secured.fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
                secured.recv(100)
            elif ending == "plain":
                os.write(secured.fileno(), HELLO)
                secured.recv(100)
            elif ending == "reset":
                linger = struct.pack("ii", 1, 0)
                secured.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            elif ending == "flood":
                secured.settimeout(1)
                for _ in range(200):
                    secured.sendall(PING * 100)
        secured.close()


def test_a_port_with_tls_says_nothing_about_its_peers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noise: list[object] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
        async with place_in(tmp_path) as place:
            for ending in ENDINGS:
                for words in WORDS:
                    await asyncio.to_thread(call, place.address, words, ending)
            for ending in ("garbage", "plain", "reset", "flood", "close"):
                await asyncio.to_thread(spoil, place, ending)
            await until(lambda: not place.listener.links and place.listener.doorway.guests == 0)
            await usable(place)
        gc.collect()
        await asyncio.sleep(0)

    play(scenario())
    gc.collect()
    assert noise == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def without_1_3(hello: bytes) -> bytes:
    """The extension `supported_versions` names 1.2 twice."""
    at = hello.index(b"\x03\x04", hello.rindex(b"\x00\x2b\x00"))
    return hello[:at] + b"\x03\x03" + hello[at + 2 :]


def as_if_1_0(hello: bytes) -> bytes:
    """The old field of the version says 1.0."""
    return hello[:10] + b"\x01" + hello[11:]


@pytest.mark.parametrize("change", [without_1_3, as_if_1_0])
def test_nobody_between_can_make_a_client_speak_an_older_version(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    async def scenario() -> None:
        async with place_in(tmp_path) as place:

            async def tamper(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there = await asyncio.open_connection(*place.address)
                there[1].write(change(await reader.read(65536)))

                async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                    with contextlib.suppress(OSError):
                        while chunk := await source.read(65536):
                            sink.write(chunk)
                    sink.close()

                await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

            server = await asyncio.start_server(tamper, "127.0.0.1", 0)
            host, port = server.sockets[0].getsockname()
            with pytest.raises(ssl.SSLError):
                await asyncio.open_connection(host, port, ssl=place.context, server_hostname="localhost")
            server.close()
            await until(lambda: place.listener.doorway.guests == 0)
            assert place.noting.origins == []
            assert place.files.context.minimum_version is ssl.TLSVersion.TLSv1_2

    play(scenario())


def test_more_good_clients_than_slots_at_once_all_get_in(tmp_path: Path) -> None:
    """As after a restart of the broker, all from one address: they wait in line, and nobody is turned out."""

    async def scenario() -> None:
        async with place_in(tmp_path) as place:

            async def one() -> None:
                reader, writer = await place.connect()
                await greet(reader, writer)
                writer.close()

            await asyncio.gather(*(one() for _ in range(HANDSHAKES_MAX + 150)))
            assert place.listener.doorway.turned_out == 0
            assert len(place.noting.origins) == HANDSHAKES_MAX + 150

    play(scenario())


def test_a_handshake_may_end_at_each_step_of_the_loop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Between the first byte and the first answer a guest may be turned out at each step."""
    noise: list[object] = []
    hello = client_hello()

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
        async with place_in(tmp_path) as place:
            for steps in range(16):
                with socket.create_connection(place.address) as peer:
                    peer.setblocking(False)
                    await until(lambda: place.listener.doorway.guests == 1)
                    peer.send(hello)
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    place.listener.doorway.close()
                    with contextlib.suppress(ConnectionResetError):
                        while await asyncio.get_running_loop().sock_recv(peer, 65536):
                            pass
            await usable(place)

    play(scenario())
    gc.collect()
    assert noise == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
