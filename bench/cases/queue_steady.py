"""How late are messages delivered to a group at a steady 20,000 a second, each acknowledged?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.load import Load
from bench.processes import BenchmarkFailed
from bench.results import Sample

RATE = 20_000
LINGER_MS = 1.0
WARMUP_S = 1.0


def measure(run: Run) -> list[Sample]:
    """An open loop; the figure is the 99th percentile from the moment a message was due to its delivery."""
    load = Load(
        mode="paced",
        reading="messages",
        value_bytes=100,
        rate=RATE,
        warmup_s=WARMUP_S,
        linger_ms=LINGER_MS,
        seconds=run.seconds + WARMUP_S,
        bytes_max=run.bytes_max,
        group="bench",
    )
    with run.broker() as broker:
        latency = run.drive(broker, load).received.latency
    if latency is None:
        raise BenchmarkFailed("a paced producer and its consumer report latencies")
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
    return [Sample(name="queue_e2e_p99_ms_20k", value=latency.p99_ms, unit="ms", conditions=said)]


CASE = Case(("queue_e2e_p99_ms_20k",), 10.0, measure)
