"""How many messages a second can one caller publish who waits for each before the next?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.load import Load
from bench.results import Sample


def measure(run: Run) -> list[Sample]:
    """`await producer.publish(value)` in a loop; the limit is a bare server that answers frame by frame."""
    load = Load(
        mode="publish", reading="messages", value_bytes=100, seconds=run.seconds, bytes_max=run.bytes_max
    )
    with run.broker() as broker:
        produced = run.drive(broker, load).produced
    limit = run.limit(batch=1, value_bytes=load.value_bytes, one_by_one=True)
    said: dict[str, object] = {"payload_bytes": 100, "batch": 1, "durability": "interval", "partitions": 1}
    if produced.latency is not None:
        said["p99_ms"] = round(produced.latency.p99_ms, 3)
    rate = produced.sent / produced.seconds
    return [Sample(name="publish_one_at_a_time", value=rate, unit="msg/s", limit=limit, conditions=said)]


CASE = Case(("publish_one_at_a_time",), 10.0, measure)
