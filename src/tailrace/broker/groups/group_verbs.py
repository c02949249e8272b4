"""Verbs of groups: join, heartbeat, leave, and administration.

A request becomes a command to the group's coordinator. When the decision is durable, the process of grants
(`core.process.grant_process`) brings the data partitions to it, and `MemberSessions` tells the members. A
member hears of a partition only after the partition knows the member, so that its first lease is not refused.

A verb is read from top to bottom: it checks, submits a command, and names the method that goes on with the
reply. What a verb has to remember between its steps is bound to these methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from tailrace.broker.groups.group_directory import GroupDirectory
from tailrace.broker.groups.member_sessions import MemberSessions, Presence
from tailrace.broker.groups.unknown_groups import UnknownGroups
from tailrace.broker.partition.coordinator_partition import CoordinatorPartition
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.pump import Pump, Timer
from tailrace.broker.runtime.turn import NOTHING, error_of, refuse
from tailrace.broker.topics import Topics
from tailrace.core.groups.group_state import GroupState
from tailrace.core.model import group_commands as verbs
from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.group_options import (
    REDRIVE_GROUP,
    REDRIVE_OPTIONS,
    GroupPolicy,
    parse_policy,
    warnings_of,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import (
    ChangeOptions,
    ConfirmReleased,
    DropGroup,
    Join,
    Leave,
    MakeGroup,
    PassTime,
    ResizeTopics,
    SetPaused,
    Sizes,
)
from tailrace.core.model.internal_topic import TOPIC, home_of
from tailrace.core.model.topic_options import DEAD_LETTERS, NAME_MAX, check_name
from tailrace.core.process.deletion_process import DeletionProcess
from tailrace.core.process.grant_process import GrantProcess, Recheck
from tailrace.core.process.session_process import no_member
from tailrace.errors import Denied, InvalidRequest, NotFound, TailraceError, Timeout, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import Gate, Respond

log = logging.getLogger("tailrace.groups")

TOPICS_MAX = 1_000
SETTLE_US = 5_000_000
"""Longest wait of an answer for partitions that are slow to take a group; faulty ones are not waited for."""
OWN_GROUPS = {REDRIVE_GROUP: DEAD_LETTERS}
"""Internal groups, and the suffix of the topics that each may be on."""


class _Waiter:
    """An answer that waits until the partitions of a group are settled, or its time is over."""

    __slots__ = ("group", "member", "ready", "timer")

    def __init__(self, group: str, member: str | None, ready: Callable[[bool], None]) -> None:
        self.group = group
        self.member = member
        self.ready = ready
        self.timer: Timer | None = None


class GroupVerbs:
    """Answers the requests of members and administrators of groups."""

    def __init__(
        self,
        topics: Topics,
        pump: Pump,
        coordinators: GroupDirectory,
        evicted: Callable[[str, str], None],
    ) -> None:
        self._topics = topics
        self._pump = pump
        self.coordinators = coordinators
        self.sessions = MemberSessions(coordinators, self.settle, evicted)
        self.unknown = UnknownGroups(topics, coordinators)
        self._left: dict[str, list[Callable[[], None]]] = {}
        self._touched: dict[str, None] = {}
        self._waiters: dict[_Waiter, None] = {}
        self._timers: dict[str, Timer] = {}
        """By group: the timer for the next change that time brings, see `GroupState.due_us`."""
        self.verbs: dict[type[Any], Callable[[Any, Buffer, Respond, Gate], None]] = {
            verbs.CreateGroup: self._create,
            verbs.DeleteGroup: self._delete,
            verbs.PauseGroup: self._pause,
            verbs.AlterGroup: self._alter,
            verbs.JoinGroup: self._join,
            verbs.Heartbeat: self._heartbeat,
            verbs.LeaveGroup: self._leave,
        }

    def start(self) -> None:
        """After recovery: tell the groups of topics that have changed, and watch the time for the others."""
        for group in self.coordinators.groups():
            resize = self._resize_of(group, group.topics)
            if resize is None:
                self.settle(group.name)
            else:
                self._command(group.name, resize, _unheard)
        self.unknown.report()

    def reopened(self, queue: QueuePartition) -> None:
        """A partition was rebuilt from its log and may lack its last decisions: compare everything with it
        again."""
        self._recheck(Recheck(topic=queue.topic, partition=queue.partition))

    def coordinator_reopened(self, reopened: CoordinatorPartition) -> None:
        """A coordinator was rebuilt from its log: watch the time for its groups, and tell their members."""
        for group in reopened.groups():
            self.settle(group.name)

    def _recheck(self, recheck: Recheck) -> None:
        """Compare partitions with what their coordinators want, and carry deletions to them."""
        for home in self.coordinators.runtimes():
            home.processes.ask(GrantProcess, recheck)
            home.processes.ask(DeletionProcess, recheck)

    def recheck(self, group: str) -> None:
        """Compare the partitions of a group with its coordinator: they were reset."""
        home = self.coordinators.home(group)
        if home is not None:
            home.processes.ask(GrantProcess, Recheck(group))

    def _grants(self, group: str) -> GrantProcess | None:
        home = self.coordinators.home(group)
        return None if home is None else home.processes.of(GrantProcess)

    def close(self) -> None:
        """Answer everything that waits."""
        self.sessions.close()
        for waiter in list(self._waiters):
            self._ready(waiter, False)

    # -- looking things up

    def topics_of(self, group: str) -> Collection[str]:
        """The topics of a group; none when it does not exist."""
        found = self.find(group)
        return () if found is None else found.topics

    def find(self, group: str) -> GroupState | None:
        """The state of a group at its coordinator; None when there is none."""
        return self.coordinators.group(group)

    def must_find(self, group: str) -> GroupState:
        """As `find`; raises `NotFound`, or the error of a coordinator that is not well."""
        self.coordinators.require_well(group)
        found = self.find(group)
        home = self.coordinators.home(group)
        if home is not None and home.fault is not None:
            raise Unavailable(f"the coordinator of group {group[:80]!r} is not well: {home.fault.message}")
        if found is None:
            raise NotFound(f"there is no group {group[:80]!r}", group=group[:80])
        return found

    def _resize_of(self, group: GroupState, topics: Iterable[str]) -> ResizeTopics | None:
        """The command that tells a group of changed topics; None when nothing changed. A missing topic counts
        as deleted only if the catalog says so, by its id; otherwise the group keeps it."""
        resize = ResizeTopics(group.name, [], {})
        for topic in topics:
            host, extent = self._topics.find(topic), group.topics.get(topic)
            if host is not None:
                known = extent is not None and (extent.partitions, extent.id) == (
                    len(host.runtimes),
                    host.info.id,
                )
                count, number = len(host.runtimes), host.info.id
            elif extent is None or not self._topics.catalog.was_deleted(extent.id):
                known, count, number = True, 0, 0
                if extent is not None:
                    log.error("group %s is on topic %r, which nobody knows: that is kept", group.name, topic)
            else:
                known, count, number = False, 0, extent.id
            if not known:
                resize.topics.append((topic, count))
                resize.topic_ids[topic] = number
        return resize if resize.topics else None

    def _ids(self, sizes: Sizes) -> dict[str, int]:
        return {topic: self._topics.get(topic).info.id for topic, _ in sizes}

    def _sizes(self, group: str, topics: list[str]) -> Sizes:
        """Check the topics of a request; returns their sizes."""
        problems = [f"group: {problem}" for problem in check_name(group, internal=group in OWN_GROUPS)]
        if not 1 <= len(topics) <= TOPICS_MAX:
            problems.append(f"topics: 1 to {TOPICS_MAX}, not {len(topics)}")
        suffix = OWN_GROUPS.get(group, "")
        problems += [f"topics: {group} is only for dead letters" for t in topics if not t.endswith(suffix)][
            :1
        ]
        if problems:
            raise InvalidRequest("; ".join(problems), problems=problems)
        return [(topic, len(self._topics.get(topic).runtimes)) for topic in dict.fromkeys(topics)]

    # -- commands

    def _command(self, group: str, command: Any, done: Callable[[Reply], None]) -> None:
        """Submit a command to a group's coordinator; when it is durable, `settle`, then call `done`."""
        self.coordinators.submit(group, command, partial(self._decided, group, done))

    def _decided(self, group: str, done: Callable[[Reply], None], reply: Reply, parts: Any) -> None:
        # A refusal changes nothing; after a failure of storage, see `reopened`.
        if not isinstance(reply, Refusal):
            self.settle(group)
        done(reply)

    def _after_leaving(self, group: str, action: Callable[[], None], respond: Respond) -> None:
        """Act now, or when the partitions have forgotten a deleted group of the same name."""
        if self._is_leaving(group):
            self._left.setdefault(group, []).append(partial(_act_late, action, respond))
        else:
            action()

    def _is_leaving(self, group: str) -> bool:
        home = self.coordinators.home(group)
        deletions = None if home is None else home.processes.of(DeletionProcess)
        return deletions is not None and deletions.leaving(group)

    def left(self, group: str) -> None:
        """Every working partition has forgotten a deleted group."""
        for action in self._left.pop(group, ()):
            action()

    def settle(self, group: str) -> None:
        """A coordinator has decided something: watch the time, and tell the members in the next turn. The
        process of grants carries it to the partitions."""
        found = self.find(group)
        if found is None:
            return
        time_us = found.due_us()
        home = self.coordinators.runtimes()[home_of(group)]
        due_us = None if time_us is None else home.clock.steady_us(time_us)
        timer = self._timers.get(group)
        if due_us is not None and (timer is None or timer.action is None or timer.due_us > due_us):
            if timer is not None:
                timer.cancel()
            self._timers[group] = self._pump.at(due_us, partial(self._pass_time, group))
        self.touch(group)

    def _pass_time(self, group: str, now_us: int) -> None:
        self._timers.pop(group, None)
        if self.find(group) is not None:
            self._command(group, PassTime(group), _unheard)

    def touch(self, group: str) -> None:
        """A group changed: look at its members in the next turn, once."""
        if not self._touched:
            self._pump.ready(self)
        self._touched[group] = None

    def turn(self, now_us: int, wall_us: int) -> None:
        """Tell members of changed assignments, and release the answers that waited for partitions."""
        touched, self._touched = self._touched, {}
        for name in touched:
            self._tell(name)
        for waiter in [waiter for waiter in self._waiters if waiter.group in touched]:
            group, grants = self.find(waiter.group), self._grants(waiter.group)
            if group is None or (grants is not None and grants.settled(group, waiter.member)):
                self._ready(waiter, True)

    def _tell(self, name: str) -> None:
        group, grants = self.find(name), self._grants(name)
        if group is not None and grants is not None and grants.ready(group):
            self.sessions.tell(name, grants.assignments(group))

    def when_settled(self, group: str, member: str | None, ready: Callable[[bool], None]) -> None:
        """Call `ready(True)` when the partitions of a group (and those of a member) are settled, or
        `ready(False)` when that takes too long."""
        waiter = _Waiter(group, member, ready)
        self._waiters[waiter] = None
        due_us = self._pump.clock.now_us() + SETTLE_US
        waiter.timer = self._pump.at(due_us, partial(self._too_late, waiter))
        self.touch(group)

    def _too_late(self, waiter: _Waiter, now_us: int) -> None:
        self._ready(waiter, False)

    def _ready(self, waiter: _Waiter, settled: bool) -> None:
        if waiter in self._waiters:
            del self._waiters[waiter]
            if waiter.timer is not None:
                waiter.timer.cancel()
            waiter.ready(settled)

    # -- administration

    def _create(self, request: verbs.CreateGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        name, sizes = request.group, self._sizes(request.group, request.topics)
        # An internal group is the same for everybody, whoever needs it first.
        policy = parse_policy(REDRIVE_OPTIONS if name in OWN_GROUPS else request.options, name)
        if isinstance(policy, Refusal):
            respond(policy, NOTHING)
            return
        command = MakeGroup(name, policy, sizes, request.if_missing, self._ids(sizes))
        answer = partial(self._answer_info, name, respond, created=self.find(name) is None)
        make = partial(self._command, name, command, partial(self._when_known, name, respond, answer))
        self._after_leaving(name, make, respond)

    def _pause(self, request: verbs.PauseGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        name = request.group
        self.must_find(name)
        paused = partial(self._when_known, name, respond, partial(_answer_done, respond))
        self._command(name, SetPaused(name, request.paused), paused)

    def _alter(self, request: verbs.AlterGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        name = request.group
        if name in OWN_GROUPS:
            raise Denied(f"group {name!r} is internal")
        self.must_find(name)
        if not request.options:
            raise InvalidRequest("options: name at least one that is to be changed")
        altered = partial(self._when_known, name, respond, partial(self._answer_info, name, respond))
        self._command(name, ChangeOptions(name, request.options), altered)

    def _when_known(self, name: str, respond: Respond, answer: Callable[[bool], None], reply: Reply) -> None:
        """Pass a refusal on; otherwise answer when every partition knows it, or when that takes too long."""
        if isinstance(reply, Refusal):
            respond(reply, NOTHING)
        else:
            self.when_settled(name, None, answer)

    def _answer_info(self, name: str, respond: Respond, settled: bool, **fields: Any) -> None:
        """Answer with a group that every partition knows by now, or with a timeout."""
        group = self.find(name)
        if group is None or not settled:
            respond(_unsettled(), NOTHING)
        else:
            respond(info_of(group, **fields), NOTHING)

    def _delete(self, request: verbs.DeleteGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        name = request.group
        if name in OWN_GROUPS:
            raise Denied(f"group {name!r} is internal")
        unknown = self.unknown.find().get(name) if self.find(name) is None else None
        if unknown:
            self.unknown.expel(name, unknown, respond)
            return
        self.must_find(name)
        self._command(name, DropGroup(name, request.force), partial(self._dropped, name, respond))

    def _dropped(self, name: str, respond: Respond, reply: Reply) -> None:
        """Pass a refusal on; otherwise answer when the partitions have forgotten the group."""
        if isinstance(reply, Refusal):
            respond(reply, NOTHING)
        elif self._is_leaving(name):
            self._left.setdefault(name, []).append(partial(respond, Done(), NOTHING))
        else:
            respond(Done(), NOTHING)

    def topic_changed(self, topic: str) -> None:
        """A topic was created, grew or was deleted: tell the groups that use it."""
        if topic == TOPIC:
            return
        for group in self.coordinators.groups():
            wanted = any(topic in member.topics for member in group.members.values())
            if wanted or topic in group.topics:
                resize = self._resize_of(group, [topic])
                if resize is not None:
                    self._command(group.name, resize, _unheard)
        self._recheck(Recheck(topic=topic))

    # -- members

    def _join(self, request: verbs.JoinGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        sizes = self._sizes(request.group, request.topics)
        if not 1 <= len(request.member) <= NAME_MAX:
            raise InvalidRequest(f"member: 1 to {NAME_MAX} characters, not {len(request.member)}")
        policy = parse_policy(request.options, request.group)
        if isinstance(policy, Refusal):
            respond(policy, NOTHING)
            return
        name, member = request.group, request.member
        name, member = request.group, request.member
        if request.again:
            self._refuse_superseded(name, member, request.incarnation)
        client, ids = request.client[:NAME_MAX], self._ids(sizes)
        command = Join(name, member, sizes, policy, request.options, request.wait, client, ids)
        joined = partial(self._joined, request, respond, self.sessions.arrival(gate))
        self._after_leaving(name, partial(self._command, name, command, joined), respond)

    def _joined(self, request: verbs.JoinGroup, respond: Respond, presence: Presence, reply: Reply) -> None:
        """The membership is durable: the consumer takes the session, and is answered when it has its part."""
        name, member = request.group, request.member
        group = self.find(name)
        if isinstance(reply, Refusal):
            presence.leave()
            respond(reply, NOTHING)
        elif group is None or member not in group.members:
            presence.leave()
            respond(no_member(name, member), NOTHING)  # Deleted or taken out meanwhile.
        else:
            self.sessions.joined(name, member, request.incarnation, presence)
            self.when_settled(name, member, partial(self._answer_join, name, member, respond))

    def _answer_join(self, name: str, member: str, respond: Respond, settled: bool) -> None:
        session = self.sessions.get(name, member)
        respond(no_member(name, member) if session is None else session.membership, NOTHING)

    def _heartbeat(self, request: verbs.Heartbeat, body: Buffer, respond: Respond, gate: Gate) -> None:
        name, member = request.group, request.member
        self.must_find(name)
        if self.sessions.get(name, member) is None:
            raise error_of(no_member(name, member))
        self._refuse_superseded(name, member, request.incarnation)
        self.sessions.show(name, member, request.incarnation, gate)
        if request.released:
            command = ConfirmReleased(name, member, request.released)
            self._command(name, command, partial(self._released, request, respond))
        else:
            self.sessions.poll(request, respond)

    def _released(self, request: verbs.Heartbeat, respond: Respond, reply: Reply) -> None:
        if isinstance(reply, Refusal):
            respond(reply, NOTHING)
        else:
            self._tell(request.group)  # So that the answer does not name partitions that were just given up.
            self.sessions.poll(request, respond)

    def _refuse_superseded(self, name: str, member: str, incarnation: str) -> None:
        refusal = self.sessions.superseded(name, member, incarnation)
        if refusal is not None:
            raise error_of(refusal)

    def _leave(self, request: verbs.LeaveGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        name, member = request.group, request.member
        self.must_find(name)
        self._refuse_superseded(name, member, request.incarnation)
        # First of all: once its partitions go to others, they are taken from it as from a member that died.
        self.sessions.leaves(name, member)
        self._command(name, Leave(name, member), partial(_pass_on, respond))


def _unheard(reply: Reply) -> None:
    """Ignore the reply."""


def _pass_on(respond: Respond, reply: Reply) -> None:
    respond(reply, NOTHING)


def _act_late(action: Callable[[], None], respond: Respond) -> None:
    """Do what a verb would have done at once; what it raises is its answer."""
    try:
        action()
    except TailraceError as error:
        respond(refuse(error), NOTHING)


def _answer_done(respond: Respond, settled: bool) -> None:
    respond(Done() if settled else _unsettled(), NOTHING)


def _unsettled() -> Refusal:
    """The answer when a decision has not reached every partition in time."""
    text = "not every partition has the group as it is now; it goes on by itself"
    return refuse(Timeout(text, outcome="unknown"))


def info_of(group: GroupState, **fields: Any) -> verbs.GroupInfo:
    """Describe a group."""
    options = {field: getattr(group.policy, field) for field in GroupPolicy.__struct_fields__}
    return verbs.GroupInfo(
        group.name,
        list(group.topics),
        options,
        group.paused,
        len(group.members),
        warnings=warnings_of(group.policy),
        **fields,
    )
