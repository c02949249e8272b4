"""How long does it take to read a stream of one event out of a partition with a million?"""

from __future__ import annotations

from statistics import median

from bench.harness import Case, Run
from bench.results import Sample
from bench.roles.streams import BATCH, STREAMS, StreamJob, StreamReads

EVENTS, READS = 1_000_000, 100
PATIENCE_S = 300.0
NOMINAL_S = 30.0


def measure(run: Run) -> list[Sample]:
    """The median of a hundred reads, one after the other, of a broker that did nothing else."""
    with run.broker() as broker:
        job = StreamJob(url=broker.url, events=run.scaled(EVENTS), reads=READS)
        with run.role("streams", job) as child:
            took = child.answer(StreamReads, PATIENCE_S).took_ms
    said: dict[str, object] = {
        "events": job.events,
        "streams": STREAMS,
        "batch": BATCH,
        "partitions": 1,
        "durability": "fsync",
        "measured": f"median of {READS} reads",
        "worst_ms": round(took[-1], 2),
    }
    return [Sample(name="stream_read_ms", value=median(took), unit="ms", conditions=said)]


CASE = Case(("stream_read_ms",), NOMINAL_S, measure)
