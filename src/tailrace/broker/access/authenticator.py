"""The authenticator: credentials, certificates and users of the operating system become callers.

    what a connection brings                          the caller is
    anything, and the broker has no users             anybody (`open`)
    a token                                           its user; answered at once
    a user with a password                            that user, once the password was compared in a thread
    over a Unix socket: the broker's own user, root   the owner
    a certificate that the transport has verified     the user with one of its names
    over a Unix socket: another system user           the user that has it among its `system_users`

Credentials that are given count alone: if they are wrong, nothing else is tried. Who fails is told the same
words after the same time, whether it was the user or the password that is unknown. A connection stays who it
is as long as `still` finds what it has proved itself with; that is asked again after every change.
"""

from __future__ import annotations

import hashlib
import pwd
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from tailrace.broker.access.passwords import Passwords
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import refuse
from tailrace.core.access.identity_changes import expired
from tailrace.core.access.slow_down import SlowDown, network_of
from tailrace.core.access.tokens import fits, parse_token
from tailrace.core.model.access import Caller, Identities, Origin, User
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Overloaded, Unauthenticated
from tailrace.format.wire import Credentials

Done = Callable[[Caller | Refusal], None]
LoginListener = Callable[[Origin, str, Caller | Refusal], None]
"""Told of every login: where it came from, the user or the id of the token that was claimed, and its end."""

NEEDED = "this broker needs credentials: a token, a user with a password, or a client certificate"
WRONG = "the credentials are wrong: there is no such user, password or token, or it is not valid any more"
_HINT = "give a token (TAILRACE_TOKEN, token=...), or tailrace://USER:PASSWORD@HOST"
_ENDED = "{} is not valid any more: log in again"
_RETRY_MS = 1_000


def _nobody(origin: Origin, claimed: str, end: Caller | Refusal) -> None:
    """Ignore a login."""


