"""One fold over the facts of a partition: what happened to messages, and what a fact does not say itself.

A fact names spans of offsets. What it leaves out (who held a lease that ended, how often a message was
delivered before) follows from the facts before it, so they come in the order of the log. The fold remembers
offsets in flight and the counters of messages that came back:

    fact                          what is told                              what is remembered
    Leased 7 to m: [3, 5)         delivered 3 4, member m, deliveries 1 1   3 and 4 are in lease 7
    Nacked in 7: [3, 4)           nacked 3, member m, failures 1            3 came back: 1 delivery, 1 failure
    LeaseExpired 7                expired 4, member m, failures 1           4 came back, too
    Leased 8 to n: [3, 4)         delivered 3, member n, deliveries 2       3 is in lease 8

`TraceFold` is one fold for two uses, which differ in the offsets that they choose and in what they do with
what is told: `message_history` follows a few messages and gathers the events of each; the view `lifecycle` of
Spark (`tailrace.spark.source.life_rows`) makes rows of all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tailrace.core.model import facts as f

LEASES_MAX = 100_000
"""Leases of a group that are remembered; where the end of one got lost in a crash, it would stay for ever."""

Offsets = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32]
NOBODY = -1
NO_OFFSETS: Offsets = np.empty(0, np.int64)


class GroupTrace:
    """What is remembered of a group."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.cursor: int | None = None
        """How far a stream group has come, as far as it was told."""
        self._holder: dict[int, int] = {}
        """The lease of each offset in flight."""
        self._leases: dict[int, tuple[str, Offsets]] = {}
        """Member and offsets as they were leased."""
        self._tries: dict[int, tuple[int, int]] = {}
        """Deliveries and failures of messages that came back."""
        self._dying: dict[int, str] = {}

    def clear(self) -> None:
        """It starts anew."""
        for known in (self._holder, self._leases, self._tries, self._dying):
            known.clear()

    def member(self, lease: int) -> str | None:
        """Who has, or had, a lease."""
        known = self._leases.get(lease)
        return None if known is None else known[0]

    def leased(self, lease: int, member: str, offsets: Offsets) -> None:
        """Messages are in flight."""
        self._leases[lease] = member, offsets
        if len(self._leases) > LEASES_MAX:
            del self._leases[next(iter(self._leases))]
        self._holder.update(dict.fromkeys(offsets.tolist(), lease))
        for offset in self._tries.keys() & offsets.tolist() if self._tries else ():
            deliveries, failures = self._tries[offset]
            self._tries[offset] = deliveries + 1, failures

    def left(
        self, offsets: Offsets, *, back: bool = False, failed: bool = False, undone: bool = False
    ) -> None:
        """Messages are in flight no more; those that come back are counted from now on, without the last
        delivery where it is undone."""
        for offset in offsets.tolist():
            held = self._holder.pop(offset, None) is not None
            if back:
                deliveries, failures = self._tries.get(offset, (int(held or failed), 0))
                self._tries[offset] = max(0, deliveries - undone), failures + failed

    def settled(self, offsets: Offsets) -> None:
        """Messages are through."""
        self.left(offsets)
        if self._tries:
            for offset in offsets.tolist():
                self._tries.pop(offset, None)

    def acked(self, lease: int, offsets: Offsets) -> None:
        """Messages are through; a lease of which nothing else can be left is forgotten."""
        self.settled(offsets)
        known = self._leases.get(lease)
        if known is not None and len(known[1]) <= len(offsets):
            del self._leases[lease]

    def expired(self, lease: int, offsets: Offsets) -> None:
        """A lease timed out with these messages in it."""
        self.left(offsets, back=True, failed=True)
        self._leases.pop(lease, None)

    def dying(self, offsets: Offsets, reason: str) -> None:
        """Messages are on their way to the dead letters."""
        self.left(offsets, back=True, failed=reason == "max_attempts")
        self._dying.update(dict.fromkeys(offsets.tolist(), reason))

    def reasons(self, offsets: Offsets) -> list[tuple[str | None, Offsets]]:
        """Messages by the reason of their death, if that is known; it is forgotten."""
        return _grouped(offsets, lambda offset: self._dying.pop(offset, None))

    def in_flight(self) -> Offsets:
        """All messages that are leased."""
        return np.array(sorted(self._holder), np.int64)

    def held(self, lease: int) -> Offsets:
        """What is left of a lease."""
        known = self._leases.get(lease)
        if known is None:
            return NO_OFFSETS
        return np.array([at for at in known[1].tolist() if self._holder.get(at) == lease], np.int64)

    def holders(self, offsets: Offsets) -> list[tuple[int, Offsets]]:
        """Offsets by the lease that they are in, `NOBODY` for none; in order as far as that goes."""
        return _grouped(offsets, lambda offset: self._holder.get(offset, NOBODY))

    def counts(self, offsets: Offsets) -> tuple[Counts, Counts]:
        """Deliveries and failures of messages that were delivered at least once."""
        if not self._tries:
            return np.ones(len(offsets), np.int32), np.zeros(len(offsets), np.int32)
        pairs = [self._tries.get(offset, (1, 0)) for offset in offsets.tolist()]
        both = np.array(pairs, np.int32).reshape(-1, 2)
        return both[:, 0], both[:, 1]


