"""Sessions: how long a member of a group counts as alive, and when its heartbeat is answered.

A session begins when a member joins and ends in one of four ways:

    it leaves                                             at once
    its last connection closes                            after `reconnect_grace_ms`, unless it shows itself
                                                          on another connection before
    it is silent                                          after `session_ms`
    another consumer joins under its name                 at once: the newer consumer takes the session over

A closed connection says more than silence does, so it has a time of its own. Only the connection that the
member used last counts; the end of an older one means nothing. The steps of an end, in each case:

    Due or a request to leave
      Submit Leave to the coordinator
    FactsStored MemberLeft          no crash takes the end back
      Respond                       its heartbeat is refused, so it joins again if it lives
      Submit EvictMember            to every partition: its messages come back. If a crash loses one, the
                                    leases there time out; partitions of its own change hands by grants

If `Leave` is refused (a full disk), a silent member is taken out a session later. While a `Leave` is under
way there is no second one: it might come behind a new `Join`, and take out who has just come back.

*Silence.* One timer per member looks when the session would end. A sign of life only notes the time, and
does not touch the timer. With `session_ms` = 10 s:

    0 s     joined; the timer is set for 10 s
    4, 8 s  heartbeats
    10 s    the timer looks: last seen at 8 s, not silent for a session; set for 18 s
    18 s    nothing since 8 s: the member is gone, its partitions go to others

If the timer itself fires much too late (`STALL_US`), the broker stood still and not the member: everybody
gets another session.

*Heartbeats are long polls.* Each change of an assignment gets a new version. A heartbeat that names the
current version waits, half a session at most, and is answered as soon as the version changes or others wait
for the member's messages; a heartbeat with an older version is answered at once. Each is answered once, with
an older one of the same member before the newer waits.

*Nothing of this is stored.* The life of the process begins with a whole session for each member that its
coordinator knows, to show itself. Versions are never below the time of the step that made them, so they do
not repeat one from an earlier life.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from tailrace.core.groups.group_state import GroupState
from tailrace.core.model.commands import Reply
from tailrace.core.model.group_commands import Membership, Place
from tailrace.core.model.group_facts import GroupDeleted, MemberJoined, MemberLeft, OptionsChanged
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.model.internal_commands import EvictMember, Leave
from tailrace.core.process.grant_process import PATIENCE_US, MemberAssignment
from tailrace.core.process.process import (
    After,
    Answered,
    Asked,
    Begun,
    Cancel,
    Due,
    Effect,
    Event,
    FactsStored,
    Now,
    Respond,
    Submit,
    Tell,
)
from tailrace.errors import Fenced, NotFound

POLL_MS_MAX = 60_000
STALL_US = 2_000_000
"""Delay of a timer above which the broker itself stood still, and no member counts as silent."""

HUNGRY_US = 200_000
"""How long the news that others wait for messages stays true."""


# ---------------------------------------------------------------------------- requests, and what is told


class MemberShown(NamedTuple):
    """A sign of life of a member, on a connection. With `joins` it comes from a consumer that has just joined
    and takes the session over; otherwise it is not `superseded`."""

    group: str
    member: str
    incarnation: str
    connection: int
    joins: bool = False


class HeartbeatPoll(NamedTuple):
    """A heartbeat that waits for news; it is answered."""

    group: str
    member: str
    version: int
    wait_ms: int


class ConnectionClosed(NamedTuple):
    """A connection of a member is closed."""

    group: str
    member: str
    connection: int


class MemberLeaves(NamedTuple):
    """A member asks to leave. Its leases are given back first of all: once its partitions go to others, they
    are taken from it as from a member that died."""

    group: str
    member: str


class OthersWait(NamedTuple):
    """Others wait on partitions of which a member holds messages."""

    group: str
    member: str
    places: list[Place]


class AssignmentsKnown(NamedTuple):
    """What the partitions of a group have confirmed to each member."""

    group: str
    assignments: Mapping[str, MemberAssignment]


class BrokerCloses(NamedTuple):
    """The broker closes: heartbeats are answered, and connections that close from now on end no session."""


class SessionOver(NamedTuple):
    """Told: a member has no session any more."""

    group: str
    member: str


class RequestsOver(NamedTuple):
    """Told: a member is gone or superseded, so its requests that wait for messages are over."""

    group: str
    member: str


Key = tuple[str, str]
"""Group and member."""


class _SessionTag(NamedTuple):
    what: Literal["silence", "grace", "poll", "leave", "evict"]
    group: str
    member: str
    place: TopicPartition | None = None


class Session:
    """The session of one member."""

    __slots__ = (
        *("assignment", "connection", "due_us", "grace_us", "hungry", "hungry_us", "incarnation"),
        *("leaving", "policy", "poll", "seen_us", "version"),
    )

    def __init__(self, policy: GroupPolicy, version: int, now_us: int) -> None:
        self.policy = policy
        self.version = version
        self.assignment: MemberAssignment | None = None
        """None: not known yet."""
        self.seen_us = now_us
        self.due_us = 0
        """When the timer looks whether the member was silent."""
        self.grace_us: int | None = None
        """When the time to come back on another connection is over, while it runs."""
        self.connection: int | None = None
        """The connection that the member used last, while it is open."""
        self.incarnation = ""
        """Tells consumers that use the same member name apart; empty while not known."""
        self.leaving = False
        """Whether a `Leave` of this process is under way."""
        self.hungry: list[Place] = []
        """Partitions on which others waited, at `hungry_us`, when there was no heartbeat to answer."""
        self.hungry_us = 0
        self.poll: Hashable = None
        """The tag of the heartbeat that waits."""

    @property
    def membership(self) -> Membership:
        """The answer to a heartbeat."""
        owned, revoking, state = self.assignment or MemberAssignment([], [], "standby")
        options = {field: getattr(self.policy, field) for field in GroupPolicy.__struct_fields__}
        return Membership(self.version, owned, revoking, state, options)


class SessionProcess:
    """The sessions of the members of all groups of one coordinator."""

    WATCHES: frozenset[type] = frozenset((MemberJoined, MemberLeft, GroupDeleted, OptionsChanged))

    def __init__(self, home: TopicPartition, groups: Mapping[str, GroupState]) -> None:
        self._home = home
        self._groups = groups
        self._sessions: dict[Key, Session] = {}
        self._version = 0
        self._closing = False

    # -- questions of those who answer members

    def session(self, group: str, member: str) -> Session | None:
        """The session of a member, to look at; None without one."""
        return self._sessions.get((group, member))

    def superseded(self, group: str, member: str, incarnation: str) -> Refusal | None:
        """The refusal of a consumer whose session another one has taken over; None if it may go on."""
        session = self._sessions.get((group, member))
        taken = session is not None and _other(session, incarnation)
        return _superseded(group, member) if taken else None

    # -- steps

    def step(self, event: Event, now: Now) -> Sequence[Effect]:
        """See `Process.step`."""
        if isinstance(event, Asked):
            return list(self._asked(event, now))
        if isinstance(event, Due):
            assert isinstance(event.tag, _SessionTag)
            return list(self._due(event.tag, now))
        if isinstance(event, FactsStored):
            return [effect for fact in event.facts for effect in self._stored(fact, now)]
        if isinstance(event, Answered):
            assert isinstance(event.tag, _SessionTag)
            session = self._sessions.get(event.tag[1:3])
            if event.tag.what == "leave" and session is not None:
                session.leaving = False
            return ()
        assert isinstance(event, Begun)
        return [
            effect
            for name, group in self._groups.items()
            for member in group.members
            for effect in self._open(name, member, now)
        ]

    def _stored(self, fact: Any, now: Now) -> Iterator[Effect]:
        group = self._groups.get(fact.group)
        if isinstance(fact, GroupDeleted):
            deleted = Refusal(NotFound.code, f"group {fact.group!r} was deleted")
            for name, member in list(self._sessions):
                if name == fact.group:
                    yield from self._end(name, member, deleted)
        elif group is None:
            return  # Its deletion is decided, and will be stored.
        elif isinstance(fact, OptionsChanged):
            for (name, member), session in self._sessions.items():
                if name == fact.group and session.policy != group.policy:
                    session.policy = group.policy
                    yield self._watch(name, member, session, now)
                    yield from self._renew(session, session.assignment, now)
        elif fact.member in group.members:
            # Who has left, and whose next `Join` is decided already, goes on.
            yield from self._open(fact.group, fact.member, now)
        elif isinstance(fact, MemberLeft) and (fact.group, fact.member) in self._sessions:
            yield from self._end(fact.group, fact.member, no_member(fact.group, fact.member))
            yield from self._evict(fact.group, fact.member, left=False)

    def _asked(self, event: Asked, now: Now) -> Iterator[Effect]:
        request = event.request
        if isinstance(request, AssignmentsKnown):
            for member, assignment in request.assignments.items():
                session = self._sessions.get((request.group, member))
                if session is not None and session.assignment != assignment:
                    yield from self._renew(session, assignment, now)
        elif isinstance(request, BrokerCloses):
            self._closing = True
            for (group, member), session in self._sessions.items():
                session.grace_us = None
                yield Cancel(_SessionTag("grace", group, member))
                yield from self._answer(session, session.membership)
        elif isinstance(request, MemberLeaves):
            yield from self._evict(request.group, request.member, left=True)
        elif (session := self._sessions.get(request[:2])) is None:
            if event.tag is not None:
                yield Respond(event.tag, no_member(*request[:2]))
        elif isinstance(request, MemberShown):
            yield from self._show(request, session, now)
        elif isinstance(request, HeartbeatPoll):
            yield from self._wait(request, session, event.tag, now)
        elif isinstance(request, OthersWait):
            session.hungry, session.hungry_us = request.places, now.now_us
            if session.poll is not None:
                yield from self._tell_hungry(session)
        elif isinstance(request, ConnectionClosed) and session.connection == request.connection:
            session.connection = None
            yield from self._answer(session, session.membership)  # Nobody reads it.
            if not self._closing:
                yield self._begin_grace(request.group, request.member, session, now)

    def _due(self, tag: _SessionTag, now: Now) -> Iterator[Effect]:
        group, member = tag.group, tag.member
        session = self._sessions.get((group, member))
        if session is None:
            return
        if tag.what == "poll":
            yield from self._answer(session, session.membership)
        elif tag.what == "silence":
            late_us = now.now_us - session.due_us
            silent = now.now_us >= session.seen_us + session.policy.session_ms * 1000
            if silent:
                session.seen_us = now.now_us
            yield self._watch(group, member, session, now)
            if silent and late_us < STALL_US:
                yield from self._leave(group, member, session, "silent")
        elif session.grace_us is not None:
            if now.now_us - session.grace_us >= STALL_US:
                # It may have come back while the broker stood still.
                yield self._begin_grace(group, member, session, now)
            else:
                session.grace_us = None
                yield from self._leave(group, member, session, "disconnected")

    # -- beginning and end

    def _open(self, group: str, member: str, now: Now) -> Iterator[Effect]:
        """Begin a session, if there is none."""
        if (group, member) not in self._sessions:
            session = Session(self._groups[group].policy, self._next_version(now), now.now_us)
            self._sessions[group, member] = session
            yield self._watch(group, member, session, now)

    def _next_version(self, now: Now) -> int:
        self._version = max(self._version + 1, now.now_us)
        return self._version

    def _watch(self, group: str, member: str, session: Session, now: Now) -> After:
        """Set the timer that looks whether the member was silent for a session."""
        session.due_us = session.seen_us + session.policy.session_ms * 1000
        return After(_SessionTag("silence", group, member), max(0, session.due_us - now.now_us))

    def _begin_grace(self, group: str, member: str, session: Session, now: Now) -> After:
        """The connection of a member is closed: give it a short time to come back."""
        grace_us = session.policy.reconnect_grace_ms * 1000
        session.grace_us = now.now_us + grace_us
        return After(_SessionTag("grace", group, member), grace_us)

    def _leave(self, group: str, member: str, session: Session, reason: str) -> Iterator[Effect]:
        if not session.leaving:
            session.leaving = True
            tag = _SessionTag("leave", group, member)
            yield Submit(tag, self._home, Leave(group, member, reason), sure=False)

    def _end(self, group: str, member: str, answer: Refusal) -> Iterator[Effect]:
        session = self._sessions.pop((group, member))
        for what in ("silence", "grace"):
            yield Cancel(_SessionTag(what, group, member))
        yield from self._answer(session, answer)
        yield Tell(SessionOver(group, member))

    def _evict(self, group: str, member: str, *, left: bool) -> Iterator[Effect]:
        """Give back the leases of a member on all partitions."""
        yield Tell(RequestsOver(group, member))
        state = self._groups.get(group)
        for place in () if state is None else state.all_places():
            tag = _SessionTag("evict", group, member, TopicPartition(*place))
            command = EvictMember(group, member, left=left)
            topic_id = self._groups[group].topics[place[0]].id
            yield Submit(tag, TopicPartition(*place), command, topic_id=topic_id, sure=False)

    # -- signs of life and heartbeats

    def _show(self, shown: MemberShown, session: Session, now: Now) -> Iterator[Effect]:
        group, member = shown.group, shown.member
        session.seen_us = now.now_us
        if shown.joins and _other(session, shown.incarnation):
            yield from self._answer(session, _superseded(group, member))
            yield Tell(RequestsOver(group, member))
        # After the beginning of a life it is not known who has the session.
        session.incarnation = shown.incarnation if shown.joins else session.incarnation or shown.incarnation
        session.connection = shown.connection
        if session.grace_us is not None:
            session.grace_us = None
            yield Cancel(_SessionTag("grace", group, member))

    def _wait(self, poll: HeartbeatPoll, session: Session, tag: Hashable, now: Now) -> Iterator[Effect]:
        """Answer a heartbeat when there is something new or its time is over. An older heartbeat that still
        waits is answered now.

        The wait is half a session at most, so that a member whose connection is gone does not seem alive.
        After a start it also waits until the partitions have reported: a member that is told that it has
        nothing gives up what it has."""
        yield from self._answer(session, session.membership)
        session.poll = tag
        wait_ms = min(poll.wait_ms, POLL_MS_MAX, session.policy.session_ms // 2)
        if session.hungry and session.hungry_us + HUNGRY_US > now.now_us:
            yield from self._tell_hungry(session)
            return
        session.hungry = []
        if session.assignment is None:
            wait_ms = max(wait_ms, PATIENCE_US // 1000)
        elif poll.version != session.version or wait_ms <= 0:
            yield from self._answer(session, session.membership)
            return
        yield After(_SessionTag("poll", poll.group, poll.member), wait_ms * 1000)

    def _renew(self, session: Session, assignment: MemberAssignment | None, now: Now) -> Iterator[Effect]:
        """The assignment or the options are new: answer the heartbeat."""
        if assignment is None:
            return
        if session.assignment is not None:
            session.version = self._next_version(now)
        session.assignment = assignment
        yield from self._answer(session, session.membership)

    def _tell_hungry(self, session: Session) -> Iterator[Effect]:
        places, session.hungry = session.hungry, []
        yield from self._answer(session, msgspec.structs.replace(session.membership, hungry=places))

    @staticmethod
    def _answer(session: Session, reply: Reply) -> Iterator[Effect]:
        """Answer the heartbeat that waits, if there is one. Its timer may fire later, and finds none."""
        tag, session.poll = session.poll, None
        if tag is not None:
            yield Respond(tag, reply)


def no_member(group: str, member: str) -> Refusal:
    """The answer to a consumer without a session."""
    return Refusal(Fenced.code, f"{member[:80]!r} is no member of group {group!r} any more: join again")


def _other(session: Session, incarnation: str) -> bool:
    """Whether another consumer than this one has joined under the member name."""
    return bool(incarnation and session.incarnation) and session.incarnation != incarnation


def _superseded(group: str, member: str) -> Refusal:
    text = f"another consumer has joined group {group!r} as {member[:80]!r}, and has taken over"
    text += ": each consumer needs a name of its own"
    return Refusal(Fenced.code, text, details={"superseded": True})
