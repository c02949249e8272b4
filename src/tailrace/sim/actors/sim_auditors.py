"""A simulated auditor: it asks again and again how far a topic and its groups are, and nothing may go back.

What a broker tells is durable, or it would not tell it. So the end of a partition never goes back, and the
place of a group only does when the group is reset, whatever fails in between: a sync, the process, the power.
"""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.core.model.commands import LATEST, FindOffsets, Offsets, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import Committed
from tailrace.format.frame import Buffer
from tailrace.sim.actors.surroundings import GroupWorld
from tailrace.sim.delivery_history import require
from tailrace.sim.network import SimulatedLink

EVERY_US = (50_000, 200_000, 500_000)


class SimAuditor:
    """One for a world of durable topics."""

    def __init__(self, world: GroupWorld) -> None:
        self._world = world
        self.line = SimulatedLink(world)
        self._ends: list[int] = []
        self._asked_us = 0
        """When the ends were asked for that were told last."""
        self._places: dict[str, tuple[int, list[int]]] = {}
        """What was told of a group, and when it was asked for."""

    def look(self) -> None:
        """Ask one question, and come again; it never stops."""
        world = self._world
        world.later(world.random.choice(EVERY_US), self.look)
        if world.chance(0.3):
            asked_us = world.clock.now_us()
            request = FindOffsets(world.topic, LATEST)
            self.line.submit(request, b"", lambda reply, parts: self._end_told(asked_us, reply))
        else:
            self._ask_place(world.random.choice(list(world.options)))

    def _end_told(self, asked_us: int, reply: Reply) -> None:
        """Of a quarantined partition one more is told, so that whoever reads from there on is refused."""
        if not isinstance(reply, Offsets):
            return
        before, since_us = self._ends or [0] * len(reply.offsets), self._asked_us
        ill = {one.partition for one in self._world.history.quarantines if one.to_us >= since_us}
        least = [end - (number in ill) for number, end in enumerate(before)]
        back = [pair for pair in zip(least, reply.offsets, strict=True) if pair[1] < pair[0]]
        require(not back, f"the end of a partition was told as {before}, then as {reply.offsets}")
        self._ends, self._asked_us = reply.offsets, asked_us

    def _ask_place(self, group: str) -> None:
        asked_us = self._world.clock.now_us()

        def told(reply: Reply, parts: Sequence[Buffer]) -> None:
            if isinstance(reply, Refusal):
                self._world.seen["place of a group refused"] += reply.code == "storage_fault"
                return
            assert isinstance(reply, Offsets)
            since_us, before = self._places.get(group, (asked_us, reply.offsets))
            self._places[group] = asked_us, reply.offsets
            resets = [reset for reset in self._world.history.resets if reset.group == group]
            if any(reset.result != "none" and reset.replied_us >= since_us for reset in resets):
                return  # One that nobody was told of may come late.
            back = [pair for pair in zip(before, reply.offsets, strict=True) if pair[1] < pair[0]]
            require(not back, f"{group} was told to be at {before}, then at {reply.offsets}")

        self.line.submit(Committed(self._world.topic, group), b"", told)
