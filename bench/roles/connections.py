"""Many connections that each send one request after the other, and what those cost the broker in CPU.

It speaks the native protocol itself, with as little work of its own as can be, so that one process keeps a
broker busy: its requests are the ones that the SDK would send.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import uvloop

from bench.roles.costs import cpu_s
from tailrace.core.model.commands import CreateTopic, Publish, Published
from tailrace.core.model.group_commands import JoinGroup, Membership
from tailrace.core.model.queue_commands import Ack, Lease
from tailrace.format import batch, codec
from tailrace.format.frame import crc32c
from tailrace.format.wire import (
    PREAMBLE,
    PREFIX,
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    Credentials,
    Hello,
    prefix,
)

TOPIC, GROUP = "busy", "workers"
WARM_S = 1.0
PARTITIONS = 3
WORKERS, HELD_ROWS = 10, 5_000
WAIT_MS = 60_000
LEASE_MS = 600_000
ANSWER = prefix(codec.encode_reply(Published(1 << 20, 1 << 50)), 0, 1)
"""As long as the answer to a publish."""

Answered = Callable[[Any], None]


class ConnectionJob(msgspec.Struct, frozen=True, kw_only=True):
    """The one argument of this role, as JSON. `task` is what is measured; `pid` is the process whose CPU
    counts; `waiting` members have a lease request that waits. With a token every connection shows it."""

    task: str
    address: tuple[str, int]
    pid: int
    seconds: float
    connections: int = 50
    value_bytes: int = 100
    durability: str = "interval"
    waiting: int = 0
    token: str = ""


class Spent(msgspec.Struct, frozen=True):
    """So many requests were answered, in so much time, with so much of the other's CPU."""

    requests: int
    seconds: float
    cpu_s: float

    @property
    def cpu_us(self) -> float:
        """Of one request."""
        return self.cpu_s / self.requests * 1e6


