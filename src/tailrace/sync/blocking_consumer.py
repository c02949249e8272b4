"""Blocking consumers: one crossing to the loop per run of rows; settlements cross in bursts or one by one."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from tailrace.client.messages import Message
from tailrace.client.queue import consumer
from tailrace.client.queue import delivery as deliveries
from tailrace.client.queue.held_leases import FailedAck
from tailrace.client.queue.lease_prefetch import LeasePrefetch
from tailrace.client.queue.membership import Moved
from tailrace.client.queue.threaded_handlers import BlockingDelivery
from tailrace.client.read import stream_consumer
from tailrace.client.rpc.calls import whole_of
from tailrace.core.model.group_commands import Place
from tailrace.errors import InvalidRequest
from tailrace.sync.blocking_wrapper import BlockingContext, BlockingWrapper, blocking, on_loop
from tailrace.sync.portal import Portal

T = TypeVar("T")


class AckHandOver:
    """Acknowledgements on their way to the loop, which takes them in bursts."""

    def __init__(self, portal: Portal) -> None:
        self.portal = portal
        self._acks: deque[Delivery] = deque()
        self._draining = False

    def add(self, delivery: Delivery) -> None:
        """Let a message be acknowledged, without waiting."""
        self._acks.append(delivery)
        if not self._draining:
            self._draining = True
            self.portal.soon(self.drain)

    def drain(self) -> None:
        """On the loop: pass on what is here."""
        self._draining = False  # First: what is appended from now on calls for another round.
        while self._acks:
            delivery = self._acks.popleft()
            delivery.rows.settling.ack_late(delivery)


def _hand_over_of(settling: deliveries.Settling) -> AckHandOver:
    hand_over = settling.wrapper
    assert isinstance(hand_over, AckHandOver)
    return hand_over


class Delivery(deliveries.LeasedMessage, frozen=True, gc=False, eq=False):
    """A leased message; see `tailrace.Delivery`."""

    def _cross(self, start: Callable[[deliveries.Delivery], Coroutine[Any, Any, T]]) -> T:
        inner = deliveries.Delivery(self.rows, self.value, self.row)
        return _hand_over_of(self.rows.settling).portal.call(lambda: start(inner))

    ack = blocking(deliveries.Delivery.ack)
    nack = blocking(deliveries.Delivery.nack)
    reject = blocking(deliveries.Delivery.reject)
    extend = blocking(deliveries.Delivery.extend)

    def ack_nowait(self) -> None:
        """It is done; see `tailrace.Delivery.ack_nowait`."""
        lease = self.rows.lease
        if lease.error is not None and lease.is_lost(self.offset):
            raise lease.error
        _hand_over_of(self.rows.settling).add(self)


class Batch(list[Delivery]):
    """Deliveries that came together; see `tailrace.Batch`."""

    def ack(self) -> None:
        """All of it is done; returns when that is durable."""
        _settle(self, lambda settling: settling.ack(self))

    def ack_nowait(self) -> None:
        """All of it is done."""
        for delivery in self:
            delivery.ack_nowait()

    def nack(self, delay: float | None = None, error: str = "", *, failure: bool = True) -> None:
        """What is not settled failed."""
        left = [delivery for delivery in self if not delivery.settled]
        _settle(left, lambda settling: settling.nack(left, delay, error, failure))

    def reject(self, reason: str = "", *, poison: bool = False) -> None:
        """What is not settled goes to the dead letters."""
        left = [delivery for delivery in self if not delivery.settled]
        _settle(left, lambda settling: settling.reject(left, reason, poison))


def _settle(what: list[Delivery], settle: Callable[[deliveries.Settling], Coroutine[Any, Any, None]]) -> None:
    if what:
        settling = what[0].rows.settling
        _hand_over_of(settling).portal.call(lambda: settle(settling))


class Consumer(BlockingWrapper[consumer.Consumer]):
    """Consumes topics as a member of a group; see `tailrace.Consumer`. Use it as a context manager. Threads
    may share it: each gets other messages."""

    def __init__(self, portal: Portal, inner: consumer.Consumer) -> None:
        super().__init__(portal, inner)
        self.topics, self.group, self.member = inner.topics, inner.group, inner.member
        self._lock = threading.Lock()
        self._acks = AckHandOver(portal)

    def __enter__(self) -> Consumer:
        async def enter() -> None:
            await self._inner.__aenter__()
            self._inner.opened().share(threading.Lock(), Delivery, self._acks)

        self._portal.call(enter)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def leave() -> None:
            self._acks.drain()
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
        intake = self._inner.opened()
        while True:
            delivery = None
            with intake.guard:
                for delivery in intake.current:
                    intake.last = delivery
                    break
            if delivery is None:
                try:
                    self._portal.call(intake.take)
                except StopAsyncIteration:
                    raise StopIteration from None
                continue
            assert isinstance(delivery, Delivery)
            if intake.calm_ns <= intake.wall_ns() < intake.until_ns:
                return delivery
            if not self._portal.run(partial(intake.is_over, delivery.rows.lease)):
                return delivery

    def batches(self, size: int | None = None) -> Iterator[Batch]:
        """Messages as they come, up to `size` at once; see `tailrace.Consumer.batches`."""
        intake = self._inner.opened()
        size = whole_of("size", intake.batch_size if size is None else size)
        now_ms = intake.settlement.now_ms
        intake.sampling = False
        try:
            while True:
                with self._lock:
                    try:
                        batch = Batch([self._next()])
                    except StopIteration:
                        return
                    while _fill(batch, intake, size) and intake.in_hand():
                        if not self._portal.run(intake.more):
                            break
                began_ms, count = now_ms(), len(batch)
                yield batch
                intake.pace.took_batch(count, now_ms() - began_ms)
        finally:
            intake.sampling = True

    def run(self, handler: Callable[[Delivery], Any], *, concurrency: int = 1, settle: bool = True) -> None:
        """Call `handler(delivery)` for every message until `stop`, each in one of `concurrency` threads; see
        `tailrace.Consumer.run`."""
        inner, ended = self._inner, threading.Event()

        def handle(delivery: BlockingDelivery) -> Any:
            return handler(Delivery(delivery.rows, delivery.value, delivery.row))

        async def run() -> None:
            intake = inner.opened()
            intake.hand_out_as(deliveries.Delivery)
            try:
                await inner.run(handle, concurrency=concurrency, settle=settle)
            finally:
                intake.hand_out_as(Delivery)
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

    pause = on_loop(consumer.Consumer.pause)
    resume = on_loop(consumer.Consumer.resume)
    assignment = on_loop(consumer.Consumer.assignment)

    @property
    def failures(self) -> list[FailedAck]:
        """Acknowledgements of `ack_nowait` that failed and were not raised yet."""
        return self._inner.failures

    def commit(self) -> None:
        """Wait until everything acknowledged so far is durable; raises what failed."""

        async def commit() -> None:
            self._acks.drain()
            await self._inner.commit()

        self._portal.call(commit)


def _fill(batch: Batch, intake: LeasePrefetch, size: int) -> bool:
    """Add of the current rows what there is; whether there is room for more."""
    with intake.guard:
        while len(batch) < size and (delivery := next(intake.current, None)) is not None:
            assert isinstance(delivery, Delivery)
            intake.last = delivery
            batch.append(delivery)
    return len(batch) < size


class StreamConsumer(BlockingContext[stream_consumer.StreamConsumer]):
    """Reads topics in order; see `tailrace.StreamConsumer`. Use it as a context manager."""

    def __init__(self, portal: Portal, inner: stream_consumer.StreamConsumer) -> None:
        super().__init__(portal, inner)
        self.topics, self.group, self.member = inner.topics, inner.group, inner.member
        self._lock = threading.Lock()

    def __enter__(self) -> StreamConsumer:
        async def enter() -> None:
            await self._inner.__aenter__()
            self._inner.opened().guard = threading.Lock()

        self._portal.call(enter)
        return self

    def __iter__(self) -> StreamConsumer:
        return self

    def __next__(self) -> Message:
        if self._portal.gone is not None:
            raise self._portal.gone
        feed = self._inner.opened()
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

        async def following() -> list[Message]:
            return await anext(batches)

        while True:
            try:
                with self._lock:
                    batch = self._portal.call(following)
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

    pause = on_loop(stream_consumer.StreamConsumer.pause)
    resume = on_loop(stream_consumer.StreamConsumer.resume)
    assignment = on_loop(stream_consumer.StreamConsumer.assignment)
    position = on_loop(stream_consumer.StreamConsumer.position)
    seek = blocking(stream_consumer.StreamConsumer.seek)
    commit = blocking(stream_consumer.StreamConsumer.commit)


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
