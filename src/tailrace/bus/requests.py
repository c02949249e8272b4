"""Request and reply: an answer finds its asker by a correlation id on the bus's own topic of replies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from tailrace.bus.outcomes import RequestFailed
from tailrace.bus.registry import TypeRegistry, Undecodable
from tailrace.client.client import Client
from tailrace.errors import TailraceError, Timeout, Unavailable

CORRELATION_HEADER = "tailrace-correlation"
REPLY_TO_HEADER = "tailrace-reply-to"
ERROR_HEADER = "tailrace-request-error"
REPLY_RETENTION_MS = 3_600_000


class Replies:
    """The asker's side: questions that are open, and one reader that hands out the answers."""

    def __init__(self, client: Client, topic: str, registry: TypeRegistry) -> None:
        self._client = client
        self._registry = registry
        self.topic = topic
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Begin to listen, before the first question leaves."""
        if self._task is None:
            self._ready = _quiet_future()
            self._task = asyncio.create_task(self._listen())
        assert self._ready is not None
        await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Stop listening; whoever still waits is told."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(Unavailable("the bus was closed before the answer came"))
        self._waiting.clear()

    def open(self) -> tuple[list[tuple[str, bytes]], str]:
        """Headers for a question, and the id under which its answer is awaited."""
        correlation = str(uuid4())
        self._waiting[correlation] = _quiet_future()
        return [
            (CORRELATION_HEADER, correlation.encode()),
            (REPLY_TO_HEADER, self.topic.encode()),
        ], correlation

    def forget(self, correlation: str) -> None:
        """Nobody waits for this answer: the question was not sent."""
        self._waiting.pop(correlation, None)

    async def answer(self, correlation: str, timeout: float) -> Any:
        """Wait for an answer."""
        try:
            async with asyncio.timeout(timeout):
                return await self._waiting[correlation]
        except TimeoutError:
            text = f"no answer within {timeout:g} s; the request may still be handled"
            raise Timeout(text, outcome="unknown") from None
        finally:
            self._waiting.pop(correlation, None)

    async def _listen(self) -> None:
        assert self._ready is not None
        try:
            async with self._client.reader(self.topic, start="latest") as reader:
                self._ready.set_result(None)
                async for message in reader:
                    self._arrived(message.value, message.headers)
        except TailraceError as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            for waiter in self._waiting.values():
                if not waiter.done():
                    waiter.set_exception(error)
            self._task = None

    def _arrived(self, body: bytes | None, headers: Sequence[tuple[str, bytes]]) -> None:
        fields = {name: value.decode(errors="replace") for name, value in headers}
        waiter = self._waiting.get(fields.get(CORRELATION_HEADER, ""))
        if waiter is None or waiter.done():
            return  # somebody else's, or too late
        if ERROR_HEADER in fields:
            waiter.set_exception(RequestFailed(fields[ERROR_HEADER]))
            return
        try:
            waiter.set_result(self._registry.decode(body, headers)[2])
        except Undecodable as error:
            waiter.set_exception(RequestFailed(f"the answer cannot be read: {error}"))


def _quiet_future() -> asyncio.Future[Any]:
    """A future whose error may come when nobody waits for it any more."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
