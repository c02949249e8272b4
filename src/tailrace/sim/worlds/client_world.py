"""A world of producers, readers and a broker in virtual time, with a network and storage that break.

What has to hold: a batch that was reported as stored is in the log exactly once, at the offset told, in the
order sent; one that failed for certain is not there; one with an unknown outcome is there at most once. A
reader is given every committed message once and in order, and nothing that a power loss can take back. When
the trouble ends, everything is settled and every flow goes on. On `interval` topics a power loss, or a sync
that fails, may take the newest. A consumer of several topics asks for little while the broker is away, and is
given everything after.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from tailrace.client.publish.partition_flow import PartitionFlow
from tailrace.core.model.commands import (
    Claimed,
    CreateTopic,
    Publish,
    Reply,
    Request,
    TopicInfo,
)
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Full, StorageFault
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.sim.actors.sim_clients import PLACES, QUICK, SAFE, SentBatch, SimProducer, SimReader
from tailrace.sim.actors.sim_consumers import SimConsumer
from tailrace.sim.delivery_history import require
from tailrace.sim.network import SimulatedLink
from tailrace.sim.virtual_time import SECOND_US, Violation
from tailrace.sim.worlds.broker_world import BrokerWorld

TOPICS: dict[str, dict[str, Any]] = {
    SAFE: {"partitions": 2, "durability": "fsync", "ring_buffer_bytes": 1500, "message_bytes_max": 100},
    QUICK: {"partitions": 1, "durability": "interval", "sync_interval_ms": 300, "message_bytes_max": 100},
}
OTHERS = ("second", "third")
"""Topics of which a consumer hears nothing: what is refused for one must not make it ask for the others."""
HEALED_S = 25

STATES = frozenset(
    (
        "append failed",
        "appends joined",
        "batch given up",
        "broker closed and opened",
        "broker killed",
        "claimed again",
        "cold read",
        "conditional stored",
        "connection broke with requests under way",
        "connection closed",
        "crash inside an append",
        "doubtful batch stored after all",
        "fenced",
        "full",
        "full seen by a producer",
        "healed without a restart",
        "identity renewed",
        "long outage",
        "numbers closed up behind a refused batch",
        "overloaded",
        "power loss took acknowledged messages",
        "request processed after its connection broke",
        "sequence conflict",
        "storage fault seen by a producer",
        "sync failed",
        "too large",
        "unknown outcome, not stored",
        "unknown outcome, stored",
    )
)
"""What 200 seeds and more have to reach."""


class ClientWorld(BrokerWorld):
    """One seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.ledger: list[SentBatch] = []
        self._ends_told: dict[int, int] = {}
        self.taken_over: list[tuple[tuple[str, int], SimProducer, int, int]] = []
        """Who was told that a name is its own now: place, producer, epoch, and how long the ledger was."""
        calm = self.random.random() < 0.1
        mood = self.random.choice((0.3, 1.0, 3.0))
        self._trouble_us = 0 if calm else int(SECOND_US / mood)
        self.overload = 0 if calm else self.random.choice((0, 0.02, 0.1))
        self._odd = 0 if calm else self.random.choice((0, 0.05, 0.3))
        self._full = 0 if calm else self.random.choice((0, 0.02, 0.1))
        self._sync_fails = 0 if calm else self.random.choice((0, 0, 0.02))
        self._start()
        self._create_topics()
        self.producers = [SimProducer(self, None), SimProducer(self, None), SimProducer(self, 7)]
        self.readers = [SimReader(self, SAFE), SimReader(self, QUICK)]
        mode = self.random.choice(("queue", "stream", "broadcast"))
        self.consumer = SimConsumer(self, (SAFE, *OTHERS), mode)

    def end_of(self, place: tuple[str, int]) -> int:
        """The end of a partition now; 0 while the broker is down."""
        if self.life is None:
            return 0
        return self.life.engine.topics.get(place[0]).runtimes[place[1]].state.end_offset

    # ---------------------------------------------------------------------------------- the broker

    def _create_topics(self) -> None:
        assert self.life is not None
        replies: list[Reply] = []
        for name, options in {**TOPICS, **{other: {"partitions": 2} for other in OTHERS}}.items():
            request = CreateTopic(name, options)
            self.life.engine.gateway.submit(request, b"", lambda reply, parts: replies.append(reply))
        self.run_for(2)
        assert [type(reply) for reply in replies] == [TopicInfo] * 4, replies

    def told(self, request: Request, reply: Reply) -> None:
        """See `Surroundings.told`."""
        if isinstance(reply, Claimed) and reply.epoch > 2:
            self.seen["claimed again"] += 1
        elif isinstance(reply, Refusal) and reply.code == "full":
            self.seen["full seen by a producer"] += 1
        elif isinstance(reply, Refusal) and reply.code == "sequence_conflict":
            assert isinstance(request, Publish)
            if request.topic == SAFE:
                known = self._ends_told.get(request.partition, 0)
                self._ends_told[request.partition] = max(known, reply.details["current_sequence"])

    def _cut_power(self) -> None:
        self._after_a_cut(self.store.lose_power(self.random), "power loss")

    def found_cut(self, name: str, end_offset: int) -> None:
        """See `VirtualTime.found_cut`."""
        self._after_a_cut({name: end_offset}, "failed sync")

    def _after_a_cut(self, ends: dict[str, int], by: str) -> None:
        """Power loss, or a failed sync and the start after it, took what these logs had not synced."""
        for name, end in ends.items():
            topic, _, partition = name.rpartition("/")
            told = self._ends_told.get(int(partition), 0) if topic.startswith(SAFE) else 0
            require(end >= told, f"{name}: a refusal told of {told} messages, {end} were durable")
        for end in [end for name, end in ends.items() if name.startswith(QUICK)]:
            for sent in self.ledger:
                stored = sent.batch.stored
                if sent.place == (QUICK, 0) and stored is not None and not sent.taken:
                    sent.taken = stored.reply.base_offset >= end
                    self.seen[f"{by} took acknowledged messages"] += sent.taken
            for reader in self.readers:
                if reader.topic == QUICK:
                    reader.cut_back(0, end)

    def _lines(self) -> list[SimulatedLink]:
        lines = [producer.line for producer in self.producers]
        return [*lines, *(reader.line for reader in self.readers), self.consumer.verbs.line]

    # ---------------------------------------------------------------------------------- what happens

    def run(self) -> Counter[str]:
        """Trouble, then none, then the accounts; raises `Violation`."""
        self.later(0, self._work)
        if self._trouble_us:
            self.later(self._trouble_us, self._trouble)
        self.later(self.random.randrange(1, 8) * SECOND_US, self._newer_producer)
        self.run_for(self.random.choice((5, 10, 15)))
        self._heal()
        self.run_for(4)
        self._probe()
        self.run_for(HEALED_S)
        self._check()
        return +self.seen

    def end(self) -> None:
        """The run is over, be it with a violation: the consumer's tasks end, so that all is freed."""
        self.consumer.end()
        with suppress(Violation):
            self.run_for(0.01)

    def _heal(self) -> None:
        """No more trouble. A broker that is well has to go on by itself, another one is started anew."""
        self.healed, self.overload, self._odd = True, 0, 0
        life = self.life
        ill = life is None or life.spoilt or life.threads.sync_failed or life.engine.faults()
        if life is None or ill or self.chance(0.5):
            self._stop(False)
        else:
            self.seen["healed without a restart"] += 1
            life.threads.full = life.threads.sync_fails = 0

    def _newer_producer(self) -> None:
        """Somebody takes over the name of a producer."""
        self.producers.append(SimProducer(self, 7))

    def _work(self) -> None:
        """A burst of batches of one producer."""
        if self.healed:
            return
        producer = self.random.choice(self.producers)
        place = self.random.choice(list(producer.flows))
        give_up_s = self.random.choice((0.3, 2, 60))
        for _ in range(self.random.choice((1, 1, 2, 5, 20))):
            producer.send(place, give_up_s, odd=self.chance(self._odd))
        self.later(self.random.choice((0, 10_000, 100_000, 400_000)), self._work)

    def _trouble(self) -> None:
        if self.healed:
            return
        self.later(int(self._trouble_us * self.random.random() * 2), self._trouble)
        if self.chance(0.05):
            self._stop(False, 10 * SECOND_US)
            return
        kind = self.random.choice(("drop", "drop", "drop", "kill", "power", "close", "interval"))
        if kind == "drop":
            self.random.choice(self._lines()).drop(False)
            if self.chance(0.2):  # While retries are under way, and the first attempts in storage.
                self.later(self.random.choice((40_000, 150_000)), lambda: self._stop(True))
        elif kind == "close":
            self._close_gracefully()
        elif kind != "interval":
            self._stop(kind == "power")
        elif self.life is not None:
            error = self.random.choice((Full("no space is left"), StorageFault("fdatasync failed")))
            log: Any = self.life.engine.topics.get(QUICK).runtimes[0].log
            log.fail_next(error)
            self.life.spoilt = True

    def _probe(self) -> None:
        """The trouble is over: whatever is sent now has to be stored."""
        for producer in self.producers:
            for place, flow in producer.flows.items():
                if flow.dead is None:
                    producer.send(place, 60, odd=False).probe = True

    # ---------------------------------------------------------------------------------- the accounts

    def _check(self) -> None:
        logs = {place: self._content(place) for place in PLACES}
        counts = Counter(value for content in logs.values() for value in content)
        last: dict[PartitionFlow, int] = {}
        for sent in self.ledger:
            batch, name = sent.batch, f"{sent.place}, batch of {sent.values[0]!r}"
            require(batch.done, f"{name} was never settled")
            require(all(counts[value] <= 1 for value in sent.values), f"{name} is there twice")
            there = sum(counts[value] for value in sent.values)
            require(there in (0, len(sent.values)), f"{name} is there in part")
            if batch.stored is not None and not sent.taken:
                base = batch.stored.reply.base_offset
                found = logs[sent.place][base : base + len(sent.values)]
                require(found == sent.values, f"{name} was reported at {base}, there is {found}")
                require(last.get(sent.flow, -1) < base, f"{name} was overtaken")
                last[sent.flow] = base
            elif batch.error is not None and batch.error.outcome == "none":
                require(not there, f"{name} failed for certain ({batch.error}), and is there")
            elif batch.error is not None:
                self.seen["unknown outcome, stored" if there else "unknown outcome, not stored"] += 1
            late = batch.error is not None and batch.error.code != "fenced"
            require(not (sent.probe and late), f"{name} failed after the trouble: {batch.error}")
        self._check_fencing()
        for reader in self.readers:
            for partition, values in reader.seen.items():
                require(
                    values == logs[reader.topic, partition],
                    f"{reader.topic}/{partition}: the reader was given something else than the log has",
                )

        missed = {value for (topic, _), log in logs.items() if topic == SAFE for value in log}
        missed -= self.consumer.seen
        require(not missed, f"the consumer was not given {sorted(missed)[:5]} of {len(missed)}")

    def _check_fencing(self) -> None:
        """What an older producer of a name was given after the newer one took over is never stored."""
        for place, _, newest, since in self.taken_over:
            for where, older, epoch, _ in self.taken_over:
                if where == place and epoch < newest:
                    late = [sent for sent in self.ledger[since:] if sent.flow is older.flows[place]]
                    came_back = any(sent.batch.stored is not None for sent in late)
                    require(not came_back, f"{place}: a fenced producer came back")

    def _content(self, place: tuple[str, int]) -> list[bytes]:
        assert self.life is not None
        runtime = self.life.engine.topics.get(place[0]).runtimes[place[1]]
        require(runtime.fault is None, f"{place} did not recover: {runtime.fault}")
        runtime.state.check()
        values: list[bytes] = []
        epochs: dict[int, int] = {}
        for part in runtime.log.read(0, runtime.end_offset, 1 << 40):
            for header, body in frame.walk(part):
                require(header.base_offset == len(values), f"{place}: a gap before {header.base_offset}")
                values += arrow.decode(body, header.columns)["value"].to_pylist()
                epoch = epochs.setdefault(header.producer_id, header.producer_epoch)
                require(epoch <= header.producer_epoch, f"{place}: a fenced producer wrote")
                epochs[header.producer_id] = header.producer_epoch
        return values


def run(seed: int) -> Counter[str]:
    """Run one seed; returns which states were reached, raises `Violation`."""
    world = ClientWorld(seed)
    try:
        return world.run()
    finally:
        world.end()
