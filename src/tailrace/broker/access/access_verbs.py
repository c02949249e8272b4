"""Verbs of users, tokens, rules, quotas and tenants: a change is stored before it applies, one at a time.

    request ──▶ password hashed ──▶ in line ──▶ decided ──▶ stored ──▶ `Authority.put` ──▶ the answer

A change is decided on what was stored last, after asking once more whether the caller may make it: an
administrator who was removed while a password was hashed changes nothing. If storing fails, the change is
refused and does not apply; with an outcome that is unknown, a restart may find it.

The secret of a token is in its answer and nowhere else. Neither lists nor refusals show hashes or digests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from tailrace.broker.access.authority import Authority
from tailrace.broker.access.first_administrator import FirstTokenFile, with_administrator
from tailrace.broker.access.passwords import Passwords
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.core.access.identity_changes import (
    CHANGES,
    IdentityChange,
    Particulars,
    change,
    rule_row,
    tenant_row,
    token_row,
    user_row,
)
from tailrace.core.access.identity_names import tenant_of
from tailrace.core.access.tokens import new_token
from tailrace.core.model.access import Caller, Identities
from tailrace.core.model.access_commands import (
    AccessChecked,
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
    QuotaList,
    RuleList,
    TenantList,
    TokenList,
    UserList,
    WhoAmI,
)
from tailrace.core.model.commands import Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Denied, InvalidRequest, NotFound, Overloaded, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import Gate, IdentityStore, Respond, Verb

CHANGES_WAITING_MAX = 1_000
CHANGES_OF_USER_MAX = 16
"""Of them, of each user who does not administer the broker: nobody keeps administrators from a change."""
PAGE_MAX = 1_000
"""Most rows of an answer; a request may ask for fewer."""
RETRY_MS = 100
NOT_YET = "not hashed yet"
"""Stands for the hash of a password while a change is tried without storing it."""
_Key = TypeVar("_Key", str, int)


class _Waiting(NamedTuple):
    """A change in the line."""

    request: IdentityChange
    given: Particulars
    caller: Caller
    respond: Respond


class AccessVerbs:
    """Answers requests about access. All methods run on the loop, but `load`."""

    def __init__(
        self,
        authority: Authority,
        store: IdentityStore,
        passwords: Passwords,
        pump: Pump,
        entropy: Callable[[int], bytes],
    ) -> None:
        self._authority = authority
        self._store = store
        self._passwords = passwords
        self._pump = pump
        self._entropy = entropy
        self._line: deque[_Waiting] = deque()
        self._hashing = 0
        self._storing = False
        self._closing = False
        self._of_user: Counter[str] = Counter()
        """Changes under way of users who do not administer the broker."""
        self.verbs: dict[type[Any], Verb] = {
            WhoAmI: self._who_am_i,
            ListUsers: self._list_users,
            ListTokens: self._list_tokens,
            ListRules: self._list_rules,
            ListQuotas: self._list_quotas,
            ListTenants: self._list_tenants,
            CheckAccess: self._check,
            **dict.fromkeys(CHANGES, self._change),
        }

    def load(self, first_token: FirstTokenFile | None = None) -> bool:
        """Take the identities as last stored; blocking, before the broker listens. Raises `Corrupt`. With
        `first_token`, a broker without users gets an administrator; tells whether it did."""
        identities = self._store.load() or Identities()
        makes = first_token is not None and not identities.users
        if first_token is not None and makes:
            now_us = self._pump.clock.wall_us()
            identities = with_administrator(identities, first_token, self._entropy, now_us)
            self._store.save(identities)
        self._authority.put(identities)
        return makes

    def close(self) -> None:
        """Refuse the changes that wait, and new ones; the one that is being stored is answered."""
        self._closing = True
        line, self._line = self._line, deque()
        for waiting in line:
            waiting.respond(_gone(), NOTHING)

    # -- changes

    def _change(self, request: IdentityChange, body: Buffer, respond: Respond, gate: Gate) -> None:
        if self._closing:
            respond(_gone(), NOTHING)
            return
        if len(self._line) + self._hashing >= CHANGES_WAITING_MAX:
            text = f"{CHANGES_WAITING_MAX} changes of users and rules wait already"
            raise Overloaded(text, retry_after_ms=RETRY_MS)
        if not self._administers(gate.caller):
            respond = self._counted(gate.caller.user, respond)
        waiting = _Waiting(request, self._given(request, gate.caller), gate.caller, respond)
        if self._outlives(request, gate.caller):
            text = "a token does not set passwords: log in with the password, or ask an administrator"
            waiting.respond(refuse(Denied(text)), NOTHING)
            return
        if not (isinstance(request, AddUser | AlterUser) and request.password):
            self._queue(waiting)
            return
        # What is refused in any case costs no hash. A stand-in says that there is a password.
        trial = msgspec.structs.replace(waiting.given, password=NOT_YET)
        refusal = change(self._identities, request, trial)
        if isinstance(refusal, Refusal):
            waiting.respond(refusal, NOTHING)
            return
        self._hashing += 1
        self._passwords.hash(gate.caller.address, request.password, partial(self._hashed, waiting))

    def _counted(self, user: str, respond: Respond) -> Respond:
        """The way of an answer to a user of whom only some changes may be under way."""
        if self._of_user[user] >= CHANGES_OF_USER_MAX:
            text = f"{CHANGES_OF_USER_MAX} changes of user {user!r} wait already"
            raise Overloaded(text, retry_after_ms=RETRY_MS)
        self._of_user[user] += 1
        return partial(self._answered, user, respond)

    def _answered(self, user: str, respond: Respond, reply: Reply, parts: Sequence[Buffer]) -> None:
        self._of_user[user] -= 1
        if not self._of_user[user]:
            del self._of_user[user]
        respond(reply, parts)

    def _outlives(self, request: IdentityChange, caller: Caller) -> bool:
        """Whether who has found a token would make a way in for good of it."""
        sets = isinstance(request, AlterUser) and request.password is not None
        return sets and caller.proof == "token" and not self._administers(caller)

    def _given(self, request: IdentityChange, caller: Caller) -> Particulars:
        now_us = self._pump.clock.wall_us()
        if not isinstance(request, CreateToken):
            return Particulars(now_us)
        token = new_token(self._entropy)
        end_us = None
        if caller.proof == "token" and not self._administers(caller):
            own = self._identities.tokens.get(caller.credential)
            end_us = now_us if own is None else own.expires_us
        return Particulars(
            now_us,
            token_id=token.id,
            digest=token.digest,
            secret=token.text,
            owner=caller.user,
            expires_max_us=end_us,
        )

    def _hashed(self, waiting: _Waiting, hashed: str | Refusal) -> None:
        self._hashing -= 1
        if isinstance(hashed, Refusal):
            waiting.respond(hashed, NOTHING)
        elif self._closing:
            waiting.respond(_gone(), NOTHING)
        else:
            given = msgspec.structs.replace(waiting.given, password=hashed)
            self._queue(waiting._replace(given=given))

    def _queue(self, waiting: _Waiting) -> None:
        self._line.append(waiting)
        self._next()

    def _next(self) -> None:
        """Decide the changes that wait, until one is to be stored."""
        while self._line and not self._storing:
            waiting = self._line.popleft()
            before = self._identities
            refusal = self._authority.refusal(waiting.caller, waiting.request)
            outcome = refusal or change(before, waiting.request, waiting.given)
            if isinstance(outcome, Refusal):
                waiting.respond(outcome, NOTHING)
                continue
            identities, reply = outcome
            if identities is before:
                waiting.respond(reply, NOTHING)
                continue
            self._storing = True
            store = partial(self._store.save, identities)
            self._pump.threads.run(self, store, partial(self._stored, waiting, identities, reply))

    def _stored(
        self,
        waiting: _Waiting,
        identities: Identities,
        reply: Reply,
        result: object,
        error: Exception | None,
    ) -> None:
        self._storing = False
        if error is None:
            self._authority.put(identities)
        waiting.respond(reply if error is None else refuse(error), NOTHING)
        self._next()

    # -- questions

    @property
    def _identities(self) -> Identities:
        return self._authority.identities

    def _administers(self, caller: Caller) -> bool:
        """Whether somebody administers the whole broker."""
        if caller.trusted:
            return True
        user = self._identities.users.get(caller.user)
        return user is not None and user.administrator and not tenant_of(user.name)

    def _sees(self, caller: Caller) -> Callable[[str], bool]:
        """Tells of a user whether somebody may see what is about it: administrators see everything, those of
        a tenant what is of their tenant, and everybody sees itself."""
        if self._administers(caller):
            return _everything
        user = self._identities.users.get(caller.user)
        tenant = tenant_of(caller.user)
        within = tenant if user is not None and user.administrator and tenant else None
        return partial(_own, caller.user, within)

    def _who_am_i(self, request: WhoAmI, body: Buffer, respond: Respond, gate: Gate) -> None:
        caller = gate.caller
        user = self._identities.users.get(caller.user)
        token = self._identities.tokens.get(caller.credential) if caller.proof == "token" else None
        info = CallerInfo(
            user=caller.user,
            proof=caller.proof,
            credential="" if caller.proof == "password" else caller.credential,
            teams=[] if user is None else list(user.teams),
            administrator=caller.trusted or (user is not None and user.administrator),
            tenant=tenant_of(caller.user),
            expires_us=None if token is None else token.expires_us,
        )
        respond(info, NOTHING)

    def _check(self, request: CheckAccess, body: Buffer, respond: Respond, gate: Gate) -> None:
        caller = gate.caller
        user = caller.user if request.user is None else request.user
        if request.user is not None and user not in self._identities.users:
            raise NotFound(f"there is no user {user[:80]!r}")
        if request.user is None and caller.trusted:
            who = "you own this broker" if caller.proof == "owner" else "this broker has no users"
            respond(AccessChecked(True, f"{who}: everything is allowed"), NOTHING)
            return
        verdict = self._authority.explain(user, request.right, request.resource, request.name)
        respond(AccessChecked(verdict.allowed, verdict.why, verdict.rule), NOTHING)

    def _list_users(self, request: ListUsers, body: Buffer, respond: Respond, gate: Gate) -> None:
        sees, users = self._sees(gate.caller), self._identities.users
        names = sorted(name for name in users if name.startswith(request.prefix) and sees(name))
        page, more = _page(names, request.after, request.limit)
        respond(UserList([user_row(users[name]) for name in page], more), NOTHING)

    def _list_tokens(self, request: ListTokens, body: Buffer, respond: Respond, gate: Gate) -> None:
        sees, tokens = self._sees(gate.caller), self._identities.tokens
        if request.user is not None and request.user not in self._identities.users:
            raise NotFound(f"there is no user {request.user[:80]!r}")
        ids = sorted(
            token.id for token in tokens.values() if request.user in (None, token.user) and sees(token.user)
        )
        page, more = _page(ids, request.after, request.limit)
        respond(TokenList([token_row(tokens[name]) for name in page], more), NOTHING)

    def _list_rules(self, request: ListRules, body: Buffer, respond: Respond, gate: Gate) -> None:
        sees = self._sees(gate.caller)
        rules = {
            rule.id: rule
            for rule in self._identities.rules
            if request.subject in (None, rule.subject) and _shows(rule.subject, sees)
        }
        page, more = _page(sorted(rules), request.after, request.limit)
        respond(RuleList([rule_row(rules[number]) for number in page], more), NOTHING)

    def _list_quotas(self, request: ListQuotas, body: Buffer, respond: Respond, gate: Gate) -> None:
        sees, quotas = self._sees(gate.caller), self._identities.quotas
        subjects = sorted(subject for subject in quotas if _shows(subject, sees))
        page, more = _page(subjects, request.after, request.limit)
        respond(QuotaList([msgspec.structs.asdict(quotas[about]) for about in page], more), NOTHING)

    def _list_tenants(self, request: ListTenants, body: Buffer, respond: Respond, gate: Gate) -> None:
        sees, tenants = self._sees(gate.caller), self._identities.tenants
        names = sorted(name for name in tenants if sees(f"{name}/"))
        page, more = _page(names, request.after, request.limit)
        users = Counter(tenant_of(name) for name in self._identities.users)
        respond(TenantList([tenant_row(tenants[name], users[name]) for name in page], more), NOTHING)


def _everything(name: str) -> bool:
    return True


def _own(user: str, tenant: str | None, name: str) -> bool:
    return name == user or (tenant is not None and name.startswith(f"{tenant}/"))


def _shows(subject: str, sees: Callable[[str], bool]) -> bool:
    """Whether somebody may see rules and quotas of a subject; those of a tenant count as what is in it."""
    kind, _, name = subject.partition(":")
    if kind in ("tenant", "team"):
        return sees(f"{name}/")
    return sees(name) if kind == "user" else sees is _everything


def _page(names: list[_Key], after: _Key, limit: int) -> tuple[list[_Key], _Key | None]:
    """The first names, in order, behind one, and the `after` of the next page."""
    if not 1 <= limit <= PAGE_MAX:
        raise InvalidRequest(f"limit: from 1 to {PAGE_MAX}, not {limit}")
    start = bisect_right(names, after)
    page = names[start : start + limit]
    return page, page[-1] if start + limit < len(names) else None


def _gone() -> Refusal:
    return refuse(Unavailable("the broker is shutting down; nothing was changed"))
