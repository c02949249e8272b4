"""Simulated senders to a queue: keys, priorities, ends, delays, dedup ids; and cancellations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import Publish, Published, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.format import batch as arrow
from tailrace.format.frame import Buffer, crc32c
from tailrace.sim.actors.surroundings import TopicWorld
from tailrace.sim.delivery_history import SentMessage
from tailrace.sim.network import SimulatedLink
from tailrace.sim.virtual_time import SECOND_US

KINDS = ("plain", "plain", "keyed", "keyed", "lanes", "ends", "delayed", "dedup", "mixed")
KEYS = (b"a", b"b", b"c")


class SimPublisher:
    """Sends batches; those with dedup ids again and again until they have an answer."""

    def __init__(self, world: TopicWorld) -> None:
        self.world = world
        self.line = SimulatedLink(world)
        self._count = 0

    def send(self) -> None:
        """One batch of some kind."""
        world, random = self.world, self.world.random
        kind = random.choice(KINDS)
        partition, now_us = random.randrange(world.partitions), world.clock.now_us()
        messages = []
        for _ in range(random.choice((1, 1, 3, 8))):
            message = SentMessage(world.value(), partition, random.randbytes(16), now_us)
            if kind in ("keyed", "mixed", "delayed") and random.random() < 0.8:
                message.key = random.choice(KEYS)
            if kind in ("lanes", "mixed"):
                message.priority = random.randrange(5)
            if kind in ("ends", "mixed") and random.random() < 0.5:
                message.expires_us = now_us + random.choice((300_000, 2 * SECOND_US, 60 * SECOND_US))
            if kind == "dedup":
                message.dedup_id = message.value
            messages.append(message)
            world.history.messages[message.value] = message
        if kind == "delayed" or (kind in ("mixed", "dedup") and random.random() < 0.2):
            for message in messages:
                ahead = random.choice((-SECOND_US, 5_000, 100_000, SECOND_US, 5 * SECOND_US))
                message.deliver_at_us = max(1, now_us + ahead)
            world.seen["delayed"] += 1
            if random.random() < 0.3:
                delay_us = random.choice((10_000, 300_000, SECOND_US, 4 * SECOND_US))
                world.later(delay_us, lambda: self.cancel(messages))
        self.publish(messages)

    def publish(self, messages: list[SentMessage]) -> None:
        """Send messages of one partition as one batch."""
        world = self.world
        columns, body = arrow.encode(
            [message.value for message in messages],
            ids=b"".join(message.id for message in messages),
            timestamps=messages[0].sent_us,
            keys=_some([message.key for message in messages]),
            priorities=[m.priority for m in messages] if any(m.priority != 2 for m in messages) else None,
            deliver_at=[m.deliver_at_us for m in messages] if messages[0].deliver_at_us else None,
            expires_at=_some([m.expires_us or None for m in messages]),
            dedup_ids=_some([message.dedup_id for message in messages]),
        )
        request = Publish(world.topic, messages[0].partition, columns, crc32c(body))

        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            again = messages[0].dedup_id is not None
            if isinstance(reply, Published):
                outcome = "ok"
                world.seen["duplicate"] += bool(reply.duplicates)
            else:
                assert isinstance(reply, Refusal)
                outcome = "none" if reply.outcome == "none" else "unknown"
            for message in messages:
                if message.outcome in ("pending", "none") or outcome == "ok":
                    message.outcome = outcome
            if again and (outcome != "ok" or (not world.healed and world.chance(0.2))):
                world.later(world.random.choice((1_000, 500_000)), lambda: self.publish(messages))

        self.line.submit(request, body, answered)

    def cancel(self, messages: list[SentMessage]) -> None:
        """Cancel some of a batch; a wrong place to look must not matter."""
        world, some = self.world, messages[:: self.world.random.choice((1, 2))]
        times = [message.deliver_at_us if world.chance(0.7) else 0 for message in some]
        first = [message.outcome == "ok" and not message.cancel_asked for message in some]
        for message in some:
            message.cancel_asked = True
        request = wire.CancelScheduled(
            world.topic, some[0].partition, [message.id for message in some], times
        )

        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            now_us = world.clock.now_us()
            if not isinstance(reply, wire.Cancelled):
                return
            for message, done, only in zip(some, reply.done, first, strict=True):
                if done:
                    world.seen["cancelled"] += 1
                    message.cancelled_us = message.cancelled_us or now_us
                elif only:
                    world.seen["too late to cancel"] += 1
                    message.kept_us = now_us
            if world.chance(0.2):
                self.cancel(some)

        self.line.submit(request, b"", answered)


def _some(items: list[Any]) -> list[Any] | None:
    return items if any(item is not None for item in items) else None
