"""Simulated consumers: those of the SDK, of several topics at once, and how much they ask for in an outage.

What has to hold: while the broker is away, timers, tasks and requests stay few, however long that is; and
when it is back, every message of the topics is handed out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tailrace.client.queue.consumer import Consumer
from tailrace.client.queue.consumer_options import ConsumerOptions
from tailrace.client.read.stream_consumer import StreamConsumer
from tailrace.core.model.commands import Request
from tailrace.errors import TailraceError, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import Respond
from tailrace.sim.network import SimulatedLink, Surroundings
from tailrace.sim.sim_loop import SimLoop
from tailrace.sim.virtual_time import Violation

CALL_S = 30.0
TIMERS_MAX = 40
TASKS_MAX = 20
ASKED_AT_ONCE = 60
ASKED_EACH_SECOND = 40
"""How much one consumer may ask for in an outage: every topic four times a second, and its membership, and
what it has acknowledged."""
GROUP: dict[str, Any] = {"lease_ms": 2000, "session_ms": 3000, "heartbeat_ms": 500, "start": "earliest"}


class SimVerbs:
    """See `BrokerVerbs`: one connection, and what goes over it."""

    def __init__(self, world: Surroundings, loop: SimLoop) -> None:
        self._world = world
        self._loop = loop
        self.line = SimulatedLink(world)
        self.clock = self
        self._asked = 0
        self._since_us: int | None = None

    def wall_ns(self) -> int:
        """See `ClientClock`."""
        return self._world.clock.now_us() * 1000

    def elapsed_ms(self) -> float:
        """See `ClientClock`."""
        return self._world.clock.now_us() / 1000

    def submit(self, request: Request, body: Buffer, respond: Respond) -> None:
        """See `BrokerVerbs.submit`; counts what is asked for in vain."""
        if self._world.serving() is not None and self.line.up:
            self._since_us = None
        else:
            self._count_in_vain()
        self.line.submit(request, body, respond)

    def _count_in_vain(self) -> None:
        now_us = self._world.clock.now_us()
        if self._since_us is None:
            self._since_us, self._asked = now_us, 0
        self._asked += 1
        away_s = (now_us - self._since_us) / 1e6
        if self._asked > ASKED_AT_ONCE + ASKED_EACH_SECOND * away_s:
            raise Violation(f"a consumer asked {self._asked} times within {away_s:.1f} s of an outage")
        if len(self._loop.timers) > TIMERS_MAX or len(self._loop.tasks) > TASKS_MAX:
            counts = f"{len(self._loop.timers)} timers and {len(self._loop.tasks)} tasks"
            raise Violation(f"a consumer has {counts} after {away_s:.1f} s of an outage")
        self._world.seen["long outage"] += away_s > 8


class SimConsumer:
    """A consumer of the SDK over several topics; `seen` is what it was given."""

    def __init__(self, world: Surroundings, topics: Sequence[str], mode: str) -> None:
        self._world = world
        self.loop = SimLoop(world)
        self.verbs = SimVerbs(world, self.loop)
        self.seen: set[bytes | None] = set()
        self._topics, self._mode = topics, mode
        self._consumer: Consumer | StreamConsumer | None = None
        self.loop.create_task(self._consume())

    def _make(self) -> Consumer | StreamConsumer:
        options: dict[str, Any] = {"start": "earliest"} if self._mode == "broadcast" else GROUP
        own = ConsumerOptions(mode=self._mode, member="consumer", batch_size=20, prefetch=50, group=options)
        if self._mode == "queue":
            return Consumer(self.verbs, self._topics, "queueing", CALL_S, own)
        group = None if self._mode == "broadcast" else "streaming"
        return StreamConsumer(self.verbs, self._topics, group, CALL_S, own)

    async def _consume(self) -> None:
        while True:
            try:
                await self._follow()
            except TailraceError:  # It could not join: the broker's storage failed, or it was away for long.
                await asyncio.sleep(1)

    async def _follow(self) -> None:
        async with self._make() as self._consumer:
            while True:
                try:
                    self._take(await anext(self._consumer))
                except TailraceError:
                    continue  # What it is told once; it goes on.

    def _take(self, message: Any) -> None:
        self.seen.add(message.value)
        if isinstance(self._consumer, Consumer):
            message.ack_nowait()

    def end(self) -> None:
        """Whatever the run has come to: nothing is left of it a moment later."""
        if self._consumer is not None:
            self._consumer.kill(Unavailable("the run is over"))
        for task in list(self.loop.tasks):
            task.cancel()
