"""Leased messages as applications get them: a delivery, a batch of them, and the rows that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.client.messages import Message, Rows
from tailrace.client.queue.held_leases import HeldLease, Unstarted
from tailrace.client.sdk_tuning import FEW_RUNS
from tailrace.core.model.identifiers import HAS_HEADERS, HAS_PRIORITY, PRIORITY_DEFAULT
from tailrace.core.model.queue_commands import Grant
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.format.frame import Buffer, Header
from tailrace.format.schema import numbers_of
from tailrace.format.small import PlainRows, plain_rows

REDRIVE_HEADER = "tailrace-redrive-group"
"""On a message that was published again from the dead letters: the only group that it is for."""


L = TypeVar("L", bound="LeasedMessage")


class Settling(Protocol):
    """What deliveries need of their consumer."""

    group: str
    wrapper: object
    """What deliveries of another thread need in addition: `tailrace.sync` sets and reads it."""

    async def ack(self, deliveries: Sequence[LeasedMessage]) -> None:
        """Settle and wait until it is durable."""
        ...

    def ack_late(self, delivery: LeasedMessage) -> None:
        """Settle without waiting, called for another thread."""
        ...

    async def nack(
        self, deliveries: Sequence[LeasedMessage], delay: float | None, error: str, failure: bool
    ) -> None:
        """Give back."""
        ...

    async def reject(self, deliveries: Sequence[LeasedMessage], reason: str, poison: bool) -> None:
        """Send to the dead letters."""
        ...

    async def extend(self, lease: HeldLease, ms: int) -> None:
        """Move the deadline."""
        ...

    def is_over(self, lease: HeldLease) -> bool:
        """Whether a lease has ended, as far as can be told here."""
        ...

    def went_back_before(self, delivery: LeasedMessage) -> int:
        """The number of the first lease that was granted after a message went back; see `HeldLeases`."""
        ...

    def let_go(self, delivery: LeasedMessage) -> None:
        """Return a message that a handler had, without a failure, and without waiting for it."""
        ...

    def give_back(self, unstarted: Unstarted) -> None:
        """Return messages that no handler got, without waiting for it."""
        ...


class LeasedRows(Rows):
    """Rows of one frame, all of them leased by one lease."""

    __slots__ = ("_count", "_lane", "lease", "rank", "settling", "urgent")

    def __init__(
        self,
        lease: HeldLease,
        settling: Settling,
        header: Header,
        batch: pa.RecordBatch | PlainRows,
    ) -> None:
        super().__init__(lease.place[0], lease.place[1], header, batch)
        self._count = len(batch.values) if isinstance(batch, PlainRows) else int(batch.num_rows)
        self._lane: int | None = None
        self.lease = lease
        self.settling = settling
        self.rank = 0
        """Lower ones are handed out first, see `client.queue.hand`."""
        self.urgent = False
        """Whether they were asked for because they are more urgent than others that were in hand."""

    def __len__(self) -> int:
        return self._count

    def offsets(self) -> Sequence[int]:
        """The offset of every row, in order."""
        base = self.base_offset
        if self.deltas is None:
            return range(base, base + len(self))
        return [base + delta for delta in self.deltas]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only some of the rows, in their order. Deliveries that were made before must not be used."""
        if len(rows) == len(self):
            return
        first, last = (rows[0], rows[-1]) if rows else (0, -1)
        if self.deltas is None and last - first + 1 == len(rows):
            self.base_offset += first
            self._batch = self.batch.slice(first, len(rows))
        else:
            offsets = self.offsets()
            self.deltas = [offsets[row] - self.base_offset for row in rows]
            self._batch = self.batch.take(numbers_of(rows))
        self._lists = self._plain = None
        self._count, self._lane = len(rows), None

    def rest(self, first: int) -> LeasedRows | None:
        """A copy that begins at a row; None when nothing is there."""
        return self.part(range(first, len(self))) if first < len(self) else None

    def part(self, chosen: Sequence[int]) -> LeasedRows:
        """A copy with some of the rows, in their order."""
        rows = LeasedRows(self.lease, self.settling, self.header, self.batch)
        rows.base_offset, rows.deltas = self.base_offset, self.deltas
        rows.rank, rows.urgent = self.rank, self.urgent
        rows.keep(chosen)
        return rows

    def lanes(self) -> Sequence[int] | None:
        """The priority of every row; None when all have the usual one."""
        return self.values("priority") if self.header.columns & HAS_PRIORITY else None

    def lane(self) -> int:
        """The most urgent lane of any row; looked for once, because the hand asks with each message."""
        if self._lane is None:
            self._lane = min(self.lanes() or (PRIORITY_DEFAULT,))
        return self._lane

    def orders(self, ordering: str) -> Sequence[object]:
        """What every row keeps its order with, as `order_of` has it."""
        topic, partition = self.lease.place
        if ordering == "partition":
            return [(topic, partition)] * len(self)
        keys = self.values("key") if ordering == "key" else None
        if keys is None:
            return [None] * len(self)
        return [None if key is None else (topic, partition, key) for key in keys]

    def deliveries(self, kind: type[L]) -> Iterator[L]:
        """One delivery of a kind for each row."""
        values = self.values("value")
        assert values is not None
        return map(kind, repeat(self), values, range(len(values)))


