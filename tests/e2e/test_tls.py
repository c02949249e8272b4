"""A real broker with TLS: its first start, pages, new certificates while it works, and hostile clients."""

import asyncio
import json
import os
import re
import resource
import socket
import ssl
import stat
import statistics
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest

import tailrace
from tailrace.core.model.commands import Fetch, Ping, Pong
from tailrace.format import codec
from tests.client.rpc.certificates import Authority
from tests.e2e.broker_process import SRC, BrokerProcess, NotReady, eventually
from tests.e2e.good_client import GoodClient
from tests.e2e.raw_client import RawClient
from tests.e2e.test_hostile_clients import Siege, attack, fill


class Secured:
    """A broker with TLS in a folder, and what its clients need."""

    def __init__(self, folder: Path, *flags: str, listen: str = "127.0.0.1:0") -> None:
        self.authority = Authority(folder)
        self.certificate, self.key = self.authority.sign("server")
        files = ["--tls-certificate", str(self.certificate), "--tls-key", str(self.key)]
        self.broker = BrokerProcess(folder / "data", *files, *flags)
        self.broker.listen = listen
        self.context = ssl.create_default_context(cafile=self.authority.path)

    @property
    def token(self) -> str:
        return (self.broker.data / "admin.token").read_text().strip()

    def connect(self, url: str | None = None) -> tailrace.Client:
        return tailrace.connect(url or self.broker.url, ca=str(self.authority.path), token=self.token)

    def raw(self) -> RawClient:
        return RawClient(self.broker.address, context=self.context, token=self.token)

    def page(self, path: str, authorization: str = "") -> tuple[int, str]:
        """Status and text of a page."""
        request = urllib.request.Request(f"https://{self.broker.http_listen}{path}")
        if authorization:
            request.add_header("Authorization", authorization)
        try:
            with urllib.request.urlopen(request, timeout=20, context=self.context) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def pages(self, path: str, *authorizations: str) -> list[int]:
        """The statuses of one page, asked for several times at once over one connection."""
        host, _, port = self.broker.http_listen.rpartition(":")
        asked = ""
        for given in authorizations:
            field = f"Authorization: {given}\r\n" if given else ""
            asked += f"GET {path} HTTP/1.1\r\nHost: x\r\n{field}\r\n"
        asked += "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        with (
            socket.create_connection((host, int(port)), 20) as plain,
            self.context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            secured.sendall(asked.encode())
            answer = b"".join(iter(lambda: secured.recv(65_536), b""))
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answer)]

    def serial(self) -> str:
        """Of the certificate that new connections see."""
        with (
            socket.create_connection(self.broker.address, 20) as plain,
            self.context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            seen = secured.getpeercert()
            assert seen is not None
            return str(seen["serialNumber"])


def test_the_first_start_makes_an_administrator_and_everything_is_encrypted(tmp_path: Path) -> None:
    path = tmp_path / "broker.sock"
    secured = Secured(tmp_path, listen=f"127.0.0.1:0,unix:{path}")
    with secured.broker.start() as broker:
        assert broker.urls == [f"tailraces://{broker.listen}", f"unix:{path}"]
        token_file = broker.data / "admin.token"
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        assert secured.token not in broker.words()

        async def use() -> None:
            async with secured.connect() as client:
                await client.admin().create_topic("orders", partitions=1)
                async with client.producer("orders") as producer:
                    await producer.publish(b"hello")
            async with tailrace.connect(f"unix:{path}") as owner:
                (topic,) = await owner.admin().list_topics()
                assert topic.name == "orders"
            async with tailrace.connect(broker.url, ca=str(secured.authority.path)) as stranger:
                await stranger.admin().list_topics()

        with pytest.raises(tailrace.errors.Unauthenticated):
            asyncio.run(use())
        with pytest.raises(tailrace.errors.InvalidRequest, match="speaks TLS"):
            asyncio.run(listed(f"tailrace://{broker.listen}"))

        assert secured.page("/healthz") == (200, "ok\n")
        assert json.loads(secured.page("/readyz")[1]) == {"ready": True}
        assert secured.page("/metrics")[0] == 401
        status, text = secured.page("/metrics", f"Bearer {secured.token}")
        assert status == 200
        assert 'topic="orders"' in text
        assert "reasons" in secured.page("/readyz", f"Bearer {secured.token}")[1]
        authorizations = "", f"Bearer {secured.token}", "", "Bearer x"
        assert secured.pages("/metrics", *authorizations) == [401, 200, 401, 401, 404], "each by itself"
        assert broker.stop() == 0
        assert not path.exists()
    assert secured.token not in broker.words()


async def listed(url: str) -> None:
    async with tailrace.connect(url) as client:
        await client.admin().list_topics()


def test_an_insecure_broker_says_so_at_every_start(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data", "--insecure")
    for count in (1, 2):
        broker.http_listen = "0.0.0.0:0"
        with broker.start():
            assert broker.words().count("insecure = true: other machines reach 0.0.0.0") == count
            assert broker.stop() == 0
    careful = BrokerProcess(tmp_path / "data")
    careful.http_listen = "0.0.0.0:0"
    with pytest.raises(NotReady, match="can be reached from other machines, which needs TLS"):
        careful.start()


def test_the_first_lines_of_a_broker_without_users_say_that_it_is_open(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tailrace.cli", "serve", "--data", str(tmp_path / "data")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    with subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**kept, "PYTHONPATH": SRC},
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.terminate()
    assert "tailrace is ready on tailrace://127.0.0.1:" in lines[0]
    assert "open to every user of this machine: no users yet" in lines[2]
    assert "user add NAME" in lines[2]


def test_certificates_are_replaced_while_clients_work(tmp_path: Path) -> None:
    secured = Secured(tmp_path)
    with secured.broker.start():

        async def work(over: asyncio.Event) -> int:
            """One connection that stays, and new ones all the time; nothing may fail."""
            done = 0
            async with secured.connect() as client, client.producer("t") as producer:
                while not over.is_set():
                    await producer.publish(b"x")
                    async with secured.connect() as another:
                        await another.admin().describe_topic("t")
                    done += 1
            return done

        async def scenario() -> None:
            async with secured.connect() as client:
                await client.admin().create_topic("t", partitions=1)
            over = asyncio.Event()
            working = asyncio.create_task(work(over))
            serials = {await asyncio.to_thread(secured.serial)}
            for number in range(3):
                known = set(serials)
                for new, old in zip(
                    secured.authority.sign(f"next {number}"), (secured.certificate, secured.key), strict=True
                ):
                    os.replace(new, old)
                await asyncio.to_thread(
                    eventually, lambda known=known: secured.serial() not in known, "a new certificate"
                )
                serials.add(await asyncio.to_thread(secured.serial))
                assert not working.done()
            over.set()
            assert await working > 3
            assert len(serials) == 4

        asyncio.run(scenario())
        assert secured.broker.stop() == 0
    assert "Traceback" not in secured.broker.words()


def test_a_socket_file_of_a_killed_broker_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "broker.sock"
    broker = BrokerProcess(tmp_path / "data")
    broker.listen = f"unix:{path}"
    with broker.start():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        broker.kill()
        assert path.exists()
        broker.listen = f"unix:{path}"
        broker.start()
        asyncio.run(listed(f"unix:{path}"))
        other = BrokerProcess(tmp_path / "other")
        other.listen = f"unix:{path}"
        with pytest.raises(Exception, match="another process listens there"):
            other.start()
        asyncio.run(listed(f"unix:{path}"))
        assert broker.stop() == 0
        assert not path.exists()


# -- hostile clients --------------------------------------------------------------------------------------


class Besieged(Siege):
    """A broker with TLS and its one good client."""

    secured: Secured | None = None

    def raw(self) -> RawClient:
        assert self.secured is not None
        return self.secured.raw()


@pytest.fixture(scope="module")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Besieged]:
    folder = tmp_path_factory.mktemp("siege")
    secured = Secured(folder, "--log-level", "error")
    with secured.broker.start() as broker, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAILRACE_TOKEN", secured.token)
        patch.setenv("TAILRACE_CA", str(secured.authority.path))
        asyncio.run(fill(broker))
        with GoodClient(broker.url) as good:
            yield Besieged(broker, good, secured=secured)
        assert broker.stop() == 0
        assert "Traceback" not in broker.words()


@pytest.mark.alone
@pytest.mark.parametrize("topic", ["hot", "cold"])
def test_fetches_of_those_who_never_read(siege: Besieged, topic: str) -> None:
    """What a peer does not take is counted, although the TLS layer holds a part of it."""

    async def run(address: tuple[str, int]) -> None:
        clients = [siege.raw() for _ in range(20)]
        await asyncio.gather(*(raw.connect() for raw in clients))
        await asyncio.gather(*(raw.greet() for raw in clients))
        for raw in clients:
            raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
            for number in range(200):
                raw.post(codec.encode_request(Fetch(topic, [(0, number % 100)], 8 << 20, 0)))
        await asyncio.sleep(1.0)
        for raw in clients:
            raw.abort()

    attack(siege, run)


@pytest.mark.alone
@pytest.mark.parametrize("finished", [0, 5, 100], ids=["silent", "begun", "half"])
def test_half_open_connections(siege: Besieged, finished: int) -> None:
    """More than there are places: from one address, which others do not notice."""
    hello = first_message(siege.secured)[:finished] if finished < 100 else first_message(siege.secured)

    async def run(address: tuple[str, int]) -> None:
        links = []
        for number in range(1500):
            _, writer = await asyncio.open_connection(*address, local_addr=("127.0.0.9", 0))
            writer.write(hello)
            links.append(writer)
            if number % 100 == 0:
                async with siege.raw():
                    pass
        for writer in links:
            writer.transport.abort()

    attack(siege, run)


def first_message(secured: Secured | None) -> bytes:
    assert secured is not None
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = secured.context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


# -- very many connections --------------------------------------------------------------------------------

CROWD = 10_000
SLOWER_MAX = 1.5
ROUNDS_MAX = 3
NOISE_MS = 10.0
"""What the machine itself adds while so many sockets are opened in the process that measures."""


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sent", [0, 3, 2000], ids=["silent", "begun", "hello"])
def test_ten_thousand_half_open_connections(siege: Besieged, sent: int) -> None:
    """Memory and places stay bounded, and others wait at most half as long again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    hello = first_message(siege.secured)[:sent]
    rounds: list[tuple[float, float]] = []

    async def run(address: tuple[str, int]) -> None:
        quiet = await p99_ms(siege, asyncio.sleep(5.0))
        crowded = await p99_ms(siege, knock(address, hello, min(CROWD, hard - 500)))
        rounds.append((quiet, crowded))

    try:
        while len(rounds) < ROUNDS_MAX and not any(calm(*figures) for figures in rounds):
            attack(siege, run)  # Once more if it was perhaps the machine that was slow.
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    print(rounds)
    assert calm(*rounds[-1]), f"p99 in ms without and with the crowd: {rounds}"


def calm(quiet_ms: float, crowded_ms: float) -> bool:
    """Whether others waited at most half as long again."""
    return crowded_ms <= SLOWER_MAX * quiet_ms + NOISE_MS


async def knock(address: tuple[str, int], hello: bytes, count: int) -> None:
    """Open so many connections in a process of its own, say the same on each, and leave them open."""
    program = Path(__file__).with_name("knocker.py")
    given = [str(value) for value in (*address, hello.hex() or "-", count)]
    knocker = await asyncio.create_subprocess_exec(sys.executable, str(program), *given)
    assert await knocker.wait() == 0


async def p99_ms(siege: Besieged, meanwhile: Awaitable[None]) -> float:
    """The 99th percentile of round trips on a connection that is there, while something happens."""
    loop = asyncio.get_running_loop()
    times: list[float] = []
    async with siege.raw() as raw:
        happening = asyncio.ensure_future(meanwhile)
        while not happening.done():
            began_s = loop.time()
            assert await raw.request(Ping()) == Pong()
            times.append(loop.time() - began_s)
            await asyncio.sleep(0.002)
        await happening
    assert len(times) > 100
    return statistics.quantiles(times, n=100)[98] * 1000
