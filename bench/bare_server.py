"""The limit: a bare uvloop server that writes what it receives to a file, and the client that sends it.

It parses nothing, checks nothing and answers nothing but the total, so no broker in Python can take more
bytes on this machine and disk. `python -m bench.bare_server serve|send JOB` takes the job as
JSON; `measure` runs both. With a certificate the same bytes go through TLS, by the same library as those of
a broker; there the end of the transfer is told on standard output, because a TLS connection is closed in
both directions at once.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from bench.processes import Child

BUFFER_BYTES = 1024 * 1024
BUFFERS = 16
REPLY_TIMEOUT_S = 120.0
# What a frame holds beside its values: for each message an id, a timestamp and an offset; once the header and
# Arrow's metadata.
MESSAGE_OVERHEAD_BYTES = 28
FRAME_OVERHEAD_BYTES = 512


class Transfer(msgspec.Struct, frozen=True):
    """What is sent: frames of one size for some seconds or bytes; `one_by_one` awaits the answer to each."""

    path: str
    frame_bytes: int
    seconds: float
    bytes_max: int
    one_by_one: bool = False
    port: int = 0
    authority: str = ""
    certificate: str = ""
    key: str = ""
    """Files; with them the transfer is encrypted, but for frames one by one."""


class Listening(msgspec.Struct, frozen=True):
    """First line of the server."""

    port: int


class Taken(msgspec.Struct, frozen=True):
    """Last line of the client: frames that are in the file, and the time that took. Under TLS: frames that
    were sent, and when that began."""

    frames: int
    seconds: float
    began: float = 0.0


class Stored(msgspec.Struct, frozen=True):
    """Last line of a server under TLS: bytes that are in the file, and when the last of them was."""

    total: int
    ended: float


def frame_bytes(batch: int, value_bytes: int) -> int:
    """Size of the frame that carries a batch of values of one size."""
    return batch * (value_bytes + MESSAGE_OVERHEAD_BYTES) + FRAME_OVERHEAD_BYTES


class FileSink(asyncio.BufferedProtocol):
    """Receives into a ring of buffers, which a thread writes to the file."""

    def __init__(self, descriptor: int, done: asyncio.Event, *, encrypted: bool) -> None:
        self._descriptor = descriptor
        self._done = done
        self._encrypted = encrypted
        self._loop = asyncio.get_running_loop()
        self._free = [bytearray(BUFFER_BYTES) for _ in range(BUFFERS)]
        self._current = self._free.pop()
        self._filled = 0
        self._full: queue.SimpleQueue[tuple[bytearray, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the writing thread."""
        self._transport = cast(asyncio.Transport, transport)
        self._thread.start()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the loop puts the next bytes."""
        return memoryview(self._current)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Hand a full buffer to the thread; stop reading while none is free."""
        self._filled += nbytes
        if self._filled == BUFFER_BYTES:
            self._full.put((self._current, self._filled))
            self._filled = 0
            if self._free:
                self._current = self._free.pop()
            else:
                self._current = bytearray()
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The client has sent everything: write the rest; the thread answers and closes."""
        if self._filled:
            self._full.put((self._current, self._filled))
        self._full.put(None)
        return not self._encrypted

    def _write(self) -> None:
        total = 0
        while (item := self._full.get()) is not None:
            buffer, length = item
            rest = memoryview(buffer)[:length]
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            total += length
            self._loop.call_soon_threadsafe(self._give_back, buffer)
        self._loop.call_soon_threadsafe(self._finish, total)

    def _give_back(self, buffer: bytearray) -> None:
        if self._current:
            self._free.append(buffer)
        else:
            self._current = buffer
            self._transport.resume_reading()

    def _finish(self, total: int) -> None:
        if self._encrypted:
            _say(Stored(total, time.perf_counter()))
            self._done.set()
            return
        self._transport.write(total.to_bytes(8, "little"))
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """One client is all that it serves."""
        if not self._encrypted:
            self._done.set()


class AnsweringSink(asyncio.Protocol):
    """Writes each frame on the loop and answers it with one byte: the limit of one message at a time."""

    def __init__(self, descriptor: int, frame: int, done: asyncio.Event) -> None:
        self._descriptor = descriptor
        self._frame = frame
        self._done = done
        self._pending = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back to the client."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Write, and answer every frame that is complete."""
        os.write(self._descriptor, data)
        complete, self._pending = divmod(self._pending + len(data), self._frame)
        if complete:
            self._transport.write(b"\x01" * complete)

    def connection_lost(self, error: Exception | None) -> None:
        """One client is all that it serves."""
        self._done.set()


async def serve(job: Transfer) -> None:
    """Serve one client, then end."""
    done = asyncio.Event()
    descriptor = os.open(job.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def protocol() -> asyncio.BaseProtocol:
        if job.one_by_one:
            return AnsweringSink(descriptor, job.frame_bytes, done)
        return FileSink(descriptor, done, encrypted=bool(job.certificate))

    context = None
    if job.certificate:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(job.certificate, job.key)
    try:
        server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0, ssl=context)
        _say(Listening(server.sockets[0].getsockname()[1]))
        await done.wait()
        server.close()
    finally:
        os.close(descriptor)


def send(job: Transfer) -> Taken:
    """Send prebuilt frames as fast as they are taken."""
    frame = os.urandom(job.frame_bytes)
    frames_max = job.bytes_max // job.frame_bytes
    frames = 0
    with _connection(job) as link:
        started = time.perf_counter()
        end = started + job.seconds
        while frames < frames_max and time.perf_counter() < end:
            link.sendall(frame)
            frames += 1
            if job.one_by_one and not link.recv(1):
                raise ConnectionError("the bare server hung up")
        if isinstance(link, ssl.SSLSocket):
            link.unwrap()
            return Taken(frames, time.perf_counter() - started, started)
        if not job.one_by_one:
            link.shutdown(socket.SHUT_WR)
            total = int.from_bytes(link.recv(8, socket.MSG_WAITALL), "little")
            if total != frames * job.frame_bytes:
                raise ConnectionError(f"the bare server took {total} of {frames * job.frame_bytes} bytes")
        return Taken(frames, time.perf_counter() - started)


def _connection(job: Transfer) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", job.port), timeout=REPLY_TIMEOUT_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not job.certificate:
        return link
    context = ssl.create_default_context(cafile=job.authority)
    return context.wrap_socket(link, server_hostname="127.0.0.1")


def measure(job: Transfer, log: Path) -> float:
    """Frames a second that the bare server takes."""
    module = ["-m", "bench.bare_server"]
    encoded = msgspec.json.encode(job).decode()
    with Child("bare server", [*module, "serve", encoded], log=log) as server:
        port = server.answer(Listening, REPLY_TIMEOUT_S).port
        encoded = msgspec.json.encode(msgspec.structs.replace(job, port=port)).decode()
        with Child("client of the bare server", [*module, "send", encoded], log=log) as client:
            taken = client.answer(Taken, job.seconds + REPLY_TIMEOUT_S)
        if not job.certificate:
            return taken.frames / taken.seconds
        stored = server.answer(Stored, REPLY_TIMEOUT_S)
    if stored.total != taken.frames * job.frame_bytes:
        raise ConnectionError(
            f"the bare server took {stored.total} of {taken.frames * job.frame_bytes} bytes"
        )
    return taken.frames / (stored.ended - taken.began)


def _say(answer: msgspec.Struct) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


def _main() -> None:
    role, job = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Transfer)
    if role == "serve":
        uvloop.run(serve(job))
    else:
        _say(send(job))


if __name__ == "__main__":
    _main()
