"""A streaming query from topic to topic through a writer that fails on purpose; also as a driver of its own.

    python -m tests.spark.copying_driver JSON

It copies what there is, and prints `{"done": true}` if it lives to see the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from pyspark import cloudpickle

from tailrace.spark import sessions
from tests.spark import failing_source
from tests.spark.failing_source import FORMAT, FailingSource

END_S = 300


class Copying(msgspec.Struct, frozen=True, kw_only=True):
    """What to copy, and what happens to whom."""

    url: str
    source: str
    target: str
    checkpoint: str
    folder: str
    faults: dict[int, list[str]] = {}
    rows_per_trigger: int
    rows_per_task: int = 0
    timeout_s: float = 30.0
    master: str = "local[2]"
    conf: dict[str, str] = {}

    def run(self, spark: Any) -> None:
        """Copy everything that is there now; raises what the query fails with."""
        # Workers do not find the modules of tests by themselves.
        cloudpickle.register_pickle_by_value(failing_source)
        spark.dataSource.register(FailingSource)
        Path(self.folder).mkdir(exist_ok=True)
        rows = (
            spark.readStream.format("tailrace")
            .option("url", self.url)
            .option("topic", self.source)
            .option("max_rows_per_trigger", self.rows_per_trigger)
            .option("rows_per_partition", self.rows_per_task)
            .load()
        )
        query = (
            rows.select("key", "value", "headers", "timestamp")
            .writeStream.format(FORMAT)
            .option("url", self.url)
            .option("topic", self.target)
            .option("timeout_s", self.timeout_s)
            .option("faults", json.dumps(self.faults))
            .option("fault_folder", self.folder)
            .option("checkpointLocation", self.checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(END_S), f"the query is not through within {END_S} s"
        finally:
            query.stop()


if __name__ == "__main__":
    copying = msgspec.json.decode(sys.argv[1], type=Copying)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_WORKER_DIR"] = copying.checkpoint + "-work"
    conf = {
        "spark.local.dir": copying.checkpoint + "-local",
        "spark.log.level": "ERROR",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # It does not live long.
        **copying.conf,
    }
    session = sessions.session("copying", master=copying.master, conf=conf)
    copying.run(session)
    print(json.dumps({"done": True}), flush=True)
    session.stop()
