"""An asyncio loop on a world's virtual time: the SDK's consumers run on it as they are.

Only what they need is there: callbacks, timers, futures and tasks. Every callback is an event of the world,
in order with all others. What fails in one ends the run.
"""

from __future__ import annotations

import asyncio
from asyncio.events import _set_running_loop  # Public, by `__all__`: "intended to be used by event loops".
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Protocol, cast

from tailrace.broker.runtime.clock import ManualClock
from tailrace.sim.virtual_time import SECOND_US


class Timeline(Protocol):
    """The time of a world."""

    clock: ManualClock

    def later(self, delay_us: int, action: Callable[[], None]) -> None:
        """Do something after a while."""
        ...


class SimHandle(asyncio.Handle):
    """A callback that is called by its world."""

    def run(self) -> None:
        """Call it."""
        self._run()


class SimTimer(asyncio.TimerHandle, SimHandle):
    """The same, at a time."""


class SimLoop:
    """See `asyncio.AbstractEventLoop`. `timers` and `tasks` are those that are alive."""

    def __init__(self, world: Timeline) -> None:
        self._world = world
        self._loop = cast(asyncio.AbstractEventLoop, self)
        self.timers: set[asyncio.TimerHandle] = set()
        self.tasks: set[asyncio.Task[Any]] = set()

    def time(self) -> float:
        """Seconds of virtual time."""
        return self._world.clock.now_us() / SECOND_US

    def get_debug(self) -> bool:
        """Never."""
        return False

    def is_closed(self) -> bool:
        """It goes on as long as its world."""
        return False

    def _run(self, handle: SimHandle) -> None:
        if handle.cancelled():
            return
        _set_running_loop(self._loop)
        try:
            handle.run()
        finally:
            _set_running_loop(None)

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """In a later event of the same moment."""
        handle = SimHandle(callback, args, self._loop, context)
        self._world.later(0, lambda: self._run(handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """There are no other threads."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """After some seconds."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """At a time."""
        handle = SimTimer(when, callback, args, self._loop, context)
        self.timers.add(handle)

        def fire() -> None:
            self.timers.discard(handle)
            self._run(handle)

        self._world.later(round((when - self.time()) * SECOND_US), fire)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self.timers.discard(handle)

    def create_future(self) -> asyncio.Future[Any]:
        """One of this loop."""
        return asyncio.Future(loop=self._loop)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        """Start a coroutine."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self._loop, name=name, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What fails in a callback fails the run."""
        if "exception" in context:
            raise context["exception"]
