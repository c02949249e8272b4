"""One connection of the native listener: requests in, answers out, with bounded windows in both directions.

A link is greeted once: the authenticator finds out who its caller is, and until then nothing that its peer
sends is looked at, beyond one small greeting. When the caller is not known any more, what waits is ended,
what is under way is answered, and the peer hears why the connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from tailrace.core.model.access import Caller, Origin
from tailrace.core.model.commands import Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import InvalidRequest, TailraceError, Unauthenticated, Unavailable
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
from tailrace.protocols.crowd import Crowd
from tailrace.protocols.doorway import Guest, origin_of
from tailrace.protocols.edge_tuning import (
    CONNECTION_READ_BYTES_MAX,
    CROWD_US,
    FRAME_BYTES_PER_SECOND_MIN,
    FRAME_US,
    GREETING_US,
    HEADER_WEIGHT,
    PARTIAL_GRACE_US,
    REQUESTS_MAX,
    SPIN_BYTES,
    SPIN_US,
    STUCK_GRACE_US,
    STUCK_US,
    TURN_US,
    UNSENT_BYTES_MAX,
    WRITE_HIGH_BYTES,
)
from tailrace.protocols.tls import ALERT_PLAIN, NO_CERTIFICATE, begins_tls

log = logging.getLogger("tailrace.native")

_decode_hello = codec.decoder_of(Hello, "the first message must be a hello")
_ENCODER = msgspec.msgpack.Encoder()


class Link(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, crowd: Crowd) -> None:
        self._listener = crowd
        self.caller = Caller("", "open")
        self.origin = Origin("")
        self.guest: Guest | None = None
        """Its place in the doorway, until the caller is known."""
        self.lacks_certificate = False
        """Whether the listener requires a client certificate, and this client has shown none."""
        self._transport: asyncio.Transport | None = None
        self._reader = WireReader(0, preamble=PREAMBLE, header_bytes_max=GREETING_BYTES_MAX)
        self._greeted = False
        self._asked_us: int | None = None
        """When the authenticator was asked; None if it was not, or has answered."""
        self._counted = False
        self._farewell: Refusal | None = None
        """The last words, when all requests are answered."""
        self._finishing = False
        self._pending = 0
        self._held_bytes = 0
        self._reading = True
        self._resting = False
        """Messages that are here already wait, so that others have their turn."""
        self._writable = True
        self._parked: list[Callable[[], None]] = []
        self._heard_us = self._began_us = crowd.clock.now_us()
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
        self.origin = origin_of(transport)
        self._peer = self.origin.address or "a peer of the Unix socket"
        if self.guest is None:
            self.guest = self._listener.doorway.enter(self.origin, transport.abort)
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
        self._take(nbytes, crowded)
        held = self._reader.partial_bytes
        if held != self.partial_bytes:
            grown, self.partial_bytes = held - self.partial_bytes, held
            if listener.count_partial(grown):
                listener.shed(now_us)
        self.adjust()

    def _take(self, nbytes: int, crowded: bool) -> None:
        """Take the messages that are complete with so many new bytes."""
        verbs, clock = self._listener.verbs, self._listener.clock
        ends_us = clock.now_us() + TURN_US
        verbs.gather(True)
        try:
            for request_id, header, body in self._reader.filled(nbytes):
                self._began_us = self._heard_us
                self._message(request_id, header, body)
                if self._asked_us is not None or (not self._greeted and self._is_closing()):
                    break  # What follows a greeting waits until the caller is known; there is no second one.
                if clock.now_us() > ends_us:
                    self._resting = True
                    asyncio.get_running_loop().call_soon(self._go_on)
                    break
        except TailraceError as error:
            # The framing itself is broken: nothing after it can be parsed.
            if not self._greeted and begins_tls(self._reader.beginning(2)):
                self._speaks_tls()
            else:
                self._refuse(0, Refusal(error.code, error.message, "none", error.details))
            self._close()
        finally:
            verbs.gather(False, crowded)

    def _go_on(self) -> None:
        """Others had their turn."""
        self._resting = False
        if not self._is_closing():
            self._take(0, False)
            self.adjust()

    def _is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _speaks_tls(self) -> None:
        self._listener.doorway.remark("speaks TLS at a port without it", self._peer)
        if self._transport is not None:
            self._transport.write(ALERT_PLAIN)

    def eof_received(self) -> bool:
        # A killed process looks like one that only sends nothing more. Waiting requests are answered now,
        # because nobody may be there later.
        for fetch in list(self.fetches):
            fetch.hang_up()
        self.finish()
        return not self.origin.tls  # The end of TLS is the end of both directions.

    def connection_lost(self, exc: Exception | None) -> None:
        listener = self._listener
        listener.left(self)
        self._transport = None
        if self.guest is not None:
            self.guest.leave()
        if self._greeted:
            listener.greeted -= 1
            self._greeted = False
        if self._counted:
            self._counted = False
            listener.doorkeeper.left(self.caller)
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
        if self.lacks_certificate:
            raise Unauthenticated(NO_CERTIFICATE)
        self._asked_us = self._listener.clock.now_us()
        if self.guest is not None:
            self._listener.doorway.renew(self.guest)
        known = partial(self._known, request_id)
        self._listener.authenticator.authenticate(hello.credentials, self.origin, known)

    def _known(self, request_id: int, outcome: Caller | Refusal) -> None:
        """The authenticator has found out who the caller is, or that nobody is."""
        listener, later = self._listener, not self._reading
        self._asked_us = None
        if self._is_closing():
            return
        refusal = outcome if isinstance(outcome, Refusal) else listener.turned_away()
        if refusal is None:
            assert isinstance(outcome, Caller)
            refusal = listener.doorkeeper.admitted(outcome)
            if refusal is None:
                self.caller, self._counted = outcome, True
        if refusal is not None:
            self._refuse(0, refusal)
            self._close()
            return
        self._greeted = True
        listener.greeted += 1
        if self.guest is not None:
            self.guest.leave()
        limits = listener.limits
        self._reader.allow(HEADER_BYTES_MAX, limits.frame_bytes_max)
        welcome = Welcome(
            PROTOCOL_VERSION, listener.node, limits.frame_bytes_max, REQUESTS_MAX, limits.idle_ms
        )
        self._send(request_id, _ENCODER.encode(welcome), ())
        if later:
            self._take(0, False)
            self.adjust()

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
            self._end()

    # -- the caller, later

    def _expel(self, refusal: Refusal) -> None:
        """The caller is not known any more: drop what waits, answer what is under way, say why, and close."""
        log.info("%s: %s", self._peer, refusal.message)
        self._farewell = refusal
        for fetch in list(self.fetches):
            fetch.drop()
        self.finish()

    def _end(self) -> None:
        if self._farewell is not None:
            refusal, self._farewell = self._farewell, None
            self._refuse(0, refusal)
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
            and self._asked_us is None
            and not self._resting
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
        if (
            self._farewell is not None
        ):  # What was under way had its time; leases that were dropped have no end.
            self._end()
            return
        if self._greeted and not self._finishing:
            listener = self._listener
            refusal = listener.authenticator.still(self.caller, listener.clock.wall_us())
            if refusal is not None:
                self._expel(refusal)
                return
        if self._asked_us is not None:
            if now_us - self._asked_us > GREETING_US:
                log.info("%s: its credentials were not looked at in time", self._peer)
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
            self._end()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def file_number(self) -> int | None:
        """The descriptor of the socket; None if it is closed."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return None if sock is None or sock.fileno() < 0 else int(sock.fileno())

    def abort(self) -> None:
        """Close without waiting for anything."""
        if self._transport is not None:
            self._transport.abort()
