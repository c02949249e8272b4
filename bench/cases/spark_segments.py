"""How many rows a second does Spark read from sealed segments, and is that as fast as from the broker?"""

from __future__ import annotations

import json

from bench import spark_bed as bed
from bench.harness import Case, Run
from bench.processes import BenchmarkFailed
from bench.results import Sample

MORE = 1.5
"""The last segment of a partition is not sealed: with so many rows more, enough of them are."""
FILLED_MIN = 1_600_000
"""In a quick run: with fewer rows, no segment would be sealed."""


def measure(run: Run) -> list[Sample]:
    """Offset and value to nowhere: the same rows by the broker, and then from its files."""
    wanted = run.scaled(bed.ROWS)
    filled = max(FILLED_MIN, int(wanted * MORE))
    with run.broker() as broker:
        bed.fill(run, broker, filled)
        files = {"mode": "segments", "data": run.folder / "data"}
        by_files = bed.reading(broker, columns="offset,value", **files)
        ends = (
            bed.reading(broker, columns="partition,offset", **files)
            .groupBy("partition")
            .agg({"offset": "max"})
            .collect()
        )
        end = {bed.TOPIC: {str(partition): last + 1 for partition, last in ends}}
        by_broker = bed.reading(broker, columns="offset,value", end=json.dumps(end))
        sealed = by_files.count()
        if not 0 < sealed <= filled or (run.scale >= 1 and sealed < wanted):
            raise BenchmarkFailed(f"{sealed} of {filled} rows are in sealed segments")
        bed.expect(by_broker.count(), sealed)
        broker_s = bed.seconds(bed.to_noop(by_broker))
        took_s = bed.seconds(bed.to_noop(by_files))
    rate = sealed / took_s
    said = bed.conditions(
        sealed, seconds=round(took_s, 2), columns="offset,value", broker_rows_s=round(sealed / broker_s)
    )
    return [
        Sample(name="spark_segments_rows_s", value=rate, unit="rows/s", conditions=said),
        Sample(name="spark_segments_vs_broker", value=broker_s / took_s, unit="ratio", conditions=said),
    ]


CASE = Case(("spark_segments_rows_s", "spark_segments_vs_broker"), 10.0, measure)
