"""Is a Unix socket at least as fast as TCP for one caller who waits for each message?"""

from __future__ import annotations

import statistics

from bench.harness import Case, Run
from bench.load import Load
from bench.processes import Broker
from bench.results import Sample, significant

ROUNDS = 4
SOCKET = "broker.sock"


def measure(run: Run) -> list[Sample]:
    """`await producer.publish(value)` in a loop to one broker, by its two doors in turn."""
    pairs: list[tuple[float, float]] = []
    path = run.folder / SOCKET
    with run.broker(flags=("--listen", f"127.0.0.1:0,unix:{path}")) as broker:
        for number in range(ROUNDS):
            doors = (broker.url, f"unix:{path}")
            order = doors if number % 2 else doors[::-1]
            rates = {door: _rate(run, broker, door, f"bench-{number}-{doors.index(door)}") for door in order}
            pairs.append((rates[doors[0]], rates[doors[1]]))
    said: dict[str, object] = {
        "rounds": ROUNDS,
        "payload_bytes": 100,
        "batch": 1,
        "durability": "interval",
        "partitions": 1,
        "tcp_msg_s": [round(tcp) for tcp, _ in pairs],
        "unix_msg_s": [round(unix) for _, unix in pairs],
        "tcp_median_msg_s": significant(statistics.median(tcp for tcp, _ in pairs)),
    }
    value = statistics.median(unix / tcp for tcp, unix in pairs)
    return [Sample(name="unix_share", value=value, unit="ratio", conditions=said)]


def _rate(run: Run, broker: Broker, url: str, topic: str) -> float:
    load = Load(
        mode="publish",
        reading="messages",
        value_bytes=100,
        seconds=run.seconds / ROUNDS,
        bytes_max=run.bytes_max,
    )
    produced = run.produce(url, load, topic)
    return produced.sent / produced.seconds


CASE = Case(("unix_share",), 12.0, measure)
