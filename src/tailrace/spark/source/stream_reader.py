"""Stream reads: the data source as Spark's micro-batches see it.

Spark's checkpoint has the position (see `stream_plan`), and a restart goes on exactly there; the option
`start` counts for a new checkpoint only. One object of this class plans all batches of a query, in a process
of its own beside the driver; copies of it read, in the workers, and know nothing but the options.

A topic that was deleted and made anew is recognised by its id when the next batch is planned. Messages that
were trimmed before they were read are noticed then, too, or by the worker that finds them gone.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from tailrace.client.queue.membership import client_name
from tailrace.core.model.commands import DescribeTopic, TopicInfo
from tailrace.core.model.group_commands import DescribeGroup, JoinGroup
from tailrace.core.model.queue_commands import Commit
from tailrace.errors import Fenced, InvalidRequest, NotFound
from tailrace.spark.link import BrokerLink, link_to
from tailrace.spark.options import ReadOptions
from tailrace.spark.source import stream_plan as plan
from tailrace.spark.source.log_spans import Place
from tailrace.spark.source.row_batches import check_schema, row_batches, unexpired
from tailrace.spark.source.slice_frames import frames_of
from tailrace.spark.source.slices import cut

log = logging.getLogger("tailrace.spark")
MEMBER = "spark"
"""The member that commits for a query. It is always the same: a query that starts again takes over at once
what an earlier life of it had."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads the micro-batches of one query."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._columns: list[str] = schema.fieldNames()
        check_schema(self._columns, [field.dataType.simpleString() for field in schema.fields])
        self._heads: plan.Heads = {}
        self._looked = False
        self._target = False
        self._told: list[str] = []
        self._commits = GroupCommits(options.group) if options.group else None

    def _link(self) -> BrokerLink:
        return link_to(self._options.url, self._options.timeout_s)

    # -- where to begin, and how far to go

    def initialOffset(self) -> dict[str, Any]:
        """Where a new checkpoint begins; raises `NotFound` for a topic that is not there."""
        heads = self._now()
        for topic in self._options.topics:
            if topic not in heads:
                raise NotFound(f"topic: there is no topic {topic!r} at {self._options.url}", topic=topic)
        ask = cache(self._link().offsets)
        position, losses = plan.begin(heads, self._options, lambda place, us: ask(place[0], us)[place[1]])
        self._lost(losses)
        return plan.encode(position)

    def getDefaultReadLimit(self) -> ReadLimit:
        """What `max_rows_per_trigger` says."""
        rows = self._options.max_rows_per_trigger
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """From here on nothing is read that is not there now."""
        self._look()
        self._target = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the next micro-batch ends. It costs one call to the broker for each topic.

        Spark asks when it is through with everything below `start`, so that is committed to the group here.
        It would call `commit` only when it has planned one more batch, and never for the last one."""
        position = plan.decode(start)
        heads = self._now()
        aligned, losses = plan.align(position, heads)
        self._lost(losses)
        if self._commits is not None:
            self._commits.store(self._link(), aligned)
        rows_max = limit.max_rows if isinstance(limit, ReadMaxRows) else 0
        return plan.encode(plan.advance(position, aligned, heads, rows_max))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The ends of the topics when they were last looked at, for the progress of the query."""
        return plan.encode(plan.ends_of(self._heads)) if self._looked else None

    def _now(self) -> plan.Heads:
        """The topics as they are, or as they were when a query that stops at the end began."""
        if not self._target:
            self._look()
        return self._heads

    def _look(self) -> None:
        link, topics = self._link(), self._options.topics
        if self._options.pattern:
            matches = re.compile(self._options.pattern).fullmatch
            topics = [info.name for info in link.topics() if matches(info.name)]
        answers = {topic: link.begin(DescribeTopic(topic)) for topic in topics}
        heads = {}
        for topic, answer in answers.items():
            try:
                info = answer.result()[0]
            except NotFound:
                continue  # Whether that is a loss or a wrong name, the caller knows.
            assert isinstance(info, TopicInfo)
            heads[topic] = plan.Head.of(info)
        self._heads, self._looked = heads, True

    def _lost(self, losses: list[str]) -> None:
        """Raise or tell what is lost, the same only once."""
        if losses and self._options.fail_on_data_loss:
            shown = "; ".join(losses[:10]) + ("; …" if len(losses) > 10 else "")
            raise NotFound(
                f"messages are gone: {shown}. To go on with what is there, set "
                "fail_on_data_loss=false; to begin anew, take a new checkpoint"
            )
        if losses != self._told:
            for loss in losses:
                log.warning("%s; the query goes on with what is there", loss)
        self._told = losses

    # -- reading

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of a micro-batch, ordered by topic, partition and offset."""
        before, after = plan.decode(start), plan.decode(end)
        spans = plan.spans_between(before, after)
        if not self._looked:
            self._look()  # A batch that an earlier life of the query had planned.
        spans, losses = plan.readable(spans, after, self._heads)
        self._lost(losses)
        rows_max = self._options.rows_per_partition
        return [*plan.bundle(cut(spans, rows_max), min(rows_max or plan.BUNDLE_ROWS, plan.BUNDLE_ROWS))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, in a worker. Spark makes a task without slices when there are no others."""
        if not isinstance(partition, plan.Bundle):
            return
        options, link = self._options, self._link()
        choose = [unexpired(time.time_ns() // 1000)] if options.skip_expired else []
        for part in partition.slices:
            frames = frames_of(link, part, fail_on_data_loss=options.fail_on_data_loss)
            yield from row_batches(frames, part, self._columns, choose)


class GroupCommits:
    """Positions of a query, committed to a group of mode `stream`: for people and tools that watch its lag.
    The query itself never reads them. A group belongs to one query; other members are not tolerated."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._stored: dict[Place, int] = {}
        self._generations: dict[Place, int] = {}

    def store(self, link: BrokerLink, position: plan.Position) -> None:
        """Commit what has changed since the last time."""
        wanted = {
            (topic, partition): offset
            for topic, reached in position.items()
            for partition, offset in reached.offsets.items()
        }
        news = {place: offset for place, offset in wanted.items() if self._stored.get(place) != offset}
        if not news:
            return
        if not news.keys() <= self._generations.keys():
            self._join(link, sorted(position))
        try:
            self._store(link, news)
        except (Fenced, NotFound):
            # Silent for longer than a session, or somebody has moved or deleted the group.
            self._join(link, sorted(position))
            self._store(link, wanted)

    def _join(self, link: BrokerLink, topics: list[str]) -> None:
        try:
            members = [row["member"] for row in link.ask(DescribeGroup(self._group)).members]
        except NotFound:
            members = []
        if others := [member for member in members if member != MEMBER]:
            raise InvalidRequest(
                f"group: {self._group!r} has members ({', '.join(others[:5])}); a query needs one of its own"
            )
        request = JoinGroup(self._group, MEMBER, topics, {"mode": "stream"}, client=client_name())
        self._generations = {(topic, p): generation for topic, p, generation in link.ask(request).owned}

    def _store(self, link: BrokerLink, offsets: dict[Place, int]) -> None:
        for topic in sorted({topic for topic, _ in offsets}):
            places = {place: offset for place, offset in offsets.items() if place[0] == topic}
            stored = [(place[1], self._generations.get(place, 0), offset) for place, offset in places.items()]
            link.ask(Commit(topic, self._group, MEMBER, stored))
            self._stored.update(places)
