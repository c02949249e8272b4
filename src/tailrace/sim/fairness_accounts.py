"""What is fair: every message as its sender, its handlers and the broker see it, and the rules over that.

The broker's books are looked at every few milliseconds. A message *waits* while nobody works on it and it
could be started: it is free, or some member holds it and has not started it, and nothing of its key is
before it. What sessions explain is excused: what a member holds that stands still, or died, does not wait
until the broker has found out.

- *Nobody idles*: no member that could start a message does nothing while it waits for more than 0.5 s.
- *Urgent first*: `strict`: no handler is started on a less urgent message of the partition while a more
  urgent one has been waiting for as long as news need to travel, but for what is done in a moment.
  `weighted`: not more often than the weights allow, and what the broker hands out of a backlog in all lanes
  is divided by the weights (`SHARE_OFF`).
- *Order per key*: a message is started when those before it were handled, and never after a later one.
- *No delivery too many*: what a handler is told of earlier deliveries are starts, and holds lost to a death
  or a stall; nothing else.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tailrace.broker.runtime.clock import ManualClock
from tailrace.client.queue.delivery import Delivery
from tailrace.core.model.queue_commands import Grant, Leases
from tailrace.core.queue.ledger import Ledger
from tailrace.core.selection.lanes import LANES, OWED_MAX, WEIGHTS
from tailrace.sim.actors.sim_workers import GROUP, TOPIC, Worker
from tailrace.sim.virtual_time import SECOND_US, BrokerRun, Violation

if TYPE_CHECKING:
    from tailrace.broker.partition.queue_partition import QueuePartition

Run = TypeVar("Run")
LOOK_US = 20_000
IDLE_US = 500_000
NEWS_US = 60_000
"""So long a more urgent message may wait before a less urgent one is started instead: it has to reach the
member that is about to start."""
AHEAD_US = 200_000
"""Members hold what they handle in about 0.1 s, and may become slower."""
PASSED_US = 30_000
"""So long what is about to be started goes before a more urgent message that has come, with all the ways that
news have."""
EMPTY_HANDED_US = 4 * SECOND_US
"""So long a member may have no partition where there is one for it."""
NEVER = 1 << 62
SHARE_MIN = 50
"""So many messages in a row are enough to say that shares were counted."""
SHARE_OFF = 2 + OWED_MAX
"""So many messages more or less than its share a lane may have had among those of one partition that were
handed out one after the other while every lane had a backlog, however many these are. The slots of the lanes
are spread so evenly that, from one place to another, a lane is never further than 2 from its share. A lane
may have been given `OWED_MAX` ahead of its turn by the end, or may pay back as many that it was given before
the beginning. For 1,000 messages that is within a tenth of every share but the two smallest, of which the
contract's 10 % are 7 and 3 messages: to hold a hundred messages to those would be to count fractions."""
GRANTS_SPARE = 12
"""So often more than it was started may a message be handed to members that then give it back."""


@dataclass(slots=True)
class Task:
    """One message: `waits_since_us` says since when nobody works on it who could."""

    value: bytes
    partition: int
    key: bytes | None
    lane: int
    offset: int = -1
    acked: bool = False
    """Whether its sender knows that it is stored."""
    waits_since_us: int = NEVER
    holder: str = ""
    """The member that has it in hand, not started; empty while it is free."""
    handed_us: int = NEVER
    """Since when that member has it, or since when it is free."""
    starts: list[str] = field(default_factory=list)
    """The member of each start."""
    begun: bool = False
    """Whether the member that has it started it."""
    handled: bool = False
    fails_left: int = 0
    grants: int = 0
    granted: tuple[str, int] = ("", 0)
    """To whom it was handed last, and when."""
    lost_holds: set[tuple[str, int]] = field(default_factory=set)
    """Holds by a member that died or stood still: member and when that began."""


@dataclass(slots=True)
class Passed:
    """How long less urgent messages go before one that waits: since a member started such a one, until the
    same member starts a more urgent one instead. So what that takes is not counted."""

    spent_us: int = 0
    by: str = ""
    since_us: int = 0

    def begin(self, member: str, now_us: int) -> None:
        """A member starts a less urgent one."""
        if not self.by:
            self.by, self.since_us = member, now_us

    def stop(self, member: str, now_us: int) -> None:
        """A member starts a more urgent one."""
        if member == self.by:
            self.spent_us, self.by = self.total_us(now_us), ""

    def total_us(self, now_us: int) -> int:
        """How long that was until now."""
        return self.spent_us + (now_us - self.since_us if self.by else 0)