class CredentialCheck:
    """See `ports.Authenticator`. `identities` gives the current ones; `owners` are the users of the operating
    system, by number, who own the broker."""

    def __init__(
        self,
        identities: Callable[[], Identities],
        passwords: Passwords,
        pump: Pump,
        *,
        owners: Collection[int] = (),
        told: LoginListener = _nobody,
    ) -> None:
        self._identities = identities
        self._passwords = passwords
        self._pump = pump
        self._owners = frozenset(owners)
        self._told = told
        self._slow_down = SlowDown()
        self._indexed: Identities | None = None
        self._certificates: dict[str, User] = {}
        self._system_users: dict[str, User] = {}

    def authenticate(self, credentials: Credentials | None, origin: Origin, done: Done) -> None:
        """See `Authenticator.authenticate`."""
        given = credentials or Credentials()
        claimed = given.user or _token_id(given.token)
        end = partial(self._end, origin, claimed, done)
        if not self._identities().users:
            end(Caller("", "owner" if origin.uid in self._owners else "open", address=origin.address))
        elif given.token:
            end(self._by_token(given.token, origin))
        elif given.user or given.password:
            self._by_password(given, origin, end)
        elif origin.uid in self._owners:
            end(Caller("", "owner", address=origin.address))
        elif origin.certificate_names:
            end(self._by_certificate(origin))
        elif origin.uid is not None:
            self._by_system_user(origin.uid, origin, end)
        else:
            end(_refused(NEEDED, hint=_HINT))

    def still(self, caller: Caller, now_us: int) -> Refusal | None:
        """See `Authenticator.still`; `now_us` is the wall clock."""
        identities = self._identities()
        if caller.proof == "owner":
            return None
        if caller.proof == "open":
            return None if not identities.users else _refused(NEEDED, hint=_HINT)
        user = identities.users.get(caller.user)
        if user is None:
            return _refused(_ENDED.format(f"user {caller.user!r}"))
        if caller.proof == "token":
            token = identities.tokens.get(caller.credential)
            if token is None or token.user != user.name or expired(token, now_us):
                return _refused(_ENDED.format(f"token {caller.credential!r}"))
            return None
        if caller.proof == "password":
            good = bool(user.password) and caller.credential == _edition(user)
            return None if good else _refused(_ENDED.format(f"the password of {user.name!r}"))
        names = user.certificates if caller.proof == "certificate" else user.system_users
        return None if caller.credential in names else _refused(_ENDED.format(repr(caller.credential)))

    def _end(self, origin: Origin, claimed: str, done: Done, end: Caller | Refusal) -> None:
        self._told(origin, claimed, end)
        done(end)

    # -- tokens

    def _by_token(self, text: str, origin: Origin) -> Caller | Refusal:
        given = parse_token(text)
        if given is None:
            return _refused(WRONG)
        identities = self._identities()
        token = identities.tokens.get(given.id)
        if not fits(given, token) or token is None or token.user not in identities.users:
            return _refused(WRONG)
        if expired(token, self._pump.clock.wall_us()):
            return _refused(f"token {token.name!r} has expired: make another one")
        return Caller(token.user, "token", token.id, origin.address)

    # -- passwords

    def _by_password(self, given: Credentials, origin: Origin, end: Done) -> None:
        now_us = self._pump.clock.now_us()
        wait_us = self._slow_down.begin(_source(origin), given.user, now_us)
        if wait_us is None:
            text = "too many logins of this address wait for an answer"
            end(refuse(Overloaded(text, retry_after_ms=_RETRY_MS)))
        elif wait_us:
            self._pump.at(now_us + wait_us, partial(self._compare, given, origin, wait_us, end))
        else:
            self._compare(given, origin, wait_us, end, now_us)

    def _compare(self, given: Credentials, origin: Origin, wait_us: int, end: Done, now_us: int) -> None:
        user = self._identities().users.get(given.user)
        compared = partial(self._compared, user, given.user, origin, wait_us, end)
        stored = "" if user is None else user.password
        source = _source(origin)
        known = self._slow_down.knows(source, given.user)
        self._passwords.verify(network_of(source), stored, given.password, compared, known=known)

    def _compared(
        self, user: User | None, name: str, origin: Origin, wait_us: int, end: Done, right: bool | Refusal
    ) -> None:
        checked = None if isinstance(right, Refusal) else right
        self._slow_down.end(_source(origin), name, wait_us, checked, self._pump.clock.now_us())
        if isinstance(right, Refusal):
            end(right)
            return
        current = self._identities().users.get(name)
        # It may have got another password while this one was compared.
        if right and user is not None and current is not None and current.password == user.password:
            end(Caller(name, "password", _edition(current), origin.address))
        else:
            end(_refused(WRONG))

    # -- what the transport has proved

    def _by_certificate(self, origin: Origin) -> Caller | Refusal:
        self._index()
        found = {
            user.name: name
            for name in origin.certificate_names
            if (user := self._certificates.get(name)) is not None
        }
        if len(found) == 1:
            ((known, certificate),) = found.items()
            return Caller(known, "certificate", certificate, origin.address)
        names = ", ".join(name[:80] for name in origin.certificate_names[:5])
        what = "stand for several users" if found else "stand for no user"
        return _refused(f"the names of the client certificate {what}: {names}", hint=_HINT)

    def _by_system_user(self, uid: int, origin: Origin, end: Done) -> None:
        self._index()
        if str(uid) in self._system_users:
            end(self._system_caller(str(uid), origin))
        else:  # Where the names of system users come from a directory, this may take long.
            self._pump.threads.read(partial(_name_of, uid), partial(self._named, uid, origin, end))

    def _named(self, uid: int, origin: Origin, end: Done, name: Any, error: Exception | None) -> None:
        self._index()
        if error is not None:
            end(refuse(error))
        elif name in self._system_users:
            end(self._system_caller(name, origin))
        else:
            shown = f"{name!r} ({uid})" if name else str(uid)
            end(_refused(f"{NEEDED}; the system user {shown} stands for no user", hint=_HINT))

    def _system_caller(self, name: str, origin: Origin) -> Caller:
        return Caller(self._system_users[name].name, "socket", name, origin.address)

    def _index(self) -> None:
        identities = self._identities()
        if self._indexed is not identities:
            users = identities.users.values()
            self._certificates = {name: user for user in users for name in user.certificates}
            self._system_users = {name: user for user in users for name in user.system_users}
            self._indexed = identities


def _source(origin: Origin) -> str:
    """Whose failures count together: those of an address, or of a user of the operating system."""
    return origin.address or f"uid {origin.uid}"


def _edition(user: User) -> str:
    """Tells the password of a user from another one, by its salted hash."""
    return hashlib.blake2b(user.password.encode(), digest_size=8).hexdigest()


def _token_id(text: str) -> str:
    token = parse_token(text)
    return "" if token is None else token.id


def _name_of(uid: int) -> str:
    """The name of a system user; empty if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def _refused(text: str, **details: Any) -> Refusal:
    return refuse(Unauthenticated(text, **details))
