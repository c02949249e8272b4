"""A partition with one group and a clock, for tests of the queue: commands in, offsets out."""

from __future__ import annotations

from typing import Any

from tailrace.core.model import internal_commands as inner
from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import Done, Publish
from tailrace.core.model.decision import Decision
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import BatchView
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.partition import Partition
from tests.core.delivery_model import Letter
from tests.core.modelled_partition import Shelf
from tests.core.turns import at

SECOND = 1_000_000
T0 = 1_000 * SECOND


class Desk:
    """A partition with one group `g`, that belongs to `ada`, and a clock."""

    def __init__(self, *letters: Letter, **policy: Any) -> None:
        self.partition = Partition(TopicOptions())
        self.shelf = Shelf()
        self.now_us = T0
        self.facts: list[Any] = []
        self.leases = 0
        if letters:
            self.publish(*letters)
        self.policy = GroupPolicy(**policy)
        self.do(inner.Enlist("g", self.policy))
        if self.policy.assignment != "shared":
            self.do(inner.GrantTo("g", "ada", 1))

    def publish(self, *letters: Letter) -> None:
        columns = self.shelf.add(list(letters), self.partition.end_offset, self.now_us)
        lanes = self.shelf.frames[-1].priorities
        view = BatchView(len(letters), columns, 100 * len(letters), self.now_us, priorities=lanes)
        self.do(inner.PublishBatch(Publish("t", 0, columns, 0), view))

    def turn(self) -> TurnInput:
        """What a decision is made with now."""
        return at(self.now_us, self.shelf)

    def do(self, command: Any) -> Decision:
        """Decide and apply; frames that are missing come."""
        while (decision := self.partition.decide(command, self.turn())).missing is not None:
            self.shelf.load(decision.missing)
        for fact in decision.facts:
            self.partition.apply(fact)
        self.facts += decision.facts
        self.partition.check()
        return decision

    def ask(self, member: str = "ada", count: int = 100, **fields: Any) -> Any:
        """The reply to a request for messages."""
        self.leases += 1
        _, generation = self.partition.queues.grant("g") or ("", 0)
        command = inner.LeaseRun("g", member, generation, self.leases, count, 1 << 20, 1 << 40)
        for name, value in {"end_offset": self.partition.end_offset, **fields}.items():
            command = _replaced(command, name, value)
        return self.do(command).reply

    def lease(self, member: str = "ada", count: int = 100, **fields: Any) -> list[int]:
        """The offsets that a member gets, in the order of delivery."""
        reply = self.ask(member, count, **fields)
        if isinstance(reply, Done):
            return []
        return [first + i for first, many, _, _ in reply.runs for i in range(many)]

    def ack(self, *spans: int, lease: int | None = None) -> list[int]:
        """Settle through the newest lease; what was lost."""
        number = lease or self.leases
        reply: Any = self.do(wire.Ack("t", 0, "g", [(number, list(spans))])).reply
        return [part for _, parts in reply.lost for part in parts]

    def nack(self, *spans: int, lease: int | None = None, **fields: Any) -> list[int]:
        reply: Any = self.do(wire.Nack("t", 0, "g", lease or self.leases, list(spans), **fields)).reply
        return [part for _, parts in reply.lost for part in parts]

    def wait(self, seconds: float) -> Decision:
        """Let time pass. Like the shell, the desk expires leases then, and hears what has come due."""
        self.now_us += round(seconds * SECOND)
        decision = self.do(inner.ExpireLeases())
        self.partition.queues.came_due(self.now_us)
        return decision

    def figures(self) -> dict[str, Any]:
        return self.partition.queues.figures("g")


def _replaced(command: Any, name: str, value: Any) -> Any:
    fields = {field: getattr(command, field) for field in command.__struct_fields__}
    return type(command)(**{**fields, name: value})


def plain(count: int) -> list[Letter]:
    return [Letter()] * count


def keyed(keys: str) -> list[Letter]:
    return [Letter(None if key == "-" else key) for key in keys]
