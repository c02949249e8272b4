"""Lines of standard input for an event loop: any kind of file, bounded read-ahead, free to be abandoned."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator

from tailrace.errors import InvalidRequest, TooLarge

STANDARD_INPUT = 0
CHUNK_BYTES = 64 * 1024
CHUNKS_AHEAD = 4
LINE_BYTES_MAX = 24 * 1024 * 1024
"""A value at its limit of 16 MiB, as base64, and room for the rest of its record."""


async def read_lines(descriptor: int) -> AsyncIterator[tuple[int, bytes]]:
    """Number and content of each line, without its end; an unfinished last line counts."""
    carry = bytearray()
    number = 0
    async for chunk in _chunks(descriptor):
        searched = len(carry)
        carry += chunk
        begin = 0
        while (end := carry.find(b"\n", max(begin, searched))) >= 0:
            number += 1
            yield number, bytes(carry[begin:end]).removesuffix(b"\r")
            begin = end + 1
        del carry[:begin]
        if len(carry) > LINE_BYTES_MAX:
            raise TooLarge(f"line {number + 1}: longer than {LINE_BYTES_MAX} bytes", limit=LINE_BYTES_MAX)
    if carry:
        yield number + 1, bytes(carry).removesuffix(b"\r")


async def _chunks(descriptor: int) -> AsyncIterator[bytes]:
    """Bytes as they arrive. A daemon thread reads, because a terminal, a pipe and a file have no common way
    to be awaited, and because Ctrl-C must not wait for the next key press; it reads the descriptor and not
    sys.stdin, whose lock it would hold at exit.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(CHUNKS_AHEAD)

    def read() -> None:
        while True:
            room.acquire()
            try:
                chunk: bytes | OSError = os.read(descriptor, CHUNK_BYTES)
            except OSError as error:
                chunk = error
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, chunk)
            except RuntimeError:
                return  # The loop is closed: nobody waits for input any more.
            if not chunk or isinstance(chunk, OSError):
                return

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while True:
        chunk = await arrived.get()
        if isinstance(chunk, OSError):
            raise InvalidRequest(f"standard input cannot be read: {chunk.strerror}")
        if not chunk:
            return
        room.release()
        yield chunk
