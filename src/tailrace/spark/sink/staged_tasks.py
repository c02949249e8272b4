"""One attempt at one task of a write: its rows are staged under a name of their own, and nobody sees them.

Which attempts win is decided later, on the driver (`tailrace.spark.sink.writers`): until then rows may be
staged again by other attempts, in another order, or more or fewer of them.
"""

from __future__ import annotations

import logging
import secrets
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from tailrace.core.model.commands import DescribeTopic, TopicInfo
from tailrace.core.model.group_facts import Target
from tailrace.core.model.queue_commands import AbortStaged, StageRows
from tailrace.core.staged.staged_versions import grouped_of
from tailrace.errors import NotFound, Overloaded, TailraceError
from tailrace.format.frame import Buffer, crc32c
from tailrace.spark.link import BrokerLink
from tailrace.spark.sink.message_columns import MessageColumns
from tailrace.spark.sink.parcels import Parcel, Sorting, TopicShape

log = logging.getLogger("tailrace.spark")

WINDOW = 8
"""Parcels under way at a time."""
ABORT_S = 5.0
"""How long dropping what was staged is tried; it expires by itself anyway."""
ABORTED_AT_ONCE = 5_000
_TOO_MUCH = (
    "A write is staged as a whole before any of it can be read: write fewer rows at a time (a stream: "
    "max_rows_per_trigger of its source), or to a topic with more partitions"
)


@dataclass(frozen=True)
class PlaceStaged:
    """What an attempt staged on one partition."""

    topic: str
    partition: int
    batches: int
    rows: int
    crc: int
    """Over the checksums of its batches, in order."""


@dataclass(frozen=True)
class TaskStaged(WriterCommitMessage):
    """What one attempt at a task has staged: what the driver decides about."""

    writer: str
    version: int
    spark_partition: int
    attempt: str
    places: list[PlaceStaged]

    @property
    def targets(self) -> list[Target]:
        """As decisions and aborts name them."""
        return [(place.topic, place.partition, self.attempt) for place in self.places]


def attempt_name(version: int, spark_partition: int, attempt_number: int) -> str:
    """A name that no other attempt has, of this or of any other run."""
    return f"{version}-{spark_partition}-{attempt_number}-{secrets.token_hex(4)}"


def stage_task(
    link: BrokerLink,
    columns: MessageColumns,
    batches: Iterable[pa.RecordBatch],
    writer: str,
    version: int,
    task: tuple[int, int],
) -> TaskStaged:
    """Stage all rows of a task (its Spark partition and attempt number) and say what is there. What a failed
    attempt has staged is dropped."""
    spark_partition, attempt_number = task
    staging = _Staging(link, writer, attempt_name(version, spark_partition, attempt_number))
    try:
        for parcel in _parcels(link, columns, batches, spark_partition):
            staging.send(parcel)
        staging.finish()
    except BaseException as error:
        staging.give_up()
        if isinstance(error, Overloaded):
            raise Overloaded(f"{error.message}. {_TOO_MUCH}", **error.details) from error
        raise
    return TaskStaged(writer, version, spark_partition, staging.attempt, staging.places())


def _parcels(
    link: BrokerLink, columns: MessageColumns, batches: Iterable[pa.RecordBatch], spark_partition: int
) -> Iterator[Parcel]:
    sorting = Sorting(columns, lambda topic: _shape(link, topic), spark_partition)
    for batch in batches:
        yield from sorting.add(batch, _now_us())
    yield from sorting.rest(_now_us())


def _now_us() -> int:
    return time.time_ns() // 1000


def _shape(link: BrokerLink, topic: str) -> TopicShape:
    info = link.ask(DescribeTopic(topic))
    assert isinstance(info, TopicInfo)
    return TopicShape(len(info.partitions), info.options["message_bytes_max"])


def abort_places(link: BrokerLink, writer: str, places: Sequence[Target]) -> None:
    """Drop attempts that no decision names; those of a decision stay. What cannot be dropped expires."""
    for at in range(0, len(places), ABORTED_AT_ONCE):
        grouped = grouped_of(places[at : at + ABORTED_AT_ONCE])
        try:
            link.begin(AbortStaged(writer, [], grouped)).result(ABORT_S)
        except (TailraceError, TimeoutError) as error:
            log.warning("what %s has staged is left to expire: %r", writer, error)
            return


class _Sent:
    """A parcel under way; it is kept until the broker has it."""

    def __init__(self, request: StageRows, body: Buffer, answer: Future[Any]) -> None:
        self.request = request
        self.body = body
        self.answer = answer


class _Tally:
    """What was sent to one partition."""

    def __init__(self) -> None:
        self.rows = 0
        self.crcs: list[int] = []


class _Staging:
    """Parcels on their way to the broker, several at a time, and what was sent."""

    def __init__(self, link: BrokerLink, writer: str, attempt: str) -> None:
        self.attempt = attempt
        self._link = link
        self._writer = writer
        self._under_way: deque[_Sent] = deque()
        self._tallies: dict[tuple[str, int], _Tally] = {}

    def send(self, parcel: Parcel) -> None:
        """Send a parcel; waits while too many are under way."""
        topic, partition = parcel.topic, parcel.partition
        tally = self._tallies.setdefault((topic, partition), _Tally())
        number = len(tally.crcs)
        request = StageRows(topic, partition, self._writer, self.attempt, parcel.columns, parcel.crc, number)
        tally.rows += parcel.rows
        tally.crcs.append(parcel.crc)
        self._under_way.append(_Sent(request, parcel.body, self._link.begin(request, parcel.body)))
        if len(self._under_way) > WINDOW:
            self._settle()

    def finish(self) -> None:
        """Wait until the broker has everything."""
        while self._under_way:
            self._settle()

    def _settle(self) -> None:
        sent = self._under_way.popleft()
        try:
            sent.answer.result()
        except NotFound:
            self._under_way.appendleft(sent)
            self._repeat()

    def _repeat(self) -> None:
        """A parcel overtook one that had to be tried again, and was refused because that was missing: wait
        for all, then send those that were refused in their order. What is missing still is lost."""
        waiting, late = list(self._under_way), []
        self._under_way.clear()
        for sent in waiting:
            try:
                sent.answer.result()
            except NotFound:
                late.append(sent)
        for sent in late:
            self._link.ask(sent.request, sent.body)

    def give_up(self) -> None:
        """Drop what was staged."""
        for sent in self._under_way:
            sent.answer.cancel()
        abort_places(self._link, self._writer, [(*place, self.attempt) for place in self._tallies])

    def places(self) -> list[PlaceStaged]:
        """What is staged where, by topic and partition."""
        return [
            PlaceStaged(topic, partition, len(tally.crcs), tally.rows, _joined(tally.crcs))
            for (topic, partition), tally in sorted(self._tallies.items())
        ]


def _joined(crcs: list[int]) -> int:
    return crc32c(struct.pack(f"<{len(crcs)}I", *crcs))
