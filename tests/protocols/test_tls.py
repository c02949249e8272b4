"""TLS of the listeners over real sockets: files and their replacement, versions, names of clients, strangers.

What happens at a TLS port before the greeting is in `test_handshakes.py`.
"""

import asyncio
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from tailrace.broker.runtime.clock import SystemClock
from tailrace.core.model.access import Caller, Origin
from tailrace.core.model.commands import Ping, Pong
from tailrace.core.model.identifiers import Refusal
from tailrace.format import codec
from tailrace.format.wire import PREAMBLE, PREFIX, PREFIX_BYTES, Credentials, Hello, Welcome, prefix
from tailrace.protocols import native
from tailrace.protocols.native import Limits, Listener
from tailrace.protocols.tls import TlsFiles, TlsOptions, Unusable, peer_names, spoken, tls_problem
from tests.client.rpc.certificates import DAY, Authority

LIMIT_S = 60.0
HELLO = PREAMBLE + prefix(msgspec.msgpack.encode(Hello([1], "peer")), 0, 0)
PING = prefix(codec.encode_request(Ping()), 0, 1)


def play(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario

    uvloop.run(bounded())


class PongVerbs:
    """Answers every request at once."""

    def submit(self, request: Any, body: Any, respond: Any, gate: Any) -> None:
        respond(Pong(), ())

    def gather(self, gathering: bool, later: bool = False) -> None:
        pass


class Noting:
    """An `Authenticator` that lets everybody in, and notes where they come from."""

    def __init__(self) -> None:
        self.origins: list[Origin] = []
        self.ended: Refusal | None = None

    def authenticate(
        self, credentials: Credentials | None, origin: Origin, done: Callable[[Caller | Refusal], None]
    ) -> None:
        self.origins.append(origin)
        done(Caller("somebody", "certificate"))

    def still(self, caller: Caller, now_us: int) -> Refusal | None:
        return self.ended


class Place:
    """A listener with TLS, the files of its certificate, and what its clients need."""

    def __init__(self, folder: Path, **options: str) -> None:
        self.authority = Authority(folder)
        certificate, key = self.authority.sign("server")
        self.options = TlsOptions(str(certificate), str(key), **options)
        self.noting = Noting()
        self.files = TlsFiles(self.options)
        self.listener = Listener(
            PongVerbs(),
            SystemClock(),
            Limits(drain_ms=100),
            "node",
            authenticator=self.noting,
            tls=self.files,
        )
        self.address = ("", 0)
        self.context = ssl.create_default_context(cafile=self.authority.path)

    async def connect(
        self, context: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            *self.address, ssl=context or self.context, server_hostname="localhost"
        )

    def replace(self, stem: str = "next", **options: Any) -> None:
        """A new certificate takes the place of the old one."""
        for new, old in zip(
            self.authority.sign(stem, **options), (self.options.certificate, self.options.key), strict=True
        ):
            os.replace(new, old)


@asynccontextmanager
async def place_in(folder: Path, **options: str) -> AsyncIterator[Place]:
    place = Place(folder, **options)
    place.address = await place.listener.start("127.0.0.1", 0)
    try:
        yield place
    finally:
        await place.listener.stop(0.1)


async def message(reader: asyncio.StreamReader) -> bytes:
    """The header of the next message."""
    header_bytes, body_bytes, _ = PREFIX.unpack(await reader.readexactly(PREFIX_BYTES))
    header = await reader.readexactly(header_bytes)
    await reader.readexactly(body_bytes)
    return header


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Welcome:
    writer.write(HELLO)
    return msgspec.msgpack.decode(await message(reader), type=Welcome)


async def ping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(PING)
    assert codec.decode_reply(await message(reader)) == Pong()


# -- files ------------------------------------------------------------------------------------------------


def test_what_is_wrong_with_the_options_is_told_by_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = map(str, authority.sign("server"))
    _, other_key = map(str, authority.sign("other"))
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    garbage.chmod(0o600)
    ca = str(authority.path)
    cases = [
        (TlsOptions(certificate), "key", "is missing"),
        (TlsOptions("", key), "certificate", "is missing"),
        (TlsOptions("", "", ca), "certificate", "client certificates are part of TLS"),
        (TlsOptions(certificate, key, ca), "client_certificates", "has no effect"),
        (TlsOptions(certificate, key, "", "required"), "client_ca", "is missing"),
        (TlsOptions(certificate, key, str(garbage), "required"), "client_ca", "no certificates in PEM"),
        (TlsOptions(certificate, other_key), "certificate", "key values mismatch"),
        (TlsOptions(str(garbage), key), "certificate", "are not a certificate and its key"),
        (TlsOptions(certificate, str(tmp_path / "none")), "key", "No such file"),
        (TlsOptions(certificate, str(tmp_path)), "key", "is not a file"),
        (TlsOptions(certificate, "nul\0"), "key", "null byte"),
    ]
    for options, name, words in cases:
        problem = tls_problem(options)
        assert problem is not None
        assert problem[0] == name
        assert words in problem[1]
    assert tls_problem(TlsOptions()) is None
    assert tls_problem(TlsOptions(certificate, key)) is None
    assert tls_problem(TlsOptions(certificate, key, ca, "optional")) is None


def test_a_key_that_everybody_may_read_is_refused(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).sign("server")
    key.chmod(0o644)
    assert tls_problem(TlsOptions(str(certificate), str(key))) == (
        "key",
        f"every user of this machine may read {key}: run `chmod o-rwx {key}`",
    )
    key.chmod(0o640)
    assert tls_problem(TlsOptions(str(certificate), str(key))) is None


def test_an_encrypted_key_asks_nobody(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    certificate, key = Authority(tmp_path).sign("server")
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"secret")
    key.write_bytes(
        plain.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)
    )
    with pytest.raises(Unusable, match="the key is encrypted"):
        TlsFiles(TlsOptions(str(certificate), str(key)))


