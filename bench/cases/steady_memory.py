"""Does the memory of a broker stay flat while a queue lives: 10,000 msg/s, some delayed, some given back?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from bench.harness import Case, Run
from bench.processes import BenchmarkFailed, Broker
from bench.results import Sample
from bench.roles.churn import TOPIC, Churned, ChurnJob

RATE = 10_000
SUITE_S = 15 * 60.0
LEFT_OUT_SHARE = 1 / 3
"""At the beginning caches, windows and pools fill, as they are meant to."""
SAMPLE_S = 5.0
STRETCH_S = 60.0
PATIENCE_S = 300.0
BUSY_SHARE_MIN = 0.8

Reading = tuple[float, float]
"""Seconds since the load began, and RssAnon in MB."""


def soak(run: Run, broker: Broker, job: ChurnJob, tell: Callable[[Reading], None]) -> tuple[Churned, int]:
    """Put the load on a broker and tell its memory every few seconds, until the load ends by itself. Returns
    what came of it, and how many messages were handed to the consumer, those included that it gave back."""
    with run.role("churn", job) as load:
        load.answer(dict, PATIENCE_S)
        began = time.perf_counter()
        while (passed := time.perf_counter() - began) < job.seconds:
            tell((passed, broker.anon_mb()))
            time.sleep(min(SAMPLE_S, max(0.0, job.seconds - passed)))
        done = load.answer(Churned, PATIENCE_S + job.delay_s_max)
    if done.sent < BUSY_SHARE_MIN * job.rate * job.seconds:
        raise BenchmarkFailed(f"only {done.sent} messages in {done.seconds:.0f} s: that says little")
    return done, broker.handed_out(TOPIC)


def mb_per_hour(readings: Sequence[Reading], left_out_s: float) -> float:
    """The slope of a straight line through the lowest reading of each minute.

    The memory of a busy broker goes up and down by some MB between two moments at which its allocators give
    pages back. What it needs at the least is what must not grow.
    """
    lowest: dict[int, Reading] = {}
    for reading in readings:
        if reading[0] >= left_out_s:
            stretch = int(reading[0] // STRETCH_S)
            lowest[stretch] = min(lowest.get(stretch, reading), reading, key=lambda one: one[1])
    if len(lowest) < 2:
        raise BenchmarkFailed(f"{len(lowest)} minutes are too few for a slope")
    at_s, mb = zip(*lowest.values(), strict=True)
    return statistics.linear_regression(at_s, mb).slope * 3600


def said(
    job: ChurnJob, done: Churned, handed_out: int, readings: Sequence[Reading], left_out_s: float
) -> dict[str, object]:
    """The conditions of a soak, and what came of it."""
    return {
        "payload_bytes": job.value_bytes,
        "partitions": job.partitions,
        "keys": job.keys,
        "durability": "interval",
        "rate_msg_s": round(done.sent / done.seconds),
        "wanted_msg_s": job.rate,
        "messages": done.sent,
        "delayed": done.delayed,
        "given_back": done.nacked,
        "handed_out_each": round(handed_out / max(1, done.sent), 3),
        "acknowledged_too_late": done.lost,
        "load_seconds": round(done.seconds),
        "left_out_seconds": round(left_out_s),
        "first_mb": round(readings[0][1], 1),
        "last_mb": round(readings[-1][1], 1),
        "highest_mb": round(max(mb for _, mb in readings), 1),
    }


def measure(run: Run) -> list[Sample]:
    """A quarter of an hour; the slope of what is left of it, for an hour."""
    readings: list[Reading] = []
    with run.broker() as broker:
        job = ChurnJob(url=broker.url, rate=RATE, seconds=run.seconds)
        done, handed_out = soak(run, broker, job, readings.append)
    left_out_s = run.seconds * LEFT_OUT_SHARE
    conditions = said(job, done, handed_out, readings, left_out_s)
    conditions["extrapolated"] = f"from {run.seconds - left_out_s:.0f} s to an hour"
    slope = mb_per_hour(readings, left_out_s)
    return [Sample(name="soak_mb_per_hour", value=slope, unit="MB/h", conditions=conditions)]


CASE = Case(("soak_mb_per_hour",), SUITE_S, measure, runs_max=1)
