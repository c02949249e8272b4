"""Progress of pipelines: steps, the wish to stop, and jobs that are cancelled by it.

Covers `spark/pipelines/progress.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tailrace import sync
from tailrace.spark.pipelines.progress import PipelineStanding, Progress, Stopped, Supervisor
from tests.cli.conftest import invoke
from tests.e2e.broker_process import SRC, BrokerProcess
from tests.spark import process_tree
from tests.spark.conftest import MakeTopic

pytestmark = pytest.mark.timeout(300)


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
    seen: list[PipelineStanding] = []

    def show(standing: PipelineStanding) -> None:
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


SLOW = """
import time
from pyspark.sql import functions as F

def slow(events):
    late = F.udf(lambda number: time.sleep(120), "string")
    return events.select(late("offset").alias("x"))
"""
FOLLOWS = ["-o", "sql=SELECT offset FROM events", "--follow"]


def test_a_signal_ends_a_run_that_follows(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic, tmp_path: Path
) -> None:
    events = topic(partitions=1)
    with client.producer(events) as producer:
        producer.send(b"x")
    first = tmp_path / "t" / "_tailrace" / f"{1:020}.json"
    over = threading.Event()

    def send_when_written() -> None:
        while not over.wait(0.05):
            if first.exists():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    sender = threading.Thread(target=send_when_written)
    sender.start()
    before = signal.getsignal(signal.SIGTERM)
    try:
        words = ["--topic", events, "--url", broker.url, "-o", f"table={tmp_path / 't'}", *FOLLOWS]
        done = invoke("pipeline", "run", "project", *words)
    finally:
        over.set()
        sender.join()
    assert (done.status, signal.getsignal(signal.SIGTERM)) == (0, before), done.err
    assert "stopped; the next run goes on from here" in done.err
    assert not spark.sparkContext._jsc.sc().isStopped()


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "until", "number", "status"),
    [
        (FOLLOWS, "waiting for more", signal.SIGTERM, 0),
        (FOLLOWS, "waiting for more", signal.SIGINT, 130),
        (["-o", "function=slow_views:slow"], "1 events", signal.SIGTERM, 143),
        (["-o", "function=slow_views:slow"], "1 events", signal.SIGINT, 130),
        (["-o", "function=slow_views:slow"], "1 events", signal.SIGKILL, 1),
    ],
)
def test_signals_end_a_run_cleanly(
    arguments: list[str],
    until: str,
    number: int,
    status: int,
    broker: BrokerProcess,
    client: sync.Client,
    topic: MakeTopic,
    tmp_path: Path,
) -> None:
    events = topic(partitions=1)
    with client.producer(events) as producer:
        producer.send(b"x")
    (tmp_path / "slow_views.py").write_text(SLOW)
    command = ["pipeline", "run", "project", "--topic", events, "--url", broker.url, "-o", "table=t"]
    running = subprocess.Popen(
        [sys.executable, "-m", "tailrace.cli", *command, "--master", "local[2]", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SRC},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    seen: list[Any] = []
    try:
        assert running.stderr is not None
        said = ""
        while until not in said:
            line = running.stderr.readline()
            assert line, said
            said += line
        seen = process_tree.tree(running.pid)
        assert "java" in map(process_tree.name, seen)
        if number == signal.SIGINT:
            os.killpg(running.pid, number)  # As a terminal does: everybody gets it.
        elif number == signal.SIGTERM:
            running.send_signal(number)
        else:
            process_tree.kill([one for one in seen if process_tree.name(one) == "java"])
        out, err = running.communicate(timeout=100)
        assert running.returncode == status, said + err
        if number == signal.SIGKILL:  # The library between Spark and Python may have logged a traceback.
            assert "\nerror: the JVM of Spark has ended with -9\nhint: run it again" in "\n" + err
        else:
            assert "Traceback" not in err, err
        assert ("stopped; the next run goes on from here" in err) == (number != signal.SIGKILL)
        assert ("rounds" in out) == ("--follow" in arguments)
        assert process_tree.gone(seen, 20.0)
    finally:
        process_tree.kill(seen or process_tree.tree(running.pid))
        running.wait()
