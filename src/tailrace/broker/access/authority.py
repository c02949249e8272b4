"""The authority: the one function that says whether a request may be made, asked by the gateway for each.

Verbs and listeners never ask for rights themselves, so none can forget to. A request that names several
things needs rights on all of them (`core.access.resources`), by the rules of now (`core.access.rules`):

    request ──▶ refusal(caller, request) ──▶ None: the verb runs ──▶ visible(caller, reply)
                                        └──▶ Denied, Unauthenticated

The owner of the broker is asked nothing, and nobody is while there are no users. Verdicts are remembered
until identities change; then requests that wait are looked at again by those who hear of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from tailrace.broker.groups.group_directory import GroupDirectory
from tailrace.broker.topics import Topics
from tailrace.core.access.resources import NEEDS, Need, Needs, publishing
from tailrace.core.access.rules import RuleBook, Verdict, refusal_of, rule_scope
from tailrace.core.model.access import Caller, Identities, Resource, Right
from tailrace.core.model.commands import Fetch, ListTopics, Publish, Reply, Request, TopicList
from tailrace.core.model.group_commands import (
    AlterGroup,
    CreateGroup,
    DescribeGroup,
    GroupInfo,
    GroupList,
    ListGroups,
    ListSchedules,
    Membership,
    ScheduleList,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import (
    Ack,
    Commit,
    DecideStaged,
    Extend,
    GiveBack,
    Lease,
    Nack,
    StagedDecision,
)
from tailrace.errors import Denied, Unauthenticated

VERDICTS_MAX = 50_000
NAME_REMEMBERED_MAX = 512
"""Verdicts about longer names are not remembered."""


FILTERED: frozenset[type] = frozenset(
    (ListTopics, ListGroups, ListSchedules, CreateGroup, DescribeGroup, AlterGroup, DecideStaged)
)
"""Requests whose answers pass through `Authority.visible`."""


_BY_TOPIC: frozenset[type] = frozenset((Publish, Fetch))
_BY_GROUP: frozenset[type] = frozenset((Lease, Ack, Nack, GiveBack, Extend, Commit))
"""The most frequent requests: what they need depends on their type, topic and group alone, so that one look
is enough once they were allowed."""


class StateLookup(Protocol):
    """What of the broker's state the needs of requests depend on."""

    def topic_exists(self, name: str) -> bool:
        """Whether there is such a topic."""
        ...

    def schedule(self, name: str) -> tuple[str, str] | None:
        """Topic and owner of a schedule."""
        ...

    def decided_topics(self, writer: str) -> Iterable[str]:
        """The topics of the last decided version of a writer."""
        ...


class BrokerNames:
    """`StateLookup` of a broker at work."""

    def __init__(self, topics: Topics, coordinators: GroupDirectory) -> None:
        self._topics = topics
        self._coordinators = coordinators

    def topic_exists(self, name: str) -> bool:
        """Whether there is such a topic."""
        return self._topics.find(name) is not None

    def schedule(self, name: str) -> tuple[str, str] | None:
        """Topic and owner of a schedule."""
        home = self._coordinators.home(name)
        found = None if home is None else home.schedule(name)
        return None if found is None else (found.put.topic, found.put.owner)

    def decided_topics(self, writer: str) -> Iterable[str]:
        """The topics of the last decided version of a writer."""
        home = self._coordinators.home(writer)
        return () if home is None else home.decided_topics(writer)


