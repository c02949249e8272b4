"""How many rows a second does Spark write exactly once, beside a sink that only counts them?"""

from __future__ import annotations

from functools import partial

from bench import spark_bed as bed
from bench.harness import Case, Run
from bench.results import Sample

ROUNDS = 3
"""By turns: both take a few seconds, in which a JVM that tidies up makes a difference."""


def measure(run: Run) -> list[Sample]:
    """Keys and values from Parquet into a topic, staged and decided."""
    rows = run.scaled(bed.ROWS)
    bed.to_parquet(bed.control(rows).select("key", "value"), run.folder / "parquet")()
    frame = bed.session().read.parquet(str(run.folder / "parquet"))
    with run.broker() as broker:
        bed.create(broker, "warm")
        bed.create(broker)

        def ours(topic: str, version: int) -> None:
            writer = frame.write.format("tailrace").option("url", broker.url).option("topic", topic)
            writer.option("txn_app_id", "bench").option("txn_version", version).mode("append").save()

        def control() -> None:
            frame.write.format("bench_control").option("rows", rows).mode("append").save()

        control()
        ours("warm", 1)
        control_s = ours_s = 0.0
        for version in range(2, 2 + ROUNDS):
            control_s += bed.seconds(control) / ROUNDS
            ours_s += bed.seconds(partial(ours, bed.TOPIC, version)) / ROUNDS
        bed.expect(bed.length(broker), ROUNDS * rows)
    said = bed.conditions(
        rows,
        rounds=ROUNDS,
        seconds=round(ours_s, 2),
        columns="key,value",
        source="Parquet",
        control_rows_s=round(rows / control_s),
    )
    return [
        Sample(name="spark_write_rows_s", value=rows / ours_s, unit="rows/s", conditions=said),
        Sample(name="spark_write_vs_control", value=control_s / ours_s, unit="ratio", conditions=said),
    ]


CASE = Case(("spark_write_rows_s", "spark_write_vs_control"), 10.0, measure)
