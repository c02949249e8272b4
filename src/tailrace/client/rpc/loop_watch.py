"""Notices when the event loop stood still for so long that leases or sessions of its consumers were at risk.

A timer looks at the loop's clock about ten times within the time that is dangerous. A look that comes late by
that time tells of a stall: for so long nothing was extended and no heartbeat was sent. There is one watch for
each loop, however many consumers run on it, and so one warning for each stall; after a warning the next ones
are only counted for a while.
"""

from __future__ import annotations

import asyncio
import logging
from weakref import WeakValueDictionary

from tailrace.client.sdk_tuning import STALL_LOOKS, STALL_PART, STALL_QUIET_S

log = logging.getLogger("tailrace.consumer")


_watches: WeakValueDictionary[int, LoopWatch] = WeakValueDictionary()
"""Of the loops that have consumers now, by their ids. A watch belongs to its loop, by the timer that it has
there: so it ends with a loop that was closed before its consumers were, and keeps neither."""


class LoopWatch:
    """Watches one loop for those that have entered themselves, each with its own limit."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._limits: dict[object, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._quiet_until_s = 0.0
        self._unsaid = 0

    def enter(self, who: object, limit_ms: int) -> None:
        """Watch for somebody whose leases and session last at least so long."""
        self._limits[who] = limit_ms / 1000
        if self._timer is not None:
            self._timer.cancel()
        self._look_later()

    def leave(self, who: object) -> bool:
        """Somebody is gone; whether nobody is left, and nothing is watched any more."""
        self._limits.pop(who, None)
        if self._limits:
            return False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return True

    def _look_later(self) -> None:
        limit_s = min(self._limits.values())
        due_s = self._loop.time() + limit_s / STALL_PART / STALL_LOOKS
        self._timer = self._loop.call_at(due_s, self._look, due_s, limit_s)

    def _look(self, due_s: float, limit_s: float) -> None:
        now_s = self._loop.time()
        self._look_later()
        if now_s - due_s < limit_s / STALL_PART:
            return
        if now_s < self._quiet_until_s:
            self._unsaid += 1
            return
        before = f" ({self._unsaid} times more since the last warning)" if self._unsaid else ""
        self._quiet_until_s, self._unsaid = now_s + STALL_QUIET_S, 0
        log.warning(
            "the event loop stood still for %.1f s%s: meanwhile no lease was extended and no heartbeat sent, "
            "and leases or sessions of this process end after %.1f s. Something blocks the loop: make the "
            "handler a plain function, which runs in a thread, or call what blocks with asyncio.to_thread",
            now_s - due_s,
            before,
            limit_s,
        )


def watch(loop: asyncio.AbstractEventLoop, who: object, limit_ms: int) -> None:
    """Warn when the loop stands still, as long as somebody has leases or a session of that time on it."""
    found = _watches.get(id(loop))
    if found is None:
        found = _watches[id(loop)] = LoopWatch(loop)
    found.enter(who, limit_ms)


def unwatch(loop: asyncio.AbstractEventLoop, who: object) -> None:
    """Somebody has no leases any more."""
    found = _watches.get(id(loop))
    if found is not None and found.leave(who):
        del _watches[id(loop)]
