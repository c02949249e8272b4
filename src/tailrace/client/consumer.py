"""The consumer of a queue: leases ahead by long polls, hands messages out, and settles what comes back.

Nothing is awaited per message: rows of a lease are handed out from memory, acknowledgements gather in lists.
What was leased and not settled goes back without a failure when the consumer is left, in whatever way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from tailrace.client.calls import PAUSE_S_MAX, PAUSE_S_MIN, error_of
from tailrace.client.consumer_options import ConsumerOptions
from tailrace.client.deliveries import Batch, Delivery, Leased, LeasedRows, foreign_rows, unpack
from tailrace.client.handling import Handler, Runner
from tailrace.client.leases import FailedAck, HeldLease
from tailrace.client.membership import Member, client_name
from tailrace.client.settling import Settlement
from tailrace.core.commands import Reply
from tailrace.core.delivery_commands import Lease, Leases, Nack
from tailrace.core.group_commands import JoinGroup, Place
from tailrace.core.model import Refusal
from tailrace.errors import Fenced, InvalidRequest, NotFound, TailraceError, Timeout, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs

WAIT_MS = 30_000
YIELD_ROWS = 256
"""After so many messages in a row the loop gets a turn, so that the next ones can arrive meanwhile."""
EXIT_S = 5.0


class Consumer:
    """Consumes topics as a member of a group. Use it as an async context manager: entering joins, leaving
    gives back what is not settled and leaves the group."""

    def __init__(
        self, verbs: BrokerVerbs, topics: Sequence[str], group: str, timeout: float, options: ConsumerOptions
    ) -> None:
        self.topics = list(topics)
        self.group = group
        self.member = options.member
        self._verbs = verbs
        self._timeout = timeout
        self._options = options
        self._loop: asyncio.AbstractEventLoop
        self._membership: Member
        self._settlement: Settlement
        self._ready: dict[str, dict[int, int]] = {}
        self._paused: set[Place] = set()
        self._epoch = 0
        self._polling: set[str] = set()
        self._pause_s = PAUSE_S_MIN
        self._hungry = False
        self._buffer: deque[LeasedRows] = deque()
        self._ahead = 0
        self._rows: LeasedRows | None = None
        self._current: Iterator[Any] = iter(())
        self._kind: type[Leased] = Delivery
        self._guard: AbstractContextManager[object] = nullcontext()
        """Held by whoever takes from `_current` in another thread (see `tailrace.sync`)."""
        self._last: Leased | None = None
        self._streak = 0
        self._taking = False
        self._stopping = False
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._closed: TailraceError | None = Unavailable(
            "the consumer is not open: use `async with client.consumer(…)`"
        )

    # -- life

    async def __aenter__(self) -> Consumer:
        if hasattr(self, "_loop"):
            raise InvalidRequest("this consumer was used before: make a new one")
        self._loop = asyncio.get_running_loop()
        self._settlement = Settlement(
            self._verbs, self.group, self._timeout, failed=self._went_back, lost=self._lease_lost
        )
        options = self._options
        request = JoinGroup(
            self.group,
            self.member,
            self.topics,
            {"mode": options.mode, **options.group},
            options.wait,
            client_name(),
        )
        self._membership = Member(
            self._verbs,
            self,
            request,
            self._timeout,
            on_assigned=options.on_assigned,
            on_revoked=options.on_revoked,
        )
        self._closed = None
        try:
            await self._membership.join()
        except BaseException:
            # The request may have arrived all the same.
            self.kill(Unavailable("the consumer could not join"))
            raise
        self._settlement.lease_ms = self._membership.policy.lease_ms
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed is not None:
            return
        self._closed = Unavailable("the consumer is closed")
        self._wake()
        try:
            async with asyncio.timeout(min(EXIT_S, self._timeout)):
                await self._settlement.flushed()
        except TimeoutError:
            self._closed = Timeout("the consumer is closed: the broker did not answer in time")
        finally:
            self._end()
            # Leaving gives back every lease, without a failure.
            await self._membership.leave()
        if kind is None:
            self._settlement.report()

    def kill(self, error: TailraceError) -> None:
        """Stop for good, without a word to the broker."""
        self._closed = error
        if hasattr(self, "_membership"):
            self._membership.stop()
            self._end()
        self._wake()

    def _end(self) -> None:
        assert self._closed is not None
        self._clear()
        self._settlement.close(self._closed)

    def _clear(self) -> None:
        self._buffer.clear()
        self._ahead = 0
        with self._guard:
            self._current = iter(())
            self._rows = self._last = None

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def stop(self) -> None:
        """Take no more messages: `run` returns when the handlers under way are done, loops end."""
        with self._guard:
            self._stopping = True
            self._current = iter(())
        self._wake()

    # -- messages

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> Delivery:
        try:
            message: Delivery = next(self._current)
        except StopIteration:
            await self._take()
            message = next(self._current)
        self._last = message
        return message

    async def batches(self, size: int | None = None) -> AsyncIterator[Batch]:
        """Messages as they come, up to `size` at once (default: `batch_size`); waits only for the first."""
        size = self._options.batch_size if size is None else size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidRequest(f"size: a whole number, at least 1, not {size!r}")
        while True:
            try:
                batch = Batch([await anext(self)])
            except StopAsyncIteration:
                return
            while len(batch) < size:
                for message in self._current:
                    batch.append(message)
                    if len(batch) == size:
                        break
                else:
                    if not self._next_rows():
                        break
            self._last = batch[-1]
            yield batch

    async def run(self, handler: Handler, *, concurrency: int = 1, settle: bool = True) -> None:
        """Call `handler(delivery)` for every message until `stop`; messages of one key one after the other.

        A message whose handler returns is acknowledged, one whose handler raises is given back as a failure.
        With `settle=False` that is left to the handler, and what it raises ends the run.
        """
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise InvalidRequest(f"concurrency: a whole number, at least 1, not {concurrency!r}")
        ordering = self._membership.policy.ordering if self._closed is None else "key"
        await Runner(self, handler, concurrency, settle, ordering, self._options.prefetch).run()

    async def _take(self) -> None:
        """Make the next rows the current ones, as soon as there are any."""
        if self._taking:
            raise InvalidRequest("a consumer serves one task at a time; `run` has `concurrency`")
        self._taking = True
        try:
            if self._streak >= YIELD_ROWS:
                self._streak = 0
                await asyncio.sleep(0)
            while not self._next_rows():
                waiter = self._loop.create_future()
                self._streak = 0
                self._waiters.append(waiter)
                self._hungry = True
                self._poll()
                await waiter
        finally:
            self._taking = False

    def _next_rows(self) -> bool:
        """Make the next buffered rows the current ones; False when nothing is there."""
        self._check_open()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._stopping:
            raise StopAsyncIteration
        self._rows = self._last = None
        now_ms = self._settlement.now_ms()
        while self._buffer:
            rows = self._buffer.popleft()
            self._ahead -= len(rows)
            if rows.lease.error is not None:
                continue
            if rows.lease.deadline_ms <= now_ms:
                self._settlement.lose(rows.lease)  # This process slept, and nobody extended it.
                continue
            self._rows = rows
            self._current = rows.deliveries(self._kind)
            self._streak += len(rows)
            self._poll()
            return True
        return False

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- settling

    @property
    def failures(self) -> list[FailedAck]:
        """Acknowledgements of `ack_nowait` that failed and were not raised yet."""
        return self._settlement.failures

    async def commit(self) -> None:
        """Wait until everything acknowledged so far is durable; raises what failed."""
        self._check_open()
        await self._settlement.flushed()
        self._settlement.report()

    def _went_back(self, deliveries: Sequence[Leased]) -> None:
        """Messages failed: the broker took back the later ones of their keys, so they are not handed out."""
        ordering = self._membership.policy.ordering
        if ordering == "none":
            return
        for failed in deliveries:
            place, offset = failed.rows.lease.place, failed.offset
            key = failed.key if ordering == "key" else None
            if ordering == "key" and key is None:
                continue
            self._drop(
                lambda rows, place=place, offset=offset, key=key: (  # type: ignore[misc]
                    _later(rows, offset, key) if rows.lease.place == place else ()
                )
            )

    def _lease_lost(self, lease: HeldLease) -> None:
        self._drop(lambda rows: range(len(rows)) if rows.lease is lease else ())

    def _drop(self, chosen: Callable[[LeasedRows], Sequence[int]], give_back: bool = False) -> None:
        """Take rows out of what is not handed out yet."""
        with self._guard:
            # What is left of the current rows goes back to the buffer, to be treated alike.
            rows, last = self._rows, self._last
            self._current = iter(())
            self._rows = self._last = None
        rest = None if rows is None else rows.rest(0 if last is None else last.row + 1)
        if rest is not None:
            self._buffer.appendleft(rest)
            self._ahead += len(rest)
        kept: deque[LeasedRows] = deque()
        for rows in self._buffer:
            out = set(chosen(rows))
            if out:
                offsets = rows.offsets()
                gone = [offsets[row] for row in out]
                if give_back:
                    self._settlement.give_back(rows.lease, gone)
                else:
                    self._settlement.leases.forget(rows.lease, gone)
                rows.keep([row for row in range(len(rows)) if row not in out])
                self._ahead -= len(out)
            if len(rows):
                kept.append(rows)
        self._buffer = kept
        if self._hungry:
            self._poll()

    # -- partitions

    def assignment(self) -> set[Place]:
        """The (topic, partition) pairs that this member has."""
        self._check_open()
        return self._membership.assignment()

    def pause(self, *partitions: Place) -> None:
        """Hand out nothing more of these (topic, partition) pairs, or of all that it has. What was leased
        ahead of them is given back."""
        self._check_open()
        places = set(partitions) or self._membership.assignment()
        self._paused |= places
        self._drop(lambda rows: range(len(rows)) if rows.lease.place in places else (), give_back=True)
        self._renew_polls()

    def resume(self, *partitions: Place) -> None:
        """Go on with paused partitions, or with all."""
        self._check_open()
        self._paused -= set(partitions) or set(self._paused)
        self._renew_polls()

    def granted(self, places: dict[Place, int]) -> None:
        """See `membership.Holder`."""
        for (topic, partition), generation in places.items():
            self._ready.setdefault(topic, {})[partition] = generation
        self._renew_polls()

    def withdrawn(self, places: set[Place]) -> None:
        """See `membership.Holder`."""
        for topic, partition in places:
            self._ready.get(topic, {}).pop(partition, None)
        self._drop(lambda rows: range(len(rows)) if rows.lease.place in places else (), give_back=True)
        self._renew_polls()

    async def release(self, places: set[Place], seconds: float) -> None:
        """See `membership.Holder`: wait for what is handed out, and give back what is not settled in time."""
        await self._settlement.settled(places, seconds)
        for place in places:
            for lease in self._settlement.leases.of(place):
                self._settlement.give_back(lease)
                self._settlement.lose(lease)
        await self._settlement.flushed(places)

    def dropped(self, places: set[Place]) -> None:
        """See `membership.Holder`."""
        for topic, partition in places:
            self._ready.get(topic, {}).pop(partition, None)
        for place in places:
            for lease in self._settlement.leases.of(place):
                self._lease_lost(lease)
        self._renew_polls()

    def passed(self, ms: float) -> None:
        """See `membership.Holder`."""
        self._settlement.passed(ms)

    def failed(self, error: BaseException) -> None:
        """See `membership.Holder`."""
        self._error = error
        self._wake()

    def woken(self) -> None:
        """See `membership.Holder`."""
        self._settlement.lease_ms = self._membership.policy.lease_ms
        self._renew_polls()

    # -- leasing

    def _renew_polls(self) -> None:
        """What is asked for has changed: polls under way are still answered, but not repeated."""
        self._epoch += 1
        self._polling.clear()
        self._poll()

    def _poll(self) -> None:
        """Lease ahead: one long poll for each topic while there is room."""
        options = self._options
        room = options.prefetch - self._ahead
        if not self._hungry or self._closed is not None or self._stopping:
            return
        if room < min(options.batch_size, max(1, options.prefetch // 2)):
            return
        for topic, partitions in self._ready.items():
            if topic in self._polling:
                continue
            wanted = [(p, g) for p, g in partitions.items() if (topic, p) not in self._paused]
            if wanted:
                self._polling.add(topic)
                self._submit_poll(topic, wanted, min(options.batch_size, room))

    def _submit_poll(self, topic: str, wanted: list[tuple[int, int]], count_max: int) -> None:
        epoch = self._epoch
        generations = dict(wanted)

        def respond(reply: Reply, parts: Sequence[Buffer]) -> None:
            if epoch == self._epoch:
                self._polling.discard(topic)
            if isinstance(reply, Refusal):
                if epoch == self._epoch:
                    self._refused(reply)
                return
            assert isinstance(reply, Leases)
            self._pause_s = PAUSE_S_MIN
            self._arrived(topic, generations, reply, parts)
            # Later, not now: a broker in this process may answer from within `submit`.
            self._loop.call_soon(self._poll)

        request = Lease(
            topic, self.group, self.member, wanted, count_max, self._options.fetch_bytes_max, WAIT_MS
        )
        self._verbs.submit(request, b"", respond)

    def _refused(self, reply: Refusal) -> None:
        error = error_of(reply)
        if self._closed is not None:
            return
        if isinstance(error, Fenced | NotFound):
            self._membership.rejoin()
        elif error.retriable:
            self._loop.call_later(self._pause_s, self._poll)
            self._pause_s = min(self._pause_s * 2, PAUSE_S_MAX)
        else:
            self.failed(error)
            self._loop.call_later(PAUSE_S_MAX, self._poll)

    def _arrived(
        self, topic: str, generations: dict[int, int], reply: Leases, parts: Sequence[Buffer]
    ) -> None:
        data = memoryview(parts[0]) if len(parts) == 1 else memoryview(b"".join(parts))
        ready = self._ready.get(topic, {})
        at = 0
        for grant in reply.grants:
            piece = data[at : at + grant.nbytes]
            at += grant.nbytes
            place, generation = (topic, grant.partition), generations.get(grant.partition, -1)
            useful = ready.get(grant.partition) == generation and place not in self._paused
            if self._closed is not None or self._stopping or not useful:
                spans = [n for first, count, _, _ in sorted(grant.runs) for n in (first, first + count)]
                request = Nack(topic, grant.partition, self.group, grant.lease, spans, failure=False)
                self._verbs.submit(request, b"", lambda reply, parts: None)
                continue
            lease = self._settlement.leases.add(place, generation, grant)
            self._settlement.started(lease)
            try:
                found = unpack(lease, self._settlement, grant, piece)
            except TailraceError as error:
                self._settlement.lose(lease)
                self.failed(error)
                continue
            self._add(found)
        self._wake()

    def _add(self, found: list[LeasedRows]) -> None:
        for rows in found:
            foreign = foreign_rows(rows, self.group)
            if foreign:
                deliveries = list(rows.deliveries(Delivery))
                for row in foreign:
                    deliveries[row].ack_nowait()
                rows.keep(sorted(set(range(len(rows))) - set(foreign)))
            if len(rows):
                self._buffer.append(rows)
                self._ahead += len(rows)


def _later(rows: LeasedRows, offset: int, key: bytes | None) -> Sequence[int]:
    """Rows behind an offset, of a key or all."""
    offsets = rows.offsets()
    if key is None:
        return [row for row, other in enumerate(offsets) if other > offset]
    keys = rows.values("key")
    if keys is None:
        return ()
    return [row for row, other in enumerate(keys) if other == key and offsets[row] > offset]
