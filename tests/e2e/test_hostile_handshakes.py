"""Hostile clients at a broker with TLS and users, while a good one publishes and reads: it must not notice.

What comes before a caller is known is cheap and bounded, also behind a handshake; for what comes after it see
`test_hostile_clients.py`.
"""

import asyncio
import contextlib
import random
import ssl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from bench import certificates
from tailrace.core.model.commands import Ping
from tailrace.core.model.identifiers import Refusal
from tailrace.format import codec
from tailrace.format.wire import PREAMBLE, PREFIX, PREFIX_BYTES, Credentials
from tests.e2e.broker_process import BrokerProcess, eventually
from tests.e2e.doors import encoded, greeting
from tests.e2e.good_client import GoodClient

pytestmark = pytest.mark.alone
WORST_MS = 2000.0
GROWTH_MB = 200.0
LEFT_MB = 120.0
HELLO_OF_TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
ASIDE = greeting(Credentials("anna", "not her password"))


class Fortress(msgspec.Struct):
    """A broker with TLS and its one good client."""

    broker: BrokerProcess
    good: GoodClient
    authority: str
    token: str
    base_mb: float


@pytest.fixture(scope="module")
def fortress(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fortress]:
    folder: Path = tmp_path_factory.mktemp("fortress")
    made = certificates.make(folder)
    config = folder / "tls.toml"
    config.write_text(f'[tls]\ncertificate = "{made.certificate}"\nkey = "{made.key}"\n')
    with BrokerProcess(folder / "data", "--config", str(config), "--log-level", "error").start() as broker:
        token = (broker.data / "admin.token").read_text().strip()
        url = f"tailraces://{broker.listen}?ca={quote(made.authority)}&token={quote(token)}"
        with GoodClient(url) as good:
            good.lap()
            yield Fortress(broker, good, made.authority, token, broker.anonymous_mb())
        assert broker.stop() == 0
        assert "Traceback" not in broker.words()


def attack(fortress: Fortress, run: Callable[[], Awaitable[Any]]) -> None:
    """Run an attack; the good client must not notice, memory stays bounded and comes back."""
    broker, peak_mb = fortress.broker, 0.0
    fortress.good.lap()
    files = broker.open_files()

    async def watch() -> None:
        nonlocal peak_mb
        while True:
            peak_mb = max(peak_mb, broker.anonymous_mb())
            await asyncio.sleep(0.02)

    async def bounded() -> None:
        watching = asyncio.create_task(watch())
        async with asyncio.timeout(60):
            await run()
        watching.cancel()

    asyncio.run(bounded())
    lap = fortress.good.lap()
    print(f"good client: {lap}; memory: {fortress.base_mb:.0f} MB, at most {peak_mb:.0f} MB")
    assert broker.running
    assert lap.failures == []
    assert lap.published > 0
    assert lap.worst_ms < WORST_MS
    assert peak_mb - fortress.base_mb < GROWTH_MB
    eventually(lambda: broker.open_files() <= files + 2, "connections are closed")
    eventually(lambda: broker.anonymous_mb() - fortress.base_mb < LEFT_MB, "memory comes back")


async def crowd(count: int, one: Callable[[int], Awaitable[Any]], *, at_once: int = 50) -> list[Any]:
    """Run many clients, some at a time."""
    results: list[Any] = []
    for first in range(0, count, at_once):
        results += await asyncio.gather(*(one(n) for n in range(first, min(first + at_once, count))))
    return results


async def pour(writer: asyncio.StreamWriter, megabytes: int = 100) -> bool:
    """Write so much, or until the broker has had enough; whether it took everything."""
    piece = b"A" * (1 << 20)
    try:
        for _ in range(megabytes):
            writer.write(piece)
            await writer.drain()
            if writer.transport.is_closing():  # Under TLS, what is written from now on is dropped in silence.
                return False
    except OSError:
        return False
    return True


