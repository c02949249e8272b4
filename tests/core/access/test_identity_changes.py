"""Users, tokens, rules, quotas and tenants: what changes lead to, what is refused, and what always holds.

Covers `core/access/identity_names.py`.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.cluster.identity_file import decode_identities, encode_identities
from tailrace.core.access import identity_changes
from tailrace.core.access.identity_changes import (
    EXPIRED_KEPT_US,
    Particulars,
    change,
    first_administrator,
)
from tailrace.core.access.identity_names import check_user_name, shown, tenant_of
from tailrace.core.model.access import Identities, Token
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
    TokenMade,
    UserList,
)
from tailrace.core.model.identifiers import Refusal

PASSWORD = "correct horse"
NOW_US = 1_700_000_000_000_000


class Folks:
    """Identities that are changed one command after the other."""

    def __init__(self, *commands: Any) -> None:
        self.identities = Identities()
        self.now_us = NOW_US
        self._tokens = 0
        for command in commands:
            self.do(command)

    def ask(self, command: Any, **particulars: Any) -> Any:
        """The reply, or the refusal; what is given to a token is made up."""
        self._tokens += 1
        name = f"{self._tokens:016x}"
        given = {"token_id": name, "digest": name * 4, "secret": f"trt_{name}_x", "password": "$hash"}
        outcome = change(self.identities, command, Particulars(self.now_us, **{**given, **particulars}))
        if isinstance(outcome, Refusal):
            return outcome
        before, (self.identities, reply) = self.identities, outcome
        assert (self.identities is before) == (self.identities.sequence == before.sequence)
        return reply

    def do(self, command: Any, **particulars: Any) -> Any:
        reply = self.ask(command, **particulars)
        assert not isinstance(reply, Refusal), reply
        return reply

    def problems(self, command: Any, **particulars: Any) -> list[str]:
        """The problems of a change that is refused."""
        before = self.identities
        refusal = self.ask(command, **particulars)
        assert isinstance(refusal, Refusal), refusal
        assert refusal.code == "invalid_request"
        assert all(problem in refusal.message for problem in refusal.details["problems"])
        assert self.identities is before
        return list(refusal.details["problems"])

    def code(self, command: Any) -> str:
        refusal = self.ask(command)
        assert isinstance(refusal, Refusal), refusal
        return refusal.code


def folks(*commands: Any) -> Folks:
    """With an administrator."""
    return Folks(AddUser("root", PASSWORD), *commands)


# ------------------------------------------------------------------------------------------------- users


def test_the_first_user_is_an_administrator_and_the_second_is_not() -> None:
    known = folks(AddUser("anna"))
    assert known.identities.users["root"].administrator
    assert not known.identities.users["anna"].administrator


def test_the_first_user_needs_a_way_to_log_in() -> None:
    (problem,) = Folks().problems(AddUser("root"))
    assert problem.startswith("password: the first user needs one")
    for field in ({"certificates": ["DNS:a"]}, {"system_users": ["anna"]}, {"password": PASSWORD}):
        Folks(AddUser("root", **field))


def test_the_first_user_belongs_to_no_tenant() -> None:
    (problem,) = Folks(AddTenant("acme")).problems(AddUser("acme/root", PASSWORD))
    assert problem.startswith("name: the first user")


def test_a_user_is_told_and_kept_without_its_password() -> None:
    known = folks()
    reply = known.do(AddUser("anna", PASSWORD, ["a", "b", "a"], ["URI:spiffe://x/y"], ["anna", "1000"]))
    assert isinstance(reply, UserList)
    (row,) = reply.users
    assert row == {
        "name": "anna",
        "teams": ["a", "b"],
        "certificates": ["URI:spiffe://x/y"],
        "system_users": ["anna", "1000"],
        "administrator": False,
        "password": True,
        "created_us": NOW_US,
    }
    assert known.identities.users["anna"].password == "$hash"
    assert PASSWORD not in repr(known.identities)


def test_all_problems_of_a_user_are_told_at_once() -> None:
    known = folks(AddUser("anna", certificates=["DNS:a"], system_users=["anna"]))
    bad = AddUser("no/such tenant", "short", ["/"], ["DNS:a", "CN=x"], ["anna", "a b"])
    problems = known.problems(bad)
    assert sorted(problem.split(":")[0] for problem in problems) == [
        *("certificates", "certificates", "name", "password", "system_users", "system_users", "teams")
    ]
    assert not any("anna stands" in problem or "user 'anna'" in problem for problem in problems)


@pytest.mark.parametrize("name", ["", "a" * 201, "a b", "a/", "/a", "a//b", ".", "a/..", "_a", "é", "a\n"])
def test_names_that_are_refused(name: str) -> None:
    assert check_user_name(name)
    assert any(problem.startswith("name: ") for problem in folks().problems(AddUser(name)))


def test_passwords_have_bounds_and_never_appear() -> None:
    known = folks()
    for password in ("short", "x" * 1025, "annaanna"):
        name = "annaanna"
        (problem,) = known.problems(AddUser(name, password))
        assert problem.startswith("password: ")
        assert password not in problem.replace(name, "") or password == name
    known.do(AddUser("anna", "ä" * 512))


def test_a_name_with_a_slash_needs_its_tenant() -> None:
    known = folks()
    assert known.problems(AddUser("acme/anna")) == ["name: there is no tenant 'acme': add it first"]
    known.do(AddTenant("acme"))
    known.do(AddUser("acme/anna", teams=["acme/shop", "all"]))
    known.do(AddTenant("other"))
    assert known.problems(AddUser("acme/bert", teams=["other/shop"]))


def test_users_are_altered_field_by_field() -> None:
    known = folks(AddUser("anna", PASSWORD, ["a"], ["DNS:a"], ["anna"]))
    before = known.identities.users["anna"]
    known.now_us += 5
    known.do(AlterUser("anna", teams=[]))
    after = known.identities.users["anna"]
    assert after == msgspec.structs.replace(before, teams=())
    known.do(AlterUser("anna", certificates=["DNS:a", "DNS:b"], administrator=True))
    known.do(AlterUser("anna", password=""))
    assert known.identities.users["anna"].password == ""
    assert known.identities.users["anna"].altered_us == NOW_US + 5
    assert known.code(AlterUser("bert")) == "not_found"


def test_a_new_password_has_another_number_even_if_the_clock_was_put_back() -> None:
    known = folks(AddUser("anna", PASSWORD))
    numbers = {known.identities.users["anna"].altered_us}
    for back_us in (10, 10, 0):
        known.now_us -= back_us
        known.do(AlterUser("anna", password=PASSWORD))
        numbers.add(known.identities.users["anna"].altered_us)
    assert len(numbers) == 4


def test_nothing_is_stored_when_nothing_changes() -> None:
    known = folks(AddUser("anna", teams=["a"]), AddRule("allow", "everyone", ["read"], "topic"))
    known.do(PutQuota("everyone", connections_max=3))
    before = known.identities
    known.do(AlterUser("anna", teams=["a"]))
    known.do(AddRule("allow", "everyone", ["read"], "topic"))
    known.do(PutQuota("everyone", connections_max=3))
    assert known.identities is before


def test_a_user_goes_with_all_that_is_about_it() -> None:
    known = folks(
        AddUser("anna"),
        AddUser("bert"),
        CreateToken("ci", "anna"),
        CreateToken("ci", "bert"),
        AddRule("allow", "user:anna", ["read"], "topic"),
        AddRule("allow", "user:bert", ["read"], "topic"),
        PutQuota("user:anna", connections_max=1),
        PutQuota("user:bert", connections_max=1),
        RemoveUser("anna"),
    )
    left = known.identities
    assert set(left.users) == {"root", "bert"}
    assert [token.user for token in left.tokens.values()] == ["bert"]
    assert [rule.subject for rule in left.rules] == ["user:bert"]
    assert list(left.quotas) == ["user:bert"]
    assert known.code(RemoveUser("anna")) == "not_found"


def test_the_last_administrator_stays() -> None:
    known = folks(AddTenant("acme"), AddUser("acme/root", PASSWORD, administrator=True))
    for command in (
        RemoveUser("root"),
        AlterUser("root", administrator=False),
        AlterUser("root", password=""),
    ):
        (problem,) = known.problems(command)
        assert "the last administrator" in problem
    known.do(AddUser("anna", administrator=True))
    known.do(CreateToken("soon-over", "anna", known.now_us + 1))
    assert known.problems(RemoveUser("root")), "who stays could not log in for good"
    token = known.do(CreateToken("for-good", "anna"))
    known.do(RemoveUser("root"))
    assert known.problems(RevokeToken(token.id))


def test_the_first_administrator_of_a_broker_that_made_it_itself() -> None:
    token = Token(id="1", user="admin", name="first-start", digest="ab", created_us=5)
    known = Folks()
    known.identities = first_administrator(known.identities, "admin", token)
    assert known.identities.users["admin"].administrator
    assert known.problems(RevokeToken("1"))
    known.do(AddUser("root", PASSWORD, administrator=True))
    known.do(RevokeToken("1"))


# ------------------------------------------------------------------------------------------------ tokens


def test_a_token_shows_its_secret_in_the_answer_only() -> None:
    known = folks(AddUser("anna"))
    made = known.do(CreateToken("ci", None, known.now_us + 5), owner="anna")
    assert isinstance(made, TokenMade)
    assert made.secret == f"trt_{made.id}_x"
    assert (made.user, made.name, made.expires_us) == ("anna", "ci", known.now_us + 5)
    assert made.secret not in repr(made) + repr(known.identities)
    assert made.secret.encode() not in encode_identities(known.identities)


def test_tokens_that_are_refused() -> None:
    known = folks(AddUser("anna"), CreateToken("ci", "anna"))
    assert known.problems(CreateToken("a b", None, known.now_us)) == [
        "name: it may have only letters, digits, '.', '_', '-', '@' and '/'",
        "user: say whose token it is to be",
        "expires_us: that is in the past",
    ]
    assert known.code(CreateToken("ci", "anna")) == "already_exists"
    assert known.code(CreateToken("ci", "bert")) == "not_found"
    assert known.code(RevokeToken("no")) == "not_found"


def test_a_token_that_a_token_makes_ends_with_it() -> None:
    known = folks(AddUser("anna"))
    end_us = known.now_us + 100
    for expires_us in (None, end_us + 1):
        assert known.problems(CreateToken("ci", "anna", expires_us), expires_max_us=end_us)
    known.do(CreateToken("ci", "anna", end_us), expires_max_us=end_us)


def test_tokens_that_ended_are_swept_out_later_and_give_their_name_free_at_once() -> None:
    known = folks(AddUser("anna"))
    first = known.do(CreateToken("ci", "anna", known.now_us + 1))
    known.now_us += 2
    second = known.do(CreateToken("ci", "anna"))
    assert set(known.identities.tokens) == {first.id, second.id}
    known.now_us += EXPIRED_KEPT_US
    third = known.do(CreateToken("ci2", "anna"))
    assert set(known.identities.tokens) == {second.id, third.id}


# -------------------------------------------------------------------------------- rules, quotas, tenants


def test_rules_are_numbered_and_no_number_comes_twice() -> None:
    known = folks(AddUser("anna"))
    first = known.do(AddRule("allow", "user:anna", ["read", "publish", "read"], "topic", "orders.*"))
    assert isinstance(first, RuleList)
    assert first.rules == [
        {
            "id": 1,
            "effect": "allow",
            "subject": "user:anna",
            "rights": ["publish", "read"],
            "resource": "topic",
            "pattern": "orders.*",
        }
    ]
    known.do(RemoveRule(1))
    second = known.do(AddRule("deny", "team:shop", ["operate"], "broker"))
    assert second.rules[0]["id"] == 2
    assert known.code(RemoveRule(1)) == "not_found"


@pytest.mark.parametrize(
    ("command", "fields"),
    [
        (AddRule("allow", "user:nobody", [], "topic", ""), ["subject", "rights", "pattern"]),
        (AddRule("allow", "nobody", ["read"], "group", "a b"), ["subject", "rights", "pattern"]),
        (AddRule("allow", "team:", ["operate"], "topic"), ["subject", "rights"]),
        (AddRule("allow", "team:a b", ["peer"], "broker", "x"), ["subject", "pattern"]),
        (AddRule("allow", "everyone", ["read"], "topic", "*" * 9), ["pattern"]),
        (AddRule("allow", "everyone", ["read"], "topic", "x" * 246), ["pattern"]),
        (AddRule("deny", "everyone", ["read"], "topic", "x.dlq"), ["pattern"]),
        (AddRule("allow", "tenant:acme", ["read"], "topic"), ["subject"]),
        (PutQuota("address:10.0.0.01"), ["subject", "at least one bound is needed"]),
        (PutQuota("tenant:no", connections_max=0), ["subject", "connections_max"]),
        (PutQuota("everyone", bytes_per_second=-1, topics_max=1 << 60), ["bytes_per_second", "topics_max"]),
        (AddTenant("a/b@c"), ["name"]),
        (AddTenant(""), ["name"]),
    ],
)
def test_what_is_refused_names_every_field(command: Any, fields: list[str]) -> None:
    assert [problem.split(":")[0] for problem in folks().problems(command)] == fields


def test_quotas_are_put_and_removed() -> None:
    known = folks(AddTenant("acme"))
    for subject in ("everyone", "user:root", "team:a", "tenant:acme", "address:*", "address:2001:db8::1"):
        reply = known.do(PutQuota(subject, requests_per_second=5))
        assert isinstance(reply, QuotaList)
        assert reply.quotas[0]["subject"] == subject
        assert reply.quotas[0]["requests_per_second"] == 5
    known.do(RemoveQuota("team:a"))
    assert known.code(RemoveQuota("team:a")) == "not_found"
    assert len(known.identities.quotas) == 5


def test_a_tenant_goes_when_its_users_are_gone() -> None:
    known = folks(
        AddTenant("acme"),
        AddUser("acme/anna"),
        AddRule("allow", "team:acme/shop", ["read"], "topic", "acme/*"),
        PutQuota("tenant:acme", topics_max=5),
        PutQuota("team:acme/shop", connections_max=5),
    )
    assert known.problems(RemoveTenant("acme")) == ["name: it has 1 user(s): remove them first"]
    assert known.code(AddTenant("acme")) == "already_exists"
    known.do(RemoveUser("acme/anna"))
    known.do(RemoveTenant("acme"))
    left = known.identities
    assert (left.tenants, left.rules, left.quotas) == ({}, (), {})
    assert known.code(RemoveTenant("acme")) == "not_found"


@pytest.mark.parametrize(
    ("bound", "make"),
    [
        ("USERS_MAX", lambda n: AddUser(f"user-{n}")),
        ("TOKENS_MAX", lambda n: CreateToken(f"t{n}", "root")),
        ("TOKENS_OF_USER_MAX", lambda n: CreateToken(f"t{n}", "root")),
        ("RULES_MAX", lambda n: AddRule("allow", "everyone", ["read"], "topic", f"t{n}")),
        ("QUOTAS_MAX", lambda n: PutQuota(f"team:t{n}", connections_max=1)),
        ("TENANTS_MAX", lambda n: AddTenant(f"t{n}")),
    ],
)
def test_everything_has_a_bound(
    bound: str, make: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_changes, bound, 5)
    known = folks()
    for number in range(4):
        known.do(make(number))
    known.ask(make(4))
    assert known.code(make(5)) == "too_large"


def test_no_repr_shows_a_secret() -> None:
    given = Particulars(1, "$hash", "id", "digest", "trt_id_secret")
    assert not any(word in repr(given) for word in ("$hash", "digest", "trt_"))
    for command in (AddUser("anna", PASSWORD), AlterUser("anna", PASSWORD)):
        assert PASSWORD not in repr(command)


def test_long_names_are_cut_where_they_are_shown() -> None:
    assert len(shown("x" * 5000)) < 100
    refusal = folks().ask(AddUser("x" * 5000))
    assert len(refusal.message) < 1000


# ----------------------------------------------------------------------------------------- what always holds

NAMES = ("root", "anna", "acme/anna", "acme/root", "beta/x", "a b", "")


def _commands(random: Random, tokens: list[str]) -> Any:
    user = random.choice(NAMES)
    names = random.sample(["a", "acme/shop", "beta/shop", "/"], random.randrange(3))
    some: Any = random.choice
    password = some((None, PASSWORD, "", "short"))
    proofs: dict[str, Any] = {
        "certificates": random.sample(["DNS:a", "DNS:b", "bad"], random.randrange(2)),
        "system_users": random.sample(["anna", "0", "b d"], random.randrange(2)),
    }
    return some(
        (
            AddUser(user, password, names, administrator=some((True, False)), **proofs),
            AddUser(user, PASSWORD),
            AlterUser(user, password, some((None, names)), administrator=some((None, True, False))),
            AlterUser(user, **{field: some((None, value)) for field, value in proofs.items()}),
            RemoveUser(user),
            CreateToken(some(("ci", "x", "a b")), user, some((None, NOW_US + 50, NOW_US - 1))),
            RevokeToken(some([*tokens, "none"])),
            AddRule(
                "allow", some((f"user:{user}", "team:acme/shop", "everyone")), ["read"], "topic", "acme/*"
            ),
            RemoveRule(random.randrange(5)),
            PutQuota(some((f"user:{user}", "tenant:acme", "address:*")), connections_max=some((None, 0, 5))),
            RemoveQuota(some((f"user:{user}", "tenant:acme"))),
            AddTenant(some(("acme", "beta", "a/b"))),
            RemoveTenant(some(("acme", "beta"))),
        )
    )


def _check(identities: Identities) -> None:
    users, tokens = identities.users, identities.tokens
    for name, user in users.items():
        assert name == user.name
        assert not check_user_name(name)
        assert not tenant_of(name) or tenant_of(name) in identities.tenants
    for proofs in ("certificates", "system_users"):
        all_of_them = [name for user in users.values() for name in getattr(user, proofs)]
        assert len(all_of_them) == len(set(all_of_them))
    assert all(token.user in users and token.id == name for name, token in tokens.items())
    numbers = [rule.id for rule in identities.rules]
    assert numbers == sorted(set(numbers))
    assert all(number < identities.next_rule for number in numbers)
    for subject in [*(rule.subject for rule in identities.rules), *identities.quotas]:
        kind, _, name = subject.partition(":")
        assert kind != "user" or name in users
        assert kind != "tenant" or name in identities.tenants
    lasting = {token.user for token in tokens.values() if token.expires_us is None}
    keepers = [
        user
        for user in users.values()
        if user.administrator
        and not tenant_of(user.name)
        and (user.password or user.certificates or user.system_users or user.name in lasting)
    ]
    assert keepers or not users


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_what_holds_after_any_sequence_of_changes(seed: int) -> None:
    random = Random(seed)
    known = Folks()
    for _ in range(random.randrange(1, 80)):
        before = known.identities
        copy = encode_identities(before)
        command = _commands(random, list(before.tokens))
        known.now_us += random.randrange(-5, 20)
        reply = known.ask(command)
        assert encode_identities(before) == copy, "the identities of before have changed"
        if isinstance(reply, Refusal):
            assert known.identities is before
            assert reply.code in ("invalid_request", "not_found", "already_exists", "too_large")
            continue
        _check(known.identities)
        assert decode_identities(encode_identities(known.identities)) == known.identities
