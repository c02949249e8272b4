"""The broker's verbs over a socket: several endpoints, pipelining, keep-alive, and reconnecting by itself.

A request that cannot be sent is refused at once with outcome `none`; one that was sent when the
connection broke, with outcome `unknown`. Whoever asked decides whether to try again.

The first connection fails at once when nobody listens, unless the caller asked to wait. A connection that
was lost later is made again for as long as the client is open; the logger `tailrace.client` tells of the
loss, of attempts (the first, then one in 10 s) and of the new connection.

A broker that refuses the client's credentials ends this: `open` raises at once, and a client that was
connected before tries once more, because the credentials are read again, and then refuses every call. So a
secret that was revoked is not shown to a broker again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from tailrace.client.rpc.credentials import HostAccess
from tailrace.client.rpc.endpoints import Endpoint, TcpEndpoint, is_protected, unprotected, unreached
from tailrace.client.rpc.machine_clock import MachineClock
from tailrace.client.sdk_tuning import (
    BODY_BYTES_MAX,
    CONNECT_S,
    RECONNECT_PAUSE_S_MAX,
    RECONNECT_PAUSE_S_MIN,
    REFUSED_PAUSE_S,
    REMARK_S,
)
from tailrace.core.model.access_commands import AddUser, AlterUser, CreateToken
from tailrace.core.model.commands import Ping, Reply, Request
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import (
    Denied,
    InvalidRequest,
    TailraceError,
    TooLarge,
    Unauthenticated,
    Unavailable,
    from_code,
)
from tailrace.format import codec
from tailrace.format.frame import Buffer
from tailrace.format.wire import PREAMBLE, PROTOCOL_VERSION, Hello, Welcome, WireReader, prefix

Respond = Callable[[Reply, Sequence[Buffer]], None]

log = logging.getLogger("tailrace.client")

_ENCODER = msgspec.msgpack.Encoder()
_DOWN = Refusal("unavailable", "not connected to a broker", "none")
_LOST = "the connection broke before the answer came"
_ENDED = "the connection ended with its greeting"
_STRANGER = "what listens there is not a Tailrace broker"
_decode_greeting = codec.decoder_of(Welcome | Refusal, _STRANGER)
_CLOSED = Refusal("unavailable", "the client is closed", "none")
_EXPOSED = Refusal(
    "invalid_request",
    "a password or token would travel over this connection for everybody to read: use tailraces://",
    "none",
)


class Connection(asyncio.BufferedProtocol):
    """One connection to one broker."""

    def __init__(self, lost: Callable[[Connection], None], access: HostAccess, where: str) -> None:
        self._lost = lost
        self._access = access
        self._where = where
        self._reader = WireReader(BODY_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, Respond] = {}
        self._next_id = 1
        self.greeting: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        # The connection may break before anybody looks at it: that is no error of this program.
        self.greeting.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.heard = True
        self.connected = self.lost = self.protected = False
        self.why = "the broker closed it"
        """Why the connection ended, for the log."""
        self.told = ""
        """The same, if the broker said it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass of it.
        self._transport = transport
        self.connected = True
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.protected = is_protected(transport)
        credentials = self._access.credentials
        if credentials is not None and not self.protected:
            self._fail(unprotected(self._where, self._access))
            return
        hello = _ENCODER.encode(Hello([PROTOCOL_VERSION], "tailrace-python", credentials))
        transport.write(PREAMBLE + prefix(hello, 0, 0))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.window()

    def buffer_updated(self, nbytes: int) -> None:
        self.heard = True
        try:
            for request_id, header, body in self._reader.filled(nbytes):
                self._message(request_id, header, body)
        except TooLarge as error:
            self._fail(error if self.greeting.done() else InvalidRequest(f"{_STRANGER}: {error.message}"))
        except TailraceError as error:
            self._fail(error)

    def _message(self, request_id: int, header: bytes, body: Buffer) -> None:
        if request_id in self._waiting:
            reply = codec.decode_reply(header)  # What cannot be read leaves the request waiting: it is lost.
            self._waiting.pop(request_id)(reply, (body,) if len(body) else ())
        elif not self.greeting.done():
            self._greeted(header)
        elif request_id == 0:
            reply = codec.decode_reply(header)
            if isinstance(reply, Refusal):
                self.told = reply.message
                raise from_code(reply.code, reply.message, "none", reply.details)

    def _greeted(self, header: bytes) -> None:
        welcome = _decode_greeting(header)
        if isinstance(welcome, Refusal):
            raise from_code(welcome.code, welcome.message, "none", welcome.details)
        self.greeting.set_result(welcome)

    def _fail(self, error: TailraceError) -> None:
        if not self.greeting.done():
            self.greeting.set_exception(error)
        self.close(error.message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.lost = True
        if exc is not None:
            self.why = str(exc)
        if not self.greeting.done():
            ended = Unavailable(f"{_ENDED}: {self.why}", silent=True)
            ended.__cause__ = exc
            self.greeting.set_exception(ended)
        waiting, self._waiting = self._waiting, {}
        self._lost(self)
        refusal = Refusal("unavailable", f"{_LOST}: {self.told}" if self.told else _LOST, "unknown")
        for respond in waiting.values():
            respond(refusal, ())

    def send(self, request: Request, body: Buffer, respond: Respond) -> None:
        """Write a request; the answer comes through `respond`."""
        transport = self._transport
        if transport is None or transport.is_closing():
            respond(_DOWN, ())
            return
        request_id = self._next_id
        self._next_id += 1
        self._waiting[request_id] = respond
        head = prefix(codec.encode_request(request), len(body), request_id)
        if len(body):
            transport.writelines([head, body])
        else:
            transport.write(head)

    def close(self, why: str = "it was closed here") -> None:
        """Close now; what waits for an answer is told that it is unknown."""
        if self._transport is not None:
            self.why = why
            self._transport.abort()


class _Outage:
    """What the log says of a time without a connection: little, however often a connection is tried."""

    def __init__(self, now_s: float) -> None:
        self._begun_s = now_s
        self._next_s = now_s
        self._attempts = 0

    def attempt(self, error: TailraceError, now_s: float) -> None:
        """An attempt failed; the first is told, and later ones in intervals."""
        self._attempts += 1
        if now_s >= self._next_s:
            self._next_s = now_s + REMARK_S
            text = "%s; trying again (attempt %d after %.0f s)"
            log.warning(text, error.message, self._attempts, now_s - self._begun_s)

    def over(self, where: str, now_s: float) -> None:
        """There is a connection."""
        log.info("connected to the broker at %s after %.1f s", where, now_s - self._begun_s)


class NetworkVerbs:
    """`BrokerVerbs` over whichever of the endpoints answers; a host and port is one, too."""

    def __init__(self, endpoints: Sequence[Endpoint | tuple[str, int]]) -> None:
        self.clock = MachineClock()
        self._endpoints = [TcpEndpoint(*item) if isinstance(item, tuple) else item for item in endpoints]
        self._wire: Connection | None = None
        self._where = ""
        self._keeper: asyncio.Task[None] | None = None
        self._down = asyncio.Event()
        self._refusal = _DOWN
        """What requests are answered with while there is no connection."""
        self.node = ""
        """What the broker of the last connection calls itself."""
        self.over = False
        """It was closed, or the broker does not take its credentials any more."""

    async def open(self, wait_s: float = 0.0, *, timeout_s: float = CONNECT_S) -> None:
        """Connect; raises what the endpoints said when none takes the connection. With `wait_s` they are
        asked again for so long, unless what was said is for good."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        pause, outage = RECONNECT_PAUSE_S_MIN, None
        while True:
            try:
                idle_ms = await self._connect(min(CONNECT_S, timeout_s))
                break
            except TailraceError as error:
                left_s = deadline - loop.time()
                if not error.retriable or left_s <= 0:
                    raise
                outage = outage or _Outage(loop.time())
                outage.attempt(error, loop.time())
            await asyncio.sleep(min(pause, left_s))
            pause = min(pause * 2, RECONNECT_PAUSE_S_MAX)
        if outage is not None:
            outage.over(self._where, loop.time())
        self._keeper = loop.create_task(self._keep(idle_ms))

    async def _connect(self, timeout_s: float) -> int:
        failures: list[tuple[Endpoint, Connection, Exception]] = []
        for endpoint in list(self._endpoints):
            access = endpoint.access()
            wire = Connection(self._lost, access, str(endpoint))
            try:
                async with asyncio.timeout(timeout_s):
                    await endpoint.dial(lambda wire=wire: wire, access)  # type: ignore[misc]
                    welcome = await wire.greeting
                if wire.lost:
                    raise Unavailable(_ENDED)
            except (TimeoutError, OSError, TailraceError) as error:
                if isinstance(error, TailraceError) and not error.retriable:
                    raise _final(error, endpoint, access) from error
                failures.append((endpoint, wire, error))
                self._endpoints.append(self._endpoints.pop(0))
            else:
                self._wire, self._where, self.node = wire, str(endpoint), welcome.node
                return welcome.idle_ms
            finally:
                if self._wire is not wire:
                    wire.close()
        problems = []
        for endpoint, wire, failure in failures:
            told = await endpoint.explain(failure, connected=wire.connected, timeout_s=timeout_s)
            if not told.retriable or (len(failures) == 1 and told.details):
                raise told from failure
            problems.append(told.message)
        raise unreached(problems, self._endpoints)

    def _lost(self, wire: Connection) -> None:
        if self._wire is wire:
            self._wire = None
            self._down.set()
            if not self.over:
                log.warning("lost the connection to the broker at %s: %s", self._where, wire.why)

    async def _keep(self, idle_ms: int) -> None:
        """Keep the connection alive while it stands, and make a new one when it is lost: at once, but with
        pauses where connections do not stand, however well they are greeted."""
        loop = asyncio.get_running_loop()
        since_s, rest = loop.time(), 0.0
        while not self.over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(idle_ms / 3000, 0.05)):
                    await self._down.wait()
            if not self._down.is_set():
                self._probe()
                continue
            pause, outage = RECONNECT_PAUSE_S_MIN, _Outage(loop.time())
            rest = rest if loop.time() - since_s < RECONNECT_PAUSE_S_MAX else 0.0
            await asyncio.sleep(rest)
            rest = min(rest * 2 or RECONNECT_PAUSE_S_MIN, RECONNECT_PAUSE_S_MAX)
            while self._wire is None and not self.over:
                try:
                    idle_ms = await self._connect(CONNECT_S)
                    outage.over(self._where, loop.time())
                    self._refusal = _DOWN
                except (Unauthenticated, Denied) as error:
                    self._end(error)
                except TailraceError as error:
                    outage.attempt(error, loop.time())
                    self._refusal = Refusal("unavailable", f"{_DOWN.message}: {error.message}", "none")
                    await asyncio.sleep(pause if error.retriable else REFUSED_PAUSE_S)
                    pause = min(pause * 2, RECONNECT_PAUSE_S_MAX)
            since_s = loop.time()
            self._down.clear()

    def _end(self, error: TailraceError) -> None:
        """The broker does not take these credentials any more: every call is told, and nothing is tried."""
        self.over = True
        self._refusal = Refusal(error.code, error.message, "none", error.details)
        log.error("the broker refuses this client, which gives up: %s", error.message)

    def _probe(self) -> None:
        """Every third of the idle time: a silent peer that did not even answer the last probe is gone."""
        wire = self._wire
        if wire is None:
            return
        if not wire.heard:
            wire.close("the broker did not answer a probe")
            return
        wire.heard = False
        wire.send(Ping(), b"", lambda reply, parts: None)

    def submit(self, request: Request, body: Buffer, respond: Respond) -> None:
        """Send, or refuse when there is no connection at the moment."""
        if self._wire is None:
            respond(self._refusal, ())
        elif not self._wire.protected and _carries_secret(request):
            respond(_EXPOSED, ())
        else:
            self._wire.send(request, body, respond)

    async def close(self) -> None:
        """Stop reconnecting and close."""
        self.over = True
        self._refusal = _CLOSED
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        if self._wire is not None:
            self._wire.close()
            await asyncio.sleep(0)


def _carries_secret(request: Request) -> bool:
    """Whether a request or its answer contains a secret."""
    if isinstance(request, AddUser | AlterUser):
        return request.password is not None
    return isinstance(request, CreateToken)


def _final(error: TailraceError, endpoint: Endpoint, access: HostAccess) -> TailraceError:
    """What an endpoint has said for good, with its name, and with where the credentials are from."""
    text = error.message if str(endpoint) in error.message else f"{endpoint}: {error.message}"
    if isinstance(error, Unauthenticated) and access.source:
        text += f" (the credentials were those of {access.source})"
    elif isinstance(error, Unauthenticated) and access.cert:
        text += f" ({access.cert} counts where the broker asks for it, by tls.client_certificates, "
        text += "and a user has its name)"
    return from_code(error.code, text, error.outcome, error.details)
