"""A world of workers who share a topic: fast, slow and changing handlers, members that come and go, or fall.

The broker's engine and the SDK's consumers are the real ones, in virtual time; the broker never fails here,
other worlds see to that. What has to hold is written in `fairness_accounts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from tailrace.core.model.commands import CreateTopic, Publish, Published, Reply, TopicInfo
from tailrace.core.model.group_options import CHOICES
from tailrace.core.selection.lanes import WEIGHTS
from tailrace.format import batch as arrow
from tailrace.format.frame import Buffer, crc32c
from tailrace.sim.actors.sim_workers import GROUP, PACES_MS, TOPIC, SimulatedWire, Worker
from tailrace.sim.fairness_accounts import LOOK_US, Accounts, Task
from tailrace.sim.virtual_time import SECOND_US, BrokerRun, Violation, VirtualTime

STORAGE_US = (50, 500, 2_000, 5_000)
GROUP_OPTIONS: dict[str, Any] = {
    "lease_ms": 2000,
    "session_ms": 3000,
    "heartbeat_ms": 500,
    "backoff_ms": 100,
    "backoff_max_ms": 200,
    "max_attempts": 8,
    "max_deliveries": 8,
    "reconnect_grace_ms": 1000,
    "starvation_ms": 600_000,
}
PUBLISHING: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((1, 1, 3, 10), (5_000, 50_000, 300_000)),
    ((30, 80, 150), (SECOND_US, 2 * SECOND_US, 4 * SECOND_US)),
)
"""How many messages come at a time, and the pauses between, in microseconds."""
BLOWS_MAX = 3
"""So many members stand still or die in one run; a message is fatal to nobody, so it has to survive them."""
DRAIN_S, STILL_S = 3600, 60
"""How long the rest of the work may take, and how long nothing may be started meanwhile: one slow worker
needs minutes for a thousand messages."""

STATES = frozenset(
    (
        "assignment auto",
        "assignment partitions",
        "assignment shared",
        "changed its speed",
        "died",
        "divided again",
        "handler failed",
        "joined",
        "left",
        "more members than partitions",
        "ordered by key",
        "shared, as members are many",
        "shares counted",
        "stood still",
        "stood still for longer than a lease",
        "strict",
        "urgent among others",
        "weighted",
    )
)
"""What 200 seeds and more have to reach."""


class FairnessWorld(VirtualTime):
    """One seed."""

    clocks = 0.0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        random = self.random
        self.partitions = random.choice((1, 2, 3, 3, 4))
        self.assignment = random.choice(("auto", *CHOICES["assignment"]))
        self.ordering = random.choice(("key", "key", "none"))
        self.priority_mode = random.choice(CHOICES["priority_mode"])
        self.group = {
            **GROUP_OPTIONS,
            "assignment": self.assignment,
            "ordering": self.ordering,
            "priority_mode": self.priority_mode,
        }
        self._keys = random.choice((0, 3, 40)) if self.ordering == "key" else random.choice((0, 3))
        self._lanes = random.choice(("one", "urgent", "all", "backlog"))
        self._fails = random.choice((0, 0, 0.05, 0.2))
        moods = tuple(PACES_MS)
        self._moods = random.choice((*((mood,) for mood in moods), ("fast", "in fits"), moods, moods))
        self._members_max = random.choice((1, 3, 6, 10) if self.assignment != "auto" else (3, 8, 10))
        self._bursts, self._pauses_us = random.choice(PUBLISHING)
        self._restless_us = random.choice((0, 500_000, 2 * SECOND_US))
        self._number = self._name = self._blows = 0
        self._over = self._sharing = False
        self.lost_us: dict[str, int] = {}
        """When a member last died or began to stand still."""
        self.workers: list[Worker] = []
        self._began_us = self.clock.now_us()
        self.accounts = Accounts(self)
        self._start()
        self._wire = SimulatedWire(self)
        self._tell_kind()

    def _start(self) -> None:
        self.life = BrokerRun(self)
        self.life.threads.delays_us = STORAGE_US
        replies: list[Reply] = []
        request = CreateTopic(TOPIC, {"partitions": self.partitions, "durability": "fsync"})
        self.broker.engine.gateway.submit(request, b"", lambda reply, parts: replies.append(reply))
        self.run_for(1)
        assert [type(reply) for reply in replies] == [TopicInfo], replies

    def _tell_kind(self) -> None:
        self.seen[f"assignment {self.assignment}"] += 1
        self.seen[self.priority_mode] += 1
        self.seen["ordered by key"] += bool(self._keys) and self.ordering == "key"

    @property
    def broker(self) -> BrokerRun:
        """The broker."""
        assert self.life is not None
        return self.life

    def seconds(self) -> float:
        """How long it has been running."""
        return (self.clock.now_us() - self._began_us) / SECOND_US

    def _step(self) -> None:
        super()._step()
        if self.accounts.broken is not None:
            raise self.accounts.broken

    def delay_us(self) -> int:
        """How long a message is on its way."""
        return self.random.choice((50, 200, 1_000, 5_000))

    def named(self, name: str) -> Worker:
        """A worker by its name."""
        return next(worker for worker in self.workers if worker.name == name)

    def has_shares(self) -> bool:
        """Whether lanes have shares of single messages. Keys have the lane of their oldest message."""
        keyed = bool(self._keys) and self.ordering == "key"
        return self.priority_mode == "weighted" and self._lanes == "backlog" and not keyed

    def has_one_for_each(self) -> bool:
        """Whether the assignment gives every member something to do, and everybody has had time to hear."""
        now_us = self.clock.now_us()
        if any(worker.leaving and not worker.gone for worker in self.workers):
            return False
        if any(now_us - lost_us < 6 * SECOND_US for lost_us in self.lost_us.values()):
            return False
        return self.assignment != "partitions" or len(self._alive()) <= self.partitions

    def fails(self, value: bytes) -> bool:
        """Whether a handler fails on a message now."""
        return self.accounts.tasks[value].fails_left > 0

    # ---------------------------------------------------------------------------------------- what happens

    def run(self) -> Counter[str]:
        """Work and trouble, then the rest of the work, then the accounts; raises `Violation`."""
        for _ in range(self.random.randint(1, self._members_max)):
            self._join()
        self.run_for(0.5 if self.chance(0.5) else 0.01)
        self._publish(self.random.choice((20, 60, 150)) if self._lanes != "backlog" else 0)
        if self._lanes == "backlog":
            self._pile_up()
        self.later(0, self._send)
        self.later(0, self._look)
        if self._restless_us:
            self.later(self._restless_us, self._trouble)
        self.run_for(self.random.choice((4, 8, 12, 20) if self.assignment == "auto" else (4, 8, 12)))
        self._over = True
        if not self._alive():
            self._join()
        self._drain()
        self.accounts.check()
        return +self.seen

    def _drain(self) -> None:
        still_s = 0
        for _ in range(DRAIN_S):
            if self.accounts.done() or still_s >= STILL_S:
                return
            started = self.seen["started"]
            self.run_for(1)
            still_s = 0 if self.seen["started"] > started else still_s + 1

    def end(self) -> None:
        """The run is over, be it with a violation: all tasks end, so that all is freed."""
        for worker in self.workers:
            worker.wire.open = False
            worker.end()
        with suppress(Violation):
            self.run_for(0.01)

    def _alive(self) -> list[Worker]:
        return [worker for worker in self.workers if not (worker.dead or worker.gone or worker.leaving)]

    def _look(self) -> None:
        self.accounts.look()
        self.seen["more members than partitions"] += len(self._alive()) > self.partitions
        if self.assignment == "auto":
            self._note_switch()
        self.later(LOOK_US, self._look)

    def _note_switch(self) -> None:
        runtimes = [self.accounts.runtime(partition) for partition in range(self.partitions)]
        sharing = any(runtime.state.queues.is_shared(GROUP) for runtime in runtimes)
        if sharing != self._sharing:
            self.seen["shared, as members are many" if sharing else "divided again"] += 1
            self._sharing = sharing

    def _join(self) -> None:
        self._name += 1
        concurrency = self.random.choice((1, 1, 1, 2, 4))
        worker = Worker(self, f"w{self._name}", concurrency, self.random.choice(self._moods))
        self.workers.append(worker)
        self.seen["joined"] += 1

    def _trouble(self) -> None:
        if self._over:
            return
        self.later(int(self._restless_us * self.random.random() * 2), self._trouble)
        kind = self.random.choice(("join", "join", "leave", "speed", "speed", "stall", "die"))
        alive = [worker for worker in self._alive() if worker.joined]
        if kind == "join":
            if len(self._alive()) < self._members_max:
                self._join()
        elif len(alive) > 1:
            worker = self.random.choice(alive)
            if kind == "leave":
                self.accounts.left(worker, range(self.partitions))
                worker.leave()
                self.seen["left"] += 1
            elif kind == "speed":
                worker.mood = self.random.choice(list(PACES_MS))
                self.seen["changed its speed"] += 1
            elif self._blows < BLOWS_MAX and not worker.loop.frozen():
                self._blow(worker, kind)

    def _blow(self, worker: Worker, kind: str) -> None:
        self._blows += 1
        self.lost_us[worker.name] = self.clock.now_us()
        self.accounts.lost(worker)
        if kind == "die":
            worker.die()
            self.seen["died"] += 1
            return
        seconds = self.random.choice((0.3, 1, 2.5, 4))
        worker.stall(seconds)
        self.seen["stood still"] += 1
        self.seen["stood still for longer than a lease"] += seconds > 2

    # --------------------------------------------------------------------------------------------- messages

    def _send(self) -> None:
        if self._over:
            return
        self._publish(self.random.choice(self._bursts))
        self.later(self.random.choice(self._pauses_us), self._send)

    def _publish(self, count: int) -> None:
        """Some messages, each to a partition by its key or by chance."""
        by_partition: dict[int, list[Task]] = {}
        for _ in range(count):
            task = self._task(self._lane())
            by_partition.setdefault(task.partition, []).append(task)
        for tasks in by_partition.values():
            self._store(tasks)

    def _pile_up(self) -> None:
        """So much that all lanes have something for a while."""
        slow = not {"fast", "at once"} & set(self._moods)
        rows = 100 if slow else self.random.choice((300, 600, 900))
        for partition in range(self.partitions):
            tasks = []
            for lane, weight in enumerate(WEIGHTS):
                for _ in range(int(rows * weight / 100 / self.partitions * 1.1) + 6):
                    tasks.append(self._task(lane, partition))
            self.random.shuffle(tasks)
            self._store(tasks)

    def _lane(self) -> int:
        if self._lanes == "one":
            return 2
        if self._lanes == "urgent":
            self.seen["urgent among others"] += 1
            return 0 if self.chance(0.1) else 2
        return self.random.randrange(len(WEIGHTS))

    def _task(self, lane: int, partition: int | None = None) -> Task:
        self._number += 1
        number = self.random.randrange(self._keys) if self._keys and self.chance(0.9) else None
        if partition is None:
            partition = self.random.randrange(self.partitions) if number is None else number % self.partitions
        key = None if number is None else b"k%d" % number
        task = Task(b"%d" % self._number, partition, key, lane)
        task.fails_left = self.random.choice((1, 1, 2)) if self.chance(self._fails) else 0
        return task

    def _store(self, tasks: list[Task]) -> None:
        keys = [task.key for task in tasks]
        columns, body = arrow.encode(
            [task.value for task in tasks],
            ids=self.random.randbytes(16 * len(tasks)),
            timestamps=self.clock.now_us(),
            keys=keys if any(key is not None for key in keys) else None,
            priorities=[task.lane for task in tasks] if self._lanes != "one" else None,
        )
        self.accounts.sent(tasks)

        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            assert isinstance(reply, Published), reply
            self.accounts.stored(tasks, reply.base_offset)

        self._wire.submit(Publish(TOPIC, tasks[0].partition, columns, crc32c(body)), body, answered)


def run(seed: int) -> Counter[str]:
    """Run one seed; returns which states were reached, raises `Violation`."""
    world = FairnessWorld(seed)
    try:
        return world.run()
    finally:
        world.end()
