"""Blocking producer: messages wait in a buffer between the threads, which the loop empties in bursts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

import pyarrow as pa

from tailrace.client import messages
from tailrace.client.messages import Result
from tailrace.client.publish import producer
from tailrace.client.publish.message_fields import Delay, Headers
from tailrace.client.publish.partition_flow import PendingBatch
from tailrace.errors import TailraceError
from tailrace.format.frame import Buffer
from tailrace.sync.portal import Portal, within

HAND_OVER_BYTES_MAX = 1024 * 1024
"""How much waits between the threads at most; the producer's own buffer comes behind it."""


class Receipt:
    """Promise for one message; `result` gives the durable `Result` or raises why there is none."""

    __slots__ = ("_error", "_inner", "_noticed", "_producer")

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._inner: messages.Receipt | None = None
        self._error: TailraceError | None = None
        self._noticed = False

    def result(self, timeout: float | None = None) -> Result:
        """Wait for it, `timeout` seconds at most."""
        inner = self._inner
        if inner is not None and isinstance(inner._batch, PendingBatch) and inner._batch.done:
            return _settled(inner)  # Known already: no need to ask the other thread.
        return self._producer._portal.call(lambda: within(self._wait(), timeout))

    async def _wait(self) -> Result:
        if self._inner is None and self._error is None:
            await self._producer._handed_over()
        if self._inner is None:
            self._noticed = True
            assert self._error is not None
            raise self._error
        return await self._inner


def _settled(receipt: messages.Receipt) -> Result:
    steps = receipt.__await__()
    try:
        next(steps)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise AssertionError("a settled batch does not wait")


class Receipts:
    """Promise for several messages; `result` gives their results in the order sent."""

    __slots__ = ("_inner", "_portal")

    def __init__(self, portal: Portal, inner: messages.Receipts) -> None:
        self._portal = portal
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def result(self, timeout: float | None = None) -> list[Result]:
        """Wait for all of them, `timeout` seconds at most."""
        return self._portal.call(lambda: within(self._inner, timeout))


_Item = tuple[Receipt, dict[str, Any], int | None, tuple[int, int | None] | None]
"""A message on its way to the loop: its checked fields, the partition asked for, and what is expected."""


class Producer:
    """Publishes to one topic. Use it as a context manager; leaving it flushes. Threads may share it."""

    def __init__(self, portal: Portal, inner: producer.Producer) -> None:
        self.topic = inner.topic
        self._portal = portal
        self._inner = inner
        self._bytes_max = min(HAND_OVER_BYTES_MAX, inner.buffer_bytes_max)
        self._room = threading.Condition(threading.Lock())
        self._queue: list[_Item | asyncio.Future[None]] = []
        self._bytes = 0
        self._draining = False
        self._failed: list[Receipt] = []

    def __enter__(self) -> Producer:
        self._portal.call(self._inner.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def leave() -> None:
            await self._handed_over()
            await self._inner.__aexit__(kind, error, trace)
            if kind is None:
                self._raise_failed()

        self._portal.call(leave)

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
        fields = self._inner._check(
            value,
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
        if partition is not None:
            self._inner._choose(None, partition)
        receipt = Receipt(self)
        if not expected_sequence and expected_key_sequence is None:
            self._hand_over((receipt, fields, partition, None))
            return receipt
        self._hand_over((receipt, fields, partition, (expected_sequence, expected_key_sequence)))
        self._portal.call(self._handed_over)
        if receipt._error is not None:
            receipt._noticed = True
            raise receipt._error
        return receipt

    def publish(self, value: Buffer | None, *, timeout: float | None = None, **fields: Any) -> Result:
        """`send` and wait: returns when the message is stored as the topic promises."""

        async def published() -> Result:
            await self._handed_over()
            return await self._inner.publish(value, timeout=timeout, **fields)

        return self._portal.call(published)

    def send_many(
        self,
        values: Sequence[Buffer | None],
        *,
        keys: Sequence[Buffer | None] | None = None,
        headers: Sequence[Headers | None] | None = None,
        partition: int | None = None,
        timestamps: Sequence[datetime | int] | None = None,
        priorities: Sequence[int] | None = None,
        dedup_ids: Sequence[Buffer | None] | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | int | None = None,
        expected_key_sequence: int | None = None,
    ) -> Receipts:
        """Buffer many messages at once, in order; without keys they stay together. A delay is for all."""

        async def sent() -> messages.Receipts:
            await self._handed_over()
            return await self._inner.send_many(
                values,
                keys=keys,
                headers=headers,
                partition=partition,
                timestamps=timestamps,
                priorities=priorities,
                dedup_ids=dedup_ids,
                delay=delay,
                deliver_at=deliver_at,
                expected_key_sequence=expected_key_sequence,
            )

        return Receipts(self._portal, self._portal.call(sent))

    def send_table(self, table: pa.Table, *, partition: int | None = None) -> Receipts:
        """Send a pyarrow table or record batch; see `tailrace.Producer.send_table`."""

        async def sent() -> messages.Receipts:
            await self._handed_over()
            return await self._inner.send_table(table, partition=partition)

        return Receipts(self._portal, self._portal.call(sent))

    def flush(self) -> None:
        """Wait until everything is stored; raises the first failure that nobody asked for."""

        async def flushed() -> None:
            await self._handed_over()
            await self._inner.flush()
            self._raise_failed()

        self._portal.call(flushed)

    # -- from the callers' threads to the loop

    def _hand_over(self, item: _Item) -> None:
        self._portal.check()
        with self._room:
            while self._bytes >= self._bytes_max:
                self._room.wait()
            self._queue.append(item)
            self._bytes += item[1]["size"]
            if self._draining:
                return
            self._draining = True
        self._portal.soon(lambda: self._portal.loop.create_task(self._drain()))

    async def _drain(self) -> None:
        """On the loop: send what was left here, in order, until there is nothing."""
        inner = self._inner
        while True:
            with self._room:
                queue, self._queue = self._queue, []
                self._bytes = 0
                self._draining = bool(queue)
                self._room.notify_all()
            if not queue:
                return
            for item in queue:
                if isinstance(item, asyncio.Future):
                    if not item.done():
                        item.set_result(None)
                    continue
                receipt, fields, partition, expected = item
                try:
                    if inner._full:
                        await inner._yield()
                    inner._check_open()
                    if expected is None:
                        receipt._inner = inner._buffer(fields, inner._choose(fields, partition))
                    else:
                        receipt._inner = inner._conditional([fields], partition, *expected)
                except TailraceError as error:
                    receipt._error = error
                    self._failed.append(receipt)

    async def _handed_over(self) -> None:
        """On the loop: wait until all that was sent before has reached the producer."""
        with self._room:
            if not self._draining:
                return
            mark = self._portal.loop.create_future()
            self._queue.append(mark)
        await mark

    def _raise_failed(self) -> None:
        failed, self._failed = [receipt for receipt in self._failed if not receipt._noticed], []
        if failed:
            assert failed[0]._error is not None
            raise failed[0]._error
