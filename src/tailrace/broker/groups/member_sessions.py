"""The members of groups as the broker sees them: signs of life, what each was told, and the polls that wait.

A member that is silent is gone after `session_ms`. One whose connection was closed has said more than silence
does: it is gone after `reconnect_grace_ms`, unless it shows itself on another connection before. So a session
ends with the connection that the member used last; the end of an older one means nothing.

Nothing of this is stored. After a start every member that the coordinators know gets a whole session to show
itself; versions begin at the time of the start, so that they never repeat one of an earlier life.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tailrace.broker.runtime.partition_runtime import NOTHING
from tailrace.broker.runtime.pump import Pump, Timer
from tailrace.core.model.commands import Reply
from tailrace.core.model.group_commands import Heartbeat, Membership, Place
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal
from tailrace.ports import Gate, Respond

WAIT_MS_MAX = 60_000
STALL_US = 2_000_000
"""When the broker itself comes so late to look after a member, it was the broker that stood still: nobody can
be blamed for silence, and everybody gets another session."""

HUNGRY_US = 200_000
"""So long it holds that others wait for messages; then it is said again."""

Key = tuple[str, str]
"""Group and member."""


class MemberAssignment(NamedTuple):
    """What a member has: the part of `Membership` whose changes it is told of."""

    owned: list[tuple[str, int, int]]
    revoking: list[Place]
    state: str


class MemberSession:
    """One member."""

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
        """Which of those who use its name it is; empty while that is not known."""
        self.hungry: list[Place] = []
        """Where others waited for what it has, at `hungry_us`, when it had no poll to be told by."""
        self.hungry_us = 0
        self.timer: Timer | None = None
        self.poll: Respond | None = None
        self.poll_timer: Timer | None = None
        self.presence: Presence | None = None
        self.grace: Timer | None = None
        """Runs while the connection that it used last is closed."""


class Presence:
    """A member on the connection that it used last; see `delivery.Waiting`."""

    def __init__(self, gate: Gate) -> None:
        self._fetches = gate.fetches
        self._fetches[self] = None
        self.closed = False
        self.when_closed: Callable[[], None] = lambda: None

    def on(self, gate: Gate) -> bool:
        """Whether it is about this connection, which is still open."""
        return self._fetches is gate.fetches and not self.closed

    def hang_up(self) -> None:
        """The member sends nothing more on it, so it is gone or on another one."""
        self.drop()

    def drop(self) -> None:
        """The connection is gone."""
        self._fetches.pop(self, None)
        self.closed = True
        self.when_closed()

    def leave(self) -> None:
        """The member uses another one, or is none any more."""
        self._fetches.pop(self, None)
        self.when_closed = lambda: None


class MemberSessions:
    """All members of all groups of this node. `gone` is called, with the reason, for one that was not heard
    of for a whole session or did not come back after its connection was closed."""

    def __init__(self, pump: Pump, gone: Callable[[str, str, str], None]) -> None:
        self._pump = pump
        self._gone = gone
        self._closing = False
        self._seats: dict[Key, MemberSession] = {}
        self._version = 0

    def get(self, group: str, member: str) -> MemberSession | None:
        """A member, when it is known."""
        return self._seats.get((group, member))

    def take(self, group: str, member: str, policy: GroupPolicy) -> MemberSession:
        """Somebody is a member, from now on or still."""
        now_us = self._pump.clock.now_us()
        seat = self._seats.get((group, member))
        if seat is None:
            seat = self._seats[group, member] = MemberSession(policy, self._next_version(), now_us)
            self._watch(group, member, seat)
        seat.seen_us = now_us
        return seat

    def taken(self, group: str, member: str, incarnation: str) -> bool:
        """Whether somebody else has joined under the name of whoever asks."""
        seat = self._seats.get((group, member))
        return seat is not None and bool(incarnation and seat.incarnation) and seat.incarnation != incarnation

    def hand_over(self, seat: MemberSession, incarnation: str, answer: Refusal) -> None:
        """The seat belongs to whoever joined last; the one before is told so."""
        self._answer(seat, answer)
        seat.incarnation = incarnation

    def _next_version(self) -> int:
        self._version = max(self._version + 1, self._pump.clock.now_us())
        return self._version

    def _watch(self, group: str, member: str, seat: MemberSession) -> None:
        """Look at it again when it has been silent for a session; signs of life do not touch the timer."""

        due_us = seat.seen_us + seat.policy.session_ms * 1000

        def look(now_us: int) -> None:
            silent = now_us >= seat.seen_us + seat.policy.session_ms * 1000
            if silent:
                # Should taking it out fail (a full disk), it is tried again a session later.
                seat.seen_us = now_us
            self._watch(group, member, seat)
            if silent and now_us - due_us < STALL_US:
                self._gone(group, member, "silent")

        seat.timer = self._pump.at(due_us, look)

    def present(self, group: str, member: str, seat: MemberSession, presence: Presence) -> None:
        """A member has shown itself on a connection, which may be closed since then."""
        if seat.grace is not None:
            seat.grace.cancel()
            seat.grace = None
        if seat.presence is not None:
            seat.presence.leave()

        def closed() -> None:
            seat.presence = None
            self._answer(seat, self.membership(seat))  # Into the void; it holds the connection open.
            self._wait_for(group, member, seat)

        seat.presence, presence.when_closed = presence, closed
        if presence.closed:
            closed()

    def _wait_for(self, group: str, member: str, seat: MemberSession) -> None:
        """Its connection is closed: it has a short time to come back."""
        if self._closing or self._seats.get((group, member)) is not seat:
            return
        due_us = self._pump.clock.now_us() + seat.policy.reconnect_grace_ms * 1000

        def over(now_us: int) -> None:
            seat.grace = None
            if now_us - due_us >= STALL_US:
                self._wait_for(group, member, seat)  # It may have come back while the broker stood still.
            else:
                # Should taking it out fail (a full disk), its session runs out later.
                self._gone(group, member, "disconnected")

        seat.grace = self._pump.at(due_us, over)

    def leave(self, group: str, member: str, answer: Refusal) -> None:
        """Somebody is no member any more; a poll that waits is told so."""
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
        """Those who have a seat in a group."""
        return [member for name, member in self._seats if name == group]

    def tell(self, group: str, member: str, standing: MemberAssignment, policy: GroupPolicy) -> None:
        """What a member has, or the options of its group, may have changed: then it is told at once."""
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
        """Others wait for messages of partitions of which a member holds some: it is told at once."""
        seat = self._seats.get((group, member))
        if seat is None:
            return
        if seat.poll is not None:
            self._answer(seat, msgspec.structs.replace(self.membership(seat), hungry=places))
        else:
            seat.hungry, seat.hungry_us = places, self._pump.clock.now_us()

    @staticmethod
    def membership(seat: MemberSession) -> Membership:
        """What a member is told."""
        owned, revoking, state = seat.standing or MemberAssignment([], [], "standby")
        options = {field: getattr(seat.policy, field) for field in GroupPolicy.__struct_fields__}
        return Membership(seat.version, owned, revoking, state, options)

    def poll(self, seat: MemberSession, heartbeat: Heartbeat, respond: Respond) -> None:
        """Answer when there is something new, or when the time is over. A poll that still waits is answered:
        its sender has sent another.

        It is answered within half a session: a member whose connection is gone must not seem alive."""
        self._answer(seat, self.membership(seat))
        wait_ms = min(heartbeat.wait_ms, WAIT_MS_MAX, seat.policy.session_ms // 2)
        places, seat.hungry = seat.hungry, []
        if places and seat.hungry_us + HUNGRY_US > self._pump.clock.now_us():
            respond(msgspec.structs.replace(self.membership(seat), hungry=places), NOTHING)
            return
        if heartbeat.version != seat.version or wait_ms <= 0:
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
        """Answer all that waits. Connections that are closed from now on are closed by the broker, and their
        members have done nothing wrong."""
        self._closing = True
        for seat in self._seats.values():
            if seat.grace is not None:
                seat.grace.cancel()
                seat.grace = None
            self._answer(seat, self.membership(seat))
