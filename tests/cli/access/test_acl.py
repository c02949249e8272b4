"""`tailrace acl`: rules in words that people can type, and what decides."""

from typing import get_args

import pytest

from tailrace.cli.access import acl
from tailrace.core.model import access
from tailrace.core.model.access import Resource
from tailrace.errors import EDGES
from tests.cli.access.conftest import Local


def test_the_words_are_those_of_the_core() -> None:
    assert acl.RIGHTS == access.RIGHTS
    assert get_args(Resource) == acl.RESOURCES
    assert acl.EVERYONE == access.EVERYONE


@pytest.fixture
def people(local: Local) -> Local:
    """A broker that knows an administrator, anna and ben of the team shop."""
    for arguments in (("root",), ("anna",), ("ben", "--team", "shop")):
        local.rows("user", "add", *arguments, "--password-stdin", stdin=b"correct horse\n")
    return local


def test_life_of_a_rule(people: Local) -> None:
    (made,) = people.rows("acl", "add", "allow", "user:anna", "publish,read", "topic", "orders/*")
    rule = made["rule"]
    assert made == {
        "rule": rule,
        "effect": "allow",
        "subject": "user:anna",
        "rights": ["publish", "read"],
        "resource": "topic",
        "pattern": "orders/*",
    }
    assert people.rows("acl", "list") == [made]
    assert people.rows("acl", "list", "user:anna") == [made]
    assert people.rows("acl", "list", "team:shop") == []
    (same,) = people.rows("acl", "add", "allow", "user:anna", "read,publish", "topic", "orders/*")
    assert same == made
    assert people.rows("acl", "remove", str(rule)) == [{"rule": rule, "state": "removed"}]
    assert people.rows("acl", "list") == []
    again = people.run("acl", "remove", str(rule))
    assert again.status == EDGES["not_found"].exit
    assert "hint: `tailrace acl list` shows what is there" in again.err


def test_rules_for_people(people: Local) -> None:
    done = people.run("acl", "add", "deny", "everyone", "READ, publish", "topic", "*.secret")
    assert done.out == "rule 1: deny everyone publish,read topic *.secret\n"
    assert people.run("acl", "add", "Allow", "team:shop", "operate", "broker").out == (
        "rule 2: allow team:shop operate broker\n"
    )
    done = people.run("acl", "add", "allow", "team:shop", "administer,consume", "group", "sell-*")
    assert done.out == "rule 3: allow team:shop consume,administer-group group sell-*\n"
    lines = people.run("acl", "list").out.splitlines()
    assert lines[0].split() == ["RULE", "EFFECT", "SUBJECT", "RIGHTS", "RESOURCE", "PATTERN"]
    assert lines[1].split() == ["1", "deny", "everyone", "publish,", "read", "topic", "*.secret"]
    people.run("acl", "remove", "1")
    assert people.run("acl", "list", "everyone").err == "no rules: `tailrace acl add --help` shows how\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ("alow", "user:anna", "read", "topic", "x"),
            "effect: 'alow' is none of allow, deny; allow may be meant",
        ),
        (("allow", "user:anna", "publsh", "topic", "x"), "right: 'publsh' is none of publish, read"),
        (("allow", "user:anna", "publsh", "topic", "x"), "; publish may be meant"),
        (("allow", "user:anna", "read,", "topic", "x"), "right: ''"),
        (("allow", "user:anna", "read", "topics", "x"), "; topic may be meant"),
        (("allow", "user:anna", "administer", "broker", ""), "; administer-"),
        (("allow", "anna", "read", "topic", "x"), "; user:anna may be meant"),
        (("allow", "everybody", "read", "topic", "x"), "; everyone may be meant"),
        (("allow", "users:anna", "read", "topic", "x"), "not 'users:anna'"),
        (("allow", "user:", "read", "topic", "x"), "not 'user:'"),
        (("allow", "user:anna", "read", "topic"), "pattern: which topics?"),
        (("allow", "user:anna", "consume", "group"), "pattern: which groups?"),
        (("allow", "user:nobody", "read", "topic", "x"), "there is no user 'nobody'"),
        (("allow", "user:anna", "read", "group", "x"), "rights: 'read' is no right on a group"),
        (("allow", "user:anna", "read", "topic", "a b"), "pattern:"),
        (("allow", "user:anna", "read", "topic", "a,b"), "; a rule has one pattern"),
    ],
)
def test_what_is_mistyped_is_told(people: Local, arguments: tuple[str, ...], problem: str) -> None:
    done = people.run("acl", "add", *arguments)
    assert done.status == EDGES["invalid_request"].exit, done
    assert problem in done.err
    assert people.rows("acl", "list") == []


def test_check_says_which_rule_decides(people: Local) -> None:
    people.rows("acl", "add", "allow", "team:shop", "publish", "topic", "orders*")
    people.rows("acl", "add", "deny", "user:ben", "publish", "topic", "orders.secret")
    ask = ("acl", "check", "--user", "ben", "publish", "topic")
    done = people.run(*ask, "orders.eu")
    assert done.status == 0
    assert done.out.startswith("allowed: ")
    assert "rule 1" in done.out
    denied = people.run(*ask, "orders.secret")
    assert denied.status == EDGES["denied"].exit == 5
    assert denied.out.startswith("denied: ")
    assert "rule 2" in denied.out
    assert denied.err == ""
    nothing = people.run(*ask, "other", "--json")
    assert nothing.status == 5
    (row,) = nothing.rows
    assert (row["allowed"], row["rule"]) == (False, None)
    assert row["why"]
    (row,) = people.rows("acl", "check", "--user", "root", "operate", "broker")
    assert (row["allowed"], row["rule"]) == (True, None)
    assert "administrator" in row["why"]


def test_check_of_what_nobody_knows(people: Local) -> None:
    done = people.run("acl", "check", "--user", "ben", "pblish", "topic", "orders")
    assert (done.status, "publish may be meant" in done.err) == (2, True)
    assert people.run("acl", "check", "--user", "ben", "publish", "topic").status == 2
    unknown = people.run("acl", "check", "--user", "nobody", "publish", "topic", "orders")
    assert unknown.status == EDGES["not_found"].exit
