"""Blocking `connect`, client and administration of topics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, TypeVar, overload
from uuid import UUID

from tailrace.client import client
from tailrace.client.admin import topic_admin
from tailrace.client.admin.schedules import Scheduled
from tailrace.client.admin.trace_client import Traced
from tailrace.client.client import BUFFER_BYTES_MAX, LINGER_MS
from tailrace.client.messages import Result, Topic
from tailrace.client.queue import consumer
from tailrace.client.queue.membership import Moved
from tailrace.client.read.reader import Start
from tailrace.connect import connect as connect_async
from tailrace.core.model.damage_commands import LossReport, ScrubState
from tailrace.errors import TailraceError, Unavailable
from tailrace.sync.blocking_atomic import Atomic
from tailrace.sync.blocking_consumer import Consumer, StreamConsumer, in_thread
from tailrace.sync.blocking_groups import DeadLetters, Groups, Schedules
from tailrace.sync.blocking_producer import Producer
from tailrace.sync.blocking_reader import Reader
from tailrace.sync.portal import Portal, shared_portal

HAND_OVER_BYTES_MAX = 1024 * 1024
"""How much waits between the threads at most; the producer's own buffer comes behind it."""
T = TypeVar("T")


def connect(url: str | None = None, *, timeout: float = 30.0, wait: float = 0.0) -> Client:
    """A client to use with `with`; see `tailrace.connect`."""
    return Client(connect_async(url, timeout=timeout, wait=wait))


