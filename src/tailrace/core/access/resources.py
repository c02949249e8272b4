"""What each request is about: from its type to the rights that its caller needs, in words that people use.

Every request type has a row in `NEEDS`. A row gives all needs of a request, and each of them has to be met:

    Ack on topic orders, group billing    settle topic orders, settle group billing
    PutSchedule on topic orders           publish topic orders; if it replaces another, publish its topic, too
    WhoAmI                                nothing

Needs name what the request names, whether it exists or not: who may not see a topic does not learn that it is
there. Where a request names something by another name (a schedule, a writer, a token, a rule), `NameLookup`
tells what that stands for. Nothing here knows the rules; `core.access.rules` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol

from tailrace.core.access.identity_names import shown
from tailrace.core.model import access_commands as access
from tailrace.core.model import commands as topics
from tailrace.core.model import damage_commands as damage
from tailrace.core.model import group_commands as groups
from tailrace.core.model import queue_commands as queues
from tailrace.core.model.access import Resource, Right
from tailrace.core.model.group_options import REDRIVE_GROUP
from tailrace.core.model.topic_options import DEAD_LETTERS

Wanted = Right | Literal["any", "ensure", "manage", "bear"]
"""Beside rights: `any` right on something; to `ensure` that a topic is there, for which any right is enough,
and which is refused like its creation; to `manage` users, as administrators do; to `bear` a name, which
belongs to no other tenant."""


class Need(NamedTuple):
    """One thing that the caller of a request has to be allowed."""

    right: Wanted
    resource: Resource | Literal["user", "rule", "tenant", "schedule", "writer"]
    name: str | None
    """None: it is enough to have the right on something."""
    hidden: str = ""
    """What the request names, if that stands for something else: a refusal names only this, and says the same
    whether it is there or not."""


Needs = tuple[Need, ...]


class NameLookup(Protocol):
    """What names of requests stand for."""

    def topic_exists(self, name: str) -> bool:
        """Whether there is such a topic."""
        ...

    def schedule(self, name: str) -> tuple[str, str] | None:
        """Topic and owner of a schedule."""
        ...

    def decided_topics(self, writer: str) -> Iterable[str]:
        """The topics of the last decided version of a writer."""
        ...

    def token_user(self, token: str) -> str | None:
        """The user of a token."""
        ...

    def rule_scope(self, rule: int) -> str | None:
        """See `scope_of`, for a rule by its number."""
        ...


Row = Callable[[Any, str, NameLookup], Needs]
"""Gives the needs of a request of this user."""

NOTHING: Needs = ()
OPERATE: Needs = (Need("operate", "broker", ""),)
ADMINISTRATOR: Needs = (Need("manage", "user", None),)
BROKER_ADMINISTRATOR: Needs = (Need("manage", "tenant", ""),)


def _hidden(what: str, name: str) -> str:
    return f"{what} {shown(name)}"


def scope_of(subject: str, resource: Resource, pattern: str) -> str:
    """The name whose tenant a rule belongs to: if subject and pattern lie in one tenant, and the resource is
    not the broker itself; empty otherwise, because then only administrators outside of tenants may touch
    it."""
    kind, _, name = subject.partition(":")
    tenant, slash, _ = name.partition("/")
    inside = bool(slash) and pattern.startswith(tenant + "/") and resource != "broker"
    return name if inside and kind in ("user", "team") else ""


# ------------------------------------------------------------------------------------------------- topics


def _nothing(request: Any, user: str, stored: NameLookup) -> Needs:
    return NOTHING


def publishing(topic: str) -> Needs:
    """The needs of putting messages into a topic. A dead letter that somebody writes by hand is redriven like
    any other, so that its writer has to be one who may make dead letters of messages."""
    need = Need("publish", "topic", topic)
    return (need, Need("settle", "topic", topic)) if topic.endswith(DEAD_LETTERS) else (need,)


def _publish(request: Any, user: str, stored: NameLookup) -> Needs:
    return publishing(request.topic)


def _read(request: Any, user: str, stored: NameLookup) -> Needs:
    return (Need("read", "topic", request.topic),)


def _any(request: Any, user: str, stored: NameLookup) -> Needs:
    return (Need("any", "topic", request.topic),)


def _describe(request: Any, user: str, stored: NameLookup) -> Needs:
    return (Need("any", "topic", request.name),)


def _create_topic(request: topics.CreateTopic, user: str, stored: NameLookup) -> Needs:
    # An application that makes sure of its topics has nothing to administer if they are there.
    if request.if_missing and stored.topic_exists(request.name):
        return (Need("ensure", "topic", request.name),)
    return _administer(request, user, stored)


def _administer(request: Any, user: str, stored: NameLookup) -> Needs:
    return (Need("administer-topic", "topic", request.name),)


def _trim(request: topics.TrimTopic, user: str, stored: NameLookup) -> Needs:
    return (Need("administer-topic", "topic", request.topic),)


def _operate(request: Any, user: str, stored: NameLookup) -> Needs:
    return OPERATE


# ------------------------------------------------------------------------------------------------- queues


def _consume(request: Any, user: str, stored: NameLookup) -> Needs:
    return (Need("consume", "topic", request.topic), Need("consume", "group", request.group))


def _settle(request: Any, user: str, stored: NameLookup) -> Needs:
    return (Need("settle", "topic", request.topic), Need("settle", "group", request.group))


def _is_redrive(group: str, names: Iterable[str]) -> bool:
    """Whether this is about which dead letters were sent back: then rights on their topics are enough."""
    return group == REDRIVE_GROUP and all(name.endswith(DEAD_LETTERS) for name in names)


def _settle_letters(request: Any, user: str, stored: NameLookup) -> Needs:
    if _is_redrive(request.group, (request.topic,)):
        return (Need("settle", "topic", request.topic),)
    return _settle(request, user, stored)


def _find_unsettled(request: queues.FindUnsettled, user: str, stored: NameLookup) -> Needs:
    need = Need("read", "topic", request.topic)
    if _is_redrive(request.group, (request.topic,)):
        return (need,)
    return (need, Need("any", "group", request.group))


def _committed(request: queues.Committed, user: str, stored: NameLookup) -> Needs:
    need = Need("any", "topic", request.topic)
    if _is_redrive(request.group, (request.topic,)):
        return (need,)
    return (need, Need("any", "group", request.group))


# ------------------------------------------------------------------------------------------------- groups


def _join(request: groups.JoinGroup, user: str, stored: NameLookup) -> Needs:
    named = [Need("consume", "topic", topic) for topic in dict.fromkeys(request.topics)]
    return (Need("consume", "group", request.group), *named)


def _member(request: Any, user: str, stored: NameLookup) -> Needs:
    return (Need("consume", "group", request.group),)


def _create_group(request: groups.CreateGroup, user: str, stored: NameLookup) -> Needs:
    names = dict.fromkeys(request.topics)
    if request.topics and _is_redrive(request.group, names):
        return tuple(Need("settle", "topic", topic) for topic in names)
    named = [Need("consume", "topic", topic) for topic in names]
    return (Need("administer-group", "group", request.group), *named)


def _administer_group(request: Any, user: str, stored: NameLookup) -> Needs:
    return (Need("administer-group", "group", request.group),)


def _reset(request: groups.ResetGroup, user: str, stored: NameLookup) -> Needs:
    return (Need("administer-group", "group", request.group), Need("consume", "topic", request.topic))


def _describe_group(request: groups.DescribeGroup, user: str, stored: NameLookup) -> Needs:
    return (Need("any", "group", request.group),)


# ---------------------------------------------------------------------------- schedules and staged writes


def _put_schedule(request: groups.PutSchedule, user: str, stored: NameLookup) -> Needs:
    needs = (Need("bear", "schedule", request.name), *publishing(request.topic))
    known = stored.schedule(request.name)
    if known is None or known[1] == user or known[0] == request.topic:
        return needs
    return (*needs, Need("publish", "topic", known[0], _hidden("schedule", request.name)))


def _delete_schedule(request: groups.DeleteSchedule, user: str, stored: NameLookup) -> Needs:
    known = stored.schedule(request.name)
    if known is not None and known[1] == user:
        return (Need("bear", "schedule", request.name),)
    # Without one, only who may publish everywhere learns that there is none.
    topic = "" if known is None else known[0]
    return (Need("publish", "topic", topic, _hidden("schedule", request.name)),)


def _stage(request: queues.StageRows, user: str, stored: NameLookup) -> Needs:
    return (*publishing(request.topic), Need("bear", "writer", request.writer))


def _decide(request: queues.DecideStaged | queues.AbortStaged, user: str, stored: NameLookup) -> Needs:
    """The answer tells what was decided last, and a decision ends those before it: so a writer belongs to
    those who may publish to all that it last wrote to."""
    names = dict.fromkeys(attempt[0] for attempt in request.attempts)
    names.update(dict.fromkeys(group[1] for group in request.grouped))
    decided = dict.fromkeys(stored.decided_topics(request.writer))
    hidden = _hidden("writer", request.writer)
    named = [need for name in names for need in publishing(name)] or [Need("publish", "topic", None)]
    others = [Need("publish", "topic", name, hidden) for name in decided if name not in names]
    return (Need("bear", "writer", request.writer), *named, *others)


# ----------------------------------------------------------------------------------------- users and rules


def _managing(request: access.AddUser | access.AlterUser) -> Needs:
    """Names of certificates and of users of the operating system are those of the whole broker, and no
    tenant's: whoever gave itself one that is another's would keep that one out, or be taken for it."""
    binds = request.certificates or request.system_users
    return (Need("manage", "user", "" if binds else request.name),)


def _add_user(request: access.AddUser, user: str, stored: NameLookup) -> Needs:
    return _managing(request)


def _remove_user(request: access.RemoveUser, user: str, stored: NameLookup) -> Needs:
    return (Need("manage", "user", request.name),)


def _alter_user(request: access.AlterUser, user: str, stored: NameLookup) -> Needs:
    others = request.teams, request.certificates, request.system_users, request.administrator
    if request.name == user and all(field is None for field in others):
        return NOTHING  # Everybody may change the own password.
    return _managing(request)


def _of_user(request: Any, user: str, stored: NameLookup) -> Needs:
    """Requests about a user; about oneself if none is named."""
    return NOTHING if request.user in (None, user) else (Need("manage", "user", request.user),)


def _revoke(request: access.RevokeToken, user: str, stored: NameLookup) -> Needs:
    of_user = stored.token_user(request.id)
    if of_user == user:
        return NOTHING
    return (Need("manage", "user", of_user or "", _hidden("token", request.id)),)


def _administrator(request: Any, user: str, stored: NameLookup) -> Needs:
    return ADMINISTRATOR


def _broker_administrator(request: Any, user: str, stored: NameLookup) -> Needs:
    return BROKER_ADMINISTRATOR


def _add_rule(request: access.AddRule, user: str, stored: NameLookup) -> Needs:
    return (Need("manage", "rule", scope_of(request.subject, request.resource, request.pattern)),)


def _remove_rule(request: access.RemoveRule, user: str, stored: NameLookup) -> Needs:
    return (Need("manage", "rule", stored.rule_scope(request.id) or "", f"rule {request.id}"),)


NEEDS: dict[type, Row] = {
    topics.Ping: _nothing,
    topics.CreateTopic: _create_topic,
    topics.AlterTopic: _administer,
    topics.DeleteTopic: _administer,
    topics.ListTopics: _nothing,
    topics.DescribeTopic: _describe,
    topics.TrimTopic: _trim,
    topics.Publish: _publish,
    topics.ClaimProducer: _publish,
    topics.Fetch: _read,
    topics.FindOffsets: _any,
    topics.ReadKey: _read,
    damage.AcceptLoss: _operate,
    damage.Scrub: _operate,
    queues.Lease: _consume,
    queues.Ack: _settle,
    queues.Nack: _settle,
    queues.GiveBack: _consume,
    queues.RejectMessages: _settle,
    queues.Extend: _consume,
    queues.Commit: _settle,
    queues.Committed: _committed,
    queues.Reopen: _settle,
    queues.SettleOffsets: _settle_letters,
    queues.FindUnsettled: _find_unsettled,
    queues.HoldOffsets: _settle_letters,
    queues.Republish: _publish,
    queues.CancelScheduled: _publish,
    queues.ListScheduled: _read,
    queues.Trace: _read,
    queues.StageRows: _stage,
    queues.DecideStaged: _decide,
    queues.AbortStaged: _decide,
    queues.ReadFacts: _read,
    groups.CreateGroup: _create_group,
    groups.DeleteGroup: _administer_group,
    groups.ListGroups: _nothing,
    groups.DescribeGroup: _describe_group,
    groups.PauseGroup: _administer_group,
    groups.AlterGroup: _administer_group,
    groups.ResetGroup: _reset,
    groups.JoinGroup: _join,
    groups.Heartbeat: _member,
    groups.LeaveGroup: _member,
    groups.PutSchedule: _put_schedule,
    groups.DeleteSchedule: _delete_schedule,
    groups.ListSchedules: _nothing,
    access.WhoAmI: _nothing,
    access.AddUser: _add_user,
    access.AlterUser: _alter_user,
    access.RemoveUser: _remove_user,
    access.ListUsers: _administrator,
    access.CreateToken: _of_user,
    access.ListTokens: _of_user,
    access.RevokeToken: _revoke,
    access.AddRule: _add_rule,
    access.RemoveRule: _remove_rule,
    access.ListRules: _administrator,
    access.CheckAccess: _of_user,
    access.PutQuota: _broker_administrator,
    access.RemoveQuota: _broker_administrator,
    access.ListQuotas: _broker_administrator,
    access.AddTenant: _broker_administrator,
    access.RemoveTenant: _broker_administrator,
    access.ListTenants: _broker_administrator,
}
