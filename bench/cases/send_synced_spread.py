"""What does it cost to sync every message to disk when they go to many partitions, so to many files?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.load import Load
from bench.results import Sample


def measure(run: Run) -> list[Sample]:
    """64 batches of 500 in flight over 30 partitions, with `fsync`."""
    load = Load(
        mode="send_many",
        reading="batches",
        value_bytes=100,
        window=64,
        partitions=30,
        seconds=run.seconds,
        bytes_max=run.bytes_max,
        durability="fsync",
    )
    with run.broker() as broker:
        rate = run.drive(broker, load).received.rate
    limit = run.limit(batch=load.batch, value_bytes=load.value_bytes)
    said: dict[str, object] = {
        "payload_bytes": 100,
        "batch": load.batch,
        "batches_in_flight": load.window,
        "durability": "fsync",
        "partitions": load.partitions,
    }
    return [Sample(name="e2e_100b_fsync_30p", value=rate, unit="msg/s", limit=limit, conditions=said)]


CASE = Case(("e2e_100b_fsync_30p",), 10.0, measure)
