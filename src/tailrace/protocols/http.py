"""A small HTTP/1.1 listener for people and their monitoring: /healthz, /readyz and /metrics, nothing else.

It knows only GET and HEAD, takes no bodies, and everything is bounded: 8 KiB of request head, 5 s for a
request to arrive and 5 s for an answer to be taken, 100 connections. Its answers come from three callables,
so it knows nothing of the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tailrace.format.wire import PREAMBLE
from tailrace.protocols.edge_tuning import (
    HTTP_CONNECTIONS_MAX,
    HTTP_HEAD_BYTES_MAX,
    HTTP_LINGER_BYTES_MAX,
    HTTP_LINGER_S,
    HTTP_REQUEST_S,
)

log = logging.getLogger("tailrace.http")


_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class _Answer(NamedTuple):
    status: int
    body: bytes
    content_type: str = _TEXT
    keep: bool = True


class HttpListener:
    """Serves the three pages until `close`.

    `reasons` tells why the node is not ready (empty: it is ready), `warnings` what may become a reason soon,
    `metrics` gives the text for Prometheus.
    """

    def __init__(
        self,
        *,
        reasons: Callable[[], Sequence[str]],
        metrics: Callable[[], bytes],
        warnings: Callable[[], Sequence[str]] = tuple,
        request_seconds: float = HTTP_REQUEST_S,
        connections_max: int = HTTP_CONNECTIONS_MAX,
    ) -> None:
        self._reasons = reasons
        self._metrics = metrics
        self._warnings = warnings
        self._request_seconds = request_seconds
        self._connections_max = connections_max
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the address in use (for port 0, the one that the system chose). Raises OSError if
        the address is taken.
        """
        self._server = await asyncio.start_server(self._accept, host, port, limit=HTTP_HEAD_BYTES_MAX)
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

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writer.transport.set_write_buffer_limits(high=0)  # `drain` waits until all of an answer is taken
        try:
            if self._closing:
                return  # The system had accepted the connection before `close`, which does not wait for it.
            if len(self._tasks) > self._connections_max:
                writer.write(_encode(_Answer(503, b"too many connections\n", keep=False), head_only=False))
                if len(self._tasks) <= 2 * self._connections_max:
                    await _linger(reader, writer)
            else:
                await self._converse(reader, writer)
        except OSError:
            pass  # The peer went away, or did not take its answer in time.
        except asyncio.CancelledError:
            # Only `close` cancels; asyncio would log a cancelled handler as an error.
            pass
        finally:
            self._tasks.discard(task)
            # A peer that does not read must not keep the buffer of its answer alive.
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
            else:
                writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after another, until either side closes."""
        rest = bytearray()
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
                head_only = head.startswith(b"HEAD ")
                answer = self._answer(head)
            writer.write(_encode(answer, head_only=head_only))
            async with asyncio.timeout(self._request_seconds):
                await writer.drain()
            if not answer.keep:
                await _linger(reader, writer)
                return

    def _answer(self, head: bytes) -> _Answer:
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
            if not colon or not name or name != name.strip() or any(c in value for c in "\r\n\0"):
                return _refusal(400, "malformed header field")
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
            return self._page(target.partition("?")[0])._replace(keep=keep)
        except Exception:
            log.exception("%s failed", target)
            return _refusal(500, "the page could not be made; the log says why")

    def _page(self, path: str) -> _Answer:
        if path == "/healthz":
            return _Answer(200, b"ok\n")
        if path == "/readyz":
            reasons = list(self._reasons())
            answer = {"ready": not reasons, "reasons": reasons, "warnings": list(self._warnings())}
            body = json.dumps(answer).encode("ascii") + b"\n"
            return _Answer(503 if reasons else 200, body, _JSON)
        if path == "/metrics":
            return _Answer(200, self._metrics(), _METRICS)
        return _Answer(404, b"not found: there are /healthz, /readyz and /metrics\n")


async def _head(reader: asyncio.StreamReader, rest: bytearray) -> bytes:
    """The head of the next request; bytes behind it stay in `rest`. A client of the native protocol is
    recognised by its first bytes, because it would wait for an answer without ever ending a head."""
    while not rest.startswith(PREAMBLE):
        end = rest.find(b"\r\n\r\n")
        if (end if end >= 0 else len(rest)) > HTTP_HEAD_BYTES_MAX:
            raise asyncio.LimitOverrunError("the head is too long", len(rest))
        if end >= 0:
            head = bytes(rest[: end + 4])
            del rest[: end + 4]
            return head
        chunk = await reader.read(HTTP_HEAD_BYTES_MAX)
        if not chunk:
            raise asyncio.IncompleteReadError(bytes(rest), None)
        rest += chunk
    return PREAMBLE


def _refusal(status: int, text: str) -> _Answer:
    return _Answer(status, text.encode("ascii") + b"\n", keep=False)


def _encode(answer: _Answer, *, head_only: bool) -> bytes:
    allow = "Allow: GET, HEAD\r\n" if answer.status == 405 else ""
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
    with contextlib.suppress(OSError):  # The peer may have closed its side already.
        writer.write_eof()
    left = HTTP_LINGER_BYTES_MAX
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HTTP_LINGER_S):
            while left > 0 and (chunk := await reader.read(65_536)):
                left -= len(chunk)
