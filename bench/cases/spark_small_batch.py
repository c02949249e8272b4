"""How long does a micro-batch of ten rows take, beside one from memory?"""

from __future__ import annotations

from bench import spark_bed as bed
from bench.harness import Case, Run
from bench.results import Sample

BATCH_ROWS = 10
BATCHES = 60
WARM_UP = 20


def measure(run: Run) -> list[Sample]:
    """A stream to nowhere, ten rows at a time; the first twenty batches warm up."""
    rows = BATCH_ROWS * BATCHES
    with run.broker() as broker:
        bed.fill(run, broker, rows)
        place = {"url": broker.url, "topic": bed.TOPIC, "max_rows_per_trigger": BATCH_ROWS}
        _, ours = bed.stream("tailrace", run.folder / "ours", **place)
        bed.expect(bed.streamed(ours), rows)
        # One task, which is the least that Spark can do: so few rows are read by one task here, too.
        memory = {**bed.shape(rows), "partitions": 1, "max_rows_per_trigger": BATCH_ROWS}
        _, control = bed.stream("bench_control", run.folder / "control", **memory)
        bed.expect(bed.streamed(control), rows)
    took_ms, control_ms = bed.batch_ms(ours, WARM_UP), bed.batch_ms(control, WARM_UP)
    said = bed.conditions(
        rows, batches=len(ours), rows_of_a_batch=BATCH_ROWS, warm_up=WARM_UP, control_ms=control_ms
    )
    return [
        Sample(name="spark_small_batch_ms", value=took_ms, unit="ms", conditions=said),
        Sample(
            name="spark_small_batch_vs_control", value=took_ms / control_ms, unit="ratio", conditions=said
        ),
    ]


CASE = Case(("spark_small_batch_ms", "spark_small_batch_vs_control"), 10.0, measure)
