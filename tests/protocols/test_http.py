"""The HTTP listener over real sockets: its pages, and what it does with garbage, dribble and floods."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from tailrace.protocols.edge_tuning import HTTP_CONNECTIONS_MAX, HTTP_HEAD_BYTES_MAX
from tailrace.protocols.http import HttpListener

Exchange = Callable[[bytes], Awaitable[bytes]]


def with_listener(test: Callable[[HttpListener, tuple[str, int]], Awaitable[None]], **options: Any) -> None:
    """Run an async test against a listener on a port of the system's choice."""
    options.setdefault("reasons", list)
    options.setdefault("metrics", lambda: b"tailrace_connections 0\n")

    async def run() -> None:
        listener = HttpListener(**options)
        address = await listener.start("127.0.0.1", 0)
        try:
            async with asyncio.timeout(20):
                await test(listener, address)
        finally:
            await listener.close()

    asyncio.run(run())


async def exchange(address: tuple[str, int], request: bytes) -> bytes:
    """Send, and read until the listener closes."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


def get(path: str, *, method: str = "GET", more: str = "Connection: close\r\n") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode("latin-1")


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def body(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def test_pages() -> None:
    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        health = await exchange(address, get("/healthz"))
        assert (status(health), body(health)) == (200, b"ok\n")
        ready = await exchange(address, get("/readyz?verbose=1"))
        assert (status(ready), body(ready)) == (200, b'{"ready": true, "reasons": [], "warnings": []}\n')
        metrics = await exchange(address, get("/metrics"))
        assert (status(metrics), body(metrics)) == (200, b"tailrace_connections 0\n")
        assert status(await exchange(address, get("/etc/../metrics"))) == 404

    with_listener(check)


def test_not_ready_names_the_reasons() -> None:
    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        answer = await exchange(address, get("/readyz"))
        assert status(answer) == 503
        assert b"orders/0 is quarantined" in body(answer)
        assert status(await exchange(address, get("/healthz"))) == 200

    with_listener(check, reasons=lambda: ["orders/0 is quarantined"])


def test_page_that_fails_is_an_answer_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        assert status(await exchange(address, get("/metrics"))) == 500
        assert status(await exchange(address, get("/healthz"))) == 200

    with_listener(check, metrics=lambda: bytes(1 // 0))
    assert "ZeroDivisionError" in caplog.text


def test_head_has_the_length_and_no_body() -> None:
    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        answer = await exchange(address, get("/metrics", method="HEAD"))
        assert status(answer) == 200
        assert b"Content-Length: 23\r\n" in answer
        assert body(answer) == b""

    with_listener(check)


def test_connection_is_kept_for_the_next_request() -> None:
    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        answer = await exchange(address, get("/healthz", more="") + get("/metrics"))
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert answer.endswith(b"tailrace_connections 0\n")

    with_listener(check)


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"\x16\x03\x01\x02\x00garbage\r\n\r\n", 400),
        (b"\xff\xfe\r\n\r\n", 400),
        (b"GET /healthz\r\n\r\n", 400),
        (b"GET  /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /healthz HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 0\r\n\r\nhello", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"DELETE /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 405),
    ],
)
def test_refusals_close_the_connection(request_bytes: bytes, expected: int) -> None:
    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        answer = await exchange(address, request_bytes)
        assert status(answer) == expected
        assert b"Connection: close" in answer
        assert status(await exchange(address, get("/healthz"))) == 200

    with_listener(check)


def test_request_that_ends_early() -> None:
    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /healthz HT")
        writer.write_eof()
        assert status(await reader.read()) == 400
        writer.close()

    with_listener(check)


@pytest.mark.parametrize("size", [HTTP_HEAD_BYTES_MAX + 1, 200_000])
def test_oversized_head_is_refused_and_the_answer_arrives(size: int) -> None:
    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        assert status(await exchange(address, b"GET /" + b"a" * size)) == 431

    with_listener(check)


def test_dribbled_request_is_ended_by_the_total_time() -> None:
    """A byte now and then does not extend the time that a request has in all."""

    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        answer = asyncio.ensure_future(reader.read())
        for byte in b"GET /" + b"a" * 200:
            if answer.done():
                break
            writer.write(bytes([byte]))
            await asyncio.wait([answer], timeout=0.05)
        assert status(await answer) == 408
        writer.close()

    with_listener(check, request_seconds=0.3)


def test_one_connection_too_many_is_turned_away_and_room_is_made_again() -> None:
    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        idle = [await asyncio.open_connection(*address) for _ in range(HTTP_CONNECTIONS_MAX)]
        turned_away = await exchange(address, b"")
        assert (status(turned_away), body(turned_away)) == (503, b"too many connections\n")
        reader, writer = idle.pop()
        writer.write(get("/healthz"))
        assert status(await reader.read()) == 200
        writer.close()
        assert status(await exchange(address, get("/healthz"))) == 200
        for _, other in idle:
            other.close()

    with_listener(check)


def test_one_address_does_not_keep_others_out() -> None:
    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        idle = [
            await asyncio.open_connection(*address, local_addr=("127.0.0.2", 0))
            for _ in range(HTTP_CONNECTIONS_MAX)
        ]
        assert status(await exchange(address, get("/healthz"))) == 200
        assert await idle[0][0].read() == b"", "the oldest of the others has gone"
        for _, other in idle:
            other.close()

    with_listener(check)


def test_reader_that_takes_nothing_is_dropped() -> None:
    """An answer that nobody reads is given up, so that its memory is freed."""

    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        with socket.create_connection(address) as idle:
            idle.sendall(get("/metrics", more=""))
            while status(await exchange(address, get("/healthz"))) == 503:
                pass  # The only place is still taken by the one who does not read.
            received = await asyncio.to_thread(lambda: len(b"".join(iter(lambda: idle.recv(1 << 20), b""))))
        assert received < 30_000_000

    with_listener(check, metrics=lambda: bytes(30_000_000), request_seconds=0.3, connections_max=1)


def test_taken_port_raises() -> None:
    async def check(_: HttpListener, address: tuple[str, int]) -> None:
        second = HttpListener(reasons=list, metrics=bytes)
        with pytest.raises(OSError, match="in use"):
            await second.start(*address)

    with_listener(check)


def test_close_drops_idle_connections() -> None:
    async def check(listener: HttpListener, address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(get("/healthz", more=""))
        await reader.readuntil(b"ok\n")
        await listener.close()
        assert await reader.read() == b""
        writer.close()

    with_listener(check)


def test_whoever_connects_while_the_listener_closes_is_sent_away() -> None:
    """From the system's accept to the listener's there are steps of the loop; the end may come at each."""

    async def run(steps: int) -> None:
        listener = HttpListener(reasons=list, metrics=bytes)
        address = await listener.start("127.0.0.1", 0)
        with socket.create_connection(address) as peer:
            peer.setblocking(False)
            for _ in range(steps):
                await asyncio.sleep(0)
            await listener.close()
            async with asyncio.timeout(5):
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.get_running_loop().sock_recv(peer, 1) == b""

    for steps in range(8):
        uvloop.run(run(steps))
