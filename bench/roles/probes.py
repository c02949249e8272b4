"""Some connections that publish at a steady pace, and how long each message took to be acknowledged."""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
import numpy as np
import uvloop

from bench.load import Latency
from bench.roles.connections import TOPIC, ConnectionJob, Make, Peer, connect, publishing
from bench.roles.producer import latency
from tailrace.core.model.commands import CreateTopic

WARM_S = 0.5


class ProbeJob(msgspec.Struct, frozen=True, kw_only=True):
    """The one argument of this role, as JSON; `rate` is of all connections together."""

    connection: ConnectionJob
    rate: int


class Probe:
    """One connection; it sends when its time has come and the last answer is there."""

    def __init__(self, peer: Peer, make: Make, interval_s: float, until_s: float) -> None:
        self._peer, self._make = peer, make
        self._interval_s, self._until_s = interval_s, until_s
        self._loop = asyncio.get_running_loop()
        self._sent_ns = 0
        self.took_ns: list[int] = []
        self.over: asyncio.Future[None] = self._loop.create_future()

    def begin(self, due_s: float) -> None:
        """Send first at this time of the loop."""
        self._due_s = due_s
        self._loop.call_at(due_s, self._send)

    def _send(self) -> None:
        request = self._make()
        assert request is not None
        self._sent_ns = time.perf_counter_ns()
        self._peer.send(*request, self._answered)

    def _answered(self, reply: bytes) -> None:
        self.took_ns.append(time.perf_counter_ns() - self._sent_ns)
        # Beats that were missed are left out: then this broker answers less, and each answer counts.
        self._due_s = max(self._due_s + self._interval_s, self._loop.time())
        if self._due_s < self._until_s:
            self._loop.call_at(self._due_s, self._send)
        else:
            self.over.set_result(None)


async def probe(job: ProbeJob) -> Latency:
    """Publish for the seconds of the job, the first of them not counted."""
    own = job.connection
    loop = asyncio.get_running_loop()
    peers = await connect(own, own.connections)
    await peers[0].ask(CreateTopic(TOPIC, {"partitions": 1, "durability": own.durability}, True))
    interval_s = own.connections / job.rate
    begin_s = loop.time() + WARM_S
    print("{}", flush=True)
    probes = []
    for number, peer in enumerate(peers):
        one = Probe(peer, publishing(own, number), interval_s, begin_s + WARM_S + own.seconds)
        one.begin(begin_s + interval_s * number / len(peers))
        probes.append(one)
    await asyncio.gather(*(one.over for one in probes))
    cold = int(WARM_S / interval_s)
    return latency(np.concatenate([np.array(one.took_ns[cold:]) for one in probes]))


if __name__ == "__main__":
    found = uvloop.run(probe(msgspec.json.decode(sys.argv[1], type=ProbeJob)))
    print(msgspec.json.encode(found).decode(), flush=True)
