"""How long does a broker stand still for a snapshot with a million delayed and 100,000 stuck messages?"""

from __future__ import annotations

import re
import urllib.request

from bench.harness import Case, Run
from bench.processes import BenchmarkFailed
from bench.results import Sample
from bench.roles.stuck import Stuck, StuckJob

SCHEDULED, STUCK, SNAPSHOTS = 1_000_000, 100_000, 100
METRIC = "tailrace_snapshot_pause_seconds"
PATIENCE_S = 400.0
NOMINAL_S = 60.0


def measure(run: Run) -> list[Sample]:
    """The 99th percentile of the pauses that the broker itself has measured, rounded up to its bucket."""
    with run.broker() as broker:
        job = StuckJob(
            url=broker.url,
            scheduled=run.scaled(SCHEDULED),
            stuck=run.scaled(STUCK),
            snapshots=SNAPSHOTS,
        )
        with run.role("stuck", job) as child:
            held = child.answer(Stuck, PATIENCE_S)
        with urllib.request.urlopen(broker.metrics_url, timeout=30) as answer:
            page = answer.read().decode()
    buckets = [
        (float(bound), float(count))
        for bound, count in re.findall(rf'^{METRIC}_bucket{{le="([^"]+)"}} (\S+)$', page, re.MULTILINE)
    ]
    total = buckets[-1][1] if buckets else 0
    if total < SNAPSHOTS / 2:
        raise BenchmarkFailed(f"only {total:g} snapshots were taken")
    bound_s = next(bound for bound, count in buckets if count >= 0.99 * total)
    said: dict[str, object] = {
        "scheduled": job.scheduled,
        "stuck": held.waiting,
        "snapshots": total,
        "durability": "interval",
        "partitions": 1,
    }
    return [Sample(name="snapshot_pause_ms_p99", value=bound_s * 1000, unit="ms", conditions=said)]


CASE = Case(("snapshot_pause_ms_p99",), NOMINAL_S, measure)
