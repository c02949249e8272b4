"""The way out of a TLS connection without sockets: pieces, what is counted, pausing and the end."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from tailrace.format.frame import Buffer
from tailrace.protocols.edge_tuning import TLS_PIECE_BYTES, WRITE_HIGH_BYTES
from tailrace.protocols.outflow import Outflow

MB = 1 << 20


class Inner(asyncio.BufferedProtocol):
    """Stands for a link."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(bytearray(10))

    def buffer_updated(self, nbytes: int) -> None:
        self.told.append(f"read {nbytes}")

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append("lost")


class Below:
    """Stands for the two transports below: the peer takes what the test says."""

    def __init__(self) -> None:
        self.outflow = Outflow(Inner())
        self.inner: Any = self.outflow.inner
        self.taken = bytearray()
        self.held = bytearray()
        self.paused = self.closed = self.aborted = False
        self.largest = 0
        transport: Any = self
        self.outflow.open(transport, transport)
        self.outflow.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def write(self, data: Buffer) -> None:
        self.held += data
        self.largest = max(self.largest, len(data))
        if len(self.held) > self.high and not self.paused:
            self.paused = True
            self.outflow.pause_writing()

    def writelines(self, parts: Iterable[Buffer]) -> None:
        self.write(b"".join(parts))

    def take(self, count: int) -> None:
        self.taken += self.held[:count]
        del self.held[:count]
        if self.paused and len(self.held) < self.high // 4:
            self.paused = False
            self.outflow.resume_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.held) // 2  # It is asked twice: as the TLS transport and as the one below.

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


def pattern(size: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(1000)) * (size // 1000 + 1)


@pytest.mark.parametrize("sizes", [[10], [100, 0, 3], [5 * MB], [16, 8 * MB], [TLS_PIECE_BYTES + 1] * 5])
def test_everything_arrives_in_order_and_in_pieces(sizes: list[int]) -> None:
    below = Below()
    parts = [pattern(size)[:size] for size in sizes]
    below.outflow.writelines(parts)
    below.outflow.write(b"the end")
    expected = b"".join(parts) + b"the end"
    while below.held:
        assert below.outflow.get_write_buffer_size() >= len(expected) - len(below.taken) - 1
        below.take(100_000)
    assert below.taken == expected
    assert below.largest <= max(TLS_PIECE_BYTES, sum(sizes) if sum(sizes) <= TLS_PIECE_BYTES else 0)


def test_a_peer_that_takes_nothing_is_counted_and_the_link_hears_of_it() -> None:
    below = Below()
    below.outflow.write(pattern(8 * MB)[: 8 * MB])
    assert below.inner.told == ["pause"]
    assert below.outflow.get_write_buffer_size() >= 8 * MB - 1
    assert len(below.held) <= 2 * TLS_PIECE_BYTES, "the TLS layer is not given what the peer does not take"
    while below.held:
        below.take(1 << 18)
    assert below.inner.told == ["pause", "resume"]


def test_small_answers_of_a_slow_peer_keep_their_order() -> None:
    below = Below()
    numbers = [b"%06d" % number for number in range(200_000)]
    for number in numbers:
        below.outflow.write(number)
    while below.held:
        below.take(10_000)
    assert below.taken == b"".join(numbers)
    assert below.inner.told == ["pause", "resume"]


def test_closing_waits_for_what_was_written() -> None:
    below = Below()
    below.outflow.write(bytes(3 * MB))
    below.outflow.close()
    assert below.outflow.is_closing()
    assert not below.closed
    while below.held:
        below.take(1 << 18)
    assert below.closed
    assert len(below.taken) == 3 * MB


def test_aborting_waits_for_nothing() -> None:
    below = Below()
    below.outflow.write(bytes(3 * MB))
    below.outflow.abort()
    assert below.aborted
    assert below.outflow.get_write_buffer_size() <= 2 * TLS_PIECE_BYTES


def test_a_handshake_that_fails_is_nothing_to_the_link() -> None:
    outflow = Outflow(Inner())
    outflow.connection_lost(None)
    assert outflow.inner.told == []  # type: ignore[attr-defined]
