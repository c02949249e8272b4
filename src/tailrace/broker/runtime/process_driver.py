"""The process driver: carries out the effects of a process, and brings it their answers as events.

`core.process.process` has the theory. The driver belongs to one partition at work, its home:

    the home calls       and the driver
    begin(state)         makes a process from the state: a life begins
    committed(facts)     tells it of facts that were committed
    end()                forgets the process; answers that come later belong to an earlier life, and requests
                         that wait for an answer are refused

Effects name partitions, and the `Router` finds them: on one node in a dictionary, in a cluster on a peer. An
answer may come while the process takes a step; it waits in a queue, so that steps never nest.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from tailrace.broker.runtime.pump import Pump, Timer
from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.core.catalog.catalog import Catalog
from tailrace.core.model.commands import AlterTopic, CreateTopic, Reply
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.process import process as core
from tailrace.errors import Corrupt, StorageFault, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import PartitionLog, Respond

P = TypeVar("P")
LEVELS = {"warning": logging.WARNING, "error": logging.ERROR}

Reader = Callable[[PartitionLog, int, Any], tuple[Any, StorageFault | None]]
"""Performs a request for the committed part of a log, up to an offset, on a reader thread: the result, and a
fault that it met and went around."""


class Router(Protocol):
    """The way to the partitions by name, and to the catalog."""

    @property
    def catalog(self) -> Catalog:
        """The topics that there are."""
        ...

    def submit(
        self,
        target: TopicPartition,
        topic_id: int,
        command: Any,
        body: Buffer,
        respond: Respond,
        *,
        sure: bool,
    ) -> None:
        """Submit a command; see `core.process.process.Submit`."""
        ...

    def change(self, request: CreateTopic | AlterTopic, respond: Respond) -> None:
        """Change a topic."""
        ...


class Home(Protocol):
    """The partition that a process belongs to, as its driver sees it."""

    log: PartitionLog

    @property
    def end_offset(self) -> int:
        """End of the committed messages."""
        ...

    @property
    def damage(self) -> Refusal | None:
        """Why its log cannot be relied on; None if it is well."""
        ...

    def damaged(self, error: Exception, source: PartitionLog) -> None:
        """A read of its log found damage."""
        ...


class Shelf(Protocol):
    """What the process of one partition has read, and what is too large to go through it."""

    def keep(self, found: Any) -> Any:
        """Take in the result of a read; return what the process is told of it."""
        ...

    def fill(self, command: Any) -> tuple[Any, Buffer]:
        """The command that the process means, and its body, made from what is kept."""
        ...

    def forget(self, what: Any) -> None:
        """Drop what is not needed any more."""
        ...

    def clear(self) -> None:
        """Drop everything: the life has ended."""
        ...


class ProcessKind(NamedTuple):
    """One kind of process: how it is made from the state of its home, and who serves it."""

    make: Callable[[Any], core.Process]
    watches: frozenset[type]
    """The kinds of facts that it is told of."""
    log: logging.Logger
    readers: Mapping[type, Reader] = {}
    failed: Callable[[], None] = lambda: None
    """Counts a failure."""
    tell: Callable[[Any], None] = lambda what: None
    """Tells those who wait."""
    shelf: Shelf | None = None


class ProcessDriver:
    """Drives the process of one partition, life after life. All methods run on the pump's thread."""

    def __init__(self, kind: ProcessKind, home: Home, router: Router, pump: Pump) -> None:
        self.watches = kind.watches
        self._kind = kind
        self._home = home
        self._router = router
        self._pump = pump
        self._process: core.Process | None = None
        self._life = 0
        self._events: deque[core.Event] = deque()
        self._stepping = False
        self._timers: dict[Hashable, Timer] = {}
        self._requests: dict[Hashable, Respond] = {}
        """Requests that wait for an answer, by the tags that they came under."""
        self._request = 0
        self._effects: dict[type, Callable[[Any], None]] = {
            core.Submit: self._submit,
            core.Change: self._change,
            core.Read: self._read,
            core.Forget: self._forget,
            core.After: self._after,
            core.Cancel: self._cancel,
            core.AtWall: self._at_wall,
            core.Respond: self._respond,
            core.Log: self._log,
            core.Count: self._count,
            core.Tell: self._tell_others,
        }

    @property
    def process(self) -> core.Process | None:
        """The process; None while there is no life."""
        return self._process

    def ask(self, request: Any, respond: Respond | None = None) -> None:
        """Ask the process for something. Without a life nothing happens, for the next one begins anew; who
        waits for an answer is refused then."""
        if respond is None:
            self._tell(core.Asked(request))
        elif self._process is None:
            respond(_ended(), NOTHING)
        else:
            self._request += 1
            self._requests[self._request] = respond
            self._tell(core.Asked(request, self._request))

    def begin(self, state: Any) -> None:
        """The home partition takes commands (again), and this is its state."""
        self.end()
        self._process = self._kind.make(state)
        self._tell(core.Begun())

    def end(self) -> None:
        """The home partition has dropped its state, or takes no more commands."""
        self._process = None
        self._life += 1
        self._events.clear()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._kind.shelf is not None:
            self._kind.shelf.clear()
        requests, self._requests = self._requests, {}
        for respond in requests.values():
            respond(_ended(), NOTHING)

    def committed(self, facts: Sequence[Any]) -> None:
        """Watched facts of the home partition were committed."""
        self._tell(core.FactsStored(facts))

    def _tell(self, event: core.Event) -> None:
        if self._process is None:
            return
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._process is not None and self._events:
                life = self._life
                pump, damaged = self._pump, self._home.damage is not None
                times = pump.clock.wall_us(), damaged, pump.clock.now_us()
                now = core.Now(self._router.catalog, *times, pump.full)
                for effect in self._process.step(self._events.popleft(), now):
                    if life == self._life:
                        self._effects[type(effect)](effect)
        finally:
            self._stepping = False

    # -- effects, and what comes of them

    def _submit(self, effect: core.Submit) -> None:
        respond = partial(self._answered, self._life, effect.tag)
        target, topic_id, command, body = effect.target, effect.topic_id, effect.command, effect.body
        if body is None:
            assert self._kind.shelf is not None
            command, body = self._kind.shelf.fill(command)
        self._router.submit(target, topic_id, command, body, respond, sure=effect.sure)

    def _change(self, effect: core.Change) -> None:
        self._router.change(effect.request, partial(self._answered, self._life, effect.tag))

    def _answered(self, life: int, tag: Hashable, reply: Reply, parts: Sequence[Buffer]) -> None:
        if life == self._life:
            self._tell(core.Answered(tag, reply))

    def _read(self, effect: core.Read) -> None:
        reader, log = self._kind.readers[type(effect.request)], self._home.log
        work = partial(reader, log, self._home.end_offset, effect.request)
        self._pump.threads.read(work, partial(self._found, self._life, effect.tag, log))

    def _found(
        self, life: int, tag: Hashable, log: PartitionLog, found: Any, error: Exception | None
    ) -> None:
        if life != self._life:
            return
        if error is not None:
            self._tell(core.Found(tag, refuse(error)))
            return
        result, problem = found
        if isinstance(problem, Corrupt):
            self._home.damaged(problem, log)
        shelf = self._kind.shelf
        self._tell(core.Found(tag, result if shelf is None else shelf.keep(result)))

    def _forget(self, effect: core.Forget) -> None:
        assert self._kind.shelf is not None
        self._kind.shelf.forget(effect.what)

    def _after(self, effect: core.After) -> None:
        due_us = self._pump.clock.now_us() + effect.delay_us
        self._set(effect.tag, self._pump.at(due_us, partial(self._due, effect.tag)))

    def _at_wall(self, effect: core.AtWall) -> None:
        self._set(effect.tag, self._pump.at_wall(effect.wall_us, partial(self._due, effect.tag)))

    def _set(self, tag: Hashable, timer: Timer) -> None:
        before = self._timers.get(tag)
        if before is not None:
            before.cancel()
        self._timers[tag] = timer

    def _cancel(self, effect: core.Cancel) -> None:
        timer = self._timers.pop(effect.tag, None)
        if timer is not None:
            timer.cancel()

    def _due(self, tag: Hashable, now_us: int) -> None:
        del self._timers[tag]
        self._tell(core.Due(tag))

    def _respond(self, effect: core.Respond) -> None:
        respond = self._requests.pop(effect.tag, None)
        if respond is not None:
            respond(effect.reply, NOTHING)

    def _log(self, effect: core.Log) -> None:
        self._kind.log.log(LEVELS[effect.level], "%s", effect.text)

    def _tell_others(self, effect: core.Tell) -> None:
        self._kind.tell(effect.what)

    def _count(self, effect: core.Count) -> None:
        self._kind.failed()


