"""How many messages a second go through when the caller sends one by one and the SDK batches?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.load import Load
from bench.results import Sample


def measure(run: Run) -> list[Sample]:
    """100-byte messages by `await producer.send(value)`, read by `async for message in reader`."""
    load = Load(
        mode="send", reading="messages", value_bytes=100, seconds=run.seconds, bytes_max=run.bytes_max
    )
    with run.broker() as broker:
        rate = run.drive(broker, load).received.rate
    limit = run.limit(batch=load.batch, value_bytes=load.value_bytes)
    said = {"payload_bytes": 100, "batch": "by the SDK", "limit_batch": load.batch, "durability": "interval"}
    return [
        Sample(
            name="e2e_100b_send", value=rate, unit="msg/s", limit=limit, conditions={**said, "partitions": 1}
        )
    ]


CASE = Case(("e2e_100b_send",), 10.0, measure)