class TraceEvent(NamedTuple):
    """What a fact tells: messages (`NOBODY`: none), what is the same for all, and the counters of each."""

    offsets: Offsets
    event: str
    time_us: int
    group: GroupTrace | None = None
    member: str | None = None
    lease: int | None = None
    deliveries: Counts | None = None
    failures: Counts | None = None
    reason: str | None = None
    error: str | None = None
    due_us: int | None = None
    buried: f.Buried | None = None
    """The fact that names the dead letters."""


class TraceFold(ABC):
    """The fold over the facts of one partition, but for those whose meaning differs with the use."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """`names` are the present names of groups by number."""
        self._names = dict(names)
        self._groups: dict[int, GroupTrace] = {}
        self._do: dict[type, Callable[[Any, GroupTrace], None]] = {
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
        }

    @abstractmethod
    def chosen(self, spans: list[int]) -> Offsets:
        """The offsets of flat spans that are of interest."""

    @abstractmethod
    def told(self, event: TraceEvent) -> None:
        """Take an event of at least one message."""

    @abstractmethod
    def _extended(self, fact: f.LeaseExtended, group: GroupTrace) -> None: ...

    @abstractmethod
    def _cursor_moved(self, fact: f.CursorMoved, group: GroupTrace) -> None: ...

    @abstractmethod
    def _reset(self, fact: f.GroupReset, group: GroupTrace) -> None: ...

    def name(self, group: int) -> str:
        """The name of a group; its number if the rest of the log does not have the name."""
        return self._names.get(group, f"#{group}")

    def _apply(self, fact: Any) -> None:
        """Apply a fact about a group; others are passed over."""
        do = self._do.get(type(fact))
        if do is None:
            return
        group = self._groups.get(fact.group)
        if group is None:
            group = self._groups[fact.group] = GroupTrace(fact.group, self.name(fact.group))
        do(fact, group)

    def _tell(self, event: str, fact: Any, group: GroupTrace, offsets: Offsets, **more: Any) -> None:
        if len(offsets):
            self.told(TraceEvent(offsets, event, fact.time_us, group, **more))

    def _tell_counted(self, event: str, fact: Any, group: GroupTrace, offsets: Offsets, **more: Any) -> None:
        """The same of messages that were delivered, with their counters."""
        if len(offsets):
            deliveries, failures = group.counts(offsets)
            self._tell(event, fact, group, offsets, deliveries=deliveries, failures=failures, **more)

    def _enlisted(self, fact: f.Enlisted, group: GroupTrace) -> None:
        group.name = self._names[fact.group] = fact.name

    def _delisted(self, fact: f.Delisted, group: GroupTrace) -> None:
        del self._groups[fact.group]

    def _granted(self, fact: f.Granted, group: GroupTrace) -> None:
        if not fact.kept:
            self._back(fact, group, group.in_flight(), "reassigned")

    def _leased(self, fact: f.Leased, group: GroupTrace) -> None:
        offsets = self.chosen(fact.spans)
        if len(offsets):
            group.leased(fact.lease, fact.member, offsets)
            lease = {"member": fact.member, "lease": fact.lease, "due_us": fact.deadline_us}
            self._tell_counted("delivered", fact, group, offsets, **lease)

    def _expired(self, fact: f.LeaseExpired, group: GroupTrace) -> None:
        offsets, member = group.held(fact.lease), group.member(fact.lease)
        group.expired(fact.lease, offsets)
        self._tell_counted("expired", fact, group, offsets, member=member, lease=fact.lease)

    def _acked(self, fact: f.Acked, group: GroupTrace) -> None:
        for lease, spans in fact.leases:
            offsets = self.chosen(spans)
            self._tell_counted("acked", fact, group, offsets, member=group.member(lease), lease=lease)
            group.acked(lease, offsets)

    def _nacked(self, fact: f.Nacked, group: GroupTrace) -> None:
        offsets = self.chosen(fact.spans)
        group.left(offsets, back=True, failed=True)
        more = {
            "member": group.member(fact.lease),
            "lease": fact.lease,
            "error": fact.error or None,
            "due_us": fact.time_us + fact.delay_us if fact.delay_us >= 0 else None,
        }
        self._tell_counted("nacked", fact, group, offsets, **more)

    def _given_back(self, fact: f.GivenBack, group: GroupTrace) -> None:
        self._back(fact, group, self.chosen(fact.spans), "unstarted" if fact.unstarted else None)

    def _back(self, fact: Any, group: GroupTrace, offsets: Offsets, reason: str | None) -> None:
        for lease, some in group.holders(offsets):
            group.left(some, back=True, undone=reason == "unstarted")
            self._tell_counted("given_back", fact, group, some, reason=reason, **_holder(group, lease))

    def _dying(self, fact: f.Dying, group: GroupTrace) -> None:
        for lease, some in group.holders(self.chosen(fact.spans)):
            group.dying(some, fact.reason)
            why = {"reason": fact.reason, "error": fact.error or None}
            self._tell_counted("dying", fact, group, some, **why, **_holder(group, lease))

    def _buried(self, fact: f.Buried, group: GroupTrace) -> None:
        offsets = self.chosen(fact.spans)
        for reason, some in group.reasons(offsets):
            self._tell_counted("dead_lettered", fact, group, some, reason=reason, buried=fact)
        group.settled(offsets)

    def _lapsed(self, fact: f.Lapsed, group: GroupTrace) -> None:
        self._through("lapsed", fact, group, reason="expired")

    def _settled(self, fact: f.OffsetsSettled, group: GroupTrace) -> None:
        self._through("settled", fact, group, reason="operator")

    def _reopened(self, fact: f.Reopened, group: GroupTrace) -> None:
        self._through("redriven", fact, group)

    def _through(
        self,
        event: str,
        fact: f.Lapsed | f.OffsetsSettled | f.Reopened,
        group: GroupTrace,
        reason: str | None = None,
    ) -> None:
        """The present life of messages is over, without a delivery that ended it."""
        offsets = self.chosen(fact.spans)
        self._tell(event, fact, group, offsets, reason=reason)
        group.settled(offsets)


def _holder(group: GroupTrace, lease: int) -> dict[str, Any]:
    return {} if lease == NOBODY else {"member": group.member(lease), "lease": lease}


def _grouped(offsets: Offsets, by: Callable[[int], Any]) -> list[tuple[Any, Offsets]]:
    found: dict[Any, list[int]] = {}
    for offset in offsets.tolist():
        found.setdefault(by(offset), []).append(offset)
    return [(known, np.array(some, np.int64)) for known, some in found.items()]
