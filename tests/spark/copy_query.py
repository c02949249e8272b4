"""A driver for tests: a streaming query that copies one topic to another, in a process that may be killed.

`python -m tests.spark.copy_query SPEC`, with SPEC as JSON: master, url, source, target, checkpoint, and
`read`, the further options of the read. It says `{"ready": …}`. To each line on its standard input it waits
until the query has nothing left to do, and answers with the number of task attempts that failed, and with the
errors that ended the query, which is started again on the same checkpoint every time.

Where a file `hold` lies beside the checkpoint, the next first attempt at a task renames it to `held` and
stops in the middle of its rows, until it is killed.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException

from tailrace.spark import sessions

STAGES_LOOKED_AT = 1_000


class Holding:
    """Passes rows through, in workers."""

    def __init__(self, folder: Path) -> None:
        self._hold = folder / "hold"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        first = context is not None and context.attemptNumber() == 0
        for batch in batches:
            yield batch.slice(0, 1)
            if first and self._hold.exists():
                self._hold.rename(self._hold.with_name("held"))
                signal.pause()
            yield batch.slice(1)


class Copy:
    """The query and its restarts."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        conf = {"spark.log.level": "ERROR", "spark.local.dir": f"{spec['checkpoint']}-local"}
        self.spark = sessions.session("copy", master=spec["master"], conf=conf)
        self.errors: list[str] = []
        self.query = self._start()

    def _start(self) -> Any:
        spec = self._spec
        read = self.spark.readStream.format("tailrace").options(
            url=spec["url"], topic=spec["source"], **spec["read"]
        )
        rows = read.load().select("key", "value")
        held = rows.mapInArrow(Holding(Path(spec["checkpoint"]).parent), rows.schema)
        write = held.writeStream.format("tailrace").options(url=spec["url"], topic=spec["target"])
        return write.option("checkpointLocation", spec["checkpoint"]).start()

    def drain(self) -> None:
        """Until everything that is there now is copied."""
        while True:
            try:
                self.query.processAllAvailable()
                return
            except StreamingQueryException as error:
                self.errors.append(str(error)[:2000])
                self.query = self._start()

    def failed_tasks(self) -> int:
        """Attempts of tasks that failed so far."""
        tracker = self.spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(number) for number in range(STAGES_LOOKED_AT)]
        return sum(stage.numFailedTasks for stage in stages if stage is not None)


def main() -> None:
    """See the module."""
    copy = Copy(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        copy.drain()
        print(json.dumps({"failed_tasks": copy.failed_tasks(), "errors": copy.errors}), flush=True)


if __name__ == "__main__":
    main()
