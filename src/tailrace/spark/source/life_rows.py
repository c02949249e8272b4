"""Facts as rows: one for each message and event, expanded from the spans that facts name.

Facts come in the order of the log of one partition. What a fact does not say itself (who held a lease that
ended, how often a message was delivered before) is remembered from the facts before it: offsets in flight,
and counters of messages that failed. So it is known as far as the walk goes back, and null otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.core.model import facts as f
from tailrace.format.schema import TIME

LIFECYCLE = pa.schema(
    {
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "group": pa.string(),
        "event": pa.string(),
        "time": TIME,
        "member": pa.string(),
        "lease": pa.int64(),
        "deliveries": pa.int32(),
        "failures": pa.int32(),
        "reason": pa.string(),
        "error": pa.string(),
        "due": TIME,
    }
)
EVENTS = (
    "appended",
    "delivered",
    "acked",
    "nacked",
    "expired",
    "given_back",
    "extended",
    "dying",
    "dead_lettered",
    "lapsed",
    "settled",
    "reopened",
    "reset",
    "committed",
    "collected",
)
LEASES_MAX = 100_000
"""Leases of a group that are remembered; where the end of one got lost in a crash, it would stay for ever."""

Offsets = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int32]
_NOBODY = -1


class _Rows(NamedTuple):
    """Rows of one fact: the offsets (-1: none), what is the same for all, and the counters of each."""

    offsets: Offsets
    event: str
    time_us: int
    group: str | None = None
    member: str | None = None
    lease: int | None = None
    deliveries: Counts | None = None
    failures: Counts | None = None
    reason: str | None = None
    error: str | None = None
    due_us: int | None = None


class _Group:
    """What is remembered of a group."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.holder: dict[int, int] = {}
        """The lease of each offset in flight."""
        self.leases: dict[int, tuple[str, Offsets]] = {}
        """Member and offsets as they were leased."""
        self.tries: dict[int, tuple[int, int]] = {}
        """Deliveries and failures of messages that came back."""
        self.dying: dict[int, str] = {}
        self.cursor: int | None = None

    def clear(self) -> None:
        """It starts anew."""
        for known in (self.holder, self.leases, self.tries, self.dying):
            known.clear()

    def member(self, lease: int) -> str | None:
        """Who has, or had, a lease."""
        known = self.leases.get(lease)
        return None if known is None else known[0]

    def leased(self, lease: int, member: str, offsets: Offsets) -> None:
        """Messages are in flight."""
        self.leases[lease] = member, offsets
        if len(self.leases) > LEASES_MAX:
            del self.leases[next(iter(self.leases))]
        self.holder.update(dict.fromkeys(offsets.tolist(), lease))
        for offset in self.tries.keys() & offsets.tolist() if self.tries else ():
            deliveries, failures = self.tries[offset]
            self.tries[offset] = deliveries + 1, failures

    def left(
        self, offsets: Offsets, *, back: bool = False, failed: bool = False, undone: bool = False
    ) -> None:
        """Messages are in flight no more; those that come back are counted from now on, without the last
        delivery where it is undone."""
        for offset in offsets.tolist():
            held = self.holder.pop(offset, None) is not None
            if back:
                deliveries, failures = self.tries.get(offset, (int(held or failed), 0))
                self.tries[offset] = max(0, deliveries - undone), failures + failed

    def settled(self, offsets: Offsets) -> None:
        """Messages are through."""
        self.left(offsets)
        if self.tries:
            for offset in offsets.tolist():
                self.tries.pop(offset, None)

    def held(self, lease: int) -> Offsets:
        """What is left of a lease."""
        known = self.leases.get(lease)
        if known is None:
            return _none()
        return np.array([at for at in known[1].tolist() if self.holder.get(at) == lease], np.int64)

    def holders(self, offsets: Offsets) -> list[tuple[int, Offsets]]:
        """Offsets by the lease that they are in, -1 for none; in order as far as that goes."""
        found: dict[int, list[int]] = {}
        for offset in offsets.tolist():
            found.setdefault(self.holder.get(offset, _NOBODY), []).append(offset)
        return [(lease, np.array(some, np.int64)) for lease, some in found.items()]

    def counts(self, offsets: Offsets) -> tuple[Counts, Counts]:
        """Deliveries and failures of messages that were delivered at least once."""
        if not self.tries:
            return np.ones(len(offsets), np.int32), np.zeros(len(offsets), np.int32)
        pairs = [self.tries.get(offset, (1, 0)) for offset in offsets.tolist()]
        both = np.array(pairs, np.int32).reshape(-1, 2)
        return both[:, 0], both[:, 1]


