"""How fast is a topic archived, beside Spark writing Parquet of such rows from memory?"""

from __future__ import annotations

from bench import spark_bed as bed
from bench.harness import Case, Run
from bench.results import Sample


def measure(run: Run) -> list[Sample]:
    """The pipeline from an empty folder to its manifest; the control has the same columns and no folders."""
    from tailrace.spark.pipelines import parse_options, pipeline
    from tailrace.spark.pipelines.progress import Progress

    rows = run.scaled(bed.ROWS)
    archive = pipeline("archive")
    with run.broker() as broker:
        bed.fill(run, broker, rows)

        def ours(folder: str) -> None:
            options = parse_options(
                archive, {"root": str(run.folder / folder)}, topic=bed.TOPIC, url=broker.url
            )
            archive.run(bed.session(), options, Progress())

        control = bed.control(rows)
        bed.to_parquet(control, run.folder / "warm-control")()
        ours("warm")
        control_s = bed.seconds(bed.to_parquet(control, run.folder / "control"))
        ours_s = bed.seconds(lambda: ours("ours"))
        read = bed.reading(broker, mode="archive", archive=run.folder / "ours", end="latest")
        bed.expect(read.count(), rows)
    said = bed.conditions(
        rows,
        seconds=round(ours_s, 2),
        rows_s=round(rows / ours_s),
        control_rows_s=round(rows / control_s),
    )
    return [Sample(name="spark_archive_vs_parquet", value=control_s / ours_s, unit="ratio", conditions=said)]


CASE = Case(("spark_archive_vs_parquet",), 10.0, measure)
