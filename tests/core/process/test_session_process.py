"""Sessions as a process: a play, and a seeded model with planted bugs."""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import partial
from typing import Any

import pytest

from tailrace.core.catalog.catalog import Catalog
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.model import group_facts as facts
from tailrace.core.model import internal_commands as inner
from tailrace.core.model.group_commands import Membership, Place
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.process import process as core
from tailrace.core.process import session_process as sessions
from tailrace.core.process.grant_process import PATIENCE_US, MemberAssignment
from tailrace.core.process.session_process import STALL_US, Session, SessionProcess
from tests.core.process.process_model import ProcessWorld, caught, require
from tests.core.process.process_plays import check_play, python
from tests.core.turns import at

HOME = TopicPartition("_groups", 0)
SECOND = 1_000_000
SIZES = [("t", 2)]
SEEDS = range(100)
BUG_SEEDS = range(100)


# --------------------------------------------------------------------------------------------------- play


class SessionActs:
    """`MEMBER joins`, `MEMBER is taken out`, `session_ms is N` and `the group is deleted` are decided, stored
    and heard of. `MEMBER shows herself on CONNECTION [as INCARNATION]`, `MEMBER joins on CONNECTION as
    INCARNATION` once that is durable, `connection N of MEMBER closes`, `MEMBER polls her version for N s as
    TAG` (or `an old version`), `MEMBER has PARTITIONS`, `others wait for PARTITION of MEMBER`, `MEMBER asks
    to leave`, `the broker closes`. `it is N s`; `a new life`."""

    def __init__(self) -> None:
        self.machine = Coordinator(TopicOptions())
        self.now_us = 0
        self._begin()

    def _begin(self) -> None:
        self.process = SessionProcess(HOME, self.machine.groups.by_name)

    def now(self) -> core.Now:
        return core.Now(Catalog(), now_us=self.now_us)

    def act(self, line: str) -> bool:
        if line == "a new life":
            self._begin()
        elif line.startswith("it is "):
            self.now_us = int(line.split()[2]) * SECOND
        else:
            return False
        return True

    def event(self, line: str) -> core.Event | None:
        for pattern, event in (
            (r"(\w+) joins", self._joins),
            (r"(\w+) is taken out", lambda member: self._decide(inner.Leave("g", member, "silent"))),
            (r"session_ms is (\d+)", self._alter),
            ("the group is deleted", lambda: self._decide(inner.DropGroup("g", force=True))),
            (r"(\w+) shows \w+ on (\d+)(?: as (\w+))?", self._shown),
            (r"(\w+) joins on (\d+) as (\w+)", partial(self._shown, joins=True)),
            (r"connection (\d+) of (\w+) closes", self._closes),
            (r"(\w+) polls (her|his|an old) version for (\d+) s as (\w+)", self._polls),
            (r"(\w+) has (.*)", self._has),
            (r"others wait for t/(\d) of (\w+)", self._others),
            (r"(\w+) asks to leave", lambda member: core.Asked(sessions.MemberLeaves("g", member))),
            ("the broker closes", lambda: core.Asked(sessions.BrokerCloses())),
        ):
            if found := re.fullmatch(pattern, line):
                made: core.Event = event(*found.groups())
                return made
        return None

    def _decide(self, command: Any) -> core.Event:
        decision = self.machine.decide(command, at(self.now_us))
        for fact in decision.facts:
            self.machine.apply(fact)
        return core.FactsStored([fact for fact in decision.facts if type(fact) in SessionProcess.WATCHES])

    def _joins(self, member: str) -> core.Event:
        policy = GroupPolicy(session_ms=10_000)
        return self._decide(inner.Join("g", member, SIZES, policy, topic_ids={"t": 1}))

    def _alter(self, session_ms: str) -> core.Event:
        options = {"session_ms": int(session_ms), "heartbeat_ms": 1_000, "reconnect_grace_ms": 1_000}
        return self._decide(inner.ChangeOptions("g", options))

    def _shown(
        self, member: str, connection: str, incarnation: str | None, joins: bool = False
    ) -> core.Event:
        return core.Asked(sessions.MemberShown("g", member, incarnation or "", int(connection), joins))

    def _closes(self, connection: str, member: str) -> core.Event:
        return core.Asked(sessions.ConnectionClosed("g", member, int(connection)))

    def _polls(self, member: str, which: str, seconds: str, tag: str) -> core.Event:
        session = self.process.session("g", member)
        version = session.version if session is not None and which != "an old" else 0
        return core.Asked(sessions.HeartbeatPoll("g", member, version, int(seconds) * 1000), tag)

    def _has(self, member: str, text: str) -> core.Event:
        owned = [("t", int(number), 1) for number in re.findall(r"t/(\d)", text)]
        return core.Asked(sessions.AssignmentsKnown("g", {member: MemberAssignment(owned, [], "active")}))

    def _others(self, number: str, member: str) -> core.Event:
        return core.Asked(sessions.OthersWait("g", member, [("t", int(number))]))

    def value(self, text: str) -> Any:
        return python(text)


