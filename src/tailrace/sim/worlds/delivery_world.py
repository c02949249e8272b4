"""A world of groups, members, senders and a broker in virtual time, with a network and storage that break.

What has to hold: every message that was acknowledged is delivered to every group until it is acked, dead or
expired; what was acked durably does not come again; what was told does not go back; nobody has what another
one holds; keys keep their order; nothing comes before its time, nothing cancelled comes at all; every dead
letter is there once and for a reason. When the trouble ends, everything is delivered and settled. See
`delivery_history` for the accounts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from tailrace.core.model import group_commands as groups
from tailrace.core.model.commands import CreateTopic, Reply, Request, TopicInfo, TrimTopic
from tailrace.core.model.identifiers import Refusal
from tailrace.format.frame import Buffer
from tailrace.sim.actors.sim_auditors import SimAuditor
from tailrace.sim.actors.sim_members import SimMember
from tailrace.sim.actors.sim_publishers import SimPublisher
from tailrace.sim.actors.sim_trimmers import SimTrimmer
from tailrace.sim.actors.sim_vandals import SimVandal
from tailrace.sim.actors.sim_writers import SimWriter
from tailrace.sim.delivery_history import History, HistoryReset, Position, Rules, SentMessage, require
from tailrace.sim.log_contents import reasons_of, rows_in
from tailrace.sim.network import SimulatedLink
from tailrace.sim.virtual_time import SECOND_US
from tailrace.sim.worlds.broker_world import BrokerWorld

TOPIC = "work"
TICK = b"tick"
LEAP_DAYS = "0 0 29 2 *"
"""Ticks that no run lives to see; until then a broker has other things to do."""
MINUTE_US = 60 * SECOND_US
DRAIN_S = 240
REPLAYED_US_MAX = 30_000
"""What a start may have to replay, however often the broker was killed before: see `REPLAY_BOUNDS`, plus what
was written between the last snapshots and a crash."""
SHAKEN_US = 2 * SECOND_US
"""How long after a failure of storage the state may be built anew."""

DELIVERIES = {2: 3, 3: 20, 5: 0}
"""`max_deliveries` by `max_attempts`; 0: no limit."""
KILLERS = 13
"""One of so many messages kills the member that handles it."""

STATES = frozenset(
    (
        "acked twice",
        "broker closed and opened",
        "broker killed",
        "cancelled",
        "clock put back over a restart",
        "clock put back while the broker runs",
        "clock put forward over a restart",
        "clock put forward while the broker runs",
        "cold read",
        "connection closed",
        "dead letters",
        "damage found",
        "damaged",
        "delayed",
        "delivered again",
        "delivered too often",
        "died while the broker was away",
        "duplicate",
        "extended",
        "forgotten",
        "leased with what was lost",
        "killed by a message",
        "left",
        "loss accepted",
        "loss counted",
        "partition revoked",
        "place of a group refused",
        "paused past a lease",
        "power lost",
        "receipt lost",
        "reset",
        "revoked by force",
        "settled too late",
        "staged messages delayed",
        "staged version decided",
        "staged version given up",
        "sync failed",
        "tick",
        "trimmed",
        "too late to cancel",
        "topic divided",
        "topic shared",
        "trim lost with the power",
        "vanished",
        "waited for a tick that is far away",
        "write to a quarantined partition refused",
    )
)
"""What 200 seeds and more have to reach."""


_CROWDED: dict[str, Any] = {
    "mode": "queue",
    "assignment": "auto",
    "ordering": "key",
    "lease_ms": 3_000,
    "backoff_ms": 100,
    "backoff_max_ms": 1_000,
    "expired_to_dlq": False,
    "session_ms": 6_000,
    "heartbeat_ms": 1_000,
    "revoke_timeout_ms": 300,
}
"""Options of groups whose members come and go around the number of partitions."""


class DeliveryWorld(BrokerWorld):
    """One seed."""

    topic = TOPIC
    trims = 0.3
    """In so many of the troubled seeds an operator keeps a topic of its own short."""
    damages = 0.2
    """In so many of the seeds messages become unreadable."""

    def __init__(self, seed: int, *, crowding: bool = False) -> None:
        super().__init__(seed)
        random = self.random
        self.history = History()
        self.partitions = random.choice((1, 2, 3))
        self._failed = 0
        self._skew_before_us = 0
        self._ticks_from_us = self._ticks_until_us = 0
        to_the_minute_us = -self.clock.now_us() % MINUTE_US
        self.clock.set_us(self.clock.now_us() + to_the_minute_us - random.randrange(5, 15) * SECOND_US)
        self._crowding = random.random() < 0.1 or crowding
        calm = self._crowding or random.random() < 0.15
        self._trouble_us = 0 if calm else int(SECOND_US / random.choice((0.3, 1, 2)))
        self._full = 0 if calm else random.choice((0, 0, 0.02))
        self._sync_fails = 0 if calm else random.choice((0, 0, 0.01, 0.03))
        self.obedience = random.choice((0.3, 0.7, 0.95))
        self.careless = 0.5 if self._crowding else 0 if calm else random.choice((0, 0.3))
        self.options = {f"group-{number}": self._some_options() for number in range(random.choice((1, 2, 3)))}
        for name, options in self.options.items():
            self.history.rules[name] = _rules(options)
        self._fates = Random(f"the deaths of {seed}")
        """Chance of its own, so that the rest of a seed is the same without it."""
        trims = Random(f"the trims of {seed}")
        self.trimmer = SimTrimmer(self, trims) if self._trouble_us and trims.random() < self.trims else None
        damages = Random(f"the damage of {seed}")
        self.vandal = SimVandal(self, damages) if damages.random() < self.damages else None
        self._start()
        self._set_up()
        self.publishers = [SimPublisher(self) for _ in range(2)]
        self.writer = SimWriter(self, "writer")
        self.auditor = SimAuditor(self)
        self.members: list[SimMember] = []
        self._operator = SimulatedLink(self)
        self._member_count = 0

    def _some_options(self) -> dict[str, Any]:
        random = self.random
        mode = random.choice(("queue", "queue", "queue", "exclusive"))
        if self._crowding:
            attempts = random.choice((3, 5))
            return {**_CROWDED, "max_attempts": attempts, "max_deliveries": DELIVERIES[attempts]}
        return {
            "mode": mode,
            "assignment": random.choice(("partitions", "shared", "auto", "auto"))
            if mode == "queue"
            else "auto",
            "ordering": random.choice(("none", "key", "key", "partition")),
            "lease_ms": 3_000,
            "max_attempts": (attempts := random.choice((2, 3, 5))),
            "max_deliveries": DELIVERIES[attempts],
            "backoff_ms": random.choice((100, 1_000)),
            "backoff_max_ms": random.choice((1_000, 60_000)),
            "in_flight_max": random.choice((5, 10_000)),
            "priority_mode": random.choice(("weighted", "strict")),
            "starvation_ms": random.choice((1_000, 30_000)),
            "expired_to_dlq": random.choice((True, False)),
            "session_ms": 6_000,
            "reconnect_grace_ms": random.choice((500, 3_000)),
            "heartbeat_ms": 1_000,
            "revoke_timeout_ms": 3_000,
        }

    def kills(self, value: bytes) -> bool:
        """Whether a message is the end of its member, as long as there is trouble."""
        troubled = bool(self._trouble_us) and not self.healed
        return troubled and value.isdigit() and int(value) % KILLERS == 0

    def killed(self, group: str) -> None:
        """A message has killed its member: another one is started."""
        self.seen["killed by a message"] += 1
        if sum(member.alive for member in self.members) < 8:
            self.later(100_000, lambda: None if self.healed else self._new_member(group))

    def known_as(self, value: bytes, partition: int, offset: int) -> bytes:
        """The name of a message here: its value, unless a schedule made it, which gives all the same one."""
        if value != TICK:
            return value
        name = b"%s of %d/%d" % (TICK, partition, offset)
        known = SentMessage(name, partition, b"", 0, outcome="ok")
        return self.history.messages.setdefault(name, known).value

    def run_for(self, seconds: float) -> None:
        """Let time pass; failures of storage are written down."""
        until_us = self.clock.now_us() + int(seconds * SECOND_US)
        while self._events and self._events[0][0] <= until_us:
            self._step()
            if self.seen["append failed"] != self._failed:
                self._failed = self.seen["append failed"]
                now_us = self.clock.now_us()
                self.history.crashes.append((now_us, now_us + SHAKEN_US))
        self.clock.set_us(until_us)

    # ------------------------------------------------------------------------------------------ the broker

    def put_clock(self, skew_s: int | None = None) -> None:
        """See `VirtualTime.put_clock`; it is written down."""
        super().put_clock(skew_s)
        self.history.skews.append((self.clock.now_us(), self.skew_us))

    def _strobe(self) -> None:
        """The clock is put right or wrong while the broker runs."""
        if not self.healed and self.life is not None:
            self.put_clock()
        self.later(3 * SECOND_US, self._strobe)

    def true_us(self, partition: int, time_us: int) -> int:
        """When it is (or was, not long ago) a time by the clock of a partition of the broker that runs."""
        assert self.life is not None
        clock, now_us = self.life.engine.topics.get(TOPIC).runtimes[partition].clock, self.life.clock.now_us()
        steady_us = time_us - clock.time_us(now_us) + now_us
        if time_us > clock.opened_us:
            steady_us = clock.steady_us(time_us)
        return steady_us - self.life.clock.skew_us

    def _start(self) -> None:
        super()._start()
        assert self.life is not None
        if not self._full and not self._sync_fails:  # Where snapshots fail, replays grow until one succeeds.
            replayed_us = self.life.replayed_us
            require(replayed_us <= REPLAYED_US_MAX, f"a start replayed for {replayed_us:.0f} us")
        ahead_us = self.life.clock.skew_us - self._skew_before_us
        if ahead_us > 0:
            self.history.leaps.append((self.clock.now_us(), ahead_us))
        self._skew_before_us = self.life.clock.skew_us
        faults = self.life.engine.faults()
        require(not faults, f"opened as damaged: {faults}")
        if self.trimmer is not None:
            self.trimmer.check(self.life.engine)

    def told(self, request: Request, reply: Reply) -> None:
        """See `Surroundings.told`."""
        if isinstance(reply, Refusal) and reply.code == "error":
            raise AssertionError(f"{request}: {reply.message}")
        if isinstance(reply, Refusal) and reply.code == "corrupt" and self.vandal is None:
            require(False, f"nothing is damaged, and {request} was told: {reply}")

    def hung_up(self) -> None:
        """See `Surroundings.hung_up`: what was leased for an answer that nobody takes any more goes back,
        uncounted, and later messages of its keys with it."""
        self.history.hang_ups.append(self.clock.now_us())

    def _stop(self, power_loss: bool, away_us: int | None = None) -> None:
        if self.life is not None:
            now_us = self.clock.now_us()
            self.history.crashes.append((now_us, now_us))
            self.seen["power lost"] += power_loss
        super()._stop(power_loss, away_us)

    def lose_power(self) -> None:
        """Power fails now, unless the trouble is over."""
        if not self.healed:
            self._stop(True)

    def _lines(self) -> list[SimulatedLink]:
        clients: list[Any] = [*self.publishers, self.writer, self.auditor, *self.members]
        clients += [client for client in (self.trimmer, self.vandal) if client is not None]
        return [client.line for client in clients] + [self._operator]

    def _ask(self, request: Request) -> Reply:
        """Ask over no network, and wait; for the set-up and the accounts."""
        assert self.life is not None
        replies: list[Reply] = []
        self.life.engine.gateway.submit(request, b"", lambda reply, parts: replies.append(reply))
        for _ in range(100):
            if replies:
                return replies[0]
            self.run_for(0.1)
        raise AssertionError(f"no answer to {request}")

    def _topic_options(self) -> dict[str, Any]:
        return {"partitions": self.partitions, "ring_buffer_bytes": self.random.choice((700, 100_000))}

    def _set_up(self) -> None:
        """The topic, and groups that are enlisted before anybody comes."""
        assert self.life is not None
        self.life.threads.full = self.life.threads.sync_fails = 0
        options = self._topic_options()
        if self.clock_jumps:  # Longer than a clock leaps: until then what is sent again is recognised.
            options["dedup_window_ms"] = 86_400_000
        reply = self._ask(CreateTopic(TOPIC, options))
        assert isinstance(reply, TopicInfo), reply
        for name, chosen in self.options.items():
            made = self._ask(groups.CreateGroup(name, [TOPIC], chosen))
            assert isinstance(made, groups.GroupInfo), made
        if self.chance(0.3) and not self.clock_jumps:
            done = self._ask(groups.PutSchedule("clock", TOPIC, "* * * * *", value=TICK))
            assert not isinstance(done, Refusal), done
            self._ticks_from_us = self.clock.now_us()
        if self._fates.random() < 0.3:
            done = self._ask(groups.PutSchedule("leap-days", TOPIC, LEAP_DAYS, value=TICK))
            assert not isinstance(done, Refusal), done
            self.seen["waited for a tick that is far away"] += 1
        if self.trimmer is not None:
            self.trimmer.made(self._ask(self.trimmer.request()))
        self.run_for(1)
        self._fail_in(self.life)

    # ---------------------------------------------------------------------------------------- what happens

    def run(self) -> Counter[str]:
        """Trouble, then none, then the accounts; raises `Violation`."""
        for name in self.options:
            for _ in range(self.random.choice((1, 2, 3))):
                self._new_member(name)
        self._work()
        if self._crowding:
            self._crowd()
        self._look_at_sharing(frozenset())
        self.auditor.look()
        if self.trimmer is not None:
            self.trimmer.publish()
        if self.vandal is not None:
            self.vandal.begin()
        if self._trouble_us:
            self.later(self._trouble_us, self._trouble)
            self.later(3 * SECOND_US, self._strobe)
            if self._fates.random() < 0.3:
                self.later(self._fates.randrange(2, 8) * SECOND_US, self._die_alone)
        self.later(self.random.randrange(1, 8) * SECOND_US, self._reset)
        if self.chance(0.25):
            self.later(2 * SECOND_US, self._trim)
        self.run_for(30 if self._crowding else self.random.choice((5, 10, 15)))
        self._heal()
        self._drain()
        self._account()
        return +self.seen

    def _new_member(self, group: str) -> None:
        self._member_count += 1
        self.members.append(SimMember(self, group, f"member-{self._member_count}"))

    def _work(self) -> None:
        if not self.healed:
            self.random.choice((self.publishers[0].send, self.publishers[1].send, self.writer.write))()
            self.later(self.random.choice((0, 20_000, 100_000, 600_000)), self._work)

    def _trouble(self) -> None:
        if self.healed:
            return
        self.later(int(self._trouble_us * self.random.random() * 2), self._trouble)
        kinds = ("drop", "drop", "kill", "power", "close", "join", "leave", "vanish", "pause")
        kind = self.random.choice(kinds)
        alive = [member for member in self.members if member.alive]
        if kind == "drop":
            line = self.random.choice(self._lines())
            line.drop(False)
        elif kind in ("kill", "power"):
            self._stop(kind == "power")
        elif kind == "close":
            self._close_gracefully()
        elif kind == "join" and len(alive) < 8:
            group = self.random.choice(list(self.options))
            for _ in range(self.random.choice((1, 1, 3))):
                self._new_member(group)
        elif alive:
            member = self.random.choice(alive)
            acts: dict[str, Callable[[], None]] = {
                "leave": member.leave, "vanish": member.vanish, "pause": member.pause
            }  # fmt: skip
            acts.get(kind, member.pause)()

    def _die_alone(self) -> None:
        """Members die while the broker is away, which is killed again soon after it has come back."""
        if self.healed or self.life is None:
            return
        self._stop(False)
        for member in self.members:
            if member.alive and self._fates.random() < 0.6:
                self.seen["died while the broker was away"] += 1
                member.vanish()
        again_us = self._fates.randrange(SECOND_US, 4 * SECOND_US)
        self.later(again_us, lambda: None if self.healed else self._stop(False))

    def _crowd(self) -> None:
        """Members come until there are more than partitions, and go until there are few for a while; nothing
        else goes wrong."""
        for group in self.options:
            for _ in range(self.partitions + 1):
                delay_us = self.random.randrange(2 * SECOND_US, 5 * SECOND_US)
                self.later(delay_us, partial(self._new_member, group))
            self.later(self.random.randrange(6 * SECOND_US, 9 * SECOND_US), partial(self._thin_out, group))

    def _thin_out(self, group: str) -> None:
        there = [member for member in self.members if member.alive and member.group == group]
        for member in there[self.partitions :]:
            member.leave()

    def _look_at_sharing(self, before: frozenset[str]) -> None:
        """Note which groups with `assignment = "auto"` share the topic."""
        life, now = self.life, before
        if life is not None:
            groups = [name for name, rules in self.history.rules.items() if rules.assignment == "auto"]
            found = [life.engine.coordination.find(name) for name in groups]
            if all(found):
                now = frozenset(group.name for group in found if group is not None and group.shared)
                self.seen["topic shared"] += len(now - before)
                self.seen["topic divided"] += len(before - now)
        self.later(SECOND_US // 4, lambda: self._look_at_sharing(now))

    def _reset(self) -> None:
        """An operator moves a group, back or on."""
        if self.healed or not self._trouble_us:
            return
        group = self.random.choice(list(self.options))
        offset = self.random.choice((0, 0, 3))
        targets = dict.fromkeys(range(self.partitions), offset)
        reset = HistoryReset(group, self.clock.now_us(), targets)
        self.history.resets.append(reset)

        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            if isinstance(reply, Refusal):
                reset.result = "none" if reply.outcome == "none" else "unknown"
                return
            assert isinstance(reply, groups.ResetPlan)
            self.seen["reset"] += 1
            reset.result, reset.replied_us = "ok", self.clock.now_us()
            reset.targets = {partition: after for partition, _, after in reply.changes}

        request = groups.ResetGroup(group, TOPIC, offsets=list(targets.items()), force=True)
        self._operator.submit(request, b"", answered)

    def _trim(self) -> None:
        """An operator drops what is old. From now on it may be gone, whatever the answer is."""
        if self.healed or self.life is None or self.life.engine.faults():
            return
        if self.vandal is not None and self.vandal.wounds:
            return
        partition = self.random.randrange(self.partitions)
        runtime = self.life.engine.topics.get(TOPIC).runtimes[partition]
        if runtime.lost is not None:
            return  # Nobody knows now what there is.
        offset = self.random.randint(0, runtime.end_offset)
        for at, (value, _) in rows_in(self.life.engine, TOPIC, partition).items():
            if at < offset:
                self.history.trimmed.setdefault(self.known_as(value, partition, at), self.clock.now_us())

        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            self.seen["trimmed"] += not isinstance(reply, Refusal)

        self._operator.submit(TrimTopic(TOPIC, partition, offset), b"", answered)
        self.later(self.random.choice((SECOND_US, 4 * SECOND_US)), self._trim)

    def _heal(self) -> None:
        """No more trouble. A broker that is well has to go on by itself, another one is started anew."""
        self.healed = True
        self._restart_skew_s = 0
        self.put_clock(0)
        life = self.life
        if life is None or life.engine.faults() or self.chance(0.5):
            self._stop(False)
        else:
            life.threads.full = life.threads.sync_fails = 0

    def _drain(self) -> None:
        """Members that only ack get everything that is left."""
        for group in self.options:
            if not any(member.alive and member.group == group for member in self.members):
                self._new_member(group)
        self.run_for(3)
        if self._ticks_from_us:
            self._ask(groups.DeleteSchedule("clock"))
            self._ticks_until_us = self.clock.now_us()
        for second in range(0, DRAIN_S, 5):
            self.run_for(5)
            if second >= 10 and self.life is not None and not self._left():
                self.seen["drained in a minute"] += second < 60
                self.run_for(1)
                return
        require(False, f"not drained after {DRAIN_S} s: {self._left()}")

    def _left(self) -> list[Any]:
        """What groups still have to do; delayed messages are no business of theirs yet."""
        assert self.life is not None
        now_us = self.clock.now_us()
        left: list[Any] = [
            message.value
            for message in self.history.messages.values()
            if message.deliver_at_us > now_us or message.outcome == "pending"
        ]
        left += [] if self.vandal is None else self.vandal.wounds
        for name in self.options:
            info = self._ask(groups.DescribeGroup(name))
            assert isinstance(info, groups.GroupInfo), info
            left += [part for part in info.partitions if part["lag"] or part["in_flight"] or part["dying"]]
        return left

    # ---------------------------------------------------------------------------------------- the accounts

    def _account(self) -> None:
        assert self.life is not None
        require(not self.life.engine.faults(), f"{self.life.engine.faults()}")
        engine = self.life.engine
        log: dict[int, dict[int, bytes]] = {}
        for number in range(self.partitions):
            rows = rows_in(engine, TOPIC, number)
            log[number] = {at: self.known_as(value, number, at) for at, (value, _) in rows.items()}
        names = {value for values in log.values() for value in values.values()}
        names |= self.history.trimmed.keys() | self.history.lost.keys()
        self._check_ticks(sum(name.startswith(TICK) for name in names))
        resets = [reset.group for reset in self.history.resets if reset.result != "none"]
        lives = {name: 1 + resets.count(name) for name in self.options}
        dead: dict[str, dict[Position, str]] = {name: {} for name in self.options}
        if engine.topics.find(f"{TOPIC}.dlq") is not None:
            for number in range(self.partitions):
                reasons_of(rows_in(engine, f"{TOPIC}.dlq", number), log, dead, lives)
        if self.vandal is not None:
            self.vandal.check(self._ask)
        reasons = [reason for letters in dead.values() for reason in letters.values()]
        self.seen["dead letters"] += len(reasons)
        self.seen["delivered too often"] += reasons.count("max_deliveries")
        self.history.check()
        self.history.check_complete(log, dead, self.clock.now_us())

    def _check_ticks(self, count: int) -> None:
        """Every minute has its message, once."""
        due = self._ticks_until_us // MINUTE_US - self._ticks_from_us // MINUTE_US
        late = self._ticks_until_us % MINUTE_US < 4 * SECOND_US
        require(due - late <= count <= due, f"{count} ticks in {due} minutes")
        self.seen["tick"] += count


def _rules(options: dict[str, Any]) -> Rules:
    one_each = options["mode"] == "exclusive" or options["ordering"] == "partition"
    if options["assignment"] == "auto" and one_each:
        options = {**options, "assignment": "partitions"}
    return Rules(**{name: options[name] for name in Rules.__slots__})


def run(seed: int, *, crowding: bool = False) -> Counter[str]:
    """Run one seed; returns which states were reached, raises `Violation`."""
    return DeliveryWorld(seed, crowding=crowding).run()
