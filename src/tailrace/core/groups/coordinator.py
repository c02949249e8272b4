"""One partition of the internal topic of groups as a state machine, with the interface of `core.partition`.

The leader of a group's partition is its coordinator. The machine has no messages, only facts. Its parts are
the groups and the recurring schedules whose names hash to it, and the decisions on staged writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from tailrace.core.collections.hash_table import Buffer
from tailrace.core.groups.cron_schedules import CronSchedules
from tailrace.core.groups.group_deletions import GroupDeletions
from tailrace.core.groups.group_membership import GroupMembership
from tailrace.core.model.commands import Done
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.internal_commands import Look
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.staged.staged_versions import StagedVersions
from tailrace.errors import Corrupt

SNAPSHOT_VERSION = 1


class Part(Protocol):
    """One part of the coordinator."""

    COMMANDS: tuple[type, ...]
    FACTS: tuple[type, ...]

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        """Decide a command; changes nothing."""
        ...

    def apply(self, fact: Any) -> None:
        """Apply a fact."""
        ...

    def packed(self) -> bytes:
        """The state for a snapshot."""
        ...

    def load(self, data: bytes) -> None:
        """Restore the state from a snapshot."""
        ...

    def verify(self) -> None:
        """Assert the invariants."""
        ...


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    version: int
    append_time_us: int
    leader_epoch: int
    parts: dict[str, bytes]


class Coordinator:
    """The state of one partition of the internal topic. `decide` never changes it; `apply` takes every
    fact."""

    def __init__(self, options: TopicOptions) -> None:
        self.options = options
        self.start_offset = 0
        self.end_offset = 0
        self.append_time_us = 0
        self.leader_epoch = 0
        self.deletions = GroupDeletions()
        self.groups = GroupMembership(self.deletions)
        self.recurrences = CronSchedules()
        self.staged = StagedVersions()
        self.parts: dict[str, Part] = {
            "groups": self.groups,
            "deletions": self.deletions,
            "recurrences": self.recurrences,
            "staged": self.staged,
        }
        self._decide: dict[type, Callable[[Any, TurnInput], Decision]] = {Look: _nothing}
        self._apply: dict[type, Callable[[Any], None]] = {}
        for part in self.parts.values():
            self._decide.update(dict.fromkeys(part.COMMANDS, part.decide))
            self._apply.update(dict.fromkeys(part.FACTS, part.apply))

    def reconfigure(self, options: TopicOptions) -> None:
        """Take over changed options of the topic; nothing here depends on them."""
        self.options = options

    def bare(self, start_offset: int, end_offset: int) -> Coordinator:
        """An empty coordinator: its log has no messages."""
        return Coordinator(self.options)

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        """Decide a command from the state and the times of the turn alone; time never goes back. Only
        schedules look at the wall clock."""
        return self._decide[type(command)](command, turn.not_before(self.append_time_us))

    def apply(self, fact: Any) -> None:
        """Apply a fact; the same for new facts and at replay."""
        self._apply[type(fact)](fact)
        self.append_time_us = max(self.append_time_us, fact.time_us)

    def apply_after_loss(self, fact: Any) -> None:
        """Like `apply`, if facts before this one are lost: a fact about something unknown, or one that is
        already true, changes nothing. Partitions and members correct the rest, as after a crash."""
        try:
            self.apply(fact)
        except (KeyError, AssertionError):
            return

    def lose(self, end_offset: int) -> None:
        """At replay: facts here in the log are lost."""

    def freeze(self) -> Callable[[], list[Buffer]]:
        """Capture the state now, which is small, and encode it at once."""
        chunks = self.snapshot()
        return lambda: chunks

    def snapshot(self) -> list[Buffer]:
        """A copy of the whole state."""
        parts = {name: part.packed() for name, part in self.parts.items()}
        head = _Snapshot(SNAPSHOT_VERSION, self.append_time_us, self.leader_epoch, parts)
        return [msgspec.msgpack.encode(head)]

    @classmethod
    def restore(cls, options: TopicOptions, chunks: Sequence[Buffer]) -> Coordinator:
        """Restore the coordinator from a snapshot; raises `Corrupt`."""
        coordinator = cls(options)
        try:
            head = msgspec.msgpack.decode(b"".join(chunks), type=_Snapshot)
            if head.version != SNAPSHOT_VERSION:
                raise Corrupt(f"snapshot version {head.version}: this release reads {SNAPSHOT_VERSION}")
            coordinator.append_time_us, coordinator.leader_epoch = head.append_time_us, head.leader_epoch
            for name, data in head.parts.items():
                coordinator.parts[name].load(data)
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            raise Corrupt(f"the snapshot cannot be read: {error}") from error
        return coordinator

    def check(self) -> None:
        """Assert the invariants; for tests and simulation."""
        assert self.start_offset == self.end_offset == 0
        for part in self.parts.values():
            part.verify()


def _nothing(command: Look, turn: TurnInput) -> Decision:
    return Decision(NOTHING, Done())
