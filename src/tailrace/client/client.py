"""The client: one connection to Tailrace, and the producers, readers and admin calls on it."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Protocol, overload
from uuid import UUID

from tailrace.client.admin.access_admin import AccessAdmin
from tailrace.client.admin.dead_letters import DeadLetters
from tailrace.client.admin.group_admin import Groups
from tailrace.client.admin.schedules import Scheduled, Schedules, cancel, cancel_id, scheduled
from tailrace.client.admin.topic_admin import Admin
from tailrace.client.admin.trace_client import Traced, trace
from tailrace.client.messages import Result
from tailrace.client.publish.atomic_write import Atomic
from tailrace.client.publish.producer import Producer
from tailrace.client.queue.consumer import Consumer
from tailrace.client.queue.consumer_options import ConsumerOptions
from tailrace.client.queue.membership import Moved
from tailrace.client.read.key_pages import KeyPages
from tailrace.client.read.reader import Reader, Start
from tailrace.client.read.stream_consumer import StreamConsumer
from tailrace.client.rpc.calls import seconds_of
from tailrace.client.sdk_tuning import BUFFER_BYTES_MAX, LINGER_MS
from tailrace.errors import InvalidRequest, TailraceError, Unavailable
from tailrace.ports import BrokerVerbs


class OpenVerbs(BrokerVerbs, Protocol):
    """Verbs that were opened and want to be closed."""

    async def close(self) -> None:
        """Let go."""
        ...


Opener = Callable[[float], Awaitable[OpenVerbs]]
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client:
    """What `connect` gives. Use it as an async context manager; everything made from it ends with it."""

    def __init__(self, opener: Opener, timeout: float) -> None:
        self._opener = opener
        self._timeout = seconds_of(timeout)
        self._verbs: OpenVerbs | None = None
        self._closed: TailraceError = Unavailable(
            "the client is not open: use `async with tailrace.connect(…)`"
        )
        self._parts: weakref.WeakSet[Producer | Reader | Consumer | StreamConsumer] = weakref.WeakSet()

    async def __aenter__(self) -> Client:
        if self._verbs is not None:
            raise InvalidRequest("this client is open already")
        self._verbs = await self._opener(self._timeout)
        _clients.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close; producers that are still open lose what they have not sent."""
        verbs = self._verbs
        self._end(Unavailable("the client is closed"))
        if verbs is not None:
            await verbs.close()

    def _end(self, error: TailraceError) -> None:
        self._verbs, self._closed = None, error
        for part in list(self._parts):
            part.kill(error)

    def after_fork(self) -> None:
        """In a forked child: the connection belongs to the parent."""
        self._end(Unavailable("this client was made before a fork; connect again in the child process"))

    def _open(self) -> OpenVerbs:
        if self._verbs is None:
            raise self._closed
        return self._verbs

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else seconds_of(timeout)

    def admin(self, *, timeout: float | None = None) -> Admin:
        """Administration of topics."""
        return Admin(self._open(), self._seconds(timeout))

    def access(self, *, timeout: float | None = None) -> AccessAdmin:
        """Administration of access: users, tokens, rules, quotas and tenants."""
        return AccessAdmin(self._open(), self._seconds(timeout))

    def key_pages(self, topic: str, *, timeout: float | None = None) -> KeyPages:
        """Reads of single keys of a topic with `key_index`."""
        return KeyPages(self._open(), topic, self._seconds(timeout))

    def producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        linger_ms: float = LINGER_MS,
        buffer_bytes_max: int = BUFFER_BYTES_MAX,
        compression: str | None = None,
        timeout: float | None = None,
    ) -> Producer:
        """A producer for a topic. With a `name` it keeps its identity across restarts: a newer one of that
        name fences the older.

        `timeout` bounds how long a message is tried; `compression` is None, "lz4" or "zstd".
        """
        if compression not in (None, "lz4", "zstd"):
            raise InvalidRequest(f'compression: None, "lz4" or "zstd", not {compression!r}')
        if linger_ms < 0 or buffer_bytes_max < 1:
            raise InvalidRequest("linger_ms: at least 0; buffer_bytes_max: at least 1")
        producer = Producer(
            self._open(),
            topic,
            self._seconds(timeout),
            name=name,
            linger_ms=linger_ms,
            buffer_bytes_max=buffer_bytes_max,
            compression=compression,
        )
        self._parts.add(producer)
        return producer

    def reader(
        self,
        topic: str,
        *,
        start: Start = "latest",
        partitions: Sequence[int] | None = None,
        stop_at_end: bool = False,
        end: Start | None = None,
        timeout: float | None = None,
    ) -> Reader:
        """A broadcast reader with a cursor of its own. `start`: "earliest", "latest", an offset, a datetime,
        or {partition: offset}.

        With `stop_at_end` it ends where the topic ended when it was opened, instead of waiting for more; with
        `end` (as `start`) it ends before that point.
        """
        reader = Reader(
            self._open(),
            topic,
            self._seconds(timeout),
            start=start,
            partitions=partitions,
            stop_at_end=stop_at_end,
            end=end,
        )
        self._parts.add(reader)
        return reader

    def atomic(self, writer_id: str, version: int, *, timeout: float | None = None) -> Atomic:
        """Write to any topics and partitions, all of it or nothing, once per version of the writer; versions
        of a writer grow. Where the version was decided before, nothing is written and `won` is False.
        """
        return Atomic(self._open(), writer_id, version, self._seconds(timeout))

    @overload
    def consumer(
        self,
        topics: str | Sequence[str],
        group: str | None = ...,
        *,
        mode: Literal["queue", "exclusive"] = ...,
        **options: Any,
    ) -> Consumer: ...

    @overload
    def consumer(
        self,
        topics: str | Sequence[str],
        group: str | None = ...,
        *,
        mode: Literal["stream", "broadcast"],
        **options: Any,
    ) -> StreamConsumer: ...

    @overload
    def consumer(
        self, topics: str | Sequence[str], group: str | None = ..., *, mode: str, **options: Any
    ) -> Consumer | StreamConsumer: ...

    def consumer(
        self,
        topics: str | Sequence[str],
        group: str | None = None,
        *,
        mode: str = "queue",
        member: str | None = None,
        wait: bool = True,
        batch_size: int = 500,
        fetch_bytes_max: int = 1_048_576,
        prefetch: int = 2000,
        auto_commit_ms: int = 5000,
        skip_expired: bool = False,
        on_assigned: Moved | None = None,
        on_revoked: Moved | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Consumer | StreamConsumer:
        """A consumer of one or several topics, as a member of `group`. `mode`: "queue" (leases, each message
        is settled on its own), "exclusive" (a queue with one active consumer; with `wait=False` a second one
        is refused), "stream" (in offset order from the group's place) or "broadcast" (no group).

        Messages are leased ahead for about 100 ms of work, as it is measured. `prefetch` bounds how many are
        in hand beside those that handlers have (0: ask only when none is), `batch_size` how many are asked
        for at a time. `on_assigned` and `on_revoked` are called with the set of
        (topic, partition) pairs that come or go. All other options are the group's: assignment, ordering,
        start, lease_ms, max_attempts and so on; they count when the group is new, and must not contradict it.
        """
        if not isinstance(topics, str | Sequence):
            raise InvalidRequest(f"topics: a name or several, not {topics!r}")
        names = [topics] if isinstance(topics, str) else list(topics)
        if not names:
            raise InvalidRequest("topics: at least one is needed")
        if mode not in ("queue", "exclusive", "stream", "broadcast"):
            raise InvalidRequest(f"mode: queue, exclusive, stream or broadcast, not {mode!r}")
        if mode == "broadcast":
            unknown = sorted(options.keys() - {"start"})
            if group is not None or unknown:
                raise InvalidRequest(f"broadcast has no group: it does not take {unknown or ['group']}")
        elif not group:
            raise InvalidRequest(f"group: a consumer in mode {mode!r} needs the name of its group")
        own = ConsumerOptions(
            mode=mode,
            member=member or f"{os.getpid()}-{secrets.token_hex(6)}",
            wait=wait,
            batch_size=batch_size,
            fetch_bytes_max=fetch_bytes_max,
            prefetch=prefetch,
            auto_commit_ms=auto_commit_ms,
            skip_expired=skip_expired,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            group=options,
        )
        seconds = self._seconds(timeout)
        consumer: Consumer | StreamConsumer
        if mode in ("stream", "broadcast"):
            consumer = StreamConsumer(self._open(), names, group, seconds, own)
        else:
            assert group is not None
            consumer = Consumer(self._open(), names, group, seconds, own)
        self._parts.add(consumer)
        return consumer

    def groups(self, *, timeout: float | None = None) -> Groups:
        """Administration of groups."""
        return Groups(self._open(), self._seconds(timeout))

    def dead_letters(self, topic: str, *, timeout: float | None = None) -> DeadLetters:
        """What the groups of a topic could not handle."""
        return DeadLetters(self._open(), topic, self._seconds(timeout))

    def schedules(self, *, timeout: float | None = None) -> Schedules:
        """Recurring schedules."""
        return Schedules(self._open(), self._seconds(timeout))

    async def cancel(self, result: Result, *, timeout: float | None = None) -> bool:
        """Cancel a delayed message by what publishing it returned. True: it will never be delivered; False:
        it was released already, or was not delayed."""
        return await cancel(self._open(), result, self._seconds(timeout))

    async def cancel_id(self, topic: str, id: UUID, *, timeout: float | None = None) -> bool:
        """Cancel a delayed message by its id; see `cancel`."""
        return await cancel_id(self._open(), topic, id, self._seconds(timeout))

    async def scheduled(
        self, topic: str, *, limit: int = 100, timeout: float | None = None
    ) -> list[Scheduled]:
        """Delayed messages of a topic that wait for their time, the next due first."""
        return await scheduled(self._open(), topic, limit, self._seconds(timeout))

    async def trace(
        self,
        topic: str,
        *,
        partition: int | None = None,
        offset: int | None = None,
        id: UUID | bytes | str | None = None,
        key: bytes | None = None,
        since: datetime | int | None = None,
        until: datetime | int | None = None,
        status: str | None = None,
        limit: int = 100,
        full: bool = False,
        timeout: float | None = None,
    ) -> Traced:
        """The lives of messages: what happened to each, when, and at whose hands.

        By place (`partition` and `offset`), by `id`, or all that fit a `key`, a time and a `status`.
        An id that is no UUIDv7 is only found with `full`, which reads everything that is stored.
        """
        return await trace(
            self._open(),
            topic,
            self._seconds(timeout),
            partition=partition,
            offset=offset,
            id=id,
            key=key,
            since=since,
            until=until,
            status=status,
            limit=limit,
            full=full,
        )


def _after_fork() -> None:
    for client in list(_clients):
        client.after_fork()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)
