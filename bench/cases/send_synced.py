"""What does it cost to sync every message to disk before it is acknowledged, on one partition?"""

from __future__ import annotations

import msgspec

from bench.harness import Case, Run
from bench.load import Load
from bench.results import Sample


def measure(run: Run) -> list[Sample]:
    """64 batches of 500 in flight, with `fsync` and, for comparison, the same with `interval`."""
    load = Load(
        mode="send_many",
        reading="batches",
        value_bytes=100,
        window=64,
        seconds=run.seconds,
        bytes_max=run.bytes_max // 2,
        durability="fsync",
    )
    with run.broker("synced") as broker:
        synced = run.drive(broker, load).received.rate
    with run.broker("unsynced") as broker:
        unsynced = run.drive(broker, msgspec.structs.replace(load, durability="interval")).received.rate
    limit = run.limit(batch=load.batch, value_bytes=load.value_bytes)
    said: dict[str, object] = {
        "payload_bytes": 100,
        "batch": load.batch,
        "batches_in_flight": load.window,
        "durability": "fsync",
        "partitions": 1,
        "interval_msg_s": round(unsynced),
    }
    return [
        Sample(name="e2e_100b_fsync", value=synced, unit="msg/s", limit=limit, conditions=said),
        Sample(name="e2e_100b_fsync_of_interval", value=synced / unsynced, unit="ratio", conditions=said),
    ]


CASE = Case(("e2e_100b_fsync", "e2e_100b_fsync_of_interval"), 10.0, measure)
