"""Simulated writers of staged batches: several partitions at once, all of it or nothing, once per version."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import Done, Reply, Request
from tailrace.core.model.identifiers import Refusal
from tailrace.format import batch as arrow
from tailrace.format.frame import Buffer, crc32c
from tailrace.sim.actors.surroundings import TopicWorld
from tailrace.sim.delivery_history import SentMessage
from tailrace.sim.network import SimulatedLink
from tailrace.sim.virtual_time import SECOND_US


class SimWriter:
    """One writer; it makes one version after the other."""

    def __init__(self, world: TopicWorld, name: str) -> None:
        self.world, self.name = world, name
        self.line = SimulatedLink(world)
        self._version = 0
        self._busy = False

    def write(self) -> None:
        """Stage messages for some partitions, then decide; some versions are given up before that."""
        world = self.world
        if self._busy:
            return
        self._busy = True
        self._version += 1
        now_us, count = world.clock.now_us(), world.random.randint(1, world.partitions)
        batches = []
        for place in world.random.sample(range(world.partitions), count):
            rows = world.random.choice((1, 1, 3))
            batch = [
                SentMessage(world.value(), place, world.random.randbytes(16), now_us) for _ in range(rows)
            ]
            if world.chance(0.4):
                for message in batch:
                    ahead = world.random.choice((-SECOND_US, 5_000, 100_000, SECOND_US, 5 * SECOND_US))
                    message.deliver_at_us = max(1, now_us + ahead)
            batches.append(batch)
        messages = [message for batch in batches for message in batch]
        for message in messages:
            world.history.messages[message.value] = message
        world.history.together.append(messages)
        self._stage(batches, 0)

    def _ask(self, request: Request, body: Buffer, then: Callable[[Reply], None]) -> None:
        """Ask until the answer is certain."""

        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            known = isinstance(reply, Refusal) and not (reply.outcome == "unknown" or reply.code in _PASSING)
            if not isinstance(reply, Refusal) or known:
                then(reply)
            else:
                delay_us = self.world.random.choice((10_000, 500_000))
                self.world.later(delay_us, lambda: self.line.submit(request, body, answered))

        self.line.submit(request, body, answered)

    def _stage(self, batches: list[list[SentMessage]], at: int) -> None:
        if at == len(batches):
            self._decide(batches)
            return
        world, batch = self.world, batches[at]
        if world.chance(0.1):
            self._over(batches, "none")
            if world.chance(0.5):
                attempts = self._attempts(batches)
                self._ask(wire.AbortStaged(self.name, attempts), b"", lambda reply: None)
            return
        columns, body = arrow.encode(
            [message.value for message in batch],
            ids=b"".join(message.id for message in batch),
            timestamps=batch[0].sent_us,
            deliver_at=[message.deliver_at_us for message in batch] if batch[0].deliver_at_us else None,
        )
        attempt = self._attempts([batch])[0][2]
        request = wire.StageRows(world.topic, batch[0].partition, self.name, attempt, columns, crc32c(body))

        def staged(reply: Reply) -> None:
            if isinstance(reply, Done):
                self._stage(batches, at + 1)
            else:
                self._over(batches, "none")

        self._ask(request, body, staged)

    def _attempts(self, batches: list[list[SentMessage]]) -> list[tuple[str, int, str]]:
        return [(self.world.topic, batch[0].partition, f"try-{self._version}") for batch in batches]

    def _decide(self, batches: list[list[SentMessage]]) -> None:
        attempts = self._attempts(batches)
        request = wire.DecideStaged(self.name, self._version, attempts, [1] * len(attempts))

        def decided(reply: Reply) -> None:
            won = isinstance(reply, wire.StagedDecision) and reply.won
            self.world.seen["staged version decided"] += won
            now_us = self.world.clock.now_us()
            late = any(message.deliver_at_us > now_us for batch in batches for message in batch)
            self.world.seen["staged messages delayed"] += won and late
            self._over(batches, "ok" if won else "none")

        self._ask(request, b"", decided)

    def _over(self, batches: list[list[SentMessage]], outcome: str) -> None:
        self.world.seen["staged version given up"] += outcome == "none"
        for batch in batches:
            for message in batch:
                message.outcome = outcome
        self._busy = False


_PASSING = frozenset(("full", "unavailable", "overloaded", "storage_fault", "timeout"))
"""Refusals that time heals."""
