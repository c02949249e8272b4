"""Brokers with users, rules and certificates, and what their clients have to show."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from bench.certificates import CertificateFiles
from bench.processes import BenchmarkFailed, Broker
from bench.roles.connections import Peer
from tailrace.core.model.access_commands import AddRule, AddUser, CreateToken, TokenMade
from tailrace.format.wire import Credentials

WORKER = "worker"
PASSWORD = "correct horse battery staple"  # nosec B105: of a broker that lives for some seconds


class Known(msgspec.Struct, frozen=True):
    """Tokens of the two users of a broker: its administrator, and one that may only do what rules allow."""

    administrator: str
    worker: str


def address(url: str) -> tuple[str, int]:
    """Host and port of a URL of a broker."""
    host, _, port = url.partition("://")[2].rpartition(":")
    return host, int(port)


def configuration(folder: Path, made: CertificateFiles) -> tuple[str, str]:
    """Flags of a broker that speaks TLS."""
    path = folder / "tls.toml"
    path.write_text(f'[tls]\ncertificate = "{made.certificate}"\nkey = "{made.key}"\n', encoding="utf-8")
    return "--config", str(path)


def first_token(broker: Broker) -> str:
    """The token that a broker makes at its first start, if it speaks TLS and has no users."""
    return (broker.data / "admin.token").read_text(encoding="utf-8").strip()


@contextmanager
def showing(**variables: str) -> Iterator[None]:
    """Let the clients of this block, processes or not, have TAILRACE_... variables, as `token` or `ca`."""
    named = {f"TAILRACE_{name.upper()}": value for name, value in variables.items()}
    before = {name: os.environ.get(name) for name in named}
    os.environ.update(named)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def introduce(broker: Broker, *, rules: int, topics: str = "*") -> Known:
    """Give an open broker its users and rules: an administrator, and a worker with a password and a token who
    may do with some topics whatever applications do. All other rules are about others."""
    return asyncio.run(_introduce(address(broker.url), rules, topics))


async def _introduce(where: tuple[str, int], rules: int, topics: str) -> Known:
    loop = asyncio.get_running_loop()
    _, first = await loop.create_connection(Peer, *where)
    await first.greet()
    await first.ask(AddUser("root", password=PASSWORD))
    # From now on whoever is nobody may do nothing.
    _, root = await loop.create_connection(Peer, *where)
    await root.greet(Credentials("root", PASSWORD))
    await root.ask(AddUser(WORKER, password=PASSWORD))
    for number in range(rules - 1):
        await root.ask(_rule_about_others(number))
    rights: list[Any] = ["publish", "read", "consume", "settle", "administer-topic"]
    await root.ask(AddRule("allow", f"user:{WORKER}", rights, "topic", topics))
    return Known(await _token(root, "root"), await _token(root, WORKER))


def _rule_about_others(number: int) -> AddRule:
    """Of the worker itself, of a team or of everyone, and about topics of all kinds: none can be left out
    without a look."""
    subject = (f"user:{WORKER}", f"team:team-{number}", "everyone", f"team:other-{number}")[number % 4]
    effect: Any = "deny" if number % 3 == 0 else "allow"
    return AddRule(effect, subject, ["publish", "read"], "topic", f"other-{number}-*")


async def _token(peer: Peer, user: str) -> str:
    made = await peer.ask(CreateToken("bench", user))
    if not isinstance(made, TokenMade):
        raise BenchmarkFailed(f"no token for {user}: {made}")
    return made.secret
