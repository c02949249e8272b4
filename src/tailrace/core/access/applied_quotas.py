"""Which quotas apply to a caller, and to the owner of a topic: an account for each, with the tightest bounds.

A caller has up to three *accounts*. What it does counts in all of them:

    user:anna        the tightest of `user:anna`, `team:T` for each of her teams, and `everyone`
    tenant:acme      `tenant:acme`, shared by all users of the tenant
    address:10.0.0.7 the tightest of `address:10.0.0.7` and `address:*`

Teams and `everyone` bound each of their users for itself. An account without bounds is left out. Who has one
IPv6 address has as many as it wants, so for `address:*` all addresses of a /64 network are one; they have an
account beside that of the address itself.

No quota may lock the administrators out, whatever it says about everybody, so an administrator of the broker
is bound by `user:` quotas with its own name only. The owner of the broker has no bounds. While a broker has
no users, everybody is bound by address only. A connection over a Unix socket has no address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tailrace.core.access.identity_names import tenant_of
from tailrace.core.access.slow_down import network_of
from tailrace.core.model.access import EVERYONE, Caller, Identities, Quota, User

ANY_ADDRESS = "address:*"


class Bounds(NamedTuple):
    """What an account may use; None: as much as it wants."""

    connections_max: int | None = None
    requests_per_second: int | None = None
    bytes_per_second: int | None = None
    in_flight_max: int | None = None
    topics_max: int | None = None
    storage_bytes_max: int | None = None


class Account(NamedTuple):
    """Somebody whose use is counted."""

    subject: str
    bounds: Bounds


UNBOUND = Bounds()


def accounts_of(identities: Identities, caller: Caller) -> tuple[Account, ...]:
    """The accounts of a caller."""
    if not identities.quotas or caller.proof == "owner":
        return ()
    user = identities.users.get(caller.user)
    found = list(topic_accounts(identities, caller.user, caller.user))
    if caller.address and not (user is not None and _unbound(user)):
        address, network = f"address:{caller.address}", f"address:{network_of(caller.address)}"
        if network == address:
            found += _bound((_account(identities, address, ANY_ADDRESS),))
        else:
            found += _bound((_account(identities, address), _account(identities, network, ANY_ADDRESS)))
    return tuple(found)


def subjects_of(caller: Caller) -> tuple[str, ...]:
    """All accounts that a caller could have, whatever quotas there are."""
    found = [f"user:{caller.user}"] if caller.user else []
    if tenant := tenant_of(caller.user):
        found.append(f"tenant:{tenant}")
    if caller.address:
        found += {f"address:{caller.address}": None, f"address:{network_of(caller.address)}": None}
    return tuple(found)


def topic_accounts(identities: Identities, topic: str, owner: str) -> tuple[Account, ...]:
    """The accounts in which a topic and what it stores count: of the user who made it, and of the tenant with
    whose name it begins."""
    tenant = _account(identities, f"tenant:{tenant_of(topic)}")
    return _bound((tenant, _user(identities, owner)) if owner else (tenant,))


def _user(identities: Identities, name: str) -> Account:
    user = identities.users.get(name) or User(name=name)
    also = () if _unbound(user) else (*(f"team:{team}" for team in user.teams), EVERYONE)
    return _account(identities, f"user:{name}", *also)


def _unbound(user: User) -> bool:
    """Whether quotas of others do not bind it."""
    return user.administrator and not tenant_of(user.name)


def _account(identities: Identities, subject: str, *also: str) -> Account:
    """The tightest of the quotas of some subjects, as the bounds of the first."""
    quotas = [identities.quotas[key] for key in (subject, *also) if key in identities.quotas]
    return Account(subject, _tightest(quotas))


def _tightest(quotas: Iterable[Quota]) -> Bounds:
    bounds = UNBOUND
    for quota in quotas:
        given = (getattr(quota, name) for name in Bounds._fields)
        bounds = Bounds(*map(_tighter, bounds, given))
    return bounds


def _tighter(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)


def _bound(accounts: Iterable[Account]) -> tuple[Account, ...]:
    return tuple(account for account in accounts if account.bounds != UNBOUND)
