"""How late are acknowledgements and deliveries at a steady 20,000 messages a second?"""

from __future__ import annotations

from typing import Literal

from bench.harness import Case, Run
from bench.load import Latency, Load
from bench.machine import probe_sync
from bench.processes import BenchmarkFailed
from bench.results import Sample

RATE = 20_000
LINGER_MS = 1.0
WARMUP_S = 1.0


def measure(run: Run) -> list[Sample]:
    """An open loop with each durability; figures are 99th percentiles from the moment a message was due."""
    sync_ms = probe_sync(run.folder).median_ms
    return _steady(run, "interval", "", 0.0) + _steady(run, "fsync", "_fsync", sync_ms)


def _steady(run: Run, durability: Literal["interval", "fsync"], suffix: str, sync_ms: float) -> list[Sample]:
    load = Load(
        mode="paced",
        reading="messages",
        value_bytes=100,
        rate=RATE,
        warmup_s=WARMUP_S,
        linger_ms=LINGER_MS,
        seconds=run.seconds + WARMUP_S,
        bytes_max=run.bytes_max,
        durability=durability,
    )
    with run.broker(durability) as broker:
        outcome = run.drive(broker, load)
    published, delivered = outcome.produced.latency, outcome.received.latency
    if published is None or delivered is None:
        raise BenchmarkFailed("a paced producer and its reader report latencies")
    return [
        _sample(f"publish_p99_ms_20k{suffix}", published, load, sync_ms),
        _sample(f"e2e_p99_ms_20k{suffix}", delivered, load, sync_ms),
    ]


def _sample(name: str, latency: Latency, load: Load, sync_ms: float) -> Sample:
    said: dict[str, object] = {
        "payload_bytes": load.value_bytes,
        "batch": f"by the SDK, linger {LINGER_MS:g} ms",
        "durability": load.durability,
        "partitions": 1,
        "rate_msg_s": RATE,
        "schedule": "open loop in ticks of 1 ms, latency counts from the due time, first second left out",
        "p50_ms": round(latency.p50_ms, 3),
        "max_ms": round(latency.max_ms, 3),
    }
    if sync_ms:
        said["fdatasync_median_ms"] = sync_ms
    return Sample(name=name, value=latency.p99_ms, unit="ms", sync_ms=sync_ms, conditions=said)


CASE = Case(
    ("publish_p99_ms_20k", "e2e_p99_ms_20k", "publish_p99_ms_20k_fsync", "e2e_p99_ms_20k_fsync"),
    10.0,
    measure,
)
