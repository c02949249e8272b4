"""The broadcast reader: a cursor of one's own over a topic, fed by a `Fetcher`.

Nothing is stored about the reader; `position` and `seek` are all there is to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType

import pyarrow as pa

from tailrace.client.messages import Message, Rows, point, public_batch
from tailrace.client.read.fetcher import Cursor, Fetcher
from tailrace.client.rpc.calls import ask
from tailrace.client.sdk_tuning import FETCH_BYTES, REFRESH_MS
from tailrace.core.model.commands import DescribeTopic, FindOffsets, Offsets, Reply, TopicInfo
from tailrace.core.model.group_commands import Place
from tailrace.errors import InvalidRequest, NotFound, TailraceError, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs

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
        self._fetcher: Fetcher
        self._cursors: dict[Place, Cursor] = {}
        self._ends: dict[int, int] | None = None
        self.current: Iterator[Message] = iter(())
        """What of the batch in hand was not handed out yet; whoever takes a message says so in `last`."""
        self.last: Message | None = None
        self._rows: Rows | None = None
        self._first = 0
        self._taking = False
        self._astray: NotFound | None = None
        """What is wrong with the start, where no fetch would tell."""
        self._refreshed_ms = 0.0
        self._closed: TailraceError | None = Unavailable(
            "the reader is not open: use `async with client.reader(…)`"
        )

    async def __aenter__(self) -> Reader:
        self._fetcher = Fetcher(self._verbs, FETCH_BYTES, tells=True, looked=self._look)
        self._cursors = self._fetcher.cursors
        self._closed = None
        if self._end is not None:
            self._ends = await self._places(self._end, "end")
            self._fetcher.end_at({(self.topic, partition): end for partition, end in self._ends.items()})
        await self.seek(self._start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill(Unavailable("the reader is closed"))

    def kill(self, error: TailraceError) -> None:
        """Stop for good."""
        if self._closed is None:
            self._fetcher.end(error)
        self._closed = error
        self.current = iter(())

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
        self.current = iter(())
        self._rows = self.last = None
        self._refreshed_ms = self._clock.elapsed_ms()
        self._fetcher.begin({(self.topic, p): Cursor(0, offset, offset) for p, offset in places.items()})

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
        places = {partition: cursor.next for (_, partition), cursor in self._cursors.items()}
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
        self._cursors[self.topic, rows.partition].next = rows.header.end_offset
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
            if self._rows is not None:
                self._cursors[self.topic, self._rows.partition].next = self._rows.header.end_offset
                self._rows = self.last = None
            self._check_open()
            if self._astray is not None:
                raise self._astray
            self._rows, self._first = await self._fetcher.rows()
            self.current = self._rows.messages(self._first)
        finally:
            self._taking = False

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    # -- partitions

    def _look(self) -> None:
        """Look for new partitions, once in a while."""
        if self._only is None and self._clock.elapsed_ms() - self._refreshed_ms > REFRESH_MS:
            self._grow()

    def _grow(self) -> None:
        """Learn of partitions that were added; they are read from their beginning."""
        self._refreshed_ms = self._clock.elapsed_ms()

        def respond(reply: Reply, parts: Sequence[Buffer]) -> None:
            if isinstance(reply, TopicInfo) and self._only is None:
                for partition in range(len(reply.partitions)):
                    self._cursors.setdefault((self.topic, partition), Cursor(0, 0, 0))

        self._verbs.submit(DescribeTopic(self.topic), b"", respond)