class AccountedWorld(Protocol):
    """What the accounts are made of."""

    seen: Counter[str]
    clock: ManualClock
    partitions: int
    ordering: str
    priority_mode: str
    group: dict[str, Any]
    workers: list[Worker]
    lost_us: dict[str, int]
    """When a member last died or began to stand still."""

    @property
    def broker(self) -> BrokerRun:
        """The broker."""
        ...

    def seconds(self) -> float:
        """How long it has been running."""
        ...

    def named(self, name: str) -> Worker:
        """A worker by its name."""
        ...

    def has_shares(self) -> bool:
        """Whether lanes have shares of single messages."""
        ...

    def has_one_for_each(self) -> bool:
        """Whether the assignment gives every member something to do, and everybody has had time to hear."""
        ...


class Accounts:
    """The accounts of one run."""

    def __init__(self, world: AccountedWorld) -> None:
        self._world = world
        self.broken: BaseException | None = None
        """The first promise that was broken, or what ended a worker."""
        self.tasks: dict[bytes, Task] = {}
        self.open: list[dict[int, Task]] = [{} for _ in range(world.partitions)]
        """By partition: what the broker has and has not settled, in the order of offsets."""
        self._early: list[dict[int, Task]] = [{} for _ in range(world.partitions)]
        """What was handed out before its sender heard where it is: the grants and holds of it so far."""
        self._last_started: dict[tuple[int, bytes], int] = {}
        self._started_of_key: dict[tuple[int, bytes], deque[tuple[int, int]]] = {}
        """The latest starts of each key: when, and in which lane."""
        self._idle_since_us: dict[str, int] = {}
        self._owned_since_us: dict[tuple[str, int], int] = {}
        self._bare_since_us: dict[str, int] = {}
        self._failures: Counter[tuple[int, bytes | None]] = Counter()
        """By key: each failure gives back what was handed out behind it."""
        self._passes: Counter[tuple[int, int]] = Counter()
        """By partition and lane: less urgent messages that were started while it waited, since its last."""
        self._passed: dict[tuple[int, int], Passed] = {}
        """By partition and lane: how long that has been going on."""
        self._shares = [Counter[int]() for _ in range(world.partitions)]
        """By partition: how many messages of each lane were handed out since all lanes have a backlog."""

    def _now_us(self) -> int:
        return self._world.clock.now_us()

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            # Inside a handler it would only fail the message; the world raises it.
            raise self.broke(Violation(f"{self._world.seconds():.3f} s: {what}"))

    def broke(self, error: BaseException) -> BaseException:
        """A promise was broken, or a worker has ended by an error: the first one, which ends the run."""
        self.broken = self.broken or error
        return self.broken

    # ------------------------------------------------------------------------------- what is written down

    def sent(self, tasks: Iterable[Task]) -> None:
        """On their way to the broker."""
        self.tasks.update((task.value, task) for task in tasks)

    def stored(self, tasks: Iterable[Task], base_offset: int) -> None:
        """Their sender was told where they are."""
        for offset, task in enumerate(tasks, base_offset):
            task.acked = True
            self._placed(task, offset)

    def _placed(self, task: Task, offset: int) -> None:
        if task.offset < 0:
            task.offset = offset
            self.open[task.partition][offset] = task
            early = self._early[task.partition].pop(offset, None)
            if early is not None:
                task.grants, task.granted, task.lost_holds = early.grants, early.granted, early.lost_holds

    def _known(self, partition: int, offset: int) -> Task:
        task = self.open[partition].get(offset)
        return task or self._early[partition].setdefault(offset, Task(b"", partition, None, 0))

    def granted(self, worker: Worker, reply: Leases) -> None:
        """The broker hands messages to a member."""
        for grant in reply.grants:
            for first, count, _, _ in grant.runs:
                for offset in range(first, first + count):
                    task = self._known(grant.partition, offset)
                    task.grants += 1
                    task.granted = worker.name, self._now_us()
                    if worker.leaving or worker.loop.frozen():  # It may lose it without having seen it.
                        task.lost_holds.add(task.granted)
            if self._world.has_shares():
                self._count_shares(grant)

    def _count_shares(self, grant: Grant) -> None:
        """Handed out while every lane had more: it was free to choose, so the lanes have had their shares.
        Such counts of different times are not added: what happens between them moves the turn."""
        tasks, shares = self.open[grant.partition], self._shares[grant.partition]
        ledger = self._ledger(grant.partition)
        fresh = {o for first, end in ledger.fresh_spans(0, ledger.cursor) for o in range(first, end)}
        lanes = {task.lane for offset, task in tasks.items() if offset >= ledger.cursor or offset in fresh}
        if len(lanes) < LANES:
            shares.clear()
            return
        offsets = [o for first, count, _, _ in grant.runs for o in range(first, first + count)]
        shares.update(tasks[offset].lane for offset in offsets if offset in tasks)
        total = shares.total()
        self._world.seen["shares counted"] += total >= SHARE_MIN
        for lane, weight in enumerate(WEIGHTS):
            share = total * weight / sum(WEIGHTS)
            what = f"lane {lane} had {shares[lane]} of {total} that were handed out, its share is {share:.0f}"
            self._require(abs(shares[lane] - share) <= SHARE_OFF, what)

    def started(self, worker: Worker, delivery: Delivery) -> None:
        """A handler is called."""
        assert delivery.value is not None
        task = self.tasks[delivery.value]
        self._placed(task, delivery.offset)
        self._count_delivery(worker, task, delivery)
        self._check_key(task)
        self._check_urgent(worker, task)
        if task.handed_us != NEVER:
            self._check_passes(task, f"{worker.name} starts late:")
        self._passes.pop((task.partition, task.lane), None)
        self._passed.pop((task.partition, task.lane), None)
        for lane in range(task.lane + 1, LANES):
            if (passed := self._passed.get((task.partition, lane))) is not None:
                passed.stop(worker.name, self._now_us())
        task.starts.append(worker.name)
        task.begun = True
        self._idle_since_us.pop(worker.name, None)
        task.waits_since_us = task.handed_us = NEVER
        self._world.seen["started"] += 1

    def finished(self, worker: Worker, value: bytes) -> None:
        """A handler is done."""
        self.tasks[value].handled = True

    def failed(self, value: bytes) -> None:
        """A handler raises."""
        task = self.tasks[value]
        task.fails_left -= 1
        self._failures[task.partition, task.key] += 1
        self._world.seen["handler failed"] += 1

    def lost(self, worker: Worker) -> None:
        """A member died, or stands still: what it holds now may have to be delivered again."""
        began_us = self._now_us()
        for partition in range(self._world.partitions):
            for name, first, end, _ in self._ledger(partition).leased_rows():
                if name == worker.name:
                    for offset in range(first, end):
                        self._lost_hold(partition, offset, worker.name, began_us)

    def left(self, worker: Worker, partitions: Iterable[int]) -> None:
        """A member leaves, or gives partitions up: what is on its way to it counts as delivered, for it may
        have been started."""
        for partition in partitions:
            for task in (*self.open[partition].values(), *self._early[partition].values()):
                name, at_us = task.granted
                if name == worker.name and self._now_us() - at_us < NEWS_US:
                    task.lost_holds.add(task.granted)

    def _lost_hold(self, partition: int, offset: int, name: str, began_us: int) -> None:
        self._known(partition, offset).lost_holds.add((name, began_us))

    # ---------------------------------------------------------------------------------- when one is started

    def _count_delivery(self, worker: Worker, task: Task, delivery: Delivery) -> None:
        told, explained = delivery.deliveries, 1 + len(task.starts) + len(task.lost_holds)
        what = f"{self._named(task)} is told to be delivery {told}"
        self._require(told <= explained, f"{what}; starts and lost holds explain {explained}")
        # A worker that stood still just before it called the handler has a receipt of the past.
        stale = any(name == worker.name for name, _ in task.lost_holds)
        self._require(stale or told > len(task.starts), f"{what}, and was started {task.starts}")

    def _check_key(self, task: Task) -> None:
        if task.key is None or self._world.ordering != "key":
            return
        for offset, before in self.open[task.partition].items():
            if offset < task.offset and before.key == task.key and not before.handled:
                self._require(False, f"{self._named(task)} is started before {self._named(before)}")
        place = task.partition, task.key
        last = self._last_started.get(place, -1)
        if last > task.offset:
            # Its ack may have been lost with a member that died or stood still.
            again = bool(task.lost_holds)
            self._require(again, f"{self._named(task)} is started again after {last} of its key")
        self._last_started[place] = max(last, task.offset)
        self._started_of_key.setdefault(place, deque()).append((self._now_us(), task.lane))

    def _check_urgent(self, worker: Worker, task: Task) -> None:
        if not self._outranking(worker, task):
            return
        self.look()  # The last look was a while ago: it may have been taken since.
        for other in self._outranking(worker, task):
            self._passes[other.partition, other.lane] += 1
            passed = self._passed.setdefault((other.partition, other.lane), Passed())
            passed.begin(worker.name, self._now_us())
            self._check_passes(other, f"{worker.name} starts {self._named(task)} although")

    def _check_passes(self, task: Task, when: str) -> None:
        """Strictly, what is less urgent goes first only where it was about to be started anyhow."""
        passes = self._passes[task.partition, task.lane]
        if self._world.priority_mode == "strict":
            passed = self._passed.get((task.partition, task.lane))
            holds = passed is None or passed.total_us(self._now_us()) <= PASSED_US
        else:
            # What was leased together is handed out in the order that the weights gave it then.
            waited_us = self._now_us() - task.handed_us
            holds = passes <= self._passes_max(task.lane) or waited_us <= AHEAD_US
        waits = f"waits since {(self._now_us() - task.handed_us) / 1000:.0f} ms ({task.holder or 'free'})"
        self._require(holds, f"{when} {self._named(task)} {waits}, its lane passed over {passes} times")

    def _outranking(self, worker: Worker, task: Task) -> list[Task]:
        """By lane: the more urgent message that should come first, if it waits for this member."""
        first: dict[int, Task] = {}
        rank = self._rank(task)
        for other in self.open[task.partition].values():
            if other.lane < rank and other.handed_us != NEVER and not other.starts:
                first.setdefault(other.lane, other)
        return [other for other in first.values() if self._waits_for(worker, other)]

    def _rank(self, task: Task) -> int:
        """A key has the priority of its oldest message; the broker hears late that one is handled."""
        if task.key is None or self._world.ordering != "key":
            return task.lane
        recent = self._started_of_key.setdefault((task.partition, task.key), deque())
        while recent and self._now_us() - recent[0][0] > IDLE_US:
            recent.popleft()
        return min([task.lane, *(lane for _, lane in recent)])

    def _passes_max(self, lane: int) -> int:
        """How often a lane that has something may be passed over by weight. It gives up a slot for each
        message that it was given ahead of its turn, because somebody asked for urgent ones."""
        slots = 3 + (OWED_MAX if lane < LANES - 1 else 0)
        return slots * sum(WEIGHTS) // WEIGHTS[lane] + 2 * sum(
            worker.concurrency for worker in self._world.workers
        )

    def _waits_for(self, worker: Worker, task: Task) -> bool:
        since_us = max(task.handed_us, self._owned_since_us.get((worker.name, task.partition), NEVER))
        return task.holder in ("", worker.name) and self._now_us() - since_us > NEWS_US

    def _named(self, task: Task) -> str:
        key = "" if task.key is None else f" of key {task.key.decode()}"
        return f"{task.partition}@{task.offset}{key} (lane {task.lane})"

    # -------------------------------------------------------------------------------- the look at the books

    def look(self) -> None:
        """See who waits for whom now; raises what is unfair."""
        if any(
            GROUP not in runtime.state.queues.names() for runtime in map(self.runtime, range(len(self.open)))
        ):
            return  # Nobody has joined yet.
        now_us = self._now_us()
        workers = self._world.workers
        for partition in range(self._world.partitions):
            self._look_at(partition, now_us)
        for worker in workers:
            if worker.dead or worker.loop.frozen():
                self._note_holds(worker)
        self._note_idle(now_us)
        self._check_idle(now_us)
        self._check_empty_handed(now_us)

    def runtime(self, partition: int) -> QueuePartition:
        """A partition of the topic."""
        return self._world.broker.engine.topics.get(TOPIC).runtimes[partition]

    def _ledger(self, partition: int) -> Ledger:
        queues = self.runtime(partition).state.queues
        numbers = {name: number for number, name in queues.numbers().items()}
        ledger = queues.find(numbers[GROUP])
        assert ledger is not None
        return ledger

    def _look_at(self, partition: int, now_us: int) -> None:
        ledger, runtime, tasks = self._ledger(partition), self.runtime(partition), self.open[partition]
        time_us = runtime.clock.time_us(self._world.broker.clock.now_us())
        holders = dict(_each((member, first, end) for member, first, end, _ in ledger.leased_rows()))
        later = dict(_each((due > time_us, first, end) for first, end, due, _ in ledger.back_rows()))
        dying = {offset for first, end, _ in ledger.dying_rows() for offset in range(first, end)}
        fresh = {o for first, end in ledger.fresh_spans(0, ledger.cursor) for o in range(first, end)}
        self._require(not dying, f"{partition}: {sorted(dying)[:3]} go to the dead letters")
        running = {value for worker in self._world.workers for value in worker.running}
        keys: set[bytes] = set()
        for offset in sorted(tasks):
            task = tasks[offset]
            known = offset in holders or offset in later or offset in fresh
            if offset < ledger.cursor and not known:
                del tasks[offset]
                self._require(task.handled, f"{self._named(task)} is settled, and was never handled")
                continue
            ordered = self._world.ordering == "key" and task.key is not None
            behind = ordered and task.key in keys
            if task.key is not None:
                keys.add(task.key)
            if holders.get(offset) not in task.starts[-1:]:
                task.begun = False
            if not task.acked or behind or later.get(offset) or task.begun or task.value in running:
                task.waits_since_us = task.handed_us = NEVER
                continue
            self._waiting(task, holders.get(offset, ""), now_us)

    def _waiting(self, task: Task, holder: str, now_us: int) -> None:
        if holder != task.holder or task.handed_us == NEVER:
            task.holder, task.handed_us = holder, now_us
            if task.acked:
                self._passed.pop((task.partition, task.lane), None)
        if holder and (not self._world.named(holder).at_work() or self._stale(task, holder)):
            task.waits_since_us = NEVER
        elif task.waits_since_us == NEVER:
            task.waits_since_us = now_us

    def _stale(self, task: Task, holder: str) -> bool:
        """Whether a member stood still and gave the lease up by itself: the broker waits for its end."""
        ends_us = 2 * self._world.group["lease_ms"] * 1000
        return any(name == holder and self._now_us() - at < ends_us for name, at in task.lost_holds)

    def _note_holds(self, worker: Worker) -> None:
        began_us = self._world.lost_us[worker.name]
        for partition in range(self._world.partitions):
            for name, first, end, _ in self._ledger(partition).leased_rows():
                if name == worker.name:
                    for offset in range(first, end):
                        self._lost_hold(partition, offset, name, began_us)

    def _note_idle(self, now_us: int) -> None:
        for worker in self._world.workers:
            busy = len(worker.running) >= worker.concurrency or not worker.at_work()
            if busy:
                self._idle_since_us.pop(worker.name, None)
            else:
                self._idle_since_us.setdefault(worker.name, now_us)
            owned = worker.assignment()
            for partition in range(self._world.partitions):
                if partition in owned:
                    self._owned_since_us.setdefault((worker.name, partition), now_us)
                elif self._owned_since_us.pop((worker.name, partition), None) is not None:
                    self.left(worker, [partition])
            if owned or not worker.at_work() or not self._world.has_one_for_each():
                self._bare_since_us.pop(worker.name, None)
            else:
                self._bare_since_us.setdefault(worker.name, now_us)

    def _check_idle(self, now_us: int) -> None:
        for name, idle_us in self._idle_since_us.items():
            if now_us - idle_us <= IDLE_US:
                continue
            for (owner, partition), owned_us in self._owned_since_us.items():
                if owner != name or now_us - owned_us <= IDLE_US:
                    continue
                for task in self.open[partition].values():
                    since_us = max(idle_us, owned_us, task.waits_since_us)
                    if now_us - since_us > IDLE_US:
                        place = f"with {task.holder}" if task.holder else "free"
                        waits = f"{self._named(task)} waits ({place})"
                        self._require(False, f"{name} idles for {(now_us - since_us) / 1000:.0f} ms, {waits}")

    def _check_empty_handed(self, now_us: int) -> None:
        for name, since_us in self._bare_since_us.items():
            what = f"{name} has no partition for {(now_us - since_us) / SECOND_US:.1f} s"
            self._require(now_us - since_us <= EMPTY_HANDED_US, what)

    # ------------------------------------------------------------------------------------------- at the end

    def done(self) -> bool:
        """Whether all that was stored is settled."""
        return all(task.acked for task in self.tasks.values()) and not any(self.open)

    def check(self) -> None:
        """The run is over."""
        for task in self.tasks.values():
            self._require(task.handled, f"{self._named(task)} was never handled")
            behind = self._failures[task.partition, task.key] if task.key is not None else 0
            spare = GRANTS_SPARE + 2 * len(task.lost_holds) + behind
            more = task.grants - len(task.starts)
            self._require(more <= spare, f"{self._named(task)} was handed out {more} times in vain")
        for partition in range(self._world.partitions):
            dead = self._ledger(partition).counters.dead_lettered
            self._require(not dead, f"{partition}: {dead} messages went to the dead letters")


def _each(runs: Iterable[tuple[Run, int, int]]) -> Iterator[tuple[int, Run]]:
    for value, first, end in runs:
        for offset in range(first, end):
            yield offset, value
