"""Simulated workers: consumers of the SDK with handlers of every speed, which leave, stand still, or die.

Each has a connection and an event loop of its own. A loop that stands still (a handler that blocks it) hears
nothing and says nothing until it goes on. A worker that dies is gone without a word; the broker only sees
that its connection was closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Protocol

from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.broker.runtime.clock import ManualClock
from tailrace.client.queue.consumer import Consumer
from tailrace.client.queue.consumer_options import ConsumerOptions
from tailrace.client.queue.delivery import Delivery
from tailrace.core.model.commands import Reply, Request
from tailrace.core.model.queue_commands import Leases
from tailrace.errors import LeaseLost, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import Respond
from tailrace.sim.network import RunningBroker
from tailrace.sim.sim_loop import SimHandle, SimLoop
from tailrace.sim.virtual_time import SECOND_US

TOPIC, GROUP = "work", "workers"
CALL_S = 30.0

PACES_MS: dict[str, tuple[int, ...]] = {
    "at once": (0,),
    "fast": (0, 1, 2),
    "medium": (5, 10, 30),
    "slow": (120, 200, 300),
    "mixed": (0, 1, 10, 50, 200),
    "in fits": (1,) * 50 + (1_500,),
}
"""How long a handler takes, by the mood of its worker."""


class WorkAccounts(Protocol):
    """What is told of a worker."""

    def granted(self, worker: Worker, reply: Leases) -> None:
        """The broker gives a worker messages."""
        ...

    def started(self, worker: Worker, delivery: Delivery) -> None:
        """A handler begins with a message."""
        ...

    def failed(self, value: bytes) -> None:
        """A handler fails."""
        ...

    def finished(self, worker: Worker, value: bytes) -> None:
        """A handler is done with a message."""
        ...

    def broke(self, error: BaseException) -> BaseException:
        """What a worker raised: it ends the run."""
        ...


class WorkWorld(Protocol):
    """A world with work."""

    random: Random
    clock: ManualClock
    group: dict[str, Any]
    """The options of the group."""

    @property
    def broker(self) -> RunningBroker:
        """The broker, which never fails here."""
        ...

    @property
    def accounts(self) -> WorkAccounts:
        """The accounts of all workers."""
        ...

    def later(self, delay_us: int, action: Callable[[], None]) -> None:
        """Do something after a while."""
        ...

    def delay_us(self) -> int:
        """How long a message is on its way."""
        ...

    def fails(self, value: bytes) -> bool:
        """Whether a handler fails on a message now."""
        ...


class HandlerFailed(Exception):
    """What a handler raises now and then."""


class _Gone(Unavailable):
    """What the parts of a consumer hear whose process was killed."""


class WorkerLoop(SimLoop):
    """An event loop that can stand still."""

    def __init__(self, world: WorkWorld) -> None:
        super().__init__(world)
        self._time = world
        self._frozen_until_us = 0

    def frozen(self) -> bool:
        """Whether it stands still now."""
        return self._frozen_until_us > self._time.clock.now_us()

    def freeze(self, seconds: float) -> None:
        """Stand still for a while; 0: go on."""
        self._frozen_until_us = self._time.clock.now_us() + int(seconds * SECOND_US)

    def when_awake(self, action: Callable[[], None]) -> None:
        """Do something now, or as soon as the loop goes on."""
        if self.frozen():
            left_us = self._frozen_until_us - self._time.clock.now_us()
            self._time.later(left_us, lambda: self.when_awake(action))
        else:
            action()

    def _run(self, handle: SimHandle) -> None:
        self.when_awake(lambda: super(WorkerLoop, self)._run(handle))


class SimulatedWire:
    """See `BrokerVerbs`: the connection of one client, late and in order each way; it ends with its owner."""

    def __init__(
        self,
        world: WorkWorld,
        loop: WorkerLoop | None = None,
        given: Callable[[Leases], None] = lambda reply: None,
    ) -> None:
        self._world = world
        self._loop = loop
        self._given = given
        """Told of every answer with messages when it leaves the broker."""
        self.gate = OpenGate()
        self.clock = self
        self.open = True
        self._there_us = self._back_us = 0

    def wall_ns(self) -> int:
        """See `ClientClock`."""
        return self._world.clock.now_us() * 1000

    def elapsed_ms(self) -> float:
        """See `ClientClock`."""
        return self._world.clock.now_us() / 1000

    def submit(self, request: Request, body: Buffer, respond: Respond) -> None:
        """See `BrokerVerbs.submit`."""
        world = self._world
        if not self.open:
            return
        self._there_us = max(self._there_us, world.clock.now_us() + world.delay_us())

        def arrive() -> None:
            if self.open:
                world.broker.engine.gateway.submit(request, body, back, self.gate)

        def back(reply: Reply, parts: Sequence[Buffer]) -> None:
            if isinstance(reply, Leases):
                self._given(reply)
            self._back_us = max(self._back_us, world.clock.now_us() + world.delay_us())
            world.later(self._back_us - world.clock.now_us(), lambda: hear(reply, parts))

        def hear(reply: Reply, parts: Sequence[Buffer]) -> None:
            if self._loop is not None and self._loop.frozen():
                self._loop.when_awake(lambda: hear(reply, parts))
            elif self.open:
                respond(reply, parts)

        world.later(self._there_us - world.clock.now_us(), arrive)

    def close(self) -> None:
        """The process at this end is gone: the broker sees that at once, and drops what it had asked for."""
        self.open = False
        for job in list(self.gate.fetches):
            job.drop()


class Worker:
    """One consumer at work; `running` are the messages whose handlers are under way."""

    def __init__(self, world: WorkWorld, name: str, concurrency: int, mood: str) -> None:
        self._world = world
        self.name = name
        self.concurrency = concurrency
        self.mood = mood
        self.loop = WorkerLoop(world)
        self.wire = SimulatedWire(world, self.loop, lambda reply: world.accounts.granted(self, reply))
        self.running: set[bytes] = set()
        self.joined = self.leaving = self.dead = self.gone = False
        self._consumer: Consumer | None = None
        self.loop.create_task(self._live()).add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """What it raises ends the run."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._world.accounts.broke(error)

    async def _live(self) -> None:
        options = ConsumerOptions(member=self.name, group=self._world.group)
        # It hears when it leaves what it cost to stand still; and the dead hear nothing.
        with suppress(LeaseLost, _Gone):
            async with Consumer(self.wire, [TOPIC], GROUP, CALL_S, options) as self._consumer:
                self.joined = True
                await self._consumer.run(self._handle, concurrency=self.concurrency)
        self.gone = True

    async def _handle(self, delivery: Delivery) -> None:
        world, value = self._world, delivery.value
        assert value is not None
        world.accounts.started(self, delivery)
        self.running.add(value)
        pause_ms = world.random.choice(PACES_MS[self.mood])
        try:
            if pause_ms:
                await asyncio.sleep(pause_ms / 1000)
            if world.fails(value):
                world.accounts.failed(value)
                raise HandlerFailed(f"{value!r} fails")
            world.accounts.finished(self, value)
        finally:
            self.running.discard(value)

    # -- what happens to it

    def at_work(self) -> bool:
        """Whether it takes messages as far as anybody can tell."""
        return self.joined and not (self.leaving or self.dead or self.loop.frozen())

    def assignment(self) -> set[int]:
        """The partitions that it may ask for: those that it is about to give up are not among them."""
        if self._consumer is None or not self.at_work():
            return set()
        return {partition for _, partition in self._consumer.opened().membership.usable()}

    def leave(self) -> None:
        """It stops when its handlers are done."""
        if self._consumer is not None and self.joined:
            self.leaving = True
            self.loop.when_awake(self._consumer.stop)

    def stall(self, seconds: float) -> None:
        """Its loop stands still for a while."""
        self.loop.freeze(seconds)

    def die(self) -> None:
        """Its process is killed."""
        self.dead = True
        self.wire.close()
        self.end()

    def end(self) -> None:
        """Nothing is left of it a moment later."""
        self.loop.freeze(0)
        if self._consumer is not None:
            self._consumer.kill(_Gone("its process is gone"))
        for task in list(self.loop.tasks):
            task.cancel()
