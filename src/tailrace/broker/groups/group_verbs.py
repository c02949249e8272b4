"""Verbs of groups: join, heartbeat, leave, and administration.

A request becomes a command to the group's coordinator. When the decision is durable, the process of grants
(`core.process.grant_process`) brings the data partitions to it, and `MemberSessions` tells the members. A
member hears of a partition only after the partition knows the member, so that its first lease is not refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any

from tailrace.broker.groups.group_directory import GroupDirectory
from tailrace.broker.groups.member_sessions import MemberSessions, Presence
from tailrace.broker.groups.unknown_groups import UnknownGroups
from tailrace.broker.partition.coordinator_partition import CoordinatorPartition
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.process_driver import Router
from tailrace.broker.runtime.pump import Pump, Timer
from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.broker.topics import Topics
from tailrace.core.groups.group_state import GroupState
from tailrace.core.model import group_commands as verbs
from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.group_options import GroupPolicy, parse_policy, warnings_of
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.model.internal_commands import (
    ChangeOptions,
    ConfirmReleased,
    DropGroup,
    EvictMember,
    Join,
    Leave,
    MakeGroup,
    PassTime,
    ResizeTopics,
    SetPaused,
    Sizes,
)
from tailrace.core.model.internal_topic import TOPIC, home_of
from tailrace.core.model.topic_options import NAME_MAX, check_name
from tailrace.core.process.deletion_process import DeletionProcess
from tailrace.core.process.grant_process import GrantProcess, Recheck
from tailrace.errors import Denied, Fenced, InvalidRequest, NotFound, TailraceError, Timeout, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import Gate, Respond

log = logging.getLogger("tailrace.groups")

TOPICS_MAX = 1_000
SETTLE_US = 5_000_000
"""Longest wait of an answer for partitions that are slow to take a group; faulty ones are not waited for."""
OWN_GROUPS = {"_redrive": ".dlq"}
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
        router: Router,
        evicted: Callable[[str, str], None],
    ) -> None:
        self._topics = topics
        self._pump = pump
        self._router = router
        self.coordinators = coordinators
        self.seats = MemberSessions(pump, self._gone)
        self._evicted = evicted
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
        """After recovery: bring every partition to what the coordinators decided, and give every member a
        whole session to show itself."""
        for _, machine in self.coordinators.machines():
            for group in machine.groups.by_name.values():
                for member in group.members:
                    self.seats.take(group.name, member, group.policy)
                resize = self._resize_of(group, group.topics)
                if resize is None:
                    self.settle(group.name)
                else:
                    self._command(group.name, resize, lambda reply: None)
        self.unknown.report()

    def reopened(self, queue: QueuePartition) -> None:
        """A partition was rebuilt from its log and may lack its last decisions: compare everything with it
        again."""
        self._recheck(Recheck(topic=queue.topic, partition=queue.partition))

    def coordinator_reopened(self, reopened: CoordinatorPartition) -> None:
        """A coordinator was rebuilt from its log: begin a session for each member that has none."""
        for home, machine in self.coordinators.machines():
            for group in machine.groups.by_name.values() if home is reopened else ():
                for member in group.members:
                    if self.seats.get(group.name, member) is None:
                        self.seats.take(group.name, member, group.policy)
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
        self.seats.close()
        for waiter in list(self._waiters):
            self._ready(waiter, False)

    # -- looking things up

    def topics_of(self, group: str) -> Collection[str]:
        """The topics of a group; none when it does not exist."""
        found = self.find(group)
        return () if found is None else found.topics

    def find(self, group: str) -> GroupState | None:
        """The state of a group at its coordinator; None when there is none."""
        machine = self.coordinators.of(group)
        return None if machine is None else machine.groups.by_name.get(group)

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

        def answered(reply: Reply, parts: Any) -> None:
            # A refusal changes nothing; after a failure of storage, see `reopened`.
            if not isinstance(reply, Refusal):
                self.settle(group)
            done(reply)

        self.coordinators.submit(group, command, answered)

    def _after_leaving(self, group: str, action: Callable[[], None], respond: Respond) -> None:
        """Act now, or when the partitions have forgotten a deleted group of the same name."""
        if not self._is_leaving(group):
            action()
            return

        def later() -> None:
            try:
                action()
            except TailraceError as error:
                respond(refuse(error), NOTHING)

        self._left.setdefault(group, []).append(later)

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
            self._timers[group] = self._pump.at(due_us, lambda now_us: self._pass_time(group))
        self.touch(group)

    def _pass_time(self, group: str) -> None:
        self._timers.pop(group, None)
        if self.find(group) is not None:
            self._command(group, PassTime(group), lambda reply: None)

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
            for member, standing in grants.assignments(group).items():
                self.seats.tell(name, member, standing, group.policy)

    def _evict(self, group: GroupState, member: str, *, left: bool = False) -> None:
        """A member leaves or is gone: give back its leases on all partitions. A crash may lose this; then the
        leases time out. Partitions of its own get their next owner by their grants; this is for those that
        are or were shared."""
        self._evicted(group.name, member)
        for place in group.all_places():
            command = EvictMember(group.name, member, left=left)
            topic_id = group.topics[place[0]].id
            self._router.submit(TopicPartition(*place), topic_id, command, b"", _unheard, sure=False)

    def when_settled(self, group: str, member: str | None, ready: Callable[[bool], None]) -> None:
        """Call `ready(True)` when the partitions of a group (and those of a member) are settled, or
        `ready(False)` when that takes too long."""
        waiter = _Waiter(group, member, ready)
        self._waiters[waiter] = None
        due_us = self._pump.clock.now_us() + SETTLE_US
        waiter.timer = self._pump.at(due_us, lambda now_us: self._ready(waiter, False))
        self.touch(group)

    def _ready(self, waiter: _Waiter, settled: bool) -> None:
        if waiter in self._waiters:
            del self._waiters[waiter]
            if waiter.timer is not None:
                waiter.timer.cancel()
            waiter.ready(settled)

    # -- administration

    def _create(self, request: verbs.CreateGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        sizes = self._sizes(request.group, request.topics)
        policy = parse_policy(request.options, request.group)
        if isinstance(policy, Refusal):
            respond(policy, NOTHING)
            return
        command = MakeGroup(request.group, policy, sizes, request.if_missing, self._ids(sizes))
        created = self.find(request.group) is None
        made = self._then_settled(
            request.group,
            respond,
            lambda settled: self._answer_info(request.group, settled, respond, created=created),
        )
        self._after_leaving(request.group, lambda: self._command(request.group, command, made), respond)

    def _delete(self, request: verbs.DeleteGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        name = request.group
        if name in OWN_GROUPS:
            raise Denied(f"group {name!r} is internal")
        unknown = self.unknown.find().get(name) if self.find(name) is None else None
        if unknown:
            self.unknown.expel(name, unknown, respond)
            return
        self.must_find(name)

        def dropped(reply: Reply) -> None:
            if isinstance(reply, Refusal):
                respond(reply, NOTHING)
                return
            for member in self.seats.members(name):
                self.seats.leave(name, member, Refusal(NotFound.code, f"group {name!r} was deleted"))
            if self._is_leaving(name):
                self._left.setdefault(name, []).append(lambda: respond(Done(), NOTHING))
            else:
                respond(Done(), NOTHING)

        self._command(name, DropGroup(name, request.force), dropped)

    def _pause(self, request: verbs.PauseGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        self.must_find(request.group)
        paused = self._then_settled(
            request.group, respond, lambda settled: respond(Done() if settled else _unsettled(), NOTHING)
        )
        self._command(request.group, SetPaused(request.group, request.paused), paused)

    def _alter(self, request: verbs.AlterGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        name = request.group
        if name in OWN_GROUPS:
            raise Denied(f"group {name!r} is internal")
        self.must_find(name)
        if not request.options:
            raise InvalidRequest("options: name at least one that is to be changed")
        changed = self._then_settled(name, respond, lambda settled: self._answer_info(name, settled, respond))
        self._command(name, ChangeOptions(name, request.options), changed)

    def _then_settled(
        self, name: str, respond: Respond, answer: Callable[[bool], None]
    ) -> Callable[[Reply], None]:
        """Pass a refusal on; otherwise answer when every partition knows it, or when that takes too long."""

        def decided(reply: Reply) -> None:
            if isinstance(reply, Refusal):
                respond(reply, NOTHING)
            else:
                self.when_settled(name, None, answer)

        return decided

    def _answer_info(self, name: str, settled: bool, respond: Respond, **fields: Any) -> None:
        """Answer with a group that every partition knows by now, or with a timeout."""
        group = self.find(name)
        if group is None or not settled:
            respond(_unsettled(), NOTHING)
        else:
            respond(info_of(group, **fields), NOTHING)

    def topic_changed(self, topic: str) -> None:
        """A topic was created, grew or was deleted: tell the groups that use it."""
        if topic == TOPIC:
            return
        for _, machine in self.coordinators.machines():
            for group in machine.groups.by_name.values():
                wanted = any(topic in member.topics for member in group.members.values())
                if wanted or topic in group.topics:
                    resize = self._resize_of(group, [topic])
                    if resize is not None:
                        self._command(group.name, resize, lambda reply: None)
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
        if request.again and self.seats.taken(name, member, request.incarnation):
            raise _superseded(name, member)
        client = request.client[:NAME_MAX]
        ids = self._ids(sizes)
        command = Join(name, member, sizes, policy, request.options, request.wait, client, ids)

        presence = Presence(gate)

        def joined(reply: Reply) -> None:
            group = self.find(name)
            if isinstance(reply, Refusal):
                presence.leave()
                respond(reply, NOTHING)
            elif group is None or member not in group.members:
                presence.leave()
                respond(_stranger(name, member), NOTHING)  # Deleted or taken out meanwhile.
            else:
                other = self.seats.taken(name, member, request.incarnation)
                seat = self.seats.take(name, member, group.policy)
                if other:
                    self.seats.hand_over(seat, request.incarnation, refuse(_superseded(name, member)))
                    self._evicted(name, member)
                seat.incarnation = request.incarnation
                self.seats.present(name, member, seat, presence)
                self.when_settled(name, member, answer)

        def answer(settled: bool) -> None:
            seat = self.seats.get(name, member)
            respond(_stranger(name, member) if seat is None else self.seats.membership(seat), NOTHING)

        self._after_leaving(name, lambda: self._command(name, command, joined), respond)

    def _heartbeat(self, request: verbs.Heartbeat, body: Buffer, respond: Respond, gate: Gate) -> None:
        name, member = request.group, request.member
        group = self.must_find(name)
        if self.seats.get(name, member) is None:
            raise _no_member(name, member)
        if self.seats.taken(name, member, request.incarnation):
            raise _superseded(name, member)
        seat = self.seats.take(name, member, group.policy)
        seat.incarnation = seat.incarnation or request.incarnation  # After a start it is not known.
        if seat.presence is None or not seat.presence.on(gate):
            self.seats.present(name, member, seat, Presence(gate))

        def poll(reply: Reply) -> None:
            seat = self.seats.get(name, member)
            if isinstance(reply, Refusal):
                respond(reply, NOTHING)
            elif seat is None:
                respond(_stranger(name, member), NOTHING)
            else:
                if request.released:
                    self._tell(name)  # So that the answer does not name partitions that were just given up.
                self.seats.poll(seat, request, respond)

        if request.released:
            self._command(name, ConfirmReleased(name, member, request.released), poll)
        else:
            poll(Done())

    def _leave(self, request: verbs.LeaveGroup, body: Buffer, respond: Respond, gate: Gate) -> None:
        group = self.must_find(request.group)
        if self.seats.taken(request.group, request.member, request.incarnation):
            raise _superseded(request.group, request.member)
        # First of all: once its partitions go to others, they are taken from it as from a member that died.
        self._evict(group, request.member, left=True)
        self._take_out(request.group, request.member, "left", lambda reply: respond(reply, NOTHING))

    def _gone(self, group: str, member: str, reason: str) -> None:
        self._take_out(group, member, reason, lambda reply: None)

    def _take_out(self, group: str, member: str, reason: str, done: Callable[[Reply], None]) -> None:
        def left(reply: Reply) -> None:
            found = self.find(group)
            if not isinstance(reply, Refusal) and not (found is not None and member in found.members):
                self.seats.leave(group, member, _stranger(group, member))
                if found is not None:
                    self._evict(found, member)
            done(reply)

        self._command(group, Leave(group, member, reason), left)


def _unheard(reply: object, parts: object) -> None:
    """Ignore the reply."""


def _no_member(group: str, member: str) -> Fenced:
    return Fenced(f"{member[:80]!r} is no member of group {group!r} any more: join again")


def _superseded(group: str, member: str) -> Fenced:
    text = f"another consumer has joined group {group!r} as {member[:80]!r}, and has taken over"
    return Fenced(f"{text}: each consumer needs a name of its own", superseded=True)


def _unsettled() -> Refusal:
    """The answer when a decision has not reached every partition in time."""
    text = "not every partition has the group as it is now; it goes on by itself"
    return refuse(Timeout(text, outcome="unknown"))


def _stranger(group: str, member: str) -> Refusal:
    return refuse(_no_member(group, member))


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
