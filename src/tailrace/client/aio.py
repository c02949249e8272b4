"""The client: one connection to Tailrace, and the producers, readers and admin calls on it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Protocol

from tailrace.client.admin import Admin
from tailrace.client.atomic import Atomic
from tailrace.client.producer import Producer
from tailrace.client.reader import Reader, Start
from tailrace.errors import InvalidRequest, TailraceError, Unavailable
from tailrace.ports import BrokerVerbs

BUFFER_BYTES_MAX = 32 * 1024 * 1024
LINGER_MS = 5.0


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
        self._timeout = timeout
        self._verbs: OpenVerbs | None = None
        self._closed: TailraceError = Unavailable(
            "the client is not open: use `async with tailrace.connect(…)`"
        )
        self._parts: weakref.WeakSet[Producer | Reader] = weakref.WeakSet()

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

    def admin(self, *, timeout: float | None = None) -> Admin:
        """Administration of topics."""
        return Admin(self._open(), self._timeout if timeout is None else timeout)

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
            self._timeout if timeout is None else timeout,
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
        timeout: float | None = None,
    ) -> Reader:
        """A broadcast reader with a cursor of its own. `start`: "earliest", "latest", an offset, a datetime,
        or {partition: offset}.

        With `stop_at_end` it ends where the topic ended when it was opened, instead of waiting for more.
        """
        reader = Reader(
            self._open(),
            topic,
            self._timeout if timeout is None else timeout,
            start=start,
            partitions=partitions,
            stop_at_end=stop_at_end,
        )
        self._parts.add(reader)
        return reader

    def atomic(self, writer_id: str, version: int, *, timeout: float | None = None) -> Atomic:
        """Write to any topics and partitions, all of it or nothing, once per version of the writer.

        `async with client.atomic("import", 7) as tx: await tx.send(topic, value)`; versions of a writer grow.
        Where the version was decided before, nothing is written and `tx.won` is False.
        """
        return Atomic(self._open(), writer_id, version, self._timeout if timeout is None else timeout)


def _after_fork() -> None:
    for client in list(_clients):
        client.after_fork()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)
