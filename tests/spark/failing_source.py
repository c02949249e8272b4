"""The data source with a stream writer that fails on purpose: workers, drivers and brokers die at its points.

`faults` is JSON of micro-batch numbers and points; in `fault_folder` each leaves a mark when it happens, so
that it happens once, and there the process number of the broker is found.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tailrace.spark.options import write_options
from tailrace.spark.sink.writers import StreamWriter
from tailrace.spark.source.data_source import DefaultSource

FORMAT = "tailrace_failing"
ON_PURPOSE = "failed on purpose"


class FailingSource(DefaultSource):
    """Everything but the stream writer is as usual."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__({name: text for name, text in options.items() if not name.startswith("fault")})
        self.faults = Faults(options)

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        return FailingWriter(self.faults, write_options(self.options, streaming=True), schema, overwrite)


class Faults:
    """What is to happen, and what has happened."""

    def __init__(self, options: Mapping[str, str]) -> None:
        plan: dict[str, list[str]] = json.loads(options["faults"])
        self._plan = {int(batch): points for batch, points in plan.items()}
        self._folder = Path(options["fault_folder"])

    def due(self, batch: int, point: str) -> bool:
        """Whether this is to happen now: then it does not a second time."""
        if point not in self._plan.get(batch, ()):
            return False
        try:
            (self._folder / f"{batch}-{point}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def overtake(self, batch: int) -> None:
        """A second attempt has staged its rows. If the first one still waits, it hears of it."""
        (self._folder / f"{batch}-second").touch()

    def wait_until_overtaken(self, batch: int) -> None:
        """Until another attempt has staged its rows, and some time longer, so that it commits first."""
        deadline_s = time.monotonic() + 60
        while not (self._folder / f"{batch}-second").exists():
            assert time.monotonic() < deadline_s, "there is no other attempt"
            time.sleep(0.05)
        (self._folder / f"{batch}-overtaken").touch()
        time.sleep(2)

    def arm(self, pid: int) -> None:
        """Let the broker kill a process (0: itself) between two partitions; see `falling_broker`."""
        armed = self._folder / "armed.new"
        armed.write_text(str(pid))
        armed.rename(self._folder / "armed")

    def kill_broker(self) -> None:
        """Its process number is in a file, because it changes."""
        os.kill(int((self._folder / "broker").read_text()), signal.SIGKILL)


class FailingWriter(StreamWriter):
    """Dies at the points of the plan: `worker` and `executor` in a task, which at `slow` is only overtaken by
    another attempt; the driver `before` and `after` the
    decision and `between` two partitions' applies; the broker likewise; and `error` behind the decision."""

    def __init__(self, faults: Faults, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.faults = faults

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        batch, first = int(context.getLocalProperty("streaming.sql.batchId")), context.attemptNumber() == 0
        for point in ("worker", "executor", "slow"):
            if first and self.faults.due(batch, point):
                # Everything of this attempt is staged, in another order and not all of it, when it dies or
                # is overtaken.
                rows = pa.Table.from_batches(list(iterator))
                other = rows.take(list(range(rows.num_rows - 1, 0, -1)))
                staged = super().write(iter(other.to_batches()))
                if point == "slow":
                    self.faults.wait_until_overtaken(batch)
                    return staged
                if point == "executor":
                    os.kill(java_above(), signal.SIGKILL)
                die()
        staged = super().write(iterator)
        if not first:
            self.faults.overtake(batch)
        return staged

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        faults = self.faults
        if faults.due(batchId, "before"):
            os.kill(java_above(), signal.SIGKILL)
            die()
        if faults.due(batchId, "broker-before"):
            faults.kill_broker()
        if faults.due(batchId, "between"):
            faults.arm(java_above())
        if faults.due(batchId, "broker-between"):
            faults.arm(0)
        super().commit(messages, batchId)
        if faults.due(batchId, "after"):
            os.kill(java_above(), signal.SIGKILL)
            die()
        if faults.due(batchId, "broker-after"):
            faults.kill_broker()
        if faults.due(batchId, "error"):
            raise RuntimeError(ON_PURPOSE)


def die() -> None:
    """No `finally`, no last words."""
    os.kill(os.getpid(), signal.SIGKILL)


def java_above() -> int:
    """The JVM that this process belongs to: the driver's with a local master, else an executor's."""
    pid = os.getpid()
    while Path(f"/proc/{pid}/comm").read_text().strip() != "java":
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        assert pid > 1, "there is no JVM above this process"
    return pid
