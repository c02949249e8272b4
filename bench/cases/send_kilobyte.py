"""How many bytes a second go through, for long enough that the page cache cannot hide the disk?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.load import MB, Load
from bench.results import Sample

VALUE_BYTES = 1024


def measure(run: Run) -> list[Sample]:
    """1 KB values by `send_many` of 500, read by `reader.batches()`; the figure counts bytes of values."""
    load = Load(
        mode="send_many",
        reading="batches",
        value_bytes=VALUE_BYTES,
        seconds=run.seconds,
        bytes_max=run.bytes_max,
    )
    with run.broker() as broker:
        outcome = run.drive(broker, load)
    limit = run.limit(batch=load.batch, value_bytes=VALUE_BYTES)
    said: dict[str, object] = {
        "payload_bytes": VALUE_BYTES,
        "batch": load.batch,
        "durability": "interval",
        "partitions": 1,
        "written_gb": round(outcome.produced.sent * VALUE_BYTES / 1e9, 2),
        "seconds": round(outcome.received.seconds, 1),
    }
    rate = outcome.received.rate * VALUE_BYTES / MB
    return [
        Sample(
            name="e2e_1kb_batched",
            value=rate,
            unit="MB/s",
            limit=limit * VALUE_BYTES / MB,
            conditions=said,
        )
    ]


CASE = Case(("e2e_1kb_batched",), 30.0, measure)
