"""Requests and replies about users, tokens, rules, quotas and tenants.

Requests that carry a secret do not show it in their `repr`.
"""

from __future__ import annotations

from typing import Any, Literal

from tailrace.core.model.access import Resource, Right
from tailrace.core.model.identifiers import Command


class WhoAmI(Command, frozen=True, tag="who_am_i"):
    """Ask who the broker takes the caller for."""


class AddUser(Command, frozen=True, tag="add_user"):
    """Add a user. The first one is an administrator in any case."""

    name: str
    password: str | None = None
    teams: list[str] = []
    certificates: list[str] = []
    system_users: list[str] = []
    administrator: bool = False

    def __repr__(self) -> str:
        return f"AddUser(name={self.name!r}, teams={self.teams!r}, administrator={self.administrator!r})"


class AlterUser(Command, frozen=True, tag="alter_user"):
    """Change a user; what is None stays. Connections that logged in with an older password end."""

    name: str
    password: str | None = None
    teams: list[str] | None = None
    certificates: list[str] | None = None
    system_users: list[str] | None = None
    administrator: bool | None = None

    def __repr__(self) -> str:
        return f"AlterUser(name={self.name!r}, teams={self.teams!r}, administrator={self.administrator!r})"


class RemoveUser(Command, frozen=True, tag="remove_user"):
    """Remove a user with its tokens and the rules about it; its connections end."""

    name: str


class ListUsers(Command, frozen=True, tag="list_users"):
    """List users by name."""

    prefix: str = ""


class CreateToken(Command, frozen=True, tag="create_token"):
    """Make a token, for the caller itself unless a user is named. Its secret is in the answer, and nowhere
    else ever again."""

    name: str
    user: str | None = None
    expires_us: int | None = None


class ListTokens(Command, frozen=True, tag="list_tokens"):
    """List the tokens of a user, or all that the caller may see."""

    user: str | None = None


class RevokeToken(Command, frozen=True, tag="revoke_token"):
    """End a token, by its id; connections that logged in with it end."""

    id: str


class AddRule(Command, frozen=True, tag="add_rule"):
    """Add a rule; see `core.model.access.Rule`."""

    effect: Literal["allow", "deny"]
    subject: str
    rights: list[Right]
    resource: Resource
    pattern: str = "*"


class RemoveRule(Command, frozen=True, tag="remove_rule"):
    """Remove a rule by its number."""

    id: int


class ListRules(Command, frozen=True, tag="list_rules"):
    """List rules, of one subject if it is named."""

    subject: str | None = None


class CheckAccess(Command, frozen=True, tag="check_access"):
    """Ask whether a user (None: the caller) may do something, and which rule says so."""

    right: Right
    resource: Resource
    name: str = ""
    user: str | None = None


class PutQuota(Command, frozen=True, tag="put_quota"):
    """Set the bounds of a subject, all of them: what is None has no bound. See `core.model.access.Quota`."""

    subject: str
    connections_max: int | None = None
    requests_per_second: int | None = None
    bytes_per_second: int | None = None
    in_flight_max: int | None = None
    topics_max: int | None = None
    storage_bytes_max: int | None = None


class RemoveQuota(Command, frozen=True, tag="remove_quota"):
    """Remove the bounds of a subject."""

    subject: str


class ListQuotas(Command, frozen=True, tag="list_quotas"):
    """List all quotas."""


class AddTenant(Command, frozen=True, tag="add_tenant"):
    """Add a tenant."""

    name: str


class RemoveTenant(Command, frozen=True, tag="remove_tenant"):
    """Remove a tenant without users, with its quota; topics and groups of its name stay."""

    name: str


class ListTenants(Command, frozen=True, tag="list_tenants"):
    """List all tenants."""


AccessRequest = (
    WhoAmI
    | AddUser
    | AlterUser
    | RemoveUser
    | ListUsers
    | CreateToken
    | ListTokens
    | RevokeToken
    | AddRule
    | RemoveRule
    | ListRules
    | CheckAccess
    | PutQuota
    | RemoveQuota
    | ListQuotas
    | AddTenant
    | RemoveTenant
    | ListTenants
)


class CallerInfo(Command, frozen=True, tag="caller"):
    """Who the caller is: the user (empty if the broker has none, or for its owner), how it was proved, and
    its teams. `tenant` is empty outside of tenants."""

    user: str
    proof: str
    credential: str = ""
    teams: list[str] = []
    administrator: bool = False
    tenant: str = ""
    expires_us: int | None = None


class UserList(Command, frozen=True, tag="users"):
    """Users, a dict each: name, teams, certificates, system_users, administrator, password (whether there is
    one), created_us."""

    users: list[dict[str, Any]]


class TokenMade(Command, frozen=True, tag="token_made"):
    """A new token with its secret."""

    id: str
    user: str
    name: str
    secret: str
    expires_us: int | None = None

    def __repr__(self) -> str:
        return f"TokenMade(id={self.id!r}, user={self.user!r}, name={self.name!r})"


class TokenList(Command, frozen=True, tag="tokens"):
    """Tokens, a dict each: id, user, name, created_us, expires_us."""

    tokens: list[dict[str, Any]]


class RuleList(Command, frozen=True, tag="rules"):
    """Rules, a dict each: id, effect, subject, rights, resource, pattern."""

    rules: list[dict[str, Any]]


class AccessChecked(Command, frozen=True, tag="access_checked"):
    """Whether something is allowed, why in words, and the rule that decided, if one did."""

    allowed: bool
    why: str
    rule: int | None = None


class QuotaList(Command, frozen=True, tag="quotas"):
    """Quotas, a dict each: the fields of `PutQuota`."""

    quotas: list[dict[str, Any]]


class TenantList(Command, frozen=True, tag="tenants"):
    """Tenants, a dict each: name, created_us, users."""

    tenants: list[dict[str, Any]]


AccessReply = (
    CallerInfo | UserList | TokenMade | TokenList | RuleList | AccessChecked | QuotaList | TenantList
)
