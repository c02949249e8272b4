"""Brokers with users of all kinds, for the matrix of who may do what: with TLS, without, and embedded."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509

from bench.certificates import Authority, CertificateFiles
from tailrace.core.model.access import Resource, Right
from tailrace.core.model.access_commands import AddRule, AddTenant, AddUser, CreateToken, TokenMade
from tailrace.core.model.commands import CreateTopic
from tailrace.core.model.group_commands import CreateGroup, PutSchedule
from tailrace.format.wire import Credentials
from tests.e2e.access_rows import (
    EVERY_RIGHT,
    GROUP,
    OTHER_USER,
    PAIRS,
    PASSWORD,
    SETS,
    TOPIC,
    Pair,
    only,
    without,
)
from tests.e2e.broker_process import SRC, BrokerProcess, eventually
from tests.e2e.doors import Door, Session, TurnedAway
from tests.e2e.raw_client import publish

ROOT_USER, MIGHTY, STRANGER, REFUSED, TENANT_USER, CERTIFIED = (
    "root",
    "mighty",
    "stranger",
    "refused",
    "acme/eve",
    "certified",
)
CLIENT_NAME = "worker.example.com"
TOKEN_LIVES_US = 400_000
PATTERNS: dict[Resource, str] = {"topic": f"{TOPIC}*", "group": f"{GROUP}*", "broker": "*"}
EMBEDDED = """
import sys
from tailrace.sync import connect
with connect("embedded:" + sys.argv[1]) as client:
    client.admin().list_topics()
    print("ready", flush=True)
    sys.stdin.read()