class LifeRows:
    """Gathers the rows of one partition; `take` gives them as batches."""

    def __init__(self, topic: str, partition: int) -> None:
        self._topic = topic
        self._partition = partition
        self._names: dict[int, str] = {}
        self._groups: dict[int, _Group] = {}
        self._rows: list[_Rows] = []
        self._first: int | None = None
        """The first offset whose whole life is seen."""
        self._start: int | None = None
        """Where the partition begins, as far as it was told."""
        self._time_us = 0
        self.count = 0
        """Rows that were gathered."""
        self._do: dict[type, Callable[[Any, _Group], None]] = {
            f.Enlisted: self._enlisted,
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
            f.OffsetsSettled: self._settled,
            f.CursorMoved: self._cursor_moved,
            f.GroupReset: self._reset,
            f.Reopened: self._reopened,
        }

    # ------------------------------------------------------------------------------------------ what happens

    def know(self, names: dict[int, str]) -> None:
        """Groups of today by number; facts may name more."""
        self._names = {**names, **self._names}

    def appended(self, base: int, span: int, time_us: int) -> None:
        """A data frame."""
        if self._first is None:
            self._first = base
        self._time_us = max(self._time_us, time_us)
        self._add(_Rows(np.arange(base, base + span), "appended", time_us))

    def fact(self, fact: Any, frame_time_us: int) -> None:
        """A fact; the time of its frame is for those that have none of their own."""
        self._time_us = max(self._time_us, frame_time_us)
        if isinstance(fact, f.Trimmed):
            self._trimmed(fact)
        elif isinstance(fact, f.Delisted):
            self._groups.pop(fact.group, None)
        elif (do := self._do.get(type(fact))) is not None:
            do(fact, self._group(fact.group))

    def _group(self, number: int) -> _Group:
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = _Group(self._names.get(number, f"#{number}"))
        return group

    def _add(self, rows: _Rows) -> None:
        if len(rows.offsets):
            self._rows.append(rows)
            self.count += len(rows.offsets)

    def _events(self, event: str, fact: Any, group: _Group, offsets: Offsets, **more: Any) -> None:
        """Rows about messages that were delivered, with their counters."""
        deliveries, failures = group.counts(offsets)
        known = {"deliveries": deliveries, "failures": failures, **more}
        self._add(_Rows(offsets, event, fact.time_us, group.name, **known))

    def _enlisted(self, fact: f.Enlisted, group: _Group) -> None:
        group.name = self._names[fact.group] = fact.name
        if group.cursor is None:
            group.cursor = fact.start

    def _granted(self, fact: f.Granted, group: _Group) -> None:
        if not fact.kept:
            offsets = np.array(sorted(group.holder), np.int64)
            self._back(fact, group, offsets, "reassigned")

    def _leased(self, fact: f.Leased, group: _Group) -> None:
        offsets = expand(fact.spans)
        group.leased(fact.lease, fact.member, offsets)
        lease = {"member": fact.member, "lease": fact.lease, "due_us": fact.deadline_us}
        self._events("delivered", fact, group, offsets, **lease)

    def _extended(self, fact: f.LeaseExtended, group: _Group) -> None:
        for lease in fact.leases:  # One row for a lease: a lease of many messages may be extended often.
            rows = _Rows(
                np.array([_NOBODY]), "extended", fact.time_us, group.name, group.member(lease), lease
            )
            self._add(rows._replace(due_us=fact.deadline_us))

    def _expired(self, fact: f.LeaseExpired, group: _Group) -> None:
        offsets, member = group.held(fact.lease), group.member(fact.lease)
        group.left(offsets, back=True, failed=True)
        group.leases.pop(fact.lease, None)
        self._events("expired", fact, group, offsets, member=member, lease=fact.lease)

    def _acked(self, fact: f.Acked, group: _Group) -> None:
        for lease, spans in fact.leases:
            offsets = expand(spans)
            self._events("acked", fact, group, offsets, member=group.member(lease), lease=lease)
            group.settled(offsets)
            known = group.leases.get(lease)
            if known is not None and len(known[1]) <= len(offsets):
                del group.leases[lease]

    def _nacked(self, fact: f.Nacked, group: _Group) -> None:
        offsets = expand(fact.spans)
        group.left(offsets, back=True, failed=True)
        due_us = fact.time_us + fact.delay_us if fact.delay_us >= 0 else None
        more = {"error": fact.error or None, "due_us": due_us}
        self._events(
            "nacked", fact, group, offsets, member=group.member(fact.lease), lease=fact.lease, **more
        )

    def _given_back(self, fact: f.GivenBack, group: _Group) -> None:
        self._back(fact, group, expand(fact.spans), "unstarted" if fact.unstarted else None)

    def _back(self, fact: Any, group: _Group, offsets: Offsets, reason: str | None) -> None:
        for lease, some in group.holders(offsets):
            group.left(some, back=True, undone=reason == "unstarted")
            self._events("given_back", fact, group, some, reason=reason, **_holder(group, lease))

    def _dying(self, fact: f.Dying, group: _Group) -> None:
        failed = fact.reason == "max_attempts"
        for lease, some in group.holders(expand(fact.spans)):
            group.left(some, back=True, failed=failed)
            group.dying.update(dict.fromkeys(some.tolist(), fact.reason))
            why = {"reason": fact.reason, "error": fact.error or None}
            self._events("dying", fact, group, some, **why, **_holder(group, lease))

    def _buried(self, fact: f.Buried, group: _Group) -> None:
        offsets = expand(fact.spans)
        reasons: dict[str | None, list[int]] = {}
        for offset in offsets.tolist():
            reasons.setdefault(group.dying.pop(offset, None), []).append(offset)
        for reason, some in reasons.items():
            self._events("dead_lettered", fact, group, np.array(some, np.int64), reason=reason)
        group.settled(offsets)

    def _lapsed(self, fact: f.Lapsed, group: _Group) -> None:
        offsets = expand(fact.spans)
        self._add(_Rows(offsets, "lapsed", fact.time_us, group.name, reason="expired"))
        group.settled(offsets)

    def _settled(self, fact: f.OffsetsSettled, group: _Group) -> None:
        offsets = expand(fact.spans)
        self._add(_Rows(offsets, "settled", fact.time_us, group.name, reason="operator"))
        group.settled(offsets)

    def _cursor_moved(self, fact: f.CursorMoved, group: _Group) -> None:
        if group.cursor is not None:
            offsets = np.arange(group.cursor, fact.offset)
            self._add(_Rows(offsets, "committed", fact.time_us, group.name, fact.member))
        group.cursor = fact.offset

    def _reset(self, fact: f.GroupReset, group: _Group) -> None:
        group.clear()
        group.cursor = fact.offset
        self._add(_Rows(np.array([fact.offset]), "reset", fact.time_us, group.name))

    def _reopened(self, fact: f.Reopened, group: _Group) -> None:
        offsets = expand(fact.spans)
        self._add(_Rows(offsets, "reopened", fact.time_us, group.name))
        group.settled(offsets)

    def _trimmed(self, fact: f.Trimmed) -> None:
        start = self._first if self._start is None else self._start
        if start is not None:
            self._add(_Rows(np.arange(start, fact.offset), "collected", self._time_us))
        self._start = fact.offset

    # -------------------------------------------------------------------------------------------- as batches

    def take(self) -> pa.RecordBatch:
        """What was gathered since the last time, all columns of `LIFECYCLE`."""
        rows, self._rows, self.count = self._rows, [], 0
        counts = np.array([len(some.offsets) for some in rows], np.int64)
        total = int(counts.sum())
        offsets = np.concatenate([some.offsets for some in rows]) if rows else _none()
        known = np.zeros(total, np.bool_) if self._first is None else offsets >= self._first
        columns = {
            "topic": pa.repeat(pa.scalar(self._topic), total),
            "partition": pa.repeat(pa.scalar(self._partition, pa.int32()), total),
            "offset": pa.array(offsets, mask=offsets < 0),
            "time": _times([some.time_us for some in rows], counts),
            "lease": _numbers([some.lease for some in rows], counts),
            "deliveries": _each([some.deliveries for some in rows], counts, known),
            "failures": _each([some.failures for some in rows], counts, known),
            "due": _times([some.due_us for some in rows], counts),
        }
        for name in ("group", "event", "member", "reason", "error"):
            columns[name] = _texts([getattr(some, name) for some in rows], counts)
        return pa.RecordBatch.from_arrays([columns[name] for name in LIFECYCLE.names], schema=LIFECYCLE)


