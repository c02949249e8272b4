"""The doorway: connections that have not greeted yet, in bounded number, memory and time, fair by address.

Every new connection is a `Guest` until its client is known. Guests have places; when all are taken, the
oldest guest of the address that has most of them is turned out. So somebody who opens connections and says
nothing turns out himself, and others always get in. A guest that is not known in time is turned out, too.

A TLS handshake costs memory and computing, so it needs one of fewer slots, which is kept until the client is
known. Who finds none waits in a line for each address; the lines take turns, and an address with fewer slots
than another takes one from it. The loop does other work after each handshake that begins; when many are
under way and do not end, there is a pause as well, so that those who are inside do not wait for them.

An `Arrival` is a new connection at a port with TLS. It reads a few bytes, in a buffer of its own: those
who speak something else are answered in their own language, and only for a TLS greeting is anything made
that takes memory.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

from tailrace.core.model.access import Origin
from tailrace.ports import Clock
from tailrace.protocols.edge_tuning import (
    GREETING_US,
    GUESTS_MAX,
    HANDSHAKE_GAP_S,
    HANDSHAKE_S,
    HANDSHAKES_CALM,
    HANDSHAKES_MAX,
    REMARK_US,
    TLS_SHUTDOWN_S,
)
from tailrace.protocols.tls import TlsFiles, peer_names, plain_answer, spoken

log = logging.getLogger("tailrace.doorway")

_ARRIVAL_BYTES = 2048
_REMARKS_MAX = 100
_TRIES = 16
"""Lines that are looked at before the search for one that gets a slot goes on later."""
_CREDENTIALS = struct.Struct("3i")
_UNIX = "unix"


def origin_of(transport: asyncio.BaseTransport) -> Origin:
    """Where a connection comes from, and what its transport has proved."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family == socket.AF_UNIX:
        given = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return Origin("", uid=_CREDENTIALS.unpack(given)[1])
    peer = transport.get_extra_info("peername")
    host = plain_host(str(peer[0])) if peer else ""
    loopback = host.startswith("127.") or host == "::1"
    if transport.get_extra_info("sslcontext") is None:
        return Origin(host, loopback=loopback)
    names = peer_names(transport.get_extra_info("peercert"))
    return Origin(host, tls=True, certificate_names=names, loopback=loopback)


def plain_host(host: str) -> str:
    """An address without its zone, and an IPv4 address as such where the system shows it as IPv6."""
    host = host.partition("%")[0]
    return host.removeprefix("::ffff:") if "." in host else host


def neighbourhood(origin: Origin) -> str:
    """Those who share the places of one address: of IPv6, a whole network of 64 bits, which one host has."""
    if origin.uid is not None:
        return f"{_UNIX}:{origin.uid}"
    if ":" not in origin.address:
        return origin.address
    return ":".join(ipaddress.ip_address(origin.address).exploded.split(":")[:4])


class Guest:
    """A connection whose client is not known yet."""

    def __init__(
        self, origin: Origin, turn_out: Callable[[], object], leave: Callable[[Guest], object], began_us: int
    ) -> None:
        self._leave = leave
        self.address = neighbourhood(origin)
        self.peer = origin.address or self.address
        self.turn_out = turn_out
        self.began_us = began_us

    def leave(self) -> None:
        """The client is known, or gone; harmless when it has left."""
        self._leave(self)


