"""How far a pipeline is, for whoever watches, and the wish to stop, for the pipeline: all on the driver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

LOOK_EVERY_S = 0.25


class Stopped(Exception):
    """Somebody asked the pipeline to stop; what it was doing is done again by the next run."""


class PipelineStanding(msgspec.Struct):
    """How far a pipeline is: its step, the rows that are done, and the tasks of the stages under way."""

    step: str = "starting"
    rows: int = 0
    rows_expected: int | None = None
    tasks: int = 0
    tasks_done: int = 0

    def advance(self, rows: int) -> None:
        """So many rows more are done."""
        self.rows += rows


class Progress:
    """Given to a pipeline, which tells it its steps and asks it whether to go on.

    `step` and `done` raise `Stopped` when somebody has asked for that, so a pipeline that calls them between
    its jobs needs nothing else; a job that is under way is cancelled by `supervise`.
    """

    def __init__(self, show: Callable[[PipelineStanding], None] | None = None) -> None:
        self.standing = PipelineStanding()
        self._show = show
        self._stop = threading.Event()

    def step(self, text: str, *, rows: int | None = None) -> None:
        """A step begins; `rows` says how many rows it is going to handle, where that is known."""
        self.check()
        self.standing = PipelineStanding(step=text, rows_expected=rows)
        self.shown()

    def done(self, rows: int) -> None:
        """So many rows more of this step are done."""
        self.standing.advance(rows)
        self.shown()
        self.check()

    def again(self, seconds: float) -> bool:
        """Wait before another round of a pipeline that follows; False when it is to stop instead."""
        self.standing = PipelineStanding(step="waiting for more")
        self.shown()
        return not self._stop.wait(seconds)

    def watch(self, query: StreamingQuery) -> None:
        """Wait until a streaming query has ended, by itself or because it was asked to; raises its error."""
        seen = -1
        ended = False
        while not ended:
            # Spark takes parts of seconds, but says that it does not.
            ended = bool(query.awaitTermination(LOOK_EVERY_S))  # type: ignore[arg-type]
            for batch in query.recentProgress:
                if batch["batchId"] > seen:
                    seen = batch["batchId"]
                    self.standing.advance(batch["numInputRows"])
            self.shown()
            if self.stopping and not ended:
                query.stop()
                return

    @property
    def stopping(self) -> bool:
        """Whether somebody has asked for the end."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask for the end; may be called from any thread and from a signal handler."""
        self._stop.set()

    def check(self) -> None:
        """Raise `Stopped` when somebody has asked for the end."""
        if self.stopping:
            raise Stopped

    def shown(self) -> None:
        """Let whoever watches see how far it is."""
        if self._show is not None:
            self._show(self.standing)


class Supervisor:
    """A thread beside a running pipeline: counts the tasks of its jobs, and cancels them when it is to stop.

    Jobs are cancelled again and again until the pipeline has ended, because one that was about to begin when
    the others were cancelled would otherwise run to its end.
    """

    def __init__(self, session: SparkSession, progress: Progress) -> None:
        self._session = session
        self._progress = progress
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipeline-supervisor", daemon=True)

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]

        try:
            while not self._over.wait(LOOK_EVERY_S):
                self._look()
        except (Py4JError, OSError):
            return  # The JVM is gone; the pipeline itself finds that out, and tells it.

    def _look(self) -> None:
        context = self._session.sparkContext
        if self._progress.stopping:
            context.cancelAllJobs()
            return
        tracker = context.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        standing = self._progress.standing
        standing.tasks = sum(stage.numTasks for stage in stages if stage is not None)
        standing.tasks_done = sum(stage.numCompletedTasks for stage in stages if stage is not None)
        self._progress.shown()