class Authority:
    """Decides on requests, for the identities of the moment. `changed` are called after each change."""

    def __init__(
        self,
        lookup: StateLookup,
        changed: Iterable[Callable[[], None]] = (),
        identities: Identities | None = None,
    ) -> None:
        self._lookup = lookup
        self._changed = tuple(changed)
        self.identities = Identities() if identities is None else identities
        self._book = RuleBook(self.identities)
        self._verdicts: dict[tuple[str, Need], bool] = {}
        self._allowed: set[tuple[str, type, str, str]] = set()
        """Frequent requests that were allowed: user, type, topic and group."""

    def put(self, identities: Identities) -> None:
        """Take over changed identities, at once for everybody."""
        self.identities = identities
        self._book = RuleBook(identities)
        self._verdicts.clear()
        self._allowed.clear()
        for hear in self._changed:
            hear()

    @property
    def remembered(self) -> int:
        """Number of verdicts in memory."""
        return len(self._verdicts) + len(self._allowed)

    # -- requests

    def refusal(self, caller: Caller, request: Any) -> Refusal | None:
        """None if the caller may make this request now."""
        proof = caller.proof
        if proof == "owner":
            return None
        users = self.identities.users
        if proof == "open" and not users:
            return None
        user = caller.user
        if proof == "open" or user not in users:
            return _unauthenticated(caller)
        kind = type(request)
        if kind in _BY_GROUP:
            frequent = (user, kind, request.topic, request.group)
        elif kind in _BY_TOPIC:
            frequent = (user, kind, request.topic, "")
        else:
            return self._unmet(user, request)
        if frequent in self._allowed:
            return None
        refusal = self._unmet(user, request)
        if refusal is None and len(frequent[2]) + len(frequent[3]) <= NAME_REMEMBERED_MAX:
            if len(self._allowed) >= VERDICTS_MAX:
                self._allowed.clear()
            self._allowed.add(frequent)
        return refusal

    def _unmet(self, user: str, request: Request) -> Refusal | None:
        for need in NEEDS[type(request)](request, user, self):
            if not self._meets(user, need):
                return refusal_of(user, need, self._book.meets(user, need))
        return None

    def may(self, caller: Caller, right: Right, resource: Resource, name: str) -> bool:
        """Whether a caller has a right now."""
        if self.trusts(caller):
            return True
        return caller.proof != "open" and self.user_may(caller.user, right, resource, name)

    def user_may(self, user: str, right: Right, resource: Resource, name: str) -> bool:
        """Whether a user has a right now; nobody is a user of a broker without users, and may."""
        if not self.identities.users:
            return True
        return self._meets(user, Need(right, resource, name))

    def may_tick(self, owner: str, topic: str) -> bool:
        """Whether a schedule may publish: with the rights of who made it. One that was made without users, or
        by the owner of the broker, goes on as the broker's own."""
        if not owner or not self.identities.users:
            return True
        return all(self._meets(owner, need) for need in publishing(topic))

    def explained(self, caller: Caller, request: Request) -> tuple[Needs, Verdict | None]:
        """What a request needs, and the verdict that decides on it: the first that denies, or else the last.
        None if no rule was asked."""
        needs = NEEDS[type(request)](request, caller.user, self)
        verdict = None
        if not self.trusts(caller):
            for need in needs:
                verdict = self._book.meets(caller.user, need)
                if not verdict.allowed:
                    break
        return needs, verdict

    def explain(self, user: str, right: Right, resource: Resource, name: str) -> Verdict:
        """Which rule decides on a right of a user, and why."""
        return self._book.decide(user, right, resource, name)

    def trusts(self, caller: Caller) -> bool:
        """Whether no rule is asked: the owner of the broker, or anybody while it has no users."""
        return caller.proof == "owner" or (caller.proof == "open" and not self.identities.users)

    def _meets(self, user: str, need: Need) -> bool:
        verdicts = self._verdicts
        key = (user, need)
        known = verdicts.get(key)
        if known is None:
            known = self._book.meets(user, need).allowed
            if len(need.name or "") + len(need.hidden) <= NAME_REMEMBERED_MAX:
                if len(verdicts) >= VERDICTS_MAX:
                    verdicts.clear()
                verdicts[key] = known
        return known

    # -- see `core.access.resources.NameLookup`

    def topic_exists(self, name: str) -> bool:
        """Whether there is such a topic."""
        return self._lookup.topic_exists(name)

    def schedule(self, name: str) -> tuple[str, str] | None:
        """Topic and owner of a schedule."""
        return self._lookup.schedule(name)

    def decided_topics(self, writer: str) -> Iterable[str]:
        """The topics of the last decided version of a writer."""
        return self._lookup.decided_topics(writer)

    def token_user(self, token: str) -> str | None:
        """The user of a token."""
        found = self.identities.tokens.get(token)
        return None if found is None else found.user

    def rule_scope(self, rule: int) -> str | None:
        """The tenant's name that a rule is about."""
        return rule_scope(self.identities.rules, rule)

    # -- answers

    def visible(self, caller: Caller, reply: Reply) -> Reply:
        """A reply without what the caller may not know of: listings have only what it has any right on."""
        if self.trusts(caller):
            return reply
        show = _SHOWN.get(type(reply))
        return reply if show is None else show(self, caller.user, reply)

    def sees(self, user: str, resource: Resource, name: str) -> bool:
        """Whether a user has any right on something."""
        return self._meets(user, Need("any", resource, name))


