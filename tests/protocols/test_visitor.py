"""Who asks for the pages of health and metrics: credentials, what is remembered, and what each sees."""

import asyncio
import base64
import json
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tailrace.broker.runtime.clock import SystemClock
from tailrace.core.model.access import Caller, Origin
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import InvalidRequest
from tailrace.format.wire import Credentials
from tailrace.protocols.doorway import Doorway
from tailrace.protocols.http import HttpListener
from tailrace.protocols.tls import TlsFiles, TlsOptions
from tailrace.protocols.visitor import credentials_of
from tests.client.rpc.certificates import Authority
from tests.protocols.test_http import body, get, status

ANNA = Credentials("anna", "se:cret")
BASIC = "Basic " + base64.b64encode(b"anna:se:cret").decode()
OTHER = "Basic " + base64.b64encode(b"otto:x").decode()


class Known:
    """An `Authenticator` that knows anna by password, token or certificate, and otto."""

    def __init__(self) -> None:
        self.asked = 0
        self.later = False
        self.ended = False

    def authenticate(
        self, credentials: Credentials | None, origin: Origin, done: Callable[[Caller | Refusal], None]
    ) -> None:
        self.asked += 1
        outcome: Caller | Refusal = Refusal("unauthenticated", "this broker needs credentials", "none")
        if credentials in (ANNA, Credentials(token="t")) or "DNS:anna" in origin.certificate_names:
            outcome = Caller("anna", "password")
        elif credentials is not None and credentials.user == "otto":
            outcome = Caller("otto", "password")
        elif credentials is not None and credentials.user == "busy":
            outcome = Refusal("overloaded", "too many logins", "none")
        if self.later:
            asyncio.get_running_loop().call_later(0.01, done, outcome)
        else:
            done(outcome)

    def still(self, caller: Caller, now_us: int) -> Refusal | None:
        return Refusal("unauthenticated", "it has ended", "none") if self.ended else None


def field(value: str, more: str = "Connection: close\r\n") -> str:
    return f"Authorization: {value}\r\n{more}"


def with_pages(
    test: Callable[[tuple[str, int], Known], Awaitable[None]], secure: TlsFiles | None = None, **options: Any
) -> None:
    async def run() -> None:
        known = Known()
        listener = HttpListener(
            reasons=lambda: ["orders/0 is quarantined"],
            metrics=lambda: b"tailrace_connections 0\n",
            authenticator=known,
            may_operate=lambda caller: caller.user == "anna",
            secure=None if secure is None else (Doorway(SystemClock()), secure),
            **options,
        )
        address = await listener.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(20):
                await test(address, known)
        finally:
            await listener.close()

    uvloop.run(run())


async def exchange(address: tuple[str, int], request: bytes, context: ssl.SSLContext | None = None) -> bytes:
    name = None if context is None else "localhost"
    reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=name)
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BASIC, ANNA),
        ("basic YTo=", Credentials("a", "")),
        ("Bearer abc.def", Credentials(token="abc.def")),
        ("bearer  x ", Credentials(token="x")),
        ("Bearer ", None),
        ("Basic !!!", None),
        ("Basic Og==", None),
        ("Basic YQ==", None),
        ("Basic /////w==", None),
        ("Digest x", None),
        ("", None),
    ],
)
def test_credentials_of_a_field(text: str, expected: Credentials | None) -> None:
    if expected is None:
        with pytest.raises(InvalidRequest, match="only Basic"):
            credentials_of(text)
    else:
        assert credentials_of(text) == expected


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
def test_who_sees_what(later: bool) -> None:
    async def check(address: tuple[str, int], known: Known) -> None:
        known.later = later
        health = await exchange(address, get("/healthz"))
        assert (status(health), known.asked) == (200, 0)
        stranger = await exchange(address, get("/metrics"))
        assert status(stranger) == 401
        assert b'WWW-Authenticate: Basic realm="tailrace"' in stranger
        assert b"WWW-Authenticate: Bearer" in stranger
        assert b"tailrace_connections" not in stranger
        for value, code in ((BASIC, 200), ("Bearer t", 200), (OTHER, 403), ("Bearer no", 401), ("x", 400)):
            answer = await exchange(address, get("/metrics", more=field(value)))
            assert status(answer) == code
            assert (b"tailrace_connections" in answer) == (code == 200)
        busy = "Basic " + base64.b64encode(b"busy:x").decode()
        assert status(await exchange(address, get("/metrics", more=field(busy)))) == 429
        for value, shown in ((BASIC, True), (OTHER, False), ("Bearer no", False)):
            answer = await exchange(address, get("/readyz", more=field(value)))
            assert status(answer) == 503
            assert ("reasons" in json.loads(body(answer))) == shown
        assert json.loads(body(await exchange(address, get("/readyz")))) == {"ready": False}

    with_pages(check)