def test_a_new_certificate_is_for_new_connections(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with place_in(tmp_path) as place:
            old = await place.connect()
            await greet(*old)
            serials = {serial(old[1])}
            for number in range(5):
                place.replace(f"next {number}")
                place.files.check()
                new = await place.connect()
                await greet(*new)
                serials.add(serial(new[1]))
                await ping(*old)
                new[1].close()
            assert len(serials) == 6
            assert place.files.reloads == 5
            old[1].close()

    play(scenario())


def serial(writer: asyncio.StreamWriter) -> str:
    return str(writer.get_extra_info("ssl_object").getpeercert()["serialNumber"])


def test_a_broken_new_pair_is_told_once_and_the_old_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("server")
    files = TlsFiles(TlsOptions(str(certificate), str(key)))
    context = files.context

    def errors() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]

    new_certificate, new_key = authority.sign("new")
    os.replace(new_certificate, certificate)
    files.check()
    assert errors() == [], "the key may be on its way"
    for _ in range(5):
        files.check()
    assert len(errors()) == 1
    assert "the old one stays" in errors()[0]
    assert "are not a certificate and its key" in (files.trouble or "")
    assert files.context is context
    os.replace(new_key, key)
    files.check()
    assert files.context is not context
    assert files.trouble is None
    key.unlink()
    for _ in range(5):
        files.check()
    assert len(errors()) == 2
    assert "No such file" in errors()[1]
    assert files.reloads == 1


@pytest.mark.parametrize(
    ("begins", "ends", "words"),
    [
        (-DAY, 30 * DAY, None),
        (-DAY, 3 * DAY, "the certificate ends at 20"),
        (-3 * DAY, -DAY, "clients refuse the certificate: it has expired"),
        (DAY, 30 * DAY, "clients refuse the certificate: it is not valid yet"),
    ],
)
def test_dates_of_the_certificate_are_watched(
    tmp_path: Path, begins: timedelta, ends: timedelta, words: str | None
) -> None:
    certificate, key = Authority(tmp_path).sign("server", begins=begins, ends=ends)
    trouble = TlsFiles(TlsOptions(str(certificate), str(key))).trouble
    assert trouble == words or (words is not None and trouble is not None and trouble.startswith(words))


def test_a_certificate_that_ends_while_it_is_used_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = Authority(tmp_path).sign("server")
    files = TlsFiles(TlsOptions(str(certificate), str(key)))
    assert files.trouble is None
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 31 * 86_400)
    assert (files.trouble or "").startswith("clients refuse the certificate: it ended at 20")


