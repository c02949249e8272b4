"""Which quotas apply to whom: the tightest of those for the user, beside its tenant and its address."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.access.applied_quotas import (
    Bounds,
    accounts_of,
    subjects_of,
    topic_accounts,
)
from tailrace.core.model.access import OWNER, Caller, Identities, Quota, User


def identities(*quotas: Quota) -> Identities:
    users = (
        User(name="anna", teams=("red", "blue")),
        User(name="root", administrator=True, teams=("red",)),
        User(name="acme/bob"),
        User(name="acme/root", administrator=True),
    )
    return Identities(users={user.name: user for user in users}, quotas={q.subject: q for q in quotas})


def quota(subject: str, **bounds: Any) -> Quota:
    return Quota(subject=subject, **bounds)


def found(given: Identities, user: str, address: str = "10.0.0.7") -> dict[str, Bounds]:
    caller = Caller(user, "token", "t1", address) if user else Caller("", "open", "", address)
    accounts = accounts_of(given, caller)
    assert len({account.subject for account in accounts}) == len(accounts)
    return dict(accounts)


def test_without_quotas_nobody_has_an_account() -> None:
    assert found(identities(), "anna") == found(identities(), "") == {}


def test_the_tightest_of_the_user_its_teams_and_everyone_counts_for_each_bound() -> None:
    given = identities(
        quota("user:anna", requests_per_second=50, topics_max=3),
        quota("team:red", requests_per_second=20, bytes_per_second=900),
        quota("team:blue", bytes_per_second=1000, in_flight_max=7),
        quota("team:green", requests_per_second=1),
        quota("everyone", requests_per_second=30, connections_max=4),
    )
    assert found(given, "anna") == {"user:anna": Bounds(4, 20, 900, 7, 3, None)}
    assert found(given, "acme/bob") == {"user:acme/bob": Bounds(4, 30)}


def test_a_tenant_and_an_address_are_accounts_beside_the_user() -> None:
    given = identities(
        quota("tenant:acme", storage_bytes_max=5),
        quota("address:*", requests_per_second=9, connections_max=2),
        quota("address:10.0.0.7", requests_per_second=10, bytes_per_second=8),
        quota("user:acme/bob", requests_per_second=1),
    )
    assert found(given, "acme/bob") == {
        "user:acme/bob": Bounds(requests_per_second=1),
        "tenant:acme": Bounds(storage_bytes_max=5),
        "address:10.0.0.7": Bounds(2, 9, 8),
    }
    assert found(given, "anna", "10.0.0.8") == {"address:10.0.0.8": Bounds(2, 9)}
    assert found(given, "") == {"address:10.0.0.7": Bounds(2, 9, 8)}
    assert found(given, "anna", "") == {}


def test_no_quota_of_others_binds_an_administrator_of_the_broker() -> None:
    given = identities(
        quota("everyone", requests_per_second=0),
        quota("team:red", requests_per_second=0),
        quota("address:*", connections_max=0),
    )
    assert found(given, "root") == {}
    assert set(found(given, "acme/root")) == {"user:acme/root", "address:10.0.0.7"}
    own = identities(quota("user:root", requests_per_second=5))
    assert found(own, "root") == {"user:root": Bounds(requests_per_second=5)}


def test_the_owner_of_the_broker_is_not_bound() -> None:
    assert accounts_of(identities(quota("everyone", requests_per_second=0)), OWNER) == ()


def test_a_user_that_is_gone_is_bound_by_what_binds_everyone() -> None:
    assert found(identities(quota("everyone", topics_max=1)), "gone") == {"user:gone": Bounds(topics_max=1)}


@pytest.mark.parametrize(
    ("topic", "owner", "subjects"),
    [
        ("orders", "", []),
        ("orders", "anna", ["user:anna"]),
        ("acme/orders", "", ["tenant:acme"]),
        ("acme/orders", "acme/bob", ["tenant:acme", "user:acme/bob"]),
        ("acme/orders", "anna", ["tenant:acme", "user:anna"]),
        ("acme/orders", "root", ["tenant:acme"]),
    ],
)
def test_a_topic_counts_for_who_made_it_and_for_its_tenant(
    topic: str, owner: str, subjects: list[str]
) -> None:
    given = identities(quota("everyone", topics_max=9), quota("tenant:acme", topics_max=5))
    assert [account.subject for account in topic_accounts(given, topic, owner)] == subjects


def test_addresses_of_one_ipv6_network_are_one_for_the_quota_of_each_address() -> None:
    one, two, other = "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1"
    given = identities(
        quota("address:*", requests_per_second=9), quota(f"address:{one}", requests_per_second=50)
    )
    shared = {"address:2001:db8::": Bounds(requests_per_second=9)}
    assert found(given, "anna", one) == {f"address:{one}": Bounds(requests_per_second=50)} | shared
    assert found(given, "anna", two) == shared
    assert found(given, "anna", other) == {"address:2001:db8:0:1::": Bounds(requests_per_second=9)}


@pytest.mark.parametrize("user", ["anna", "acme/bob", "root", ""])
@pytest.mark.parametrize("address", ["", "10.0.0.7", "2001:db8::1", "::ffff:10.0.0.7"])
def test_every_account_is_among_the_subjects_that_are_counted_always(user: str, address: str) -> None:
    quotas = [quota(name, connections_max=1) for name in ("everyone", "address:*", "tenant:acme")]
    given = identities(*quotas, *(quota(f"user:{user}", topics_max=2) for _ in user[:1]))
    caller = Caller(user, "token" if user else "open", "", address)
    subjects = subjects_of(caller)
    assert {account.subject for account in accounts_of(given, caller)} <= set(subjects)
    assert len(set(subjects)) == len(subjects)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["user:anna", "team:red", "team:blue", "everyone"]),
            st.sampled_from(Bounds._fields),
            st.integers(0, 9),
        ),
        unique_by=lambda row: row[:2],
    )
)
def test_a_further_quota_never_loosens_a_bound(rows: list[tuple[str, str, int]]) -> None:
    given: dict[str, dict[str, int]] = {}
    least: dict[str, int] = {}
    for subject, field, value in rows:
        given.setdefault(subject, {})[field] = value
        least[field] = min(value, least.get(field, value))
        bounds = found(identities(*(quota(name, **fields) for name, fields in given.items())), "anna")
        assert bounds == {"user:anna": Bounds(**least)}
