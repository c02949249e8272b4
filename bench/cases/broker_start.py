"""How long until a broker serves: on an empty folder, and after a crash with data?"""

from __future__ import annotations

from bench.harness import Case, Run
from bench.load import GB, Load
from bench.results import Sample

PARTITIONS = 10
VALUE_BYTES = 1024
COUNT = 1_200_000


def measure_empty(run: Run) -> list[Sample]:
    """From the start of the process to its ready line."""
    with run.broker() as broker:
        said: dict[str, object] = {"data": "empty folder"}
        return [Sample(name="startup_s", value=broker.startup_s, unit="s", conditions=said)]


def measure_crashed(run: Run) -> list[Sample]:
    """SIGKILL after a gigabyte, then the time to the ready line; every acknowledged message must be there."""
    load = Load(
        mode="send_many",
        reading="batches",
        value_bytes=VALUE_BYTES,
        partitions=PARTITIONS,
        seconds=run.seconds,
        count=run.scaled(COUNT),
        bytes_max=run.bytes_max,
    )
    with run.broker(keep=True) as broker:
        sent = run.drive(broker, load).produced.sent
        broker.kill()
    with run.broker() as broker:
        ready_s = broker.startup_s
        run.reread(broker, load, sent)
    gigabytes = sent * VALUE_BYTES / GB
    said: dict[str, object] = {
        "payload_bytes": VALUE_BYTES,
        "batch": load.batch,
        "durability": "interval",
        "partitions": PARTITIONS,
        "written_gb": round(gigabytes, 3),
        "ready_s": round(ready_s, 3),
        "page_cache": "warm",
    }
    return [Sample(name="recovery_s_per_gb", value=ready_s / gigabytes, unit="s/GB", conditions=said)]


EMPTY = Case(("startup_s",), 1.0, measure_empty)
CRASHED = Case(("recovery_s_per_gb",), 10.0, measure_crashed)
