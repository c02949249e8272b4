"""A simulated operator who keeps an `interval` topic short: it publishes, and soon trims what it published.

Such a trim is answered when it is written, so a power failure may take its record. Then the topic begins
where it did before, and all of it has to be there: its messages may go only when a stored snapshot has the
trim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from tailrace.broker.engine import Engine
from tailrace.core.model.commands import CreateTopic, Publish, Published, Reply, TopicInfo, TrimTopic
from tailrace.core.model.identifiers import Refusal
from tailrace.format import batch as arrow
from tailrace.format.frame import Buffer, crc32c
from tailrace.sim.delivery_history import require
from tailrace.sim.log_contents import rows_in
from tailrace.sim.network import SimulatedLink, Surroundings

NAME = "kept-short"
POWER_FAILS = 0.4
"""How likely power fails soon after a trim of nearly everything was answered."""


class PoweredWorld(Surroundings, Protocol):
    """A world in which power fails until the trouble is over."""

    healed: bool

    def lose_power(self) -> None:
        """Power fails now."""
        ...


class SimTrimmer:
    """One operator and its topic, which nobody else uses."""

    def __init__(self, world: PoweredWorld, random: Random) -> None:
        self._world, self._random = world, random
        self.line = SimulatedLink(world)
        self._asked = self._begun = 0
        """How far it has asked to trim, and where the topic began when a trim was last answered."""
        self._made = False

    def request(self) -> CreateTopic:
        """What makes the topic."""
        interval_ms = self._random.choice((300, 1_000, 4_000))
        options = {"partitions": 1, "durability": "interval", "sync_interval_ms": interval_ms}
        return CreateTopic(NAME, options)

    def made(self, reply: Reply) -> None:
        """The topic is there."""
        assert isinstance(reply, TopicInfo), reply
        self._made = True

    def publish(self) -> None:
        """Publish a few messages, and come again."""
        world, random = self._world, self._random
        if world.healed:
            return
        rows = random.choice((1, 2, 5))
        columns, body = arrow.encode(
            [b"kept"] * rows, ids=random.randbytes(16 * rows), timestamps=world.clock.now_us()
        )
        self.line.submit(Publish(NAME, 0, columns, crc32c(body)), body, self._published)
        world.later(random.choice((1_000, 100_000, 300_000)), self.publish)

    def _published(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        """Now and then trim one message, so that snapshots are taken. Rarely trim nearly all of them, also
        while a snapshot is under way."""
        if not isinstance(reply, Published):
            return
        little, much = self._asked + 1, reply.base_offset
        chance = self._random.random()
        if chance < 0.25:
            self._trim(min(little, much), lambda: None)
        if chance < 0.05:
            delay_us = self._random.choice((20_000, 100_000, 300_000))
            self._world.later(delay_us, lambda: self._trim(much, self._lose_power))
        elif chance > 0.95:
            self._trim(much, self._lose_power)

    def _trim(self, offset: int, then: Callable[[], None]) -> None:
        self._asked = max(self._asked, offset)

        def trimmed(reply: Reply, parts: Sequence[Buffer]) -> None:
            life = self._world.serving()
            if not isinstance(reply, Refusal) and life is not None:
                self._begun = life.engine.topics.get(NAME).runtimes[0].state.start_offset
                then()

        self.line.submit(TrimTopic(NAME, 0, offset), b"", trimmed)

    def _lose_power(self) -> None:
        if self._random.random() < POWER_FAILS:
            self._world.later(self._random.choice((0, 1_000, 30_000, 200_000)), self._world.lose_power)

    def check(self, engine: Engine) -> None:
        """The broker has started: everything is there from where it believes that the topic begins."""
        if not self._made:
            return
        runtime = engine.topics.get(NAME).runtimes[0]
        begin, end = runtime.state.start_offset, runtime.end_offset
        require(begin <= self._asked, f"{NAME} begins at {begin}, and was trimmed to {self._asked} at most")
        there = list(rows_in(engine, NAME, 0))
        require(there == list(range(begin, end)), f"{NAME} holds {there} of [{begin}, {end})")
        self._world.seen["trim lost with the power"] += begin < self._begun
        self._begun = begin
