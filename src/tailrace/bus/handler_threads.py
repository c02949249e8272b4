"""Threads for blocking handlers: as many as calls may be under way, and spare ones for those that hang.

A thread cannot be stopped. A call that was given up (its timeout is over, the worker stops) leaves its thread
behind, which must not keep later calls waiting: they get a spare one, up to a bound.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

log = logging.getLogger("tailrace.bus")
SPARE = 64
"""So many threads may be left behind before calls have to wait until one of them ends."""

Run = Callable[[Callable[[Any], Any], Any], Awaitable[Any]]


class HandlerThreads:
    """The threads of one running bus."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count + SPARE, thread_name_prefix="tailrace-handler")
        self._free = asyncio.Semaphore(count + SPARE)
        self._left_behind = 0

    def close(self) -> None:
        """Let the threads end with what they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def one(self, name: str) -> AsyncIterator[Run]:
        """Wait for a thread that is free, for a call of the handler of that name; gives what runs there."""
        await self._free.acquire()
        begun: list[Future[Any]] = []

        async def run(function: Callable[[Any], Any], subject: Any) -> Any:
            begun.append(self._pool.submit(contextvars.copy_context().run, function, subject))
            return await asyncio.wrap_future(begun[-1])

        try:
            yield run
        finally:
            running = [future for future in begun if not future.done()]
            if running:
                self._leave_behind(name, running[0])
            else:
                self._free.release()

    def _leave_behind(self, name: str, future: Future[Any]) -> None:
        self._left_behind += 1
        log.error("%s runs on in its thread: %d such calls, %d at most", name, self._left_behind, SPARE)
        if self._left_behind == SPARE:
            log.error("calls of blocking handlers may have to wait now until one of these ends")
        loop = asyncio.get_running_loop()

        def over(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # The loop is closed: nobody waits for the thread any more.
                loop.call_soon_threadsafe(self._came_back)

        future.add_done_callback(over)

    def _came_back(self) -> None:
        self._left_behind -= 1
        self._free.release()
