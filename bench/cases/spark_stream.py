"""How fast is a stream of everything there is, beside the same stream from memory?"""

from __future__ import annotations

from bench import spark_bed as bed
from bench.harness import Case, Run
from bench.results import Sample

BATCHES = 3


def measure(run: Run) -> list[Sample]:
    """AvailableNow to nowhere in three batches, start and end of the query included."""
    rows = run.scaled(bed.ROWS)
    limit = -(-rows // BATCHES)
    with run.broker() as broker:
        bed.fill(run, broker, rows)
        place = {"url": broker.url, "topic": bed.TOPIC, "max_rows_per_trigger": limit}
        memory = {**bed.shape(rows), "max_rows_per_trigger": limit}
        bed.stream("bench_control", run.folder / "warm-control", **memory)
        bed.stream("tailrace", run.folder / "warm", **place)
        control_s, reports = bed.stream("bench_control", run.folder / "control", **memory)
        bed.expect(bed.streamed(reports), rows)
        ours_s, reports = bed.stream("tailrace", run.folder / "ours", **place)
        bed.expect(bed.streamed(reports), rows)
    said = bed.conditions(
        rows,
        seconds=round(ours_s, 2),
        batches=len(reports),
        rows_s=round(rows / ours_s),
        control_rows_s=round(rows / control_s),
    )
    return [Sample(name="spark_stream_vs_control", value=control_s / ours_s, unit="ratio", conditions=said)]


CASE = Case(("spark_stream_vs_control",), 10.0, measure)
