"""A queue of long reads of the log, done one at a time, so that consumers keep the reader threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.core.model.commands import Reply
from tailrace.errors import Overloaded
from tailrace.format.frame import Buffer
from tailrace.ports import Respond

Work = Callable[[], tuple[Reply, Sequence[Buffer]]]
"""Runs on a reader thread: read, and return the reply."""


class ReadQueue:
    """Reads of one kind; at most `waiting_max` of them wait."""

    def __init__(self, pump: Pump, kind: str, waiting_max: int, retry_after_ms: int) -> None:
        self._pump = pump
        self._kind = kind
        self._waiting_max = waiting_max
        self._retry_after_ms = retry_after_ms
        self._waiting: deque[tuple[Callable[[], Work], Respond]] = deque()
        self._running = False

    def add(self, begin: Callable[[], Work], respond: Respond) -> None:
        """Add a read; `begin` is called when its turn comes, and may still raise a refusal."""
        if len(self._waiting) >= self._waiting_max:
            text = f"{self._waiting_max} {self._kind} wait already"
            raise Overloaded(text, retry_after_ms=self._retry_after_ms)
        self._waiting.append((begin, respond))
        self._next()

    def _next(self) -> None:
        while self._waiting and not self._running:
            begin, respond = self._waiting.popleft()
            try:
                work = begin()
            except Exception as error:  # For instance, the topic was deleted meanwhile. The others go on.
                respond(refuse(error), NOTHING)
                continue
            self._running = True
            self._pump.threads.read(work, partial(self._ended, respond))

    def _ended(self, respond: Respond, result: Any, error: Exception | None) -> None:
        self._running = False
        if error is None:
            respond(*result)
        else:
            respond(refuse(error), NOTHING)
        self._next()