def test_play() -> None:
    check_play("sessions", SessionActs)


# -------------------------------------------------------------------------------------------------- model

MEMBERS = ("ann", "bob")
ENOUGH_US = 100_000


class Known:
    """What the model knows of one session."""

    def __init__(self, policy: GroupPolicy, now_us: int) -> None:
        self.policy = policy
        self.seen_us = now_us
        self.closed_us: int | None = None
        self.connection = 0
        self.leaving = 0
        self.polls: dict[Hashable, int] = {}
        """Heartbeats that wait, and when each has to be answered."""

    @property
    def silent_us(self) -> int:
        return self.seen_us + self.policy.session_ms * 1000

    @property
    def grace_us(self) -> int | None:
        return None if self.closed_us is None else self.closed_us + self.policy.reconnect_grace_ms * 1000


class SessionWorld(ProcessWorld):
    """Two members of a group that show themselves, or not; time that passes, or jumps."""

    def __init__(self, seed: int, kind: type[SessionProcess] = SessionProcess) -> None:
        super().__init__(seed)
        self._kind = kind
        self.machine = Coordinator(TopicOptions())
        self._stored = 0
        self._timers: dict[Hashable, int] = {}
        self.known: dict[str, Known] = {}
        self._ended: list[Known] = []
        self._joining: list[tuple[int, str, str]] = []
        """Joins that are not durable yet: where each lies in the log."""
        self._number = 0
        self._versions: dict[tuple[str, int], Any] = {}
        """What each member was told under each version, in all lives."""
        self.log(HOME)

    # -- logs and machines

    def make(self) -> SessionProcess:
        self._stored = len(self.log(HOME).facts)
        self._timers.clear()
        self._joining.clear()
        self.wall_us += 1_000
        self.known = {}
        for group in self.machine.groups.by_name.values():
            for member in group.members:
                self.known[member] = Known(group.policy, self.wall_us)
        return self._kind(HOME, self.machine.groups.by_name)

    def crashed(self) -> None:
        self.machine = Coordinator(TopicOptions())
        for decided in self.log(HOME).facts:
            for fact in decided:  # type: ignore[attr-defined]
                self.machine.apply(fact)

    def decide(self, target: TopicPartition, command: Any, body: Any = b"") -> Any:
        if target != HOME:
            return Refusal("unavailable", "there are no partitions here")
        decision = self.machine.decide(command, at(self.wall_us))
        for fact in decision.facts:
            self.machine.apply(fact)
        if decision.facts:
            self.log(HOME).facts.append(tuple(decision.facts))
        return decision.reply

    def sync(self, log: Any) -> None:
        super().sync(log)
        if log is not self.log(HOME):
            return
        stored, self._stored = log.facts[self._stored :], len(log.facts)
        watched = [fact for decided in stored for fact in decided if type(fact) in SessionProcess.WATCHES]
        self._ended = [known for fact in watched for known in self._happened(fact)]
        if watched:
            self.tell(core.FactsStored(watched))
        for known in self._ended:
            require(not known.polls, "the heartbeat of a session that is over waits for ever")
        joined, self._joining = self._joining, []
        for _, member, incarnation in joined:
            if member in self.known:
                self._show(member, incarnation, joins=True)

    def _happened(self, fact: Any) -> list[Known]:
        """Carry over what was stored; returns the sessions that ended."""
        group = self.machine.groups.by_name.get("g")
        if isinstance(fact, facts.GroupDeleted):
            ended, self.known = list(self.known.values()), {}
            return ended
        if group is None:
            return []
        if isinstance(fact, facts.OptionsChanged):
            for known in self.known.values():
                known.policy = group.policy
        elif fact.member in group.members:
            self.known.setdefault(fact.member, Known(group.policy, self.wall_us))
        elif isinstance(fact, facts.MemberLeft) and fact.member in self.known:
            return [self.known.pop(fact.member)]
        return []

    # -- effects

    def _carry_out(self, effect: core.Effect) -> None:
        if isinstance(effect, core.After):
            self._timers[effect.tag] = self.wall_us + effect.delay_us
        elif isinstance(effect, core.Cancel):
            self._timers.pop(effect.tag, None)
        else:
            if isinstance(effect, core.Submit) and isinstance(effect.command, inner.Leave):
                self._look_at_leaving(effect.command)
            super()._carry_out(effect)

    def _look_at_leaving(self, leave: inner.Leave) -> None:
        known = self.known[leave.member]
        due_us = known.silent_us if leave.reason == "silent" else known.grace_us
        require(due_us is not None, f"{leave.member} is there")
        assert due_us is not None
        require(due_us <= self.wall_us, f"{leave.member} has time until {due_us}, and is taken out")
        require(self.wall_us < due_us + STALL_US, "it was the broker that stood still")
        require(not known.leaving, f"{leave.member} is taken out twice")
        known.leaving += 1
        if leave.reason == "silent":
            known.seen_us = self.wall_us  # Once more a session later, if that fails.
        else:
            known.closed_us = None

    def answered(self, tag: Hashable, reply: Any) -> None:
        member = str(tag).partition(" ")[0]
        open_polls = [known for known in (*self.known.values(), *self._ended) if tag in known.polls]
        require(len(open_polls) == 1, f"{tag} is answered twice")
        del open_polls[0].polls[tag]
        if isinstance(reply, Membership) and reply.state == "active":  # What it has is known.
            told = (reply.owned, reply.options)
            before = self._versions.setdefault((member, reply.version), told)
            require(before == told, f"{member} was told something else under version {reply.version}")

    def tell(self, event: core.Event) -> None:
        if isinstance(event, core.Answered) and event.tag.what == "leave":  # type: ignore[attr-defined]
            known = self.known.get(event.tag.member)  # type: ignore[attr-defined]
            if known is not None:
                known.leaving = 0
        assert self.process is not None
        now = core.Now(self.catalog, now_us=self.wall_us)
        for effect in self.process.step(event, now):
            self._carry_out(effect)

    # -- what happens

    def pass_time(self, us: int) -> None:
        """Time goes on, and the timers that are due fire."""
        self.wall_us += us
        for known in self.known.values():
            if self.wall_us >= known.silent_us + STALL_US:
                known.seen_us = self.wall_us
            if known.grace_us is not None and self.wall_us >= known.grace_us + STALL_US:
                known.closed_us = self.wall_us
        for tag in sorted((tag for tag, due in self._timers.items() if due <= self.wall_us), key=str):
            if self._timers.pop(tag, None) is not None:
                self.tell(core.Due(tag))
        for member, known in self.known.items():
            if self.wall_us >= known.silent_us and (known.leaving or us >= STALL_US):
                # It is being taken out for another reason, or the timer was set before its last sign of life.
                known.seen_us = self.wall_us
            if known.leaving and known.grace_us is not None and self.wall_us >= known.grace_us:
                known.closed_us = None  # If it is not taken out now, it will be for its silence.
            late = not known.leaving and self.wall_us >= min(
                known.silent_us, known.grace_us or known.silent_us
            )
            require(not late, f"{member} is gone since {known.silent_us} or {known.grace_us}")
            for tag, due_us in known.polls.items():
                require(self.wall_us < due_us, f"{tag} is not answered")

    def _show(self, member: str, incarnation: str, *, joins: bool = False) -> None:
        known = self.known[member]
        self._number += 1
        known.seen_us, known.closed_us, known.connection = self.wall_us, None, self._number
        shown = sessions.MemberShown("g", member, incarnation, self._number, joins)
        self.tell(core.Asked(shown))

    def _poll(self, member: str) -> None:
        known = self.known[member]
        self._number += 1
        assert isinstance(self.process, SessionProcess)
        session = self.process.session("g", member)
        version = session.version if session is not None else 0
        wait_ms = self.random.choice((0, 1_000, 4_000))
        tag, before = f"{member} {self._number}", list(known.polls)
        known.polls[tag] = self.wall_us + max(wait_ms * 1000, PATIENCE_US) + SECOND
        self.tell(core.Asked(sessions.HeartbeatPoll("g", member, version, wait_ms), tag))
        require(
            not any(tag in known.polls for tag in before), "a newer heartbeat ends the wait of an older one"
        )

    def happen(self) -> None:
        for _ in range(8):
            self._happen_once()

    def _happen_once(self) -> None:
        random, member = self.random, self.random.choice(MEMBERS)
        group = self.machine.groups.by_name.get("g")
        if random.random() < 0.3:
            self.pass_time(random.choice((2, 5, 9, 10, 15)) * SECOND // 10)
        elif random.random() < 0.03:
            self.pass_time(random.randint(2, 20) * SECOND)
        elif group is None or random.random() < 0.1:
            policy = GroupPolicy(session_ms=5_000, reconnect_grace_ms=1_000)
            self.decide(HOME, inner.Join("g", member, SIZES, policy, topic_ids={"t": 1}))
            self._joining.append((len(self.log(HOME).facts), member, random.choice("xy")))
        elif random.random() < 0.05:
            self._decide_something(member)
        elif member in self.known:
            self._do(member)

    def _decide_something(self, member: str) -> None:
        options = {"session_ms": self.random.choice((2_000, 5_000, 9_000)), "heartbeat_ms": 500}
        command: Any = self.random.choice(
            (
                inner.Leave("g", member),
                inner.DropGroup("g", force=True),
                *[inner.ChangeOptions("g", options)] * 3,
            )
        )
        self.decide(HOME, command)

    def _do(self, member: str) -> None:
        known, act = self.known[member], self.random.randrange(7)
        if act == 0:
            incarnation = self.random.choice("xy")
            assert isinstance(self.process, SessionProcess)
            if self.process.superseded("g", member, incarnation) is None:
                self._show(member, incarnation)
        elif act in (1, 2):
            self._poll(member)
        elif act == 3:
            if known.closed_us is None and not known.leaving and known.connection:
                known.closed_us = self.wall_us
                self.tell(core.Asked(sessions.ConnectionClosed("g", member, known.connection)))
                known.connection = 0
                require(not known.polls, "nobody reads this answer, and it waits")
                self.pass_time(0)
        elif act == 6:  # The end of an older one.
            self.tell(core.Asked(sessions.ConnectionClosed("g", member, known.connection - 1)))
        elif act == 4:
            owned = [("t", number, 1) for number in range(self.random.randrange(3))]
            new = MemberAssignment(owned, [], "active")
            assert isinstance(self.process, SessionProcess)
            session = self.process.session("g", member)
            differs = session is not None and session.assignment != new
            self.tell(core.Asked(sessions.AssignmentsKnown("g", {member: new})))
            require(not (differs and known.polls), "there is something new, and the heartbeat waits")
        else:
            places: list[Place] = [("t", 0)]
            self.tell(core.Asked(sessions.OthersWait("g", member, places)))
            require(not known.polls, "others wait, and the heartbeat waits as well")

    def run(self, steps: int = 200) -> None:
        super().run(steps)
        for _ in range(40):
            self.pass_time(SECOND // 2)
            while self._pending:
                self._do_one()
            self.sync(self.log(HOME))
        require(not self.known, "members that are silent stay")
        assert isinstance(self.process, SessionProcess)
        there = {member for group in self.machine.groups.by_name.values() for member in group.members}
        require(not there, f"{there} are members without a session")

    def check(self) -> None:
        assert isinstance(self.process, SessionProcess)
        mine = {member for member in MEMBERS if self.process.session("g", member) is not None}
        require(mine == set(self.known), f"{mine} have a session instead of {set(self.known)}")


def test_every_seed_holds() -> None:
    for seed in SEEDS:
        SessionWorld(seed).run()


class EndsWhileTheBrokerStoodStill(SessionProcess):
    def _due(self, tag: Any, now: core.Now) -> Any:
        session = self._sessions.get((tag.group, tag.member))
        if session is not None:
            session.due_us = now.now_us
            session.grace_us = None if session.grace_us is None else now.now_us
        return super()._due(tag, now)


class GraceGoesOnAfterTheReturn(SessionProcess):
    def _show(self, shown: Any, session: Session, now: core.Now) -> Any:
        grace_us = session.grace_us
        effects = list(super()._show(shown, session, now))
        session.grace_us = grace_us
        return [effect for effect in effects if not isinstance(effect, core.Cancel)]


class EndedTwice(SessionProcess):
    def _leave(self, group: str, member: str, session: Session, reason: str) -> Any:
        session.leaving = False
        return super()._leave(group, member, session, reason)


class OlderHeartbeatForgotten(SessionProcess):
    def _wait(self, poll: Any, session: Session, tag: Any, now: core.Now) -> Any:
        session.poll = None
        return super()._wait(poll, session, tag, now)


class LastHeartbeatForgotten(SessionProcess):
    def _end(self, group: str, member: str, answer: Refusal) -> Any:
        self._sessions[group, member].poll = None
        return super()._end(group, member, answer)


class HeartbeatWaitsForEver(SessionProcess):
    def _wait(self, poll: Any, session: Session, tag: Any, now: core.Now) -> Any:
        effects = super()._wait(poll, session, tag, now)
        return [effect for effect in effects if not isinstance(effect, core.After)]


class AnsweredTwice(SessionProcess):
    def _due(self, tag: Any, now: core.Now) -> Any:
        session = self._sessions.get((tag.group, tag.member))
        poll = None if session is None else session.poll
        effects = list(super()._due(tag, now))
        if session is not None and tag.what == "poll":
            session.poll = poll
        return effects


class DeadlineStays(SessionProcess):
    def _stored(self, fact: Any, now: core.Now) -> Any:
        effects = list(super()._stored(fact, now))
        if isinstance(fact, facts.OptionsChanged):
            return [effect for effect in effects if not isinstance(effect, core.After)]
        return effects


class SilentAtTheBeginning(SessionProcess):
    def step(self, event: core.Event, now: core.Now) -> Any:
        effects = super().step(event, now)
        return () if isinstance(event, core.Begun) else effects


class VersionStays(SessionProcess):
    def _next_version(self, now: core.Now) -> int:
        self._version = self._version or now.now_us
        return self._version


class OlderConnectionsCount(SessionProcess):
    def _asked(self, event: core.Asked, now: core.Now) -> Any:
        request = event.request
        if isinstance(request, sessions.ConnectionClosed):
            session = self._sessions.get(request[:2])
            if session is not None:
                session.connection = request.connection
        return super()._asked(event, now)


class TakenOutBeforeItIsDurable(SessionProcess):
    def _leave(self, group: str, member: str, session: Session, reason: str) -> Any:
        yield from super()._leave(group, member, session, reason)
        yield from self._end(group, member, Refusal("fenced", "gone"))


@pytest.mark.parametrize(
    "bug",
    [
        EndsWhileTheBrokerStoodStill,
        GraceGoesOnAfterTheReturn,
        EndedTwice,
        OlderHeartbeatForgotten,
        LastHeartbeatForgotten,
        HeartbeatWaitsForEver,
        AnsweredTwice,
        DeadlineStays,
        SilentAtTheBeginning,
        VersionStays,
        OlderConnectionsCount,
        TakenOutBeforeItIsDurable,
    ],
)
def test_planted_bug_is_caught(bug: type[SessionProcess]) -> None:
    assert caught(partial(SessionWorld, kind=bug), BUG_SEEDS) is not None
