"""Coroutines of one loop that wait until something has changed."""

from __future__ import annotations

import asyncio


class Waiters:
    """Each waits for its own future; all are woken at once, and look for themselves whether it helps them."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def __bool__(self) -> bool:
        """Whether somebody waits."""
        return any(not future.done() for future in self._futures)

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
