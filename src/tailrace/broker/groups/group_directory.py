"""The group directory: routes commands to coordinators, on an internal topic made when first needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tailrace.broker.partition.coordinator_partition import CoordinatorPartition
from tailrace.broker.runtime.turn import NOTHING, error_of
from tailrace.broker.topics import Topics
from tailrace.core.groups.group_state import GroupState
from tailrace.core.model.commands import CreateTopic, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_topic import PARTITIONS, TOPIC, home_of
from tailrace.errors import Corrupt
from tailrace.ports import Respond


class GroupDirectory:
    """Routes commands to the partition of the internal topic that coordinates a name. A broker that never had
    a group, a schedule or a staged write has no such topic."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._waiting: list[tuple[str, Any, Respond]] = []

    def runtimes(self) -> list[CoordinatorPartition]:
        """The partitions of the internal topic; none before the topic exists."""
        return self._topics.coordinators()

    def groups(self) -> Iterator[GroupState]:
        """Every group of every coordinator that is well."""
        for home in self.runtimes():
            yield from home.groups()

    def group(self, name: str) -> GroupState | None:
        """The state of a group at its coordinator; None if there is none, or the coordinator is not well."""
        home = self.home(name)
        return None if home is None else home.group(name)

    def lost(self) -> Refusal | None:
        """Refusal of a coordinator whose storage failed; None if all can be asked."""
        return next((home.lost for home in self.runtimes() if home.lost is not None), None)

    def home(self, name: str) -> CoordinatorPartition | None:
        """The partition that coordinates a name; None before the topic exists."""
        runtimes = self.runtimes()
        return runtimes[home_of(name)] if runtimes else None

    def require_well(self, name: str) -> None:
        """Raise if the coordinator of a name is damaged or its storage failed."""
        home = self.home(name)
        if home is None:
            return
        if home.lost is not None:
            raise error_of(home.lost)
        if home.damage is not None:
            text = f"{name[:80]!r} is coordinated by {TOPIC}/{home.partition}, which is damaged"
            raise Corrupt(f"{text}: {home.damage.message}", outcome="none", **home.damage.details)

    def submit(self, name: str, command: Any, respond: Respond) -> None:
        """Submit a command to the coordinator of a name, after making the topic if needed; the reply comes
        when it is durable."""
        home = self.home(name)
        if home is not None:
            home.submit(command, b"", respond)
            return
        self._waiting.append((name, command, respond))
        if len(self._waiting) == 1:
            self._make()

    def _make(self) -> None:
        storage = self._topics.storage()
        options = {
            "partitions": PARTITIONS,
            "storage": storage,
            "durability": "fsync" if storage == "file" else "memory",
            "ring_buffer_bytes": 0,
        }
        create = CreateTopic(TOPIC, options, if_missing=True)
        self._topics.change(create, self._is_made, by=None)

    def _is_made(self, reply: Reply, parts: Any) -> None:
        waiting, self._waiting = self._waiting, []
        if isinstance(reply, Refusal):
            for _, _, respond in waiting:
                respond(reply, NOTHING)
            return
        for name, command, respond in waiting:
            self.submit(name, command, respond)
