"""Member sessions in the shell: the connections that members use, and the way to those who decide.

`core.process.session_process` decides when a session ends and when a heartbeat is answered. It runs on the
coordinator of the group, and knows connections by number. Here each number is a connection: its end is told
to the process, and what the process tells is passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tailrace.broker.groups.group_directory import GroupDirectory
from tailrace.core.model.group_commands import Heartbeat, Place
from tailrace.core.model.identifiers import Refusal
from tailrace.core.process import session_process as core
from tailrace.core.process.grant_process import MemberAssignment
from tailrace.ports import Gate, Respond


class Presence:
    """A member on the connection that it used last; hears of its end as a `Waiting`, and tells `ended`."""

    def __init__(self, gate: Gate, number: int, ended: Callable[[Presence], None]) -> None:
        self._fetches = gate.fetches
        self._fetches[self] = None
        self.number = number
        self.closed = False
        self.user: core.Key | None = None
        """The group and the member that use it, from joining to leaving."""
        self._ended = ended

    def on(self, gate: Gate) -> bool:
        """Whether this is the member's connection, and still open."""
        return self._fetches is gate.fetches and not self.closed

    def hang_up(self) -> None:
        """The member sends nothing more on this connection: it is gone or uses another one."""
        self.drop()

    def drop(self) -> None:
        """The connection is gone."""
        self._fetches.pop(self, None)
        self.closed = True
        self._ended(self)

    def leave(self) -> None:
        """The member uses another connection or has left."""
        self._fetches.pop(self, None)
        self.user = None


class MemberSessions:
    """The sessions of all groups of this node. `over` is called with a group of which a member has lost its
    session, `evicted` with a group and a member whose requests for messages are over."""

    def __init__(
        self, coordinators: GroupDirectory, over: Callable[[str], None], evicted: Callable[[str, str], None]
    ) -> None:
        self._coordinators = coordinators
        self._over = over
        self._evicted = evicted
        self._presences: dict[core.Key, Presence] = {}
        self._number = 0

    # -- questions

    def _process(self, group: str) -> core.SessionProcess | None:
        home = self._coordinators.home(group)
        return None if home is None else home.processes.of(core.SessionProcess)

    def get(self, group: str, member: str) -> core.Session | None:
        """The session of a member; None without one."""
        process = self._process(group)
        return None if process is None else process.session(group, member)

    def superseded(self, group: str, member: str, incarnation: str) -> Refusal | None:
        """The refusal of a consumer whose session another one has taken over; None if it may go on."""
        process = self._process(group)
        return None if process is None else process.superseded(group, member, incarnation)

    # -- to the process

    def _ask(self, group: str, request: Any, respond: Respond | None = None) -> None:
        home = self._coordinators.home(group)
        if home is not None:
            home.processes.ask(core.SessionProcess, request, respond)

    def arrival(self, gate: Gate) -> Presence:
        """Somebody wants to join on a connection, which may close before the decision."""
        self._number += 1
        return Presence(gate, self._number, self._ended)

    def joined(self, group: str, member: str, incarnation: str, presence: Presence) -> None:
        """A consumer has joined: it has the session."""
        self._ask(group, core.MemberShown(group, member, incarnation, presence.number, joins=True))
        self._use(group, member, presence)

    def show(self, group: str, member: str, incarnation: str, gate: Gate) -> None:
        """The consumer that has the session gives a sign of life."""
        presence = self._presences.get((group, member))
        new = presence is None or not presence.on(gate)
        if presence is None or new:
            presence = self.arrival(gate)
        self._ask(group, core.MemberShown(group, member, incarnation, presence.number))
        if new:
            self._use(group, member, presence)

    def _use(self, group: str, member: str, presence: Presence) -> None:
        """A member uses this connection, which may have closed since."""
        before = self._presences.get((group, member))
        if before is not None:
            before.leave()
        self._presences[group, member] = presence
        presence.user = (group, member)
        if presence.closed:
            self._ended(presence)

    def _ended(self, presence: Presence) -> None:
        if presence.user is not None:
            del self._presences[presence.user]
            self._ask(presence.user[0], core.ConnectionClosed(*presence.user, presence.number))

    def poll(self, heartbeat: Heartbeat, respond: Respond) -> None:
        """Answer a heartbeat when there is something new, or its time is over."""
        group = heartbeat.group
        poll = core.HeartbeatPoll(group, heartbeat.member, heartbeat.version, heartbeat.wait_ms)
        self._ask(group, poll, respond)

    def leaves(self, group: str, member: str) -> None:
        """A member asks to leave: give its leases back."""
        self._ask(group, core.MemberLeaves(group, member))

    def tell(self, group: str, assignments: Mapping[str, MemberAssignment]) -> None:
        """What the partitions have confirmed to the members of a group."""
        self._ask(group, core.AssignmentsKnown(group, assignments))

    def hungry(self, group: str, member: str, places: list[Place]) -> None:
        """Others wait on partitions of which a member holds messages."""
        self._ask(group, core.OthersWait(group, member, places))

    def close(self) -> None:
        """The broker closes: heartbeats that wait are answered."""
        for home in self._coordinators.runtimes():
            home.processes.ask(core.SessionProcess, core.BrokerCloses())

    # -- from the process

    def told(self, what: core.SessionOver | core.RequestsOver) -> None:
        """Something has ended for a member."""
        if isinstance(what, core.RequestsOver):
            self._evicted(what.group, what.member)
            return
        presence = self._presences.pop((what.group, what.member), None)
        if presence is not None:
            presence.leave()
        self._over(what.group)
