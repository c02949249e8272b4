"""One suite for every `Doorkeeper`: who has left is not counted any more, and a refusal counts nobody.

Covers the part of `protocols/crowd.py` that admits everybody.
"""

from __future__ import annotations

import pytest

from tailrace.broker.access.quotas import Quotas
from tailrace.broker.runtime.clock import ManualClock
from tailrace.core.model.access import OWNER, Caller, Identities, Quota, User
from tailrace.ports import Doorkeeper
from tailrace.protocols.crowd import OpenDoor

ANNA = Caller("anna", "token", "t1", "10.0.0.1")
BOB = Caller("acme/bob", "certificate", "DNS:bob", "2001:db8::1")
CALLERS = (ANNA, BOB, OWNER, Caller("", "open", "", "10.0.0.9"), Caller("", "open"))
MOST = 3


def bounded() -> Quotas:
    quotas = Quotas(ManualClock(), tuple, lambda group, member: 0)
    users = {name: User(name=name) for name in ("anna", "acme/bob")}
    bounds = [Quota(subject=subject, connections_max=MOST) for subject in ("everyone", "address:*")]
    quotas.put(Identities(users=users, quotas={bound.subject: bound for bound in bounds}))
    return quotas


@pytest.fixture(params=[OpenDoor, bounded])
def door(request: pytest.FixtureRequest) -> Doorkeeper:
    made: Doorkeeper = request.param()
    return made


@pytest.mark.parametrize("caller", CALLERS)
def test_some_are_admitted_and_once_they_have_left_as_many_again(door: Doorkeeper, caller: Caller) -> None:
    for _ in range(5):
        for _ in range(MOST):
            assert door.admitted(caller) is None
        for _ in range(MOST):
            door.left(caller)


@pytest.mark.parametrize("caller", CALLERS)
def test_a_refusal_says_when_to_come_back_and_counts_nobody(door: Doorkeeper, caller: Caller) -> None:
    inside = 0
    for _ in range(20):
        refusal = door.admitted(caller)
        if refusal is None:
            inside += 1
        else:
            assert (refusal.code, refusal.outcome) == ("overloaded", "none")
            assert refusal.details["retry_after_ms"] > 0
    assert inside >= MOST
    door.left(caller)
    assert door.admitted(caller) is None


def test_callers_do_not_count_for_each_other(door: Doorkeeper) -> None:
    for _ in range(20):
        door.admitted(ANNA)
    assert door.admitted(BOB) is None
