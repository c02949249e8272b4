"""The native protocol's framing: a prefix of 16 bytes, a msgpack header and an optional body.

    prefix   uint32 header length, uint32 body length, uint64 request id      (little-endian)
    header   a tagged msgpack array: a request, a reply, or one of the two greetings below
    body     an Arrow batch on publish, raw frames on fetch, else empty

A client begins with the four bytes of `PREAMBLE` and a `Hello`; the broker answers with `Welcome` or a
refusal. `WireReader` takes the bytes of a socket without copying large bodies: it offers a small scratch
buffer for prefixes and headers, and gives each large body a buffer of its own, which the socket fills
directly. Each length is checked against its limit before memory is allocated for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
import pyarrow as pa

from tailrace.errors import InvalidRequest, TooLarge
from tailrace.format.frame import Buffer

PREAMBLE = b"TRLN"
PROTOCOL_VERSION = 1
PREFIX = struct.Struct("<IIQ")
PREFIX_BYTES = PREFIX.size
HEADER_BYTES_MAX = 1024 * 1024
GREETING_BYTES_MAX = 4096
SCRATCH_BYTES = 64 * 1024
_SMALL_WINDOW = 4096
_SMALL_BODY = 8192
_BUFFER_BYTES = 2 * 1024 * 1024
"""Memory that a large buffer takes at once: Arrow's pool begins it with a huge page."""