class Client:
    """What `connect` gives. Use it as a context manager; everything made from it ends with it."""

    def __init__(self, inner: client.Client) -> None:
        self._inner = inner
        self._portal = shared_portal()
        self._closed: TailraceError | None = Unavailable(
            "the client is not open: use `with tailrace.sync.connect(…)`"
        )

    @property
    def inner(self) -> client.Client:
        """The client on the loop."""
        return self._inner

    @property
    def portal(self) -> Portal:
        """The way to the loop."""
        return self._portal

    def __enter__(self) -> Client:
        self._portal.call(self._inner.__aenter__)
        self._closed = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close; producers that are still open lose what they have not sent."""
        self._closed = Unavailable("the client is closed")
        self._portal.call(self._inner.close)

    def _make(self, make: Callable[[], T]) -> T:
        if self._closed is not None:
            raise self._closed

        async def made() -> T:
            return make()

        return self._portal.call(made)

    def admin(self, *, timeout: float | None = None) -> Admin:
        """Administration of topics."""
        return Admin(self._portal, self._make(lambda: self._inner.admin(timeout=timeout)))

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
        """A producer for a topic; see `tailrace.Client.producer`."""
        inner = self._make(
            lambda: self._inner.producer(
                topic,
                name=name,
                linger_ms=linger_ms,
                buffer_bytes_max=buffer_bytes_max,
                compression=compression,
                timeout=timeout,
            )
        )
        return Producer(self._portal, inner, min(HAND_OVER_BYTES_MAX, buffer_bytes_max))

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
        """A broadcast reader with a cursor of its own; see `tailrace.Client.reader`."""
        inner = self._make(
            lambda: self._inner.reader(
                topic,
                start=start,
                partitions=partitions,
                stop_at_end=stop_at_end,
                end=end,
                timeout=timeout,
            )
        )
        return Reader(self._portal, inner)

    def atomic(self, writer_id: str, version: int, *, timeout: float | None = None) -> Atomic:
        """All of it or nothing, once per version of the writer; see `tailrace.Client.atomic`."""
        return Atomic(
            self._portal, self._make(lambda: self._inner.atomic(writer_id, version, timeout=timeout))
        )

    def trace(
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
        """The lives of messages; see `tailrace.Client.trace`."""
        if self._closed is not None:
            raise self._closed
        return self._portal.call(
            lambda: self._inner.trace(
                topic,
                partition=partition,
                offset=offset,
                id=id,
                key=key,
                since=since,
                until=until,
                status=status,
                limit=limit,
                full=full,
                timeout=timeout,
            )
        )

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
        """A consumer of one or several topics; see `tailrace.Client.consumer`. `on_assigned` and `on_revoked`
        are called in a thread."""
        inner = self._make(
            lambda: self._inner.consumer(
                topics,
                group,
                mode=mode,
                member=member,
                wait=wait,
                batch_size=batch_size,
                fetch_bytes_max=fetch_bytes_max,
                prefetch=prefetch,
                auto_commit_ms=auto_commit_ms,
                skip_expired=skip_expired,
                on_assigned=in_thread(on_assigned),
                on_revoked=in_thread(on_revoked),
                timeout=timeout,
                **options,
            )
        )
        if isinstance(inner, consumer.Consumer):
            return Consumer(self._portal, inner)
        return StreamConsumer(self._portal, inner)

    def groups(self, *, timeout: float | None = None) -> Groups:
        """Administration of groups."""
        return Groups(self._portal, self._make(lambda: self._inner.groups(timeout=timeout)))

    def dead_letters(self, topic: str, *, timeout: float | None = None) -> DeadLetters:
        """What the groups of a topic could not handle."""
        inner = self._make(lambda: self._inner.dead_letters(topic, timeout=timeout))
        return DeadLetters(self._portal, inner)

    def schedules(self, *, timeout: float | None = None) -> Schedules:
        """Recurring schedules."""
        return Schedules(self._portal, self._make(lambda: self._inner.schedules(timeout=timeout)))

    def cancel(self, result: Result, *, timeout: float | None = None) -> bool:
        """Cancel a delayed message; see `tailrace.Client.cancel`."""
        return self._portal.call(lambda: self._inner.cancel(result, timeout=timeout))

    def cancel_id(self, topic: str, id: UUID, *, timeout: float | None = None) -> bool:
        """Cancel a delayed message by its id."""
        return self._portal.call(lambda: self._inner.cancel_id(topic, id, timeout=timeout))

    def scheduled(self, topic: str, *, limit: int = 100, timeout: float | None = None) -> list[Scheduled]:
        """Delayed messages of a topic that wait for their time, the next due first."""
        return self._portal.call(lambda: self._inner.scheduled(topic, limit=limit, timeout=timeout))


class Admin:
    """Create, look at and change topics; see `tailrace.Admin`."""

    def __init__(self, portal: Portal, inner: topic_admin.Admin) -> None:
        self._portal = portal
        self._inner = inner

    def create_topic(
        self, name: str, *, if_missing: bool = False, timeout: float | None = None, **options: Any
    ) -> Topic:
        """Create a topic; returns when it is durable."""
        return self._portal.call(
            lambda: self._inner.create_topic(name, if_missing=if_missing, timeout=timeout, **options)
        )

    def alter_topic(self, name: str, *, timeout: float | None = None, **options: Any) -> Topic:
        """Change options; the others stay as they are."""
        return self._portal.call(lambda: self._inner.alter_topic(name, timeout=timeout, **options))

    def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        """Delete a topic and everything in it."""
        self._portal.call(lambda: self._inner.delete_topic(name, timeout=timeout))

    def list_topics(
        self, prefix: str = "", *, internal: bool = False, timeout: float | None = None
    ) -> list[Topic]:
        """Topics by name; internal ones (leading underscore) on request."""
        return self._portal.call(lambda: self._inner.list_topics(prefix, internal=internal, timeout=timeout))

    def describe_topic(self, name: str, *, timeout: float | None = None) -> Topic:
        """A topic with the state of each partition."""
        return self._portal.call(lambda: self._inner.describe_topic(name, timeout=timeout))

    def trim_topic(self, name: str, partition: int, offset: int, *, timeout: float | None = None) -> None:
        """Drop everything below an offset of a partition."""
        self._portal.call(lambda: self._inner.trim_topic(name, partition, offset, timeout=timeout))

    def accept_loss(
        self, name: str, partition: int, *, dry_run: bool = True, timeout: float | None = None
    ) -> LossReport:
        """What of a damaged partition is lost; without `dry_run` it is given up."""
        return self._portal.call(
            lambda: self._inner.accept_loss(name, partition, dry_run=dry_run, timeout=timeout)
        )

    def scrub(
        self,
        name: str | None = None,
        partition: int | None = None,
        *,
        begin: bool = True,
        timeout: float | None = None,
    ) -> ScrubState:
        """Let what is closed be read from the disk and checked; without `begin`, ask how far that is."""
        return self._portal.call(lambda: self._inner.scrub(name, partition, begin=begin, timeout=timeout))

    def find_offsets(self, name: str, at: str | int | datetime, *, timeout: float | None = None) -> list[int]:
        """The offset of a point in every partition: "earliest", "latest" or a time."""
        return self._portal.call(lambda: self._inner.find_offsets(name, at, timeout=timeout))
