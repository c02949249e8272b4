"""Opens connection after connection, shows a token or a password on each, asks who it is, and closes it.

It is a loop over sockets with nothing in between, because the coroutines of a client would cost more than the
broker does.
"""

from __future__ import annotations

import select
import socket
import sys
import time

import msgspec

from bench.roles.costs import cpu_s
from tailrace.core.model.access_commands import CallerInfo, WhoAmI
from tailrace.core.model.identifiers import Refusal
from tailrace.format import codec
from tailrace.format.wire import (
    PREAMBLE,
    PREFIX,
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    Credentials,
    Hello,
    prefix,
)

ANSWER_S = 30.0
ASK = prefix(codec.encode_request(WhoAmI()), 0, 2)
WELCOME = b"\xa7welcome"


class LoginJob(msgspec.Struct, frozen=True, kw_only=True):
    """The one argument of this role, as JSON: so many connections at a time for so many seconds. `pid` is the
    process whose CPU counts."""

    address: tuple[str, int]
    pid: int
    seconds: float
    at_once: int
    user: str
    token: str = ""
    password: str = ""


class LoggedIn(msgspec.Struct, frozen=True):
    """So many were answered and so many turned away, in so much time, with so much CPU of the broker and of
    this role."""

    answered: int
    refused: int
    seconds: float
    broker_cpu_s: float
    own_cpu_s: float


class Door:
    """Connections that are being made."""

    def __init__(self, job: LoginJob) -> None:
        shown = Credentials(token=job.token) if job.token else Credentials(job.user, job.password)
        hello = msgspec.msgpack.encode(Hello([PROTOCOL_VERSION], "bench", shown))
        self._job = job
        self._greeting = PREAMBLE + prefix(hello, 0, 1)
        self._poll = select.epoll()
        self._open: dict[int, tuple[socket.socket, bytes]] = {}
        self.answered = self.refused = 0

    def knock(self) -> None:
        """One more connection."""
        link = socket.create_connection(self._job.address)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(self._greeting)
        self._poll.register(link.fileno(), select.EPOLLIN)
        self._open[link.fileno()] = link, b""

    def step(self) -> int:
        """Take what has come; how many connections have ended."""
        ready = self._poll.poll(ANSWER_S)
        if not ready:
            raise SystemExit(f"no answer within {ANSWER_S:g} s")
        return sum(self._take(number) for number, _ in ready)

    def _take(self, number: int) -> bool:
        link, data = self._open[number]
        piece = link.recv(65536)
        data += piece
        header = whole(data)
        if header is None:
            if not piece:
                raise SystemExit(f"the broker hung up after {data!r}")
            self._open[number] = link, data
            return False
        if WELCOME in header[:16]:
            self._open[number] = link, b""
            link.sendall(ASK)
            return False
        reply = codec.decode_reply(header)
        if isinstance(reply, CallerInfo) and reply.user == self._job.user:
            self.answered += 1
        elif isinstance(reply, Refusal) and reply.code == "overloaded":
            self.refused += 1
        else:
            raise SystemExit(f"not what was asked for: {reply}")
        self._poll.unregister(number)
        del self._open[number]
        link.close()
        return True

    def close(self) -> None:
        """Leave those alone that are under way."""
        for link, _ in self._open.values():
            link.close()
        self._poll.close()


def whole(data: bytes) -> bytes | None:
    """The header of a message, when all of it is there."""
    if len(data) < PREFIX_BYTES:
        return None
    header_bytes, _, _ = PREFIX.unpack_from(data)
    return (
        data[PREFIX_BYTES : PREFIX_BYTES + header_bytes] if len(data) >= PREFIX_BYTES + header_bytes else None
    )


def log_in(job: LoginJob) -> LoggedIn:
    """Do the job."""
    door = Door(job)
    before, own, started = cpu_s(job.pid), time.process_time(), time.perf_counter()
    for _ in range(job.at_once):
        door.knock()
    while (seconds := time.perf_counter() - started) < job.seconds:
        for _ in range(door.step()):
            door.knock()
    spent, mine = cpu_s(job.pid) - before, time.process_time() - own
    door.close()
    return LoggedIn(door.answered, door.refused, seconds, spent, mine)


if __name__ == "__main__":
    print("{}", flush=True)
    done = log_in(msgspec.json.decode(sys.argv[1], type=LoginJob))
    print(msgspec.json.encode(done).decode(), flush=True)
