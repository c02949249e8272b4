"""Blocking producer: messages wait in a buffer between the threads, which the loop empties in bursts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

from tailrace.client import messages
from tailrace.client.messages import Result
from tailrace.client.publish import producer
from tailrace.client.publish.message_fields import Delay, Fields, Headers
from tailrace.errors import TailraceError
from tailrace.format.frame import Buffer
from tailrace.sync.blocking_wrapper import BlockingContext, BlockingWrapper, blocking, wrapped
from tailrace.sync.portal import Portal, within

HAND_OVER_BYTES_MAX = 1024 * 1024
"""How much waits between the threads at most; the producer's own buffer comes behind it."""
T = TypeVar("T")


class Receipt:
    """Promise for one message; `result` gives the durable `Result` or raises why there is none."""

    __slots__ = ("_hand_over", "error", "inner", "noticed")

    def __init__(self, hand_over: MessageHandOver) -> None:
        self._hand_over = hand_over
        self.inner: messages.Receipt | None = None
        """The producer's own, once the message has reached it."""
        self.error: TailraceError | None = None
        """Why the producer did not take it."""
        self.noticed = False
        """Whether somebody was told of that."""

    def result(self, timeout: float | None = None) -> Result:
        """Wait for it, `timeout` seconds at most."""
        inner = self.inner
        if inner is not None and (known := inner.known()) is not None:
            return known  # No need to ask the other thread.
        return self._hand_over.portal.call(lambda: within(self._wait(), timeout))

    async def _wait(self) -> Result:
        if self.inner is None and self.error is None:
            await self._hand_over.emptied()
        return await _accepted(self)


def _accepted(receipt: Receipt) -> messages.Receipt:
    """The producer's receipt, once the hand-over was emptied; raises why there is none."""
    if receipt.inner is None:
        receipt.noticed = True
        assert receipt.error is not None
        raise receipt.error
    return receipt.inner


class Receipts(BlockingWrapper[messages.Receipts]):
    """Promise for several messages; `result` gives their results in the order sent."""

    def __len__(self) -> int:
        return len(self._inner)

    def result(self, timeout: float | None = None) -> list[Result]:
        """Wait for all of them, `timeout` seconds at most."""
        return self._portal.call(lambda: within(self._inner, timeout))


_Item = tuple[Receipt, Fields, int | None, int, int | None]
"""A message on its way to the loop: its checked fields, the partition asked for, and what is expected."""


class MessageHandOver:
    """What lies between the callers' threads and the producer on the loop."""

    def __init__(self, portal: Portal, inner: producer.Producer) -> None:
        self.portal = portal
        self._inner = inner
        self._bytes_max = min(HAND_OVER_BYTES_MAX, inner.buffer_bytes_max)
        self._room = threading.Condition(threading.Lock())
        self._queue: list[_Item | asyncio.Future[None]] = []
        self.bytes = 0
        self._draining = False
        self._failed: list[Receipt] = []

    def put(self, item: _Item) -> None:
        """Leave a message here; blocks while there is no room."""
        self.portal.check()
        with self._room:
            while self.bytes >= self._bytes_max:
                self._room.wait()
            self._queue.append(item)
            self.bytes += item[1]["size"]
            if self._draining:
                return
            self._draining = True
        self.portal.soon(lambda: self.portal.loop.create_task(self._drain()))

    async def _drain(self) -> None:
        """On the loop: send what was left here, in order, until there is nothing."""
        inner = self._inner
        while True:
            with self._room:
                queue, self._queue = self._queue, []
                self.bytes = 0
                self._draining = bool(queue)
                self._room.notify_all()
            if not queue:
                return
            for item in queue:
                if isinstance(item, asyncio.Future):
                    if not item.done():
                        item.set_result(None)
                    continue
                receipt, fields, partition, sequence, key_sequence = item
                try:
                    if inner.full:
                        await inner.room()
                    receipt.inner = inner.buffer(fields, partition, sequence, key_sequence)
                except TailraceError as error:
                    receipt.error = error
                    self._failed.append(receipt)

    async def emptied(self) -> None:
        """On the loop: wait until all that was sent before has reached the producer."""
        with self._room:
            if not self._draining:
                return
            mark = self.portal.loop.create_future()
            self._queue.append(mark)
        await mark

    def raise_failed(self) -> None:
        """Raise the first failure that nobody was told of."""
        failed, self._failed = [receipt for receipt in self._failed if not receipt.noticed], []
        if failed:
            _accepted(failed[0])


class Producer(BlockingContext[producer.Producer]):
    """Publishes to one topic. Use it as a context manager; leaving it flushes. Threads may share it."""

    def __init__(self, portal: Portal, inner: producer.Producer) -> None:
        super().__init__(portal, inner)
        self.topic = inner.topic
        self._hand_over = MessageHandOver(portal, inner)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def leave(inner: producer.Producer) -> None:
            await inner.__aexit__(kind, error, trace)
            if kind is None:
                self._hand_over.raise_failed()

        self._cross(leave)

    def _cross(self, start: Callable[[producer.Producer], Coroutine[Any, Any, T]]) -> T:
        async def behind() -> T:
            await self._hand_over.emptied()
            return await start(self._inner)

        return self._portal.call(behind)

    def send(
        self,
        value: Buffer | None,
        *,
        key: Buffer | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp: datetime | int | None = None,
        priority: int | None = None,
        ttl: float | None = None,
        expires_at: datetime | int | None = None,
        dedup_id: Buffer | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | int | None = None,
        expected_sequence: int = 0,
        expected_key_sequence: int | None = None,
    ) -> Receipt:
        """Buffer a message; blocks only while the buffer is full. The receipt's `result` is the durable one.
        See `tailrace.Producer.send` for the fields."""
        # Checked here, so that mistakes are raised where they are made, and not on the other thread.
        fields = self._inner.check(
            value,
            partition,
            key=key,
            headers=headers,
            timestamp=timestamp,
            priority=priority,
            ttl=ttl,
            expires_at=expires_at,
            dedup_id=dedup_id,
            delay=delay,
            deliver_at=deliver_at,
        )
        receipt = Receipt(self._hand_over)
        self._hand_over.put((receipt, fields, partition, expected_sequence, expected_key_sequence))
        if expected_sequence or expected_key_sequence is not None:
            self._portal.call(self._hand_over.emptied)
            _accepted(receipt)
        return receipt

    publish = blocking(producer.Producer.publish)
    send_many = wrapped(blocking(producer.Producer.send_many), Receipts)
    send_table = wrapped(blocking(producer.Producer.send_table), Receipts)

    def flush(self) -> None:
        """Wait until everything is stored; raises the first failure that nobody asked for."""

        async def flush(inner: producer.Producer) -> None:
            await inner.flush()
            self._hand_over.raise_failed()

        self._cross(flush)
