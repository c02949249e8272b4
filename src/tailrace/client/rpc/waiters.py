"""Coroutines of one loop that wait until something has changed, or that work in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tailrace.errors import TailraceError


class Waiters:
    """Each waits for its own future; all are woken at once, and look for themselves whether it helps them."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        """Whether somebody waits."""
        return bool(self._futures) and any(not future.done() for future in self._futures)

    def join(self) -> asyncio.Future[None]:
        """Something to await; it is there at once, so that a change from now on is not missed."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def wake(self) -> None:
        """Something has changed."""
        futures, self._futures = self._futures, []
        for future in futures:
            if not future.done():
                future.set_result(None)


class AwaitedSupply:
    """Messages that somebody waits for, and what comes instead of them: an end, or trouble."""

    def __init__(self) -> None:
        self.closed: TailraceError | None = None
        """Why it is over."""
        self._stopping = False
        self._error: BaseException | None = None
        self._waiters = Waiters()

    def failed(self, error: BaseException) -> None:
        """Whoever takes next is told; also `membership.Holder`."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        self._waiters.wake()

    def _check(self) -> None:
        """Raise what comes instead of messages: the end each time, trouble once."""
        if self.closed is not None:
            raise self.closed
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._stopping:
            raise StopAsyncIteration


class BackgroundTasks:
    """Work that nobody awaits; what goes wrong with it is told."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        """Whether something is under way."""
        return bool(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin to work."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def cancel(self) -> None:
        """Give up all of it."""
        for task in list(self._tasks):
            task.cancel()
