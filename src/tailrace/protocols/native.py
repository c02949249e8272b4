"""The native listener: accepts connections over TCP, TLS and Unix sockets, and closes silent ones.

Back-pressure is that of TCP. A connection is not read while it has too many unanswered requests or request
bytes, while the whole node holds too many, or while its peer does not take the answers. A fetch is not even
evaluated for a peer that does not read. So neither a flood nor a slow reader grows memory, and other
connections do not wait for them.

Every connection has a caller, who is found out at its greeting. Once a second all of them are looked at
again, and so they are when users or tokens change: who is not known any more is told so and leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

from tailrace.ports import Authenticator, Clock, Doorkeeper, Verbs
from tailrace.protocols.crowd import Crowd, Limits
from tailrace.protocols.doorway import Arrival, Doorway, Guest
from tailrace.protocols.edge_tuning import BACKLOG, OWNER_ONLY, SWEEP_S, WITH_GROUP
from tailrace.protocols.native_link import Link
from tailrace.protocols.outflow import Outflow
from tailrace.protocols.tls import TlsFiles
from tailrace.protocols.unix_socket import UnixSocket

__all__ = ["Limits", "Listener"]


class Listener(Crowd):
    """Accepts connections, counts the memory they hold, and closes silent ones."""

    _rechecking = False
    _sweeper: asyncio.TimerHandle | None = None

    def __init__(
        self,
        verbs: Verbs,
        clock: Clock,
        limits: Limits,
        node: str,
        *,
        authenticator: Authenticator | None = None,
        doorkeeper: Doorkeeper | None = None,
        doorway: Doorway | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """Without an authenticator everybody may come in; without `tls`, TCP ports are plain."""
        super().__init__(
            verbs,
            clock,
            limits,
            node,
            authenticator=authenticator,
            doorkeeper=doorkeeper,
            doorway=doorway,
        )
        self._tls = tls
        self._servers: list[asyncio.Server] = []
        self._unix: list[UnixSocket] = []
        self._unix_mode = OWNER_ONLY

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, with TLS if there is a certificate; returns the address in use (port 0 asks for a free
        one). Several addresses are several calls."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        factory: Any = self._link if self._tls is None else self._arrival
        server = await loop.create_server(factory, host, port, backlog=BACKLOG)
        self._begin(server)
        address = server.sockets[0].getsockname()
        return address[0], address[1]

    async def start_unix(self, path: str) -> None:
        """Listen on a Unix socket, where the system tells who a peer is."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        place = UnixSocket(path, self._unix_mode)
        self._unix.append(place)
        self._begin(await loop.create_unix_server(self._link, sock=place.sock, backlog=BACKLOG))

    def open_unix_sockets(self, *, to_group: bool) -> None:
        """Who may open the Unix sockets: the broker's user alone, or its group as well."""
        mode = self._unix_mode = WITH_GROUP if to_group else OWNER_ONLY
        for place in self._unix:
            place.allow(mode)

    def _begin(self, server: asyncio.Server) -> None:
        self._servers.append(server)
        if self._sweeper is None:
            self._sweep()

    def _link(self) -> Link:
        return Link(self)

    def _arrival(self) -> Arrival:
        assert self._tls is not None
        return Arrival(self.doorway, self._tls, self._outflow, self._secured)

    def _outflow(self) -> Outflow:
        return Outflow(self._link())

    def _secured(
        self, protocol: Any, secured: asyncio.Transport, below: asyncio.Transport, guest: Guest
    ) -> None:
        """The handshake of a connection is over."""
        assert self._tls is not None
        link: Link = protocol.inner
        link.guest = guest
        link.lacks_certificate = self._tls.lacks_certificate(secured)
        protocol.open(secured, below)
        link.connection_made(protocol)

    def _sweep(self) -> None:
        now_us = self.clock.now_us()
        if self._tls is not None:
            self._tls.check()
        self.doorway.sweep()
        for link in list(self.links):
            link.check(now_us)
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def recheck(self) -> None:
        """Users or tokens have changed: look at every caller soon."""
        if self._loop is not None and not self._rechecking:
            self._rechecking = True
            self._loop.call_soon(self._recheck)

    def _recheck(self) -> None:
        self._rechecking = False
        now_us = self.clock.now_us()
        for link in list(self.links):
            link.check(now_us)

    def abandon(self) -> None:
        """In a forked child: let go of the sockets, which are the parent's. Otherwise clients of a parent
        that is gone would wait for an answer of the child."""
        numbers = [sock.fileno() for server in self._servers for sock in server.sockets]
        numbers += [number for link in self.links if (number := link.file_number()) is not None]
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in numbers:
            os.dup2(nothing, number, inheritable=False)  # The number stays taken: its owner may close it.
        os.close(nothing)

    async def stop(self, drain_s: float) -> None:
        """Take no more connections or requests, wait until those under way are answered, then close."""
        self.stopping = True
        for server in self._servers:
            server.close()
        for place in self._unix:
            place.remove()
        if self._sweeper is not None:
            self._sweeper.cancel()
        self.doorway.close()
        for link in list(self.links):
            link.finish()
        if self.links:
            self._empty = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._empty.wait()
        for link in list(self.links):
            link.abort()
