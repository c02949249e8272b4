"""When to ask again for what was refused: each thing after a pause of its own, by one timer for all of them.

Whoever asks for several things (topics, most often) calls `refused` for the one that was refused and leaves
out those that wait. So an outage costs one request for each thing and pause, however long it is: a refusal
never makes others be asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tailrace.client.sdk_tuning import PAUSE_S_MAX, PAUSE_S_MIN

_GRAIN_S = 0.001
"""Timers are no more exact than that; what is due within it is due."""


class Retries:
    """Things by name; `ask` is called when some may be asked for again."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._pauses_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    def waits(self, name: str) -> bool:
        """Whether it is not to be asked for now."""
        return name in self._due_s

    def refused(self, name: str, least_s: float = PAUSE_S_MIN) -> None:
        """It was refused: it waits, each time twice as long."""
        pause_s = max(least_s, self._pauses_s.get(name, PAUSE_S_MIN))
        self._pauses_s[name] = min(pause_s * 2, PAUSE_S_MAX)
        self._due_s[name] = self._loop.time() + pause_s
        self._arm()

    def served(self, name: str) -> None:
        """It was answered: the next pause is a short one."""
        self._pauses_s.pop(name, None)

    def at_once(self) -> None:
        """Something has changed: everything may be asked for now."""
        self._due_s.clear()
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._due_s:
            due_s = min(self._due_s.values())
            if self._timer is not None and due_s < self._timer_s:
                self._cancel()
            if self._timer is None:
                self._timer_s = due_s
                self._timer = self._loop.call_at(due_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        now_s = self._loop.time() + _GRAIN_S
        for name in [name for name, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[name]
        self._ask()
        self._arm()
