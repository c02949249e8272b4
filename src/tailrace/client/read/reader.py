"""The broadcast reader: a cursor of one's own over a topic, fed by long polls that run ahead.

Frames come as the broker stored them and are checked and decoded here. Nothing is stored about the
reader; `position` and `seek` are all there is to it. Cancelling a wait loses nothing: what arrives
meanwhile stays in the local buffer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType

import pyarrow as pa

from tailrace.client.messages import Message, Rows, point, public_batch
from tailrace.client.rpc.calls import ask, error_of
from tailrace.client.rpc.retries import Retries
from tailrace.core.model.commands import DescribeTopic, Fetch, Fetched, FindOffsets, Offsets, Reply, TopicInfo
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Corrupt, InvalidRequest, NotFound, TailraceError, Unavailable
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs

FETCH_BYTES = 4 * 1024 * 1024
AHEAD_BYTES = 12 * 1024 * 1024
WAIT_MS = 30_000
REFRESH_MS = 30_000

Start = str | int | datetime | Mapping[int, int]


class Reader:
    """Reads one topic from a point on. Use it as an async context manager."""

    def __init__(
        self,
        verbs: BrokerVerbs,
        topic: str,
        timeout: float,
        *,
        start: Start,
        partitions: Sequence[int] | None,
        stop_at_end: bool,
        end: Start | None = None,
    ) -> None:
        self.topic = topic
        self._verbs = verbs
        self._clock = verbs.clock
        self._timeout = timeout
        self._start = start
        self._only = None if partitions is None else sorted(set(partitions))
        self._end: Start | None = "latest" if stop_at_end and end is None else end
        self._ends: dict[int, int] | None = None
        self._next: dict[int, int] = {}
        self._fetched: dict[int, int] = {}
        self._buffer: deque[tuple[Rows, int]] = deque()
        self._ahead = 0
        self.current: Iterator[Message] = iter(())
        """What of the batch in hand was not handed out yet; whoever takes a message says so in `last`."""
        self.last: Message | None = None
        self._rows: Rows | None = None
        self._first = 0
        self._fetching = False
        self._taking = False
        self._generation = 0
        self._retries: Retries
        self._error: TailraceError | None = None
        self._astray: NotFound | None = None
        """What is wrong with the start, where no fetch would tell."""
        self._waiters: list[asyncio.Future[None]] = []
        self._loop: asyncio.AbstractEventLoop
        self._refreshed_ms = 0.0
        self._closed: TailraceError | None = Unavailable(
            "the reader is not open: use `async with client.reader(…)`"
        )

    async def __aenter__(self) -> Reader:
        self._loop = asyncio.get_running_loop()
        self._retries = Retries(self._fetch)
        self._closed = None
        if self._end is not None:
            self._ends = await self._places(self._end, "end")
        await self.seek(self._start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill(Unavailable("the reader is closed"))

    def kill(self, error: TailraceError) -> None:
        """Stop for good."""
        if self._closed is None:
            self._retries.at_once()
        self._closed = error
        self._generation += 1
        self._buffer.clear()
        self.current = iter(())
        self._wake()

    # -- places

    async def _find(self, at: str | int | datetime) -> list[int]:
        reply = await ask(self._verbs, FindOffsets(self.topic, point(at)), self._timeout)
        assert isinstance(reply, Offsets)
        return reply.offsets

    async def _places(self, at: Start, what: str) -> dict[int, int]:
        """Offsets by partition of a point, as applications give it."""
        if isinstance(at, bool) or not isinstance(at, str | int | datetime | Mapping):
            raise InvalidRequest(f"{what}: earliest, latest, an offset, a datetime or a mapping, not {at!r}")
        if isinstance(at, Mapping):
            places = dict(enumerate(await self._find("earliest"))) if self._only is None else {}
            return {**places, **at}
        if isinstance(at, int):
            return dict.fromkeys(range(len(await self._find("earliest"))), at)
        return dict(enumerate(await self._find(at)))

    async def seek(self, start: Start) -> None:
        """Go on from another point: "earliest", "latest", an offset (of every partition), a time (datetime),
        or offsets by partition.
        """
        self._check_open()
        places = await self._places(start, "start")
        if self._only is not None:
            missing = [partition for partition in self._only if partition not in places]
            if missing:
                raise InvalidRequest(f"partitions: {self.topic!r} has no partition {missing[0]}")
            places = {partition: places[partition] for partition in self._only}
        self._astray = await self._missing(places) if isinstance(start, int | Mapping) else None
        self._generation += 1
        self._fetching = False
        self._buffer.clear()
        self._ahead = 0
        self.current = iter(())
        self._rows = self.last = self._error = None
        self._next = dict(places)
        self._fetched = dict(places)
        self._retries.at_once()
        self._refreshed_ms = self._clock.elapsed_ms()
        self._fetch()

    async def _missing(self, places: dict[int, int]) -> NotFound | None:
        """What is to be said of given offsets that do not exist. Those before the end of the reader are
        fetched, and the broker says it; those from there on are not."""
        ends = self._ends
        late = [] if ends is None else [(p, o) for p, o in places.items() if o >= ends.get(p, 0)]
        if not late:
            return None
        firsts, lasts = await self._find("earliest"), await self._find("latest")
        for partition, offset in late:
            if not 0 <= partition < len(lasts):
                text = f"topic {self.topic!r} has partitions 0 to {len(lasts) - 1}, not {partition}"
                return NotFound(text)
            first, last = firsts[partition], lasts[partition]
            if first <= offset <= last:
                continue
            place = f"offset {offset} of {self.topic}/{partition}"
            text = f"is beyond the end, {last}" if offset > last else f"is trimmed: the log starts at {first}"
            return NotFound(f"{place} {text}", partition=partition, start_offset=first, end_offset=last)
        return None

    def position(self) -> dict[int, int]:
        """The next offset of each partition that the application has not been given."""
        places = dict(self._next)
        if self._rows is not None and self.last is not None:
            places[self._rows.partition] = self.last.offset + 1
        return places

    # -- messages

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> Message:
        while True:
            try:
                message = next(self.current)
            except StopIteration:
                await self.take()
                continue
            self.last = message
            return message

    async def batches(self) -> AsyncIterator[pa.RecordBatch]:
        """Arrow batches with topic, partition, offset, sequence, id, key, value, headers and times of every
        message.
        """
        while True:
            while (piece := self.rest()) is None:
                try:
                    await self.take()
                except StopAsyncIteration:
                    return
            yield public_batch(*piece)

    def rest(self) -> tuple[Rows, int] | None:
        """What is left of the batch in hand, from which row on; it counts as handed out. None: nothing is."""
        rows, first = self._rows, self._first if self.last is None else self.last.row + 1
        if rows is None or first >= rows.batch.num_rows:
            return None
        self._rows = self.last = None
        self.current = iter(())
        self._next[rows.partition] = rows.header.end_offset
        return rows, first

    async def take(self) -> None:
        """Take the next batch in hand, from the local buffer or as soon as one arrives. One of which nothing
        was handed out stays: whoever gave up waiting for it, just when it came, gets it now."""
        if self._taking:
            raise InvalidRequest("a reader serves one task at a time: open one for each")
        if self.last is None and self._rows is not None and self._first < self._rows.batch.num_rows:
            self._check_open()
            return
        self._taking = True
        try:
            rows, self._first = await self._wait()
            self.current = rows.messages(self._first)
            self._rows = rows
        finally:
            self._taking = False

    async def _wait(self) -> tuple[Rows, int]:
        if self._rows is not None:
            self._next[self._rows.partition] = self._rows.header.end_offset
            self._rows = self.last = None
        if self._astray is not None:
            self._check_open()
            raise self._astray
        while not self._buffer:
            self._check_open()
            if self._error is not None:
                error, self._error = self._error, None
                self._fetching = False
                self._pass(error)
                raise error
            if self._at_end():
                raise StopAsyncIteration
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            self._fetch()  # A broker in this process may answer at once.
            await waiter
        rows, first = self._buffer.popleft()
        self._ahead -= rows.header.size
        self._fetch()
        return rows, first

    def _pass(self, error: BaseException) -> None:
        """What is lost is told once: whoever asks again goes on behind it."""
        if isinstance(error, NotFound) and "lost" in error.details:
            partition, end = error.details["partition"], error.details["lost"][1]
            self._next[partition] = max(self._next[partition], end)
            self._fetched[partition] = max(self._fetched[partition], end)

    def _at_end(self) -> bool:
        ends = self._ends
        return ends is not None and all(
            offset >= ends.get(partition, 0) for partition, offset in self._next.items()
        )

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    # -- fetching

    def _fetch(self) -> None:
        """Ask for more, if none is asked for and the buffer has room."""
        if (
            self._fetching
            or self._retries.waits(self.topic)
            or self._ahead >= AHEAD_BYTES
            or self._closed is not None
            or self._error is not None
        ):
            return
        if self._only is None and self._clock.elapsed_ms() - self._refreshed_ms > REFRESH_MS:
            self._grow()
        ends = self._ends
        positions = [(p, o) for p, o in self._fetched.items() if ends is None or o < ends.get(p, 0)]
        if not positions:
            self._wake()
            return
        self._fetching = True
        generation = self._generation

        def respond(reply: Reply, parts: Sequence[Buffer]) -> None:
            if generation == self._generation:
                self._fetching = False
                self._arrived(reply, parts)

        self._verbs.submit(Fetch(self.topic, positions, FETCH_BYTES, WAIT_MS), b"", respond)

    def _arrived(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        if isinstance(reply, Refusal):
            error = error_of(reply)
            if error.retriable:
                self._retries.refused(self.topic)
                return
            self._error = error
        else:
            self._retries.served(self.topic)
            assert isinstance(reply, Fetched)
            try:
                self._unpack(reply, parts)
            except TailraceError as error:
                self._error = error
            self._fetch()
        self._wake()

    def _unpack(self, reply: Fetched, parts: Sequence[Buffer]) -> None:
        data = memoryview(parts[0]) if len(parts) == 1 else memoryview(b"".join(parts))
        at = 0
        for partition, size, _, _ in reply.slices:
            # Moved to the end of the dict: the partition that was served waits behind the others.
            self._fetched[partition] = self._fetched.pop(partition)
            for header, body in frame.walk(data[at : at + size]):
                if header.kind == frame.DATA and header.end_offset > self._fetched[partition]:
                    self._add(partition, header, body)
            at += size

    def _add(self, partition: int, header: frame.Header, body: Buffer) -> None:
        """Buffer a batch that was read, unless it lies behind the end to stop at."""
        wanted = self._fetched[partition]
        if header.base_offset > wanted and not header.count < header.span:
            place = f"{self.topic}/{partition}"
            raise Corrupt(f"{place}: offsets {wanted} to {header.base_offset - 1} are missing")
        end = header.end_offset if self._ends is None else self._ends.get(partition, 0)
        if header.base_offset < end:
            rows = Rows(self.topic, partition, header, arrow.decode(body, header.columns))
            self._buffer.append((rows.before(end), rows.first_row(wanted)))
            self._ahead += header.size
        self._fetched[partition] = header.end_offset

    def _grow(self) -> None:
        """Learn of partitions that were added; they are read from their beginning."""
        self._refreshed_ms = self._clock.elapsed_ms()

        def respond(reply: Reply, parts: Sequence[Buffer]) -> None:
            if isinstance(reply, TopicInfo) and self._only is None:
                for partition in range(len(reply.partitions)):
                    if partition not in self._next:
                        self._next[partition] = self._fetched[partition] = 0

        self._verbs.submit(DescribeTopic(self.topic), b"", respond)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
