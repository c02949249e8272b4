"""The history of messages as a fold over the facts that name them: there is no second store of traces.

`MessageHistory` is one message, `MessageHistories` the messages that are followed through the log of one
partition. The fold says what happened (`trace_fold`). Here, each event is added to the messages that it
concerns, and changes their status for a group:

    free ──delivered──▶ leased ──acked──▶ settled ──redriven──▶ free
     ▲                    │ ├──nacked──▶ waiting (until it is delivered again)
     └──expired, given───┘ └──dying──▶ dying ──dead_lettered──▶ dead
        back
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tailrace.core.core_tuning import EVENTS_MAX, TEXT_MAX
from tailrace.core.model import facts as f
from tailrace.core.trace.trace_fold import NO_OFFSETS, GroupTrace, Offsets, TraceEvent, TraceFold

FREE, LEASED, WAITING, SETTLED, DYING, DEAD = "free", "leased", "waiting", "settled", "dying", "dead"
SCHEDULED, CANCELLED, STAGED, DROPPED = "scheduled", "cancelled", "staged", "dropped"
COLLECTED, MIXED = "collected", "mixed"
STATUSES = (
    FREE,
    LEASED,
    WAITING,
    SETTLED,
    DYING,
    DEAD,
    SCHEDULED,
    CANCELLED,
    STAGED,
    DROPPED,
    COLLECTED,
    MIXED,
)


_AFTER = {
    "delivered": LEASED,
    "acked": SETTLED,
    "nacked": WAITING,
    "expired": FREE,
    "given_back": FREE,
    "dying": DYING,
    "dead_lettered": DEAD,
    "lapsed": SETTLED,
    "settled": SETTLED,
    "redriven": FREE,
}
"""The status for a group after an event."""
_APPLIED = ("applied", "scheduled")
"""Events of a staged message whose version is applied."""

Event = dict[str, Any]


class MessageHistory:
    """One message: its fields, its events, and its status for each group."""

    def __init__(
        self, known: dict[str, Any], *, offset: int | None, ref: int = -1, attempt: int = -1
    ) -> None:
        self.known = known
        """Fields for the answer: partition, id, key, …"""
        self.offset = offset
        self.ref = ref
        """The ref of a delayed message: entry << 20 | row in its scheduled frame."""
        self.attempt = attempt
        """The number of the attempt of a staged message."""
        self.events: list[Event] = []
        self.statuses: dict[int, str] = {}
        """The status for each group."""
        self.state = ""
        """A status for all groups: scheduled, cancelled, staged, dropped, collected; else empty."""
        self.cut = False
        """Whether the message has had more events than are kept."""

    def event(self, time_us: int, what: str, **more: Any) -> None:
        """Add an event; empty details are left out."""
        if len(self.events) >= EVENTS_MAX:
            self.cut = True
            return
        self.events.append(
            {"time_us": time_us, "event": what, **{k: v for k, v in more.items() if v not in ("", None)}}
        )

    def status(self) -> str:
        """The status for all groups; "mixed" if they differ."""
        if self.state:
            return self.state
        found = set(self.statuses.values())
        if len(found) > 1:
            return MIXED
        return found.pop() if found else FREE


class MessageHistories(TraceFold):
    """The messages that are followed through one log. `names` are the present names of groups by number."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__(names)
        self.lives: list[MessageHistory] = []
        self._offsets: list[int] = []
        self._by_offset: dict[int, MessageHistory] = {}
        self._do_more: dict[type, Callable[[Any], None]] = {
            f.ScheduleCancelled: self._cancelled,
            f.StageApplied: self._stage_applied,
            f.StageDropped: self._stage_dropped,
        }

    def add(self, life: MessageHistory) -> None:
        """Follow one more message."""
        self.lives.append(life)
        if life.offset is not None:
            self._place(life, life.offset)

    def appended(self, life: MessageHistory, offset: int) -> None:
        """A delayed or staged message got its offset."""
        life.offset, life.state = offset, ""
        self._place(life, offset)

    def _place(self, life: MessageHistory, offset: int) -> None:
        insort(self._offsets, offset)
        self._by_offset[offset] = life

    def concerns(self, base: int, end: int) -> bool:
        """Whether facts about the offsets [base, end) may concern a message that is followed; an empty range:
        all offsets."""
        if base >= end:
            return bool(self.lives)
        at = bisect_left(self._offsets, base)
        return at < len(self._offsets) and self._offsets[at] < end

    def apply(self, fact: Any, time_us: int) -> None:
        """Apply a fact. `time_us` is the time of its frame, for trims, which have no time of their own."""
        if isinstance(fact, f.Trimmed):
            self._trimmed(fact.offset, time_us)
        elif (do := self._do_more.get(type(fact))) is not None:
            do(fact)
        else:
            self._apply(fact)

    def finish(self, committed: dict[int, int]) -> None:
        """Set the status for groups without a fact about a message, by the first unsettled offset of each
        group."""
        for life, offset in self._placed():
            for group, first in committed.items():
                life.statuses.setdefault(group, _from(first, offset))

    # ------------------------------------------------------------------------------------- what the fold says

    def chosen(self, spans: list[int]) -> Offsets:
        """See `TraceFold.chosen`: those of messages that are followed."""
        offsets, found = self._offsets, []
        for number in range(0, len(spans), 2):
            at = bisect_left(offsets, spans[number])
            found += offsets[at : bisect_left(offsets, spans[number + 1], at)]
        return np.array(found, np.int64) if found else NO_OFFSETS

    def told(self, event: TraceEvent) -> None:
        """See `TraceFold.told`."""
        assert event.group is not None
        group, what = event.group, event.event
        for row, offset in enumerate(event.offsets.tolist()):
            life = self._by_offset[offset]
            details = _details(event, row, offset)
            life.event(event.time_us, what, group=group.name, member=event.member, **details)
            if what in _AFTER:
                life.statuses[group.number] = _AFTER[what]

    def _placed(self) -> Iterator[tuple[MessageHistory, int]]:
        return ((life, life.offset) for life in self.lives if life.offset is not None)

    def _enlisted(self, fact: f.Enlisted, group: GroupTrace) -> None:
        super()._enlisted(fact, group)
        for life, offset in self._placed():  # It may be there already, and only has other options now.
            life.statuses.setdefault(fact.group, _from(fact.start, offset))

    def _delisted(self, fact: f.Delisted, group: GroupTrace) -> None:
        super()._delisted(fact, group)
        for life in self.lives:
            if life.statuses.pop(fact.group, None) is not None:
                life.event(fact.time_us, "group_deleted", group=group.name)

    def _extended(self, fact: f.LeaseExtended, group: GroupTrace) -> None:
        for lease in fact.leases:
            known = {"member": group.member(lease), "due_us": fact.deadline_us}
            self._tell("extended", fact, group, group.held(lease), **known)

    def _reset(self, fact: f.GroupReset, group: GroupTrace) -> None:
        group.clear()
        for life, offset in self._placed():
            life.statuses[fact.group] = _from(fact.offset, offset)
            life.event(fact.time_us, "reset", group=group.name, to_offset=fact.offset)

    def _cursor_moved(self, fact: f.CursorMoved, group: GroupTrace) -> None:
        for life, offset in self._placed():
            status = _from(fact.offset, offset)
            if life.statuses.get(fact.group, FREE) != status:
                what = "committed" if status == SETTLED else "rewound"
                life.event(fact.time_us, what, group=group.name, member=fact.member)
            life.statuses[fact.group] = status

    # ----------------------------------------------------------------------- delays, staging, the log itself

    def _cancelled(self, fact: f.ScheduleCancelled) -> None:
        refs = set(fact.refs)
        for life in self.lives:
            if life.ref in refs and life.state == SCHEDULED:
                life.state = CANCELLED
                life.event(fact.time_us, "cancelled")

    def _stage_applied(self, fact: f.StageApplied) -> None:
        numbers = set(fact.attempts)
        for life in self.lives:
            if life.attempt in numbers and life.events and life.events[-1]["event"] in _APPLIED:
                life.events[-1].update(writer=fact.writer, version=fact.version)

    def _stage_dropped(self, fact: f.StageDropped) -> None:
        numbers = set(fact.attempts)
        for life in self.lives:
            if life.attempt in numbers and life.state == STAGED:
                life.state = DROPPED
                life.event(fact.time_us, "dropped")

    def _trimmed(self, offset: int, time_us: int) -> None:
        gone = self._offsets[: bisect_left(self._offsets, offset)]
        for group in self._groups.values():
            group.settled(np.array(gone, np.int64))
        for life in map(self._by_offset.__getitem__, gone):
            if life.state == COLLECTED:
                continue
            life.state = COLLECTED
            left = [number for number, status in life.statuses.items() if status not in (SETTLED, DEAD)]
            life.statuses.update(dict.fromkeys(left, COLLECTED))
            life.event(time_us, "collected", unsettled=[self.name(number) for number in left] or None)


