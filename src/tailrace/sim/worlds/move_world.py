"""A world in which power fails between any two steps of a move between logs, mostly on `interval` topics.

An `interval` topic may lose what was acknowledged in the last second before a power failure. It must not lose
what was durable before, because it moved meanwhile. So the messages of this world are *old*: they are sent
and synced first. Then members fail and reject them, an operator sends the dead letters back, a writer decides
staged versions, a schedule ticks, delayed messages are released, and all the while power fails, each time
after some event, and takes from every log some of what was not synced there.

What has to hold: no old message is lost, between its topic and the dead letters or on the way back; a message
that has a dead letter does not live on; no letter is there twice for one death; a letter that was redriven
does not come back; a version that was decided is there, whole and once, also when it was told to be applied;
every minute has its tick, once; no member was told of a grant that the partition has forgotten.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from tailrace.core.model import group_commands as groups
from tailrace.core.model.commands import CreateTopic, Reply, Request, TopicInfo
from tailrace.core.model.topic_options import DEAD_LETTERS
from tailrace.sim.actors.sim_operators import Letter, SimOperator, letters_in
from tailrace.sim.actors.sim_publishers import KEYS
from tailrace.sim.delivery_history import Position, SentMessage, require
from tailrace.sim.log_contents import rows_in
from tailrace.sim.network import SimulatedLink
from tailrace.sim.virtual_time import SECOND_US
from tailrace.sim.worlds.delivery_world import TICK, TOPIC, DeliveryWorld

OLD = 8
"""So many messages are sent before power fails."""

STATES = frozenset(
    (
        "broker killed",
        "copied",
        "dead letters",
        "delayed",
        "fsync beside interval",
        "partition revoked",
        "power lost",
        "power lost with unsynced messages",
        "redriven",
        "staged version decided",
        "tick",
    )
)
"""What 200 seeds and more have to reach."""


class MoveWorld(DeliveryWorld):
    """One seed. Its clocks are right: one that leaps past the dedup window of the dead letters may double
    them."""

    clocks = trims = damages = 0.0

    def __init__(self, seed: int, cut_after: int | None = None) -> None:
        """`cut_after`: power fails once, after so many events, and not by chance."""
        self._cut_after = cut_after
        self._events_seen = 0
        self.dead_letters = TOPIC + DEAD_LETTERS
        self._cuts = 0.0
        """How likely power fails after an event."""
        self._granted: dict[tuple[str, int], int] = {}
        """The generation that members were told, by group and partition."""
        super().__init__(seed)
        self.obedience = self.random.choice((0.0, 0.3))
        self._old: set[bytes] = set()
        self.operator: SimOperator | None = None

    # -- the broker

    def _durability(self) -> dict[str, Any]:
        random = self.random
        return {
            "durability": random.choice(("interval", "interval", "interval", "fsync")),
            "sync_interval_ms": random.choice((20, 300, 1_000, 4_000)),
        }

    def _topic_options(self) -> dict[str, Any]:
        return super()._topic_options() | self._durability()

    def _set_up(self) -> None:
        super()._set_up()
        if self.chance(0.5):  # The dead letters as somebody else wants them; otherwise like their origin.
            options = {"partitions": self.partitions} | self._durability()
            reply = self._ask(CreateTopic(self.dead_letters, options))
            assert isinstance(reply, TopicInfo), reply
            assert self.life is not None
            origin = self.life.engine.topics.get(TOPIC).info.options
            self.seen["fsync beside interval"] += origin.durability != options["durability"]
        self._full = self._sync_fails = 0
        assert self.life is not None
        self.life.threads.full = self.life.threads.sync_fails = 0

    def _start(self) -> None:
        super()._start()
        assert self.life is not None
        host = self.life.engine.topics.find(TOPIC)
        for (group, partition), generation in self._granted.items():
            assert host is not None
            reached = host.runtimes[partition].state.queues.grant(group)
            known = reached is not None and reached[1] >= generation
            require(known, f"{group} was told of {generation} on {partition}, which knows {reached}")

    def told(self, request: Request, reply: Reply) -> None:
        """See `Surroundings.told`."""
        super().told(request, reply)
        if isinstance(reply, groups.Membership) and isinstance(request, groups.JoinGroup | groups.Heartbeat):
            for _, partition, generation in reply.owned:
                place = request.group, partition
                self._granted[place] = max(generation, self._granted.get(place, 0))

    def _lines(self) -> list[SimulatedLink]:
        return super()._lines() + ([] if self.operator is None else [self.operator.line])

    def _step(self) -> None:
        super()._step()
        if not self._cuts or self.life is None:
            return
        self._events_seen += 1
        if self._cut_after is not None:
            if self._events_seen == self._cut_after:
                self._stop(power_loss=True)
        elif self.chance(self._cuts):
            for host in self.life.engine.topics.hosts():
                for runtime in host.runtimes:
                    unsynced = runtime.entry > self.store.durable.get(runtime.name, 0)
                    self.seen["power lost with unsynced messages"] += unsynced and host.info.name[0] != "_"
            self._stop(power_loss=self.chance(0.9))

    # -- what happens

    def run(self) -> Counter[str]:
        """Old messages, then moves and power failures, then none, then the accounts; raises `Violation`."""
        self._send_old()
        for name in self.options:
            for _ in range(self.random.choice((1, 2))):
                self._new_member(name)
        self.operator = SimOperator(self)
        self._cuts = self.random.choice((0.003, 0.01, 0.03))
        self._write()
        self.run_for(self.random.choice((5, 10)))
        self._cuts = 0.0
        self._heal()
        self._drain()
        self._account()
        return +self.seen

    def _send_old(self) -> None:
        """Messages that are on the disk before anything happens; some wait for their time."""
        random, messages = self.random, self.history.messages
        while len(messages) < OLD:
            now_us, partition = self.clock.now_us(), random.randrange(self.partitions)
            batch = []
            delayed = self.chance(0.3)
            for _ in range(random.choice((1, 2, 3))):
                message = SentMessage(self.value(), partition, random.randbytes(16), now_us)
                message.key = random.choice((None, *KEYS))
                if delayed:
                    message.deliver_at_us = now_us + random.choice((100_000, 5 * SECOND_US, 9 * SECOND_US))
                messages[message.value] = message
                batch.append(message)
            self.seen["delayed"] += delayed
            self.publishers[0].publish(batch)
        assert self.life is not None
        runtimes = self.life.engine.topics.get(TOPIC).runtimes
        for _ in range(30):
            self.run_for(1)
            if all(self.store.durable[runtime.name] == runtime.entry for runtime in runtimes):
                break
        else:
            require(False, "a topic was not synced in time")
        self._old = {value for value, message in messages.items() if message.outcome == "ok"}
        require(len(self._old) == len(messages), "nothing happened yet, and a message was refused")

    def _write(self) -> None:
        if not self.healed:
            self.writer.write()
            self.later(self.random.choice((100_000, 600_000)), self._write)

    def _left(self) -> list[Any]:
        """Nothing is left when the dead letters were all sent back, too."""
        assert self.operator is not None
        left = super()._left()
        if self.operator.idle <= 2 * self.partitions:
            left.append("dead letters")
        return left

    # -- the accounts

    def _account(self) -> None:
        assert self.life is not None
        engine = self.life.engine
        require(not engine.faults(), f"{engine.faults()}")
        stored: Counter[bytes] = Counter()
        places: dict[bytes, set[Position]] = defaultdict(set)
        for number in range(self.partitions):
            for offset, (value, _) in rows_in(engine, TOPIC, number).items():
                stored[value] += 1
                places[value].add((number, offset))
        self._check_ticks(stored.pop(TICK, 0))
        assert self.operator is not None
        letters = self._letters()
        self.seen["dead letters"] += len(letters)
        copies = {sent.letter.value for sent in self.operator.sent if sent.copied}
        for message in self.history.messages.values():
            if message.value.startswith(TICK):
                continue
            count, name = stored[message.value], f"{message.value!r}"
            wanted = message.outcome == "ok"
            require(count > 0 or not wanted, f"{name} was on the disk or decided, and is not in the log")
            require(not count or message.outcome != "none", f"{name} failed for certain, and is in the log")
            require(count <= 1 or message.value in copies, f"{name} is in the log {count} times")
        for together in self.history.together:
            there = {bool(stored[message.value]) for message in together}
            require(len(there) == 1, "a version is there in part")
        for group in self.options:
            for value in self._old:
                self._check_life(group, value, places[value], letters)

    def _letters(self) -> list[Letter]:
        assert self.life is not None
        if self.life.engine.topics.find(self.dead_letters) is None:
            return []
        runtimes = self.life.engine.topics.get(self.dead_letters).runtimes
        return [
            letter
            for number, runtime in enumerate(runtimes)
            for letter in letters_in(runtime.log.read(0, runtime.end_offset, 1 << 40), number)
        ]

    def _check_life(self, group: str, value: bytes, places: set[Position], letters: list[Letter]) -> None:
        """An old message, now at these places: delivered until it is acked, and not while its dead letter is
        the whole of it."""
        assert self.operator is not None
        name = f"{group}: {value!r}"
        deaths = [item.time_us for item in letters if item.value == value and item.group == group]
        backs = [
            sent.sent_us
            for sent in self.operator.sent
            if sent.letter.value == value and (sent.copied or sent.letter.group == group)
        ]
        require(
            len(deaths) <= 1 + len(backs), f"{name} has {len(deaths)} dead letters, {len(backs)} went back"
        )
        given = [item for item in self.history.given if item.value == value and item.group == group]
        given.sort(key=lambda item: (item.decided_us, item.number))
        for item in given:
            died = sum(at < item.decided_us for at in deaths)
            back = sum(at <= item.decided_us for at in backs)
            require(died <= back, f"{name} has a dead letter and was delivered at {item.decided_us}")
        # A copy that was read before it was synced may be gone, and what was done with it does not count.
        given = [item for item in given if item.place in places]
        require(bool(given), f"{name} was never delivered")
        # Not only of the last delivery: power may have taken that, and left the lease before it.
        acts = [act for item in given for act in item.acts if act.result not in ("none", "lost")]
        done = bool(acts) and max(acts, key=lambda act: act.sent_us).kind == "ack"
        done = done or any(act.kind == "ack" and act.result != "none" for act in given[-1].acts)
        require(done, f"{name} was given up by {given[-1].member} and is neither dead nor delivered again")


def run(seed: int, cut_after: int | None = None) -> Counter[str]:
    """Run one seed; returns which states were reached, raises `Violation`."""
    return MoveWorld(seed, cut_after).run()
