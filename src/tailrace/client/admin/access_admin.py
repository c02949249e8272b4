"""Administration of access: users, tokens, rules, quotas and tenants; who one is, and what one may do.

Passwords and tokens go to the broker as they are, so they need an encrypted connection, one of the same
machine, or a Unix socket; the SDK refuses to send them otherwise. No result holds a secret but `NewToken`,
and that one does not show it in its `repr`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec

from tailrace.client.messages import moment
from tailrace.client.rpc.calls import ask, whole_of
from tailrace.client.sdk_tuning import NUMBER_MAX
from tailrace.core.model.access import Quota, Resource, Right, Rule
from tailrace.core.model.access_commands import (
    AccessChecked,
    AddRule,
    AddTenant,
    AddUser,
    AlterUser,
    CallerInfo,
    CheckAccess,
    CreateToken,
    ListQuotas,
    ListRules,
    ListTenants,
    ListTokens,
    ListUsers,
    PutQuota,
    QuotaList,
    RemoveQuota,
    RemoveRule,
    RemoveTenant,
    RemoveUser,
    RevokeToken,
    RuleList,
    TenantList,
    TokenList,
    TokenMade,
    UserList,
    WhoAmI,
)
from tailrace.errors import InvalidRequest
from tailrace.ports import BrokerVerbs

Effect = Literal["allow", "deny"]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
LAST_US = (datetime(9999, 12, 31, tzinfo=UTC) - EPOCH) // timedelta(microseconds=1)
Paged = ListUsers | ListTokens | ListRules | ListQuotas | ListTenants
Page = UserList | TokenList | RuleList | QuotaList | TenantList


class AccessCaller(msgspec.Struct, frozen=True):
    """Who the broker takes a client for."""

    user: str
    """Empty while the broker has no users, and for whoever runs the broker."""
    proof: str
    """How it was proved: password, token, certificate, socket, owner or open."""
    credential: str
    """The id of the token or the name of the certificate."""
    teams: list[str]
    administrator: bool
    tenant: str
    """Empty outside of tenants."""
    expires: datetime | None
    """When the token ends."""


class AccessUser(msgspec.Struct, frozen=True):
    """A user, and the ways in which it can log in besides tokens."""

    name: str
    teams: list[str]
    certificates: list[str]
    system_users: list[str]
    administrator: bool
    has_password: bool
    created: datetime | None


class AccessToken(msgspec.Struct, frozen=True):
    """A token; nobody can read its secret any more."""

    id: str
    user: str
    name: str
    created: datetime | None
    expires: datetime | None


class NewToken(msgspec.Struct, frozen=True):
    """A token that was just made: the only time at which its secret can be read."""

    id: str
    user: str
    name: str
    secret: str
    expires: datetime | None

    def __repr__(self) -> str:
        return f"NewToken(id={self.id!r}, user={self.user!r}, name={self.name!r})"


class AccessCheck(msgspec.Struct, frozen=True):
    """Whether something is allowed, why, and the number of the rule that decided, if one did."""

    allowed: bool
    why: str
    rule: int | None


class AccessTenant(msgspec.Struct, frozen=True):
    """A tenant, and how many users it has."""

    name: str
    users: int
    created: datetime | None


class AccessAdmin:
    """Say who may do what. Every call takes a `timeout` in seconds; None means the client's.

    Only administrators may call most of this: those of a tenant for their tenant. Everybody may ask who they
    are and what they may do, change their own password, and make, list and revoke tokens of their own."""

    def __init__(self, verbs: BrokerVerbs, timeout: float) -> None:
        self._verbs = verbs
        self._timeout = timeout

    def _time(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout

    async def whoami(self, *, timeout: float | None = None) -> AccessCaller:
        """Who the broker takes this client for, and how it was proved."""
        reply = await ask(self._verbs, WhoAmI(), self._time(timeout))
        assert isinstance(reply, CallerInfo)
        return AccessCaller(
            reply.user,
            reply.proof,
            reply.credential,
            reply.teams,
            reply.administrator,
            reply.tenant,
            _moment(reply.expires_us),
        )

    async def check(
        self,
        right: Right,
        resource: Resource,
        name: str = "",
        *,
        user: str | None = None,
        timeout: float | None = None,
    ) -> AccessCheck:
        """Whether a user (None: this client) may do something to a topic, a group or the broker, and which
        rule says so."""
        reply = await ask(self._verbs, CheckAccess(right, resource, name, user), self._time(timeout))
        assert isinstance(reply, AccessChecked)
        return AccessCheck(reply.allowed, reply.why, reply.rule)

    # -- users

    async def add_user(
        self,
        name: str,
        *,
        password: str | None = None,
        teams: Sequence[str] = (),
        certificates: Sequence[str] = (),
        system_users: Sequence[str] = (),
        administrator: bool = False,
        timeout: float | None = None,
    ) -> AccessUser:
        """Add a user. The first one is an administrator in any case, and from then on everybody has to log
        in. `certificates` are names of client certificates, such as `DNS:worker`; `system_users` are users of
        the operating system, who are known when they come through the broker's Unix socket."""
        request = AddUser(
            name,
            password,
            _names("teams", teams),
            _names("certificates", certificates),
            _names("system_users", system_users),
            administrator,
        )
        reply = await ask(self._verbs, request, self._time(timeout), repeatable=False)
        assert isinstance(reply, UserList)
        return _user(reply.users[0])

    async def alter_user(
        self,
        name: str,
        *,
        password: str | None = None,
        teams: Sequence[str] | None = None,
        certificates: Sequence[str] | None = None,
        system_users: Sequence[str] | None = None,
        administrator: bool | None = None,
        timeout: float | None = None,
    ) -> AccessUser:
        """Change a user; what is None stays, and an empty password removes it. Connections that logged in
        with an older password end."""
        request = AlterUser(
            name,
            password,
            None if teams is None else _names("teams", teams),
            None if certificates is None else _names("certificates", certificates),
            None if system_users is None else _names("system_users", system_users),
            administrator,
        )
        reply = await ask(self._verbs, request, self._time(timeout))
        assert isinstance(reply, UserList)
        return _user(reply.users[0])

    async def remove_user(self, name: str, *, timeout: float | None = None) -> None:
        """Remove a user with its tokens, its quota and the rules about it; its connections end."""
        await ask(self._verbs, RemoveUser(name), self._time(timeout), repeatable=False)

    async def list_users(self, prefix: str = "", *, timeout: float | None = None) -> list[AccessUser]:
        """Users by name."""
        return [_user(fields) for fields in await self._rows(ListUsers(prefix), timeout)]

    # -- tokens

    async def create_token(
        self,
        name: str,
        *,
        user: str | None = None,
        expires: datetime | timedelta | None = None,
        timeout: float | None = None,
    ) -> NewToken:
        """Make a token, for the caller itself unless a user is named. It ends at a time or after a span, or
        when it is revoked. Its secret is in the result, and nowhere else ever again."""
        request = CreateToken(name, user, self._expiry_us(expires))
        reply = await ask(self._verbs, request, self._time(timeout), repeatable=False)
        assert isinstance(reply, TokenMade)
        return NewToken(reply.id, reply.user, reply.name, reply.secret, _moment(reply.expires_us))

    async def list_tokens(
        self, user: str | None = None, *, timeout: float | None = None
    ) -> list[AccessToken]:
        """The tokens of a user, or all that the caller may see."""
        return [
            AccessToken(
                fields["id"],
                fields["user"],
                fields["name"],
                _moment(fields.get("created_us")),
                _moment(fields.get("expires_us")),
            )
            for fields in await self._rows(ListTokens(user), timeout)
        ]

    async def revoke_token(self, id: str, *, timeout: float | None = None) -> None:
        """End a token, by its id; connections that logged in with it end."""
        await ask(self._verbs, RevokeToken(id), self._time(timeout), repeatable=False)

    # -- rules

    async def add_rule(
        self,
        effect: Effect,
        subject: str,
        rights: Sequence[Right],
        resource: Resource,
        pattern: str = "*",
        *,
        timeout: float | None = None,
    ) -> Rule:
        """Allow or deny rights. `subject` is `user:NAME`, `team:NAME` or `everyone`; in `pattern`, `*` stands
        for any text. A rule that denies wins over all that allow."""
        if isinstance(rights, str):
            raise InvalidRequest(f"rights: several, such as [{rights!r}], not text")
        request = AddRule(effect, subject, list(rights), resource, pattern)
        reply = await ask(self._verbs, request, self._time(timeout), repeatable=False)
        assert isinstance(reply, RuleList)
        return msgspec.convert(reply.rules[0], Rule)

    async def remove_rule(self, id: int, *, timeout: float | None = None) -> None:
        """Remove a rule by its number."""
        await ask(self._verbs, RemoveRule(_number("id", id)), self._time(timeout), repeatable=False)

    async def list_rules(self, subject: str | None = None, *, timeout: float | None = None) -> list[Rule]:
        """Rules in the order of their numbers, or only those of one subject."""
        return [msgspec.convert(fields, Rule) for fields in await self._rows(ListRules(subject), timeout)]

    # -- quotas

    async def put_quota(
        self,
        subject: str,
        *,
        connections_max: int | None = None,
        requests_per_second: int | None = None,
        bytes_per_second: int | None = None,
        in_flight_max: int | None = None,
        topics_max: int | None = None,
        storage_bytes_max: int | None = None,
        timeout: float | None = None,
    ) -> Quota:
        """Set the bounds of a subject, all of them: what is None has no bound. The subject is `user:NAME`,
        `team:NAME` (each of its users), `tenant:NAME` (all of its users together), `address:IP` or
        `address:*` (each address), or `everyone` (each user)."""
        bounds = {
            "connections_max": connections_max,
            "requests_per_second": requests_per_second,
            "bytes_per_second": bytes_per_second,
            "in_flight_max": in_flight_max,
            "topics_max": topics_max,
            "storage_bytes_max": storage_bytes_max,
        }
        for name, bound in bounds.items():
            if bound is not None:
                _number(name, bound)
        reply = await ask(self._verbs, PutQuota(subject, **bounds), self._time(timeout))
        assert isinstance(reply, QuotaList)
        return msgspec.convert(reply.quotas[0], Quota)

    async def remove_quota(self, subject: str, *, timeout: float | None = None) -> None:
        """Remove the bounds of a subject."""
        await ask(self._verbs, RemoveQuota(subject), self._time(timeout), repeatable=False)

    async def list_quotas(self, *, timeout: float | None = None) -> list[Quota]:
        """All quotas, by subject."""
        return [msgspec.convert(fields, Quota) for fields in await self._rows(ListQuotas(), timeout)]

    # -- tenants

    async def add_tenant(self, name: str, *, timeout: float | None = None) -> AccessTenant:
        """Add a tenant: the users, topics and groups called `NAME/...` are its own, and its users reach
        nothing else."""
        reply = await ask(self._verbs, AddTenant(name), self._time(timeout), repeatable=False)
        assert isinstance(reply, TenantList)
        return _tenant(reply.tenants[0])

    async def remove_tenant(self, name: str, *, timeout: float | None = None) -> None:
        """Remove a tenant without users, with its quota; topics and groups of its name stay."""
        await ask(self._verbs, RemoveTenant(name), self._time(timeout), repeatable=False)

    async def list_tenants(self, *, timeout: float | None = None) -> list[AccessTenant]:
        """All tenants, by name."""
        return [_tenant(fields) for fields in await self._rows(ListTenants(), timeout)]

    async def _rows(self, request: Paged, timeout: float | None) -> list[dict[str, Any]]:
        """The rows of a list, all of its pages together."""
        found: list[dict[str, Any]] = []
        while True:
            reply = await ask(self._verbs, request, self._time(timeout))
            assert isinstance(reply, Page)
            found += getattr(reply, reply.__struct_fields__[0])  # The rows are the first field of each.
            if reply.next is None:
                return found
            request = msgspec.structs.replace(request, after=reply.next)

    def _expiry_us(self, expires: datetime | timedelta | None) -> int | None:
        """When a token ends, in microseconds since 1970; spans begin at the client's time."""
        if expires is None:
            return None
        now_us = self._verbs.clock.wall_ns() // 1000
        if isinstance(expires, timedelta):
            expires_us = now_us + expires // timedelta(microseconds=1)
        elif isinstance(expires, datetime) and expires.tzinfo is not None:
            expires_us = (expires - EPOCH) // timedelta(microseconds=1)
        else:
            raise InvalidRequest(f"expires: a timedelta, or a datetime with a time zone, not {expires!r}")
        if not now_us < expires_us <= LAST_US:
            raise InvalidRequest("expires: a time that is still to come, before the year 10000")
        return expires_us


def _names(what: str, names: Sequence[str]) -> list[str]:
    """Several names, as they were given; a single text would be taken for its letters."""
    if isinstance(names, str):
        raise InvalidRequest(f"{what}: several, such as [{names!r}], not text")
    return list(names)


def _number(name: str, value: int) -> int:
    if whole_of(name, value) > NUMBER_MAX:
        raise InvalidRequest(f"{name}: at most {NUMBER_MAX}, not {value}")
    return value


def _user(fields: dict[str, Any]) -> AccessUser:
    return AccessUser(
        fields["name"],
        list(fields.get("teams", ())),
        list(fields.get("certificates", ())),
        list(fields.get("system_users", ())),
        bool(fields.get("administrator")),
        bool(fields.get("password")),
        _moment(fields.get("created_us")),
    )


def _tenant(fields: dict[str, Any]) -> AccessTenant:
    return AccessTenant(fields["name"], fields.get("users", 0), _moment(fields.get("created_us")))


def _moment(time_us: int | None) -> datetime | None:
    return moment(time_us) if time_us else None
