"""What do deliveries add to the log, and how long does a broker take to start with ten million settled?"""

from __future__ import annotations

import asyncio

import msgspec

import tailrace
from bench.harness import Case, Run
from bench.load import Load
from bench.processes import Broker
from bench.results import Sample

COUNT = 10_000_000
NOMINAL_S = 60.0


def measure(run: Run) -> list[Sample]:
    """Bytes of the log before and after a group has settled everything; then SIGKILL, and a new start."""
    load = Load(
        mode="send_many",
        reading="messages",
        value_bytes=100,
        seconds=run.seconds,
        bytes_max=run.bytes_max,
        count=run.scaled(COUNT),
    )
    with run.broker(keep=True) as broker:
        sent = run.fill(broker, load)
        before = _log_bytes(broker)
        run.reread(broker, msgspec.structs.replace(load, group="bench"), sent)
        added = _log_bytes(broker) - before
        lag = asyncio.run(_lag(broker.url))
        broker.kill()
    with run.broker() as broker:
        restart_s = broker.startup_s
        lag_after = asyncio.run(_lag(broker.url))
    said: dict[str, object] = {
        "payload_bytes": 100,
        "batch": load.batch,
        "durability": "interval",
        "partitions": 1,
        "messages": sent,
        "lag": lag,
        "lag_after_restart": lag_after,
    }
    return [
        Sample(name="fact_bytes_per_msg", value=added / sent, unit="bytes", conditions=said),
        Sample(name="restart_s", value=restart_s, unit="s", conditions={**said, "ended": "SIGKILL"}),
    ]


def _log_bytes(broker: Broker) -> int:
    async def ask() -> int:
        async with tailrace.connect(broker.url) as client:
            topic = await client.admin().describe_topic("bench")
            return sum(int(row["bytes"]) for row in topic.partitions)

    return asyncio.run(ask())


async def _lag(url: str) -> int:
    async with tailrace.connect(url) as client:
        return int((await client.groups().describe("bench")).lag)


CASE = Case(("fact_bytes_per_msg", "restart_s"), NOMINAL_S, measure)
