"""What do fifty connections cost that publish single messages, and acks while many wait?"""

from __future__ import annotations

import sys

from bench.harness import Case, Run
from bench.processes import Child
from bench.results import Sample
from bench.roles.awaiting import Awaited, AwaitJob
from bench.roles.connections import HELD_ROWS, PARTITIONS, WORKERS, ConnectionJob, Spent

CONNECTIONS = 50
FEW, MANY = 5, 500
ROUNDS = 2
"""In turn, and the least of each counts: what others do on the machine only adds to it."""
BACKLOG = 100_000
PATIENCE_S = 180.0
BEFORE_US, BEFORE_ECHO_US = 54.0, 7.4
"""Measured here with the code of the commit 5e39776, and the bare server beside it: what the bar is below."""


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("tailrace://").rpartition(":")
    return host, int(port)


def _spent(run: Run, job: ConnectionJob) -> Spent:
    with run.role("connections", job) as child:
        return child.answer(Spent, PATIENCE_S)


def _echo(run: Run) -> Spent:
    """A bare uvloop server that takes and answers the same bytes."""
    with Child("echo", ["-m", "bench.roles.connections"], log=run.folder / "echo.log") as server:
        address = server.answer(tuple[str, int], PATIENCE_S)
        job = ConnectionJob(
            task="echo", address=address, pid=server.pid, seconds=run.seconds / 2, connections=CONNECTIONS
        )
        return _spent(run, job)


def publish(run: Run) -> list[Sample]:
    """CPU of the broker for a message that is published alone and awaited, from 50 connections."""
    with run.broker() as broker:
        job = ConnectionJob(
            task="publish",
            address=_address(broker.url),
            pid=broker.pid,
            seconds=run.seconds,
            connections=CONNECTIONS,
        )
        spent = _spent(run, job)
    bare = _echo(run)
    said: dict[str, object] = {
        "connections": CONNECTIONS,
        "payload_bytes": job.value_bytes,
        "durability": job.durability,
        "partitions": 1,
        "rate": round(spent.requests / spent.seconds),
        "before_us": BEFORE_US,
        "before_echo_us": BEFORE_ECHO_US,
        "echo_us": round(bare.cpu_us, 2),
        "echo_rate": round(bare.requests / bare.seconds),
        "python": sys.version.split()[0],
    }
    return [Sample(name="single_publish_cpu_us", value=spent.cpu_us, unit="µs", conditions=said)]


def _ack_us(run: Run, waiting: int) -> float:
    with run.broker(f"waiting-{waiting}") as broker:
        job = ConnectionJob(
            task="ack", address=_address(broker.url), pid=broker.pid, seconds=run.seconds, waiting=waiting
        )
        return _spent(run, job).cpu_us


def growth(run: Run) -> list[Sample]:
    """CPU of the broker for an ack while 500 members of the group wait for messages, over that with 5."""
    rounds = [(_ack_us(run, FEW), _ack_us(run, MANY)) for _ in range(ROUNDS)]
    few, many = (min(costs) for costs in zip(*rounds, strict=True))
    said: dict[str, object] = {
        "waiting": MANY,
        "over_waiting": FEW,
        "workers": WORKERS,
        "acks": WORKERS * HELD_ROWS,
        "partitions": PARTITIONS,
        "durability": "interval",
        "cpu_us_few": round(few, 2),
        "cpu_us_many": round(many, 2),
    }
    return [Sample(name="ack_cost_growth", value=many / few, unit="ratio", conditions=said)]


def share(run: Run) -> list[Sample]:
    """Acks a second of 50 consumers, each ack awaited, over publishes a second of the same connections."""
    with run.broker() as broker:
        job = AwaitJob(
            url=broker.url,
            pid=broker.pid,
            clients=CONNECTIONS,
            partitions=PARTITIONS,
            seconds=run.seconds,
            backlog=BACKLOG,
        )
        with run.role("awaiting", job) as child:
            awaited = child.answer(Awaited, PATIENCE_S)
    said: dict[str, object] = {
        "clients": f"{CONNECTIONS} in one process with a connection each",
        "payload_bytes": 100,
        "partitions": PARTITIONS,
        "assignment": "shared",
        "durability": "interval",
        "publish_rate": round(awaited.publish_rate),
        "ack_rate": round(awaited.ack_rate),
        "publish_cpu_us": round(awaited.publish_cpu_us, 1),
        "ack_cpu_us": round(awaited.ack_cpu_us, 1),
        "busiest": awaited.most,
        "least_busy": awaited.least,
    }
    value = awaited.ack_rate / awaited.publish_rate
    return [Sample(name="many_workers_ack_share", value=value, unit="ratio", conditions=said)]


SHARE = Case(("many_workers_ack_share",), 4.0, share)
GROWTH = Case(("ack_cost_growth",), 10.0, growth)
PUBLISH = Case(("single_publish_cpu_us",), 6.0, publish)
