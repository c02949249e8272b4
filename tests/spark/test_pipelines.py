"""Progress of pipelines: steps, the wish to stop, and jobs that are cancelled by it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tailrace.spark.pipelines.progress import Progress, Standing, Stopped, Supervisor


def test_steps_are_shown_until_somebody_says_stop() -> None:
    shown: list[tuple[str, int]] = []
    progress = Progress(lambda standing: shown.append((standing.step, standing.rows)))
    progress.step("one", rows=10)
    progress.done(4)
    progress.done(6)
    progress.step("two")
    assert shown == [("one", 0), ("one", 4), ("one", 10), ("two", 0)]
    progress.stop()
    for ask in (lambda: progress.step("three"), lambda: progress.done(1), progress.check):
        with pytest.raises(Stopped):
            ask()
    assert progress.stopping
    assert not progress.again(3600.0)


def test_another_round_is_waited_for() -> None:
    progress = Progress()
    assert progress.again(0.0)
    assert progress.standing.step == "waiting for more"
    waiting = threading.Thread(target=lambda: progress.again(3600.0), daemon=True)
    waiting.start()
    progress.stop()
    waiting.join(10.0)
    assert not waiting.is_alive()


def test_jobs_are_counted_and_cancelled(spark: Any) -> None:
    seen: list[Standing] = []

    def show(standing: Standing) -> None:
        if standing.tasks:
            seen.append(standing)
            progress.stop()

    progress = Progress(show)
    progress.step("for ever")
    endless = spark.sparkContext.parallelize(range(2), 2).map(lambda _: threading.Event().wait(60))
    with pytest.raises(Exception, match="cancelled"), Supervisor(spark, progress):
        endless.count()
    assert seen[0].tasks == 2
    assert progress.stopping


def test_a_query_that_follows_is_stopped(spark: Any, tmp_path: Any) -> None:
    progress = Progress(lambda standing: standing.rows > 0 and progress.stop())  # type: ignore[arg-type, func-returns-value]
    rate = spark.readStream.format("rate").option("rowsPerSecond", "1000").load()
    query = rate.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    progress.watch(query)
    assert not query.isActive
    assert progress.standing.rows > 0


def test_the_error_of_a_query_is_raised(spark: Any, tmp_path: Any) -> None:
    rate = spark.readStream.format("rate").option("rowsPerSecond", "1000").load()
    failing = rate.selectExpr("raise_error('it went wrong')")
    query = failing.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(Exception, match="it went wrong"):
        Progress().watch(query)