"""


class Certificates(msgspec.Struct, frozen=True):
    """Of a broker, of a client that it knows, of one that it does not know, and of one whose authority it
    does not know."""

    server: CertificateFiles
    known: CertificateFiles
    unknown: CertificateFiles
    foreign: CertificateFiles


class Guarded(msgspec.Struct, frozen=True):
    """A broker with users: its doors by name, and what its users show."""

    data: Path
    doors: dict[str, Door]
    certificates: Certificates
    tokens: dict[str, str]
    expired: str
    logs: list[Path] = []
    pages: str = ""
    """Address of its HTTP pages."""
    pid: int = 0

    def root(self) -> Session:
        """A session of the administrator, through any door."""
        door = next(iter(self.doors.values()))
        return door.enter(Credentials(token=self.tokens[ROOT_USER]))

    def shown(self, user: str) -> Credentials:
        """The token of a user."""
        return Credentials(token=self.tokens[user])


def make_certificates(folder: Path) -> Certificates:
    """Two authorities and what they sign."""
    own, other = Authority(folder, "ca"), Authority(folder, "other")
    return Certificates(
        own.sign("broker"),
        own.sign("known", [x509.DNSName(CLIENT_NAME)]),
        own.sign("unknown", [x509.DNSName("nobody.example.com")]),
        other.sign("foreign", [x509.DNSName(CLIENT_NAME)]),
    )


def only_user(pairs: tuple[Pair, ...]) -> str:
    """The user that has just these rights."""
    return "only-" + "-and-".join(f"{right}-{resource}" for right, resource in pairs)


def without_user(pair: Pair) -> str:
    """The user that has all rights but this."""
    return f"without-{pair[0]}-{pair[1]}"


def by_resource(pairs: Sequence[tuple[Right, Resource]]) -> dict[Resource, list[Right]]:
    """Rights on each kind of resource."""
    return {kind: [right for right, resource in pairs if resource == kind] for _, kind in pairs}


def furnish(root: Session) -> tuple[dict[str, str], str]:
    """Make topics, groups and users; the tokens of those, and one that has expired."""
    root.do(CreateTopic(TOPIC, {"partitions": 1, "key_index": True}))
    root.do(*publish(TOPIC, [b"what nobody else may see"], keys=[b"k"]))
    root.do(CreateGroup(GROUP, [TOPIC]))
    root.do(PutSchedule("nightly", TOPIC, "0 0 1 1 *", value=b"tick"))
    root.do(AddUser(MIGHTY, PASSWORD, administrator=True))
    root.do(AddTenant("acme"))
    allowed = {STRANGER: [], OTHER_USER: [], REFUSED: list(EVERY_RIGHT), TENANT_USER: list(EVERY_RIGHT)}
    allowed |= {only_user(pairs): only(pairs) for pairs in SETS}
    allowed |= {without_user(pair): without(pair) for pair in PAIRS}
    allowed[CERTIFIED] = only((("publish", "topic"),))
    for user, rights in allowed.items():
        named = [f"DNS:{CLIENT_NAME}"] if user == CERTIFIED else []
        root.do(AddUser(user, certificates=named))
        wide = user in (REFUSED, TENANT_USER) or user.startswith("without-")
        for resource, some in by_resource(rights).items():
            pattern = "*" if wide else PATTERNS[resource]
            root.do(AddRule("allow", f"user:{user}", some, resource, pattern))
    for resource, some in by_resource(EVERY_RIGHT).items():
        root.do(AddRule("deny", f"user:{REFUSED}", some, resource, PATTERNS[resource]))
    tokens = {user: _token(root, user).secret for user in (*allowed, MIGHTY)}
    soon_us = time.time_ns() // 1000 + TOKEN_LIVES_US
    return tokens, _token(root, MIGHTY, "short", soon_us).secret


def _token(root: Session, user: str, name: str = "test", expires_us: int | None = None) -> TokenMade:
    made: TokenMade = root.do(CreateToken(name, user, expires_us))
    return made


def await_expiry(door: Door, token: str) -> None:
    """Until a token is of no use any more."""

    def over() -> bool:
        try:
            door.enter(Credentials(token=token)).close()
        except TurnedAway:
            return True
        return False

    eventually(over, "the token expires")


@contextmanager
def behind_tls(folder: Path, made: Certificates) -> Iterator[Guarded]:
    """`tailrace serve` with TLS, client certificates and a Unix socket."""
    config = folder / "tls.toml"
    config.write_text(
        f'[tls]\ncertificate = "{made.server.certificate}"\nkey = "{made.server.key}"\n'
        f'client_ca = "{made.known.authority}"\nclient_certificates = "optional"\n'
    )
    path = str(folder / "unix.sock")
    broker = BrokerProcess(folder / "tls", "--config", str(config))
    broker.listen = f"127.0.0.1:0,unix:{path}"
    with broker.start():
        tls = Door(name="tls", address=broker.address, authority=made.server.authority)
        first = (broker.data / "admin.token").read_text().strip()
        with tls.enter(Credentials(token=first)) as root:
            tokens, expired = furnish(root)
        await_expiry(tls, expired)
        yield Guarded(
            broker.data,
            {"tls": tls, "unix": Door(name="unix", address=path)},
            made,
            {**tokens, ROOT_USER: first},
            expired,
            [broker.log],
            f"https://{broker.http_listen}",
            broker.pid,
        )


@contextmanager
def plain(folder: Path, made: Certificates) -> Iterator[Guarded]:
    """`tailrace serve` on loopback without TLS, with users."""
    with BrokerProcess(folder / "plain").start() as broker:
        door = Door(name="native", address=broker.address)
        tokens, expired = _introduce(door)
        await_expiry(door, expired)
        pages = f"http://{broker.http_listen}"
        yield Guarded(broker.data, {"native": door}, made, tokens, expired, [broker.log], pages, broker.pid)


@contextmanager
def embedded(folder: Path, made: Certificates) -> Iterator[Guarded]:
    """A broker inside of another program, which others join through its socket."""
    data, log = folder / "embedded", folder / "embedded.log"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TAILRACE_")}
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", EMBEDDED, str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**kept, "PYTHONPATH": SRC},
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", log.read_text()
        door = Door(name="embedded", address=str(data / "embedded.sock"))
        with door.enter() as owner:
            tokens, expired = furnish(owner)
            tokens[ROOT_USER] = tokens[MIGHTY]
        yield Guarded(data, {"embedded": door}, made, tokens, expired, [log], pid=process.pid)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _introduce(door: Door) -> tuple[dict[str, str], str]:
    """The first user of a broker that has none, and then the others."""
    with door.enter() as somebody:
        somebody.do(AddUser(ROOT_USER, PASSWORD))
    with door.enter(Credentials(ROOT_USER, PASSWORD)) as root:
        tokens, expired = furnish(root)
        return {**tokens, ROOT_USER: _token(root, ROOT_USER).secret}, expired


def state_of(root: Session) -> dict[str, Any]:
    """Everything that a verb could have changed, as its administrator sees it."""
    from tailrace.core.model import access_commands as access
    from tailrace.core.model import commands, group_commands

    asked = (
        commands.ListTopics(internal=True),
        commands.DescribeTopic(TOPIC),
        group_commands.ListGroups(),
        group_commands.ListSchedules(),
        access.ListUsers(),
        access.ListRules(),
        access.ListTokens(),
        access.ListQuotas(),
        access.ListTenants(),
    )
    return {type(request).__name__: msgspec.to_builtins(root.do(request)) for request in asked}
