"""How many messages a second go through when both the producer and the reader work in batches?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.load import Load
from bench.results import Sample


def measure(run: Run) -> list[Sample]:
    """100-byte messages by `send_many` of 500, read by `reader.batches()`."""
    load = Load(
        mode="send_many", reading="batches", value_bytes=100, seconds=run.seconds, bytes_max=run.bytes_max
    )
    with run.broker() as broker:
        rate = run.drive(broker, load).received.rate
    limit = run.limit(batch=load.batch, value_bytes=load.value_bytes)
    said = {"payload_bytes": 100, "batch": load.batch, "durability": "interval", "partitions": 1}
    return [Sample(name="e2e_100b_batched", value=rate, unit="msg/s", limit=limit, conditions={**said})]


CASE = Case(("e2e_100b_batched",), 10.0, measure)
