"""Hunger: a member waits for messages while others of its group hold more than one; those hear of it.

Members lease ahead of what they handle. Suppose ann has leased 100 messages, handles them one by one, and
bob waits with nothing free for him:

    bob's request waits ──FIRST_US──▶ look: on which partitions do members wait, and who holds messages there?
        ann holds 100 ──▶ her heartbeat is answered: "others wait on orders/0"
        ann's SDK gives back what no handler has begun ──▶ bob is woken

While somebody waits, the look is repeated every `AGAIN_US`. So the cost does not depend on how many requests
come and go.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tailrace.broker.partition.credit_waiters import CreditWaiter
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.topics import Topics
from tailrace.core.model.group_commands import Place
from tailrace.core.process.credit_process import CreditProcess

FIRST_US = 10_000
"""Wait of a request before others hear of it; mostly it gets a message sooner."""
AGAIN_US = 100_000
HELD_MIN = 2
"""Least number of messages in flight of a member that hears of hunger; a single one is being handled."""

Tell = Callable[[str, str, list[Place]], None]
"""Called with a group, a member that holds messages, and the partitions on which others wait."""


class Hunger:
    """Finds members that hold messages while others of their group wait."""

    def __init__(self, topics: Topics, pump: Pump, credit: CreditProcess[CreditWaiter], tell: Tell) -> None:
        self._topics = topics
        self._pump = pump
        self._credit = credit
        self._waiting: dict[str, dict[str, None]] = {}
        """By group: the topics on which requests waited since the last look."""
        self._looked_us: dict[str, int] = {}
        """By group: the time of the last look, if less than `AGAIN_US` ago."""
        self._tell = tell

    def waits(self, group: str, topic: str) -> None:
        """A request for messages of any lane found nothing on a partition of a topic."""
        topics = self._waiting.get(group)
        if topics is not None:
            topics[topic] = None
            return
        self._waiting[group] = {topic: None}
        due_us = max(self._pump.clock.now_us() + FIRST_US, self._looked_us.get(group, 0) + AGAIN_US)
        self._pump.at(due_us, partial(self._look, group))

    def _look(self, group: str, now_us: int) -> None:
        topics = self._waiting.pop(group)
        recent_us = now_us - AGAIN_US
        self._looked_us = {name: time_us for name, time_us in self._looked_us.items() if time_us > recent_us}
        self._looked_us[group] = now_us
        credit = self._credit.find(group)
        if credit is None:
            return
        asked: dict[str, list[Place]] = {}
        still = [topic for topic in topics if self._find(group, topic, asked)]
        for member, places in asked.items():
            if credit.by_member.get(member, 0) >= HELD_MIN:
                self._tell(group, member, places)
        for topic in still:
            self.waits(group, topic)

    def _find(self, group: str, topic: str, asked: dict[str, list[Place]]) -> bool:
        """Add to `asked` the members that hold messages where others wait; true when there are any."""
        host = self._topics.find(topic)
        found = False
        for partition, runtime in enumerate(host.runtimes if host is not None else ()):
            hungry = runtime.wakeups.hungry(group)
            if not hungry:
                continue
            for member in runtime.holders(group):
                if len(hungry) > 1 or member not in hungry:
                    asked.setdefault(member, []).append((topic, partition))
                    found = True
        return found
