"""The producer: buffers messages per partition, sends batches, and turns their results into receipts.

`send` does not suspend once its message is buffered, so cancelling it never leaves the caller in doubt:
either it was still waiting for room and nothing was buffered, or it had already returned. An idle
partition sends at once; while a request is in flight, messages gather until the batch is full, the
request returns, or `linger_ms` is over.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

import mmh3
import pyarrow as pa

from tailrace.client.messages import Receipt, Receipts, Result
from tailrace.client.publish.loop_outside import LoopOutside
from tailrace.client.publish.message_fields import (
    Delay,
    Fields,
    Headers,
    add_columns,
    add_delay,
    add_fields,
    are_alike,
    check_expectations,
    check_fields,
    encode_batch,
    fitting,
    too_large,
)
from tailrace.client.publish.partition_flow import PartitionFlow, PendingBatch
from tailrace.client.publish.table_split import split_table
from tailrace.client.rpc.calls import ask
from tailrace.client.rpc.waiters import Waiters
from tailrace.client.sdk_tuning import BATCH_BYTES, BATCH_ROWS, FAILED_BATCHES_KEPT, REFRESH_MS, ROW_BYTES
from tailrace.core.model.commands import DescribeTopic, TopicInfo
from tailrace.core.model.identifiers import ANY_KEY_SEQUENCE, BATCH_ROWS_MAX, HAS_DELIVER_AT, partition_of
from tailrace.errors import InvalidRequest, TailraceError, Timeout, Unavailable
from tailrace.format import batch as arrow
from tailrace.format import tabular
from tailrace.format.frame import Buffer, crc32c
from tailrace.ports import BrokerVerbs


class Producer:
    """Publishes to one topic. Use it as an async context manager; leaving it flushes."""

    def __init__(
        self,
        verbs: BrokerVerbs,
        topic: str,
        timeout: float,
        *,
        name: str | None,
        linger_ms: float,
        buffer_bytes_max: int,
        compression: str | None,
    ) -> None:
        self.topic = topic
        self._verbs = verbs
        self._wall_ns = verbs.clock.wall_ns
        self._timeout = timeout
        self._named_id = None if name is None else (mmh3.hash64(name.encode(), 1, True, signed=False)[0] or 1)
        self._linger_s = linger_ms / 1000
        self.buffer_bytes_max = buffer_bytes_max
        self._batch_bytes = min(BATCH_BYTES, buffer_bytes_max)
        self._compression = compression
        self._loop: asyncio.AbstractEventLoop
        self._outside: LoopOutside
        self._flows: list[PartitionFlow] = []
        self._open: dict[int, PendingBatch] = {}
        """What gathers, by partition; delayed messages under its complement."""
        self._plain: PendingBatch | None = None
        self._value_max = 0
        self._next_partition = 0
        self._buffered = 0
        self._room = Waiters()
        self._idle = Waiters()
        self._failures: list[PendingBatch] = []
        self._failed_messages = 0
        self.full = False
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False
        self._closed: TailraceError | None = Unavailable(
            "the producer is not open: use `async with client.producer(…)`"
        )

    # -- life

    async def __aenter__(self) -> Producer:
        self._loop = asyncio.get_running_loop()
        self._outside = LoopOutside(self._verbs, self._loop, self._settled)
        await self._refresh()
        self._closed = None
        self._watch()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed is not None:
            return
        if kind is None:
            try:
                await self.flush()
            finally:
                self._close()
        else:
            # The block failed by itself: what is buffered still goes out, but its failures do not hide the
            # first one.
            try:
                await self._drained()
            finally:
                self._close()

    def _close(self) -> None:
        self.kill(Unavailable("the producer is closed"))

    def kill(self, error: TailraceError) -> None:
        """Refuse everything from now on; what has not been stored yet fails, so that nobody waits for it."""
        self._closed = error
        if self._timer is not None:
            self._timer.cancel()
        for flow in self._flows:
            flow.end(error)
        for batch in list(self._open.values()):
            self._ship(batch)
        self._room.wake()

    async def _refresh(self) -> None:
        info = await ask(self._verbs, DescribeTopic(self.topic), self._timeout)
        assert isinstance(info, TopicInfo)
        self._value_max = info.options["message_bytes_max"]
        for partition in range(len(self._flows), len(info.partitions)):
            self._flows.append(PartitionFlow(self._outside, self.topic, partition, self._named_id))

    def _watch(self) -> None:
        """Once in a while: learn of new partitions, give up what is past its time."""
        ticks = 0

        def tick() -> None:
            nonlocal ticks
            ticks += 1
            now_s = self._loop.time()
            for flow in self._flows:
                flow.give_up(now_s)
            if ticks % (REFRESH_MS // 1000) == 0:
                task = self._loop.create_task(self._refresh())
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._timer = self._loop.call_later(1.0, tick)

        self._timer = self._loop.call_later(1.0, tick)

    # -- sending

    async def send(
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
        """Buffer a message; suspends only while the buffer is full. Awaiting the receipt gives the durable
        result.

        With a `delay` (seconds or a timedelta, by this machine's clock) or a time to `deliver_at` it is
        stored at once and gets its place in the topic when it is due. `ttl` is in seconds, from now.
        `expected_sequence` N: the message takes exactly that place of its partition or is refused.
        `expected_key_sequence` N: the key has N messages so far (0: it is new), on topics with `key_index`.
        """
        if self.full:
            await self.room()
        plain = self._plain
        if (
            plain is not None
            and key is None
            and headers is None
            and partition is None
            and timestamp is None
            and priority is None
            and ttl is expires_at is None
            and dedup_id is None
            and delay is deliver_at is None
            and not expected_sequence
            and expected_key_sequence is None
            and type(value) is bytes
        ):
            values = plain.values
            row = len(values)
            size = len(value)
            if size > self._value_max:
                raise too_large("value", size, self._value_max)
            values.append(value)
            plain.nbytes += size + ROW_BYTES
            if row + 1 >= BATCH_ROWS or plain.nbytes >= self._batch_bytes:
                self._ship(plain)
                self.full = True
            return Receipt(plain, row)
        fields = self.check(
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
        return self.buffer(fields, partition, expected_sequence, expected_key_sequence)

    async def publish(
        self, /, value: Buffer | None, *, timeout: float | None = None, **fields: Any
    ) -> Result:
        """`send` and wait: returns when it is stored as the topic promises. Takes what `send` takes."""
        if not fields and type(value) is bytes and not self._open and not self.full and self._closed is None:
            receipt = self._alone(value)
        else:
            receipt = await self.send(value, **fields)
            self._ship_idle()
        if timeout is None:
            return await receipt
        try:
            async with asyncio.timeout(timeout):
                return await receipt
        except TimeoutError:
            raise Timeout(f"not stored within {timeout:g} s; it may still be") from None

    def _alone(self, value: bytes) -> Receipt:
        """A plain message that nothing waits with: it leaves now, unless its partition is busy."""
        size = len(value)
        if size > self._value_max:
            raise too_large("value", size, self._value_max)
        batch = self._new_batch(self._choose(None, None))
        batch.values.append(value)
        batch.nbytes = size + ROW_BYTES
        if self._flows[batch.partition].busy:
            self._open[batch.partition] = self._plain = batch
            self._schedule(batch)
        else:
            self._buffered += batch.nbytes
            self._enqueue(batch)
        return Receipt(batch, 0)

    async def send_many(
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
        """Buffer many messages at once, in order; without keys they stay together. The receipt stands for
        all of them. A delay is for all of them. With `expected_key_sequence` N, which needs one key for all,
        either all are stored as the messages N + 1 and on of their key, or none is.
        """
        due: Fields = {}
        if delay is not None or deliver_at is not None:
            add_delay(due, delay, deliver_at, self._wall_ns() // 1000)
        if all(column is None for column in (headers, timestamps, dedup_ids, expected_key_sequence)):
            plain = keys is None and priorities is None
            one_place = keys is None or partition is not None or len(self._flows) == 1
            if plain or (one_place and are_alike(values, keys, priorities)):
                return await self._send_alike(values, partition, due.get("deliver_at"), keys, priorities)
        columns: dict[str, Any] = {
            "key": keys,
            "headers": headers,
            "timestamp": timestamps,
            "priority": priorities,
            "dedup_id": dedup_ids,
        }
        for column in columns.values():
            if column is not None and len(column) != len(values):
                raise InvalidRequest(f"send_many: {len(values)} values, but a column of {len(column)}")
        used = {name: column for name, column in columns.items() if column is not None}
        # All are checked before the first is buffered: a bad one among them leaves nothing behind.
        checked = [
            self.check(value, **{name: column[at] for name, column in used.items()}) | due
            for at, value in enumerate(values)
        ]
        await self.room()
        if expected_key_sequence is not None:
            if keys is None or len(set(keys)) != 1:
                raise InvalidRequest("expected_key_sequence: all messages need the same key")
            receipt = self._conditional(checked, partition, 0, expected_key_sequence)
            return Receipts([(receipt.batch, range(len(checked)), None)])
        places: dict[int, tuple[PendingBatch, list[int], list[int]]] = {}
        for at, fields in enumerate(checked):
            if self._buffered >= self.buffer_bytes_max:
                await self.room()
            receipt = self._buffer(fields, self._choose(fields, partition))
            batch = receipt.batch
            assert isinstance(batch, PendingBatch)
            _, rows, ats = places.setdefault(id(batch), (batch, [], []))
            rows.append(receipt.row)
            ats.append(at)
        return Receipts(list(places.values()))

    async def _send_alike(
        self,
        values: Sequence[Buffer | None],
        partition: int | None,
        deliver_at_us: int | None,
        keys: Sequence[Any] | None,
        priorities: Sequence[int] | None,
    ) -> Receipts:
        places: list[tuple[Any, range, None]] = []
        pieces: list[tuple[int, int, int]] = []
        at = 0
        while at < len(values):
            rows, size = fitting(values, at, self._value_max)
            pieces.append((at, rows, size))
            at += rows
        await self.room()
        for at, rows, size in pieces:
            if self._buffered >= self.buffer_bytes_max:
                await self.room()
            batch = self._follow(self._choose(None, partition))
            batch.values = list(values[at : at + rows])
            size += add_columns(batch, at, keys, priorities, deliver_at_us)
            batch.nbytes = size
            self._buffered += size
            self._enqueue(batch)
            places.append((batch, range(rows), None))
        return Receipts(places)

    async def send_table(self, table: pa.Table, *, partition: int | None = None) -> Receipts:
        """Send a pyarrow table or record batch: a column `value` and, where wanted, key, headers, timestamp,
        priority, deliver_at (in every row, then), expires_at, dedup_id.
        """
        batches: list[tuple[Any, range | Sequence[int], Sequence[int] | None]] = []
        for target, places, piece in split_table(table, len(self._flows), partition):
            if self.full:
                await self.room()
            self._check_open()
            ids = self._ids(piece.num_rows)
            columns, body = tabular.encode_table(
                piece, ids=ids, timestamp=self._wall_ns() // 1000, compression=self._compression
            )
            batch = self._follow(self._choose(None, target))
            batch.columns, batch.body, batch.ids, batch.crc = columns, body, ids, crc32c(body)
            if columns & HAS_DELIVER_AT:
                times = piece.column("deliver_at").cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
                batch.deliver_ats = times.to_pylist()
            batch.nbytes = len(body)
            self._buffered += batch.nbytes
            self._hand_over(batch)
            batches.append((batch, range(piece.num_rows), places))
        return Receipts(batches)

    async def flush(self) -> None:
        """Wait until everything is stored; raises the first failure that nobody awaited."""
        await self._drained()
        failures, self._failures = [b for b in self._failures if not b.noticed], []
        count, self._failed_messages = self._failed_messages, 0
        if failures:
            error = failures[0].error
            assert error is not None
            if count > 1:
                error.add_note(f"{count} messages failed; this is the first failure")
            raise error

    async def _drained(self) -> None:
        for batch in list(self._open.values()):
            self._ship(batch)
        while self._buffered:
            await self._idle.join()

    # -- buffering

    async def room(self) -> None:
        """Let the loop send what is ready; wait while the buffer is full. Due when `full` says so."""
        await asyncio.sleep(0)
        while self._buffered >= self.buffer_bytes_max:
            await self._room.join()
        self.full = False
        self._check_open()

    def check(self, value: Buffer | None, partition: int | None = None, **given: Any) -> Fields:
        """The checked fields of a message; raises what is wrong with them. Can be called in any thread."""
        self._check_open()
        fields = check_fields(value, self._value_max, now_us=self._wall_ns() // 1000, **given)
        if partition is not None:
            self._choose(None, partition)
        return fields

    def buffer(
        self, fields: Fields, partition: int | None, expected_sequence: int, expected_key_sequence: int | None
    ) -> Receipt:
        """Buffer a message that was checked."""
        if self._closed is not None:
            raise self._closed
        if expected_sequence or expected_key_sequence is not None:
            return self._conditional([fields], partition, expected_sequence, expected_key_sequence)
        return self._buffer(fields, self._choose(fields, partition))

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def _choose(self, fields: Fields | None, partition: int | None) -> int:
        count = len(self._flows)
        if partition is not None:
            if type(partition) is not int or not 0 <= partition < count:
                raise InvalidRequest(f"partition: {self.topic!r} has 0 to {count - 1}, not {partition!r}")
            return partition
        if fields is not None:
            source = fields.get("key", fields.get("dedup_id"))
            if source is not None:
                return partition_of(source, count)
            if self._plain is not None:
                return self._plain.partition
        chosen = self._next_partition % count
        self._next_partition = chosen + 1
        return chosen

    def _new_batch(self, partition: int) -> PendingBatch:
        return PendingBatch(self._outside, partition, self._loop.time() + self._timeout)

    def _follow(self, partition: int) -> PendingBatch:
        """A batch of its own, behind everything that was sent to the partition before."""
        for place in (partition, ~partition):
            before = self._open.get(place)
            if before is not None:
                self._ship(before)
        return self._new_batch(partition)

    def _buffer(self, fields: Fields, partition: int) -> Receipt:
        delayed = "deliver_at" in fields
        place = ~partition if delayed else partition
        batch = self._open.get(place)
        if batch is not None and batch.nbytes + fields["size"] > self._batch_bytes:
            self._ship(batch)
            batch = None
        if batch is None:
            batch = self._open[place] = self._new_batch(partition)
            if self._plain is None and not delayed:
                self._plain = batch
            self._schedule(batch)
        receipt = Receipt(batch, len(batch.values))
        add_fields(batch, fields)
        batch.nbytes += fields["size"]
        if len(batch.values) >= BATCH_ROWS or batch.nbytes >= self._batch_bytes:
            self._ship(batch)
            self.full = True
        return receipt

    def _conditional(
        self, messages: Sequence[Fields], partition: int | None, sequence: int, key_sequence: int | None
    ) -> Receipt:
        """Messages with an expectation travel alone: their refusal must not touch others."""
        check_expectations(sequence, key_sequence)
        if "deliver_at" in messages[0]:
            raise InvalidRequest("expected_sequence: a delayed message has no place until it is due")
        batch = self._follow(self._choose(messages[0], partition))
        for fields in messages:
            add_fields(batch, fields)
            batch.nbytes += fields["size"]
        batch.expected_sequence = sequence
        if key_sequence is not None:
            rows = range(len(messages))
            any_place = key_sequence == ANY_KEY_SEQUENCE
            batch.expected_key_sequences = [key_sequence if any_place else key_sequence + row for row in rows]
        self._buffered += batch.nbytes
        self._enqueue(batch)
        return Receipt(batch, 0)

    def _schedule(self, batch: PendingBatch) -> None:
        """An idle partition sends in the next round of the loop; a busy one gathers for `linger_ms`."""
        if self._flows[batch.partition].busy:
            self._loop.call_later(self._linger_s, self._due, batch)
        elif not self._soon:
            self._soon = True
            self._loop.call_soon(self._ship_soon)

    def _ship_soon(self) -> None:
        self._soon = False
        self._ship_idle()

    def _ship_idle(self) -> None:
        for batch in list(self._open.values()):
            if not self._flows[batch.partition].busy:
                self._ship(batch)

    def _due(self, batch: PendingBatch) -> None:
        if self._open.get(_place(batch)) is batch:
            self._ship(batch)

    def _ship(self, batch: PendingBatch) -> None:
        """Close a batch and hand it to its partition."""
        if self._open.get(_place(batch)) is batch:
            del self._open[_place(batch)]
        if self._plain is batch:
            self._plain = None
        self._buffered += batch.nbytes
        self._enqueue(batch)

    def _ids(self, count: int) -> bytes:
        # Ids tell messages apart and keep nothing secret: they need not be hard to guess.
        bits = random.getrandbits(74)  # nosec B311
        return arrow.make_ids(count, self._wall_ns() // 1_000_000, bits & ((1 << 62) - 1), bits >> 62)

    def _enqueue(self, batch: PendingBatch) -> None:
        """Encode a batch and send it, or fail it alone."""
        try:
            encode_batch(batch, self._ids(len(batch.values)), self._compression, self._wall_ns() // 1000)
        except TailraceError as error:
            batch.settle(None, error)
            return
        self._hand_over(batch)

    def _hand_over(self, batch: PendingBatch) -> None:
        batch.values = []
        self._flows[batch.partition].enqueue(batch)
        if self._buffered >= self.buffer_bytes_max:
            self.full = True

    # -- what comes of it

    def _settled(self, batch: PendingBatch) -> None:
        """A batch is through: free its room, remember failures, send what gathered behind it."""
        self._buffered -= batch.nbytes
        if batch.error is not None:
            self._failed_messages += len(batch.ids) // 16 or 1
            if len(self._failures) >= FAILED_BATCHES_KEPT:
                self._failures = [failed for failed in self._failures if not failed.noticed]
            if not batch.noticed and len(self._failures) < FAILED_BATCHES_KEPT:
                self._failures.append(batch)
        gathered = batch.partition in self._open or ~batch.partition in self._open
        if gathered and not self._flows[batch.partition].busy and not self._soon:
            self._soon = True
            self._loop.call_soon(self._ship_soon)
        if self._buffered < self.buffer_bytes_max:
            self._room.wake()
        if not self._buffered:
            self._idle.wake()


def _place(batch: PendingBatch) -> int:
    """Where a batch gathers: delayed messages do so apart from the others of their partition."""
    return batch.partition if batch.deliver_ats is None else ~batch.partition


assert BATCH_ROWS <= BATCH_ROWS_MAX
