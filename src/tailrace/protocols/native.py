"""The native listener: one `Link` per connection, bounded windows in both directions, keep-alive.

Back-pressure is that of TCP. A connection is not read while it has too many unanswered requests or request
bytes, while the whole node holds too many, or while its peer does not take the answers. A fetch is not even
evaluated for a peer that does not read. So neither a flood nor a slow reader grows memory, and other
connections do not wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from tailrace.core.model.access import Caller
from tailrace.core.model.commands import Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import InvalidRequest, TailraceError, Unavailable
from tailrace.format import codec
from tailrace.format.frame import Buffer
from tailrace.format.wire import (
    GREETING_BYTES_MAX,
    HEADER_BYTES_MAX,
    PREAMBLE,
    PROTOCOL_VERSION,
    Hello,
    Welcome,
    WireReader,
    prefix,
)
from tailrace.ports import Clock, Verbs
from tailrace.protocols.edge_tuning import (
    CONNECTION_READ_BYTES_MAX,
    CROWD_US,
    FRAME_BYTES_PER_SECOND_MIN,
    FRAME_US,
    GREETING_US,
    HEADER_WEIGHT,
    PARTIAL_BYTES_HARD_MAX,
    PARTIAL_BYTES_MAX,
    PARTIAL_GRACE_US,
    REQUESTS_MAX,
    SPIN_BYTES,
    SPIN_US,
    STUCK_GRACE_US,
    STUCK_US,
    SWEEP_S,
    UNSENT_BYTES_MAX,
    WRITE_HIGH_BYTES,
)

log = logging.getLogger("tailrace.native")

_decode_hello = codec.decoder_of(Hello, "the first message must be a hello")
_ENCODER = msgspec.msgpack.Encoder()


class Limits(msgspec.Struct, frozen=True):
    """Bounds that protect the broker from its clients."""

    connections_max: int = 10_000
    frame_bytes_max: int = 64 * 1024 * 1024
    in_flight_bytes_max: int = 32 * 1024 * 1024
    connection_in_flight_bytes_max: int = 2 * 1024 * 1024
    idle_ms: int = 90_000
    drain_ms: int = 10_000


class Listener:
    """Accepts connections, counts the memory they hold, and closes silent ones."""

    def __init__(self, verbs: Verbs, clock: Clock, limits: Limits, node: str) -> None:
        self.verbs = verbs
        self.clock = clock
        self.limits = limits
        self.node = node
        self.links: set[Link] = set()
        self.starting = False
        """The broker recovers: greetings are refused as `Unavailable`, and clients come again."""
        self.stopping = False
        """New connections are refused, also those that the system had accepted before."""
        self.held_bytes = 0
        self.partial_bytes = 0
        self.unsent_bytes = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._spinning = False
        self.latest: Link | None = None
        """The connection that was read last, at `latest_us`."""
        self.latest_us = 0
        self._spin_until_us = 0
        self._empty: asyncio.Event | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address in use (port 0 asks for a free one)."""
        self._loop = loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Link(self), host, port, backlog=1024)
        self._sweep()
        address = self._server.sockets[0].getsockname()
        return address[0], address[1]

    def _sweep(self) -> None:
        now_us = self.clock.now_us()
        for link in list(self.links):
            link.check(now_us)
        self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def turned_away(self) -> Refusal | None:
        """The refusal for a new connection that cannot stay; None if it can."""
        if self.stopping:
            return Refusal("unavailable", "the broker is shutting down", "none")
        if len(self.links) >= self.limits.connections_max:
            return Refusal("overloaded", "too many connections", "none", {"retry_after_ms": 1000})
        return None

    def left(self, link: Link) -> None:
        """A connection is gone."""
        self.links.discard(link)
        if self._empty is not None and not self.links:
            self._empty.set()

    def spin(self, now_us: int) -> None:
        """Poll for a moment instead of going to sleep: a peer sends each request as soon as the last one is
        answered, and on many machines waking up takes longer than answering.
        """
        self._spin_until_us = now_us + SPIN_US
        if not self._spinning:
            self._look_again()

    def _look_again(self) -> None:
        self._spinning = self._loop is not None and self.clock.now_us() < self._spin_until_us
        if self._loop is not None and self._spinning:
            self._loop.call_soon(self._look_again)

    def hold(self, nbytes: int) -> None:
        """Count the bytes of a request under way."""
        self.held_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Uncount the bytes of a request; if the node has room again, read its connections again."""
        full = self.full
        self.held_bytes -= nbytes
        if full and not self.full:
            for link in list(self.links):
                link.adjust()

    @property
    def full(self) -> bool:
        """Whether all connections together hold more than the node allows."""
        return self.held_bytes > self.limits.in_flight_bytes_max

    def wait_for_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` when all connections together have less unsent than the bound."""
        self._waiting.append(resume)

    def count_unsent(self, nbytes: int) -> None:
        """Count bytes that peers have not taken, or uncount them; then reads that waited for room
        continue."""
        self.unsent_bytes += nbytes
        if nbytes < 0:  # A resumed read counts again: this loop must not run inside itself.
            while self._waiting and self.unsent_bytes < UNSENT_BYTES_MAX:
                self._waiting.popleft()()

    def count_partial(self, nbytes: int) -> bool:
        """Count bytes of incomplete messages, or uncount them; return whether they are too many."""
        self.partial_bytes += nbytes
        return self.partial_bytes > PARTIAL_BYTES_MAX

    def shed(self, now_us: int) -> None:
        """Incomplete messages hold too much memory: close the connection with the most, unless its message
        has only just begun.
        """
        hoarder = max(self.links, key=lambda link: link.partial_bytes, default=None)
        if hoarder is None:
            return
        if hoarder.stalled(now_us) or self.partial_bytes > PARTIAL_BYTES_HARD_MAX:
            log.warning(
                "closing a connection that holds %d bytes of an unfinished message", hoarder.partial_bytes
            )
            hoarder.abort()

    async def stop(self, drain_s: float) -> None:
        """Take no more connections or requests, wait until those under way are answered, then close."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for link in list(self.links):
            link.finish()
        if self.links:
            self._empty = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._empty.wait()
        for link in list(self.links):
            link.abort()


class Link(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.caller = Caller("", "open")
        self._transport: asyncio.Transport | None = None
        self._reader = WireReader(0, preamble=PREAMBLE, header_bytes_max=GREETING_BYTES_MAX)
        self._greeted = False
        self._finishing = False
        self._pending = 0
        self._held_bytes = 0
        self._reading = True
        self._writable = True
        self._parked: list[Callable[[], None]] = []
        self._heard_us = self._began_us = listener.clock.now_us()
        self._peer = "?"
        self.answered_us: dict[str, int] = {}
        self.fetches: dict[Any, None] = {}
        self._queued_bytes = 0
        self._unsent_bytes = 0
        self._left_bytes = 0
        self._stuck_us = 0
        self._reading_bytes = 0
        self.partial_bytes = 0

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass of it.
        self._transport = transport
        self._peer = str(transport.get_extra_info("peername"))
        refusal = self._listener.turned_away()
        if refusal is not None:
            self._refuse(0, refusal)
            transport.close()
            return
        self._listener.links.add(self)
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.window()

    def buffer_updated(self, nbytes: int) -> None:
        now_us = self._listener.clock.now_us()
        if not self._pending and nbytes < SPIN_BYTES and now_us - self._heard_us < SPIN_US:
            self._listener.spin(now_us)
        self._heard_us = now_us
        if not self._reader.partial:
            self._began_us = now_us
        listener = self._listener
        # If another connection was read a moment ago, their requests share a turn.
        crowded = listener.latest is not self and now_us - listener.latest_us < CROWD_US
        listener.latest, listener.latest_us = self, now_us
        verbs = listener.verbs
        verbs.gather(True)
        try:
            for request_id, header, body in self._reader.filled(nbytes):
                self._began_us = now_us
                self._message(request_id, header, body)
        except TailraceError as error:
            # The framing itself is broken: nothing after it can be parsed.
            self._refuse(0, Refusal(error.code, error.message))
            self._close()
        finally:
            verbs.gather(False, crowded)
        held = self._reader.partial_bytes
        if held != self.partial_bytes:
            grown, self.partial_bytes = held - self.partial_bytes, held
            if self._listener.count_partial(grown):
                self._listener.shed(now_us)
        self.adjust()

    def eof_received(self) -> bool:
        # A killed process looks like one that only sends nothing more. Waiting requests are answered now,
        # because nobody may be there later.
        for fetch in list(self.fetches):
            fetch.hang_up()
        self.finish()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.left(self)
        self._transport = None
        held, self.partial_bytes = self.partial_bytes, 0
        self._listener.count_partial(-held)
        # Requests under way are still answered, to nobody; the memory that they hold is released then.
        self._writable = True
        self._parked.clear()
        self._measure()
        for fetch in list(self.fetches):
            fetch.drop()

    def pause_writing(self) -> None:
        self._writable = False
        self._stuck_us = self._listener.clock.now_us()
        self._measure()
        self.adjust()

    def resume_writing(self) -> None:
        self._writable = True
        self._measure()
        self._unpark()
        self.adjust()

    # -- messages

    def _message(self, request_id: int, header: bytes, body: Buffer) -> None:
        if not self._greeted:
            self._greet(request_id, header)
            return
        if self._finishing:
            self._refuse(request_id, Refusal("unavailable", "this connection is being closed; connect again"))
            return
        try:
            request = codec.decode_request(header)
        except InvalidRequest as error:
            self._refuse(request_id, Refusal(error.code, error.message))
            return
        nbytes = len(body)
        weight = nbytes + HEADER_WEIGHT * len(header)
        self._pending += 1
        self._held_bytes += weight
        self._listener.hold(nbytes)
        answered = False

        def respond(reply: Reply, parts: Sequence[Buffer]) -> None:
            nonlocal answered
            assert not answered, "a request is answered once"
            answered = True
            self._pending -= 1
            self._held_bytes -= weight
            self._send(request_id, codec.encode_reply(reply), parts)
            self._listener.release(nbytes)
            if not self._reading:
                self.adjust()

        self._listener.verbs.submit(request, body, respond, self)

    def _greet(self, request_id: int, header: bytes) -> None:
        hello = _decode_hello(header)
        if PROTOCOL_VERSION not in hello.versions:
            spoken = ", ".join(map(str, hello.versions[:10]))
            raise InvalidRequest(
                f"this broker speaks protocol version {PROTOCOL_VERSION}, the client {spoken or 'none'}"
            )
        if self._listener.starting:
            raise Unavailable("the broker is starting: it recovers its topics")
        limits = self._listener.limits
        self._greeted = True
        self._reader.allow(HEADER_BYTES_MAX, limits.frame_bytes_max)
        welcome = Welcome(
            PROTOCOL_VERSION, self._listener.node, limits.frame_bytes_max, REQUESTS_MAX, limits.idle_ms
        )
        self._send(request_id, _ENCODER.encode(welcome), ())

    def _refuse(self, request_id: int, refusal: Refusal) -> None:
        self._send(request_id, codec.encode_reply(refusal), ())

    def _send(self, request_id: int, header: bytes, parts: Sequence[Buffer]) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not parts and self._writable:
            transport.write(prefix(header, 0, request_id))
        else:
            size = sum(len(part) for part in parts)
            if self._writable:
                self._queued_bytes = transport.get_write_buffer_size()
            self._queued_bytes += len(header) + size
            transport.writelines([prefix(header, size, request_id), *parts])
        if not self._writable:
            self._measure()
        if self._finishing and not self._pending:
            self._close()

    # -- flow

    def blocked(self, resume: Callable[[], None]) -> bool:
        """As a `Gate`: while the peer does not take its answers, its fetches wait."""
        if self._writable:
            return False
        self._parked.append(resume)
        return True

    def _unpark(self) -> None:
        while self._parked and self._writable and self._reading_bytes < CONNECTION_READ_BYTES_MAX:
            self._parked.pop(0)()

    def reserve(self, nbytes: int, resume: Callable[[], None]) -> bool:
        """As a `Gate`: one large read at a time, or several small ones, while the node has room for them."""
        if self._reading_bytes and self._reading_bytes + nbytes > CONNECTION_READ_BYTES_MAX:
            self._parked.append(resume)
            return False
        if self._listener.unsent_bytes >= UNSENT_BYTES_MAX:
            self._listener.wait_for_room(resume)
            return False
        self._reading_bytes += nbytes
        self._listener.count_unsent(nbytes)
        return True

    def release(self, nbytes: int) -> None:
        """As a `Gate`: the read is over; its answer counts as unsent while the peer does not take it."""
        self._reading_bytes -= nbytes
        self._listener.count_unsent(-nbytes)
        self._unpark()

    def _measure(self) -> None:
        """Count the bytes that the peer has not taken, once they are above the high-water mark. A large
        answer counts in full until all of it is sent, because it stays in memory as long.
        """
        before = self._unsent_bytes
        self._unsent_bytes = 0 if self._writable else self._queued_bytes
        if self._unsent_bytes != before:
            self._listener.count_unsent(self._unsent_bytes - before)

    def adjust(self) -> None:
        """Resume or pause reading, as the windows demand."""
        transport, limits = self._transport, self._listener.limits
        if transport is None or transport.is_closing():
            return
        may_read = (
            self._pending < REQUESTS_MAX
            and self._held_bytes <= limits.connection_in_flight_bytes_max
            and self._writable
            and not self._finishing
            and not self._listener.full
        )
        if may_read and not self._reading:
            self._reading = True
            transport.resume_reading()
        elif not may_read and self._reading:
            self._reading = False
            transport.pause_reading()

    def check(self, now_us: int) -> None:
        """Close if the peer is silent, does not finish a message, or does not take its answers."""
        if self._transport is not None and not self._writable:
            left_bytes, self._left_bytes = self._left_bytes, self._transport.get_write_buffer_size()
            if self._left_bytes < left_bytes:
                self._stuck_us = now_us
            crowded = self._listener.unsent_bytes > UNSENT_BYTES_MAX
            if now_us - self._stuck_us > (STUCK_GRACE_US if crowded else STUCK_US):
                log.warning("%s: does not take its answers, %d bytes", self._peer, self._unsent_bytes)
                self.abort()
                return
        if not self._reading:
            self._heard_us = self._began_us = now_us  # The broker does not read: the peer is not to blame.
            return
        if not self._greeted and now_us - self._began_us > GREETING_US:
            log.info("%s: no greeting in time", self._peer)
            self.abort()
        elif self._reader.partial and now_us - self._began_us > self._frame_us():
            log.info("%s: a message was begun and not finished in time", self._peer)
            self.abort()
        elif now_us - self._heard_us > self._listener.limits.idle_ms * 1000 and not self._pending:
            log.info("%s: idle", self._peer)
            self._close()

    def stalled(self, now_us: int) -> bool:
        """Whether the incomplete message has had its time."""
        return now_us - self._began_us > PARTIAL_GRACE_US

    def _frame_us(self) -> int:
        return FRAME_US + self._reader.expected_bytes * 1_000_000 // FRAME_BYTES_PER_SECOND_MIN

    def finish(self) -> None:
        """Take no more requests; close when all are answered."""
        self._finishing = True
        self.adjust()
        if not self._pending:
            self._close()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close without waiting for anything."""
        if self._transport is not None:
            self._transport.abort()
