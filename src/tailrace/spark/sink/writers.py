"""Writers of the data source: every task stages its rows, and one decision on the driver makes them messages.

A decision is for a *version* of a *writer*: a micro-batch of a query, or `txn_version` of `txn_app_id`. It is
made once, whatever fails and is repeated around it; a version that was decided before, or is older than the
last one decided, succeeds and writes nothing. Tasks are written in the order of the DataFrame's partitions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from tailrace.client.sdk_tuning import PAUSE_S_MAX, PAUSE_S_MIN
from tailrace.core.core_tuning import TARGET_BYTES_MAX, TARGETS_MAX
from tailrace.core.model.group_facts import TargetGroup
from tailrace.core.model.queue_commands import DecideStaged, StagedDecision
from tailrace.core.staged.staged_batches import bad_name
from tailrace.core.staged.staged_versions import grouped_of
from tailrace.errors import InvalidRequest, NotFound, TailraceError, Timeout, TooLarge
from tailrace.spark.link import BrokerLink, link_to
from tailrace.spark.options import WriteOptions
from tailrace.spark.sink.message_columns import MessageColumns, message_columns
from tailrace.spark.sink.staged_tasks import TaskStaged, abort_places, stage_task

log = logging.getLogger("tailrace.spark")

APPLY_S = 0.1
"""How much longer than for a call we wait for a decision, for each batch that was staged (some 1 MB)."""
_GONE = (
    "What tasks had staged has expired, or went with a broker that crashed (durability fsync keeps "
    "it): nothing is written, run it again"
)


class BatchWriter(DataSourceArrowWriter):
    """`df.write.format("tailrace")`: exactly once for each (txn_app_id, txn_version), else once per run.

    Without these two, nothing tells a rerun from a new write, and it writes everything again.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        _refuse_overwrite(overwrite)
        self.columns = _columns(options, schema)
        self.options = options
        self.repeatable = options.txn_version is not None
        self.version = 0 if options.txn_version is None else options.txn_version
        self.writer = f"spark-batch-{uuid4()}"
        if self.repeatable:
            # The topic belongs to the name: the same version may be written to several topics.
            self.writer = f"{options.txn_app_id}:{options.topic or '*'}"
            problem = bad_name("txn_app_id, with the topic", self.writer)
            if problem is not None:
                raise InvalidRequest(problem.message)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: stage its rows."""
        return _stage(self.options, self.columns, iterator, self.writer, self.version)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, when all tasks have ended well: decide."""
        staged = _whole(messages, self.version)
        if not self.repeatable and not any(task.places for task in staged):
            return
        link = link_to(self.options.url, self.options.timeout_s)
        decide(link, self.writer, self.version, staged)
        if not self.repeatable:
            _let_forget(link, self.writer, self.version)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """On the driver, after something failed: drop what tasks have staged, unless it was decided."""
        abort(self.options, messages)


class StreamWriter(DataSourceStreamArrowWriter):
    """`df.writeStream.format("tailrace")`: exactly once for each micro-batch of a checkpoint.

    A new checkpoint is a new query: it writes again what the old one has written.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        _refuse_overwrite(overwrite)
        self.columns = _columns(options, schema)
        self.options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """In a task: stage its rows. Only here Spark tells which query this is."""
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context is not None else None
        version = context.getLocalProperty("streaming.sql.batchId") if context is not None else None
        if query is None or version is None:
            raise InvalidRequest("a stream writer works only in a task of a streaming query")
        return _stage(self.options, self.columns, iterator, f"spark-{query}", int(version))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver, when all tasks have ended well: decide. A batch without tasks has nothing to."""
        staged = _whole(messages, batchId)
        if staged:
            decide(link_to(self.options.url, self.options.timeout_s), staged[0].writer, batchId, staged)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """On the driver, after something failed: drop what tasks have staged, unless it was decided."""
        abort(self.options, messages)


def decide(link: BrokerLink, writer: str, version: int, staged: Sequence[TaskStaged]) -> StagedDecision:
    """Decide a version for these attempts, unless that was done before; returns when every partition has
    what was decided."""
    in_order = sorted(staged, key=lambda task: task.spark_partition)
    grouped = grouped_of([target for task in in_order for target in task.targets])
    batches = [place.batches for task in in_order for place in task.places]
    _require_room(grouped, len(staged))
    try:
        decision = _applied(link, DecideStaged(writer, version, [], batches, grouped))
    except NotFound as error:
        raise NotFound(f"version {version} of {writer}: {error.message}. {_GONE}", **error.details) from error
    if not decision.won:
        text = "version %d of %s: nothing is written, because version %d was decided before"
        log.warning(text, version, writer, decision.version)
    return decision


