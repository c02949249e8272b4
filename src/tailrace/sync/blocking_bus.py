"""The blocking form of the bus: the same declarations, and calls that wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tailrace.bus.application import REQUEST_TIMEOUT_S
from tailrace.bus.application import Bus as AsyncBus
from tailrace.client.messages import Result
from tailrace.errors import Unavailable
from tailrace.sync.blocking_client import Client
from tailrace.sync.portal import Portal


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

    def send(self, command: Any, **fields: Any) -> Result:
        """Put a command (or event) into its topic; returns when it is stored."""
        return self._work().call(lambda: self.inner.send(command, **fields))

    def publish(self, event: Any, **fields: Any) -> Result:
        """The same as `send`, by the name that suits an event."""
        return self.send(event, **fields)

    def request(self, command: Any, *, timeout: float = REQUEST_TIMEOUT_S, **fields: Any) -> Any:
        """Send a command and wait for what its handler returns."""
        return self._work().call(lambda: self.inner.request(command, timeout=timeout, **fields))

    def run(self, *, concurrency: int = 1, groups: Sequence[str] | None = None) -> None:
        """Run the handlers until `stop` is called, by another thread or by a handler."""
        self._work().call(lambda: self.inner.run(concurrency=concurrency, groups=groups))

    def stop(self) -> None:
        """Let `run` end."""
        self._work().soon(self.inner.stop)
