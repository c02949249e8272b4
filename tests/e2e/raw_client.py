"""A client without manners: writes any bytes to the native port, and reads replies only when asked to."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from types import TracebackType
from typing import Any, Self

import msgspec

from tailrace.core.model.commands import Publish, Reply, Request
from tailrace.core.model.identifiers import Refusal
from tailrace.format import batch, codec
from tailrace.format.frame import Buffer, crc32c
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

REPLY_S = 20.0
HELLO = msgspec.msgpack.encode(Hello([PROTOCOL_VERSION], "raw"))
GREETING = PREAMBLE + prefix(HELLO, 0, 0)


def greeting(token: str) -> bytes:
    """Preamble and hello, with a token if there is one."""
    if not token:
        return GREETING
    hello = Hello([PROTOCOL_VERSION], "raw", Credentials(token=token))
    return PREAMBLE + prefix(msgspec.msgpack.encode(hello), 0, 0)


class RawClient:
    """One connection. `request` is well-formed; everything else is up to the test."""

    def __init__(
        self, address: tuple[str, int], *, context: ssl.SSLContext | None = None, token: str = ""
    ) -> None:
        self._address = address
        self._context = context
        self._token = token
        self._ids = itertools.count(1)
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        await self.connect()
        await self.greet()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    async def connect(self) -> None:
        """Connect and say nothing."""
        name = None if self._context is None else "localhost"
        self.reader, self.writer = await asyncio.open_connection(
            *self._address, limit=1 << 20, ssl=self._context, server_hostname=name
        )

    async def greet(self) -> Welcome:
        """Preamble and hello; the welcome."""
        self.writer.write(greeting(self._token))
        _, header, _ = await self.message()
        return msgspec.msgpack.decode(header, type=Welcome)

    def abort(self) -> None:
        """Reset."""
        self.writer.transport.abort()

    async def message(self) -> tuple[int, bytes, bytes]:
        """The next message of the broker: request id, header, body; raises IncompleteReadError at its end."""
        async with asyncio.timeout(REPLY_S):
            header_bytes, body_bytes, request_id = PREFIX.unpack(await self.reader.readexactly(PREFIX_BYTES))
            header = await self.reader.readexactly(header_bytes)
            return request_id, header, await self.reader.readexactly(body_bytes)

    async def reply(self) -> tuple[int, Reply]:
        """The next reply and the request that it answers."""
        request_id, header, _ = await self.message()
        return request_id, codec.decode_reply(header)

    def post(self, header: bytes, body: Buffer = b"") -> int:
        """Write a message with any header; its request id."""
        request_id = next(self._ids)
        self.writer.write(prefix(header, len(body), request_id))
        if len(body):
            self.writer.write(body)
        return request_id

    async def request(self, request: Request, body: Buffer = b"") -> Reply:
        """One request, and the reply to it."""
        return await self.exchange(codec.encode_request(request), body)

    async def exchange(self, header: bytes, body: Buffer = b"") -> Reply:
        """One message with any header, and the reply to it."""
        request_id = self.post(header, body)
        answered, reply = await self.reply()
        assert answered == request_id, f"an answer to {answered} instead of {request_id}: {reply}"
        return reply

    async def ending(self) -> Refusal | None:
        """What the broker says before it closes the connection; None when it closes without a word."""
        said: Refusal | None = None
        try:
            while True:
                _, reply = await self.reply()
                assert isinstance(reply, Refusal), reply
                said = reply
        except (asyncio.IncompleteReadError, OSError):
            return said


def publish(topic: str, values: list[Any], **fields: Any) -> tuple[Publish, Buffer]:
    """A publish and its body."""
    columns, body = batch.encode(
        values,
        ids=batch.make_ids(len(values), 10**12, 7, 1),
        timestamps=10**15,
        keys=fields.pop("keys", None),
    )
    partition = fields.pop("partition", 0)
    return Publish(topic, partition, columns, crc32c(body), **fields), body
