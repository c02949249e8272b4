"""The broker's verbs over a socket: several hosts, pipelining, keep-alive, and reconnecting by itself.

A request that cannot be sent is refused at once with outcome `none`; one that was sent when the
connection broke, with outcome `unknown`. Whoever asked decides whether to try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from tailrace.client.machine_clock import MachineClock
from tailrace.core.commands import Ping, Reply, Request
from tailrace.core.model import Refusal
from tailrace.errors import InvalidRequest, TailraceError, Unavailable, from_code
from tailrace.format import codec
from tailrace.format.frame import Buffer
from tailrace.format.wire import PREAMBLE, PROTOCOL_VERSION, Hello, Welcome, WireReader, prefix

Respond = Callable[[Reply, Sequence[Buffer]], None]

BODY_BYTES_MAX = 256 * 1024 * 1024
PAUSE_S_MIN = 0.05
PAUSE_S_MAX = 1.0
CONNECT_S = 5.0
_ENCODER = msgspec.msgpack.Encoder()
_GREETING = msgspec.msgpack.Decoder(Welcome | Refusal)
_DOWN = Refusal("unavailable", "not connected to a broker", "none")
_LOST = Refusal("unavailable", "the connection broke before the answer came", "unknown")
_CLOSED = Refusal("unavailable", "the client is closed", "none")


class Wire(asyncio.BufferedProtocol):
    """One connection to one broker."""

    def __init__(self, lost: Callable[[Wire], None]) -> None:
        self._lost = lost
        self._reader = WireReader(BODY_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, Respond] = {}
        self._next_id = 1
        self.greeting: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        # The connection may break before anybody looks at it: that is no error of this program.
        self.greeting.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.heard = True
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass of it.
        self._transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _ENCODER.encode(Hello([PROTOCOL_VERSION], "tailrace-python"))
        transport.write(PREAMBLE + prefix(hello, 0, 0))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.window()

    def buffer_updated(self, nbytes: int) -> None:
        self.heard = True
        try:
            for request_id, header, body in self._reader.filled(nbytes):
                self._message(request_id, header, body)
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
                raise from_code(reply.code, reply.message, "none", reply.details)

    def _greeted(self, header: bytes) -> None:
        try:
            welcome = _GREETING.decode(header)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"that is not a Tailrace broker: {error}") from error
        if isinstance(welcome, Refusal):
            raise from_code(welcome.code, welcome.message, "none", welcome.details)
        self.greeting.set_result(welcome)

    def _fail(self, error: TailraceError) -> None:
        if not self.greeting.done():
            self.greeting.set_exception(error)
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.lost = True
        if not self.greeting.done():
            self.greeting.set_exception(
                Unavailable(f"the broker closed the connection: {exc or 'no greeting'}")
            )
        waiting, self._waiting = self._waiting, {}
        self._lost(self)
        for respond in waiting.values():
            respond(_LOST, ())

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

    def close(self) -> None:
        """Close now; what waits for an answer is told that it is unknown."""
        if self._transport is not None:
            self._transport.abort()


class NetworkVerbs:
    """`BrokerVerbs` over whichever of the hosts answers."""

    def __init__(self, hosts: Sequence[tuple[str, int]]) -> None:
        self.clock = MachineClock()
        self._hosts = list(hosts)
        self._wire: Wire | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._down = asyncio.Event()
        self._closed = False

    async def open(self, timeout_s: float) -> None:
        """Connect; raises what the last host said when none answers in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        pause = PAUSE_S_MIN
        while True:
            try:
                idle_ms = await self._connect(min(CONNECT_S, max(0.1, deadline - loop.time())))
                break
            except TailraceError as error:
                if not error.retriable or loop.time() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, PAUSE_S_MAX)
        self._keeper = loop.create_task(self._keep(idle_ms))

    async def _connect(self, timeout_s: float) -> int:
        loop = asyncio.get_running_loop()
        problems = []
        for host, port in list(self._hosts):
            wire = Wire(self._lost)
            try:
                async with asyncio.timeout(timeout_s):
                    await loop.create_connection(lambda wire=wire: wire, host, port)  # type: ignore[misc]
                    welcome = await wire.greeting
                if wire.lost:
                    raise Unavailable("the broker closed the connection")
            except (TimeoutError, OSError, TailraceError) as error:
                if isinstance(error, TailraceError) and not error.retriable:
                    raise
                reason = "no answer" if isinstance(error, TimeoutError) else str(error)
                problems.append(f"{host}:{port}: {reason}")
                self._hosts.append(self._hosts.pop(0))
            else:
                self._wire = wire
                return welcome.idle_ms
            finally:
                if self._wire is not wire:
                    wire.close()
        raise Unavailable(
            f"no broker answers ({'; '.join(problems)}); is one running? `tailrace serve` starts one, "
            "--url or TAILRACE_URL names it"
        )

    def _lost(self, wire: Wire) -> None:
        if self._wire is wire:
            self._wire = None
            self._down.set()

    async def _keep(self, idle_ms: int) -> None:
        """Keep the connection alive while it stands, and make a new one when it is lost."""
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(idle_ms / 3000, 0.05)):
                    await self._down.wait()
            if not self._down.is_set():
                self._probe()
                continue
            pause = PAUSE_S_MIN
            while self._wire is None and not self._closed:
                try:
                    idle_ms = await self._connect(CONNECT_S)
                except TailraceError:
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, PAUSE_S_MAX)
            self._down.clear()

    def _probe(self) -> None:
        """Every third of the idle time: a silent peer that did not even answer the last probe is gone."""
        wire = self._wire
        if wire is None:
            return
        if not wire.heard:
            wire.close()
            return
        wire.heard = False
        wire.send(Ping(), b"", lambda reply, parts: None)

    def submit(self, request: Request, body: Buffer, respond: Respond) -> None:
        """Send, or refuse when there is no connection at the moment."""
        if self._wire is not None:
            self._wire.send(request, body, respond)
        else:
            respond(_CLOSED if self._closed else _DOWN, ())

    async def close(self) -> None:
        """Stop reconnecting and close."""
        self._closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        if self._wire is not None:
            self._wire.close()
            await asyncio.sleep(0)


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """`host:port,host:port` with the default port 7400; IPv6 in brackets."""
    hosts = []
    for item in text.split(","):
        host, colon, port = item.strip().rpartition(":")
        if not colon or item.strip().endswith("]"):
            host, port = item.strip(), "7400"
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        good = host and (bracketed or not set(host) & set(":[]")) and port.isascii() and port.isdigit()
        if not good or not 0 < int(port) < 65536:
            raise InvalidRequest(f"url: {item.strip()!r} is not host:port (IPv6 addresses in brackets)")
        hosts.append((host, int(port)))
    return hosts