def test_an_expired_pair_does_not_replace_a_good_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("server")
    files = TlsFiles(TlsOptions(str(certificate), str(key)))
    context = files.context
    for new, old in zip(authority.sign("old", begins=-3 * DAY, ends=-DAY), (certificate, key), strict=True):
        os.replace(new, old)
    for _ in range(3):
        files.check()
    assert files.context is context
    assert (files.trouble or "").endswith("it has expired")


def test_files_that_are_replaced_one_after_the_other_are_no_trouble(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("server")
    files = TlsFiles(TlsOptions(str(certificate), str(key)))
    for number in range(20):
        for new, old in zip(authority.sign(f"new {number}"), (certificate, key), strict=True):
            os.replace(new, old)
            files.check()
    assert files.reloads == 20
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_certificates_are_replaced_a_hundred_times_under_load(tmp_path: Path) -> None:
    """New connections all the time, and some that stay: no handshake and no request fails."""

    async def scenario() -> None:
        async with place_in(tmp_path) as place:
            over = asyncio.Event()
            counts = [0, 0]

            async def come_and_go() -> None:
                while not over.is_set():
                    reader, writer = await place.connect()
                    await greet(reader, writer)
                    await ping(reader, writer)
                    writer.close()
                    counts[0] += 1

            async def stay() -> None:
                reader, writer = await place.connect()
                await greet(reader, writer)
                while not over.is_set():
                    await ping(reader, writer)
                    counts[1] += 1
                writer.close()

            load = [asyncio.create_task(come_and_go()) for _ in range(3)]
            load += [asyncio.create_task(stay()) for _ in range(3)]
            for number in range(100):
                served = counts[0]
                place.replace(f"number {number}")
                place.files.check()
                while counts[0] == served and not any(task.done() for task in load):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            over.set()
            await asyncio.gather(*load)
            assert place.files.reloads == 100
            assert min(counts) > 100

    play(scenario())


# -- versions and clients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_versions_that_are_spoken(tmp_path: Path, version: ssl.TLSVersion) -> None:
    async def scenario() -> None:
        async with place_in(tmp_path) as place:
            place.context.minimum_version = place.context.maximum_version = version
            reader, writer = await place.connect()
            await greet(reader, writer)
            await ping(reader, writer)
            cipher = writer.get_extra_info("cipher")
            assert "GCM" in cipher[0] or "CHACHA20" in cipher[0]
            assert cipher[1] == version.name.replace("_", ".")
            assert not writer.get_extra_info("ssl_object").session_reused
            writer.close()

    play(scenario())


def test_a_change_of_users_ends_connections_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "SWEEP_S", 1000.0)

    async def scenario() -> None:
        async with place_in(tmp_path) as place:
            links = [await place.connect() for _ in range(3)]
            for link in links:
                await greet(*link)
            place.noting.ended = Refusal("unauthenticated", "user 'anna' is not valid any more", "none")
            place.listener.recheck()
            place.listener.recheck()
            for reader, writer in links:
                assert codec.decode_reply(await message(reader)) == place.noting.ended
                assert await reader.read() == b""
                writer.close()

    play(scenario())


NAMES = ("worker.example.com", "URI:spiffe://example.com/worker", "email:a@example.com", "192.0.2.7")
SEEN = (
    "DNS:worker.example.com",
    "URI:spiffe://example.com/worker",
    "email:a@example.com",
    "IP:192.0.2.7",
)


