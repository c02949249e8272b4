"""Consumers that do what a broker tells them, for tests of groups."""

from typing import Any

from tailrace.broker.partition.coordinator_partition import CoordinatorPartition
from tailrace.core.model.group_commands import (
    DescribeGroup,
    GroupInfo,
    Heartbeat,
    JoinGroup,
    Membership,
)
from tailrace.core.model.queue_commands import Lease
from tests.broker.held_engine import HeldEngine


class Members:
    """A broker with a topic, and consumers that follow what they are told."""

    def __init__(self, partitions: int = 6, store: Any = None, **options: Any) -> None:
        self.broker = HeldEngine(store)
        self.broker.create(partitions=partitions)
        self.options = options
        self.known: dict[str, Membership] = {}

    def join(
        self, *members: str, group: str = "g", topics: tuple[str, ...] = ("t",), **fields: Any
    ) -> Membership:
        for member in members:
            request = JoinGroup(group, member, list(topics), self.options, **fields)
            self.known[member] = self.broker.ask(request)
            assert isinstance(self.known[member], Membership), self.known[member]
        return self.known[members[-1]]

    def beat(self, member: str, *, release: bool = True, group: str = "g") -> Membership:
        known = self.known[member]
        released = known.revoking if release else []
        reply = self.broker.ask(Heartbeat(group, member, known.version, released))
        assert isinstance(reply, Membership), reply
        self.known[member] = reply
        return reply

    def follow(self) -> None:
        """All members do what they are told until there is nothing more to do."""
        for _ in range(10):
            before = dict(self.known)
            for member in self.known:
                self.beat(member)
            if before == self.known:
                return
        raise AssertionError("no rest")

    def owned(self, member: str) -> set[tuple[str, int]]:
        return {(topic, number) for topic, number, _ in self.known[member].owned}

    def poll(self, member: str, wait_ms: int = 10_000) -> list[Any]:
        """The answers to a long poll: empty while it waits."""
        return self.broker.submit(Heartbeat("g", member, self.known[member].version, [], wait_ms))

    def partitions(self, group: str = "g") -> list[dict[str, Any]]:
        info = self.broker.ask(DescribeGroup(group))
        assert isinstance(info, GroupInfo), info
        return info.partitions

    def lease(self, member: str, number: int, generation: int | None = None, group: str = "g") -> Any:
        if generation is None:
            generation = next(g for _, n, g in self.known[member].owned if n == number)
        return self.broker.ask(Lease("t", group, member, [(number, generation)]))


def coordinators(group: Members) -> list[CoordinatorPartition]:
    return group.broker.engine.coordinators.runtimes()