async def through_tls(fortress: Fortress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection behind its handshake."""
    context = ssl.create_default_context(cafile=fortress.authority)
    return await asyncio.open_connection(*fortress.broker.address, ssl=context, server_hostname="127.0.0.1")


async def said(reader: asyncio.StreamReader) -> list[Any]:
    """What the broker says until it hangs up."""
    replies = []
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            header_bytes, body_bytes, _ = PREFIX.unpack(await reader.readexactly(PREFIX_BYTES))
            replies.append(codec.decode_reply(await reader.readexactly(header_bytes)))
            assert not body_bytes
    return replies


def test_hundred_megabytes_instead_of_a_handshake(fortress: Fortress) -> None:
    async def one(number: int) -> None:
        _, writer = await asyncio.open_connection(*fortress.broker.address)
        openings = (b"", HELLO_OF_TLS, PREAMBLE, b"\x16\x03\x01\xff\xff", b"GET / HTTP/1.1\r\n")
        writer.write(openings[number % len(openings)])
        try:
            assert not await pour(writer)
        finally:
            writer.transport.abort()

    attack(fortress, lambda: crowd(15, one))


def test_hundred_megabytes_behind_a_handshake(fortress: Fortress) -> None:
    async def one(number: int) -> None:
        reader, writer = await through_tls(fortress)
        openings = (
            b"",
            PREAMBLE + PREFIX.pack(100 << 20, 0, 0),
            PREAMBLE + PREFIX.pack(20, 100 << 20, 0),
            # The greeting is right but for the password; what follows waits in vain.
            ASIDE,
            ASIDE + PREFIX.pack(20, 60 << 20, 1),
        )
        writer.write(openings[number % len(openings)])
        try:
            if await pour(writer):  # It may all have been dropped here, because the broker had hung up.
                async with asyncio.timeout(5):
                    await said(reader)
        finally:
            writer.transport.abort()

    attack(fortress, lambda: crowd(10, one, at_once=5))


def test_connections_that_never_finish_their_handshake(fortress: Fortress) -> None:
    """More than there are slots for, and some that end in the middle of a record."""
    writers = []

    async def one(number: int) -> None:
        _, writer = await asyncio.open_connection(*fortress.broker.address)
        rng = random.Random(number)
        with contextlib.suppress(OSError):
            writer.write((HELLO_OF_TLS + rng.randbytes(506))[: rng.randrange(1, 517)])
        writers.append(writer)

    async def run() -> None:
        await crowd(400, one, at_once=100)
        # While all of them are there, somebody else gets in.
        async with asyncio.timeout(20):
            reader, writer = await through_tls(fortress)
            writer.write(greeting(Credentials(token=fortress.token)) + encoded(Ping(), b"", 1))
            assert (await reader.readexactly(PREFIX_BYTES))[:4] != b""
            writer.close()
        for each in writers:
            each.transport.abort()

    attack(fortress, run)


def test_requests_before_a_greeting_and_greetings_after_it(fortress: Fortress) -> None:
    """Sequences that no client sends: each is refused, and none is answered as if the order were right."""
    good, wrong = greeting(Credentials(token=fortress.token)), greeting(Credentials(token="trt_no"))
    ping = encoded(Ping(), b"", 7)
    before = [
        ping,
        PREAMBLE + ping,
        PREAMBLE + ping + good[4:],
        wrong + ping,
        wrong + good[4:] + ping,
    ]
    after = [good + good, good + good[4:], good + wrong[4:], good + PREAMBLE + ping]

    async def run() -> None:
        for data in before:
            reader, writer = await through_tls(fortress)
            writer.write(data)
            replies = await said(reader)
            assert replies
            assert all(isinstance(reply, Refusal) for reply in replies), (data, replies)
            writer.close()
        for data in after:
            reader, writer = await through_tls(fortress)
            writer.write(data)
            header_bytes, _, _ = PREFIX.unpack(await reader.readexactly(PREFIX_BYTES))
            assert b"welcome" in await reader.readexactly(header_bytes)
            header_bytes, _, _ = PREFIX.unpack(await reader.readexactly(PREFIX_BYTES))
            reply = codec.decode_reply(await reader.readexactly(header_bytes))
            assert isinstance(reply, Refusal), (data, reply)
            assert reply.code in ("invalid_request", "too_large")
            writer.close()

    attack(fortress, run)


def test_a_flood_of_wrong_logins(fortress: Fortress) -> None:
    """Passwords and tokens; who is right gets in beside them."""

    async def one(number: int) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await through_tls(fortress)
            secret = f"{number}" * 8
            credentials = Credentials(token=secret) if number % 2 else Credentials(f"user-{number}", secret)
            writer.write(greeting(credentials))
            replies = await said(reader)
            assert all(reply.code in ("unauthenticated", "overloaded") for reply in replies), replies
            writer.close()

    attack(fortress, lambda: crowd(150, one, at_once=75))
