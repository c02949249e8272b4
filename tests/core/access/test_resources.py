"""What each request is about: every type has a row, and the rows say what people are told.

Also covers `core/model/access_commands.py`.
"""

from collections.abc import Iterable
from typing import Any, get_args

import pytest

from tailrace.core.access.resources import NEEDS, Need
from tailrace.core.model import access_commands as access
from tailrace.core.model import group_commands as groups
from tailrace.core.model import queue_commands as queues
from tailrace.core.model.commands import Request
from tests.core.access.request_table import TABLE


class Names:
    """A schedule `nightly` of anna on topic `bills`; writer `spark` last wrote to `t` and `u`; token `k1` is
    anna's; rule 1 is of tenant `acme`, rule 2 of none; topic `here` exists."""

    def topic_exists(self, name: str) -> bool:
        return name == "here"

    def schedule(self, name: str) -> tuple[str, str] | None:
        return ("bills", "anna") if name == "nightly" else None

    def decided_topics(self, writer: str) -> Iterable[str]:
        return ("t", "u") if writer == "spark" else ()

    def token_user(self, token: str) -> str | None:
        return "anna" if token == "k1" else None

    def rule_scope(self, rule: int) -> str | None:
        return {1: "acme/x", 2: ""}.get(rule)


def needs(request: Any, user: str = "ben") -> list[str]:
    """The needs of a request as text."""
    return [told(need) for need in NEEDS[type(request)](request, user, Names())]


def told(need: Need) -> str:
    where = "anywhere" if need.name is None else need.name
    return f"{need.right} {need.resource} {where}".rstrip() + (" (hidden)" if need.hidden else "")


def test_every_request_has_a_row() -> None:
    """Whoever adds a request says here who may make it."""
    assert set(NEEDS) == set(get_args(Request))


@pytest.mark.parametrize(("request_", "expected"), TABLE, ids=lambda each: type(each).__name__)
def test_needs(request_: Any, expected: list[str]) -> None:
    assert needs(request_) == expected


def test_the_table_of_this_test_is_whole() -> None:
    assert {type(request) for request, _ in TABLE} == set(get_args(Request))


def test_what_is_ones_own_needs_less() -> None:
    assert needs(groups.PutSchedule("nightly", "t", "* * * * *"), "anna") == [
        *("bear schedule nightly", "publish topic t")
    ]
    assert needs(groups.DeleteSchedule("nightly"), "anna") == ["bear schedule nightly"]
    assert needs(access.RevokeToken("k1"), "anna") == []


def test_the_list_of_dead_letters_is_a_matter_of_their_topic() -> None:
    """The group that remembers what was sent back is internal, and nobody has rights on it."""
    letters, group = "t.dlq", "_redrive"
    assert needs(groups.CreateGroup(group, [letters])) == ["settle topic t.dlq"]
    assert needs(queues.FindUnsettled(letters, 0, group)) == ["read topic t.dlq"]
    assert needs(queues.HoldOffsets(letters, 0, group, "m", [])) == ["settle topic t.dlq"]
    assert needs(queues.SettleOffsets(letters, 0, group, [])) == ["settle topic t.dlq"]
    assert needs(queues.Committed(letters, group)) == ["any topic t.dlq"]
    for elsewhere in (
        groups.CreateGroup(group, [letters, "t"]),
        groups.CreateGroup(group, []),
        groups.JoinGroup(group, "m", [letters]),
        queues.SettleOffsets("t", 0, group, []),
        queues.Lease(letters, group, "m", []),
        queues.Reopen(letters, 0, group, []),
        groups.DescribeGroup(group),
    ):
        assert any(need.endswith(f"group {group}") for need in needs(elsewhere)), elsewhere
