"""The suite of Spark: every bar has a case, and the control has the shape of the real source."""

import pytest

from bench import spark_controls
from bench.spark import BARS, SUITE
from tailrace.format.tabular import POSITIONED


def test_every_bar_is_measured() -> None:
    measured = [name for case in SUITE.cases for name in case.figures]
    assert sorted(measured) == sorted(bar.name for bar in BARS)


@pytest.mark.parametrize("rows", [0, 3, 10, 100_001])
def test_the_control_yields_the_rows_it_is_asked_for(rows: int) -> None:
    options = {"rows": str(rows), "partitions": "4", "value_bytes": "5", "keys": "3"}
    reader = spark_controls.ControlSource(options).reader(schema=None)  # type: ignore[arg-type]
    parts = reader.partitions()
    assert len(parts) == 4
    batches = [batch for part in parts for batch in reader.read(part)]
    assert sum(batch.num_rows for batch in batches) == rows
    assert all(batch.schema.equals(POSITIONED) for batch in batches)


def test_the_stream_of_the_control_goes_on_by_its_limit() -> None:
    options = {"rows": "25", "partitions": "2", "value_bytes": "5", "max_rows_per_trigger": "10"}
    stream = spark_controls.ControlSource(options).streamReader(schema=None)  # type: ignore[arg-type]
    limit, at, rows = stream.getDefaultReadLimit(), stream.initialOffset(), []
    while (end := stream.latestOffset(at, limit)) != at:
        rows.append([part.rows for part in stream.partitions(at, end)])  # type: ignore[attr-defined]
        at = end
    assert rows == [[5, 5], [5, 5], [3, 2]]