def test_a_connection_is_asked_once_while_its_credentials_are_good() -> None:
    async def check(address: tuple[str, int], known: Known) -> None:
        reader, writer = await asyncio.open_connection(*address)

        async def ask(value: str) -> int:
            writer.write(get("/metrics", more=field(value, "")))
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0])
            await reader.readexactly(size)
            return status(head)

        assert [await ask(BASIC) for _ in range(3)] == [200, 200, 200]
        assert known.asked == 1
        assert await ask(OTHER) == 403
        assert await ask(BASIC) == 200
        assert known.asked == 3
        known.ended = True
        assert await ask(BASIC) == 200, "asked anew, and good again"
        assert known.asked == 4
        writer.close()

    with_pages(check)


def test_two_fields_are_refused() -> None:
    async def check(address: tuple[str, int], known: Known) -> None:
        answer = await exchange(address, get("/metrics", more=field(BASIC, field(OTHER))))
        assert status(answer) == 400

    with_pages(check)


def test_an_authenticator_that_does_not_answer_costs_one_request() -> None:
    class Silent(Known):
        def authenticate(
            self, credentials: Credentials | None, origin: Origin, done: Callable[[Caller | Refusal], None]
        ) -> None:
            pass

    async def check(address: tuple[str, int], known: Known) -> None:
        assert status(await exchange(address, get("/metrics"))) == 503
        assert status(await exchange(address, get("/healthz"))) == 200

    async def run() -> None:
        listener = HttpListener(reasons=list, metrics=bytes, authenticator=Silent(), request_seconds=0.1)
        address = await listener.start("127.0.0.1", 0)
        await check(address, Known())
        await listener.close()

    uvloop.run(run())


def test_pages_over_tls_and_by_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = map(str, authority.sign("server"))
    files = TlsFiles(TlsOptions(certificate, key, str(authority.path), "optional"))

    async def check(address: tuple[str, int], known: Known) -> None:
        context = ssl.create_default_context(cafile=authority.path)
        assert status(await exchange(address, get("/healthz"), context)) == 200
        assert status(await exchange(address, get("/metrics"), context)) == 401
        assert status(await exchange(address, b"nonsense\r\n\r\n", context)) == 400
        assert status(await exchange(address, b"GET /" + b"a" * 100_000, context)) == 431
        context.load_cert_chain(*authority.sign("anna", ("anna",)))
        assert status(await exchange(address, get("/metrics"), context)) == 200
        plain = await exchange(address, get("/healthz"))
        assert status(plain) == 400
        assert b"https://" in plain

    with_pages(check, secure=files)


def test_tokens_are_no_way_around_a_certificate_that_is_required(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = map(str, authority.sign("server"))
    files = TlsFiles(TlsOptions(certificate, key, str(authority.path), "required"))

    async def check(address: tuple[str, int], known: Known) -> None:
        context = ssl.create_default_context(cafile=authority.path)
        assert status(await exchange(address, get("/healthz"), context)) == 200
        answer = await exchange(address, get("/metrics", more=field("Bearer t")), context)
        assert status(answer) == 401
        assert b"client certificate" in answer
        assert b"reasons" not in await exchange(address, get("/readyz", more=field("Bearer t")), context)
        assert known.asked == 0
        context.load_cert_chain(*authority.sign("otto", ("otto",)))
        answer = await exchange(address, get("/metrics", more=field("Bearer t")), context)
        assert status(answer) == 200

    with_pages(check, secure=files)


def test_tls_at_a_plain_port_gets_an_alert() -> None:
    async def check(address: tuple[str, int], known: Known) -> None:
        with pytest.raises(ssl.SSLError, match="ALERT_HANDSHAKE_FAILURE"):
            await exchange(address, b"", ssl.create_default_context())

    with_pages(check)
