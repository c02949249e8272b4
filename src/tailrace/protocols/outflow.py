"""The way out of a TLS connection: answers leave in pieces, and what has not left is counted truly.

The TLS transport of the loop encrypts everything that it is given at once, and does not count what the
transport below still holds. So a large answer would stop the loop, and a peer that takes nothing would cost
memory that nobody sees. An `Outflow` stands between a link and its TLS transport: to the link it is the
transport, to the TLS layer it is the protocol. It passes pieces on while the peer takes them and keeps the
rest as it came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any

from tailrace.format.frame import Buffer
from tailrace.protocols.edge_tuning import TLS_PIECE_BYTES, TLS_READ_BYTES_MAX


class Outflow(asyncio.BufferedProtocol):
    """Between one link and its TLS transport."""

    def __init__(self, inner: asyncio.BufferedProtocol) -> None:
        self.inner = inner
        self.get_buffer = inner.get_buffer  # type: ignore[method-assign]
        self.buffer_updated = inner.buffer_updated  # type: ignore[method-assign]
        self._secured: Any = None
        self._below: Any = None
        self._parts: deque[memoryview] = deque()
        self._parts_bytes = 0
        self._full = False
        self._high_bytes = TLS_PIECE_BYTES
        self._told_full = False
        self._closing = False

    def open(self, secured: asyncio.Transport, below: asyncio.Transport) -> None:
        """The handshake is over: `secured` is the TLS transport, `below` the one that it stands on."""
        self._secured, self._below = secured, below
        secured.set_write_buffer_limits(high=TLS_PIECE_BYTES)
        if hasattr(secured, "set_read_buffer_limits"):
            secured.set_read_buffer_limits(high=TLS_READ_BYTES_MAX)

    # -- to the TLS layer, a protocol

    def connection_lost(self, exc: Exception | None) -> None:
        self._parts.clear()
        self._parts_bytes = 0
        if self._secured is not None:
            self.inner.connection_lost(exc)

    def eof_received(self) -> None:
        # The TLS layer ends with its peer: whatever is still to be sent cannot be.
        self.inner.eof_received()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._pour()
        if not self._parts:
            if self._closing:
                self._secured.close()
            elif self._told_full:
                self._told_full = False
                self.inner.resume_writing()

    # -- to the link, a transport

    def write(self, data: Buffer) -> None:
        """Write, now or when the peer takes more."""
        if self._parts or self._full or len(data) > TLS_PIECE_BYTES:
            self._keep((data,))
        else:
            self._secured.write(data)

    def writelines(self, parts: Iterable[Buffer]) -> None:
        """As `write`, for several pieces."""
        given = tuple(parts)
        if self._parts or self._full or sum(len(part) for part in given) > TLS_PIECE_BYTES:
            self._keep(given)
        else:
            self._secured.writelines(given)

    def _keep(self, parts: Iterable[Buffer]) -> None:
        for part in parts:
            if len(part):
                view = memoryview(part).cast("B")
                self._parts.append(view)
                self._parts_bytes += len(view)
        self._pour()
        if self._parts and not self._told_full and self.get_write_buffer_size() >= self._high_bytes:
            self._told_full = True
            self.inner.pause_writing()

    def _pour(self) -> None:
        while self._parts and not self._full and not self._secured.is_closing():
            piece, size = [], 0
            while self._parts and size < TLS_PIECE_BYTES:
                part = self._parts.popleft()
                room = TLS_PIECE_BYTES - size
                if len(part) > room:
                    self._parts.appendleft(part[room:])
                    part = part[:room]
                piece.append(part)
                size += len(part)
            self._parts_bytes -= size
            self._secured.writelines(piece)

    def get_write_buffer_size(self) -> int:
        """Bytes that the system has not taken yet, on all levels."""
        size: int = self._secured.get_write_buffer_size() + self._below.get_write_buffer_size()
        return self._parts_bytes + size

    def set_write_buffer_limits(self, high: int) -> None:
        """From so many bytes on, the link is told to stop writing."""
        self._high_bytes = high

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the connection."""
        return self._secured.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Hand nothing more to the link."""
        self._secured.pause_reading()

    def resume_reading(self) -> None:
        """Go on."""
        self._secured.resume_reading()

    def is_closing(self) -> bool:
        """Whether the connection ends."""
        return self._closing or self._secured.is_closing()

    def close(self) -> None:
        """Send what was written, then end."""
        self._closing = True
        if not self._parts:
            self._secured.close()

    def abort(self) -> None:
        """End at once."""
        self._closing = True
        self._parts.clear()
        self._parts_bytes = 0
        self._below.abort()
