"""A small HTTP/1.1 listener for people and their monitoring: /healthz, /readyz and /metrics, nothing else.

It knows only GET and HEAD, takes no bodies, and everything is bounded: 8 KiB of request head, 5 s for a
request to arrive and 5 s for an answer to be taken, 100 connections. Its answers come from three callables,
so it knows nothing of the broker.

Whether the process lives, and whether it is ready, is told to everybody. The reasons, and the metrics, name
topics and groups, and are for those who may operate the broker; without users that is everybody, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tailrace.core.model.access import Caller
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import EDGES, InvalidRequest
from tailrace.format.wire import PREAMBLE
from tailrace.ports import Authenticator
from tailrace.protocols.crowd import OpenDoor
from tailrace.protocols.doorway import Arrival, Doorway, FairPlaces, Guest, origin_of
from tailrace.protocols.edge_tuning import (
    HTTP_CONNECTIONS_MAX,
    HTTP_HEAD_BYTES_MAX,
    HTTP_LINGER_BYTES_MAX,
    HTTP_LINGER_S,
    HTTP_REQUEST_S,
)
from tailrace.protocols.tls import ALERT_PLAIN, TlsFiles, begins_tls
from tailrace.protocols.visitor import CHALLENGES, Visitor

log = logging.getLogger("tailrace.http")


_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
_FIELD_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_ONLY_ONCE = frozenset(("authorization", "content-length", "host"))
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class _Answer(NamedTuple):
    status: int
    body: bytes
    content_type: str = _TEXT
    keep: bool = True


_DENIED = _Answer(403, b"this needs the right `operate` on the broker: ask an administrator for it\n")
_SPEAKS_TLS = b"\x16"
"""Stands for the head of a request of somebody who speaks TLS where it is not spoken."""


def _everybody(caller: Caller) -> bool:
    """Whoever may operate a broker without users."""
    return True


class HttpListener:
    """Serves the three pages until `close`.

    `reasons` tells why the node is not ready (empty: it is ready), `warnings` what may become a reason soon,
    `metrics` gives the text for Prometheus. `may_operate` tells who may see more than whether it is ready.
    """

    def __init__(
        self,
        *,
        reasons: Callable[[], Sequence[str]],
        metrics: Callable[[], bytes],
        warnings: Callable[[], Sequence[str]] = tuple,
        request_seconds: float = HTTP_REQUEST_S,
        connections_max: int = HTTP_CONNECTIONS_MAX,
        authenticator: Authenticator | None = None,
        may_operate: Callable[[Caller], bool] = _everybody,
        secure: tuple[Doorway, TlsFiles] | None = None,
    ) -> None:
        self._authenticator = authenticator or OpenDoor()
        self._may_operate = may_operate
        self._secure = secure
        self._reasons = reasons
        self._metrics = metrics
        self._warnings = warnings
        self._request_seconds = request_seconds
        self._connections_max = connections_max
        self._places = FairPlaces(connections_max)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, with TLS if there is a certificate; returns the address in use (for port 0, the one that
        the system chose). Raises OSError if the address is taken.
        """
        factory: Any = self._protocol if self._secure is None else self._arrival
        self._server = await asyncio.get_running_loop().create_server(factory, host, port)
        name = self._server.sockets[0].getsockname()
        return str(name[0]), int(name[1])

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is None:
            return
        self._closing = True
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        reader = asyncio.StreamReader(limit=HTTP_HEAD_BYTES_MAX)
        return asyncio.StreamReaderProtocol(reader, self._accept)

    def _arrival(self) -> Arrival:
        assert self._secure is not None
        return Arrival(*self._secure, self._protocol, self._secured)

    def _secured(
        self, protocol: Any, secured: asyncio.Transport, below: asyncio.Transport, guest: Guest
    ) -> None:
        """The handshake of a connection is over. From now on it is one of few, with little time."""
        guest.leave()
        protocol.connection_made(secured)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, guest = asyncio.current_task(), None
        assert task is not None
        self._tasks.add(task)
        # `drain` waits until all of an answer is taken. TLS pauses at this bound, and not above it.
        secured = writer.transport.get_extra_info("sslcontext") is not None
        writer.transport.set_write_buffer_limits(high=int(secured))
        try:
            if self._closing:
                return  # The system had accepted the connection before `close`, which does not wait for it.
            guest = Guest(origin_of(writer.transport), task.cancel, self._places.release, 0)
            if self._has_place(guest):
                await self._converse(reader, writer)
            else:
                writer.write(_encode(_Answer(503, b"too many connections\n", keep=False), head_only=False))
                if len(self._tasks) <= 2 * self._connections_max:
                    await _linger(reader, writer)
        except OSError:
            pass  # The peer went away, or did not take its answer in time.
        except asyncio.CancelledError:
            # `close` cancels, and `_has_place`; asyncio would log a cancelled handler as an error.
            pass
        finally:
            if guest is not None:
                guest.leave()
            self._tasks.discard(task)
            # A peer that does not read must not keep the buffer of its answer alive.
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
            else:
                writer.close()

    def _has_place(self, guest: Guest) -> bool:
        """Take a place; if there is none, that of an address that has more of them than this one."""
        places = self._places
        if places.count >= self._connections_max and places.held(guest.address) + 1 >= places.most:
            return False
        loser = places.take(guest)
        if loser is not None:
            loser.turn_out()
        return True

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after another, until either side closes."""
        rest = bytearray()
        visitor = Visitor(origin_of(writer.transport), self._authenticator, _wall_us)
        if self._secure is not None:
            visitor.lacks_certificate = self._secure[1].lacks_certificate(writer.transport)
        while True:
            head_only = False
            try:
                async with asyncio.timeout(self._request_seconds):
                    head = await _head(reader, rest)
            except asyncio.IncompleteReadError as error:
                if not error.partial:
                    return
                answer = _refusal(400, "the request ends early")
            except asyncio.LimitOverrunError:
                answer = _refusal(431, f"the request head is above {HTTP_HEAD_BYTES_MAX} bytes")
            except TimeoutError:
                answer = _refusal(408, "the request did not arrive in time")
            else:
                if head == _SPEAKS_TLS:
                    writer.write(ALERT_PLAIN)
                    log.debug("a peer speaks TLS at a port without it")
                    await _linger(reader, writer)
                    return
                head_only = head.startswith(b"HEAD ")
                try:
                    async with asyncio.timeout(self._request_seconds):
                        answer = await self._answer(head, visitor)
                except TimeoutError:
                    answer = _refusal(503, "the credentials could not be looked at in time")
            writer.write(_encode(answer, head_only=head_only))
            async with asyncio.timeout(self._request_seconds):
                await writer.drain()
            if not answer.keep:
                await _linger(reader, writer)
                return

    async def _answer(self, head: bytes, visitor: Visitor) -> _Answer:
        if head == PREAMBLE:
            return _refusal(400, "this is the port for health and metrics; clients connect to another one")
        try:
            lines = head[:-4].decode("ascii").split("\r\n")
        except UnicodeDecodeError:
            return _refusal(400, "the request head is not ASCII")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/"):
            return _refusal(400, "not a request line")
        method, target, version = words
        if version not in ("HTTP/1.1", "HTTP/1.0"):
            return _refusal(505, "only HTTP/1.1 and HTTP/1.0")
        fields: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not _FIELD_NAME.fullmatch(name) or any(c in value for c in "\r\n\0"):
                return _refusal(400, "malformed header field")
            # Where two of these differ, somebody on the way may have read the other one.
            if name.lower() in _ONLY_ONCE and name.lower() in fields:
                return _refusal(400, f"two {name} fields")
            fields[name.lower()] = value.strip()
        if "transfer-encoding" in fields or fields.get("content-length", "0") != "0":
            return _refusal(400, "a request body is not expected here")
        if version == "HTTP/1.1" and "host" not in fields:
            return _refusal(400, "no Host field")
        wishes = fields.get("connection", "").lower()
        keep = "close" not in wishes and (version == "HTTP/1.1" or "keep-alive" in wishes)
        if method not in ("GET", "HEAD"):
            return _refusal(405, "only GET and HEAD")
        try:
            path, field = target.partition("?")[0], fields.get("authorization")
            return (await self._page(path, field, visitor))._replace(keep=keep)
        except InvalidRequest as error:
            return _refusal(400, error.message)
        except Exception:
            log.exception("%s failed", target)
            return _refusal(500, "the page could not be made; the log says why")

    async def _page(self, path: str, field: str | None, visitor: Visitor) -> _Answer:
        if path == "/healthz":
            return _Answer(200, b"ok\n")
        if path == "/readyz":
            reasons = list(self._reasons())
            answer: dict[str, Any] = {"ready": not reasons}
            caller = await visitor.caller(field)
            if isinstance(caller, Caller) and self._may_operate(caller):
                answer |= {"reasons": reasons, "warnings": list(self._warnings())}
            body = json.dumps(answer).encode("ascii") + b"\n"
            return _Answer(503 if reasons else 200, body, _JSON)
        if path == "/metrics":
            caller = await visitor.caller(field)
            if isinstance(caller, Refusal):
                return _Answer(EDGES[caller.code].http, caller.message.encode("utf-8") + b"\n")
            if not self._may_operate(caller):
                return _DENIED
            return _Answer(200, self._metrics(), _METRICS)
        return _Answer(404, b"not found: there are /healthz, /readyz and /metrics\n")


async def _head(reader: asyncio.StreamReader, rest: bytearray) -> bytes:
    """The head of the next request; bytes behind it stay in `rest`. A client of the native protocol is
    recognised by its first bytes, because it would wait for an answer without ever ending a head; so is one
    that speaks TLS."""
    while not rest.startswith(PREAMBLE):
        end = rest.find(b"\r\n\r\n")
        if (end if end >= 0 else len(rest)) > HTTP_HEAD_BYTES_MAX:
            raise asyncio.LimitOverrunError("the head is too long", len(rest))
        if end >= 0:
            head = bytes(rest[: end + 4])
            del rest[: end + 4]
            return head
        if begins_tls(rest):
            return _SPEAKS_TLS
        chunk = await reader.read(HTTP_HEAD_BYTES_MAX)
        if not chunk:
            raise asyncio.IncompleteReadError(bytes(rest), None)
        rest += chunk
    return PREAMBLE


def _wall_us() -> int:
    return time.time_ns() // 1000


def _refusal(status: int, text: str) -> _Answer:
    return _Answer(status, text.encode("ascii") + b"\n", keep=False)


def _encode(answer: _Answer, *, head_only: bool) -> bytes:
    allow = "Allow: GET, HEAD\r\n" if answer.status == 405 else ""
    if answer.status == 401:
        allow = "".join(f"WWW-Authenticate: {challenge}\r\n" for challenge in CHALLENGES)
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        f"Cache-Control: no-store\r\n{allow}"
        f"Connection: {'keep-alive' if answer.keep else 'close'}\r\n\r\n"
    )
    return head.encode("ascii") + (b"" if head_only else answer.body)


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Keep reading for a moment after the last answer: closing with unread bytes would reset the connection
    and lose the answer.
    """
    if writer.transport.is_closing():  # The peer is gone; uvloop's transport takes no EOF any more.
        return
    if writer.can_write_eof():  # TLS has no such thing.
        with contextlib.suppress(OSError):  # The peer may have closed its side already.
            writer.write_eof()
    left = HTTP_LINGER_BYTES_MAX
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HTTP_LINGER_S):
            while left > 0 and (chunk := await reader.read(65_536)):
                left -= len(chunk)
