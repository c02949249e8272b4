"""How much memory of its own does a broker need, whatever has gone through it?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.load import Load
from bench.processes import AnonymousPeak
from bench.results import Sample

PARTITIONS = 10
SMALL_BYTES, SMALL_COUNT, SMALL_BATCH = 100, 10_000_000, 500
LARGE_BYTES, LARGE_COUNT, LARGE_BATCH = 10 * 1024, 800_000, 100
# About how long the full counts take; a run of fewer seconds sends a smaller share of them.
NOMINAL_S = 20.0


def _anonymous(run: Run, suffix: str, *, value_bytes: int, count: int, batch: int) -> list[Sample]:
    load = Load(
        mode="send_many",
        reading="batches",
        value_bytes=value_bytes,
        batch=batch,
        partitions=PARTITIONS,
        seconds=run.seconds,
        count=run.scaled(count),
        bytes_max=run.bytes_max,
    )
    with run.broker() as broker, AnonymousPeak(broker.pid) as peak:
        sent = run.drive(broker, load).produced.sent
        final_mb = broker.anon_mb()
    said: dict[str, object] = {
        "payload_bytes": value_bytes,
        "batch": batch,
        "durability": "interval",
        "partitions": PARTITIONS,
        "messages": sent,
        "written_gb": round(sent * value_bytes / 1e9, 2),
        "startup_mb": round(peak.first_mb, 1),
    }
    return [
        Sample(name=f"broker_anon_mb_{suffix}", value=final_mb, unit="MB", conditions=said),
        Sample(name=f"broker_anon_peak_mb_{suffix}", value=peak.mb, unit="MB", conditions=said),
    ]


def measure_small(run: Run) -> list[Sample]:
    """RssAnon after ten million messages of 100 bytes, and its peak on the way."""
    return _anonymous(run, "10m", value_bytes=SMALL_BYTES, count=SMALL_COUNT, batch=SMALL_BATCH)


def measure_large(run: Run) -> list[Sample]:
    """The same with values of 10 KB."""
    return _anonymous(run, "10kb", value_bytes=LARGE_BYTES, count=LARGE_COUNT, batch=LARGE_BATCH)


SMALL = Case(("broker_anon_mb_10m", "broker_anon_peak_mb_10m"), NOMINAL_S, measure_small)
LARGE = Case(("broker_anon_mb_10kb", "broker_anon_peak_mb_10kb"), NOMINAL_S, measure_large)
