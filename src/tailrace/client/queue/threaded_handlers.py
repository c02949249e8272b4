"""Plain functions as handlers: each call runs in a thread, so that the event loop goes on extending leases.

A coroutine function belongs on the loop; `is_async` recognises one also behind `functools.partial`, as a
bound method or as an object whose `__call__` is one. Anything else may block and gets a thread, with a copy
of the caller's context variables. What such a function returns is awaited on the loop if it can be: a lambda
around a coroutine function is no surprise.

A thread cannot be stopped. When the run is cancelled, the call that is under way is waited for and its
message is settled as usual; only a second cancellation gives it up.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tailrace.client.queue.delivery import LeasedMessage

log = logging.getLogger("tailrace.consumer")


def is_async(handler: Any) -> bool:
    """Whether calling it gives a coroutine and does not block."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether this code runs on that loop, and not in another thread."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


class Called(NamedTuple):
    """How a call ended: what the handler raised, and the cancellation that came meanwhile."""

    error: BaseException | None
    stopped: asyncio.CancelledError | None


class PlainHandler:
    """A plain function with threads of its own, as many as calls may be under way."""

    def __init__(self, function: Callable[[Any], Any], concurrency: int) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="tailrace-handler")
        self._context = contextvars.copy_context()

    def close(self) -> None:
        """Let the threads end with what they are doing."""
        self._pool.shutdown(wait=False)

    async def call(self, subject: Any) -> Called:
        """Call the function in a thread and wait for its end."""
        loop = asyncio.get_running_loop()
        context = self._context.copy()
        future = loop.run_in_executor(self._pool, context.run, self._guarded, subject)
        stopped: asyncio.CancelledError | None = None
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as cancelled:
            stopped = cancelled
            if not future.done():
                log.info("stopping: the handler's thread is waited for; cancel again to give it up")
                await asyncio.wait((future,))
        result, error = future.result()
        if error is None and inspect.isawaitable(result):
            try:
                await result
            except Exception as raised:
                error = raised
        return Called(error, stopped)

    def _guarded(self, subject: Any) -> tuple[Any, BaseException | None]:
        """In the thread. Errors are handed over as values: a future does not take every kind of them."""
        try:
            return self._function(subject), None
        except BaseException as error:
            return None, error


class BlockingDelivery(LeasedMessage, frozen=True, gc=False, eq=False):
    """A leased message in a plain function, which runs in a thread: the names of `Delivery`, and they wait.
    On the event loop, in a coroutine that the function returned, they can be awaited instead."""

    loop: asyncio.AbstractEventLoop

    def _done(self, work: Coroutine[Any, Any, None]) -> Any:
        if runs_here(self.loop):
            return work
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def ack(self) -> Any:
        """It is done; returns when that is durable."""
        return self._done(self.rows.settling.ack((self,)))

    def ack_nowait(self) -> None:
        """It is done; see `Delivery.ack_nowait`."""
        lease = self.rows.lease
        if lease.error is not None and lease.is_lost(self.offset):
            raise lease.error
        self.loop.call_soon_threadsafe(self.rows.settling.ack_late, self)

    def nack(self, delay: float | None = None, error: str = "", *, failure: bool = True) -> Any:
        """It failed, or is only given back; see `Delivery.nack`."""
        return self._done(self.rows.settling.nack((self,), delay, error, failure))

    def reject(self, reason: str = "", *, poison: bool = False) -> Any:
        """It can never be handled: straight to the dead letters; see `Delivery.reject`."""
        return self._done(self.rows.settling.reject((self,), reason, poison))

    def extend(self, ms: int) -> Any:
        """Hold its lease until now + `ms`; see `Delivery.extend`."""
        return self._done(self.rows.settling.extend(self.rows.lease, ms))