class Processes:
    """The processes of one partition."""

    def __init__(self, drivers: Iterable[ProcessDriver]) -> None:
        self.drivers = tuple(drivers)
        self.watches = frozenset[type]().union(*(driver.watches for driver in self.drivers))
        """The kinds of facts that some of them are told of."""

    def of(self, kind: type[P]) -> P | None:
        """The process of a class, for questions; None without a life."""
        return next((driver.process for driver in self.drivers if isinstance(driver.process, kind)), None)

    def ask(self, kind: type[core.Process], request: Any, respond: Respond | None = None) -> None:
        """See `ProcessDriver.ask`; asks the process of a class."""
        for driver in self.drivers:
            if isinstance(driver.process, kind):
                driver.ask(request, respond)
                return
        if respond is not None:
            respond(_ended(), NOTHING)

    def begin(self, state: Any) -> None:
        """See `ProcessDriver.begin`."""
        for driver in self.drivers:
            driver.begin(state)

    def committed(self, facts: Sequence[Any]) -> None:
        """Watched facts were committed: tell each process of those that it watches."""
        for driver in self.drivers if facts else ():
            watched = [fact for fact in facts if type(fact) in driver.watches]
            if watched:
                driver.committed(watched)

    def end(self) -> None:
        """See `ProcessDriver.end`."""
        for driver in self.drivers:
            driver.end()


def _ended() -> Refusal:
    return Refusal(Unavailable.code, "the partition behind this request takes no commands now", "unknown")
