"""The event loop behind all blocking clients of a process, on a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from tailrace.errors import InvalidRequest, TailraceError, Timeout, Unavailable

_EXIT_S = 2.0
T = TypeVar("T")


class Portal:
    """The event loop of the blocking clients, on a thread of its own."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self.gone: TailraceError | None = None
        self._thread = threading.Thread(target=self.loop.run_forever, name="tailrace-sync", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def _stop(self) -> None:
        if self.gone is None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_EXIT_S)

    def check(self) -> None:
        """Refuse what would wait for ever: the loop stayed in the parent process, or it is the caller's
        own."""
        if self.gone is not None:
            raise self.gone
        if threading.get_ident() == self._thread.ident:
            raise InvalidRequest("a blocking call on the event loop of tailrace.sync would wait for itself")

    def call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop and wait for its end; whatever ends the wait (Ctrl-C) cancels it."""
        self.check()
        future = asyncio.run_coroutine_threadsafe(start(), self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def run(self, act: Callable[[], T]) -> T:
        """Call something on the loop and wait for what it returns."""

        async def called() -> T:
            return act()

        return self.call(called)

    def soon(self, action: Callable[[], object]) -> None:
        """Call something on the loop and do not wait."""
        self.loop.call_soon_threadsafe(action)


_lock = threading.Lock()
_portal: Portal | None = None


def shared_portal() -> Portal:
    """The one of this process, started when it is first needed."""
    global _portal
    with _lock:
        if _portal is None:
            _portal = Portal()
        return _portal


def _after_fork() -> None:
    """In a forked child: threads do not come along. What was open is refused, new clients get a new loop."""
    global _lock, _portal
    _lock = threading.Lock()
    if _portal is not None:
        message = "this client was made before a fork; connect again in the child process"
        _portal.gone = Unavailable(message)
    _portal = None


os.register_at_fork(after_in_child=_after_fork)


async def within(work: Awaitable[T], timeout: float | None) -> T:
    """Await something for some seconds at most."""
    if timeout is None:
        return await work
    try:
        async with asyncio.timeout(timeout):
            return await work
    except TimeoutError:
        raise Timeout(f"not stored within {timeout:g} s; it may still be") from None