def expand(spans: list[int]) -> Offsets:
    """All offsets of flat spans."""
    if len(spans) == 2:
        return np.arange(spans[0], spans[1])
    pairs = np.array(spans, np.int64).reshape(-1, 2)
    lengths = pairs[:, 1] - pairs[:, 0]
    before = np.cumsum(lengths) - lengths
    result: Offsets = np.arange(int(lengths.sum())) + np.repeat(pairs[:, 0] - before, lengths)
    return result


def _holder(group: _Group, lease: int) -> dict[str, Any]:
    return {} if lease == _NOBODY else {"member": group.member(lease), "lease": lease}


def _none() -> Offsets:
    return np.empty(0, np.int64)


def _numbers(values: list[int | None], counts: Offsets) -> pa.Array:
    """A 64-bit number for each row; those without a sign keep their bits."""
    missing = np.array([value is None for value in values], np.bool_)
    plain = np.array([value or 0 for value in values], np.uint64).view(np.int64)
    return pa.array(np.repeat(plain, counts), mask=np.repeat(missing, counts))


def _times(values: list[int | None], counts: Offsets) -> pa.Array:
    return _numbers(values, counts).cast(TIME)


def _each(values: list[Counts | None], counts: Offsets, known: npt.NDArray[np.bool_]) -> pa.Array:
    """Counters that may differ from row to row; null where only a part of the story was seen."""
    filled = [
        np.zeros(count, np.int32) if value is None else value
        for value, count in zip(values, counts.tolist(), strict=True)
    ]
    missing = np.repeat(np.array([value is None for value in values], np.bool_), counts)
    numbers = np.concatenate(filled) if filled else np.empty(0, np.int32)
    return pa.array(numbers, pa.int32(), mask=missing | ~known)


def _texts(values: list[str | None], counts: Offsets) -> pa.Array:
    places = {value: place for place, value in enumerate(dict.fromkeys(values))}
    codes = np.repeat(np.array([places[value] for value in values], np.int64), counts)
    return pa.array(list(places), pa.string()).take(pa.array(codes))
