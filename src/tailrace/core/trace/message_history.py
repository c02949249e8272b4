"""The history of messages as a fold over the facts that name them: there is no second store of traces.

`MessageHistory` is one message, `MessageHistories` the messages that are followed through the log of one
partition. Facts come in the order of the log. Each fact adds an event to the messages that it concerns, and
changes their status for a group:

    free ──delivered──▶ leased ──acked──▶ settled ──redriven──▶ free
     ▲                    │ ├──nacked──▶ waiting (until it is delivered again)
     └──expired, given───┘ └──dying──▶ dying ──dead_lettered──▶ dead
        back
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tailrace.core.core_tuning import EVENTS_MAX, TEXT_MAX
from tailrace.core.model import facts as f

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


_APPLIED = ("applied", "scheduled")
"""Events of a staged message whose version is applied."""

Event = dict[str, Any]


class GroupStatus:
    """The status of a message for one group."""

    __slots__ = ("deliveries", "failures", "lease", "status")

    def __init__(self, status: str = FREE) -> None:
        self.status = status
        self.deliveries = 0
        self.failures = 0
        self.lease = 0


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
        self.standings: dict[int, GroupStatus] = {}
        self.state = ""
        """A status for all groups: scheduled, cancelled, staged, dropped, collected; else empty."""
        self.cut = False
        """Whether the message has had more events than are kept."""

    def event(self, time_us: int | None, what: str, **more: Any) -> None:
        """Add an event, at a time that may be unknown; empty details are left out."""
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
        found = {standing.status for standing in self.standings.values()}
        if len(found) > 1:
            return MIXED
        return found.pop() if found else FREE


class MessageHistories:
    """The messages that are followed through one log. `names` are the present names of groups by number."""

    def __init__(self, names: dict[int, str]) -> None:
        self.names = dict(names)
        self.lives: list[MessageHistory] = []
        self._offsets: list[int] = []
        self._by_offset: dict[int, MessageHistory] = {}
        self._members: dict[tuple[int, int], str] = {}
        """Members by group and lease; only of leases with a message that is followed."""
        self._leases: dict[tuple[int, int], list[MessageHistory]] = {}
        """Messages by group and lease; a message whose status names another lease has left this one."""
        self._do: dict[type, Callable[[Any], None]] = {
            f.Enlisted: self._enlisted,
            f.Delisted: self._delisted,
            f.Granted: self._granted,
            f.Leased: self._leased,
            f.LeaseExtended: self._extended,
            f.LeaseExpired: self._expired,
            f.Acked: self._acked,
            f.Nacked: self._nacked,
            f.GivenBack: self._given_back,
            f.Dying: self._dying,
            f.Buried: self._buried,
            f.Lapsed: self._lapsed,
            f.CursorMoved: self._cursor_moved,
            f.GroupReset: self._reset,
            f.Reopened: self._reopened,
            f.OffsetsSettled: self._settled,
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
        """Apply a fact. `time_us` is the time of its frame, for trims, which have no time of their own. In
        logs of older releases it is 0: the time of the trim is not known."""
        if isinstance(fact, f.Trimmed):
            self._trimmed(fact.offset, time_us or None)
            return
        do = self._do.get(type(fact))
        if do is not None:
            do(fact)

    def finish(self, committed: dict[int, int]) -> None:
        """Set the status for groups without a fact about a message, by the first unsettled offset of each
        group."""
        for life in self.lives:
            for group, first in committed.items():
                if life.offset is not None and group not in life.standings:
                    life.standings[group] = GroupStatus(FREE if life.offset >= first else SETTLED)

    # ------------------------------------------------------------------------------------------- whom it hits

    def _in(self, spans: list[int]) -> Iterator[MessageHistory]:
        offsets = self._offsets
        for number in range(0, len(spans), 2):
            first, end = spans[number], spans[number + 1]
            at = bisect_left(offsets, first)
            while at < len(offsets) and offsets[at] < end:
                yield self._by_offset[offsets[at]]
                at += 1

    def _each(self, fact: Any) -> Iterator[tuple[MessageHistory, GroupStatus]]:
        for life in self._in(fact.spans):
            yield life, self._standing(life, fact.group)

    def _held(self, group: int, leases: Iterable[int]) -> Iterator[tuple[MessageHistory, GroupStatus]]:
        """Messages that these leases of a group hold."""
        for lease in leases:
            for life in self._leases.get((group, lease), ()):
                standing = life.standings.get(group)
                if standing is not None and standing.lease == lease:
                    yield life, standing

    @staticmethod
    def _standing(life: MessageHistory, group: int) -> GroupStatus:
        standing = life.standings.get(group)
        if standing is None:
            standing = life.standings[group] = GroupStatus()
        return standing

    def name(self, group: int) -> str:
        """The name of a group; its number if the rest of the log does not have the name."""
        return self.names.get(group, f"#{group}")

    def _leave(self, group: int, standing: GroupStatus, status: str) -> str:
        """Take a message out of its lease, if it is in one; return the member that had it."""
        member = self._members.get((group, standing.lease), "")
        standing.lease, standing.status = 0, status
        return member

    # ------------------------------------------------------------------------------------------------- groups

    def _enlisted(self, fact: f.Enlisted) -> None:
        self.names[fact.group] = fact.name
        for life in self.lives:
            if life.offset is not None:  # It may be there already, and only has other options now.
                standing = GroupStatus(FREE if life.offset >= fact.start else SETTLED)
                life.standings.setdefault(fact.group, standing)

    def _delisted(self, fact: f.Delisted) -> None:
        for life in self.lives:
            if life.standings.pop(fact.group, None) is not None:
                life.event(fact.time_us, "group_deleted", group=self.name(fact.group))

    def _granted(self, fact: f.Granted) -> None:
        if fact.kept:
            return
        leases = [lease for group, lease in self._leases if group == fact.group]
        for life, standing in list(self._held(fact.group, leases)):
            member = self._leave(fact.group, standing, FREE)
            life.event(
                fact.time_us, "given_back", group=self.name(fact.group), member=member, reason="reassigned"
            )

    def _reset(self, fact: f.GroupReset) -> None:
        for life in self.lives:
            if life.offset is not None:
                life.standings[fact.group] = GroupStatus(FREE if life.offset >= fact.offset else SETTLED)
                life.event(fact.time_us, "reset", group=self.name(fact.group), to_offset=fact.offset)

    def _cursor_moved(self, fact: f.CursorMoved) -> None:
        for life in self.lives:
            if life.offset is None:
                continue
            standing = self._standing(life, fact.group)
            status = SETTLED if life.offset < fact.offset else FREE
            if standing.status != status:
                what = "committed" if status == SETTLED else "rewound"
                life.event(fact.time_us, what, group=self.name(fact.group), member=fact.member)
                standing.status = status

    # ------------------------------------------------------------------------------------------------- leases

    def _leased(self, fact: f.Leased) -> None:
        for life, standing in self._each(fact):
            standing.deliveries += 1
            standing.lease, standing.status = fact.lease, LEASED
            self._members[fact.group, fact.lease] = fact.member
            self._leases.setdefault((fact.group, fact.lease), []).append(life)
            life.event(
                fact.time_us,
                "delivered",
                group=self.name(fact.group),
                member=fact.member,
                attempt=standing.failures + 1,
                delivery=standing.deliveries,
                deadline_us=fact.deadline_us,
            )

    def _extended(self, fact: f.LeaseExtended) -> None:
        for life, standing in self._held(fact.group, fact.leases):
            member = self._members.get((fact.group, standing.lease), "")
            group = self.name(fact.group)
            life.event(fact.time_us, "extended", group=group, member=member, deadline_us=fact.deadline_us)

    def _expired(self, fact: f.LeaseExpired) -> None:
        for life, standing in self._held(fact.group, [fact.lease]):
            attempt = standing.failures + 1
            standing.failures += 1
            member = self._leave(fact.group, standing, FREE)
            life.event(fact.time_us, "expired", group=self.name(fact.group), member=member, attempt=attempt)

    def _acked(self, fact: f.Acked) -> None:
        for lease, spans in fact.leases:
            member = self._members.get((fact.group, lease), "")
            for life in self._in(spans):
                self._leave(fact.group, self._standing(life, fact.group), SETTLED)
                life.event(fact.time_us, "acked", group=self.name(fact.group), member=member)

    def _nacked(self, fact: f.Nacked) -> None:
        for life, standing in self._each(fact):
            attempt = standing.failures + 1
            standing.failures += 1
            member = self._leave(fact.group, standing, WAITING)
            life.event(
                fact.time_us,
                "nacked",
                group=self.name(fact.group),
                member=member,
                attempt=attempt,
                error=fact.error[:TEXT_MAX],
                delay_us=fact.delay_us if fact.delay_us >= 0 else None,
            )

    def _given_back(self, fact: f.GivenBack) -> None:
        for life, standing in self._each(fact):
            member = self._leave(fact.group, standing, FREE)
            told = {"reason": "unstarted"} if fact.unstarted else {}
            standing.deliveries -= fact.unstarted
            life.event(fact.time_us, "given_back", group=self.name(fact.group), member=member, **told)

    def _dying(self, fact: f.Dying) -> None:
        for life, standing in self._each(fact):
            member = self._leave(fact.group, standing, DYING)
            standing.failures += fact.reason == "max_attempts"
            life.event(
                fact.time_us,
                "dying",
                group=self.name(fact.group),
                member=member,
                attempt=standing.failures or None,
                reason=fact.reason,
                error=fact.error[:TEXT_MAX],
            )

    def _buried(self, fact: f.Buried) -> None:
        places = _places(fact)
        for life, standing in self._each(fact):
            standing.status = DEAD
            partition, offset = places.get(life.offset or 0, (None, None))
            life.event(
                fact.time_us,
                "dead_lettered",
                group=self.name(fact.group),
                topic=fact.topic,
                partition=partition,
                offset=offset,
            )

    def _lapsed(self, fact: f.Lapsed) -> None:
        self._simple(fact, "lapsed", SETTLED)

    def _settled(self, fact: f.OffsetsSettled) -> None:
        self._simple(fact, "settled", SETTLED)

    def _reopened(self, fact: f.Reopened) -> None:
        for life, standing in self._each(fact):
            standing.deliveries = standing.failures = standing.lease = 0
            standing.status = FREE
            life.event(fact.time_us, "redriven", group=self.name(fact.group))

    def _simple(self, fact: f.Lapsed | f.OffsetsSettled, what: str, status: str) -> None:
        for life, standing in self._each(fact):
            self._leave(fact.group, standing, status)
            life.event(fact.time_us, what, group=self.name(fact.group))

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

    def _trimmed(self, offset: int, time_us: int | None) -> None:
        for at in self._offsets[: bisect_left(self._offsets, offset)]:
            life = self._by_offset[at]
            if life.state == COLLECTED:
                continue
            life.state = COLLECTED
            left = []
            for group, standing in life.standings.items():
                if standing.status not in (SETTLED, DEAD):
                    standing.lease, standing.status = 0, COLLECTED
                    left.append(self.name(group))
            life.event(time_us, "collected", unsettled=left or None)


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