class LeasedMessage(Message, frozen=True, gc=False, eq=False):
    """A leased message, without the ways to settle it."""

    rows: LeasedRows

    @property
    def group(self) -> str:
        """The group that it was delivered to."""
        return self.rows.settling.group

    @property
    def lease(self) -> int:
        """The lease that holds it; with the offset it is the receipt."""
        return self.rows.lease.id

    @property
    def deliveries(self) -> int:
        """How often it was delivered to the group, this time counted."""
        return self.rows.lease.counts(self.offset)[0]

    @property
    def attempt(self) -> int:
        """Failures so far + 1: messages that were only given back do not count."""
        return self.rows.lease.counts(self.offset)[1] + 1

    @property
    def settled(self) -> bool:
        """Whether it was acknowledged, given back or rejected here."""
        return self.rows.lease.is_settled(self.offset)

    def __repr__(self) -> str:
        place = f"{self.topic}/{self.partition}@{self.offset}"
        return f"Delivery({place}, attempt={self.attempt}, key={self.key!r}, value={self.value!r})"


def order_of(message: LeasedMessage, ordering: str) -> object:
    """What a message keeps its order with: its key or its partition; None: nothing."""
    if ordering == "partition":
        return (message.topic, message.partition)
    if ordering == "key":
        rows = message.rows
        keys = rows.values("key")
        if keys is not None and (key := keys[message.row]) is not None:
            return (rows.topic, rows.partition, key)
    return None


class Delivery(LeasedMessage, frozen=True, gc=False, eq=False):
    """A leased message. Settle it with `ack`, `nack` or `reject`; settling it twice is harmless, and a
    receipt that is stale raises `LeaseLost`."""

    async def ack(self) -> None:
        """It is done; returns when that is durable."""
        await self.rows.settling.ack((self,))

    def ack_nowait(self) -> None:
        """It is done; acknowledgements gather and leave together. A failure shows in `consumer.failures`, in
        `consumer.commit()` and when the consumer is left."""
        rows = self.rows
        lease, deltas = rows.lease, rows.deltas
        lease.acks.append(rows.base_offset + (self.row if deltas is None else deltas[self.row]))
        if lease.idle:
            lease.wake()

    async def nack(self, delay: float | None = None, error: str = "", *, failure: bool = True) -> None:
        """It failed: another attempt comes after the group's back-off, or after `delay` seconds. With
        `failure=False` it is only given back: at once, and no attempt is counted."""
        await self.rows.settling.nack((self,), delay, error, failure)

    async def reject(self, reason: str = "", *, poison: bool = False) -> None:
        """It can never be handled: straight to the dead letters, with `reason` as its error. `poison` says
        that it could not even be read."""
        await self.rows.settling.reject((self,), reason, poison)

    async def extend(self, ms: int) -> None:
        """Hold its lease, and all of that lease's messages, until now + `ms`. Seldom needed: the consumer
        extends what it holds by itself."""
        await self.rows.settling.extend(self.rows.lease, ms)


