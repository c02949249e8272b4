"""What comes in to a consumer of a queue: long polls that lease ahead, and the rows not handed out yet.

One `Lease` for each topic is under way while there is room. When the partitions that may be asked change, new
polls go out at once; the older ones are still answered, but not repeated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tailrace.client.calls import PAUSE_S_MAX, error_of
from tailrace.client.consumer_options import ConsumerOptions
from tailrace.client.deliveries import Delivery, Leased, LeasedRows, foreign_rows, unpack
from tailrace.client.leases import HeldLease, deadline_ms
from tailrace.client.membership import Member
from tailrace.client.retries import Retries
from tailrace.client.settling import Settlement
from tailrace.core.commands import Reply
from tailrace.core.delivery_commands import Grant, Lease, Leases, Nack
from tailrace.core.group_commands import JoinGroup, Place
from tailrace.core.model import Refusal
from tailrace.errors import Fenced, InvalidRequest, NotFound, TailraceError
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs

WAIT_MS = 30_000
HELD_MAX = 5_000
CALM_MS = 50
"""So long after a look at a lease, messages of it are handed out without another."""
YIELD_ROWS = 256
"""After so many messages in a row the loop gets a turn, so that the next ones can arrive meanwhile."""


class Intake:
    """See `membership.Holder`. Messages are taken from `current`; `last` is the one that was handed out."""

    def __init__(
        self, verbs: BrokerVerbs, request: JoinGroup, timeout: float, options: ConsumerOptions
    ) -> None:
        self._verbs = verbs
        self._request = request
        self._options = options
        self._loop = asyncio.get_running_loop()
        self.settlement = Settlement(
            verbs,
            request.group,
            timeout,
            went_back=self._went_back,
            lost=self._lease_lost,
        )
        self.membership = Member(
            verbs, self, request, timeout, on_assigned=options.on_assigned, on_revoked=options.on_revoked
        )
        self._ready: dict[str, dict[int, int]] = {}
        self._paused: set[Place] = set()
        self._epoch = 0
        self._polling: set[str] = set()
        self._doubtful: set[str] = set()
        """Topics of which an answer was lost: it may have granted leases that nobody here knows. The next
        poll says what is held, and until it is answered no other goes out."""
        self._clearing: set[str] = set()
        self._retries = Retries(self._poll)
        self._hungry = False
        self._buffer: deque[LeasedRows] = deque()
        self._ahead = 0
        self._rows: LeasedRows | None = None
        self.current: Iterator[Any] = iter(())
        self.last: Leased | None = None
        self.kind: type[Leased] = Delivery
        self.wall_ns = verbs.clock.wall_ns
        self.calm_ns = self.until_ns = 0
        """While the wall clock is in this span, the current rows need no look at their lease; see
        `is_over`."""
        self._safe_ms = 0.0
        self.guard: AbstractContextManager[object] = nullcontext()
        """Held by whoever takes from `current` in another thread (see `tailrace.sync`)."""
        self._streak = 0
        self._taking = False
        self._stopping = False
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self.closed: TailraceError | None = None

    # -- handing out

    async def take(self) -> None:
        """Make the next rows the current ones, as soon as there are any."""
        if self._taking:
            raise InvalidRequest("a consumer serves one task at a time; `run` has `concurrency`")
        self._taking = True
        try:
            if self._streak >= YIELD_ROWS:
                self._streak = 0
                await asyncio.sleep(0)
            while not self.next_rows():
                waiter = self._loop.create_future()
                self._streak = 0
                self._waiters.append(waiter)
                self._hungry = True
                self._poll()
                await waiter
        finally:
            self._taking = False

    def next_rows(self) -> bool:
        """Make the next buffered rows the current ones; False when nothing is there."""
        if self.closed is not None:
            raise self.closed
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._stopping:
            raise StopAsyncIteration
        self._rows = self.last = None
        while self._buffer:
            rows = self._buffer.popleft()
            self._ahead -= len(rows)
            lease = rows.lease
            calm = self.calm_ns <= self.wall_ns() < self.until_ns and lease.deadline_ms > self._safe_ms
            if lease.error is not None if calm else self.is_over(lease):
                continue
            self._rows = rows
            self.current = rows.deliveries(self.kind)
            self._streak += len(rows)
            self._poll()
            return True
        return False

    def is_over(self, lease: HeldLease) -> bool:
        """Whether the lease of the rows that are handed out is over.

        Asked for each message, this would cost more than the message. So it says for how long it need not be
        asked: whatever makes this process stand still moves the wall clock, too, which is cheap to read."""
        now_ms = self.settlement.now_ms()
        self.calm_ns = self.until_ns = 0
        self._safe_ms = now_ms + CALM_MS
        if lease.deadline_ms > self._safe_ms:
            self.calm_ns = self.wall_ns()
            self.until_ns = self.calm_ns + CALM_MS * 1_000_000
        return self.settlement.is_over(lease)

    def more(self) -> bool:
        """The same for who has messages in hand already: trouble, or the end, waits until they are used."""
        trouble = self.closed is not None or self._error is not None or self._stopping
        return not trouble and self.next_rows()

    def ready(self) -> Any:
        """Hand out the next message when one is at hand and nobody else is waiting for it; else None."""
        if self._taking:
            return None
        while True:
            message = next(self.current, None)
            if message is None and self.more():
                message = next(self.current)
            if message is None:
                return None
            self.last = message
            if self.calm_ns <= self.wall_ns() < self.until_ns or not self.is_over(message.rows.lease):
                return message

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def stop(self) -> None:
        """Hand out nothing more."""
        with self.guard:
            self._stopping = True
            self.current = iter(())
        self._wake()

    def refuse(self, error: TailraceError) -> None:
        """Nothing is handed out or leased from now on; what is settled still counts."""
        self.closed = error
        self._retries.at_once()
        self._wake()

    def end(self, error: TailraceError) -> None:
        """Nothing is settled any more either."""
        self.refuse(error)
        self._buffer.clear()
        self._ahead = 0
        with self.guard:
            self.current = iter(())
            self._rows = self.last = None
        self.settlement.close(error)

    # -- dropping what is not handed out

    def _went_back(self, deliveries: Sequence[Leased]) -> None:
        """Messages have to come again: the later ones of their keys are not handed out before. The broker
        took them back, too, or is given them now, where nobody here can tell."""
        ordering = self.membership.policy.ordering
        for failed in deliveries:
            place, offset = failed.rows.lease.place, failed.offset
            fresh = self.settlement.leases.went_back_before(failed.rows.lease, offset)
            key = failed.key if ordering == "key" else None
            if ordering == "none" or (ordering == "key" and key is None):
                continue

            def later(
                rows: LeasedRows,
                place: Place = place,
                offset: int = offset,
                key: bytes | None = key,
                fresh: int = fresh,
            ) -> Sequence[int]:
                stale = rows.lease.place == place and rows.lease.number < fresh
                return _later(rows, offset, key) if stale else ()

            self._drop(later, self.settlement.give_back)

    def _lease_lost(self, lease: HeldLease) -> None:
        """Its messages come again, and what is buffered behind them goes back to come after them."""
        self._drop(lambda rows: range(len(rows)) if rows.lease is lease else ())
        if lease.gone and self.membership.policy.ordering != "none":
            lowest = min(lease.gone)

            def later(rows: LeasedRows) -> Sequence[int]:
                return _later(rows, lowest, None) if rows.lease.place == lease.place else ()

            self._drop(later, self.settlement.give_back)

    def _drop(
        self,
        chosen: Callable[[LeasedRows], Sequence[int]],
        put: Callable[[HeldLease, Sequence[int]], None] | None = None,
    ) -> None:
        """Take rows out of what is not handed out yet; `put` says what becomes of their offsets."""
        with self.guard:
            # What is left of the current rows goes back to the buffer, to be treated alike.
            current, last = self._rows, self.last
            self.current = iter(())
            self._rows = self.last = None
        rest = None if current is None else current.rest(0 if last is None else last.row + 1)
        if rest is not None:
            self._buffer.appendleft(rest)
            self._ahead += len(rest)
        kept: deque[LeasedRows] = deque()
        for rows in self._buffer:
            out = set(chosen(rows))
            if out:
                offsets = rows.offsets()
                (put or self.settlement.leases.forget)(rows.lease, [offsets[row] for row in out])
                rows.keep([row for row in range(len(rows)) if row not in out])
                self._ahead -= len(out)
            if len(rows):
                kept.append(rows)
        self._buffer = kept
        self._poll()

    # -- partitions

    def pause(self, places: set[Place]) -> None:
        """Hand out nothing more of these; what was leased ahead of them is given back."""
        self._paused |= places
        self._renew_polls()
        self._drop(_all_of(places), self.settlement.give_back)

    def resume(self, places: set[Place]) -> None:
        """Go on with these, or with all."""
        self._paused -= places or set(self._paused)
        self._renew_polls()

    def granted(self, places: dict[Place, int]) -> None:
        """See `membership.Holder`."""
        self.settlement.lease_ms = self.membership.policy.lease_ms
        for (topic, partition), generation in places.items():
            self._ready.setdefault(topic, {})[partition] = generation
        self._renew_polls()

    def reconfigured(self) -> None:
        """See `membership.Holder`."""
        self.settlement.lease_ms = self.membership.policy.lease_ms
        self._renew_polls()

    def _not_ready(self, places: set[Place]) -> None:
        for topic, partition in places:
            self._ready.get(topic, {}).pop(partition, None)
        self._renew_polls()

    def withdrawn(self, places: set[Place]) -> None:
        """See `membership.Holder`."""
        self._not_ready(places)
        # They go back when the partition does: given back now, a poll that is under way would get them again.
        self._drop(_all_of(places), self.settlement.leases.keep)

    async def release(self, places: set[Place], seconds: float) -> None:
        """See `membership.Holder`: wait for what is handed out. What is not settled in time goes back with
        the partition, without a failure."""
        await self.settlement.settled(places, seconds)
        await self.settlement.flushed(places)
        for place in places:
            for lease in self.settlement.leases.of(place):
                self.settlement.lose(lease)

    def dropped(self, places: set[Place]) -> None:
        """See `membership.Holder`."""
        self._not_ready(places)
        self._drop(_all_of(places))

    def tick(self) -> None:
        """See `membership.Holder`."""
        self.settlement.tick()

    def failed(self, error: BaseException) -> None:
        """See `membership.Holder`."""
        self._error = error
        self._wake()

    def woken(self) -> None:
        """See `membership.Holder`."""
        self._renew_polls()

    # -- leasing

    def _renew_polls(self) -> None:
        """What is asked for has changed: polls under way are still answered, but not repeated."""
        self._epoch += 1
        self._polling.clear()
        self._retries.at_once()
        self._poll()

    def _poll(self) -> None:
        """Lease ahead: one long poll for each topic while there is room."""
        options = self._options
        if not self._hungry or self.closed is not None or self._stopping:
            return
        if options.prefetch:
            room = options.prefetch - self._ahead
            if room < min(options.batch_size, max(1, options.prefetch // 2)):
                return
        elif self._ahead or not self._waiters:
            return
        else:
            room = options.batch_size
        for topic, partitions in self._ready.items():
            if topic in self._polling or topic in self._clearing or self._retries.waits(topic):
                continue
            wanted = [(p, g) for p, g in partitions.items() if (topic, p) not in self._paused]
            if wanted:
                self._polling.add(topic)
                self._submit(topic, wanted, min(options.batch_size, room))

    def _submit(self, topic: str, wanted: list[tuple[int, int]], count_max: int) -> None:
        epoch, sent_ms = self._epoch, self.settlement.now_ms()
        lease_ms = self.settlement.lease_ms  # The group's may be changed before the answer comes.
        generations = dict(wanted)
        held = self._held(topic) if topic in self._doubtful else None
        if held is not None:
            self._clearing.add(topic)

        def respond(reply: Reply, parts: Sequence[Buffer]) -> None:
            if epoch == self._epoch:
                self._polling.discard(topic)
            if held is not None:
                self._clearing.discard(topic)
            if isinstance(reply, Refusal):
                if reply.outcome != "none":
                    self._doubtful.add(topic)
                if epoch == self._epoch or held is not None:
                    self._refused(topic, reply)
                return
            if held is not None:
                self._doubtful.discard(topic)
            assert isinstance(reply, Leases)
            self._retries.served(topic)
            self._arrived(topic, generations, reply, parts, (sent_ms + reply.waited_ms, lease_ms))
            # Later, not now: a broker in this process may answer from within `submit`.
            self._loop.call_soon(self._poll)

        group, member = self._request.group, self._request.member
        size = self._options.fetch_bytes_max
        wait_ms = WAIT_MS if held is None else 0
        request = Lease(topic, group, member, wanted, count_max, size, wait_ms, lease_ms, held)
        self._verbs.submit(request, b"", respond)

    def _held(self, topic: str) -> list[int] | None:
        """The leases of a topic; None when they are too many for a request: then unknown ones end by
        themselves."""
        leases = self.settlement.leases.of()
        held = [lease.id for lease in leases if lease.place[0] == topic and lease.error is None]
        return held if len(held) <= HELD_MAX else None

    def _refused(self, topic: str, reply: Refusal) -> None:
        error = error_of(reply)
        if self.closed is not None:
            return
        if isinstance(error, Fenced | NotFound):
            self._retries.refused(topic)
            self.membership.rejoin()
        elif error.retriable:
            self._retries.refused(topic)
        else:
            self._retries.refused(topic, PAUSE_S_MAX)
            self.failed(error)

    def _arrived(
        self,
        topic: str,
        generations: dict[int, int],
        reply: Leases,
        parts: Sequence[Buffer],
        times: tuple[float, int],
    ) -> None:
        """Leases were granted, at a time or later and for so long (`times`). They may be over already: this
        process stood still before it looked at the answer."""
        data = memoryview(parts[0]) if len(parts) == 1 else memoryview(b"".join(parts))
        ready = self._ready.get(topic, {})
        in_time = deadline_ms(*times) > self.settlement.now_ms()
        at = 0
        for grant in reply.grants:
            piece = data[at : at + grant.nbytes]
            at += grant.nbytes
            place, generation = (topic, grant.partition), generations.get(grant.partition, -1)
            useful = ready.get(grant.partition) == generation and place not in self._paused
            if useful and in_time and self.closed is None and not self._stopping:
                self._add(place, generation, grant, piece, times)
            else:
                self._give_back(topic, grant)
        self._wake()

    def _give_back(self, topic: str, grant: Grant) -> None:
        """Nobody here wants it any more; when this does not arrive, the lease ends by itself."""
        spans = [n for first, count, _, _ in sorted(grant.runs) for n in (first, first + count)]
        group = self._request.group
        request = Nack(topic, grant.partition, group, grant.lease, spans, failure=False)
        self._verbs.submit(request, b"", lambda reply, parts: None)

    def _add(
        self, place: Place, generation: int, grant: Grant, data: Buffer, times: tuple[float, int]
    ) -> None:
        for older, offsets in self.settlement.leases.superseded(place, grant.runs).items():
            self._drop(_of_lease(older, offsets))
            self.settlement.leases.forget(older, offsets)
        lease = self.settlement.leases.add(place, generation, grant)
        try:
            found = unpack(lease, self.settlement, grant, data)
        except TailraceError as error:
            self.settlement.lose(lease)
            self.settlement.leases.drop_done(lease)
            self.failed(error)
            return
        self.settlement.started(lease, *times)
        for rows in found:
            foreign = foreign_rows(rows, self._request.group)
            if foreign:
                deliveries = list(rows.deliveries(Delivery))
                for row in foreign:
                    deliveries[row].ack_nowait()
                rows.keep(sorted(set(range(len(rows))) - set(foreign)))
            if len(rows):
                self._buffer.append(rows)
                self._ahead += len(rows)


def _all_of(places: set[Place]) -> Callable[[LeasedRows], Sequence[int]]:
    return lambda rows: range(len(rows)) if rows.lease.place in places else ()


def _of_lease(lease: HeldLease, offsets: set[int]) -> Callable[[LeasedRows], Sequence[int]]:
    def chosen(rows: LeasedRows) -> Sequence[int]:
        if rows.lease is not lease:
            return ()
        return [row for row, offset in enumerate(rows.offsets()) if offset in offsets]

    return chosen


def _later(rows: LeasedRows, offset: int, key: bytes | None) -> Sequence[int]:
    """Rows behind an offset, of a key or all."""
    offsets = rows.offsets()
    if key is None:
        return [row for row, other in enumerate(offsets) if other > offset]
    keys = rows.values("key")
    if keys is None:
        return ()
    return [row for row, other in enumerate(keys) if other == key and offsets[row] > offset]