def _from(first: int, offset: int) -> str:
    """The status of a message for a group that has settled all before `first`, and nothing else."""
    return FREE if offset >= first else SETTLED


def _details(event: TraceEvent, row: int, offset: int) -> dict[str, Any]:
    """What else is told of a message, by the kind of event."""
    what, delay_us = event.event, None if event.due_us is None else event.due_us - event.time_us
    failures = 0 if event.failures is None else int(event.failures[row])
    error = (event.error or "")[:TEXT_MAX]
    if what == "delivered":
        assert event.deliveries is not None
        delivery = int(event.deliveries[row])
        return {"attempt": failures + 1, "delivery": delivery, "deadline_us": event.due_us}
    if what == "extended":
        return {"deadline_us": event.due_us}
    if what == "expired":
        return {"attempt": failures}
    if what == "nacked":
        return {"attempt": failures, "error": error, "delay_us": delay_us}
    if what == "given_back":
        return {"reason": event.reason}
    if what == "dying":
        return {"attempt": failures or None, "reason": event.reason, "error": error}
    if event.buried is not None:
        partition, place = _places(event.buried).get(offset, (None, None))
        return {"topic": event.buried.topic, "partition": partition, "offset": place}
    return {}


def _places(fact: f.Buried) -> dict[int, tuple[int, int]]:
    """The dead letter of each offset of the fact, as (partition, offset)."""
    places = fact.places
    offsets = [
        offset
        for number in range(0, len(fact.spans), 2)
        for offset in range(fact.spans[number], fact.spans[number + 1])
    ]
    if len(places) != 2 * len(offsets):
        return {}
    return {offset: (places[2 * at], places[2 * at + 1]) for at, offset in enumerate(offsets)}
