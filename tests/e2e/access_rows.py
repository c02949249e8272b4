"""Every verb with a request of its own, and what its caller has to be allowed: the rows of the access matrix.

This is written down a second time on purpose, without a look at `core.access.resources`: what the table there
says wrongly, or leaves out, differs from what is expected here. All requests are about topics `orders...` and
groups `billing...`; `{n}` in a name is a number that no other request has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from tailrace.core.model import access_commands as access
from tailrace.core.model import commands as topics
from tailrace.core.model import damage_commands as damage
from tailrace.core.model import group_commands as groups
from tailrace.core.model import queue_commands as queues
from tailrace.core.model.access import Resource, Right
from tailrace.format.frame import Buffer
from tests.e2e.doors import Session
from tests.e2e.raw_client import publish

TOPIC, GROUP = "orders", "billing"
OTHER_USER = "clerk"
PASSWORD = "a password of seven words or so"

Pair = tuple[Right | Literal["any"], Resource]
"""A right on something; `any` of them will do."""
Asked = tuple[Any, Buffer]
Make = Callable[[Session, int], Any]
"""Makes a request, or a request and its body; may prepare what it needs with the administrator's session."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One verb. `of` is the type of its request. Who may: those who have all of the `rights`, an
    `administrator`, or `everybody` who is known. `shows` gives the names in an answer that are only for those
    with the rights."""

    of: type
    make: Make
    rights: tuple[Pair, ...] = ()
    may: Literal["rights", "administrator", "everybody"] = "rights"
    shows: Callable[[Any], list[str]] | None = None

    def request(self, administrator: Session, number: int) -> Asked:
        """A request and its body."""
        made = self.make(administrator, number)
        return made if isinstance(made, tuple) else (made, b"")


def verb(
    request: Any,
    *rights: Pair,
    may: Literal["rights", "administrator", "everybody"] = "rights",
    shows: Callable[[Any], list[str]] | None = None,
) -> Row:
    """A row of a request that is always the same."""
    made = request if isinstance(request, tuple) else (request, b"")
    return Row(of=type(made[0]), make=lambda _, __: made, rights=rights, may=may, shows=shows)


PUBLISH: Pair = ("publish", "topic")
READ: Pair = ("read", "topic")
CONSUME: tuple[Pair, Pair] = (("consume", "topic"), ("consume", "group"))
SETTLE: tuple[Pair, Pair] = (("settle", "topic"), ("settle", "group"))
TOPIC_ADMIN: Pair = ("administer-topic", "topic")
GROUP_ADMIN: Pair = ("administer-group", "group")
OPERATE: Pair = ("operate", "broker")
ANY_TOPIC: Pair = ("any", "topic")
ANY_GROUP: Pair = ("any", "group")


def _published(kind: type) -> Asked:
    request, body = publish(TOPIC, [b"one"])
    if kind is queues.Republish:
        return queues.Republish(TOPIC, 0, request.columns, request.crc), body
    return request, body


def _staged(_: Session, number: int) -> Asked:
    request, body = publish(TOPIC, [b"one"])
    return queues.StageRows(TOPIC, 0, f"writer-{number}", "first", request.columns, request.crc), body


def _topic_to_delete(root: Session, number: int) -> Any:
    root.do(topics.CreateTopic(f"{TOPIC}-{number}", {"partitions": 1}))
    return topics.DeleteTopic(f"{TOPIC}-{number}")


def _group_to_delete(root: Session, number: int) -> Any:
    root.do(groups.CreateGroup(f"{GROUP}-{number}", [TOPIC]))
    return groups.DeleteGroup(f"{GROUP}-{number}")


def _schedule(number: int) -> Any:
    return groups.PutSchedule(f"nightly-{number}", TOPIC, "0 0 1 1 *", value=b"tick")


def _schedule_to_delete(root: Session, number: int) -> Any:
    root.do(_schedule(number))
    return groups.DeleteSchedule(f"nightly-{number}")


def _user_to_remove(root: Session, number: int) -> Any:
    root.do(access.AddUser(f"leaver-{number}"))
    return access.RemoveUser(f"leaver-{number}")


def _token_to_revoke(root: Session, number: int) -> Any:
    return access.RevokeToken(root.do(access.CreateToken(f"doomed-{number}", OTHER_USER)).id)


def _rule_to_remove(root: Session, number: int) -> Any:
    made = root.do(access.AddRule("deny", f"user:{OTHER_USER}", ["read"], "topic", f"none-{number}"))
    return access.RemoveRule(made.rules[0]["id"])


def _tenant_to_remove(root: Session, number: int) -> Any:
    root.do(access.AddTenant(f"leaving-{number}"))
    return access.RemoveTenant(f"leaving-{number}")


def _quota_to_remove(root: Session, number: int) -> Any:
    root.do(access.PutQuota(f"user:{OTHER_USER}", connections_max=1000 + number))
    return access.RemoveQuota(f"user:{OTHER_USER}")


def numbered(of: type, make: Callable[[int], Any], *rights: Pair, may: Any = "rights") -> Row:
    """A row of requests about something new each time."""
    return Row(of=of, make=lambda _, number: make(number), rights=rights, may=may)


ROWS: list[Row] = [
    # -- topics
    verb(topics.Ping(), may="everybody"),
    numbered(
        topics.CreateTopic, lambda n: topics.CreateTopic(f"{TOPIC}-{n}", {"partitions": 1}), TOPIC_ADMIN
    ),
    verb(topics.CreateTopic(TOPIC, {}, True), ANY_TOPIC),
    numbered(
        topics.AlterTopic, lambda n: topics.AlterTopic(TOPIC, {"retention_ms": 10**10 + n}), TOPIC_ADMIN
    ),
    Row(of=topics.DeleteTopic, make=_topic_to_delete, rights=(TOPIC_ADMIN,)),
    verb(
        topics.ListTopics(),
        ANY_TOPIC,
        may="everybody",
        shows=lambda reply: [info.name for info in reply.topics],
    ),
    verb(topics.DescribeTopic(TOPIC), ANY_TOPIC),
    verb(topics.TrimTopic(TOPIC, 0, 0), TOPIC_ADMIN),
    verb(_published(topics.Publish), PUBLISH),
    verb(topics.ClaimProducer(TOPIC, 0, 4711), PUBLISH),
    verb(topics.Fetch(TOPIC, [(0, 0)]), READ),
    verb(topics.FindOffsets(TOPIC, topics.EARLIEST), ANY_TOPIC),
    verb(topics.ReadKey(TOPIC, 0, b"k"), READ),
    verb(damage.AcceptLoss(TOPIC, 0), OPERATE),
    verb(damage.Scrub(begin=False), OPERATE),
    # -- queues
    verb(queues.Lease(TOPIC, GROUP, "m", [(0, 1)]), *CONSUME),
    verb(queues.Ack(TOPIC, 0, GROUP, [(1 << 40, [0, 1])]), *SETTLE),
    verb(queues.Nack(TOPIC, 0, GROUP, 1 << 40, [0, 1]), *SETTLE),
    verb(queues.GiveBack(TOPIC, 0, GROUP, [(1 << 40, [0, 1])]), *CONSUME),
    verb(queues.RejectMessages(TOPIC, 0, GROUP, 1 << 40, [0, 1]), *SETTLE),
    verb(queues.Extend(TOPIC, 0, GROUP, [1 << 40], 1000), *CONSUME),
    verb(queues.Commit(TOPIC, GROUP, "m", [(0, 1, 0)]), *SETTLE),
    verb(queues.Committed(TOPIC, GROUP), ANY_TOPIC, ANY_GROUP),
    verb(queues.Reopen(TOPIC, 0, GROUP, [0, 1]), *SETTLE),
    verb(queues.SettleOffsets(TOPIC, 0, GROUP, []), *SETTLE),
    verb(queues.FindUnsettled(TOPIC, 0, GROUP), READ, ANY_GROUP),
    verb(queues.HoldOffsets(TOPIC, 0, GROUP, "m", []), *SETTLE),
    verb(_published(queues.Republish), PUBLISH),
    verb(queues.CancelScheduled(TOPIC, 0, [b"0" * 16]), PUBLISH),
    verb(queues.ListScheduled(TOPIC), READ),
    verb(queues.Trace(TOPIC, 0, 0), READ),
    Row(of=queues.StageRows, make=_staged, rights=(PUBLISH,)),
    numbered(
        queues.DecideStaged,
        lambda n: queues.DecideStaged(f"decider-{n}", 1, [(TOPIC, 0, "none")]),
        PUBLISH,
    ),
    numbered(queues.AbortStaged, lambda n: queues.AbortStaged(f"aborter-{n}", [(TOPIC, 0, "none")]), PUBLISH),
    verb(queues.ReadFacts(TOPIC, 0), READ),
    # -- groups
    numbered(
        groups.CreateGroup,
        lambda n: groups.CreateGroup(f"{GROUP}-{n}", [TOPIC]),
        GROUP_ADMIN,
        ("consume", "topic"),
    ),
    Row(of=groups.DeleteGroup, make=_group_to_delete, rights=(GROUP_ADMIN,)),
    verb(
        groups.ListGroups(),
        ANY_GROUP,
        may="everybody",
        shows=lambda reply: [info.group for info in reply.groups],
    ),
    verb(groups.DescribeGroup(GROUP), ANY_GROUP),
    verb(groups.PauseGroup(GROUP, False), GROUP_ADMIN),
    numbered(groups.AlterGroup, lambda n: groups.AlterGroup(GROUP, {"max_attempts": 5 + n % 9}), GROUP_ADMIN),
    verb(
        groups.ResetGroup(GROUP, TOPIC, dry_run=True),
        GROUP_ADMIN,
        ("consume", "topic"),
    ),
    numbered(groups.JoinGroup, lambda n: groups.JoinGroup(f"{GROUP}-joined-{n}", "m", [TOPIC]), *CONSUME),
    verb(groups.Heartbeat(GROUP, "m"), ("consume", "group")),
    verb(groups.LeaveGroup(GROUP, "m"), ("consume", "group")),
    numbered(groups.PutSchedule, _schedule, PUBLISH),
    Row(of=groups.DeleteSchedule, make=_schedule_to_delete, rights=(PUBLISH,)),
    verb(
        groups.ListSchedules(),
        READ,
        may="everybody",
        shows=lambda reply: [row["topic"] for row in reply.schedules],
    ),
    # -- users, tokens, rules, quotas, tenants
    verb(access.WhoAmI(), may="everybody"),
    numbered(access.AddUser, lambda n: access.AddUser(f"joiner-{n}"), may="administrator"),
    numbered(access.AlterUser, lambda n: access.AlterUser(OTHER_USER, teams=[f"t-{n}"]), may="administrator"),
    Row(of=access.RemoveUser, make=_user_to_remove, may="administrator"),
    verb(access.ListUsers(), may="administrator"),
    numbered(
        access.CreateToken, lambda n: access.CreateToken(f"theirs-{n}", OTHER_USER), may="administrator"
    ),
    numbered(access.CreateToken, lambda n: access.CreateToken(f"own-{n}"), may="everybody"),
    verb(access.ListTokens(OTHER_USER), may="administrator"),
    verb(
        access.ListTokens(),
        may="everybody",
        shows=lambda reply: [row["user"] for row in reply.tokens if row["user"] == OTHER_USER],
    ),
    Row(of=access.RevokeToken, make=_token_to_revoke, may="administrator"),
    numbered(
        access.AddRule,
        lambda n: access.AddRule("deny", f"user:{OTHER_USER}", ["read"], "topic", f"none-{n}"),
        may="administrator",
    ),
    Row(of=access.RemoveRule, make=_rule_to_remove, may="administrator"),
    verb(access.ListRules(), may="administrator"),
    verb(access.CheckAccess("read", "topic", TOPIC, OTHER_USER), may="administrator"),
    verb(access.CheckAccess("read", "topic", TOPIC), may="everybody"),
    numbered(
        access.PutQuota,
        lambda n: access.PutQuota(f"user:{OTHER_USER}", connections_max=1000 + n),
        may="administrator",
    ),
    Row(of=access.RemoveQuota, make=_quota_to_remove, may="administrator"),
    verb(access.ListQuotas(), may="administrator"),
    numbered(access.AddTenant, lambda n: access.AddTenant(f"coming-{n}"), may="administrator"),
    Row(of=access.RemoveTenant, make=_tenant_to_remove, may="administrator"),
    verb(access.ListTenants(), may="administrator"),
]

PAIRS: tuple[Pair, ...] = tuple(dict.fromkeys(pair for row in ROWS for pair in row.rights))
SETS: tuple[tuple[Pair, ...], ...] = tuple(dict.fromkeys(row.rights for row in ROWS if row.rights))
EVERY_RIGHT: tuple[tuple[Right, Resource], ...] = (
    ("publish", "topic"),
    ("read", "topic"),
    ("consume", "topic"),
    ("settle", "topic"),
    ("administer-topic", "topic"),
    ("consume", "group"),
    ("settle", "group"),
    ("administer-group", "group"),
    ("operate", "broker"),
    ("peer", "broker"),
)
"""All that there is to be allowed."""


def only(pairs: tuple[Pair, ...]) -> list[tuple[Right, Resource]]:
    """Rights that are just enough."""
    return [("settle" if right == "any" else right, resource) for right, resource in pairs]


def without(pair: Pair) -> list[tuple[Right, Resource]]:
    """All rights but one, or but all on a kind of resource."""
    right, resource = pair
    return [one for one in EVERY_RIGHT if one[1] != resource or right not in ("any", one[0])]
