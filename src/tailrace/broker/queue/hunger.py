"""Hunger: a member waits for messages while others of its group hold more than one; those are told of it.

Members lease somewhat ahead of what they handle. When another one waits and nothing is free for it, whoever
holds messages of the same partitions hears of it through its heartbeat, and gives back what it has not begun.
It is looked for a moment after a request began to wait, then again and again while one waits, so that its
cost does not depend on how many requests come and go.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.broker.queue.credit_waiters import CreditWaiters
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.topics import Topics
from tailrace.core.model.group_commands import Place

FIRST_US = 10_000
"""So long somebody waits before others are told: mostly there is something sooner than that."""
AGAIN_US = 100_000
HELD_MIN = 2
"""Whoever holds a single message is at work on it."""


class Hunger:
    """The groups in which somebody waits."""

    def __init__(self, topics: Topics, pump: Pump, credit: CreditWaiters) -> None:
        self._topics = topics
        self._pump = pump
        self._credit = credit
        self._waiting: dict[str, dict[str, None]] = {}
        """By group: the topics on which somebody waited since it was last looked at."""
        self._looked_us: dict[str, int] = {}
        """By group: when it was looked at last, if that is less than `AGAIN_US` ago."""
        self.tell: Callable[[str, str, list[Place]], None] = lambda group, member, places: None
        """Called with a group, a member that holds messages, and where others wait for some."""

    def waits(self, group: str, topic: str) -> None:
        """A request that takes anything found nothing on a partition."""
        topics = self._waiting.get(group)
        if topics is not None:
            topics[topic] = None
            return
        self._waiting[group] = {topic: None}
        due_us = max(self._pump.clock.now_us() + FIRST_US, self._looked_us.get(group, 0) + AGAIN_US)
        self._pump.at(due_us, lambda now_us: self._look(group, now_us))

    def _look(self, group: str, now_us: int) -> None:
        topics = self._waiting.pop(group)
        recent_us = now_us - AGAIN_US
        self._looked_us = {name: time_us for name, time_us in self._looked_us.items() if time_us > recent_us}
        self._looked_us[group] = now_us
        flights = self._credit.flights.find(group)
        if flights is None:
            return
        asked: dict[str, list[Place]] = {}
        still = [topic for topic in topics if self._find(group, topic, asked)]
        for member, places in asked.items():
            if flights.by_member.get(member, 0) >= HELD_MIN:
                self.tell(group, member, places)
        for topic in still:
            self.waits(group, topic)

    def _find(self, group: str, topic: str, asked: dict[str, list[Place]]) -> bool:
        """Note who holds messages of partitions of a topic where others wait; whether any do."""
        host = self._topics.find(topic)
        found = False
        for partition, shard in enumerate(host.shards if host is not None else ()):
            hungry = shard.wakeups.hungry(group)
            if not hungry:
                continue
            for member in shard.state.queues.holders(group):
                if len(hungry) > 1 or member not in hungry:
                    asked.setdefault(member, []).append((topic, partition))
                    found = True
        return found
