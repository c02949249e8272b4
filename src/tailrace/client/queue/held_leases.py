"""Leases that a consumer holds: what is handed out, settled, under way or lost. No I/O, no clock of its own.

An offset of a lease is *open* until somebody settles it, *asked* while a request about it is under way, and
then settled, or *gone* when the broker says that the receipt is stale. Acknowledgements gather per partition:
one request is under way at a time, and what comes meanwhile leaves together with the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from tailrace.client.sdk_tuning import DRIFT
from tailrace.core.model.group_commands import Place
from tailrace.core.model.queue_commands import Grant, Settled
from tailrace.errors import LeaseLost, TailraceError

Run = tuple[int, int, int, int]
"""First offset, count, deliveries and failures of messages that were leased."""
Told = Callable[[TailraceError | None], None]
"""Called with None when it is done, or with why it is not."""


UNDER_WAY = float("inf")
"""When to extend a lease for which that is asked at the moment."""


class FailedAck(msgspec.Struct, frozen=True):
    """Messages [first, end) of a partition whose acknowledgement nobody waited for, and failed."""

    topic: str
    partition: int
    first: int
    end: int
    error: TailraceError

    def __str__(self) -> str:
        last = "" if self.end == self.first + 1 else f"-{self.end - 1}"
        place = f"{self.topic}/{self.partition}@{self.first}{last}: "
        return place + self.error.message.removeprefix(place)


class HeldLease:
    """One lease: the offsets that it was granted for, and what has become of each."""

    __slots__ = (
        "_end",
        "_first",
        "_gathered",
        "_runs",
        "_starts",
        "acks",
        "asked",
        "deadline_ms",
        "error",
        "extend_ms",
        "failed",
        "generation",
        "gone",
        "id",
        "idle",
        "number",
        "open",
        "place",
    )

    def __init__(
        self,
        gathered: Callable[[HeldLease], None],
        number: int,
        place: Place,
        generation: int,
        grant: Grant,
    ) -> None:
        self._gathered = gathered
        self.number = number
        """Leases are counted as they are granted."""
        self.place = place
        self.generation = generation
        self.id = grant.lease
        self._runs = grant.runs
        self._first = min((run[0] for run in grant.runs), default=0)
        self._end = max((run[0] + run[1] for run in grant.runs), default=0)
        self._starts: list[int] | None = None
        self.open: set[int] = set()
        self.asked: set[int] = set()
        self.gone: set[int] = set()
        self.failed: dict[int, int] = {}
        """What was given back, and the number of the last lease that was known when that was answered."""
        self.acks: list[int] = []
        self.idle = True
        """Nothing is gathered, or the lease is over: whoever appends to `acks` has to call `wake`."""
        self.error: TailraceError | None = None
        self.extend_ms = self.deadline_ms = 0.0

    def wake(self) -> None:
        """An offset was appended to `acks` while the lease was idle. Raises when the lease is over and had
        not been settled for that offset."""
        if self.error is not None:
            offset = self.acks.pop()
            if offset in self.gone:
                raise self.error
            return
        self.idle = False
        self._gathered(self)

    def counts(self, offset: int) -> tuple[int, int]:
        """Deliveries (with this one) and failures of a message."""
        run = self._run(offset)
        return run[2], run[3]

    def has(self, offset: int) -> bool:
        """Whether it was granted for a message."""
        run = self._run(offset)
        return run[0] <= offset < run[0] + run[1]

    def reaches(self, first: int, end: int) -> bool:
        """Whether it has open messages, and was granted for some between these offsets, as far as its first
        and last one tell."""
        if not self.open:
            return False
        return self._first < end and first < self._end

    def _run(self, offset: int) -> Run:
        if self._starts is None:  # Most messages are never asked.
            self._runs = sorted(self._runs)
            self._starts = [run[0] for run in self._runs]
        return self._runs[max(0, bisect_right(self._starts, offset) - 1)]

    def is_settled(self, offset: int) -> bool:
        """Whether somebody settled the message through this lease, or is about to."""
        return offset in self.acks or not (offset in self.open or offset in self.gone)

    def is_open(self, offset: int) -> bool:
        """Whether no request about the message was sent, nor the message lost."""
        return offset in self.open

    def is_lost(self, offset: int) -> bool:
        """Whether the message went back to the broker."""
        return offset in self.gone

    def comes_again(self, offset: int) -> bool:
        """Whether the message is to be delivered again: it was given back, or settled too late."""
        return offset in self.gone or offset in self.failed

    def take(self, offset: int) -> bool:
        """Claim an offset for a request; False when it is settled, or about to be. Raises when it is lost."""
        if offset in self.gone:
            raise self.error or self.lost(offset)
        if offset not in self.open or offset in self.acks:
            return False
        if self.error is not None:
            raise self.error
        self.open.discard(offset)
        self.asked.add(offset)
        return True

    def lost(self, offset: int) -> LeaseLost:
        """The error for an offset whose receipt is stale."""
        topic, partition = self.place
        text = "the lease is over, the message may have been delivered again"
        return LeaseLost(f"{topic}/{partition}@{offset}: {text}")

    @property
    def done(self) -> bool:
        """Whether nothing is left that somebody has to settle."""
        return not (self.open or self.asked or self.acks)


FirstOfKeys = dict[bytes | None, int]
"""The first offset of each key among messages of a partition (None: of those without a key)."""


class Unstarted:
    """Messages that no handler got, on their way back: offsets by lease, and the first of each key in every
    partition."""

    __slots__ = ("first", "leases")

    def __init__(self) -> None:
        self.leases: dict[HeldLease, list[int]] = {}
        self.first: dict[Place, FirstOfKeys] = {}

    def __bool__(self) -> bool:
        return bool(self.leases)

    def add(self, lease: HeldLease, offset: int, key: bytes | None) -> None:
        """One more."""
        self.leases.setdefault(lease, []).append(offset)
        first = self.first.setdefault(lease.place, {})
        first[key] = min(offset, first.get(key, offset))

    def merge(self, other: Unstarted) -> None:
        """Those of another, too."""
        for lease, offsets in other.leases.items():
            self.leases.setdefault(lease, []).extend(offsets)
        for place, first in other.first.items():
            mine = self.first.setdefault(place, {})
            for key, offset in first.items():
                mine[key] = min(offset, mine.get(key, offset))

    def spans(self, place: Place) -> list[tuple[int, list[int]]]:
        """Those of a partition, as requests name them."""
        return [
            (lease.id, spans_of(sorted(offsets)))
            for lease, offsets in self.leases.items()
            if lease.place == place and offsets
        ]


class AckRun:
    """Acknowledgements of one partition on their way, and who waits for them."""

    __slots__ = ("place", "since_s", "taken", "waiters")

    def __init__(self, place: Place, since_s: float) -> None:
        self.place = place
        self.since_s = since_s
        self.taken: list[tuple[HeldLease, list[int]]] = []
        self.waiters: list[tuple[HeldLease, int, Told]] = []

    def leases(self) -> list[tuple[int, list[int]]]:
        """What goes into the request."""
        return [(lease.id, spans_of(offsets)) for lease, offsets in self.taken]


class HeldLeases:
    """All leases of a consumer. `wake` is called when the first acknowledgement gathers on a partition."""

    def __init__(self, wake: Callable[[Place], None]) -> None:
        self._wake = wake
        self.granted = 0
        self._held: dict[int, HeldLease] = {}
        self._dirty: dict[Place, list[HeldLease]] = {}
        self._waiters: dict[Place, list[tuple[HeldLease, int, Told]]] = {}
        self._under_way: dict[Place, AckRun] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, place: Place, generation: int, grant: Grant) -> HeldLease:
        """A lease was granted; its offsets are entered by whoever unpacks the rows."""
        self.granted += 1
        lease = HeldLease(self.dirty, self.granted, place, generation, grant)
        self._held[lease.id] = lease
        return lease

    def of(self, place: Place | None = None) -> list[HeldLease]:
        """The leases of a partition, or all."""
        return [lease for lease in self._held.values() if place is None or lease.place == place]

    def went_back_before(self, lease: HeldLease, offset: int) -> int:
        """The number of the first lease that was granted after a message of another lease went back, as far
        as that can be told: later messages of its key in leases before that one went back with it."""
        again = (
            other.number
            for other in self._held.values()
            if other.place == lease.place and other.number > lease.number and other.has(offset)
        )
        return min(again, default=lease.failed.get(offset, self.granted) + 1)

    def superseded(self, place: Place, runs: Iterable[Run]) -> dict[HeldLease, set[int]]:
        """What older leases still have open although it is delivered again: the broker has taken it back, and
        nobody here has heard of it. The count of deliveries does not say that: a delivery that went back
        unstarted is not counted, and a broker that was killed may have forgotten one."""
        found: dict[HeldLease, set[int]] = {}
        runs = list(runs)
        if not runs:
            return found
        least, end = min(run[0] for run in runs), max(run[0] + run[1] for run in runs)
        for lease in self.of(place):
            if lease.reaches(least, end):  # Mostly not: newer leases are for later messages.
                for first, count, _, _ in runs:
                    if again := lease.open.intersection(range(first, first + count)):
                        found.setdefault(lease, set()).update(again)
        return found

    def drop_done(self, lease: HeldLease) -> None:
        """Forget a lease once nothing is left of it."""
        if lease.done:
            self._held.pop(lease.id, None)

    # -- acknowledgements

    def dirty(self, lease: HeldLease) -> None:
        """The lease has gathered its first acknowledgement."""
        leases = self._dirty.setdefault(lease.place, [])
        leases.append(lease)
        if len(leases) == 1 and lease.place not in self._under_way:
            self._wake(lease.place)

    def ack(self, lease: HeldLease, offset: int, told: Told) -> None:
        """Acknowledge and be told. A message that is settled already is told at once."""
        run = self._under_way.get(lease.place)
        if run is not None and offset in lease.asked:
            run.waiters.append((lease, offset, told))
        elif lease.comes_again(offset):
            told(lease.error or lease.lost(offset))
        elif offset not in lease.open:
            told(None)
        elif lease.error is not None:
            told(lease.error)
        else:
            self._waiters.setdefault(lease.place, []).append((lease, offset, told))
            lease.acks.append(offset)
            if lease.idle:
                lease.wake()

    def take(self, place: Place, now_s: float) -> tuple[AckRun | None, list[FailedAck]]:
        """What has gathered on a partition, to be sent; None when there is nothing, or a request is under
        way. Also what cannot be sent because it was lost meanwhile."""
        if place in self._under_way or place not in self._dirty:
            return None, []
        run = AckRun(place, now_s)
        failed: list[FailedAck] = []
        for lease in self._dirty.pop(place):
            offsets, lease.acks = lease.acks, []
            lease.idle = True
            chosen = lease.open.intersection(offsets)
            if lease.gone:
                lost = lease.gone.intersection(offsets) - self._awaited(lease)
                failed += failures(place, lost, lease.error or LeaseLost("the lease is over"))
            if chosen:
                lease.open -= chosen
                lease.asked |= chosen
                run.taken.append((lease, sorted(chosen)))
            self.drop_done(lease)
        run.waiters = self._waiters.pop(place, [])
        self._tell_unsent(run)
        if not run.taken:
            return None, failed
        self._under_way[place] = run
        return run, failed

    def _awaited(self, lease: HeldLease) -> set[int]:
        return {offset for other, offset, _ in self._waiters.get(lease.place, ()) if other is lease}

    @staticmethod
    def _tell_unsent(run: AckRun) -> None:
        """Waiters whose offset does not go along: it was lost, or is settled."""
        left = []
        for lease, offset, told in run.waiters:
            if offset in lease.asked:
                left.append((lease, offset, told))
            else:
                told((lease.error or lease.lost(offset)) if offset in lease.gone else None)
        run.waiters = left

    def answered(self, run: AckRun, answer: Settled | TailraceError) -> list[FailedAck]:
        """The request is over: tells the waiters, and returns the failures that nobody waited for. What has
        gathered meanwhile is due to be sent (see `take`)."""
        self._under_way.pop(run.place, None)
        stale: dict[int, set[int]] = {}
        if isinstance(answer, Settled):
            for lease_id, spans in answer.lost:
                stale.setdefault(lease_id, set()).update(offsets_of(spans))
        failed: list[FailedAck] = []
        error = answer if isinstance(answer, TailraceError) else None
        for lease, offsets in run.taken:
            lease.asked.difference_update(offsets)
            if error is not None:
                lost = set(offsets)
            elif stale:
                lost = stale.get(lease.id, set()).intersection(offsets)
            else:
                lost = set()
            if lost:
                lease.gone |= lost
                awaited = {offset for other, offset, _ in run.waiters if other is lease}
                failed += failures(run.place, lost - awaited, error or lease.lost(min(lost)))
            self.drop_done(lease)
        for lease, offset, told in run.waiters:
            told((error or lease.lost(offset)) if offset in lease.gone else None)
        return failed

    def pending(self, places: Iterable[Place] | None = None) -> bool:
        """Whether acknowledgements are gathered or under way."""
        if places is None:
            return bool(self._dirty or self._under_way)
        return any(place in self._dirty or place in self._under_way for place in places)

    def abandon(self, error: TailraceError) -> list[FailedAck]:
        """Nothing can be sent any more: what is gathered or under way has failed."""
        failed: list[FailedAck] = []
        for run in list(self._under_way.values()):
            failed += self.answered(run, error)
        for place in list(self._dirty):
            unsent, lost = self.take(place, 0)
            failed += lost
            if unsent is not None:
                failed += self.answered(unsent, error)
        return failed

    def left(self, places: Iterable[Place]) -> bool:
        """Whether something of these partitions is not settled."""
        return any(lease.place in places and not lease.done for lease in self._held.values())

    # -- other settlements

    def settled(self, lease: HeldLease, offsets: Sequence[int], lost: Iterable[int]) -> None:
        """A request of another kind about these offsets (see `HeldLease.take`) is over."""
        lease.asked.difference_update(offsets)
        lease.gone.update(lost)
        self.drop_done(lease)

    def refused(self, lease: HeldLease, offsets: Sequence[int]) -> None:
        """A request about these offsets did not happen: they may be settled again."""
        lease.asked.difference_update(offsets)
        (lease.gone if lease.error is not None else lease.open).update(offsets)

    def lose(self, lease: HeldLease, error: TailraceError) -> None:
        """The lease is over for everything that is not settled."""
        lease.error = error
        lease.gone |= lease.open
        lease.open.clear()
        if not lease.acks:
            lease.idle = True
        self.drop_done(lease)

    def forget(self, lease: HeldLease, offsets: Iterable[int]) -> None:
        """Some messages of a lease went back to the broker."""
        for offset in offsets:
            if offset in lease.open:
                lease.open.discard(offset)
                lease.gone.add(offset)
        self.drop_done(lease)

    # -- extension

    def started(self, lease: HeldLease, since_ms: float, lease_ms: float) -> None:
        """A lease counts `lease_ms` from then, or a little later: it is extended at half of that."""
        lease.extend_ms = since_ms + lease_ms / 2
        lease.deadline_ms = deadline_ms(since_ms, lease_ms)

    def due(self, now_ms: float) -> dict[Place, list[HeldLease]]:
        """Leases to extend now, by partition."""
        due: dict[Place, list[HeldLease]] = {}
        for lease in self._held.values():
            if lease.extend_ms <= now_ms and lease.error is None:
                due.setdefault(lease.place, []).append(lease)
        return due

    def next_due_ms(self) -> float:
        """When the first lease wants to be extended; `UNDER_WAY` when none does."""
        dues = (lease.extend_ms for lease in self._held.values() if lease.error is None)
        return min(dues, default=UNDER_WAY)


def deadline_ms(since_ms: float, lease_ms: float) -> float:
    """When a lease may be over: a little early, because the broker's clock may be faster than this one."""
    return since_ms + lease_ms * (1 - DRIFT)


def failures(place: Place, offsets: Iterable[int], error: TailraceError) -> list[FailedAck]:
    """One failure for each run of offsets."""
    spans = spans_of(sorted(offsets))
    pairs = zip(spans[::2], spans[1::2], strict=True)
    return [FailedAck(place[0], place[1], first, end, error) for first, end in pairs]


def spans_of(offsets: Sequence[int]) -> list[int]:
    """Ascending offsets as flat half-open spans."""
    if not offsets:
        return []
    first, last = offsets[0], offsets[-1]
    if last - first + 1 == len(offsets):
        return [first, last + 1]
    rows = np.array(offsets)
    breaks = np.flatnonzero(rows[1:] - rows[:-1] != 1)
    spans = np.empty(2 * len(breaks) + 2, np.int64)
    spans[0], spans[2::2] = first, rows[breaks + 1]
    spans[-1], spans[1:-1:2] = last + 1, rows[breaks] + 1
    return spans.tolist()


def offsets_of(spans: Sequence[int]) -> Iterable[int]:
    """The offsets of flat spans."""
    for at in range(0, len(spans), 2):
        yield from range(spans[at], spans[at + 1])
