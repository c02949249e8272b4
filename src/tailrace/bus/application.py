"""The bus itself: what an application declares on it, and its work while it is attached to a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal, TypeVar

from tailrace.bus.handlers import (
    Handler,
    Invoker,
    Middleware,
    check_function,
    check_group,
    check_terms,
    title_of,
)
from tailrace.bus.outcomes import AckPolicy
from tailrace.bus.registry import TypeRegistry, as_key
from tailrace.bus.requests import REPLY_RETENTION_MS, Replies
from tailrace.bus.subscriptions import Answers, Subscription
from tailrace.client.client import Client
from tailrace.client.messages import Result
from tailrace.client.publish.producer import Producer
from tailrace.errors import InvalidRequest, Unavailable

K = TypeVar("K")
F = TypeVar("F", bound=Callable[[Any], Any])
REQUEST_TIMEOUT_S = 30.0


class Bus:
    """Commands and events of one application.

    Commands wait in one topic (a buffer with many publishers) for one consumer: with `exclusive`, the first
    worker is active and the others stand by; without, the workers share them. Events go to every subscriber:
    each handler is a group of its own unless it says otherwise.
    """

    def __init__(self, name: str, *, exclusive: bool = True) -> None:
        self.name = name
        self.commands = f"{name}.commands"
        self.events = f"{name}.events"
        self.replies = f"{name}.replies"
        self._exclusive = exclusive
        self._registry = TypeRegistry()
        self._handlers: list[Handler] = []
        self._middlewares: list[Middleware] = []
        self._client: Client | None = None
        self._producers: dict[str, Producer] = {}
        self._stack: AsyncExitStack | None = None
        self._asked: Replies | None = None
        self._running: list[Subscription] = []
        self._opening: asyncio.Lock

    # -- declarations

    def command(
        self, kind: type[K] | None = None, *, name: str | None = None, version: int = 1, key: Any = None
    ) -> Any:
        """Register a type of commands; also as a decorator. `key` (a field or a function) keeps the order of
        commands that share it."""
        return self._register(kind, self.commands, name, version, key)

    def event(
        self, kind: type[K] | None = None, *, name: str | None = None, version: int = 1, key: Any = None
    ) -> Any:
        """Register a type of events; also as a decorator."""
        return self._register(kind, self.events, name, version, key)

    def _register(self, kind: Any, topic: str, name: str | None, version: int, key: Any) -> Any:
        def add(kind: Any) -> Any:
            self._registry.add(kind, name, version, topic, key)
            return kind

        return add if kind is None else add(kind)

    def upcast(self, what: Any, version: int) -> Callable[[F], F]:
        """Decorator: turns plain data of `version` of a type (or wire name) into that of the next version."""
        name = what if isinstance(what, str) else self._registry.of_kind(what).name

        def add(function: F) -> F:
            self._registry.upcast(name, version, function)
            return function

        return add

    def handler(
        self,
        *what: Any,
        group: str | None = None,
        ack: AckPolicy = AckPolicy.NACK_ON_ERROR,
        timeout: float | None = None,
        concurrency: int | None = None,
        batch: int | None = None,
    ) -> Callable[[F], F]:
        """Decorator: handle messages of these types, unions of types or wire names.

        A coroutine function gets a `Message`, a plain function runs in a thread and gets a `BlockingMessage`;
        with `batch` N either gets a `Batch` of up to N. What it returns answers a request.
        """
        if not what:
            raise InvalidRequest("handler: name at least one type")
        check_terms(ack, timeout, concurrency=concurrency, batch=batch)

        def add(function: F) -> F:
            check_function(function)
            names = self._registry.names_of(what)
            topics = {topic for _, topic in names if topic is not None} or {self.events}
            if len(topics) > 1:
                raise InvalidRequest(f"{title_of(function)}: handle commands and events in two functions")
            topic = topics.pop()
            shared = topic == self.commands
            own = self.name if shared else f"{self.name}.{getattr(function, '__name__', '')}"
            chosen = tuple(name for name, _ in names)
            new = Handler(
                function, chosen, topic, own if group is None else group, ack, timeout, concurrency, batch
            )
            check_group(new)
            self._check_beside(new)
            self._handlers.append(new)
            return function

        return add

    def _check_beside(self, new: Handler) -> None:
        for other in self._handlers:
            if (other.topic, other.group) != (new.topic, new.group):
                continue
            both = set(other.names) & set(new.names)
            if both:
                text = f"{sorted(both)[0]} has a handler already: {other.title}"
                raise InvalidRequest(f"group {new.group!r}: {text}")
            if other.batch != new.batch:
                raise InvalidRequest(f"group {new.group!r}: its handlers take single messages or batches")

    def middleware(self, function: Middleware) -> Middleware:
        """Decorator: `async def around(message, call_next)` stands around every handler; the first registered
        is outermost."""
        self._middlewares.append(function)
        return function

    # -- at work

    @asynccontextmanager
    async def attach(self, client: Client) -> AsyncIterator[Bus]:
        """Put the bus to work on a client: makes its topics where they are missing."""
        if self._client is not None:
            raise InvalidRequest("this bus is attached already")
        admin = client.admin()
        await admin.create_topic(self.commands, if_missing=True)
        await admin.create_topic(self.events, if_missing=True)
        async with AsyncExitStack() as stack:
            self._client, self._stack = client, stack
            self._opening = asyncio.Lock()  # Of this loop: a bus outlives the loops that it works on.
            try:
                yield self
            finally:
                self.stop()
                if self._asked is not None:
                    await self._asked.close()
                self._client = self._stack = self._asked = None
                self._producers.clear()

    async def send(self, /, command: Any, **fields: Any) -> Result:
        """Put a command (or event) into its topic; returns when it is stored. Takes what `Producer.send`
        takes: key, headers, delay, priority, dedup_id, …"""
        entry, body, headers = self._registry.encode(command)
        headers += fields.pop("headers", ())
        key = as_key(fields.pop("key", None))
        if key is None:
            key = entry.key(command)
        producer = await self._producer(entry.topic)
        return await producer.publish(body, key=key, headers=headers, **fields)

    async def publish(self, /, event: Any, **fields: Any) -> Result:
        """The same as `send`, by the name that suits an event."""
        return await self.send(event, **fields)

    async def request(self, /, command: Any, *, timeout: float = REQUEST_TIMEOUT_S, **fields: Any) -> Any:
        """Send a command and wait for what its handler returns; `RequestFailed` when it was rejected."""
        client = self._attached()
        if self._asked is None:
            options = {"retention_ms": REPLY_RETENTION_MS, "partitions": 1}
            await client.admin().create_topic(self.replies, if_missing=True, **options)
            self._asked = Replies(client, self.replies, self._registry)
        asked = self._asked
        await asked.start()
        headers, correlation = asked.open()
        try:
            await self.send(command, headers=[*headers, *fields.pop("headers", ())], **fields)
        except BaseException:
            asked.forget(correlation)
            raise
        return await asked.answer(correlation, timeout)

    async def run(self, *, concurrency: int = 1, groups: Sequence[str] | None = None) -> None:
        """Run the handlers until `stop`: up to `concurrency` messages at a time for each group."""
        client = self._attached()
        chosen: dict[tuple[str, str], list[Handler]] = {}
        known = {handler.group for handler in self._handlers}
        unknown = sorted(set(groups or ()) - known)
        if unknown:
            raise InvalidRequest(f"groups: {unknown[0]!r} has no handler; there are {sorted(known)}")
        for handler in self._handlers:
            if groups is None or handler.group in groups:
                chosen.setdefault((handler.topic, handler.group), []).append(handler)
        if not chosen:
            raise InvalidRequest("there is no handler to run")
        caller = Invoker(self._middlewares, threads=max(1, concurrency) * len(chosen))
        answers = Answers(self._producer, self._registry)
        for (topic, group), handlers in chosen.items():
            exclusive = topic == self.commands and self._exclusive
            mode: Literal["exclusive", "queue"] = "exclusive" if exclusive else "queue"
            consumer = client.consumer(topic, group, mode=mode)
            self._running.append(
                Subscription(consumer, handlers, self._registry, caller, answers, client.groups())
            )
        tasks = [asyncio.create_task(subscription.run(concurrency)) for subscription in self._running]
        try:
            await asyncio.gather(*tasks)
        finally:
            # When one fails the others stop, too, and give back what they hold.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running.clear()
            caller.close()

    def stop(self) -> None:
        """Let `run` end: no new messages, those under way are finished, the rest is given back."""
        for subscription in self._running:
            subscription.stop()

    def _attached(self) -> Client:
        if self._client is None:
            raise Unavailable("the bus is not attached: use `async with bus.attach(client)`")
        return self._client

    async def _producer(self, topic: str) -> Producer:
        client = self._attached()
        producer = self._producers.get(topic)
        if producer is None:
            async with self._opening:  # Two tasks must not open one each.
                producer = self._producers.get(topic)
                if producer is None:
                    assert self._stack is not None
                    producer = await self._stack.enter_async_context(client.producer(topic))
                    self._producers[topic] = producer
        return producer
