"""How many messages a second are published, leased, delivered and acknowledged, each on its own?"""

from __future__ import annotations

from typing import Any

from bench.harness import Case, Run
from bench.load import Load
from bench.results import Sample


def measure(run: Run) -> list[Sample]:
    """100-byte messages by `await producer.send(value)`; `async for`, then `ack_nowait()` on each."""
    return [_rate(run, "queue_e2e_100b", mode="send")]


def measure_priorities(run: Run) -> list[Sample]:
    """The same with random priorities, in the weighted mode."""
    return [_rate(run, "mixed_priority_100b", mode="send_varied", priorities=True)]


def measure_keys(run: Run) -> list[Sample]:
    """The same with 100,000 keys, whose order is kept."""
    return [_rate(run, "key_order_100k_keys", mode="send_varied", keys=100_000)]


def measure_shared_keys(run: Run) -> list[Sample]:
    """As with keys, when members share the partitions; without a bar."""
    options = {"assignment": "shared"}
    return [_rate(run, "key_order_100k_keys_shared", mode="send_varied", keys=100_000, group_options=options)]


def _rate(run: Run, name: str, **special: Any) -> Sample:
    load = Load(
        reading="messages",
        value_bytes=100,
        seconds=run.seconds,
        bytes_max=run.bytes_max,
        group="bench",
        **special,
    )
    with run.broker() as broker:
        rate = run.drive(broker, load).received.rate
    limit = run.limit(batch=load.batch, value_bytes=load.value_bytes)
    said: dict[str, object] = {
        "payload_bytes": 100,
        "batch": "by the SDK" if load.mode == "send" else load.batch,
        "durability": "interval",
        "partitions": 1,
        "acks": "ack_nowait on every message; the clock stops when the last ack is stored",
        "group": load.group_options or "defaults",
    }
    return Sample(name=name, value=rate, unit="msg/s", limit=limit, conditions=said)


PLAIN = Case(("queue_e2e_100b",), 10.0, measure)
PRIORITIES = Case(("mixed_priority_100b",), 10.0, measure_priorities)
KEYS = Case(("key_order_100k_keys",), 10.0, measure_keys)
SHARED_KEYS = Case(("key_order_100k_keys_shared",), 10.0, measure_shared_keys)
