"""What each request is about: every type has a row, and the rows say what people are told.

Also covers `core/model/access_commands.py`.
"""

from collections.abc import Iterable
from typing import Any, get_args

import pytest

from tailrace.core.access.resources import NEEDS, Need
from tailrace.core.model import access_commands as access
from tailrace.core.model import commands as topics
from tailrace.core.model import damage_commands as damage
from tailrace.core.model import group_commands as groups
from tailrace.core.model import queue_commands as queues
from tailrace.core.model.commands import Request


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


TABLE: list[tuple[Any, list[str]]] = [
    (topics.Ping(), []),
    (topics.CreateTopic("t"), ["administer-topic topic t"]),
    (topics.CreateTopic("t", if_missing=True), ["administer-topic topic t"]),
    (topics.CreateTopic("here"), ["administer-topic topic here"]),
    (topics.CreateTopic("here", if_missing=True), ["any topic here"]),
    (topics.AlterTopic("t", {}), ["administer-topic topic t"]),
    (topics.DeleteTopic("t"), ["administer-topic topic t"]),
    (topics.TrimTopic("t", 0, 5), ["administer-topic topic t"]),
    (topics.ListTopics(), []),
    (topics.DescribeTopic("t"), ["any topic t"]),
    (topics.FindOffsets("t", 0), ["any topic t"]),
    (topics.Publish("t", 0, 0, 0), ["publish topic t"]),
    (topics.ClaimProducer("t", 0, 7), ["publish topic t"]),
    (topics.Fetch("t", [(0, 0)]), ["read topic t"]),
    (topics.ReadKey("t", 0, b"k"), ["read topic t"]),
    (damage.AcceptLoss("t", 0), ["operate broker"]),
    (damage.Scrub(), ["operate broker"]),
    (queues.Lease("t", "g", "m", [(0, 0)]), ["consume topic t", "consume group g"]),
    (queues.GiveBack("t", 0, "g", []), ["consume topic t", "consume group g"]),
    (queues.Extend("t", 0, "g", [], 1), ["consume topic t", "consume group g"]),
    (queues.Ack("t", 0, "g", []), ["settle topic t", "settle group g"]),
    (queues.Nack("t", 0, "g", 1, []), ["settle topic t", "settle group g"]),
    (queues.RejectMessages("t", 0, "g", 1, []), ["settle topic t", "settle group g"]),
    (queues.Commit("t", "g", "m", []), ["settle topic t", "settle group g"]),
    (queues.Committed("t", "g"), ["any topic t", "any group g"]),
    (queues.Reopen("t", 0, "g", []), ["settle topic t", "settle group g"]),
    (queues.SettleOffsets("t", 0, "g", []), ["settle topic t", "settle group g"]),
    (queues.HoldOffsets("t", 0, "g", "m", []), ["settle topic t", "settle group g"]),
    (queues.FindUnsettled("t", 0, "g"), ["read topic t", "any group g"]),
    (queues.Republish("t", 0, 0, 0), ["publish topic t"]),
    (queues.CancelScheduled("t", 0, []), ["publish topic t"]),
    (queues.ListScheduled("t"), ["read topic t"]),
    (queues.Trace("t"), ["read topic t"]),
    (queues.ReadFacts("t", 0), ["read topic t"]),
    (queues.StageRows("t", 0, "w", "a", 0, 0), ["publish topic t", "bear writer w"]),
    (queues.DecideStaged("w", 1, [("t", 0, "a")]), ["bear writer w", "publish topic t"]),
    (
        queues.DecideStaged("w", 1, [("t", 0, "a")], grouped=[("a", "v", [0, 1]), ("a", "t", [1])]),
        ["bear writer w", "publish topic t", "publish topic v"],
    ),
    (
        queues.DecideStaged("spark", 1, [("t", 0, "a")]),
        ["bear writer spark", "publish topic t", "publish topic u (hidden)"],
    ),
    (queues.DecideStaged("w", 1, [], attempt="a"), ["bear writer w", "publish topic anywhere"]),
    (queues.AbortStaged("w", [("t", 0, "a")]), ["bear writer w", "publish topic t"]),
    (groups.CreateGroup("g", ["t", "u"]), ["administer-group group g", "consume topic t", "consume topic u"]),
    (groups.DeleteGroup("g"), ["administer-group group g"]),
    (groups.PauseGroup("g", True), ["administer-group group g"]),
    (groups.AlterGroup("g", {}), ["administer-group group g"]),
    (groups.ResetGroup("g", "t"), ["administer-group group g", "consume topic t"]),
    (groups.ListGroups(), []),
    (groups.DescribeGroup("g"), ["any group g"]),
    (groups.JoinGroup("g", "m", ["t", "u"]), ["consume group g", "consume topic t", "consume topic u"]),
    (groups.Heartbeat("g", "m"), ["consume group g"]),
    (groups.LeaveGroup("g", "m"), ["consume group g"]),
    (groups.PutSchedule("new", "t", "* * * * *"), ["bear schedule new", "publish topic t"]),
    (
        groups.PutSchedule("nightly", "t", "* * * * *"),
        ["bear schedule nightly", "publish topic t", "publish topic bills (hidden)"],
    ),
    (groups.DeleteSchedule("nightly"), ["publish topic bills (hidden)"]),
    (groups.DeleteSchedule("new"), ["publish topic (hidden)"]),
    (groups.ListSchedules(), []),
    (access.WhoAmI(), []),
    (access.AddUser("cleo"), ["manage user cleo"]),
    (access.AlterUser("cleo", password="x"), ["manage user cleo"]),
    (access.AlterUser("ben", password="x"), []),
    (access.AlterUser("ben", password="x", administrator=True), ["manage user ben"]),
    (access.AlterUser("ben", teams=["x"]), ["manage user ben"]),
    (access.AlterUser("ben", certificates=[]), ["manage user ben"]),
    (access.AlterUser("ben", system_users=["root"]), ["manage user ben"]),
    (access.RemoveUser("cleo"), ["manage user cleo"]),
    (access.RemoveUser("ben"), ["manage user ben"]),
    (access.ListUsers(), ["manage user anywhere"]),
    (access.CreateToken("k"), []),
    (access.CreateToken("k", "ben"), []),
    (access.CreateToken("k", "anna"), ["manage user anna"]),
    (access.ListTokens(), []),
    (access.ListTokens("anna"), ["manage user anna"]),
    (access.RevokeToken("k1"), ["manage user anna (hidden)"]),
    (access.RevokeToken("k9"), ["manage user (hidden)"]),
    (access.AddRule("allow", "user:acme/x", ["read"], "topic", "acme/*"), ["manage rule acme/x"]),
    (access.AddRule("allow", "user:acme/x", ["read"], "topic", "*"), ["manage rule"]),
    (access.RemoveRule(1), ["manage rule acme/x (hidden)"]),
    (access.RemoveRule(2), ["manage rule (hidden)"]),
    (access.RemoveRule(9), ["manage rule (hidden)"]),
    (access.ListRules(), ["manage user anywhere"]),
    (access.CheckAccess("read", "topic", "t"), []),
    (access.CheckAccess("read", "topic", "t", "anna"), ["manage user anna"]),
    (access.PutQuota("everyone"), ["manage tenant"]),
    (access.RemoveQuota("everyone"), ["manage tenant"]),
    (access.ListQuotas(), ["manage tenant"]),
    (access.AddTenant("acme"), ["manage tenant"]),
    (access.RemoveTenant("acme"), ["manage tenant"]),
    (access.ListTenants(), ["manage tenant"]),
]


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
