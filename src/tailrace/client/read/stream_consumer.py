"""The consumer of a log: `stream` with places stored for a group, `broadcast` without a group.

It reads frames as they are, in offset order, from where the group stands. The place that is stored by itself
is the one *before* the message that the application has in hand, so that one which was not finished is read
again; `commit` stores the place behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tailrace.client.messages import Message, point
from tailrace.client.queue.consumer_options import ConsumerOptions
from tailrace.client.queue.membership import GroupSession, client_name
from tailrace.client.queue.threaded_handlers import PlainHandler, is_async, runs_here
from tailrace.client.read.fetcher import Cursor
from tailrace.client.read.stream_feed import StreamFeed
from tailrace.client.rpc.calls import ask, whole_of
from tailrace.client.rpc.waiters import BackgroundTasks
from tailrace.client.sdk_tuning import COMMIT_S, PAUSE_S_MAX, REFRESH_MS
from tailrace.core.model.commands import FindOffsets, Offsets
from tailrace.core.model.group_commands import JoinGroup, Place
from tailrace.core.model.queue_commands import Commit, Committed
from tailrace.errors import Fenced, InvalidRequest, TailraceError, Unavailable
from tailrace.ports import BrokerVerbs

log = logging.getLogger("tailrace.consumer")


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
        self._source: _GroupSource | _Everything
        self._closed: TailraceError | None = Unavailable(
            "the consumer is not open: use `async with client.consumer(…)`"
        )

    # -- life

    async def __aenter__(self) -> StreamConsumer:
        if hasattr(self, "_source"):
            raise InvalidRequest("this consumer was used before: make a new one")
        self._loop = asyncio.get_running_loop()
        if self.group is None:
            self._source = _Everything(self._verbs, self.topics, self._timeout, self._options)
        else:
            self._source = _GroupSource(self._verbs, self.topics, self.group, self._timeout, self._options)
        self._closed = None
        try:
            await self._source.open()
        except BaseException:
            self.kill(Unavailable("the consumer could not be opened"))
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed is not None:
            return
        self._closed = Unavailable("the consumer is closed")
        problem = await self._source.leave(self._closed)
        if problem is not None and kind is None:
            raise problem

    def kill(self, error: TailraceError) -> None:
        """Stop for good, without a word to the broker."""
        if hasattr(self, "_source") and self._closed is None:
            self._source.end(error)
        self._closed = error

    def _open(self) -> _GroupSource | _Everything:
        if self._closed is not None:
            raise self._closed
        return self._source

    def opened(self) -> StreamFeed:
        """What its messages are taken from; raises while the consumer is not open."""
        return self._open().feed

    def stop(self) -> None:
        """Take no more messages: `run` and loops end. May be called from any thread."""
        if self._closed is None:
            if runs_here(self._loop):
                self._source.feed.stop()
            else:
                self._loop.call_soon_threadsafe(self.stop)

    # -- messages

    def __aiter__(self) -> StreamConsumer:
        return self

    async def __anext__(self) -> Message:
        feed = self.opened()
        while True:
            try:
                message = next(feed.current)
            except StopIteration:
                await feed.take()
                continue
            feed.last = message
            return message

    async def batches(self, size: int | None = None) -> AsyncIterator[list[Message]]:
        """Messages of one partition as they come, up to `size` at once (default: `batch_size`)."""
        size = self._options.batch_size if size is None else size
        whole_of("size", size)
        while True:
            feed = self.opened()
            feed.first = None
            try:
                batch = [await anext(self)]
            except StopAsyncIteration:
                return
            for message in feed.current if size > 1 else ():
                batch.append(message)
                if len(batch) == size:
                    break
            feed.first, feed.last = batch[0], batch[-1]
            yield batch

    async def run(self, handler: Callable[[Message], Awaitable[Any] | Any], *, concurrency: int = 1) -> None:
        """Call `handler(message)` for every message until `stop`, one after the other; a plain function in a
        thread. What it raises ends the run; the message is read again."""
        if concurrency != 1:
            raise InvalidRequest("concurrency: a stream is read in order, by one handler at a time")
        if is_async(handler):
            async for message in self:
                await handler(message)
            return
        plain = PlainHandler(handler, 1)
        try:
            async for message in self:
                error, stopped = await plain.call(message)
                if error is not None or stopped is not None:
                    raise error or stopped or AssertionError
        finally:
            plain.close()

    # -- places

    def assignment(self) -> set[Place]:
        """The (topic, partition) pairs that it reads."""
        return self._open().assignment()

    def position(self) -> dict[Place, int]:
        """The next offset of each partition that the application has not been given."""
        return self.opened().position()

    async def seek(self, places: Mapping[Place, int]) -> None:
        """Go on from other offsets, of partitions that it has (or, in `on_assigned`, is about to have)."""
        source = self._open()
        mine = source.assignment()
        for place, offset in places.items():
            if place not in mine:
                raise InvalidRequest(f"seek: {place!r} is not assigned to this consumer")
            if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
                raise InvalidRequest(f"seek: an offset, at least 0, not {offset!r}")
        known = source.feed.cursors.keys()
        source.sought.update({p: offset for p, offset in places.items() if p not in known})
        source.feed.seek({p: offset for p, offset in places.items() if p in known})

    async def commit(self) -> None:
        """Store the places behind everything that was handed out; returns when they are durable."""
        source = self._open()
        if not isinstance(source, _GroupSource):
            raise InvalidRequest("commit: a broadcast consumer has no group that a place could be stored for")
        last = source.feed.last
        await source.store(source.feed.position(), self._timeout)
        source.feed.confirm(last)

    def pause(self, *partitions: Place) -> None:
        """Read nothing more of these (topic, partition) pairs, or of all that it has."""
        self.opened().pause(set(partitions) or self.assignment())

    def resume(self, *partitions: Place) -> None:
        """Go on with paused partitions, or with all."""
        self.opened().resume(set(partitions))


class _Source:
    """Where the partitions come from: work in the background, and something to do once in a while."""

    def __init__(
        self,
        verbs: BrokerVerbs,
        timeout: float,
        options: ConsumerOptions,
        every_ms: int,
        now_ms: Callable[[], float],
        group: str | None = None,
    ) -> None:
        self._verbs = verbs
        self._timeout = timeout
        self._options = options
        self._loop = asyncio.get_running_loop()
        self.feed = StreamFeed(verbs, options, group)
        self.sought: dict[Place, int] = {}
        self._every_ms = every_ms
        self._now_ms = now_ms
        self._due_ms = now_ms() + every_ms
        self._timer: asyncio.TimerHandle | None = None
        self.tasks = BackgroundTasks(self.feed.failed)

    def tick(self) -> None:
        """See whether it is time; also `membership.Holder`."""
        if self.feed.closed is not None or not self._every_ms:
            return
        now_ms = self._now_ms()
        if now_ms >= self._due_ms:
            self._due_ms = now_ms + self._every_ms
            if not self.tasks:
                self.tasks.start(self.routine())
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.01, (self._due_ms - now_ms) / 1000), self.tick)

    async def routine(self) -> None:
        """What is done once in a while."""
        raise NotImplementedError

    def end(self, error: TailraceError) -> None:
        """Stop without a word."""
        self.feed.end(error)
        if self._timer is not None:
            self._timer.cancel()
        self.tasks.cancel()


class _Everything(_Source):
    """Broadcast: all partitions, from the point asked for; new ones from their beginning."""

    def __init__(
        self, verbs: BrokerVerbs, topics: Sequence[str], timeout: float, options: ConsumerOptions
    ) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(verbs, timeout, options, REFRESH_MS, lambda: loop.time() * 1000)
        self._topics = topics

    async def open(self) -> None:
        """Find out where to begin."""
        await self._look_up(self._options.group.get("start", "latest"))
        self.tick()

    async def routine(self) -> None:
        """Learn of new partitions."""
        try:
            await self._look_up("earliest")
        except TailraceError as error:
            log.warning("new partitions could not be looked for: %s", error)

    async def _look_up(self, start: Any) -> None:
        found: dict[Place, Cursor] = {}
        for topic in self._topics:
            reply = await ask(self._verbs, FindOffsets(topic, point(start)), self._timeout)
            assert isinstance(reply, Offsets)
            for partition, offset in enumerate(reply.offsets):
                if (topic, partition) not in self.feed.cursors:
                    found[topic, partition] = Cursor(0, offset, offset)
        if found:
            self.feed.add(found)

    def assignment(self) -> set[Place]:
        """All partitions."""
        return set(self.feed.cursors)

    async def leave(self, error: TailraceError) -> TailraceError | None:
        """Nobody has to be told."""
        self.end(error)
        return None


class _GroupSource(_Source):
    """A member of a stream group; see `membership.Holder`."""

    def __init__(
        self,
        verbs: BrokerVerbs,
        topics: Sequence[str],
        group: str,
        timeout: float,
        options: ConsumerOptions,
    ) -> None:
        super().__init__(verbs, timeout, options, options.auto_commit_ms, verbs.clock.elapsed_ms, group)
        self._group = group
        asked = {"mode": options.mode, **options.group}
        request = JoinGroup(group, options.member, list(topics), asked, options.wait, client_name())
        self._membership = GroupSession(
            verbs, request, timeout, on_assigned=options.on_assigned, on_revoked=options.on_revoked
        )

    async def open(self) -> None:
        """Join."""
        await self._membership.join(self)
        self.tick()

    def assignment(self) -> set[Place]:
        """What the group has given to this member."""
        return self._membership.assignment()

    async def leave(self, error: TailraceError) -> TailraceError | None:
        """Store where it stands, and leave the group; returns why the place could not be stored."""
        problem: TailraceError | None = None
        if self._options.auto_commit_ms:
            try:
                await self.store(self.feed.done(), min(COMMIT_S, self._timeout))
            except Fenced:
                log.warning("%s does not own all of its partitions any more", self._options.member)
            except TailraceError as failure:
                problem = failure
        self.end(error)
        await self._membership.leave()
        return problem

    def end(self, error: TailraceError) -> None:
        """Stop without a word."""
        self._membership.stop()
        super().end(error)

    # -- storing places

    async def store(self, places: Mapping[Place, int], timeout: float) -> None:
        """Store these places, where they differ from what is stored."""
        by_topic: dict[str, list[tuple[int, int, int]]] = {}
        for (topic, partition), offset in places.items():
            cursor = self.feed.cursors[topic, partition]
            if offset != cursor.committed:
                by_topic.setdefault(topic, []).append((partition, cursor.generation, offset))
        for topic, positions in by_topic.items():
            request = Commit(topic, self._group, self._options.member, positions)
            await ask(self._verbs, request, timeout)
            for partition, generation, offset in positions:
                stored = self.feed.cursors.get((topic, partition))
                if stored is not None and stored.generation == generation:
                    stored.committed = offset

    async def routine(self) -> None:
        """Auto-commit."""
        try:
            await self.store(self.feed.done(), self._timeout)
        except Fenced:
            self._membership.rejoin()
        except TailraceError as error:
            if not error.retriable:
                raise
            log.warning("%s could not store its place, it tries again: %s", self._options.member, error)

    # -- what the membership says

    def granted(self, places: dict[Place, int]) -> None:
        """See `membership.Holder`."""
        self.tasks.start(self._locate(places))

    def reconfigured(self) -> None:
        """See `membership.Holder`: a stream has no leases, and the membership itself goes by the options."""

    async def _locate(self, places: dict[Place, int]) -> None:
        """Find out where the group stands in partitions that are new here, and begin to read them."""
        for topic in sorted({topic for topic, _ in places}):
            while True:
                try:
                    reply = await ask(self._verbs, Committed(topic, self._group), self._timeout)
                    break
                except TailraceError as error:
                    self.feed.failed(error)
                    await asyncio.sleep(PAUSE_S_MAX)
            assert isinstance(reply, Offsets)
            found: dict[Place, Cursor] = {}
            for place, generation in places.items():
                if place[0] == topic and place in self._membership.assignment():
                    committed = max(0, reply.offsets[place[1]])
                    found[place] = Cursor(generation, committed, self.sought.pop(place, committed))
            self.feed.add(found)

    def hungry(self, places: set[Place]) -> None:
        """See `membership.Holder`: readers of a stream hold no leases."""

    def withdrawn(self, places: set[Place]) -> None:
        """See `membership.Holder`."""
        self.feed.hold(places)

    async def release(self, places: set[Place], seconds: float) -> None:
        """See `membership.Holder`: store where it stands."""
        if not self._options.auto_commit_ms:
            return
        mine = {place: offset for place, offset in self.feed.done().items() if place in places}
        try:
            await self.store(mine, min(max(seconds, 0.1), self._timeout))
        except TailraceError as error:
            log.warning("%s could not store its place: %s", self._options.member, error)

    def dropped(self, places: set[Place]) -> None:
        """See `membership.Holder`."""
        self.feed.remove(places)

    def failed(self, error: BaseException) -> None:
        """See `membership.Holder`."""
        self.feed.failed(error)

    def pause(self, places: set[Place]) -> None:
        """See `membership.Holder`: nothing is leased here."""

    def refuse(self, error: TailraceError) -> None:
        """See `membership.Holder`."""
        self.feed.end(error)

    def woken(self) -> None:
        """See `membership.Holder`."""
        self.feed.renew()
