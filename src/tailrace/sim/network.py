"""A simulated connection between a client and a broker: late, in order, and broken now and then.

When it breaks, the client is told that everything under way has an unknown outcome. Of what it had sent, a
part still arrives, at once or much later; the rest is lost. Nothing is doubled, and answers go nowhere. The
broker sees the end of it behind whatever arrived, or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from tailrace.broker.engine import Engine
from tailrace.broker.queue.fetch_request import OpenGate
from tailrace.broker.runtime.clock import ManualClock
from tailrace.core.model.commands import Publish, Reply, Request
from tailrace.core.model.identifiers import Refusal
from tailrace.format.frame import Buffer
from tailrace.ports import Respond

DOWN = Refusal("unavailable", "not connected", "none")
LOST = Refusal("unavailable", "the connection broke before the answer came", "unknown")
OVERLOADED = Refusal("overloaded", "slow down")


class RunningBroker(Protocol):
    """One run of a broker's process."""

    alive: bool
    engine: Engine


class Surroundings(Protocol):
    """The world that a connection is in."""

    random: Random
    seen: Counter[str]
    clock: ManualClock
    overload: float

    def serving(self) -> RunningBroker | None:
        """The broker, while it runs."""
        ...

    def later(self, delay_us: int, action: Callable[[], None]) -> None:
        """Do something after a while."""
        ...

    def delay_us(self) -> int:
        """How long a message is on its way."""
        ...

    def told(self, request: Request, reply: Reply) -> None:
        """An answer reaches a client."""
        ...

    def hung_up(self) -> None:
        """The broker has seen that a connection is closed."""
        ...


class Travel:
    """A request on its way to the broker."""

    def __init__(
        self, life: RunningBroker, generation: int, due_us: int, give: Callable[[Travel], None]
    ) -> None:
        self.life, self.generation, self.due_us, self.give = life, generation, due_us, give
        self.arrived = self.lost = False


class SimulatedLink:
    """One client's connection: in order each way."""

    def __init__(self, world: Surroundings) -> None:
        self._world = world
        self.up = True
        self._generation = 0
        self._number = 0
        self._waiting: dict[int, Respond] = {}
        self._travelling: list[Travel] = []
        self._there_us = self._back_us = 0
        self._gate = OpenGate()

    def submit(self, request: Request, body: Buffer, respond: Respond) -> None:
        """See `BrokerVerbs.submit`."""
        world, life = self._world, self._world.serving()
        if not self.up or life is None:
            respond(DOWN, ())
            return
        self._number += 1
        number = self._number
        self._waiting[number] = respond
        self._there_us = max(self._there_us, world.clock.now_us() + world.delay_us())

        def back(travel: Travel, reply: Reply, parts: Sequence[Buffer]) -> None:
            self._back_us = max(self._back_us, world.clock.now_us() + world.delay_us())
            world.later(self._back_us - world.clock.now_us(), lambda: deliver(travel, reply, parts))

        def deliver(travel: Travel, reply: Reply, parts: Sequence[Buffer]) -> None:
            if travel.generation == self._generation and travel.life.alive:
                world.told(request, reply)
                self._waiting.pop(number)(reply, parts)

        gate = self._gate

        def give(travel: Travel) -> None:
            if isinstance(request, Publish) and world.random.random() < world.overload:
                world.seen["overloaded"] += 1
                back(travel, OVERLOADED, ())
                return
            life.engine.gateway.submit(request, body, lambda reply, parts: back(travel, reply, parts), gate)

        travel = Travel(life, self._generation, self._there_us, give)
        self._travelling.append(travel)
        self._wait_for(travel)

    def _wait_for(self, travel: Travel) -> None:
        self._world.later(travel.due_us - self._world.clock.now_us(), lambda: self._arrive(travel))

    def _arrive(self, travel: Travel) -> None:
        if travel.arrived or travel.lost or not travel.life.alive:
            return
        if travel.due_us > self._world.clock.now_us():
            self._wait_for(travel)
            return
        travel.arrived = True
        if travel.generation != self._generation:
            self._world.seen["request processed after its connection broke"] += 1
        travel.give(travel)

    def drop(self, all_lost: bool) -> None:
        """The connection breaks; it comes back after a while."""
        world = self._world
        if not self.up:
            return
        self.up = False
        self._generation += 1
        under_way = [travel for travel in self._travelling if not travel.arrived]
        self._travelling = []
        kept = 0 if all_lost else world.random.randint(0, len(under_way))
        late_us = world.random.choice((0, 20_000, 700_000, 3_000_000))
        for at, travel in enumerate(under_way):
            travel.due_us += late_us
            travel.lost = at >= kept
        if world.random.random() < 0.9:
            ends_us = [travel.due_us for travel in under_way[:kept]]
            self._close(max(ends_us, default=world.clock.now_us() + late_us))
        self._gate = OpenGate()
        waiting, self._waiting = self._waiting, {}
        if waiting:
            world.seen["connection broke with requests under way"] += 1
        self._there_us = self._back_us = 0
        for respond in waiting.values():
            respond(LOST, ())
        world.later(world.random.choice((1_000, 50_000, 600_000)), self._reconnect)

    def _close(self, at_us: int) -> None:
        """The broker sees at a time that the connection is closed."""
        world, life, gate = self._world, self._world.serving(), self._gate

        def closed() -> None:
            if life is not None and life.alive:
                world.seen["connection closed"] += 1
                world.hung_up()
                for job in list(gate.fetches):
                    job.drop()

        world.later(at_us - world.clock.now_us() + 1, closed)

    def _reconnect(self) -> None:
        self.up = True
