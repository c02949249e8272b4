"""The consumer of a log: `stream` with places stored for a group, `broadcast` without a group.

It reads frames as they are, in offset order, from where the group stands. The place that is stored by itself
is the one *before* the message that the application has in hand, so that one which was not finished is read
again; `commit` stores the place behind it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from tailrace.client.admin import point
from tailrace.client.calls import PAUSE_S_MAX, PAUSE_S_MIN, ask, error_of
from tailrace.client.consumer_options import ConsumerOptions
from tailrace.client.membership import Member, client_name
from tailrace.client.results import Message, Rows
from tailrace.core.commands import Fetch, Fetched, FindOffsets, Offsets, Reply
from tailrace.core.delivery_commands import Commit, Committed
from tailrace.core.group_commands import JoinGroup, Place
from tailrace.core.model import HAS_EXPIRES_AT, Refusal
from tailrace.errors import Fenced, InvalidRequest, NotFound, TailraceError, Unavailable
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs

log = logging.getLogger("tailrace.consumer")
WAIT_MS = 30_000
AHEAD_BYTES = 12 * 1024 * 1024
REFRESH_S = 30.0
COMMIT_S = 5.0


class Cursor:
    """Where the consumer stands in one partition."""

    __slots__ = ("committed", "fetched", "generation", "next")

    def __init__(self, generation: int, offset: int) -> None:
        self.generation = generation
        self.next = self.fetched = self.committed = offset


class StreamConsumer:
    """Reads topics in order, as a member of a group or on its own. Use it as an async context manager."""

    def __init__(
        self,
        verbs: BrokerVerbs,
        topics: Sequence[str],
        group: str | None,
        timeout: float,
        options: ConsumerOptions,
    ) -> None:
        self.topics = list(topics)
        self.group = group
        self.member = options.member
        self._verbs = verbs
        self._timeout = timeout
        self._options = options
        self._loop: asyncio.AbstractEventLoop
        self._membership: Member | None = None
        self._cursors: dict[Place, Cursor] = {}
        self._sought: dict[Place, int] = {}
        self._paused: set[Place] = set()
        self._leaving: set[Place] = set()
        self._epoch = 0
        self._fetching: set[str] = set()
        self._pause_s = PAUSE_S_MIN
        self._buffer: deque[tuple[Rows, int]] = deque()
        self._ahead = 0
        self._rows: Rows | None = None
        self._current: Iterator[Message] = iter(())
        self._guard: AbstractContextManager[object] = nullcontext()
        """Held by whoever takes from `_current` in another thread (see `tailrace.sync`)."""
        self._last: Message | None = None
        self._first: Message | None = None
        """The first message of the batch in hand; a single one is its own first."""
        self._cut = False
        """Whether the rest of the current rows is not to be handed out."""
        self._skew_ms = 0.0
        self._due_ms = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._taking = False
        self._stopping = False
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._closed: TailraceError | None = Unavailable(
            "the consumer is not open: use `async with client.consumer(…)`"
        )

    # -- life

    async def __aenter__(self) -> StreamConsumer:
        if hasattr(self, "_loop"):
            raise InvalidRequest("this consumer was used before: make a new one")
        self._loop = asyncio.get_running_loop()
        self._closed = None
        try:
            await (self._look_up("start") if self.group is None else self._join(self.group))
        except BaseException:
            self.kill(Unavailable("the consumer could not be opened"))
            raise
        self._tick()
        return self

    async def _join(self, group: str) -> None:
        options = self._options
        asked = {"mode": options.mode, **options.group}
        request = JoinGroup(group, self.member, self.topics, asked, options.wait, client_name())
        self._membership = Member(
            self._verbs,
            self,
            request,
            self._timeout,
            on_assigned=options.on_assigned,
            on_revoked=options.on_revoked,
        )
        await self._membership.join()

    async def _look_up(self, start: str) -> None:
        """Broadcast: every partition is ours, from the point asked for; new ones from their beginning."""
        at = point(self._options.group.get("start", "latest") if start == "start" else start)
        for topic in self.topics:
            reply = await ask(self._verbs, FindOffsets(topic, at), self._timeout)
            assert isinstance(reply, Offsets)
            for partition, offset in enumerate(reply.offsets):
                if (topic, partition) not in self._cursors:
                    self._cursors[topic, partition] = Cursor(0, offset)
        self._renew()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed is not None:
            return
        failure: TailraceError | None = None
        if self._options.auto_commit_ms and self._membership is not None:
            try:
                await self._store(self._done(), min(COMMIT_S, self._timeout))
            except Fenced:
                pass  # Somebody else goes on from the place that was stored last.
            except TailraceError as problem:
                failure = problem
        membership = self._membership
        self.kill(Unavailable("the consumer is closed"))
        if membership is not None:
            await membership.leave()
        if failure is not None and kind is None:
            raise failure

    def kill(self, error: TailraceError) -> None:
        """Stop for good, without a word to the broker."""
        self._closed = error
        self._epoch += 1
        if self._membership is not None:
            self._membership.stop()
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        self._buffer.clear()
        self._current = iter(())
        self._wake()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def stop(self) -> None:
        """Take no more messages: `run` and loops end."""
        self._stopping = True
        self._cut_short()
        self._wake()

    # -- messages

    def __aiter__(self) -> StreamConsumer:
        return self

    async def __anext__(self) -> Message:
        while True:
            try:
                message = next(self._current)
            except StopIteration:
                await self._take()
                continue
            self._last = message
            return message

    async def batches(self, size: int | None = None) -> AsyncIterator[list[Message]]:
        """Messages of one partition as they come, up to `size` at once (default: `batch_size`)."""
        size = self._options.batch_size if size is None else size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidRequest(f"size: a whole number, at least 1, not {size!r}")
        while True:
            self._first = None
            try:
                batch = [await anext(self)]
            except StopAsyncIteration:
                return
            for message in self._current if size > 1 else ():
                batch.append(message)
                if len(batch) == size:
                    break
            self._first, self._last = batch[0], batch[-1]
            yield batch

    async def run(self, handler: Callable[[Message], Awaitable[Any] | Any], *, concurrency: int = 1) -> None:
        """Call `handler(message)` for every message until `stop`, one after the other. What it raises ends
        the run; the message is read again."""
        if concurrency != 1:
            raise InvalidRequest("concurrency: a stream is read in order, by one handler at a time")
        async for message in self:
            result = handler(message)
            if inspect.isawaitable(result):
                await result

    async def _take(self) -> None:
        if self._taking:
            raise InvalidRequest("a consumer serves one task at a time: open one for each")
        self._taking = True
        try:
            self._finish_current()
            while not self._buffer:
                self._check_open()
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if self._stopping:
                    raise StopAsyncIteration
                waiter = self._loop.create_future()
                self._waiters.append(waiter)
                self._fetch()
                await waiter
            if self._stopping:
                raise StopAsyncIteration
            rows, first = self._buffer.popleft()
            self._ahead -= rows.header.size
            self._rows = rows
            self._current = self._shown(rows, first)
            self._fetch()
        finally:
            self._taking = False

    def _shown(self, rows: Rows, first: int) -> Iterator[Message]:
        messages = rows.messages(first)
        if not self._options.skip_expired or not rows.header.columns & HAS_EXPIRES_AT:
            return messages
        now_us = time.time_ns() // 1000 + round(self._skew_ms * 1000)
        expires = rows.values("expires_at") or []
        return (m for m in messages if expires[m.row] is None or expires[m.row] > now_us)

    def _finish_current(self) -> None:
        """The application has asked for more: what it had in hand is done."""
        rows, last, cut = self._rows, self._last, self._cut
        self._rows = self._last = self._first = None
        self._cut = False
        cursor = None if rows is None else self._cursors.get((rows.topic, rows.partition))
        if rows is None or cursor is None:
            return
        if not cut:
            cursor.next = rows.header.end_offset
        elif last is not None:
            cursor.next = last.offset + 1

    def _cut_short(self) -> None:
        """Hand out nothing more of the current rows."""
        with self._guard:
            self._current = iter(())
            self._cut = True

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- places

    def assignment(self) -> set[Place]:
        """The (topic, partition) pairs that it reads."""
        self._check_open()
        return set(self._cursors) if self._membership is None else self._membership.assignment()

    def position(self) -> dict[Place, int]:
        """The next offset of each partition that the application has not been given."""
        self._check_open()
        places = {place: cursor.next for place, cursor in self._cursors.items()}
        last = self._last
        if last is not None and (last.topic, last.partition) in places:
            places[last.topic, last.partition] = last.offset + 1
        return places

    def _done(self) -> dict[Place, int]:
        """The next offset of each partition that the application has not finished."""
        places = {place: cursor.next for place, cursor in self._cursors.items()}
        if self._last is not None:
            first = self._first or self._last
            place = (first.topic, first.partition)
            if place in places:
                places[place] = first.offset
        return places

    async def seek(self, places: Mapping[Place, int]) -> None:
        """Go on from other offsets, of partitions that it has (or, in `on_assigned`, is about to have)."""
        self._check_open()
        mine = self.assignment()
        for place, offset in places.items():
            if place not in mine:
                raise InvalidRequest(f"seek: {place!r} is not assigned to this consumer")
            if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
                raise InvalidRequest(f"seek: an offset, at least 0, not {offset!r}")
        self._forget(places)
        if self._rows is not None and (self._rows.topic, self._rows.partition) in places:
            self._rows = self._last = self._first = None
        for place, offset in places.items():
            cursor = self._cursors.get(place)
            if cursor is None:
                self._sought[place] = offset
            else:
                cursor.next = cursor.fetched = offset
        self._renew()

    async def commit(self) -> None:
        """Store the places behind everything that was handed out; returns when they are durable."""
        self._check_open()
        if self._membership is None:
            raise InvalidRequest("commit: a broadcast consumer has no group that a place could be stored for")
        await self._store(self.position(), self._timeout)

    async def _store(self, places: Mapping[Place, int], timeout: float) -> None:
        assert self.group is not None
        by_topic: dict[str, list[tuple[int, int, int]]] = {}
        for (topic, partition), offset in places.items():
            cursor = self._cursors[topic, partition]
            if offset != cursor.committed:
                by_topic.setdefault(topic, []).append((partition, cursor.generation, offset))
        for topic, positions in by_topic.items():
            await ask(self._verbs, Commit(topic, self.group, self.member, positions), timeout)
            for partition, generation, offset in positions:
                stored = self._cursors.get((topic, partition))
                if stored is not None and stored.generation == generation:
                    stored.committed = offset

    def pause(self, *partitions: Place) -> None:
        """Read nothing more of these (topic, partition) pairs, or of all that it has."""
        self._check_open()
        places = set(partitions) or set(self._cursors)
        self._paused |= places
        self._forget(places)
        position = self.position()
        for place in places & self._cursors.keys():
            self._cursors[place].fetched = position[place]
        self._renew()

    def resume(self, *partitions: Place) -> None:
        """Go on with paused partitions, or with all."""
        self._check_open()
        self._paused -= set(partitions) or set(self._paused)
        self._renew()

    def _forget(self, places: Iterable[Place]) -> None:
        """Drop what was read ahead of these partitions."""
        chosen = set(places)
        self._buffer = deque(
            (rows, first) for rows, first in self._buffer if (rows.topic, rows.partition) not in chosen
        )
        self._ahead = sum(rows.header.size for rows, _ in self._buffer)
        if self._rows is not None and (self._rows.topic, self._rows.partition) in chosen:
            self._cut_short()

    # -- what the membership says

    def granted(self, places: dict[Place, int]) -> None:
        """See `membership.Holder`."""
        self._start(self._locate(places))

    async def _locate(self, places: dict[Place, int]) -> None:
        """Find out where the group stands in partitions that are new here, and begin to read them."""
        assert self.group is not None
        for topic in sorted({topic for topic, _ in places}):
            while True:
                try:
                    reply = await ask(self._verbs, Committed(topic, self.group), self._timeout)
                    break
                except TailraceError as error:
                    self.failed(error)
                    await asyncio.sleep(PAUSE_S_MAX)
            assert isinstance(reply, Offsets)
            for (other, partition), generation in places.items():
                if other == topic:
                    cursor = Cursor(generation, max(0, reply.offsets[partition]))
                    cursor.next = cursor.fetched = self._sought.pop((topic, partition), cursor.committed)
                    self._cursors[topic, partition] = cursor
            self._renew()

    def withdrawn(self, places: set[Place]) -> None:
        """See `membership.Holder`."""
        self._leaving |= places
        self._forget(places)
        self._renew()

    async def release(self, places: set[Place], seconds: float) -> None:
        """See `membership.Holder`: store where it stands."""
        mine = {place: offset for place, offset in self._done().items() if place in places}
        if self._options.auto_commit_ms:
            try:
                await self._store(mine, min(max(seconds, 0.1), self._timeout))
            except TailraceError as error:
                log.warning("%s could not store its place: %s", self.member, error)

    def dropped(self, places: set[Place]) -> None:
        """See `membership.Holder`."""
        self._forget(places)
        if self._rows is not None and (self._rows.topic, self._rows.partition) in places:
            self._rows = self._last = self._first = None
        for place in places:
            self._cursors.pop(place, None)
        self._leaving -= places
        self._renew()

    def passed(self, ms: float) -> None:
        """See `membership.Holder`."""
        self._skew_ms += ms
        self._tick()

    def failed(self, error: BaseException) -> None:
        """See `membership.Holder`."""
        self._error = error
        self._wake()

    def woken(self) -> None:
        """See `membership.Holder`."""
        self._renew()

    # -- storing places by itself

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed(error)

    def _tick(self) -> None:
        """Once in a while: store the places of a group, or learn of new partitions without one."""
        if self._closed is not None:
            return
        every_ms = float(self._options.auto_commit_ms) if self._membership is not None else REFRESH_S * 1000
        if not every_ms:
            return
        now_ms = self._loop.time() * 1000 + self._skew_ms
        if now_ms >= self._due_ms:
            if self._due_ms and not self._tasks:
                self._start(self._look_up("earliest") if self._membership is None else self._auto_commit())
            self._due_ms = now_ms + every_ms
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.01, (self._due_ms - now_ms) / 1000), self._tick)

    async def _auto_commit(self) -> None:
        assert self._membership is not None
        try:
            await self._store(self._done(), self._timeout)
        except Fenced:
            self._membership.rejoin()
        except TailraceError as error:
            if not error.retriable:
                raise
            log.warning("%s could not store its place, it tries again: %s", self.member, error)

    # -- fetching

    def _renew(self) -> None:
        """What is asked for has changed: answers to earlier fetches are dropped."""
        self._epoch += 1
        self._fetching.clear()
        for place, offset in self._ahead_of_buffer().items():
            self._cursors[place].fetched = offset
        self._fetch()

    def _ahead_of_buffer(self) -> dict[Place, int]:
        """Where each partition has to be fetched from: behind what is buffered."""
        places = {} if self._closed is not None else self.position()
        rows = self._rows
        if rows is not None and not self._cut and (rows.topic, rows.partition) in places:
            places[rows.topic, rows.partition] = rows.header.end_offset
        for rows, _ in self._buffer:
            places[rows.topic, rows.partition] = rows.header.end_offset
        return places

    def _fetch(self) -> None:
        """Ask for more, one long poll for each topic, while the buffer has room."""
        if self._closed is not None or self._ahead >= AHEAD_BYTES:
            return
        by_topic: dict[str, list[tuple[int, int]]] = {}
        for (topic, partition), cursor in self._cursors.items():
            place = (topic, partition)
            if topic not in self._fetching and place not in self._paused and place not in self._leaving:
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
            self._pause_s = PAUSE_S_MIN
            try:
                self._unpack(topic, reply, parts)
            except TailraceError as error:
                self._error = error
            self._wake()
            self._loop.call_soon(self._fetch)

        request = Fetch(topic, positions, self._options.fetch_bytes_max, WAIT_MS)
        self._verbs.submit(request, b"", respond)

    def _refused(self, topic: str, reply: Refusal) -> None:
        error = error_of(reply)
        if error.retriable:
            self._loop.call_later(self._pause_s, self._fetch)
            self._pause_s = min(self._pause_s * 2, PAUSE_S_MAX)
            return
        place = (topic, error.details.get("partition", -1))
        cursor, start = self._cursors.get(place), error.details.get("start_offset", 0)
        if isinstance(error, NotFound) and cursor is not None and cursor.fetched < start:
            log.warning("%s/%d: offsets %d to %d were trimmed unread", *place, cursor.fetched, start - 1)
            cursor.fetched = start
            cursor.next = max(cursor.next, start)
            self._fetch()
            return
        self.failed(error)
        self._loop.call_later(PAUSE_S_MAX, self._fetch)

    def _unpack(self, topic: str, reply: Fetched, parts: Sequence[Buffer]) -> None:
        data = memoryview(parts[0]) if len(parts) == 1 else memoryview(b"".join(parts))
        at = 0
        for partition, size, _, _ in reply.slices:
            place = (topic, partition)
            # Moved to the end of the dict: the partition that was served waits behind the others.
            cursor = self._cursors[place] = self._cursors.pop(place)
            for header, body in frame.walk(data[at : at + size]):
                if header.kind == frame.DATA and header.end_offset > cursor.fetched:
                    rows = Rows(topic, partition, header, arrow.decode(body, header.columns))
                    self._buffer.append((rows, rows.first_row(cursor.fetched)))
                    self._ahead += header.size
                    cursor.fetched = header.end_offset
            at += size
