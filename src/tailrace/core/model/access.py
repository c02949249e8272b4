"""Who may do what: users, tokens, rules, quotas and tenants, as one frozen value that is stored whole.

A *user* is whoever the broker knows by a name, a person or a program. It proves who it is with a password,
a token, a client certificate, or, over a Unix socket, by its user of the operating system. A *rule* allows
or denies rights to a user, to a *team* (users that rules name together) or to everyone. An *administrator*
may do everything, whatever the rules say, so that no rule can lock everybody out.

A *tenant* is the first segment of a name: the users, topics and groups of tenant `acme` are `acme/...`. A
user of a tenant never gets a right on anything outside of it.

The *caller* of a request is a user as one connection proved it. Nothing here holds a secret that could be
used again: passwords are kept as argon2id hashes, tokens as SHA-256 digests.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

Right = Literal[
    "publish",
    "read",
    "consume",
    "settle",
    "administer-topic",
    "administer-group",
    "operate",
    "peer",
]
RIGHTS: tuple[Right, ...] = (
    "publish",
    "read",
    "consume",
    "settle",
    "administer-topic",
    "administer-group",
    "operate",
    "peer",
)
Resource = Literal["topic", "group", "broker"]
"""What a right is about; `operate` and `peer` are rights on the broker."""

EVERYONE = "everyone"
"""The subject of rules and quotas that concern every known user."""

Proof = Literal["password", "token", "certificate", "socket", "owner", "open"]
"""How a caller proved who it is: `socket` by its user of the operating system, `owner` by running the broker
in its own process or as the same user of the operating system; `open` callers proved nothing, because the
broker has no users."""


class Caller(msgspec.Struct, frozen=True):
    """Who sends the requests of a connection. `credential` is the id of the token or the name of the
    certificate, never a secret."""

    user: str
    """Empty for `owner` and `open`."""
    proof: Proof
    credential: str = ""
    address: str = ""

    @property
    def trusted(self) -> bool:
        """Whether no rule is asked: the owner of the broker, or anybody while it has no users."""
        return self.proof in ("owner", "open")


OWNER = Caller("", "owner")


class Origin(NamedTuple):
    """Where a connection comes from, and what its transport has proved."""

    address: str
    """The address of the peer without its port; empty over a Unix socket."""
    tls: bool = False
    certificate_names: tuple[str, ...] = ()
    """The names of the peer's certificate, once its chain was verified: `DNS:...`, `URI:...`, `email:...`."""
    uid: int | None = None
    """The peer's user of the operating system, over a Unix socket."""
    loopback: bool = False


class User(msgspec.Struct, frozen=True, kw_only=True):
    """One user. `password` is its hash, empty if there is none; `certificates` are names of client
    certificates (`DNS:worker.example.com`, `URI:spiffe://...`, `email:...`), `system_users` users of the
    operating system."""

    name: str
    password: str = ""
    teams: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()
    system_users: tuple[str, ...] = ()
    administrator: bool = False
    created_us: int = 0
    altered_us: int = 0
    """When the password was last changed: connections that logged in with an older one end."""

    def __repr__(self) -> str:
        return f"User(name={self.name!r}, teams={self.teams!r}, administrator={self.administrator!r})"


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a user; `digest` is the SHA-256 of the secret, in hex."""

    id: str
    user: str
    name: str
    digest: str
    created_us: int
    expires_us: int | None = None

    def __repr__(self) -> str:
        return (
            f"Token(id={self.id!r}, user={self.user!r}, name={self.name!r}, expires_us={self.expires_us!r})"
        )


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Allows or denies rights on what a pattern matches, in which `*` stands for any text. `subject` is
    `user:NAME`, `team:NAME` or `everyone`."""

    id: int
    effect: Literal["allow", "deny"]
    subject: str
    rights: tuple[Right, ...]
    resource: Resource
    pattern: str = "*"


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds for a subject: `user:NAME`, `team:NAME` (each of its users), `tenant:NAME` (all of its users
    together), `address:IP` or `address:*` (each address), or `everyone` (each user). None: no bound."""

    subject: str
    connections_max: int | None = None
    requests_per_second: int | None = None
    bytes_per_second: int | None = None
    in_flight_max: int | None = None
    topics_max: int | None = None
    storage_bytes_max: int | None = None


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant."""

    name: str
    created_us: int = 0


class Identities(msgspec.Struct, frozen=True):
    """Everybody that a broker knows, and what they may do."""

    users: dict[str, User] = {}
    tokens: dict[str, Token] = {}
    rules: tuple[Rule, ...] = ()
    quotas: dict[str, Quota] = {}
    tenants: dict[str, Tenant] = {}
    next_rule: int = 1
    sequence: int = 0
    """Counts the changes."""
