"""Handlers: how they are called, and what is done with the message afterwards.

A coroutine function runs on the loop; a plain function runs in a thread of its own pool, while the consumer
goes on extending the leases. Either way the call is bounded by its `timeout`, and what becomes of the message
follows from its policy's table.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import msgspec

from tailrace.bus.envelope import Batch, BlockingMessage, Message
from tailrace.bus.handler_threads import HandlerThreads, Run
from tailrace.bus.outcomes import TABLE, AckPolicy, Act, Outcome, outcome_of
from tailrace.client.queue.handler_verdicts import delay_of, described
from tailrace.client.queue.threaded_handlers import is_async
from tailrace.client.rpc.calls import seconds_of, whole_of
from tailrace.core.model.topic_options import check_name
from tailrace.errors import InvalidRequest

log = logging.getLogger("tailrace.bus")

Call = Callable[[Any], Awaitable[Any]]
Middleware = Callable[[Any, Call], Awaitable[Any]]
Settle = Callable[[], Awaitable[None]]


class Handler(msgspec.Struct, frozen=True, eq=False):
    """One function of the application, and how it wants to be called."""

    function: Callable[[Any], Any]
    names: tuple[str, ...]
    topic: str
    group: str
    policy: AckPolicy
    timeout: float | None
    concurrency: int | None
    batch: int | None

    @property
    def blocking(self) -> bool:
        """Whether it runs in a thread."""
        return not is_async(self.function)

    @property
    def title(self) -> str:
        """What the function is called, for people."""
        return title_of(self.function)


class Invoker:
    """Calls handlers of one running bus."""

    def __init__(self, middlewares: Sequence[Middleware], threads: int) -> None:
        self._middlewares = middlewares
        self._threads = HandlerThreads(threads)
        self._limits: dict[Handler, asyncio.Semaphore] = {}

    def close(self) -> None:
        """Let the threads end with what they are doing."""
        self._threads.close()

    async def call(self, handler: Handler, subject: Any) -> tuple[Any, BaseException | None]:
        """What a handler made of a message or a batch: its result, or the error that ended it."""
        try:
            async with self._limit(handler):
                if not handler.blocking:
                    return await self._bounded(handler.function, handler, subject), None
                # The timeout begins when there is a thread to run in.
                async with self._threads.one(handler.title) as run:
                    return await self._bounded(_in_thread(run, handler.function), handler, subject), None
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                return None, error  # The worker stops.
            return None, RuntimeError(f"a cancellation escaped from the handler: {described(error)}")
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # SystemExit, too: a message must not end the worker.
            return None, error

    def _limit(self, handler: Handler) -> AbstractAsyncContextManager[object]:
        """Made here, not where the handler is declared: it belongs to the loop of this run."""
        if handler.concurrency is None:
            return nullcontext()
        return self._limits.setdefault(handler, asyncio.Semaphore(handler.concurrency))

    async def _bounded(self, call: Call, handler: Handler, subject: Any) -> Any:
        for middleware in reversed(self._middlewares):
            call = _around(middleware, call)
        if handler.timeout is None:
            return await call(subject)
        try:
            async with asyncio.timeout(handler.timeout) as bound:
                return await call(subject)
        except TimeoutError as error:
            if not bound.expired():
                raise
            raise TimeoutError(f"ran past its timeout of {handler.timeout:g} s") from error


def _in_thread(run: Run, function: Callable[[Any], Any]) -> Call:
    loop = asyncio.get_running_loop()

    async def call(subject: Any) -> Any:
        if isinstance(subject, Batch):
            subject = Batch([BlockingMessage(message, loop) for message in subject])
        else:
            subject = BlockingMessage(subject, loop)
        return await run(function, subject)

    return call


def _around(middleware: Middleware, call: Call) -> Call:
    async def called(subject: Any) -> Any:
        return await middleware(subject, call)

    return called


def settlement(policy: AckPolicy, message: Message[Any], error: BaseException | None) -> Settle | None:
    """What the policy's table says is to be done, unless the handler has settled the message by itself."""
    outcome = outcome_of(error)
    if outcome is Outcome.ERROR:
        log.error("%r failed", message, exc_info=error)
    act = TABLE[policy][outcome]
    if message.settled or act is Act.NOTHING:
        return None
    text = "" if error is None else described(error)
    if act is Act.NACK:
        return lambda: message.retry(delay_of(error), text)
    if act is Act.REJECT:
        return lambda: message.reject(text)
    return message.acknowledge if act is Act.ACK else message.give_back


def check_function(function: Any) -> None:
    """A handler takes exactly one thing."""
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise InvalidRequest(
            f"{title_of(function)}: a handler takes one argument, the message or the batch"
        ) from None


def check_terms(ack: Any, timeout: Any, **counts: Any) -> None:
    """Refuse where it is declared what would harm messages when it is used."""
    try:
        if not isinstance(ack, AckPolicy):
            raise InvalidRequest(f"ack: an AckPolicy, such as AckPolicy.{AckPolicy.ACK.name}, not {ack!r}")
        if timeout is not None:
            seconds_of(timeout)
        for name, count in counts.items():
            if count is not None:
                whole_of(name, count)
    except InvalidRequest as error:
        raise InvalidRequest(f"handler: {error}") from None


def check_group(handler: Handler) -> None:
    """A group has a name that the broker takes, given or made of the function's."""
    group: Any = handler.group
    problems = check_name(group) if isinstance(group, str) else ["a name is text"]
    if problems:
        text = f"group: {group!r}: {problems[0]}; name another one with `group=`"
        raise InvalidRequest(f"{handler.title}: {text}")


def title_of(function: Any) -> str:
    """The name of a function; other things that can be called may have none."""
    return str(getattr(function, "__qualname__", None) or repr(function))
