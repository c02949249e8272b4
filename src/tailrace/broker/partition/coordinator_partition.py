"""A partition of the internal topic of groups at work: a coordinator with its log, and no messages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from tailrace.broker.metrics import Metrics
from tailrace.broker.runtime.partition_runtime import PartitionRuntime
from tailrace.broker.runtime.process_driver import Processes
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.state_machines import MachineKind
from tailrace.broker.runtime.turn import Turn
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.groups.cron_schedules import CronSchedule
from tailrace.core.groups.group_state import GroupState
from tailrace.core.model.group_commands import Place
from tailrace.core.model.group_facts import CoordinationFact
from tailrace.core.model.topic_options import TopicOptions
from tailrace.format import codec
from tailrace.ports import LogStore

INTERNAL_BYTES = 1024 * 1024
"""Bytes written to an internal log after which segments that snapshots cover are freed."""


class CoordinatorListeners(NamedTuple):
    """Who hears of all coordinators."""

    processes: Callable[[CoordinatorPartition], Processes]
    """Makes the protocols of a coordinator with data partitions."""
    reopened: Callable[[CoordinatorPartition], None]
    """The state of this coordinator was rebuilt from the log."""


class CoordinatorPartition(PartitionRuntime[Coordinator]):
    """Coordinates the groups, cron schedules and staged writes whose names hash to it."""

    machine = MachineKind(Coordinator, Coordinator.restore, codec.facts_decoder(CoordinationFact))

    def __init__(
        self,
        name: str,
        topic: str,
        options: TopicOptions,
        store: LogStore,
        pump: Pump,
        metrics: Metrics,
        listeners: CoordinatorListeners,
        *,
        known: bool = False,
    ) -> None:
        super().__init__(name, topic, options, store, pump, metrics)
        self._listeners = listeners
        self.processes = listeners.processes(self)
        self.open(known=known)

    def _wrote(self, turn: Turn) -> None:
        super()._wrote(turn)
        debt = self.upkeep.debt
        if debt.bytes > max(INTERNAL_BYTES, 2 * debt.snapshot_bytes):
            self.upkeep.free()

    def _reopened(self) -> None:
        self._listeners.reopened(self)

    # -- what requests ask

    @property
    def well(self) -> bool:
        """Whether it knows all that was decided: it is not damaged, and its storage has not failed. Otherwise
        it has no answers below."""
        return self.lost is None and self.damage is None

    def group(self, name: str) -> GroupState | None:
        """A group; None if there is none."""
        return self.state.groups.by_name.get(name) if self.well else None

    def groups(self) -> Collection[GroupState]:
        """All groups."""
        return list(self.state.groups.by_name.values()) if self.well else ()

    def deletes(self, group: str, number: int, place: Place) -> bool:
        """Whether a partition still has to forget the group with this id."""
        return self.well and number in self.state.deletions.ids(group, place)

    def schedule(self, name: str) -> CronSchedule | None:
        """A schedule; None if there is none."""
        return self.state.recurrences.by_name.get(name) if self.well else None

    def schedules(self) -> Collection[CronSchedule]:
        """All schedules."""
        return list(self.state.recurrences.by_name.values()) if self.well else ()

    def decided_topics(self, writer: str) -> Collection[str]:
        """The topics of the last decided version of a writer."""
        last = self.state.staged.last(writer) if self.well else None
        return () if last is None else last.topics

    def shorten_replay(self) -> None:
        """Take a snapshot, and free the segments that snapshots cover: nobody reads this log."""
        self.upkeep.free()