@pytest.mark.parametrize("kind", ["optional", "required"])
def test_names_of_a_client_certificate_reach_the_authenticator(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        ca = str(tmp_path / "ca.pem")
        async with place_in(tmp_path, client_ca=ca, client_certificates=kind) as place:
            place.context.load_cert_chain(*place.authority.sign("worker", NAMES))
            reader, writer = await place.connect()
            await greet(reader, writer)
            writer.close()
            (origin,) = place.noting.origins
            assert (origin.address, origin.tls, origin.loopback) == ("127.0.0.1", True, True)
            assert origin.certificate_names == SEEN

    play(scenario())


def test_a_client_without_certificate_is_told_where_one_is_required(tmp_path: Path) -> None:
    async def scenario() -> None:
        ca = str(tmp_path / "ca.pem")
        async with place_in(tmp_path, client_ca=ca, client_certificates="required") as place:
            reader, writer = await place.connect()
            writer.write(HELLO)
            refusal = codec.decode_reply(await message(reader))
            assert isinstance(refusal, Refusal)
            assert refusal.code == "unauthenticated"
            assert "client certificate" in refusal.message
            assert await reader.read() == b""
            writer.close()
            assert place.noting.origins == []

    play(scenario())


def test_a_certificate_of_somebody_else_or_of_yesterday_does_not_get_in(tmp_path: Path) -> None:
    async def scenario() -> None:
        ca = str(tmp_path / "ca.pem")
        async with place_in(tmp_path, client_ca=ca, client_certificates="optional") as place:
            stranger = Authority(tmp_path / "stranger").sign("worker", NAMES)
            late = place.authority.sign("late", NAMES, begins=-2 * DAY, ends=-DAY)
            for files in (stranger, late):
                context = ssl.create_default_context(cafile=place.authority.path)
                context.load_cert_chain(*files)
                with pytest.raises((OSError, asyncio.IncompleteReadError)):
                    await greet(*(await place.connect(context)))
            assert place.noting.origins == []

    play(scenario())


def test_names_that_no_rule_knows_are_left_out() -> None:
    names = (("DNS", "a"), ("DirName", ((("commonName", "x"),),)), ("Registered ID", "1.2.3"))
    assert peer_names({"subjectAltName": names, "subject": ()}) == ("DNS:a",)
    assert peer_names({}) == peer_names(None) == ()
    assert len(peer_names({"subjectAltName": [("DNS", str(number)) for number in range(1000)]})) == 64


# -- strangers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "tongue"),
    [
        (b"", None),
        (b"\x16", None),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03", None),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "tls"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x02", "old tls"),
        (b"\x16\x03\x00\x02\x00\x01\x00\x01\xfc\x03\x00", "old tls"),
        (b"\x16\x00" + bytes(9), "old tls"),
        (b"T", None),
        (b"TRLN", "native"),
        (b"TRACE / HTTP/1.1", "http"),
        (b"GET / HTTP/1.1", "http"),
        (b"\x80\x2e\x01\x00\x02", "unknown"),
        (b"\0", "unknown"),
    ],
)
def test_the_first_bytes_tell_what_is_spoken(first: bytes, tongue: str | None) -> None:
    assert spoken(first) == tongue


async def said(address: tuple[str, int], first: bytes) -> bytes:
    """What a listener answers to these bytes, up to its end."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(first)
    try:
        return await reader.read()
    finally:
        writer.close()


def test_strangers_are_answered_in_their_own_language(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with place_in(tmp_path) as place:
            native = await said(place.address, HELLO)
            refusal = codec.decode_reply(native[PREFIX_BYTES:])
            assert isinstance(refusal, Refusal)
            assert "tailraces://" in refusal.message
            web = await said(place.address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert web.startswith(b"HTTP/1.1 400 ")
            assert b"https://" in web
            assert await said(place.address, b"\xff\xfe") == b""
            assert not place.listener.links

    play(scenario())
    told = [record.getMessage() for record in caplog.records if record.name == "tailrace.doorway"]
    assert told == [
        f"127.0.0.1: speaks {tongue} where TLS is spoken" for tongue in ("native", "http", "unknown")
    ]


def test_old_versions_get_an_alert(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with place_in(tmp_path) as place:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(place.authority.path)
            context.set_ciphers("ALL:@SECLEVEL=0")
            with pytest.warns(DeprecationWarning, match="deprecated"):
                context.minimum_version = ssl.TLSVersion.TLSv1
            with pytest.warns(DeprecationWarning, match="deprecated"):
                context.maximum_version = ssl.TLSVersion.TLSv1_1
            with pytest.raises(ssl.SSLError, match="ALERT_PROTOCOL_VERSION"):
                await place.connect(context)

    play(scenario())


def test_tls_at_a_port_without_it_gets_an_alert(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        listener = Listener(PongVerbs(), SystemClock(), Limits(drain_ms=100), "node")
        address = await listener.start("127.0.0.1", 0)
        with pytest.raises(ssl.SSLError, match="ALERT_HANDSHAKE_FAILURE"):
            await asyncio.open_connection(*address, ssl=True, server_hostname="localhost")
        await listener.stop(0.1)

    play(scenario())
    assert "speaks TLS at a port without it" in caplog.text