class Batch(list[Delivery]):
    """Deliveries that came together. Each can be settled on its own; the methods settle what is left."""

    def _left(self) -> list[Delivery]:
        return [delivery for delivery in self if not delivery.settled]

    async def ack(self) -> None:
        """All of it is done; returns when that is durable."""
        if self:
            await self[0].rows.settling.ack(self)

    def ack_nowait(self) -> None:
        """All of it is done; see `Delivery.ack_nowait`."""
        for delivery in self:
            delivery.ack_nowait()

    async def nack(self, delay: float | None = None, error: str = "", *, failure: bool = True) -> None:
        """What is not settled failed; see `Delivery.nack`."""
        if left := self._left():
            await left[0].rows.settling.nack(left, delay, error, failure)

    async def reject(self, reason: str = "", *, poison: bool = False) -> None:
        """What is not settled goes to the dead letters; see `Delivery.reject`."""
        if left := self._left():
            await left[0].rows.settling.reject(left, reason, poison)


def unpack(lease: HeldLease, settling: Settling, grant: Grant, data: Buffer) -> list[LeasedRows]:
    """The leased rows of a grant, frame by frame; raises `Corrupt`. Enters the offsets into the lease."""
    found: list[LeasedRows] = []
    frames = [(header, body) for header, body in frame.walk(data) if header.kind == frame.DATA]
    # All that is granted is there; so frames of just as many rows hold nothing else.
    exact = sum([header.count for header, _ in frames]) == sum([run[1] for run in grant.runs])
    for header, body in frames:
        batch = plain_rows(body, header.columns) or arrow.decode(body, header.columns)
        rows = LeasedRows(lease, settling, header, batch)
        if not exact:
            _keep_leased(rows, grant.runs)
        if len(rows):
            lease.open.update(rows.offsets())
            found.append(rows)
    return found


def _keep_leased(rows: LeasedRows, runs: Sequence[tuple[int, int, int, int]]) -> None:
    if rows.deltas is None and len(runs) <= FEW_RUNS:
        base, end = rows.base_offset, rows.base_offset + len(rows)
        parts = [
            (first, first + count) for first, count, _, _ in runs if first < end and base < first + count
        ]
        if len(parts) == 1:
            rows.keep(range(max(base, parts[0][0]) - base, min(end, parts[0][1]) - base))
            return
    offsets = np.asarray(rows.offsets())
    starts, counts, _, _ = zip(*runs, strict=True)
    firsts = np.array(starts)
    order = firsts.argsort()
    firsts, ends = firsts[order], (firsts + counts)[order]
    at = np.searchsorted(firsts, offsets, "right") - 1
    leased = (at >= 0) & (offsets < ends[at])
    if not leased.all():
        rows.keep(np.flatnonzero(leased).tolist())


def foreign_rows(rows: Rows, group: str) -> list[int]:
    """Rows that were redriven from the dead letters for another group: this one has seen them already."""
    if not rows.header.columns & HAS_HEADERS:
        return []
    names = rows.batch.column("headers").keys
    if not pc.any(pc.equal(names, REDRIVE_HEADER)).as_py():
        return []
    headers = rows.values("headers")
    assert headers is not None
    mine = group.encode()
    return [
        row
        for row, given in enumerate(headers)
        if any(name == REDRIVE_HEADER and value != mine for name, value in given or ())
    ]
