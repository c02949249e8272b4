"""Long reads of the log, one after the other, so that they do not take the reader threads from consumers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tailrace.broker.runtime.partition_runtime import NOTHING, refuse
from tailrace.broker.runtime.pump import Pump
from tailrace.core.model.commands import Reply
from tailrace.errors import Overloaded
from tailrace.format.frame import Buffer
from tailrace.ports import Respond

Work = Callable[[], tuple[Reply, Sequence[Buffer]]]
"""On a reader thread: read, and say what the answer is."""


class ReadQueue:
    """Reads of one kind that wait for their turn, `waiting_max` at most."""

    def __init__(self, pump: Pump, kind: str, waiting_max: int, retry_after_ms: int) -> None:
        self._pump = pump
        self._kind = kind
        self._waiting_max = waiting_max
        self._retry_after_ms = retry_after_ms
        self._waiting: deque[tuple[Callable[[], Work], Respond]] = deque()
        self._running = False

    def add(self, begin: Callable[[], Work], respond: Respond) -> None:
        """Wait in line; `begin` is called when it is its turn, and may still refuse."""
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
            except Exception as error:  # The topic went while it waited; the others still have their turn.
                respond(refuse(error), NOTHING)
                continue
            self._running = True
            self._pump.threads.read(work, self._ender(respond))

    def _ender(self, respond: Respond) -> Callable[[Any, Exception | None], None]:
        def done(result: Any, error: Exception | None) -> None:
            self._running = False
            if error is None:
                respond(*result)
            else:
                respond(refuse(error), NOTHING)
            self._next()

        return done