class FairPlaces:
    """A number of places; when they are taken, the oldest guest of the address with most of them goes."""

    def __init__(self, count_max: int) -> None:
        self.count_max = count_max
        self.count = 0
        self.most = 0
        """How many places the address with most of them has."""
        self._guests: dict[str, dict[Guest, None]] = {}
        self._ranks: dict[int, dict[str, None]] = {}
        """Addresses by how many places they have."""

    def held(self, address: str) -> int:
        """How many places an address has."""
        return len(self._guests.get(address, ()))

    def take(self, guest: Guest) -> Guest | None:
        """Take a place; returns the guest that loses its own."""
        loser = self.vacate() if self.count >= self.count_max else None
        guests = self._guests.setdefault(guest.address, {})
        guests[guest] = None
        self.count += 1
        self._ranked(guest.address, len(guests) - 1, len(guests))
        return loser

    def vacate(self) -> Guest:
        """The oldest guest of the address with most places loses its own."""
        address = next(iter(self._ranks[self.most]))
        loser = next(iter(self._guests[address]))
        self.release(loser)
        return loser

    def release(self, guest: Guest) -> bool:
        """Give a place up; false if the guest had none."""
        guests = self._guests.get(guest.address, {})
        if guest not in guests:
            return False
        del guests[guest]
        self.count -= 1
        self._ranked(guest.address, len(guests) + 1, len(guests))
        if not guests:
            del self._guests[guest.address]
        return True

    def _ranked(self, address: str, old: int, new: int) -> None:
        if old:
            rank = self._ranks[old]
            del rank[address]
            if not rank:
                del self._ranks[old]
        if new:
            self._ranks.setdefault(new, {})[address] = None
        if new > self.most or (old == self.most and old not in self._ranks):
            self.most = new


class Doorway:
    """All guests of a node."""

    def __init__(
        self, clock: Clock, *, guests_max: int = GUESTS_MAX, handshakes_max: int = HANDSHAKES_MAX
    ) -> None:
        self._clock = clock
        self._places = FairPlaces(guests_max)
        self._slots = FairPlaces(handshakes_max)
        self._guests: dict[Guest, None] = {}
        """In the order of their deadlines."""
        self._lines: dict[str, dict[Guest, Callable[[], None]]] = {}
        self._stepping = False
        self._remarks: dict[str, tuple[int, int]] = {}
        self.turned_out = 0
        """Guests that lost their place or came too late."""

    @property
    def guests(self) -> int:
        """How many connections are not known yet."""
        return self._places.count

    @property
    def handshakes(self) -> int:
        """How many of them are in a TLS handshake or just behind it."""
        return self._slots.count

    def enter(self, origin: Origin, turn_out: Callable[[], None]) -> Guest:
        """A new connection; `turn_out` ends it."""
        guest = Guest(origin, turn_out, self.left, self._clock.now_us())
        self._guests[guest] = None
        if (loser := self._places.take(guest)) is not None:
            self._turn_out(loser, "others wait to come in")
        return guest

    def renew(self, guest: Guest) -> None:
        """The client has said who it is: looking at that gets time of its own."""
        if guest in self._guests:
            del self._guests[guest]
            self._guests[guest] = None
            guest.began_us = self._clock.now_us()

    def left(self, guest: Guest) -> None:
        """A guest is known or gone."""
        if guest not in self._guests:
            return
        del self._guests[guest]
        self._places.release(guest)
        freed = self._slots.release(guest)
        line = self._lines.get(guest.address)
        if line is not None and guest in line:
            del line[guest]
            if not line:
                del self._lines[guest.address]
        if freed and self._lines:
            self._step_soon()

    def line_up(self, guest: Guest, begin: Callable[[], None]) -> None:
        """Call `begin` when there is a slot for the handshake of a guest."""
        self._lines.setdefault(guest.address, {})[guest] = begin
        self._step_soon()

    def _step_soon(self) -> None:
        if self._stepping:
            return
        self._stepping = True
        loop = asyncio.get_running_loop()
        if self._slots.count > HANDSHAKES_CALM:
            loop.call_later(HANDSHAKE_GAP_S, self._step)
        else:
            loop.call_soon(self._step)

    def _step(self) -> None:
        """Let one handshake begin, if any may."""
        self._stepping = False
        for _ in range(min(_TRIES, len(self._lines))):
            address = next(iter(self._lines))
            line = self._lines.pop(address)
            full = self._slots.count >= self._slots.count_max
            if full and self._slots.held(address) + 1 >= self._slots.most:
                self._lines[address] = line  # Behind the others; its turn comes again.
                continue
            guest, begin = next(iter(line.items()))
            del line[guest]
            if line:
                self._lines[address] = line
            if (loser := self._slots.take(guest)) is not None:
                self._turn_out(loser, "others wait for their handshakes")
            if self._lines:
                self._step_soon()
            begin()
            return

    def sweep(self) -> None:
        """Turn out those who are late. Call it about once a second."""
        now_us = self._clock.now_us()
        for guest in list(self._guests):
            if now_us - guest.began_us <= GREETING_US:
                break
            self._turn_out(guest, "no greeting in time")

    def _turn_out(self, guest: Guest, why: str) -> None:
        self.turned_out += 1
        self.left(guest)
        self.remark(why, guest.peer)
        guest.turn_out()

    def close(self) -> None:
        """End all that are not known yet."""
        for guest in list(self._guests):
            self.left(guest)
            guest.turn_out()

    def remark(self, what: str, peer: str) -> None:
        """Tell the log of something that strangers can cause at will: each once in a while, with a count."""
        now_us = self._clock.now_us()
        next_us, untold = self._remarks.get(what, (0, 0))
        if now_us < next_us:
            self._remarks[what] = next_us, untold + 1
            return
        if len(self._remarks) > _REMARKS_MAX:
            self._remarks.clear()
        more = f" (and {untold} more since the last such line)" if untold else ""
        log.info("%s: %s%s", peer, what, more)
        self._remarks[what] = now_us + REMARK_US, 0


