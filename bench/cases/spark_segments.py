"""How many rows a second does Spark read from sealed segments, and is that as fast as from the broker?"""

from __future__ import annotations

from bench import spark_bed as bed
from bench.harness import Case, Run
from bench.processes import BenchmarkFailed
from bench.results import Sample

MORE = 1.5
"""The last segment of a partition is not sealed: with so many rows more, enough of them are."""
FILLED_MIN = 1_600_000
"""In a quick run: with fewer rows, no segment would be sealed."""


def measure(run: Run) -> list[Sample]:
    """Offset and value to nowhere, by the broker and then from its files."""
    wanted = run.scaled(bed.ROWS)
    filled = max(FILLED_MIN, int(wanted * MORE))
    with run.broker() as broker:
        bed.fill(run, broker, filled)
        by_broker = bed.reading(broker, columns="offset,value")
        by_files = bed.reading(broker, columns="offset,value", mode="segments", data=run.folder / "data")
        bed.expect(by_broker.count(), filled)
        sealed = by_files.count()
        if not 0 < sealed <= filled or (run.scale >= 1 and sealed < wanted):
            raise BenchmarkFailed(f"{sealed} of {filled} rows are in sealed segments")
        broker_rate = filled / bed.seconds(bed.to_noop(by_broker))
        took_s = bed.seconds(bed.to_noop(by_files))
    rate = sealed / took_s
    said = bed.conditions(
        sealed, seconds=round(took_s, 2), columns="offset,value", broker_rows_s=round(broker_rate)
    )
    return [
        Sample(name="spark_segments_rows_s", value=rate, unit="rows/s", conditions=said),
        Sample(name="spark_segments_vs_broker", value=rate / broker_rate, unit="ratio", conditions=said),
    ]


CASE = Case(("spark_segments_rows_s", "spark_segments_vs_broker"), 10.0, measure)
