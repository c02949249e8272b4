"""TLS, Unix sockets and credentials against scripted brokers on real sockets: what is sent, what is refused.

Covers `client/rpc/server_trust.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import uvloop

import tailrace
from tailrace.client.rpc import calls, endpoints, transport
from tailrace.client.rpc.broker_url import parse_url
from tailrace.client.rpc.credentials import AccessSource, GivenAccess, HostAccess
from tailrace.client.rpc.endpoints import TcpEndpoint, UnixEndpoint, endpoints_of
from tailrace.client.rpc.transport import NetworkVerbs
from tailrace.core.model.access_commands import AddUser, CreateToken, WhoAmI
from tailrace.core.model.commands import Ping, Pong
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import InvalidRequest, TailraceError, Unauthenticated, Unavailable
from tailrace.format import codec
from tailrace.format.wire import (
    PREAMBLE,
    PREFIX,
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    Credentials,
    Hello,
    Welcome,
    prefix,
)
from tests.client.rpc.certificates import DAY, Authority, server_context

LIMIT_S = 60.0
SECRET = "hunter2-on-the-wire"


class ScriptedBroker:
    """Answers greetings by what `decide` says of their credentials, and everything else with `Pong`."""

    def __init__(self, decide: Callable[[Credentials | None], Refusal | None] = lambda given: None) -> None:
        self._decide = decide
        self.seen: list[Credentials | None] = []
        self.connections = 0
        self.first_bytes: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            first = await reader.read(len(PREAMBLE))
            self.first_bytes.append(first)
            if first == PREAMBLE:
                await self._talk(reader, writer)
        writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, size, number = PREFIX.unpack(await reader.readexactly(PREFIX_BYTES))
            header = await reader.readexactly(head)
            await reader.readexactly(size)
            if number:
                writer.write(prefix(codec.encode_reply(Pong()), 0, number))
                continue
            hello = msgspec.msgpack.decode(header, type=Hello)
            self.seen.append(hello.credentials)
            refusal = self._decide(hello.credentials)
            if refusal is not None:
                writer.write(prefix(codec.encode_reply(refusal), 0, 0))
                return
            welcome = Welcome(PROTOCOL_VERSION, "node", 1 << 20, 100, 60_000)
            writer.write(prefix(msgspec.msgpack.encode(welcome), 0, 0))

    def revoke(self, text: str) -> None:
        """Tell everybody that they are not known any more, and close."""
        refusal = codec.encode_reply(Refusal("unauthenticated", text, "none"))
        for writer in self.writers:
            if not writer.is_closing():
                writer.write(prefix(refusal, 0, 0))
                writer.close()


@contextlib.asynccontextmanager
async def listening(broker: ScriptedBroker, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in broker.writers:
            writer.close()


def within(scenario: Callable[[], Awaitable[None]], *, uv: bool = False) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await scenario()

    if uv:
        uvloop.run(bounded())
    else:
        asyncio.run(bounded())


@pytest.fixture(autouse=True)
def no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("TAILRACE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def verbs_of(url: str, **given: str) -> NetworkVerbs:
    address = parse_url(url)
    return NetworkVerbs(endpoints_of(address, AccessSource(address, GivenAccess(**given), os.environ)))


async def failure(url: str, **given: str) -> TailraceError:
    """What connecting ends with."""
    verbs = verbs_of(url, **given)
    try:
        await verbs.open()
    except TailraceError as error:
        return error
    await verbs.close()
    raise AssertionError("it was taken")


async def answered(url: str, **given: str) -> None:
    verbs = verbs_of(url, **given)
    await verbs.open()
    assert await calls.ask(verbs, Ping(), LIMIT_S) == Pong()
    await verbs.close()


# -- TLS -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uv", [False, True], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_trusted_broker_gets_the_credentials(authority: Authority, host: str, uv: bool) -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        async with listening(broker, server_context(authority.sign("server"))) as port:
            url = f"tailraces://anna:{SECRET}@{host}:{port}?ca={authority.path}"
            await answered(url)
            await answered(f"tailraces://{host}:{port}", ca=str(authority.path), token="a-token")
        assert broker.seen == [Credentials(user="anna", password=SECRET), Credentials(token="a-token")]

    within(scenario, uv=uv)


@pytest.mark.parametrize("uv", [False, True], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("names", "begins", "ends", "trusted", "told"),
    [
        (
            ["broker.example.com", "10.0.0.7"],
            -DAY,
            DAY,
            True,
            "is for broker.example.com, 10.0.0.7, and not for 'localhost'",
        ),
        (["localhost"], -3 * DAY, -DAY, True, r"has expired on \d{4}-\d\d-\d\d \d\d:\d\d UTC"),
        (["localhost"], DAY, 2 * DAY, True, r"is not valid yet before \d{4}-\d\d-\d\d"),
        (
            ["localhost"],
            -DAY,
            DAY,
            False,
            "signed by nobody that this machine trusts, but by Test CA: .* ca=FILE",
        ),
    ],
    ids=["wrong name", "expired", "not yet", "untrusted"],
)
def test_a_certificate_that_is_no_good_is_told_and_nothing_is_sent(
    authority: Authority, names: list[str], begins: object, ends: object, trusted: bool, told: str, uv: bool
) -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        files = authority.sign("server", names, begins=begins, ends=ends)  # type: ignore[arg-type]
        async with listening(broker, server_context(files)) as port:
            more = {"ca": str(authority.path)} if trusted else {}
            error = await failure(f"tailraces://localhost:{port}", token=SECRET, **more)
        assert isinstance(error, InvalidRequest)
        assert re.search(told, error.message), error.message
        assert error.message.startswith(f"localhost:{port}: ")
        assert broker.seen == []
        assert set(broker.first_bytes) <= {b""}

    within(scenario, uv=uv)


def test_another_authority_than_the_given_one_is_told(authority: Authority, tmp_path: Path) -> None:
    async def scenario() -> None:
        other = Authority(tmp_path / "other", "Other CA")
        async with listening(ScriptedBroker(), server_context(other.sign("server"))) as port:
            error = await failure(f"tailraces://localhost:{port}", ca=str(authority.path))
        told = f"signed by none of those in {authority.path}, but by Other CA: pass the right one"
        assert told in error.message

    within(scenario)


@pytest.mark.parametrize("uv", [False, True], ids=["asyncio", "uvloop"])
def test_tls_and_plain_ports_that_are_confused_are_told(authority: Authority, uv: bool) -> None:
    async def scenario() -> None:
        async with listening(ScriptedBroker()) as port:
            error = await failure(f"tailraces://localhost:{port}", ca=str(authority.path))
            assert "TLS" in error.message
            assert f"localhost:{port}" in error.message
        async with listening(ScriptedBroker(), server_context(authority.sign("server"))) as port:
            error = await failure(f"tailrace://localhost:{port}")
            assert f"tailraces://localhost:{port} is meant" in error.message

    within(scenario, uv=uv)


@pytest.mark.parametrize("uv", [False, True], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("host", ["a..b", ".a", "x" * 64, "\u00e4" * 70])
@pytest.mark.parametrize("scheme", ["tailrace", "tailraces"])
def test_what_cannot_be_a_name_is_told(host: str, scheme: str, uv: bool) -> None:
    async def scenario() -> None:
        error = await failure(f"{scheme}://{host}:1")
        assert host in error.message

    within(scenario, uv=uv)


def test_a_peer_that_answers_tls_in_plain_is_told(authority: Authority) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"SSH-2.0-OpenSSH_9.9\r\n")
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        error = await failure(f"tailraces://localhost:{port}", ca=str(authority.path))
        assert f"does not speak TLS; tailrace://localhost:{port} may be meant" in error.message
        server.close()

    within(scenario)


def test_a_client_certificate_is_shown_and_its_lack_is_told(authority: Authority) -> None:
    async def scenario() -> None:
        cert, key = authority.sign("client", ["worker.example.com"])
        context = server_context(authority.sign("server"), authority.path)
        async with listening(ScriptedBroker(), context) as port:
            url = f"tailraces://localhost:{port}?ca={authority.path}"
            await answered(f"{url}&cert={cert}&key={key}")
            error = await failure(url)
        assert "client certificate" in error.message
        assert "cert=" in error.message

    within(scenario)


def test_a_client_certificate_that_does_not_help_is_told_what_it_needs(authority: Authority) -> None:
    async def scenario() -> None:
        cert, key = authority.sign("client", ["worker.example.com"])
        broker = ScriptedBroker(lambda given: Refusal("unauthenticated", "needs credentials", "none"))
        async with listening(broker, server_context(authority.sign("server"))) as port:
            url = f"tailraces://localhost:{port}?ca={authority.path}"
            error = await failure(f"{url}&cert={cert}&key={key}")
            assert f"({cert} counts where the broker asks for it, by tls.client_certificates" in error.message
            assert "counts where" not in (await failure(url)).message

    within(scenario)


def test_a_client_certificate_that_the_broker_refuses_is_named(authority: Authority, tmp_path: Path) -> None:
    async def scenario() -> None:
        cert, key = Authority(tmp_path / "other").sign("client", ["worker.example.com"])
        context = server_context(authority.sign("server"), authority.path)
        async with listening(ScriptedBroker(), context) as port:
            error = await failure(f"tailraces://localhost:{port}?ca={authority.path}&cert={cert}&key={key}")
        assert "certificate" in error.message
        assert "refuse" in error.message, error.message

    within(scenario)


@pytest.mark.parametrize("uv", [False, True], ids=["asyncio", "uvloop"])
def test_a_port_where_nobody_listens_is_not_called_one_without_tls(authority: Authority, uv: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    async def scenario() -> None:
        for host in ("127.0.0.1", "localhost"):
            error = await failure(f"tailraces://{host}:{port}", ca=str(authority.path))
            assert isinstance(error, Unavailable)
            assert "nobody listens there" in error.message

    within(scenario, uv=uv)


def test_files_that_cannot_be_used_are_told(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.sign("client")
    other_key = authority.sign("other")[1]
    text = tmp_path / "text"
    text.write_text("no certificate")

    async def scenario() -> None:
        for given, told in (
            ({"ca": f"{tmp_path}/missing"}, f"ca: {tmp_path}/missing: No such file"),
            ({"ca": str(text)}, f"ca: {text} holds no certificates in PEM"),
            (
                {"cert": str(cert), "key": str(other_key)},
                "no certificate in PEM with the key that belongs to it",
            ),
            ({"cert": str(text), "key": str(key)}, "no certificate in PEM"),
            ({"cert": str(cert), "key": f"{tmp_path}/missing"}, f"key: {tmp_path}/missing: No such file"),
        ):
            error = await failure("tailraces://127.0.0.1:1", **given)
            assert isinstance(error, InvalidRequest)
            assert told in error.message, error.message

    within(scenario)


def test_a_new_certificate_counts_from_the_next_connection_on(authority: Authority) -> None:
    """The file of the authority is replaced while the client is open: it need not be started again."""

    async def scenario() -> None:
        other = Authority(authority.path.parent / "other", "Other CA")
        good, ca = server_context(authority.sign("server")), authority.path
        trusted = ca.read_bytes()
        ca.write_bytes(other.path.read_bytes())
        async with listening(ScriptedBroker(), good) as port:
            address = f"tailraces://localhost:{port}"
            verbs = verbs_of(address, ca=str(ca))
            with pytest.raises(InvalidRequest, match="signed by none of those"):
                await verbs.open()
            ca.write_bytes(trusted + b"\n")
            await verbs.open()
            assert await calls.ask(verbs, Ping(), LIMIT_S) == Pong()
            await verbs.close()

    within(scenario)


# -- secrets and where they go -------------------------------------------------------------------------------


def test_secrets_do_not_leave_the_machine_in_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        for url, given in (
            (f"tailrace://anna:{SECRET}@192.0.2.1:7400", {}),
            ("tailrace://192.0.2.1:7400", {"token": SECRET}),
            ("tailrace://[2001:db8::1]:7400", {"token": SECRET}),
        ):
            error = await failure(url, **given)
            assert isinstance(error, InvalidRequest)
            assert "use tailraces://" in error.message
            assert SECRET not in error.message
        broker = ScriptedBroker()
        async with listening(broker) as port:
            await answered(f"tailrace://127.0.0.1:{port}", token=SECRET)
            await answered(f"tailrace://localhost:{port}", token=SECRET)
            assert broker.seen == [Credentials(token=SECRET)] * 2
            # A name is judged by where it leads to. Here every address is elsewhere.
            monkeypatch.setattr(transport, "is_protected", lambda transport: False)
            error = await failure(f"tailrace://localhost:{port}", token=SECRET)
            assert f"use tailraces://localhost:{port}" in error.message
            assert broker.first_bytes[2:] in ([], [b""])

    within(scenario)


def test_requests_with_secrets_are_not_sent_in_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "is_protected", lambda transport: False)

    async def scenario() -> None:
        async with listening(ScriptedBroker()) as port:
            verbs = verbs_of(f"tailrace://localhost:{port}")
            await verbs.open()
            assert await calls.ask(verbs, AddUser("anna"), LIMIT_S) == Pong()
            assert await calls.ask(verbs, WhoAmI(), LIMIT_S) == Pong()
            for request in (AddUser("anna", password=SECRET), CreateToken("laptop")):
                with pytest.raises(InvalidRequest, match="use tailraces://") as caught:
                    await calls.ask(verbs, request, LIMIT_S)
                assert SECRET not in caught.value.message
            await verbs.close()

    within(scenario)


def test_a_refusal_of_the_credentials_is_told_at_once_also_to_who_waits() -> None:
    def decide(given: Credentials | None) -> Refusal:
        return Refusal("unauthenticated", "this broker needs credentials: wrong user or password", "none")

    async def scenario() -> None:
        broker = ScriptedBroker(decide)
        async with listening(broker) as port:
            verbs = verbs_of(f"tailrace://anna:{SECRET}@127.0.0.1:{port}")
            with pytest.raises(Unauthenticated) as caught:
                await verbs.open(wait_s=60)
        assert broker.connections == 1
        said = "this broker needs credentials: wrong user or password"
        assert caught.value.message == f"127.0.0.1:{port}: {said} (the credentials were those of the url)"
        assert not caught.value.retriable

    within(scenario)


def test_after_a_revocation_the_client_gives_up_for_good(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tailrace.client")
    revoked = False

    def decide(given: Credentials | None) -> Refusal | None:
        return Refusal("unauthenticated", "this token was revoked", "none") if revoked else None

    async def scenario() -> None:
        nonlocal revoked
        broker = ScriptedBroker(decide)
        async with listening(broker) as port:
            async with tailrace.connect(f"tailrace://127.0.0.1:{port}", token=SECRET) as client:
                revoked = True
                broker.revoke("this token was revoked")
                waiting = [client.admin().list_topics(), client.producer("t").__aenter__()]
                for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                    assert isinstance(outcome, Unauthenticated), outcome
                connections = broker.connections
                for _ in range(50):
                    with pytest.raises(Unauthenticated, match="this token was revoked"):
                        await client.admin().list_topics()
            assert broker.connections == connections == 2

    within(scenario)
    assert SECRET not in caplog.text
    assert "gives up" in caplog.text


def test_a_rotated_token_is_taken_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "credentials"
    good = "old"

    def decide(given: Credentials | None) -> Refusal | None:
        known = given is not None and given.token == good
        return None if known else Refusal("unauthenticated", "an unknown token", "none")

    async def scenario() -> None:
        nonlocal good
        broker = ScriptedBroker(decide)
        async with listening(broker) as port:
            path.write_text('["127.0.0.1"]\ntoken = "old"\n')
            path.chmod(0o600)
            monkeypatch.setenv("TAILRACE_CREDENTIALS", str(path))
            verbs = verbs_of(f"tailrace://127.0.0.1:{port}")
            await verbs.open()
            good = "new"
            path.write_text('["127.0.0.1"]\ntoken = "new"\n')
            broker.revoke("an unknown token")
            assert await calls.ask(verbs, Ping(), LIMIT_S) == Pong()
            await verbs.close()
        assert [given.token for given in broker.seen if given] == ["old", "new"]

    within(scenario)


def test_a_connection_that_cannot_be_made_says_why_in_every_call(authority: Authority) -> None:
    """The certificate of the broker expires while clients are connected."""

    async def scenario() -> None:
        broker = ScriptedBroker()
        async with listening(broker, server_context(authority.sign("good"))) as port:
            verbs = verbs_of(f"tailraces://localhost:{port}", ca=str(authority.path))
            await verbs.open()
        expired = server_context(authority.sign("bad", begins=-2 * DAY, ends=-DAY))
        server = await asyncio.start_server(ScriptedBroker().serve, "127.0.0.1", port, ssl=expired)
        while True:
            with pytest.raises(Unavailable) as caught:
                await calls.ask(verbs, Ping(), 0.01)
            if "has expired on" in caught.value.message:
                break
            await asyncio.sleep(0)
        await verbs.close()
        server.close()

    within(scenario)


# -- Unix sockets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uv", [False, True], ids=["asyncio", "uvloop"])
def test_a_unix_socket_is_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uv: bool) -> None:
    async def scenario() -> None:
        monkeypatch.chdir(tmp_path)
        broker = ScriptedBroker()
        server = await asyncio.start_unix_server(broker.serve, tmp_path / "s")
        await answered(f"unix:{tmp_path}/s", token=SECRET)
        await answered(f"unix://{tmp_path}/s")
        await answered("unix:s")
        monkeypatch.setenv("HOME", str(tmp_path))
        await answered("unix:~/s")
        assert broker.seen == [Credentials(token=SECRET), None, None, None]
        server.close()
        for writer in broker.writers:
            writer.close()

    within(scenario, uv=uv)


def test_a_unix_socket_that_is_not_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/dead")

    async def scenario() -> None:
        missing = await failure(f"unix:{tmp_path}/missing")
        assert missing.message == (
            f"no broker at {tmp_path}/missing: there is no such socket; "
            f"start one with `tailrace serve --listen unix:{tmp_path}/missing`"
        )
        assert "nobody listens there" in (await failure(f"unix:{tmp_path}/dead")).message
        assert f"{tmp_path}/file" in (await failure(f"unix:{tmp_path}/file")).message
        with pytest.raises(InvalidRequest, match="at most 107 bytes"):
            tailrace.connect(f"unix:{tmp_path}/{'x' * 107}")

    within(scenario)


def test_no_secret_goes_to_whoever_was_quicker_in_a_folder_for_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        broker = ScriptedBroker()
        server = await asyncio.start_unix_server(broker.serve, tmp_path / "s")
        monkeypatch.setattr(endpoints, "peer_uid", lambda sock: 4711)
        await answered(f"unix:{tmp_path}/s", token=SECRET)
        os.chmod(tmp_path, 0o1777)
        await answered(f"unix:{tmp_path}/s")
        error = await failure(f"unix:{tmp_path}/s", token=SECRET)
        assert "uid 4711" in error.message
        assert SECRET not in str(error)
        monkeypatch.setattr(endpoints, "peer_uid", lambda sock: os.geteuid())
        await answered(f"unix:{tmp_path}/s", token=SECRET)
        assert broker.seen == [Credentials(token=SECRET), None, Credentials(token=SECRET)]
        server.close()
        for writer in broker.writers:
            writer.close()

    within(scenario)


def test_nothing_of_an_endpoint_shows_a_secret(tmp_path: Path) -> None:
    access = HostAccess(credentials=Credentials(token=SECRET), source="TAILRACE_TOKEN")
    for endpoint in (TcpEndpoint("host", 1, lambda: access), UnixEndpoint(f"{tmp_path}/s", lambda: access)):
        assert SECRET not in f"{endpoint} {endpoint!r} {vars(endpoint)}"
