"""A TCP proxy that breaks things: delay, black hole, half-close, and cuts at chosen or random moments.

It needs no privilege and knows nothing of the protocol, except that a test may look at the bytes on their way
(`watch`) to choose its moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

CHUNK = 64 * 1024

Watch = Callable[["Pipe", str, bytes], bool]
"""Called with each piece, "up" (to the broker) or "down"; False: the piece is dropped and the pair is cut."""


class Pipe:
    """One proxied connection."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes both ways until either side ends."""
        self._writers.append(writer)
        try:
            up_reader, up_writer = await asyncio.open_connection(*self._proxy.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.append(up_writer)
        self._tasks = [
            asyncio.create_task(self._pass("up", reader, up_writer)),
            asyncio.create_task(self._pass("down", up_reader, writer)),
        ]
        try:
            await asyncio.gather(*self._tasks)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self.cut()

    async def _pass(self, way: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        proxy = self._proxy
        while piece := await source.read(CHUNK):
            if proxy.delay_s:
                await asyncio.sleep(proxy.delay_s)
            if way in proxy.holes:
                continue
            if proxy.watch is not None and not proxy.watch(self, way, piece):
                self.cut()
                return
            sink.write(piece)
            await sink.drain()
        with contextlib.suppress(OSError):
            sink.write_eof()

    def cut(self) -> None:
        """Reset both sides at once."""
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()


class Proxy:
    """Listens on a port of its own and passes everything on to `target`, as its settings say."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.delay_s = 0.0
        self.holes: set[str] = set()
        """Ways ("up", "down") whose bytes vanish."""
        self.watch: Watch | None = None
        self.pipes: set[Pipe] = set()
        self.accepted = 0
        self.refuse = False
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """What a client connects to."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"tailrace://{host}:{port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        self.accepted += 1
        pipe = Pipe(self)
        self.pipes.add(pipe)
        try:
            await pipe.run(reader, writer)
        finally:
            self.pipes.discard(pipe)

    def cut(self) -> None:
        """Reset every connection; new ones are taken."""
        for pipe in list(self.pipes):
            pipe.cut()
