"""Blocking `connect`, client and administration of topics."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from tailrace.client import client
from tailrace.client.admin import topic_admin
from tailrace.client.queue import consumer
from tailrace.client.queue.membership import Moved
from tailrace.client.read import stream_consumer
from tailrace.connect import connect as connect_async
from tailrace.errors import TailraceError, Unavailable
from tailrace.sync.blocking_access import AccessAdmin
from tailrace.sync.blocking_atomic import Atomic
from tailrace.sync.blocking_consumer import Consumer, StreamConsumer, in_thread
from tailrace.sync.blocking_groups import DeadLetters, Groups, Schedules
from tailrace.sync.blocking_producer import Producer
from tailrace.sync.blocking_reader import Reader
from tailrace.sync.blocking_wrapper import BlockingWrapper, blocking, on_loop, wrapped
from tailrace.sync.portal import Portal, shared_portal

T = TypeVar("T")


def connect(
    url: str | None = None,
    *,
    timeout: float = 30.0,
    wait: float = 0.0,
    token: str | None = None,
    ca: str | None = None,
    cert: str | None = None,
    key: str | None = None,
) -> Client:
    """A client to use with `with`; see `tailrace.connect`."""
    inner = connect_async(url, timeout=timeout, wait=wait, token=token, ca=ca, cert=cert, key=key)
    return Client(inner)


class Admin(BlockingWrapper[topic_admin.Admin]):
    """Create, look at and change topics; see `tailrace.Admin`."""

    create_topic = blocking(topic_admin.Admin.create_topic)
    alter_topic = blocking(topic_admin.Admin.alter_topic)
    delete_topic = blocking(topic_admin.Admin.delete_topic)
    list_topics = blocking(topic_admin.Admin.list_topics)
    describe_topic = blocking(topic_admin.Admin.describe_topic)
    trim_topic = blocking(topic_admin.Admin.trim_topic)
    accept_loss = blocking(topic_admin.Admin.accept_loss)
    scrub = blocking(topic_admin.Admin.scrub)
    find_offsets = blocking(topic_admin.Admin.find_offsets)


class Client(BlockingWrapper[client.Client]):
    """What `connect` gives. Use it as a context manager; everything made from it ends with it."""

    def __init__(self, inner: client.Client) -> None:
        super().__init__(shared_portal(), inner)
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

    def _cross(self, start: Callable[[client.Client], Coroutine[Any, Any, T]]) -> T:
        if self._closed is not None:
            raise self._closed
        return super()._cross(start)

    admin = wrapped(on_loop(client.Client.admin), Admin)
    access = wrapped(on_loop(client.Client.access), AccessAdmin)
    producer = wrapped(on_loop(client.Client.producer), Producer)
    reader = wrapped(on_loop(client.Client.reader), Reader)
    atomic = wrapped(on_loop(client.Client.atomic), Atomic)
    groups = wrapped(on_loop(client.Client.groups), Groups)
    dead_letters = wrapped(on_loop(client.Client.dead_letters), DeadLetters)
    schedules = wrapped(on_loop(client.Client.schedules), Schedules)
    trace = blocking(client.Client.trace)
    cancel = blocking(client.Client.cancel)
    cancel_id = blocking(client.Client.cancel_id)
    scheduled = blocking(client.Client.scheduled)

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

        async def made(inner: client.Client) -> consumer.Consumer | stream_consumer.StreamConsumer:
            return inner.consumer(
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

        inner = self._cross(made)
        if isinstance(inner, consumer.Consumer):
            return Consumer(self._portal, inner)
        return StreamConsumer(self._portal, inner)
