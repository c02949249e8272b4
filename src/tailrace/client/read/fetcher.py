"""Partitions read in offset order by long polls that run ahead, and where the application stands in each.

A cursor's `next` is behind everything that is finished; the rows in hand, and those read ahead, lie above it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from tailrace.client.messages import Message, Rows
from tailrace.client.queue.consumer_options import ConsumerOptions
from tailrace.client.queue.delivery import foreign_rows
from tailrace.client.rpc.calls import error_of
from tailrace.client.rpc.retries import Retries
from tailrace.core.model.commands import Fetch, Fetched, Reply
from tailrace.core.model.group_commands import Place
from tailrace.core.model.identifiers import HAS_EXPIRES_AT, Refusal
from tailrace.errors import InvalidRequest, NotFound, TailraceError
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs

log = logging.getLogger("tailrace.consumer")
WAIT_MS = 30_000
AHEAD_BYTES = 12 * 1024 * 1024


class Cursor:
    """Where the application stands in one partition."""

    __slots__ = ("committed", "fetched", "generation", "next")

    def __init__(self, generation: int, committed: int, offset: int) -> None:
        self.generation = generation
        self.committed = committed
        self.next = self.fetched = offset


class Fetcher:
    """Messages are taken from `current`; `last` is the one that was handed out."""

    def __init__(self, verbs: BrokerVerbs, options: ConsumerOptions, group: str | None) -> None:
        self._verbs = verbs
        self._group = group
        self._options = options
        self._loop = asyncio.get_running_loop()
        self.cursors: dict[Place, Cursor] = {}
        self._paused: set[Place] = set()
        self._leaving: set[Place] = set()
        self._epoch = 0
        self._fetching: set[str] = set()
        self._retries = Retries(self._fetch)
        self._buffer: deque[tuple[Rows, int]] = deque()
        self._ahead = 0
        self._rows: Rows | None = None
        self.current: Iterator[Message] = iter(())
        self.last: Message | None = None
        self.first: Message | None = None
        """The first message of the batch in hand; a single one is its own first."""
        self.confirmed: Message | None = None
        """The message in hand that the application called finished by storing its place."""
        self._cut = False
        """Whether the rest of the current rows is not to be handed out."""
        self.guard: AbstractContextManager[object] = nullcontext()
        """Held by whoever takes from `current` in another thread (see `tailrace.sync`)."""
        self._taking = False
        self._stopping = False
        self._error: BaseException | None = None
        self._unread: TailraceError | None = None
        """Why there is no more to read: raised when all that was read before it is handed out."""
        self._waiters: list[asyncio.Future[None]] = []
        self.closed: TailraceError | None = None

    # -- handing out

    async def take(self) -> None:
        """Make the next rows the current ones, as soon as there are any."""
        if self._taking:
            raise InvalidRequest("a consumer serves one task at a time: open one for each")
        self._taking = True
        try:
            self._finish_current()
            while not self._ready():
                waiter = self._loop.create_future()
                self._waiters.append(waiter)
                self._fetch()
                await waiter
            rows, first = self._buffer.popleft()
            self._ahead -= rows.header.size
            self._rows = rows
            self.current = self._shown(rows, first)
            self._fetch()
        finally:
            self._taking = False

    def _ready(self) -> bool:
        if self.closed is not None:
            raise self.closed
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._stopping:
            raise StopAsyncIteration
        if not self._buffer and self._unread is not None:
            unread, self._unread = self._unread, None
            raise unread
        return bool(self._buffer)

    def _shown(self, rows: Rows, first: int) -> Iterator[Message]:
        messages = rows.messages(first)
        if self._group and (foreign := set(foreign_rows(rows, self._group))):
            messages = (m for m in messages if m.row not in foreign)
        if not self._options.skip_expired or not rows.header.columns & HAS_EXPIRES_AT:
            return messages
        now_us = self._verbs.clock.wall_ns() // 1000
        expires = rows.values("expires_at") or []
        return (m for m in messages if expires[m.row] is None or expires[m.row] > now_us)

    def _finish_current(self) -> None:
        """The application has asked for more: what it had in hand is done."""
        rows, last, cut = self._rows, self.last, self._cut
        self._rows = self.last = self.first = None
        self._cut = False
        cursor = None if rows is None else self.cursors.get((rows.topic, rows.partition))
        if rows is None or cursor is None:
            return
        if not cut:
            cursor.next = rows.header.end_offset
        elif last is not None:
            cursor.next = last.offset + 1

    def _cut_short(self) -> None:
        with self.guard:
            self.current = iter(())
            self._cut = True

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def stop(self) -> None:
        """Hand out nothing more."""
        self._stopping = True
        self._cut_short()
        self._wake()

    def failed(self, error: BaseException) -> None:
        """Whoever takes next is told."""
        self._error = error
        self._wake()

    def end(self, error: TailraceError) -> None:
        """It is over."""
        self.closed = error
        self._epoch += 1
        self._retries.at_once()
        self._buffer.clear()
        self._cut_short()
        self._wake()

    # -- places

    def position(self) -> dict[Place, int]:
        """The next offset of each partition that the application has not been given."""
        places = {place: cursor.next for place, cursor in self.cursors.items()}
        last = self.last
        if last is not None and (last.topic, last.partition) in places:
            places[last.topic, last.partition] = last.offset + 1
        return places

    def done(self) -> dict[Place, int]:
        """The next offset of each partition that the application has not finished."""
        places = {place: cursor.next for place, cursor in self.cursors.items()}
        last = self.last
        if last is not None and (last.topic, last.partition) in places:
            unfinished = (self.first or last).offset
            places[last.topic, last.partition] = last.offset + 1 if last is self.confirmed else unfinished
        return places

    def confirm(self, message: Message | None) -> None:
        """The application calls what it has in hand finished."""
        self.confirmed = message

    def add(self, cursors: Mapping[Place, Cursor]) -> None:
        """Read these partitions, too."""
        self.cursors.update(cursors)
        self.renew()

    def hold(self, places: set[Place]) -> None:
        """Hand out nothing more of these partitions; their places stay known until `remove`."""
        self._leaving |= places
        self._forget(places)
        self.renew()

    def remove(self, places: set[Place]) -> None:
        """Forget these partitions."""
        self._forget(places)
        self._drop_current(places)
        for place in places:
            self.cursors.pop(place, None)
        self._leaving -= places
        self.renew()

    def seek(self, places: Mapping[Place, int]) -> None:
        """Go on from other offsets."""
        self._forget(places)
        self._drop_current(places)
        for place, offset in places.items():
            self.cursors[place].next = self.cursors[place].fetched = offset
        self.renew()

    def pause(self, places: set[Place]) -> None:
        """Read nothing more of these."""
        self._paused |= places
        self._forget(places)
        self.renew()

    def resume(self, places: set[Place]) -> None:
        """Go on with these, or with all."""
        self._paused -= places or set(self._paused)
        self.renew()

    def _drop_current(self, places: Iterable[Place]) -> None:
        if self._rows is not None and (self._rows.topic, self._rows.partition) in places:
            self._rows = self.last = self.first = None
            self._cut = False

    def _forget(self, places: Iterable[Place]) -> None:
        """Drop what was read ahead of these partitions."""
        chosen = set(places)
        self._buffer = deque(
            (rows, first) for rows, first in self._buffer if (rows.topic, rows.partition) not in chosen
        )
        self._ahead = sum(rows.header.size for rows, _ in self._buffer)
        if self._rows is not None and (self._rows.topic, self._rows.partition) in chosen:
            self._cut_short()

    # -- fetching

    def renew(self) -> None:
        """What is asked for has changed: answers to earlier fetches are dropped."""
        self._epoch += 1
        self._unread = None
        self._fetching.clear()
        self._retries.at_once()
        places = self.position()
        ahead = [rows for rows, _ in self._buffer]
        if self._rows is not None and not self._cut:
            ahead.insert(0, self._rows)
        for rows in ahead:
            places[rows.topic, rows.partition] = rows.header.end_offset
        for place, cursor in self.cursors.items():
            cursor.fetched = places[place]
        self._fetch()

    def _fetch(self) -> None:
        """Ask for more, one long poll for each topic, while the buffer has room."""
        if self.closed is not None or self._ahead >= AHEAD_BYTES or self._unread is not None:
            return
        by_topic: dict[str, list[tuple[int, int]]] = {}
        for place, cursor in self.cursors.items():
            topic, partition = place
            if topic in self._fetching or self._retries.waits(topic):
                continue
            if place not in self._paused and place not in self._leaving:
                by_topic.setdefault(topic, []).append((partition, cursor.fetched))
        for topic, positions in by_topic.items():
            self._fetching.add(topic)
            self._submit(topic, positions)

    def _submit(self, topic: str, positions: list[tuple[int, int]]) -> None:
        epoch = self._epoch

        def respond(reply: Reply, parts: Sequence[Buffer]) -> None:
            if epoch != self._epoch:
                return
            self._fetching.discard(topic)
            if isinstance(reply, Refusal):
                self._refused(topic, reply)
                return
            assert isinstance(reply, Fetched)
            self._retries.served(topic)
            try:
                self._unpack(topic, reply, parts)
            except TailraceError as error:
                self._unread = error
            self._wake()
            # Later, not now: a broker in this process may answer from within `submit`.
            self._loop.call_soon(self._fetch)

        request = Fetch(topic, positions, self._options.fetch_bytes_max, WAIT_MS)
        self._verbs.submit(request, b"", respond)

    def _refused(self, topic: str, reply: Refusal) -> None:
        error = error_of(reply)
        if error.retriable:
            self._retries.refused(topic)
            return
        place = (topic, error.details.get("partition", -1))
        cursor, start = self.cursors.get(place), error.details.get("start_offset", 0)
        if isinstance(error, NotFound) and cursor is not None and cursor.fetched < start:
            what = "are lost" if "lost" in error.details else "were trimmed unread"
            log.warning("%s/%d: offsets %d to %d %s", *place, cursor.fetched, start - 1, what)
            if cursor.next >= cursor.fetched:  # Else what is before is still to be handed out.
                cursor.next = start
            cursor.fetched = start
            self._loop.call_soon(self._fetch)
            return
        self._unread = error  # It is asked again when the application does, having heard of it.
        self._wake()

    def _unpack(self, topic: str, reply: Fetched, parts: Sequence[Buffer]) -> None:
        data = memoryview(parts[0]) if len(parts) == 1 else memoryview(b"".join(parts))
        at = 0
        for partition, size, _, _ in reply.slices:
            place = (topic, partition)
            # Moved to the end of the dict: the partition that was served waits behind the others.
            cursor = self.cursors[place] = self.cursors.pop(place)
            for header, body in frame.walk(data[at : at + size]):
                if header.kind == frame.DATA and header.end_offset > cursor.fetched:
                    rows = Rows(topic, partition, header, arrow.decode(body, header.columns))
                    self._buffer.append((rows, rows.first_row(cursor.fetched)))
                    self._ahead += header.size
                    cursor.fetched = header.end_offset
            at += size
