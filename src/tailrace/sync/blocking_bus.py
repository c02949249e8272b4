"""The blocking form of the bus: the same declarations, and calls that wait."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tailrace.bus.application import Bus as AsyncBus
from tailrace.errors import Unavailable
from tailrace.sync.blocking_client import Client
from tailrace.sync.blocking_wrapper import blocking
from tailrace.sync.portal import Portal

T = TypeVar("T")


class Bus:
    """`tailrace.bus.Bus` for threads. Handlers may be coroutine functions, too: those run on the loop."""

    def __init__(self, name: str, *, exclusive: bool = True) -> None:
        inner = self.inner = AsyncBus(name, exclusive=exclusive)
        self.name = name
        self.command, self.event, self.upcast = inner.command, inner.event, inner.upcast
        self.handler, self.middleware = inner.handler, inner.middleware
        self._portal: Portal | None = None

    @contextmanager
    def attach(self, client: Client) -> Iterator[Bus]:
        """Put the bus to work on a client of `tailrace.sync`."""
        portal = self._portal = client.portal
        attached = self.inner.attach(client.inner)
        portal.call(attached.__aenter__)
        try:
            yield self
        finally:
            self._portal = None
            portal.call(lambda: attached.__aexit__(None, None, None))

    def _work(self) -> Portal:
        if self._portal is None:
            raise Unavailable("the bus is not attached: use `with bus.attach(client)`")
        return self._portal

    def _cross(self, start: Callable[[AsyncBus], Coroutine[Any, Any, T]]) -> T:
        return self._work().call(lambda: start(self.inner))

    send = blocking(AsyncBus.send)
    publish = blocking(AsyncBus.publish)
    request = blocking(AsyncBus.request)
    run = blocking(AsyncBus.run)

    def stop(self) -> None:
        """Let `run` end."""
        self._work().soon(self.inner.stop)