class Arrival(asyncio.BufferedProtocol):
    """A new connection at a port with TLS.

    It relies on the loop to hand out the first bytes inside TLS in a later round than the end of the
    handshake, as uvloop does, on which every broker with ports runs.
    """

    def __init__(
        self,
        doorway: Doorway,
        files: TlsFiles,
        make: Callable[[], asyncio.BaseProtocol],
        welcome: Callable[[Any, asyncio.Transport, asyncio.Transport, Guest], None],
    ) -> None:
        self._doorway = doorway
        self._files = files
        self._make = make
        self._welcome = welcome
        self._transport: Any = None
        self._guest: Guest | None = None
        self._first = bytearray(_ARRIVAL_BYTES)
        self._size = 0
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._guest = self._doorway.enter(origin_of(transport), self._transport.abort)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._first)[self._size :]

    def buffer_updated(self, nbytes: int) -> None:
        self._size += nbytes
        first = bytes(self._first[: min(self._size, 16)])
        tongue = spoken(first)
        if tongue is None or self._guest is None:
            return
        if tongue == "tls":
            self._transport.pause_reading()
            self._doorway.line_up(self._guest, self._begin)
            return
        self._doorway.remark(f"speaks {tongue} where TLS is spoken", self._guest.peer)
        self._transport.write(plain_answer(tongue))
        self._transport.close()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._guest is not None:
            self._guest.leave()

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._shake_hands())
        loop.call_soon(loop.call_soon, self._feed)  # Behind what `start_tls` itself calls soon.

    async def _shake_hands(self) -> None:
        guest, transport = self._guest, self._transport
        assert guest is not None
        if transport.is_closing():
            return  # It was turned out before this began.
        loop = asyncio.get_running_loop()
        protocol = self._make()
        try:
            secured = await loop.start_tls(
                transport,
                protocol,
                self._files.context,
                server_side=True,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=TLS_SHUTDOWN_S,
            )
            if secured is None or secured.is_closing():
                raise ConnectionResetError("the connection was lost")
        except OSError as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            self._doorway.remark(f"TLS handshake failed: {reason}", guest.peer)
            guest.leave()
            return
        # Before the first bytes that were inside: those are handed out in the next round of the loop.
        self._welcome(protocol, secured, transport, guest)

    def _feed(self) -> None:
        """The bytes that were read here are the first of the handshake."""
        if self._transport.is_closing():
            return
        protocol = self._transport.get_protocol()
        window = protocol.get_buffer(self._size)
        window[: self._size] = self._first[: self._size]
        self._first = bytearray()
        protocol.buffer_updated(self._size)
