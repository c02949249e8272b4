"""Member sessions: signs of life of every group member, its assignment, and the heartbeat that waits.

A session begins when a member joins and ends in one of four ways:

    it leaves                                             at once
    its last connection closes                            after `reconnect_grace_ms`, unless it shows itself
                                                          on another connection before
    it is silent                                          after `session_ms`
    another consumer joins under its name                 at once: the newer consumer takes the session over

A closed connection says more than silence does, so it has a time of its own. Only the connection that the
member used last counts; the end of an older one means nothing.

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
for the member's messages (`hunger`); a heartbeat with an older version is answered at once.

Nothing of this is stored. After a start every member that the coordinators know gets a whole session to show
itself. Versions begin at the time of the start, so they never repeat one from before.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tailrace.broker.runtime.pump import Pump, Timer
from tailrace.broker.runtime.turn import NOTHING
from tailrace.core.model.commands import Reply
from tailrace.core.model.group_commands import Heartbeat, Membership, Place
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal
from tailrace.core.process.grant_process import PATIENCE_US, MemberAssignment
from tailrace.ports import Gate, Respond

WAIT_MS_MAX = 60_000
STALL_US = 2_000_000
"""Delay of a timer above which the broker itself stood still, and no member counts as silent."""

HUNGRY_US = 200_000
"""How long the news that others wait for messages stays true."""

Key = tuple[str, str]
"""Group and member."""


class MemberSession:
    """The session of one member."""

    __slots__ = (
        *(
            "grace",
            "hungry",
            "hungry_us",
            "incarnation",
            "policy",
            "poll",
            "poll_timer",
            "presence",
            "seen_us",
        ),
        *("standing", "timer", "version"),
    )

    def __init__(self, policy: GroupPolicy, version: int, now_us: int) -> None:
        self.policy = policy
        self.version = version
        self.standing: MemberAssignment | None = None
        self.seen_us = now_us
        self.incarnation = ""
        """Tells consumers that use the same member name apart; empty while not known."""
        self.hungry: list[Place] = []
        """Partitions on which others waited, at `hungry_us`, when there was no heartbeat to answer."""
        self.hungry_us = 0
        self.timer: Timer | None = None
        self.poll: Respond | None = None
        self.poll_timer: Timer | None = None
        self.presence: Presence | None = None
        self.grace: Timer | None = None
        """Runs while the connection that the member used last is closed."""


class Presence:
    """A member on the connection that it used last; hears of its end as a `Waiting`."""

    def __init__(self, gate: Gate) -> None:
        self._fetches = gate.fetches
        self._fetches[self] = None
        self.closed = False
        self.when_closed: Callable[[], None] = lambda: None

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
        self.when_closed()

    def leave(self) -> None:
        """The member uses another connection or has left."""
        self._fetches.pop(self, None)
        self.when_closed = lambda: None


class MemberSessions:
    """The sessions of all groups of this node. `gone` is called, with the reason, for a member that was
    silent for a whole session or did not come back after its connection closed."""

    def __init__(self, pump: Pump, gone: Callable[[str, str, str], None]) -> None:
        self._pump = pump
        self._gone = gone
        self._closing = False
        self._seats: dict[Key, MemberSession] = {}
        self._version = 0

    def get(self, group: str, member: str) -> MemberSession | None:
        """The session of a member; None without one."""
        return self._seats.get((group, member))

    def take(self, group: str, member: str, policy: GroupPolicy) -> MemberSession:
        """The session of a member, begun if needed; counts as a sign of life."""
        now_us = self._pump.clock.now_us()
        seat = self._seats.get((group, member))
        if seat is None:
            seat = self._seats[group, member] = MemberSession(policy, self._next_version(), now_us)
            self._watch(group, member, seat)
        seat.seen_us = now_us
        return seat

    def taken(self, group: str, member: str, incarnation: str) -> bool:
        """Whether another consumer has joined under this member name."""
        seat = self._seats.get((group, member))
        return seat is not None and bool(incarnation and seat.incarnation) and seat.incarnation != incarnation

    def hand_over(self, seat: MemberSession, incarnation: str, answer: Refusal) -> None:
        """Give the session to the consumer that joined last; the heartbeat of the one before is refused."""
        self._answer(seat, answer)
        seat.incarnation = incarnation

    def _next_version(self) -> int:
        self._version = max(self._version + 1, self._pump.clock.now_us())
        return self._version

    def _watch(self, group: str, member: str, seat: MemberSession) -> None:
        """Set the timer that looks whether the member was silent for a session."""

        due_us = seat.seen_us + seat.policy.session_ms * 1000

        def look(now_us: int) -> None:
            silent = now_us >= seat.seen_us + seat.policy.session_ms * 1000
            if silent:
                # If taking the member out fails (a full disk), it is tried again a session later.
                seat.seen_us = now_us
            self._watch(group, member, seat)
            if silent and now_us - due_us < STALL_US:
                self._gone(group, member, "silent")

        seat.timer = self._pump.at(due_us, look)

    def present(self, group: str, member: str, seat: MemberSession, presence: Presence) -> None:
        """A member has shown itself on a connection, which may have closed since."""
        if seat.grace is not None:
            seat.grace.cancel()
            seat.grace = None
        if seat.presence is not None:
            seat.presence.leave()

        def closed() -> None:
            seat.presence = None
            self._answer(seat, self.membership(seat))  # Nobody reads it; it would keep the closed connection.
            self._wait_for(group, member, seat)

        seat.presence, presence.when_closed = presence, closed
        if presence.closed:
            closed()

    def _wait_for(self, group: str, member: str, seat: MemberSession) -> None:
        """The connection of a member is closed: give it a short time to come back."""
        if self._closing or self._seats.get((group, member)) is not seat:
            return
        due_us = self._pump.clock.now_us() + seat.policy.reconnect_grace_ms * 1000

        def over(now_us: int) -> None:
            seat.grace = None
            if now_us - due_us >= STALL_US:
                self._wait_for(group, member, seat)  # It may have come back while the broker stood still.
            else:
                # If taking the member out fails (a full disk), its session runs out later.
                self._gone(group, member, "disconnected")

        seat.grace = self._pump.at(due_us, over)

    def leave(self, group: str, member: str, answer: Refusal) -> None:
        """End a session; `answer` goes to the heartbeat that waits."""
        seat = self._seats.pop((group, member), None)
        if seat is not None:
            self._unwatch(seat)
            self._answer(seat, answer)

    @staticmethod
    def _unwatch(seat: MemberSession) -> None:
        for timer in (seat.timer, seat.grace):
            if timer is not None:
                timer.cancel()
        seat.timer = seat.grace = None
        if seat.presence is not None:
            seat.presence.leave()
            seat.presence = None

    def members(self, group: str) -> list[str]:
        """The members of a group that have a session."""
        return [member for name, member in self._seats if name == group]

    def tell(self, group: str, member: str, standing: MemberAssignment, policy: GroupPolicy) -> None:
        """Take an assignment and the options of the group; if they have changed, answer the member's
        heartbeat."""
        seat = self._seats.get((group, member))
        if seat is None or (seat.standing == standing and seat.policy == policy):
            return
        if seat.policy != policy:
            seat.policy = policy
            if seat.timer is not None:
                seat.timer.cancel()
            self._watch(group, member, seat)
        if seat.standing is not None:
            seat.version = self._next_version()
        seat.standing = standing
        self._answer(seat, self.membership(seat))

    def hungry(self, group: str, member: str, places: list[Place]) -> None:
        """Others wait on partitions of which a member holds messages: answer its heartbeat, or keep the news
        for the next one."""
        seat = self._seats.get((group, member))
        if seat is None:
            return
        if seat.poll is not None:
            self._answer(seat, msgspec.structs.replace(self.membership(seat), hungry=places))
        else:
            seat.hungry, seat.hungry_us = places, self._pump.clock.now_us()

    @staticmethod
    def membership(seat: MemberSession) -> Membership:
        """The answer to a heartbeat."""
        owned, revoking, state = seat.standing or MemberAssignment([], [], "standby")
        options = {field: getattr(seat.policy, field) for field in GroupPolicy.__struct_fields__}
        return Membership(seat.version, owned, revoking, state, options)

    def poll(self, seat: MemberSession, heartbeat: Heartbeat, respond: Respond) -> None:
        """Answer a heartbeat when there is something new or its time is over. An older heartbeat that still
        waits is answered now.

        The wait is half a session at most, so that a member whose connection is gone does not seem alive.
        After a start it also waits until the partitions have reported: a member that is told that it has
        nothing gives up what it has."""
        self._answer(seat, self.membership(seat))
        wait_ms = min(heartbeat.wait_ms, WAIT_MS_MAX, seat.policy.session_ms // 2)
        places, seat.hungry = seat.hungry, []
        if places and seat.hungry_us + HUNGRY_US > self._pump.clock.now_us():
            respond(msgspec.structs.replace(self.membership(seat), hungry=places), NOTHING)
            return
        if seat.standing is None:
            wait_ms = max(wait_ms, PATIENCE_US // 1000)
        elif heartbeat.version != seat.version or wait_ms <= 0:
            respond(self.membership(seat), NOTHING)
            return
        seat.poll = respond

        def over(now_us: int) -> None:
            self._answer(seat, self.membership(seat))

        seat.poll_timer = self._pump.at(self._pump.clock.now_us() + wait_ms * 1000, over)

    def _answer(self, seat: MemberSession, reply: Reply) -> None:
        respond, seat.poll = seat.poll, None
        if seat.poll_timer is not None:
            seat.poll_timer.cancel()
            seat.poll_timer = None
        if respond is not None:
            respond(reply, NOTHING)

    def close(self) -> None:
        """The broker closes: answer all waiting heartbeats. Connections that close from now on end no
        session."""
        self._closing = True
        for seat in self._seats.values():
            if seat.grace is not None:
                seat.grace.cancel()
                seat.grace = None
            self._answer(seat, self.membership(seat))