def _applied(link: BrokerLink, request: DecideStaged) -> StagedDecision:
    """Ask until every partition has what was decided, which for a large write takes longer than a call."""
    patience_s = link.timeout_s + APPLY_S * sum(request.batches)
    deadline_s = time.monotonic() + patience_s
    pause_s = PAUSE_S_MIN
    while True:
        try:
            decision = link.ask(request)
        except Timeout:
            if time.monotonic() > deadline_s:
                raise
            continue
        assert isinstance(decision, StagedDecision)
        if decision.applied:
            return decision
        if time.monotonic() + pause_s > deadline_s:
            raise Timeout(
                f"version {decision.version} of {request.writer} is decided, and not on all partitions "
                f"within {patience_s:g} s; the broker goes on with it, and repeating the write adds nothing"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


def abort(options: WriteOptions, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Drop what these attempts have staged; what was decided stays, because the broker knows better."""
    staged = [message for message in messages if isinstance(message, TaskStaged) and message.places]
    if not staged:
        return
    try:
        link = link_to(options.url, options.timeout_s)
    except TailraceError as error:
        log.warning("what %s has staged is left to expire: %s", staged[0].writer, error)
        return
    abort_places(link, staged[0].writer, [target for task in staged for target in task.targets])


def _refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise InvalidRequest(
            "mode overwrite: messages of a topic cannot be replaced; write with mode append "
            "(a stream: output mode append)"
        )


def _columns(options: WriteOptions, schema: StructType) -> MessageColumns:
    kinds = {field.name: field.dataType.simpleString() for field in schema.fields}
    if len(kinds) < len(schema.fields):
        raise InvalidRequest(f"columns: one is there twice among {', '.join(schema.fieldNames())}")
    return message_columns(kinds, options.topic, options.keep_partition)


def _stage(
    options: WriteOptions,
    columns: MessageColumns,
    batches: Iterator[pa.RecordBatch],
    writer: str,
    version: int,
) -> TaskStaged:
    context = TaskContext.get()
    if context is None:
        raise InvalidRequest("a writer works only in a task of Spark")
    link = link_to(options.url, options.timeout_s)
    task = context.partitionId(), context.attemptNumber()
    return stage_task(link, columns, batches, writer, version, task)


def _whole(messages: Sequence[WriterCommitMessage | None], version: int) -> list[TaskStaged]:
    """The messages of all tasks; raises when one is missing or belongs to something else, because a decision
    without it would lose its rows."""
    staged = [message for message in messages if isinstance(message, TaskStaged)]
    tasks = {task.spark_partition for task in staged}
    writers = {task.writer for task in staged}
    if len(staged) < len(messages) or len(tasks) < len(staged) or len(writers) > 1:
        text = f"{len(messages)} tasks, {len(staged)} messages, partitions {sorted(tasks)}, writers {writers}"
        raise InvalidRequest(f"commit: not one message of each task: {text}")
    if any(task.version != version for task in staged):
        raise InvalidRequest(
            f"commit: messages of {sorted({task.version for task in staged})}, not {version}"
        )
    return staged


def _require_room(grouped: Sequence[TargetGroup], tasks: int) -> None:
    places = sum(len(partitions) for _, _, partitions in grouped)
    nbytes = sum(len(attempt) + len(topic) + 16 + 5 * len(places) for attempt, topic, places in grouped)
    share = max(places / TARGETS_MAX, nbytes / TARGET_BYTES_MAX)
    if share > 1:
        raise TooLarge(
            f"{tasks} tasks write to {places} places (tasks × partitions) together, more than one decision "
            f"holds ({TARGETS_MAX} places, {TARGET_BYTES_MAX} bytes of names): use fewer tasks, as with "
            f"df.coalesce({max(1, int(tasks / share))}), or write in several steps",
            limit=TARGETS_MAX,
        )


def _let_forget(link: BrokerLink, writer: str, version: int) -> None:
    """Nobody asks for this writer again: an empty decision takes the place of the names in the last one."""
    try:
        link.ask(DecideStaged(writer, version + 1, []))
    except TailraceError as error:
        log.warning("writer %s stays remembered for some days: %s", writer, error)
