"""Requests and replies about users, tokens, rules, quotas and tenants.

A change is answered by what it made: a `UserList`, `RuleList`, `QuotaList` or `TenantList` of one, a
`TokenMade`; a removal by `Done`. All problems of a change are told in one refusal, with
`details["problems"]`, each beginning with the name of its field.

Lists come in pages, by name, id or number: at most `limit` rows behind `after`. The `next` of an answer is
the `after` of the page that follows, and None on the last one.

Requests and answers that carry a secret do not show it in their `repr`.
"""

from __future__ import annotations

from typing import Any, Literal

from tailrace.core.model.access import Resource, Right
from tailrace.core.model.identifiers import Command


class WhoAmI(Command, frozen=True, tag="who_am_i"):
    """Ask who the broker takes the caller for. Answered by `CallerInfo`."""


class AddUser(Command, frozen=True, tag="add_user"):
    """Add a user. The first one is an administrator in any case, belongs to no tenant, and needs a password,
    a certificate or a user of the operating system: once it is there, nobody gets in unknown."""

    name: str
    password: str | None = None
    teams: list[str] = []
    certificates: list[str] = []
    system_users: list[str] = []
    administrator: bool = False

    def __repr__(self) -> str:
        return f"AddUser(name={self.name!r}, teams={self.teams!r}, administrator={self.administrator!r})"


class AlterUser(Command, frozen=True, tag="alter_user"):
    """Change a user; what is None stays, and an empty password removes it. Connections that logged in with
    an older password end. Some administrator outside of all tenants has to remain, with a way to log in that
    does not expire."""

    name: str
    password: str | None = None
    teams: list[str] | None = None
    certificates: list[str] | None = None
    system_users: list[str] | None = None
    administrator: bool | None = None

    def __repr__(self) -> str:
        return f"AlterUser(name={self.name!r}, teams={self.teams!r}, administrator={self.administrator!r})"


class RemoveUser(Command, frozen=True, tag="remove_user"):
    """Remove a user with its tokens, its quota and the rules about it; its connections end. The last
    administrator cannot be removed."""

    name: str


class ListUsers(Command, frozen=True, tag="list_users"):
    """List users by name. Answered by `UserList`."""

    prefix: str = ""
    after: str = ""
    limit: int = 1000


class CreateToken(Command, frozen=True, tag="create_token"):
    """Make a token, for the caller itself unless a user is named. Its secret is in the answer, `TokenMade`,
    and nowhere else ever again. Who logged in with a token gets none that lives longer than that, unless as
    an administrator. `name` is for people; a user's tokens have different ones."""

    name: str
    user: str | None = None
    expires_us: int | None = None


class ListTokens(Command, frozen=True, tag="list_tokens"):
    """List the tokens of a user, or all that the caller may see, by id. Answered by `TokenList`."""

    user: str | None = None
    after: str = ""
    limit: int = 1000


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
    """List rules by number, of one subject if it is named. Answered by `RuleList`."""

    subject: str | None = None
    after: int = 0
    limit: int = 1000


class CheckAccess(Command, frozen=True, tag="check_access"):
    """Ask whether a user (None: the caller) may do something, and which rule says so. Answered by
    `AccessChecked`."""

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
    """List quotas by subject. Answered by `QuotaList`."""

    after: str = ""
    limit: int = 1000


class AddTenant(Command, frozen=True, tag="add_tenant"):
    """Add a tenant; its name is one segment, without `/`."""

    name: str


class RemoveTenant(Command, frozen=True, tag="remove_tenant"):
    """Remove a tenant without users, with its quota; topics and groups of its name stay."""

    name: str


class ListTenants(Command, frozen=True, tag="list_tenants"):
    """List tenants by name. Answered by `TenantList`."""

    after: str = ""
    limit: int = 1000


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
    next: str | None = None


class TokenMade(Command, frozen=True, tag="token_made"):
    """A new token with its secret: `trt_ID_...`, the whole text that a client logs in with."""

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
    next: str | None = None


class RuleList(Command, frozen=True, tag="rules"):
    """Rules, a dict each: id, effect, subject, rights, resource, pattern."""

    rules: list[dict[str, Any]]
    next: int | None = None


class AccessChecked(Command, frozen=True, tag="access_checked"):
    """Whether something is allowed, why in words, and the rule that decided, if one did."""

    allowed: bool
    why: str
    rule: int | None = None


class QuotaList(Command, frozen=True, tag="quotas"):
    """Quotas, a dict each: the fields of `PutQuota`."""

    quotas: list[dict[str, Any]]
    next: str | None = None


class TenantList(Command, frozen=True, tag="tenants"):
    """Tenants, a dict each: name, created_us, users."""

    tenants: list[dict[str, Any]]
    next: str | None = None


AccessReply = (
    CallerInfo | UserList | TokenMade | TokenList | RuleList | AccessChecked | QuotaList | TenantList
)
