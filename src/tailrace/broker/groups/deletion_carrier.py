"""The deletion carrier: carries deletions of groups to the data partitions until each has confirmed.

    GroupDeleted, synced on the coordinator ──▶ Delisted, synced on each partition ──▶ GroupForgotten

Each step is durable before the next begins; the last one may be repeated. A faulty partition, or one whose
topic is unknown, has not confirmed: its deletion is kept, and tried again when the partition is opened or at
the next start. Only a topic that the catalog records as deleted takes its groups along.

A group that a partition knows and no coordinator does is a *stranger*: it is reported and kept, until it is
joined, enlisted again or deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from tailrace.broker.groups.group_directory import GroupDirectory
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING
from tailrace.broker.topics import Topics
from tailrace.core.groups.group_deletions import GroupDeletion
from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.group_commands import Place
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import ConfirmForgotten, Delist, Look
from tailrace.core.model.internal_topic import home_of
from tailrace.ports import Respond

log = logging.getLogger("tailrace.groups")

RETRY_US = 1_000_000


class DeletionCarrier:
    """Carries deletions to the partitions, and finds groups that no coordinator knows."""

    def __init__(self, topics: Topics, pump: Pump, coordinators: GroupDirectory) -> None:
        self._topics = topics
        self._pump = pump
        self._coordinators = coordinators
        self._under_way: dict[str, set[tuple[int, Place]]] = {}
        self._left: dict[str, list[Callable[[], None]]] = {}

    def leaving(self, group: str) -> bool:
        """Whether some partition is about to forget a deleted group of this name."""
        return group in self._under_way

    def when_left(self, group: str, action: Callable[[], None]) -> None:
        """Call `action` when every working partition has forgotten a group."""
        self._left.setdefault(group, []).append(action)
        self._check_left(group)

    def carry_all(self) -> None:
        """Carry all deletions, once they are durable: at a start, and when a partition comes back."""
        for runtime, machine in self._coordinators.machines():
            deletions = list(machine.deletions.pending())
            if deletions and runtime.fault is None:
                runtime.submit(Look(), b"", self._looked(deletions))

    def _looked(self, deletions: list[GroupDeletion]) -> Respond:
        def answered(reply: Reply, parts: Any) -> None:
            if not isinstance(reply, Refusal):
                for deletion in deletions:
                    self._carry(deletion)

        return answered

    def carry(self, group: str) -> None:
        """Carry the deletions of a group, which must be durable."""
        machine = self._coordinators.of(group)
        for deletion in () if machine is None else list(machine.deletions.pending()):
            if deletion.group == group:
                self._carry(deletion)

    def _carry(self, deletion: GroupDeletion) -> None:
        busy = self._under_way.setdefault(deletion.group, set())
        gone: list[Place] = []
        for topic, number, topic_id in deletion.places:
            place = (topic, number)
            if self._topics.catalog.was_deleted(topic_id):
                gone.append(place)
                continue
            runtime = self._runtime(place, topic_id)
            if runtime is not None and runtime.fault is None and (deletion.id, place) not in busy:
                busy.add((deletion.id, place))
                self._delist(deletion, place, runtime)
        self._confirm(deletion, gone)
        self._check_left(deletion.group)

    def _runtime(self, place: Place, topic_id: int) -> QueuePartition | None:
        host = self._topics.find(place[0])
        if host is None or place[1] >= len(host.runtimes) or topic_id not in (0, host.info.id):
            return None
        return host.runtimes[place[1]]

    def _delist(self, deletion: GroupDeletion, place: Place, runtime: QueuePartition) -> None:
        def answered(reply: Reply, parts: Any) -> None:
            if isinstance(reply, Refusal) and runtime.fault is None:
                later_us = self._pump.clock.now_us() + RETRY_US
                self._pump.at(later_us, lambda now_us: self._delist(deletion, place, runtime))
                return
            self._under_way[deletion.group].discard((deletion.id, place))
            if not isinstance(reply, Refusal):
                self._confirm(deletion, [place])
            self._check_left(deletion.group)

        runtime.submit(Delist(deletion.group, deletion.id), b"", runtime.surely(answered))

    def _confirm(self, deletion: GroupDeletion, places: list[Place]) -> None:
        if places:
            confirm = ConfirmForgotten(deletion.group, deletion.id, places)
            self._coordinators.submit(deletion.group, confirm, lambda reply, parts: None)

    def _check_left(self, group: str) -> None:
        if not self._under_way.get(group):
            self._under_way.pop(group, None)
            for action in self._left.pop(group, ()):
                action()

    # -- strangers

    def strangers(self) -> dict[str, list[QueuePartition]]:
        """Groups that no coordinator knows, each with the partitions that do. Groups whose coordinator is
        faulty are left out, because nobody can tell what it knows."""
        runtimes = self._coordinators.runtimes()
        found: dict[str, list[QueuePartition]] = {}
        for runtime in self._topics.queues():
            if runtime.lost is not None:
                continue
            place = (runtime.topic, runtime.partition)
            for name in runtime.state.queues.names():
                if runtimes and runtimes[home_of(name)].fault is not None:
                    continue
                machine = self._coordinators.of(name)
                known = machine is not None and (
                    name in machine.groups.by_name
                    or runtime.state.queues.id_of(name) in machine.deletions.ids(name, place)
                )
                if not known:
                    found.setdefault(name, []).append(runtime)
        return found

    def report(self) -> None:
        """Log the groups that no coordinator knows."""
        for name, runtimes in self.strangers().items():
            text = "group %r is on %d partitions, such as %s/%d, and no coordinator knows it: it is kept"
            log.error(text, name, len(runtimes), runtimes[0].topic, runtimes[0].partition)

    def expel(self, group: str, runtimes: Iterable[QueuePartition], respond: Respond) -> None:
        """Delete a stranger: let its partitions forget it, and answer when all have."""
        waiting, problem = 0, None

        def answered(reply: Reply, parts: Any) -> None:
            nonlocal waiting, problem
            waiting -= 1
            if isinstance(reply, Refusal):
                problem = reply
            if not waiting:
                respond(problem or Done(), NOTHING)

        for runtime in runtimes:
            waiting += 1
            runtime.submit(Delist(group), b"", runtime.surely(answered))