class Credentials(msgspec.Struct, frozen=True, array_like=True):
    """What a client proves itself with: a token, or a user with its password. Never shown in a `repr`."""

    user: str = ""
    password: str = ""
    token: str = ""

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r})"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The greeting of a client: the protocol versions that it speaks, its name, and its credentials."""

    versions: list[int]
    client: str = ""
    credentials: Credentials | None = None


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The answer of the broker: the chosen version, and the limits that it enforces."""

    version: int
    node: str
    body_bytes_max: int
    requests_max: int
    idle_ms: int


def prefix(header: bytes, body_bytes: int, request_id: int) -> bytes:
    """The prefix and header of one message, to be written before its body."""
    return PREFIX.pack(len(header), body_bytes, request_id) + header


class WireReader:
    """An incremental decoder: `window()` is where to put bytes, `filled(n)` gives complete messages."""

    def __init__(
        self, body_bytes_max: int, *, preamble: bytes = b"", header_bytes_max: int = HEADER_BYTES_MAX
    ) -> None:
        self.body_bytes_max = body_bytes_max
        self.header_bytes_max = header_bytes_max
        self._preamble = preamble
        self._scratch = bytearray(_SMALL_WINDOW)
        self._view = memoryview(self._scratch)
        self._start = 0
        self._end = 0
        self._small = False
        # An incomplete body: its header, the request id, the buffer, and how much of it is filled.
        self._header: bytes | None = None
        self._request_id = 0
        self._body: memoryview | None = None
        self._filled = 0

    def allow(self, header_bytes_max: int, body_bytes_max: int) -> None:
        """The peer is known: its messages may be as large as this."""
        self.header_bytes_max, self.body_bytes_max = header_bytes_max, body_bytes_max

    @property
    def partial(self) -> bool:
        """Whether a message has begun but is not complete."""
        return self._header is not None or self._end > self._start

    def beginning(self, count: int) -> bytes:
        """The first of the bytes that are not taken yet."""
        return bytes(self._view[self._start : min(self._end, self._start + count)])

    @property
    def expected_bytes(self) -> int:
        """Length of the incomplete body; 0 if there is none."""
        return 0 if self._body is None else len(self._body)

    @property
    def partial_bytes(self) -> int:
        """Memory held by the incomplete body: the bytes that have arrived, at least the first pages of its
        buffer.
        """
        return 0 if self._body is None else max(self._filled, min(len(self._body), _BUFFER_BYTES))

    def window(self) -> memoryview:
        """The buffer for the next bytes of the socket; never empty."""
        if self._body is not None:
            return self._body[self._filled :]
        if self._start == self._end:
            if self._end == len(self._scratch) < SCRATCH_BYTES and not self._small:
                # Many small messages come at once: from now on, take more of them per read.
                self._scratch = bytearray(SCRATCH_BYTES)
                self._view = memoryview(self._scratch)
            self._start = self._end = 0
        elif self._end == len(self._scratch):
            self._compact()
        if self._small and self._end + _SMALL_WINDOW < len(self._scratch):
            # After a large message another one is likely: read little more than its header, so that its body
            # is not copied.
            return self._view[self._end : self._end + _SMALL_WINDOW]
        return self._view[self._end :]

    def filled(self, count: int) -> Iterator[tuple[int, bytes, Buffer]]:
        """Take note of `count` new bytes; yield (request id, header, body) of every complete message."""
        if self._body is not None:
            self._filled += count
            if self._filled < len(self._body):
                return
            header, body = self._header, self._body
            self._header = self._body = None
            assert header is not None
            yield self._request_id, header, body
            return
        self._end += count
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> tuple[int, bytes, Buffer] | None:
        if self._preamble and not self._take_preamble():
            return None
        available = self._end - self._start
        if available < PREFIX_BYTES:
            return None
        header_bytes, body_bytes, request_id = PREFIX.unpack_from(self._scratch, self._start)
        if header_bytes > self.header_bytes_max:
            if self._scratch.startswith(b"HTTP", self._start):
                raise InvalidRequest("the peer answers in HTTP: this is not the native port of a broker")
            raise TooLarge(f"a header of {header_bytes} bytes is above the limit of {self.header_bytes_max}")
        if body_bytes > self.body_bytes_max:
            raise TooLarge(f"a body of {body_bytes} bytes is above the limit of {self.body_bytes_max}")
        if available < PREFIX_BYTES + header_bytes:
            if self._start + PREFIX_BYTES + header_bytes > len(self._scratch):
                self._reserve(PREFIX_BYTES + header_bytes)
            return None
        at = self._start + PREFIX_BYTES
        header = bytes(self._view[at : at + header_bytes])
        at += header_bytes
        have = min(self._end - at, body_bytes)
        if have == body_bytes and body_bytes <= _SMALL_BODY:
            self._start = at + body_bytes
            self._small = False
            return request_id, header, bytes(self._view[at : self._start])
        return self._begin_body(request_id, header, at, have, body_bytes)

    def _begin_body(
        self, request_id: int, header: bytes, at: int, have: int, body_bytes: int
    ) -> tuple[int, bytes, Buffer] | None:
        # Untouched pages of a fresh buffer cost nothing, so a peer that announces much and sends little holds
        # little memory (see `partial_bytes`). Arrow's pool reuses pages; malloc would map and fault new ones
        # for each large body.
        body = memoryview(pa.allocate_buffer(body_bytes)).cast("B")
        body[:have] = self._view[at : at + have]
        self._start = at + have
        self._small = True
        if have == body_bytes:
            return request_id, header, body
        self._request_id, self._header, self._body, self._filled = request_id, header, body, have
        return None

    def _take_preamble(self) -> bool:
        need = len(self._preamble)
        got = bytes(self._view[self._start : min(self._end, self._start + need)])
        if not self._preamble.startswith(got):
            raise InvalidRequest(
                f"this is the port of the native protocol; it does not speak what begins with {got!r}"
            )
        if len(got) < need:
            return False
        self._start += need
        self._preamble = b""
        return True

    def _reserve(self, need: int) -> None:
        """Make room for a header that does not fit into the rest of the scratch buffer."""
        if self._start:
            self._compact()
        if need > len(self._scratch):
            # Of a peer that is not known yet, no more than its greeting.
            need = max(need, min(SCRATCH_BYTES, PREFIX_BYTES + self.header_bytes_max))
            grown = bytearray(need)
            grown[: self._end] = self._view[: self._end]
            self._scratch, self._view = grown, memoryview(grown)

    def _compact(self) -> None:
        if self._start:
            kept = bytes(self._view[self._start : self._end])
            self._view[: len(kept)] = kept
            self._start, self._end = 0, len(kept)
        assert self._end < len(self._scratch), "a full scratch buffer would hold a whole header"