def _unauthenticated(caller: Caller) -> Refusal:
    if caller.proof == "open":
        text = "this broker needs credentials: it has had users since this connection was opened"
    else:
        text = "this broker needs credentials: the user of this connection does not exist any more"
    return Refusal(Unauthenticated.code, text)


# ------------------------------------------------------------------------------------------------ listings


def _topics_shown(authority: Authority, user: str, reply: TopicList) -> TopicList:
    return TopicList([info for info in reply.topics if authority.sees(user, "topic", info.name)])


def _groups_shown(authority: Authority, user: str, reply: GroupList) -> GroupList:
    kept = [info for info in reply.groups if authority.sees(user, "group", info.group)]
    return GroupList([_group_shown(authority, user, info) for info in kept])


def _group_shown(authority: Authority, user: str, info: GroupInfo) -> GroupInfo:
    """A group without topics that the user may not know of."""
    hidden = {topic for topic in info.topics if not authority.sees(user, "topic", topic)}
    if not hidden:
        return info
    members = [
        {**member, "owned": [place for place in member["owned"] if place[0] not in hidden]}
        for member in info.members
    ]
    return msgspec.structs.replace(
        info,
        topics=[topic for topic in info.topics if topic not in hidden],
        partitions=[row for row in info.partitions if row["topic"] not in hidden],
        members=members,
        warnings=[text for text in info.warnings if not any(repr(topic) in text for topic in hidden)],
    )


def _membership_shown(authority: Authority, user: str, reply: Membership) -> Membership:
    """The membership of whoever may consume from its topics, too; ids of members are no secret."""
    topics = {topic for topic, _, _ in reply.owned}
    hidden = {topic for topic in topics if not authority.sees(user, "topic", topic)}
    if not hidden:
        return reply
    return msgspec.structs.replace(
        reply,
        owned=[place for place in reply.owned if place[0] not in hidden],
        revoking=[place for place in reply.revoking if place[0] not in hidden],
        hungry=[place for place in reply.hungry if place[0] not in hidden],
    )


def _schedules_shown(authority: Authority, user: str, reply: ScheduleList) -> ScheduleList:
    """Schedules with their messages: those of the user, and those on topics that it may read or publish
    to."""
    rows = [
        row
        for row in reply.schedules
        if row["owner"] == user
        or authority.user_may(user, "read", "topic", row["topic"])
        or authority.user_may(user, "publish", "topic", row["topic"])
    ]
    return ScheduleList(rows)


def _decision_shown(authority: Authority, user: str, reply: StagedDecision) -> StagedDecision | Refusal:
    """A decision of others may have come between the question and the answer."""
    names = [topic for topic, _, _ in reply.attempts] + [topic for _, topic, _ in reply.grouped]
    if all(authority.user_may(user, "publish", "topic", name) for name in dict.fromkeys(names)):
        return reply
    return Refusal(Denied.code, "this writer writes to topics that you may not publish to", "unknown")


_SHOWN: dict[type, Callable[[Authority, str, Any], Reply]] = {
    TopicList: _topics_shown,
    GroupList: _groups_shown,
    GroupInfo: _group_shown,
    Membership: _membership_shown,
    ScheduleList: _schedules_shown,
    StagedDecision: _decision_shown,
}
