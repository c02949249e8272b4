"""Blocking consumers: one crossing to the loop per run of rows; settlements cross in bursts or one by one."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from tailrace.client.messages import Message
from tailrace.client.queue import consumer
from tailrace.client.queue import delivery as deliveries
from tailrace.client.queue.held_leases import FailedAck
from tailrace.client.queue.membership import Moved
from tailrace.client.queue.threaded_handlers import BlockingDelivery
from tailrace.client.read import stream_consumer
from tailrace.client.rpc.calls import whole_of
from tailrace.core.model.group_commands import Place
from tailrace.errors import InvalidRequest
from tailrace.sync.portal import Portal

T = TypeVar("T")


class Delivery(deliveries.LeasedMessage, frozen=True, gc=False, eq=False):
    """A leased message; see `tailrace.Delivery`."""

    def _twin(self) -> Consumer:
        twin = self.rows.settling.twin
        assert isinstance(twin, Consumer)
        return twin

    def ack(self) -> None:
        """It is done; returns when that is durable."""
        settling = self.rows.settling
        self._twin()._portal.call(lambda: settling.ack((self,)))

    def ack_nowait(self) -> None:
        """It is done; see `tailrace.Delivery.ack_nowait`."""
        lease = self.rows.lease
        if lease.error is not None and lease.is_lost(self.offset):
            raise lease.error
        self._twin()._hand_over(self)

    def nack(self, delay: float | None = None, error: str = "", *, failure: bool = True) -> None:
        """It failed, or is only given back; see `tailrace.Delivery.nack`."""
        settling = self.rows.settling
        self._twin()._portal.call(lambda: settling.nack((self,), delay, error, failure))

    def reject(self, reason: str = "", *, poison: bool = False) -> None:
        """It can never be handled: straight to the dead letters."""
        settling = self.rows.settling
        self._twin()._portal.call(lambda: settling.reject((self,), reason, poison))

    def extend(self, ms: int) -> None:
        """Hold its lease until now + `ms`."""
        rows = self.rows
        self._twin()._portal.call(lambda: rows.settling.extend(rows.lease, ms))


class Batch(list[Delivery]):
    """Deliveries that came together; see `tailrace.Batch`."""

    def _left(self) -> list[Delivery]:
        return [delivery for delivery in self if not delivery.settled]

    def ack(self) -> None:
        """All of it is done; returns when that is durable."""
        if self:
            settling = self[0].rows.settling
            self[0]._twin()._portal.call(lambda: settling.ack(self))

    def ack_nowait(self) -> None:
        """All of it is done."""
        for delivery in self:
            delivery.ack_nowait()

    def nack(self, delay: float | None = None, error: str = "", *, failure: bool = True) -> None:
        """What is not settled failed."""
        if left := self._left():
            settling = left[0].rows.settling
            left[0]._twin()._portal.call(lambda: settling.nack(left, delay, error, failure))

    def reject(self, reason: str = "", *, poison: bool = False) -> None:
        """What is not settled goes to the dead letters."""
        if left := self._left():
            settling = left[0].rows.settling
            left[0]._twin()._portal.call(lambda: settling.reject(left, reason, poison))


class Consumer:
    """Consumes topics as a member of a group; see `tailrace.Consumer`. Use it as a context manager. Threads
    may share it: each gets other messages."""

    def __init__(self, portal: Portal, inner: consumer.Consumer) -> None:
        self.topics, self.group, self.member = inner.topics, inner.group, inner.member
        self._portal = portal
        self._inner = inner
        self._lock = threading.Lock()
        self._acks: deque[Delivery] = deque()
        self._draining = False

    def __enter__(self) -> Consumer:
        async def enter() -> None:
            await self._inner.__aenter__()
            intake = self._inner._intake
            intake.guard, intake.settlement.twin = threading.Lock(), self
            intake.hand_out_as(Delivery)

        self._portal.call(enter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def leave() -> None:
            self._drain()
            await self._inner.__aexit__(kind, error, trace)

        self._portal.call(leave)

    def __iter__(self) -> Consumer:
        return self

    def __next__(self) -> Delivery:
        if self._portal.gone is not None:  # A lock from before a fork may never open.
            raise self._portal.gone
        with self._lock:
            return self._next()

    def _next(self) -> Delivery:
        intake = self._inner._open()
        while True:
            delivery = None
            with intake.guard:
                for delivery in intake.current:
                    intake.last = delivery
                    break
            if delivery is not None:
                assert isinstance(delivery, Delivery)
                if intake.calm_ns <= intake.wall_ns() < intake.until_ns or not self._is_over(delivery):
                    return delivery
                continue
            try:
                self._portal.call(intake.take)
            except StopAsyncIteration:
                raise StopIteration from None

    def _is_over(self, delivery: Delivery) -> bool:
        intake = self._inner._intake
        return self._portal.call(lambda: _on_loop(lambda: intake.is_over(delivery.rows.lease)))

    def batches(self, size: int | None = None) -> Iterator[Batch]:
        """Messages as they come, up to `size` at once; see `tailrace.Consumer.batches`."""
        size = self._inner._options.batch_size if size is None else size
        whole_of("size", size)
        intake = self._inner._open()
        now_ms = intake.settlement.now_ms
        intake.sampling = False
        try:
            while True:
                with self._lock:
                    try:
                        batch = Batch([self._next()])
                    except StopIteration:
                        return
                    while self._fill(batch, size) and intake.in_hand():
                        if not self._portal.call(lambda: _on_loop(intake.more)):
                            break
                began_ms, count = now_ms(), len(batch)
                yield batch
                intake.pace.took_batch(count, now_ms() - began_ms)
        finally:
            intake.sampling = True

    def _fill(self, batch: Batch, size: int) -> bool:
        """Add of the current rows what there is; whether there is room for more."""
        intake = self._inner._intake
        with intake.guard:
            while len(batch) < size and (delivery := next(intake.current, None)) is not None:
                assert isinstance(delivery, Delivery)
                intake.last = delivery
                batch.append(delivery)
        return len(batch) < size

    def run(self, handler: Callable[[Delivery], Any], *, concurrency: int = 1, settle: bool = True) -> None:
        """Call `handler(delivery)` for every message until `stop`, each in one of `concurrency` threads; see
        `tailrace.Consumer.run`."""
        inner, ended = self._inner, threading.Event()

        def handle(delivery: BlockingDelivery) -> Any:
            return handler(Delivery(delivery.rows, delivery.value, delivery.row))

        async def run() -> None:
            inner._open().hand_out_as(deliveries.Delivery)
            try:
                await inner.run(handle, concurrency=concurrency, settle=settle)
            finally:
                inner._intake.hand_out_as(Delivery)
                ended.set()

        with self._lock:
            try:
                self._portal.call(run)
            except KeyboardInterrupt:
                ended.wait()  # Handlers that are under way end first, and what they did is settled.
                raise

    def stop(self) -> None:
        """Take no more messages: `run` and loops end. May be called from any thread, also from a handler."""
        self._portal.soon(self._inner.stop)

    def pause(self, *partitions: Place) -> None:
        """Hand out nothing more of these (topic, partition) pairs, or of all that it has."""
        self._portal.call(lambda: _on_loop(lambda: self._inner.pause(*partitions)))

    def resume(self, *partitions: Place) -> None:
        """Go on with paused partitions, or with all."""
        self._portal.call(lambda: _on_loop(lambda: self._inner.resume(*partitions)))

    def assignment(self) -> set[Place]:
        """The (topic, partition) pairs that this member has."""
        return self._portal.call(lambda: _on_loop(self._inner.assignment))

    @property
    def failures(self) -> list[FailedAck]:
        """Acknowledgements of `ack_nowait` that failed and were not raised yet."""
        return self._inner.failures

    def commit(self) -> None:
        """Wait until everything acknowledged so far is durable; raises what failed."""

        async def commit() -> None:
            self._drain()
            await self._inner.commit()

        self._portal.call(commit)

    # -- acknowledgements on their way to the loop

    def _hand_over(self, delivery: Delivery) -> None:
        self._acks.append(delivery)
        if not self._draining:
            self._draining = True
            self._portal.soon(self._drain)

    def _drain(self) -> None:
        """On the loop."""
        self._draining = False  # First: what is appended from now on calls for another round.
        settlement = self._inner._intake.settlement
        while self._acks:
            settlement.ack_late(self._acks.popleft())


class StreamConsumer:
    """Reads topics in order; see `tailrace.StreamConsumer`. Use it as a context manager."""

    def __init__(self, portal: Portal, inner: stream_consumer.StreamConsumer) -> None:
        self.topics, self.group, self.member = inner.topics, inner.group, inner.member
        self._portal = portal
        self._inner = inner
        self._lock = threading.Lock()

    def __enter__(self) -> StreamConsumer:
        async def enter() -> None:
            await self._inner.__aenter__()
            self._inner._source.feed.guard = threading.Lock()

        self._portal.call(enter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(lambda: self._inner.__aexit__(kind, error, trace))

    def __iter__(self) -> StreamConsumer:
        return self

    def __next__(self) -> Message:
        if self._portal.gone is not None:
            raise self._portal.gone
        feed = self._inner._open().feed
        with self._lock:
            while True:
                with feed.guard:
                    for message in feed.current:
                        feed.last = message
                        return message
                try:
                    self._portal.call(feed.take)
                except StopAsyncIteration:
                    raise StopIteration from None

    def batches(self, size: int | None = None) -> Iterator[list[Message]]:
        """Messages of one partition as they come, up to `size` at once."""
        batches = self._inner.batches(size)
        while True:
            try:
                with self._lock:
                    batch = self._portal.call(lambda: _awaited(anext(batches)))
            except StopAsyncIteration:
                return
            yield batch

    def run(self, handler: Callable[[Message], Any], *, concurrency: int = 1) -> None:
        """Call `handler(message)` for every message until `stop`; what it raises ends the run."""
        if concurrency != 1:
            raise InvalidRequest("concurrency: a stream is read in order, by one handler at a time")
        for message in self:
            handler(message)

    def stop(self) -> None:
        """Take no more messages: `run` and loops end."""
        self._portal.soon(self._inner.stop)

    def pause(self, *partitions: Place) -> None:
        """Read nothing more of these (topic, partition) pairs, or of all that it has."""
        self._portal.call(lambda: _on_loop(lambda: self._inner.pause(*partitions)))

    def resume(self, *partitions: Place) -> None:
        """Go on with paused partitions, or with all."""
        self._portal.call(lambda: _on_loop(lambda: self._inner.resume(*partitions)))

    def assignment(self) -> set[Place]:
        """The (topic, partition) pairs that it reads."""
        return self._portal.call(lambda: _on_loop(self._inner.assignment))

    def position(self) -> dict[Place, int]:
        """The next offset of each partition that the application has not been given."""
        return self._portal.call(lambda: _on_loop(self._inner.position))

    def seek(self, places: Mapping[Place, int]) -> None:
        """Go on from other offsets."""
        self._portal.call(lambda: self._inner.seek(places))

    def commit(self) -> None:
        """Store the places behind everything that was handed out; returns when they are durable."""
        self._portal.call(self._inner.commit)


async def _on_loop(act: Callable[[], T]) -> T:
    return act()


async def _awaited(work: Awaitable[T]) -> T:
    return await work


def in_thread(callback: Moved | None) -> Moved | None:
    """A callback of blocking code runs in a thread, so that it may use blocking calls itself."""
    if callback is None:
        return None
    given = callback

    async def call(places: set[Place]) -> None:
        result = await asyncio.to_thread(given, places)
        if inspect.isawaitable(result):
            raise InvalidRequest("on_assigned, on_revoked: tailrace.sync takes plain functions")

    return call
