"""Recurring schedules as state: what is published when, and the last tick of each."""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.core.core_tuning import SCHEDULES_MAX
from tailrace.core.model.commands import Done
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.group_commands import DeleteSchedule, PutSchedule
from tailrace.core.model.group_facts import ScheduleDeleted, SchedulePut, ScheduleTicked
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import TickDone
from tailrace.core.model.turn_input import TurnInput
from tailrace.errors import NotFound, Overloaded


class CronSchedule(msgspec.Struct, frozen=True, array_like=True):
    """A schedule and its last tick (0: none yet). `since_us` is when it was created: earlier ticks do not
    count. Both are wall times."""

    put: PutSchedule
    since_us: int
    last_us: int = 0

    @property
    def after_us(self) -> int:
        """The time after which the next tick is looked for."""
        return max(self.since_us, self.last_us)


class CronSchedules:
    """The schedules of one coordinator."""

    COMMANDS: tuple[type, ...] = (PutSchedule, DeleteSchedule, TickDone)
    FACTS: tuple[type, ...] = (SchedulePut, ScheduleDeleted, ScheduleTicked)

    def __init__(self) -> None:
        self.by_name: dict[str, CronSchedule] = {}

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        """Decide a command."""
        if isinstance(command, PutSchedule):
            return self._put(command, turn)
        known, now_us = self.by_name.get(command.name), turn.now_us
        if isinstance(command, TickDone):
            if known is None or command.tick_us <= known.last_us:
                return Decision(NOTHING, Done())
            return Decision((ScheduleTicked(command.name, command.tick_us, now_us),), Done())
        if known is None:
            return Decision(NOTHING, Refusal(NotFound.code, f"there is no schedule {command.name[:80]!r}"))
        return Decision((ScheduleDeleted(command.name, now_us),), Done())

    def _put(self, put: PutSchedule, turn: TurnInput) -> Decision:
        known = self.by_name.get(put.name)
        if known is None and len(self.by_name) >= SCHEDULES_MAX:
            text = f"this coordinator has {SCHEDULES_MAX} schedules, and that is the most there can be"
            return Decision(NOTHING, Refusal(Overloaded.code, text))
        if known is not None and known.put == put:
            return Decision(NOTHING, Done())
        fields = {field: getattr(put, field) for field in PutSchedule.__struct_fields__}
        return Decision((SchedulePut(**fields, time_us=turn.now_us, wall_us=turn.wall_us),), Done())

    def apply(self, fact: Any) -> None:
        """Apply a fact."""
        if isinstance(fact, SchedulePut):
            fields = {field: getattr(fact, field) for field in PutSchedule.__struct_fields__}
            known = self.by_name.get(fact.name)
            last_us = 0 if known is None else known.last_us
            self.by_name[fact.name] = CronSchedule(
                PutSchedule(**fields), fact.wall_us or fact.time_us, last_us
            )
        elif isinstance(fact, ScheduleTicked):
            known = self.by_name[fact.name]
            self.by_name[fact.name] = msgspec.structs.replace(known, last_us=fact.tick_us)
        else:
            del self.by_name[fact.name]

    def packed(self) -> bytes:
        """The state for a snapshot."""
        return msgspec.msgpack.encode(list(self.by_name.values()))

    def load(self, data: bytes) -> None:
        """Restore the state from a snapshot."""
        known = msgspec.msgpack.decode(data, type=list[CronSchedule])
        self.by_name = {recurrence.put.name: recurrence for recurrence in known}

    def verify(self) -> None:
        """Assert the invariants."""
        for name, recurrence in self.by_name.items():
            assert recurrence.put.name == name
            assert recurrence.since_us >= 0
