"""How many rows a second does Spark read from a broker, beside a source in memory and beside Parquet?"""

from __future__ import annotations

from bench import spark_bed as bed
from bench.harness import Case, Run
from bench.results import Sample


def measure(run: Run) -> list[Sample]:
    """All columns to nowhere: from memory, from the broker, and from Parquet of the same rows."""
    rows = run.scaled(bed.ROWS)
    with run.broker() as broker:
        bed.fill(run, broker, rows)
        ours, control = bed.reading(broker), bed.control(rows)
        # Written before the clock starts, so that reader and JVM are warm; as many are read as were sent.
        bed.to_parquet(ours, run.folder / "parquet")()
        parquet = bed.session().read.parquet(str(run.folder / "parquet"))
        bed.expect(parquet.count(), rows)
        bed.expect(control.count(), rows)
        control_s = bed.seconds(bed.to_noop(control))
        ours_s = bed.seconds(bed.to_noop(ours))
        parquet_s = bed.seconds(bed.to_noop(parquet))
    said = bed.conditions(
        rows,
        seconds=round(ours_s, 2),
        columns="all",
        control_rows_s=round(rows / control_s),
        parquet_rows_s=round(rows / parquet_s),
    )
    return [
        Sample(name="spark_read_rows_s", value=rows / ours_s, unit="rows/s", conditions=said),
        Sample(name="spark_read_vs_control", value=control_s / ours_s, unit="ratio", conditions=said),
        Sample(name="spark_read_vs_parquet", value=parquet_s / ours_s, unit="ratio", conditions=said),
    ]


CASE = Case(("spark_read_rows_s", "spark_read_vs_control", "spark_read_vs_parquet"), 10.0, measure)
