"""Simulated damage: messages of a partition become unreadable; an operator looks for it and accepts the loss.

    strike ──▶ found by whoever reads there, or by a scrub ──▶ report ──▶ accept ──▶ the partition is back

Only frames that the newest snapshot covers are struck, as in a closed segment: a start does not replay them,
so what the partition knows is whole and only messages are lost. In between, the partition is shown as
quarantined, takes no writes and leases nothing; no other partition is. See `delivery_history` for what has
to hold of the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from tailrace.broker.engine import Engine
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.core.model.commands import Fetch, Publish, Published, Reply, Request
from tailrace.core.model.damage_commands import AcceptLoss, LossReport, Scrub
from tailrace.core.model.identifiers import Refusal
from tailrace.format import batch as arrow
from tailrace.format.frame import Buffer, crc32c
from tailrace.sim.delivery_history import History, LostMessage, Quarantine, SentMessage, require
from tailrace.sim.late_storage import CutStore
from tailrace.sim.log_contents import rows_in
from tailrace.sim.network import SimulatedLink, Surroundings
from tailrace.sim.virtual_time import SECOND_US

WATCH_US = 50_000
CODE = "corrupt"


class DamagedWorld(Surroundings, Protocol):
    """A world whose storage can be struck."""

    topic: str
    healed: bool
    history: History
    store: CutStore

    def value(self) -> bytes:
        """A value that nobody else has."""
        ...

    def known_as(self, value: bytes, partition: int, offset: int) -> bytes:
        """The name of a message."""
        ...


class Wound:
    """Damage in one partition, until its loss is accepted."""

    def __init__(self, partition: int, engine: Engine) -> None:
        self.partition = partition
        self.engine = engine
        """The run of the broker in which it was found or not, and all below is known."""
        self.values: dict[int, bytes] = {}
        self.quarantine: Quarantine | None = None
        self.missed: dict[str, int] = {}
        """Messages that groups miss, as the report says."""
        self.collected: dict[str, int] = {}
        """Counts of groups before the loss was accepted."""
        self.accepting_us = 0

    def ill(self, now_us: int) -> None:
        """It is quarantined now, as it was before."""
        quarantine = self.quarantine
        if quarantine is not None:
            quarantine.last_us = now_us

    def ended(self, now_us: int) -> None:
        """The quarantine is over by now, if there was one."""
        quarantine, self.quarantine = self.quarantine, None
        if quarantine is not None:
            quarantine.to_us = now_us


class SimVandal:
    """Who strikes a topic, looks for the damage, and accepts what is lost by it."""

    def __init__(self, world: DamagedWorld, random: Random) -> None:
        self._world, self._random = world, random
        self.line = SimulatedLink(world)
        self.wounds: dict[int, Wound] = {}
        self._silent: dict[str, Engine] = {}
        """Logs that had found damage when last looked at."""

    def begin(self) -> None:
        """Strike after a while, and watch."""
        self._world.later(self._random.randrange(1, 5) * SECOND_US, self._strike)
        self._watch()

    def _runtime(self, partition: int) -> QueuePartition | None:
        life = self._world.serving()
        return None if life is None else life.engine.topics.get(self._world.topic).runtimes[partition]

    def _strike(self) -> None:
        """Make one or two frames of a partition unreadable."""
        world, life = self._world, self._world.serving()
        if world.healed:
            return
        world.later(self._random.choice((SECOND_US, 4 * SECOND_US)), self._strike)
        if life is None or self.wounds or life.engine.faults():
            return
        runtime = self._random.choice(life.engine.topics.get(world.topic).runtimes)
        if runtime.lost is not None or runtime.reopening:
            return
        rows = rows_in(life.engine, world.topic, runtime.partition)
        wound = Wound(runtime.partition, life.engine)
        for header in world.store.damage(runtime.name, self._random.choice((1, 1, 2)), self._random):
            for at in range(header.base_offset, header.end_offset):
                if at in rows:
                    wound.values[at] = world.known_as(rows[at][0], runtime.partition, at)
        if world.store.damaged(runtime.name):
            world.seen["damaged"] += 1
            self.wounds[runtime.partition] = wound
            self._search(wound)

    # ------------------------------------------------------------------------------------------- found

    def _ask(self, request: Request, then: Callable[[Reply], None], body: Buffer = b"") -> None:
        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            then(reply)

        self.line.submit(request, body, answered)

    def _search(self, wound: Wound) -> None:
        """Scrub again and again, unless somebody else comes upon the damage."""
        if self.wounds.get(wound.partition) is wound:
            delay_us = self._random.choice((300_000, SECOND_US, 3 * SECOND_US))
            self._world.later(delay_us, lambda: self._search(wound))
            if wound.quarantine is None and self._random.random() < 0.6:
                self._ask(Scrub(self._world.topic, wound.partition), lambda reply: None)

    def _watch(self) -> None:
        """Look at all partitions, and come again."""
        world, life = self._world, self._world.serving()
        world.later(WATCH_US, self._watch)
        if life is None:
            for wound in self.wounds.values():
                self._forget(wound)
            return
        for runtime in life.engine.topics.get(world.topic).runtimes:
            self._look_at(life.engine, runtime)

    def _forget(self, wound: Wound) -> None:
        """The broker has ended: nothing of this is known to the next one."""
        wound.ended(self._world.clock.now_us())
        wound.missed = {}

    def _look_at(self, engine: Engine, runtime: QueuePartition) -> None:
        world, now_us, wound = self._world, self._world.clock.now_us(), self.wounds.get(runtime.partition)
        shown = any(fault.startswith(f"{world.topic}/{runtime.partition}:") for fault in engine.faults())
        found = runtime.log.stats().fault is not None
        overdue = found and self._silent.get(runtime.name) is engine
        require(shown or not overdue, f"damage was found in {runtime.name}, and is not shown")
        self._silent.pop(runtime.name, None)
        if found:
            self._silent[runtime.name] = engine
        ill = runtime.fault is not None and runtime.fault.code == CODE
        require(wound is not None or not ill, f"{runtime.name} has no damage, and is quarantined")
        if wound is None:
            return
        if wound.engine is not engine:
            self._forget(wound)
            wound.engine = engine
        if ill and wound.quarantine is None:
            world.seen["damage found"] += 1
            wound.quarantine = Quarantine(wound.partition, now_us - WATCH_US, now_us, now_us)
            world.history.quarantines.append(wound.quarantine)
            world.later(self._random.choice((1_000, 300_000, SECOND_US)), lambda: self._report(wound))
            self._try_to_write(wound)
        elif ill:
            wound.ill(now_us)
        healthy = runtime.fault is None and not runtime.reopening and not runtime.rebuilt.lost
        if healthy and not world.store.damaged(runtime.name):
            self._over(wound, runtime)

    def _try_to_write(self, wound: Wound) -> None:
        """A quarantined partition refuses, for certain."""
        world = self._world
        message = SentMessage(world.value(), wound.partition, bytes(16), world.clock.now_us())
        message.outcome = "unknown"  # Behind a connection that broke it may arrive when all is well again.
        world.history.messages[message.value] = message
        columns, body = arrow.encode([message.value], ids=message.id, timestamps=message.sent_us)

        def answered(reply: Reply) -> None:
            require(not isinstance(reply, Published), f"partition {wound.partition} took a write")
            if isinstance(reply, Refusal) and reply.code == CODE:
                world.seen["write to a quarantined partition refused"] += 1
                message.outcome = "none"

        self._ask(Publish(world.topic, wound.partition, columns, crc32c(body)), answered, body)

    # ---------------------------------------------------------------------------------------- accepted

    def _report(self, wound: Wound) -> None:
        """Ask what is lost, then accept it; whatever goes wrong, begin again."""
        world, engine = self._world, wound.engine
        if self.wounds.get(wound.partition) is not wound or wound.quarantine is None:
            return
        world.later(self._random.choice((SECOND_US, 2 * SECOND_US)), lambda: self._report(wound))

        def reported(reply: Reply) -> None:
            runtime = self._runtime(wound.partition)
            if wound.engine is not engine or runtime is None or not isinstance(reply, LossReport):
                return
            if not reply.ranges or not world.store.damaged(runtime.name):
                return  # It is from before an answer that was lost on its way.
            self._compare(wound, runtime, reply)
            wound.missed = self._missed(runtime, reply)
            wound.collected = _collected(runtime)
            wound.accepting_us = wound.accepting_us or world.clock.now_us()
            self._ask(AcceptLoss(world.topic, wound.partition, dry_run=False), accepted)

        def accepted(reply: Reply) -> None:
            if isinstance(reply, LossReport):
                require(reply.done, f"a loss was accepted, and {reply.fault}")

        self._ask(AcceptLoss(world.topic, wound.partition), reported)

    def _compare(self, wound: Wound, runtime: QueuePartition, report: LossReport) -> None:
        """What is lost is what was struck; and of that, each group misses what it has not settled."""
        history, partition = self._world.history, wound.partition
        struck = [
            (header.base_offset, header.end_offset) for header in self._world.store.damaged(runtime.name)
        ]
        told = sorted((row["first_offset"], row["end_offset"]) for row in report.ranges)
        require(told == struck, f"{struck} were struck, and {told} are lost")
        for group, count in self._missed(runtime, report).items():
            never = history.never_given(group, partition, wound.values)
            acked = history.surely_acked(group, partition)
            most = sum(at not in acked for at in wound.values)
            fits = len(never) <= count <= most
            require(fits, f"{group} misses {count} of {struck}: at least {len(never)}, at most {most}")

    def _missed(self, runtime: QueuePartition, report: LossReport) -> dict[str, int]:
        """The messages that groups miss according to a report; nothing while there is no state to ask."""
        if runtime.lost is not None or runtime.damage is None:
            return {}
        told = {row["group"]: row["messages"] for row in report.groups}
        return {group: told.get(group, 0) for group in runtime.state.queues.names()}

    def _over(self, wound: Wound, runtime: QueuePartition) -> None:
        """The partition is back without the messages."""
        world, now_us = self._world, self._world.clock.now_us()
        del self.wounds[wound.partition]
        if not wound.accepting_us:
            trimmed = all(value in world.history.trimmed for value in wound.values.values())
            require(trimmed, f"{runtime.name} is back, and nobody has accepted its loss")
            return
        world.seen["loss accepted"] += 1
        world.seen["loss counted"] += any(wound.missed.values())
        collected = _collected(runtime)
        for group, missed in wound.missed.items():
            more = collected[group] - wound.collected[group]
            counted = more == missed or world.history.reset_between(group, wound.accepting_us, now_us)
            require(counted, f"{group} missed {missed} of {runtime.name}, and counted {more}")
        for at, value in wound.values.items():
            place = wound.partition, at
            world.history.lost[value] = LostMessage(place, wound.accepting_us, now_us)
        wound.ended(now_us)

    def check(self, ask: Callable[[Request], Reply]) -> None:
        """In the end every reader is told of what is lost, and of nothing else."""
        lost = {message.place for message in self._world.history.lost.values()}
        for partition, offset in sorted(lost):
            runtime = self._runtime(partition)
            if runtime is None or offset < runtime.start_offset:
                continue
            reply = ask(Fetch(self._world.topic, [(partition, offset)], 1 << 20))
            told: list[int] = reply.details.get("lost", []) if isinstance(reply, Refusal) else []
            place = f"{offset} of {partition}"
            require(len(told) == 2, f"{place} is lost, and a reader was told {reply}")
            require(told[0] <= offset < told[1], f"{place} is lost, and a reader was told of {told}")
            more = {(partition, at) for at in range(told[0], told[1])} - lost
            require(not more, f"a reader was told that {more} are lost, too")


def _collected(runtime: QueuePartition) -> dict[str, int]:
    """How many messages each group was told to be gone."""
    queues = runtime.state.queues
    return {name: queues.figures(name)["collected"] for name in queues.names()}
