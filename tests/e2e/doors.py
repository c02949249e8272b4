"""Ways into a broker, and a client without any library behind it, that shows what it likes and hears all.

A door is where a broker can be reached by the native protocol: TCP, TLS, a Unix socket, or the socket of an
embedded broker. A session is one connection through a door. All calls block, and give up in time.
"""

from __future__ import annotations

import itertools
import socket
import ssl
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import msgspec

from bench.certificates import CertificateFiles
from tailrace.core.model.commands import Reply, Request
from tailrace.core.model.identifiers import Refusal
from tailrace.format import codec
from tailrace.format.frame import Buffer
from tailrace.format.wire import (
    PREAMBLE,
    PREFIX,
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    Credentials,
    Hello,
    Welcome,
    prefix,
)

PATIENCE_S = 20.0


class TurnedAway(Exception):
    """The broker did not let somebody in: what it said, or None if it hung up without a word."""

    def __init__(self, refusal: Refusal | None) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """Where to connect. With `authority` through TLS, and with `shown` a client certificate is shown."""

    name: str
    address: tuple[str, int] | str
    authority: str = ""
    shown: CertificateFiles | None = None

    def connect(self) -> Session:
        """A connection that has said nothing yet; raises OSError."""
        unix = isinstance(self.address, str)
        link = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM)
        try:
            link.settimeout(PATIENCE_S)
            link.connect(self.address)
            if self.authority:
                context = ssl.create_default_context(cafile=self.authority)
                if self.shown is not None:
                    context.load_cert_chain(self.shown.certificate, self.shown.key)
                link = context.wrap_socket(link, server_hostname="127.0.0.1")
        except BaseException:
            link.close()
            raise
        return Session(link)

    def enter(self, credentials: Credentials | None = None) -> Session:
        """A connection that was welcomed; raises `TurnedAway`."""
        session = self.connect()
        try:
            session.greet(credentials)
        except BaseException:
            session.close()
            raise
        return session


class Session:
    """One connection."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._numbers = itertools.count(1)
        self._data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.link.close()

    def greet(self, credentials: Credentials | None = None) -> Welcome:
        """Greet; raises `TurnedAway`."""
        self.write(greeting(credentials))
        try:
            _, header, _ = self.message()
        except EOFError:
            raise TurnedAway(None) from None
        if header[1:9] == b"\xa7welcome":
            return msgspec.msgpack.decode(header, type=Welcome)
        reply = codec.decode_reply(header)
        assert isinstance(reply, Refusal), reply
        raise TurnedAway(reply)

    def write(self, data: bytes) -> None:
        """Any bytes."""
        self.link.sendall(data)

    def post(self, request: Request, body: Buffer = b"") -> int:
        """A request whose answer is not waited for; its number."""
        number = next(self._numbers)
        self.write(encoded(request, body, number))
        return number

    def ask(self, request: Request, body: Buffer = b"") -> Reply:
        """A request and its answer."""
        number = self.post(request, body)
        answered, reply = self.reply()
        assert answered in (number, 0), f"an answer to {answered} instead of {number}: {reply}"
        return reply

    def ask_for(self, request: Request, body: Buffer = b"") -> tuple[Reply, bytes]:
        """A request, its answer, and the body of that."""
        self.post(request, body)
        _, header, rest = self.message()
        return codec.decode_reply(header), rest

    def do(self, request: Request, body: Buffer = b"") -> Any:
        """A request that has to succeed."""
        reply = self.ask(request, body)
        assert not isinstance(reply, Refusal), f"{request}: {reply}"
        return reply

    def reply(self) -> tuple[int, Reply]:
        """The next answer, and the number of the request; raises EOFError when the broker has hung up."""
        number, header, _ = self.message()
        return number, codec.decode_reply(header)

    def message(self) -> tuple[int, bytes, bytes]:
        """Number, header and body of the next message."""
        header_bytes, body_bytes, number = PREFIX.unpack(self._exactly(PREFIX_BYTES))
        return number, self._exactly(header_bytes), self._exactly(body_bytes)

    def rest(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Messages until the broker hangs up, which it has to do in time."""
        while True:
            try:
                yield self.message()
            except EOFError:
                return

    def _exactly(self, count: int) -> bytes:
        while len(self._data) < count:
            try:
                piece = self.link.recv(65536)
            except TimeoutError:
                raise
            except OSError:
                piece = b""  # A reset: it hung up before it had read everything.
            if not piece:
                raise EOFError("the broker hung up")
            self._data += piece
        found, self._data = self._data[:count], self._data[count:]
        return found


def greeting(credentials: Credentials | None) -> bytes:
    """The first bytes of a client."""
    return PREAMBLE + prefix(msgspec.msgpack.encode(Hello([PROTOCOL_VERSION], "test", credentials)), 0, 0)


def encoded(request: Request, body: Buffer, number: int) -> bytes:
    """One request as it travels."""
    return prefix(codec.encode_request(request), len(body), number) + bytes(body)