class Peer(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self._data = b""
        self._then: Answered | None = None
        self._ids = itertools.count(1)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way to the broker."""
        self._transport = cast(asyncio.Transport, transport)

    def send(self, request: bytes, body: bytes, then: Answered) -> None:
        """Send a request; `then` is called with its answer."""
        self._then = then
        self._transport.write(prefix(request, len(body), next(self._ids)) + body)

    def data_received(self, data: bytes) -> None:
        """Hand over the answer when all of it is there."""
        if self._data:
            data = self._data + data
        header_bytes, body_bytes, _ = (
            PREFIX.unpack_from(data) if len(data) >= PREFIX_BYTES else (1 << 30, 0, 0)
        )
        if len(data) < PREFIX_BYTES + header_bytes + body_bytes:
            self._data = data
            return
        self._data = b""
        then, self._then = self._then, None
        assert then is not None, "an answer to nothing"
        then(data[PREFIX_BYTES : PREFIX_BYTES + header_bytes])

    async def ask(self, request: Any, body: bytes = b"") -> Any:
        """The answer to one request."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.send(codec.encode_request(request), body, answer.set_result)
        reply = codec.decode_reply(await answer)
        if type(reply).__name__ == "Refusal":
            raise ConnectionError(str(reply))
        return reply

    async def greet(self, credentials: Credentials | None = None) -> None:
        """The first words."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._transport.write(PREAMBLE)
        hello = Hello([PROTOCOL_VERSION], "bench", credentials)
        self.send(msgspec.msgpack.encode(hello), b"", answer.set_result)
        if msgspec.msgpack.decode(said := await answer)[0] != "welcome":
            raise ConnectionError(f"not welcome: {said!r}")


async def connect(job: ConnectionJob, count: int) -> list[Peer]:
    """Connections that were greeted."""
    loop = asyncio.get_running_loop()
    peers = [(await loop.create_connection(Peer, *job.address))[1] for _ in range(count)]
    credentials = Credentials(token=job.token) if job.token else None
    await asyncio.gather(*(peer.greet(credentials) for peer in peers))
    return peers


Make = Callable[[], tuple[bytes, bytes] | None]
"""The next request of a connection and its body; None: there is none."""


def publishing(job: ConnectionJob, number: int) -> Make:
    """The publishes of one producer: a message each, numbered as the SDK does it."""
    columns, encoded = batch.encode(
        [os.urandom(job.value_bytes)],
        ids=batch.make_ids(1, time.time_ns() // 1_000_000, number, number),
        timestamps=time.time_ns() // 1000,
    )
    body, crc = bytes(encoded), crc32c(encoded)
    sequences = itertools.count()

    def make() -> tuple[bytes, bytes]:
        request = Publish(TOPIC, 0, columns, crc, number + 1, 0, next(sequences))
        return codec.encode_request(request), body

    return make


def acking(held: list[tuple[int, int]]) -> Make:
    """The acks of one worker: a message each, the oldest first."""
    receipts = iter(held)

    def make() -> tuple[bytes, bytes] | None:
        found = next(receipts, None)
        if found is None:
            return None
        lease, offset = found
        return codec.encode_request(Ack(TOPIC, 0, GROUP, [(lease, [offset, offset + 1])])), b""

    return make


class Steady:
    """Connections of which each sends the next request when the last is answered."""

    def __init__(self) -> None:
        self.answered = 0
        self._stopped = False
        self._busy = 0
        self.idle = asyncio.Event()

    def start(self, peer: Peer, make: Make) -> None:
        """One connection begins."""
        self._busy += 1

        def go(reply: bytes = b"") -> None:
            self.answered += bool(reply)
            request = None if self._stopped else make()
            if request is not None:
                peer.send(*request, go)
                return
            self._busy -= 1
            if not self._busy:
                self.idle.set()

        go()

    async def measure(self, job: ConnectionJob) -> Spent:
        """What is spent in the seconds of the job, and then no more."""
        await asyncio.sleep(WARM_S)
        before, count, started = cpu_s(job.pid), self.answered, time.perf_counter()
        await asyncio.sleep(job.seconds)
        spent, many = cpu_s(job.pid) - before, self.answered - count
        seconds = time.perf_counter() - started
        self._stopped = True
        await self.idle.wait()
        return Spent(many, seconds, spent)


async def publish(job: ConnectionJob) -> Spent:
    """Single messages, each awaited."""
    peers = await connect(job, job.connections)
    await peers[0].ask(CreateTopic(TOPIC, {"partitions": 1, "durability": job.durability}, True))
    return await _publish(job, peers)


async def echo(job: ConnectionJob) -> Spent:
    """The same bytes to a server that does nothing but answer."""
    loop = asyncio.get_running_loop()
    peers = [(await loop.create_connection(Peer, *job.address))[1] for _ in range(job.connections)]
    return await _publish(job, peers)


async def _publish(job: ConnectionJob, peers: list[Peer]) -> Spent:
    steady = Steady()
    for number, peer in enumerate(peers):
        steady.start(peer, publishing(job, number))
    return await steady.measure(job)


async def ack(job: ConnectionJob) -> Spent:
    """Workers settle message after message, while other members wait for some."""
    peers = await connect(job, WORKERS + job.waiting)
    first = peers[0]
    await first.ask(CreateTopic(TOPIC, {"partitions": PARTITIONS, "durability": job.durability}))
    joined = await first.ask(JoinGroup(GROUP, "worker-0", [TOPIC], {"assignment": "shared"}))
    assert isinstance(joined, Membership)
    places = [(partition, generation) for _, partition, generation in joined.owned]
    workers = [acking(await hold(first, job, places, number)) for number in range(WORKERS)]
    waiting = [wait(peer, places, number) for number, peer in enumerate(peers[WORKERS:])]
    await asyncio.sleep(WARM_S)
    steady = Steady()
    before, started = cpu_s(job.pid), time.perf_counter()
    for peer, make in zip(peers, workers, strict=False):
        steady.start(peer, make)
    await steady.idle.wait()
    spent = Spent(steady.answered, time.perf_counter() - started, cpu_s(job.pid) - before)
    assert not any(waiting), "nobody was to be given anything"
    return spent


async def hold(
    peer: Peer, job: ConnectionJob, places: list[tuple[int, int]], number: int
) -> list[tuple[int, int]]:
    """Publish messages and lease them for a member: (lease, offset)."""
    columns, body = batch.encode(
        [b"x" * job.value_bytes] * HELD_ROWS,
        ids=batch.make_ids(HELD_ROWS, time.time_ns() // 1_000_000, 1, 1),
        timestamps=time.time_ns() // 1000,
    )
    await peer.ask(Publish(TOPIC, 0, columns, crc32c(body)), bytes(body))
    wanted = Lease(
        TOPIC, GROUP, f"worker-{number}", places, count_max=HELD_ROWS, bytes_max=1 << 23, lease_ms=LEASE_MS
    )
    held: list[tuple[int, int]] = []
    while len(held) < HELD_ROWS:
        for grant in (await peer.ask(wanted)).grants:
            held += [(grant.lease, first + row) for first, many, *_ in grant.runs for row in range(many)]
    return held


def wait(peer: Peer, places: list[tuple[int, int]], number: int) -> list[bytes]:
    """Let a member wait for messages; the list gets the answer."""
    answers: list[bytes] = []
    request = Lease(TOPIC, GROUP, f"idle-{number}", places, wait_ms=WAIT_MS)
    peer.send(codec.encode_request(request), b"", answers.append)
    return answers


class Echo(asyncio.Protocol):
    """Answers whatever comes with as many bytes as a broker would."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Answer; a request comes in one piece, as it was sent."""
        self._transport.write(ANSWER)


async def serve_echo() -> None:
    """Until it is ended: the bare server."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Echo, "127.0.0.1", 0)
    print(msgspec.json.encode(server.sockets[0].getsockname()[:2]).decode(), flush=True)
    await server.serve_forever()


TASKS = {"publish": publish, "echo": echo, "ack": ack}


def main() -> None:
    """Do what the argument says; without one, be the server that only answers."""
    if len(sys.argv) < 2:
        uvloop.run(serve_echo())
        return
    job = msgspec.json.decode(sys.argv[1], type=ConnectionJob)
    spent = uvloop.run(TASKS[job.task](job))
    print(msgspec.json.encode(spent).decode(), flush=True)


if __name__ == "__main__":
    main()
