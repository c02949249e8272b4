"""What the cases with Spark share: one session for all of them, rows to read, the controls, and clocks."""

from __future__ import annotations

import asyncio
import functools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tailrace
from bench.harness import ROLE_PATIENCE_S, Run
from bench.processes import ROOT, BenchmarkFailed, Broker
from bench.roles.rows import Filled, Filling

ROWS = 3_000_000
VALUE_BYTES = 200
PARTITIONS = 4
KEYS = 100_000
TOPIC = "bench"
MASTER = "local[2]"
CONF = {"spark.log.level": "ERROR", "spark.driver.memory": "2g"}


@functools.cache
def session() -> Any:
    """The one session of this process. It ends with it: Spark's JVM leaves when nobody holds its input."""
    # Workers import the controls; they inherit this from the JVM.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    from bench.spark_controls import ControlSource
    from tailrace.spark import sessions

    made = sessions.session("bench", master=MASTER, conf=CONF)
    made.dataSource.register(ControlSource)
    return made


def conditions(rows: int, **more: object) -> dict[str, object]:
    """What every figure here says of itself."""
    from importlib.metadata import version

    return {
        "rows": rows,
        "payload_bytes": VALUE_BYTES,
        "partitions": PARTITIONS,
        "keys": KEYS,
        "durability": "interval",
        "master": MASTER,
        "pyspark": version("pyspark"),
        "pandas": version("pandas"),
        **more,
    }


def create(broker: Broker, topic: str = TOPIC) -> None:
    """An empty topic."""

    async def made() -> None:
        async with tailrace.connect(broker.url) as client:
            await client.admin().create_topic(topic, partitions=PARTITIONS, durability="interval")

    asyncio.run(made())


def fill(run: Run, broker: Broker, rows: int, topic: str = TOPIC) -> None:
    """A topic with so many rows."""
    create(broker, topic)
    job = Filling(url=broker.url, topic=topic, rows=rows, value_bytes=VALUE_BYTES, keys=KEYS)
    with run.role("rows", job) as role:
        role.answer(Filled, ROLE_PATIENCE_S)


def length(broker: Broker, topic: str = TOPIC) -> int:
    """How many messages were ever stored in a topic."""

    async def asked() -> int:
        async with tailrace.connect(broker.url) as client:
            return sum(await client.admin().find_offsets(topic, "latest"))

    return asyncio.run(asked())


def reading(broker: Broker, **options: object) -> Any:
    """A batch read of the topic."""
    return _with(session().read.format("tailrace"), url=broker.url, topic=TOPIC, **options).load()


def control(rows: int) -> Any:
    """A batch read from memory of as many rows."""
    return _with(session().read.format("bench_control"), **shape(rows)).load()


def shape(rows: int) -> dict[str, object]:
    """Options of the control."""
    return {"rows": rows, "partitions": PARTITIONS, "value_bytes": VALUE_BYTES, "keys": KEYS}


def _with(builder: Any, **options: object) -> Any:
    for name, value in options.items():
        builder = builder.option(name, str(value))
    return builder


def to_noop(frame: Any) -> Callable[[], None]:
    """Everything is computed and nothing kept."""
    return lambda: frame.write.format("noop").mode("overwrite").save()


def to_parquet(frame: Any, folder: Path) -> Callable[[], None]:
    """As the archive is written: zstd."""
    return lambda: frame.write.option("compression", "zstd").parquet(str(folder))


def seconds(action: Callable[[], object]) -> float:
    """How long something takes."""
    before = time.perf_counter()
    action()
    return time.perf_counter() - before


def expect(found: int, rows: int) -> None:
    """Figures of rows that are not there are worth nothing."""
    if found != rows:
        raise BenchmarkFailed(f"{found} rows of {rows}")


def stream(source: str, folder: Path, **options: object) -> tuple[float, list[dict[str, Any]]]:
    """All there is, as a stream to nowhere; seconds from start to end, and the reports of its batches."""
    frame = _with(session().readStream.format(source), **options).load()
    before = time.perf_counter()
    query = (
        frame.writeStream.format("noop")
        .option("checkpointLocation", str(folder))
        .trigger(availableNow=True)
        .start()
    )
    if not query.awaitTermination(ROLE_PATIENCE_S):
        query.stop()
        raise BenchmarkFailed(f"a stream from {source} did not end within {ROLE_PATIENCE_S:.0f} s")
    took = time.perf_counter() - before
    return took, [report for report in map(_plain, query.recentProgress) if report["numInputRows"]]


def _plain(report: Any) -> dict[str, Any]:
    import json

    found: dict[str, Any] = report if isinstance(report, dict) else json.loads(report.json)
    return found


def streamed(reports: list[dict[str, Any]]) -> int:
    """Rows of all batches."""
    return sum(int(report["numInputRows"]) for report in reports)


def batch_ms(reports: list[dict[str, Any]], warm_up: int) -> float:
    """The median duration of a batch, without the first ones."""
    return statistics.median(report["durationMs"]["triggerExecution"] for report in reports[warm_up:])
