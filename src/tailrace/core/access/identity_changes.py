"""Users, tokens, rules, quotas and tenants are added, altered and removed, or the change is refused.

`change` is a function from identities and a command to new identities and a reply. What it needs from clock
and entropy, and the hash of a password, come in as `Particulars`. It decides about what is stored; who may
ask for it is a matter of `broker.access.authority`.

What holds after every change:

- Names are well formed, and within the bounds below there are as many of each kind as somebody wants.
- A name with `/` begins with a tenant that is there.
- Every token, and every rule and quota about a user, is of a user that is there.
- A certificate and a user of the operating system stand for one user each.
- As soon as there is a user, there is a *keeper*: an administrator outside of all tenants with a way to log
  in that does not expire. So deny by default locks nobody out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tailrace.core.access.identity_names import (
    check_user_name,
    names_problems,
    password_problems,
    pattern_problems,
    rights_problems,
    shown,
    subject_problems,
    tenant_of,
)
from tailrace.core.model.access import RIGHTS, Identities, Quota, Rule, Tenant, Token, User
from tailrace.core.model.access_commands import (
    AddRule,
    AddTenant,
    AddUser,
    AlterUser,
    CreateToken,
    PutQuota,
    QuotaList,
    RemoveQuota,
    RemoveRule,
    RemoveTenant,
    RemoveUser,
    RevokeToken,
    RuleList,
    TenantList,
    TokenMade,
    UserList,
)
from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import AlreadyExists, InvalidRequest, NotFound, TooLarge

USERS_MAX = 10_000
TOKENS_MAX = 100_000
TOKENS_OF_USER_MAX = 1_000
RULES_MAX = 10_000
QUOTAS_MAX = 10_000
TENANTS_MAX = 1_000
QUOTA_MAX = (1 << 53) - 1
EXPIRED_KEPT_US = 7 * 86_400_000_000
"""So long after its end a token is still listed; then the next new token sweeps it out."""

_BOUNDS = tuple(field for field in Quota.__struct_fields__ if field != "subject")

IdentityChange = (
    AddUser
    | AlterUser
    | RemoveUser
    | CreateToken
    | RevokeToken
    | AddRule
    | RemoveRule
    | PutQuota
    | RemoveQuota
    | AddTenant
    | RemoveTenant
)


class Particulars(msgspec.Struct, frozen=True):
    """What a change is given from outside. `now_us` is the wall clock. `password` is the hash of the new
    password; `token_id`, `digest` and `secret` are of the new token, and its owner unless one is named. A
    token made with a token ends with it: `expires_max_us`."""

    now_us: int
    password: str = ""
    token_id: str = ""
    digest: str = ""
    secret: str = ""
    owner: str = ""
    expires_max_us: int | None = None

    def __repr__(self) -> str:
        return f"Particulars(now_us={self.now_us}, token_id={self.token_id!r}, owner={self.owner!r})"


Changed = tuple[Identities, Reply]


def change(identities: Identities, command: IdentityChange, given: Particulars) -> Changed | Refusal:
    """Carry out a change. If there is nothing to store, the very same identities are returned."""
    return _CHANGES[type(command)](identities, command, given)


def first_administrator(identities: Identities, name: str, token: Token) -> Identities:
    """The identities with their first user, an administrator with one token."""
    assert not identities.users, "there are users"
    user = User(name=name, administrator=True, created_us=token.created_us, altered_us=token.created_us)
    return _next(identities, users={name: user}, tokens={token.id: token})


# -- users


def _add_user(identities: Identities, command: AddUser, given: Particulars) -> Changed | Refusal:
    first = not identities.users
    name = command.name
    problems = [f"name: {problem}" for problem in check_user_name(name)]
    tenant = tenant_of(name)
    if tenant and not problems:
        if tenant not in identities.tenants:
            problems.append(f"name: there is no tenant {tenant!r}: add it first")
        elif first:
            problems.append("name: the first user is an administrator of the broker, and so of no tenant")
    problems += password_problems(command.password, name)
    user = User(
        name=name,
        password=given.password if command.password else "",
        teams=_distinct(command.teams),
        certificates=_distinct(command.certificates),
        system_users=_distinct(command.system_users),
        administrator=command.administrator or first,
        created_us=given.now_us,
        altered_us=given.now_us,
    )
    problems += names_problems(identities, user)
    if first and not (command.password or user.certificates or user.system_users):
        problems.append(
            "password: the first user needs one, or a certificate or a user of the operating system; "
            "without that nobody could log in any more"
        )
    if problems:
        return _refused("user", name, problems)
    if name in identities.users:
        return Refusal(AlreadyExists.code, f"user {name!r} exists already")
    if len(identities.users) >= USERS_MAX:
        return _too_many("users", USERS_MAX)
    return _next(identities, users={**identities.users, name: user}), UserList([user_row(user)])


def _alter_user(identities: Identities, command: AlterUser, given: Particulars) -> Changed | Refusal:
    user = identities.users.get(command.name)
    if user is None:
        return _no_user(command.name)
    values: dict[str, Any] = {}
    for field in ("teams", "certificates", "system_users"):
        names = getattr(command, field)
        if names is not None:
            values[field] = _distinct(names)
    if command.administrator is not None:
        values["administrator"] = command.administrator
    problems = []
    if command.password is not None:
        problems += password_problems(command.password or None, command.name)
        values["password"] = given.password if command.password else ""
        # The number has to be another one, also if the clock was put back: connections compare it.
        values["altered_us"] = max(given.now_us, user.altered_us + 1)
    after = msgspec.structs.replace(user, **values)
    problems += names_problems(identities, after, only=values)
    changed = _next(identities, users={**identities.users, user.name: after})
    if not problems and not _kept(changed):
        field = "administrator" if command.administrator is False else "password"
        problems.append(f"{field}: {_LAST.format(user.name)}")
    if problems:
        return _refused("user", command.name, problems)
    row = UserList([user_row(after)])
    return (identities, row) if after == user else (changed, row)


def _remove_user(identities: Identities, command: RemoveUser, given: Particulars) -> Changed | Refusal:
    name = command.name
    if name not in identities.users:
        return _no_user(name)
    users = {other: user for other, user in identities.users.items() if other != name}
    if not any(_keeps(user, identities) for user in users.values()):
        return _refused("user", name, [f"name: {_LAST.format(name)}"])
    subject = f"user:{name}"
    return _next(
        identities,
        users=users,
        tokens={token.id: token for token in identities.tokens.values() if token.user != name},
        rules=tuple(rule for rule in identities.rules if rule.subject != subject),
        quotas={about: quota for about, quota in identities.quotas.items() if about != subject},
    ), Done()


_LAST = (
    "{!r} is the last administrator of the broker with a way to log in that does not expire: "
    "nobody could change anything any more"
)


def _kept(identities: Identities) -> bool:
    """Whether there is an administrator who can log in for good."""
    return any(_keeps(user, identities) for user in identities.users.values())


def _keeps(user: User, identities: Identities) -> bool:
    if not user.administrator or tenant_of(user.name):
        return False
    if user.password or user.certificates or user.system_users:
        return True
    return any(token.user == user.name and token.expires_us is None for token in identities.tokens.values())


# -- tokens


def _create_token(identities: Identities, command: CreateToken, given: Particulars) -> Changed | Refusal:
    owner = command.user if command.user is not None else given.owner
    problems = [f"name: {problem}" for problem in check_user_name(command.name)]
    if not owner:
        problems.append("user: say whose token it is to be")
    expires_us = command.expires_us
    if expires_us is not None and expires_us <= given.now_us:
        problems.append("expires_us: that is in the past")
    if given.expires_max_us is not None and (expires_us is None or expires_us > given.expires_max_us):
        problems.append("expires_us: a token that is made with a token cannot live longer than that one")
    if problems:
        return _refused("token", command.name, problems)
    if owner not in identities.users:
        return _no_user(owner)
    if given.token_id in identities.tokens:
        return Refusal(AlreadyExists.code, f"token {given.token_id!r} exists already")
    tokens = {
        token.id: token
        for token in identities.tokens.values()
        if token.expires_us is None or token.expires_us > given.now_us - EXPIRED_KEPT_US
    }
    own = [token for token in tokens.values() if token.user == owner]
    if any(token.name == command.name and not expired(token, given.now_us) for token in own):
        return Refusal(AlreadyExists.code, f"user {owner!r} has a token {command.name!r} already")
    if len(own) >= TOKENS_OF_USER_MAX:
        return _too_many(f"tokens of {owner!r}", TOKENS_OF_USER_MAX)
    if len(tokens) >= TOKENS_MAX:
        return _too_many("tokens", TOKENS_MAX)
    token = Token(
        id=given.token_id,
        user=owner,
        name=command.name,
        digest=given.digest,
        created_us=given.now_us,
        expires_us=expires_us,
    )
    reply = TokenMade(token.id, owner, token.name, given.secret, expires_us)
    return _next(identities, tokens={**tokens, token.id: token}), reply


def expired(token: Token, now_us: int) -> bool:
    """Whether a token has come to its end."""
    return token.expires_us is not None and token.expires_us <= now_us


def _revoke_token(identities: Identities, command: RevokeToken, given: Particulars) -> Changed | Refusal:
    token = identities.tokens.get(command.id)
    if token is None:
        return Refusal(NotFound.code, f"there is no token {shown(command.id)}")
    rest = {other.id: other for other in identities.tokens.values() if other is not token}
    changed = _next(identities, tokens=rest)
    if not _kept(changed):
        return _refused("token", command.id, [f"id: {_LAST.format(token.user)}"])
    return changed, Done()


# -- rules


def _add_rule(identities: Identities, command: AddRule, given: Particulars) -> Changed | Refusal:
    problems = subject_problems(identities, command.subject, ("user", "team"))
    rights = tuple(right for right in RIGHTS if right in command.rights)
    problems += rights_problems(rights, command.resource) + pattern_problems(
        command.resource, command.pattern
    )
    if problems:
        return _refused("rule", command.subject, problems)
    rule = Rule(
        id=identities.next_rule,
        effect=command.effect,
        subject=command.subject,
        rights=rights,
        resource=command.resource,
        pattern=command.pattern,
    )
    for other in identities.rules:
        if msgspec.structs.replace(other, id=rule.id) == rule:
            return identities, RuleList([rule_row(other)])
    if len(identities.rules) >= RULES_MAX:
        return _too_many("rules", RULES_MAX)
    changed = _next(identities, rules=(*identities.rules, rule), next_rule=rule.id + 1)
    return changed, RuleList([rule_row(rule)])


def _remove_rule(identities: Identities, command: RemoveRule, given: Particulars) -> Changed | Refusal:
    rest = tuple(rule for rule in identities.rules if rule.id != command.id)
    if len(rest) == len(identities.rules):
        return Refusal(NotFound.code, f"there is no rule {command.id}")
    return _next(identities, rules=rest), Done()


# -- quotas and tenants


def _put_quota(identities: Identities, command: PutQuota, given: Particulars) -> Changed | Refusal:
    problems = subject_problems(identities, command.subject, ("user", "team", "tenant", "address"))
    values = {field: getattr(command, field) for field in _BOUNDS}
    if all(value is None for value in values.values()):
        problems.append(f"at least one bound is needed: {', '.join(_BOUNDS)}")
    problems += [
        f"{field}: from 1 to {QUOTA_MAX}, not {value}"
        for field, value in values.items()
        if value is not None and not 1 <= value <= QUOTA_MAX
    ]
    if problems:
        return _refused("quota", command.subject, problems)
    quota = Quota(subject=command.subject, **values)
    row = QuotaList([msgspec.structs.asdict(quota)])
    if identities.quotas.get(quota.subject) == quota:
        return identities, row
    if len(identities.quotas) >= QUOTAS_MAX and quota.subject not in identities.quotas:
        return _too_many("quotas", QUOTAS_MAX)
    return _next(identities, quotas={**identities.quotas, quota.subject: quota}), row


def _remove_quota(identities: Identities, command: RemoveQuota, given: Particulars) -> Changed | Refusal:
    if command.subject not in identities.quotas:
        return Refusal(NotFound.code, f"there is no quota of {shown(command.subject)}")
    rest = {about: quota for about, quota in identities.quotas.items() if about != command.subject}
    return _next(identities, quotas=rest), Done()


def _add_tenant(identities: Identities, command: AddTenant, given: Particulars) -> Changed | Refusal:
    problems = [f"name: {problem}" for problem in check_user_name(command.name)]
    if "/" in command.name or "@" in command.name:
        problems.append("name: the name of a tenant has no '/' and no '@'")
    if problems:
        return _refused("tenant", command.name, problems)
    if command.name in identities.tenants:
        return Refusal(AlreadyExists.code, f"tenant {command.name!r} exists already")
    if len(identities.tenants) >= TENANTS_MAX:
        return _too_many("tenants", TENANTS_MAX)
    tenant = Tenant(name=command.name, created_us=given.now_us)
    changed = _next(identities, tenants={**identities.tenants, tenant.name: tenant})
    return changed, TenantList([tenant_row(tenant, 0)])


def _remove_tenant(identities: Identities, command: RemoveTenant, given: Particulars) -> Changed | Refusal:
    name = command.name
    if name not in identities.tenants:
        return Refusal(NotFound.code, f"there is no tenant {shown(name)}")
    users = sum(tenant_of(user) == name for user in identities.users)
    if users:
        return _refused("tenant", name, [f"name: it has {users} user(s): remove them first"])
    teams = f"team:{name}/"
    return _next(
        identities,
        tenants={other: tenant for other, tenant in identities.tenants.items() if other != name},
        rules=tuple(rule for rule in identities.rules if not rule.subject.startswith(teams)),
        quotas={
            about: quota
            for about, quota in identities.quotas.items()
            if about != f"tenant:{name}" and not about.startswith(teams)
        },
    ), Done()


_CHANGES: dict[type, Callable[[Identities, Any, Particulars], Changed | Refusal]] = {
    AddUser: _add_user,
    AlterUser: _alter_user,
    RemoveUser: _remove_user,
    CreateToken: _create_token,
    RevokeToken: _revoke_token,
    AddRule: _add_rule,
    RemoveRule: _remove_rule,
    PutQuota: _put_quota,
    RemoveQuota: _remove_quota,
    AddTenant: _add_tenant,
    RemoveTenant: _remove_tenant,
}
CHANGES = tuple(_CHANGES)
"""The types of all changes."""


# -- rows of answers, without secrets, hashes and digests


def user_row(user: User) -> dict[str, Any]:
    """A user as `UserList` has it."""
    return {
        "name": user.name,
        "teams": list(user.teams),
        "certificates": list(user.certificates),
        "system_users": list(user.system_users),
        "administrator": user.administrator,
        "password": bool(user.password),
        "created_us": user.created_us,
    }


def token_row(token: Token) -> dict[str, Any]:
    """A token as `TokenList` has it."""
    return {field: getattr(token, field) for field in Token.__struct_fields__ if field != "digest"}


def rule_row(rule: Rule) -> dict[str, Any]:
    """A rule as `RuleList` has it."""
    return {**msgspec.structs.asdict(rule), "rights": list(rule.rights)}


def tenant_row(tenant: Tenant, users: int) -> dict[str, Any]:
    """A tenant as `TenantList` has it, with the number of its users."""
    return {"name": tenant.name, "created_us": tenant.created_us, "users": users}


def _next(identities: Identities, **fields: Any) -> Identities:
    return msgspec.structs.replace(identities, sequence=identities.sequence + 1, **fields)


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _refused(kind: str, name: str, problems: list[str]) -> Refusal:
    text = f"{kind} {shown(name)}: {'; '.join(problems)}"
    return Refusal(InvalidRequest.code, text, details={"problems": problems})


def _no_user(name: str) -> Refusal:
    return Refusal(NotFound.code, f"there is no user {shown(name)}")


def _too_many(what: str, most: int) -> Refusal:
    return Refusal(TooLarge.code, f"there are {most:,} {what}, the most that there may be")
