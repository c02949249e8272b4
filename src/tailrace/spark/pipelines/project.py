"""The pipeline `project`: a function or SQL turns a topic of events into a table or a topic, step by step.

Each round reads the events that are new and hands them to the program. In mode `append` what it makes of them
is added to the result. In mode `replace` it gets the previous table as well and makes the whole new one, so
that it can go on with sums and latest states: the program has to be a fold, which means that the events of
two rounds, one after the other, give the same table as all of them in one round. Table and position change in
one step; rows and position of a topic are tied together by the version of a staged write. A run may be killed
anywhere.
"""

from __future__ import annotations

import uuid
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tailrace.core.model.commands import EARLIEST, LATEST, TrimTopic
from tailrace.errors import InvalidRequest, NotFound
from tailrace.spark.link import BrokerLink, link_to
from tailrace.spark.options import read_options
from tailrace.spark.pipelines import CommonOptions
from tailrace.spark.pipelines.programs import Program
from tailrace.spark.pipelines.progress import Progress
from tailrace.spark.pipelines.projections import (
    Offsets,
    Position,
    Positions,
    advanced,
    as_option,
    check_topics,
    distance,
    known,
    lost,
    pending,
    sync_folder,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME = "project"
HELP = "turn a topic of events into a table or a topic, by a function or SQL, incrementally"

FOLDERS_MAX = 32
"""A table that grew by so many rounds is written as one folder again."""


class ProjectOptions(CommonOptions, frozen=True):
    """Options of `project`; one of function and sql, one of table and to_topic."""

    function: Annotated[str, Meta(description="MODULE:FUNCTION from DataFrame(s) to DataFrame")] = ""
    sql: Annotated[str, Meta(description="a query over the view `events`, or @FILE with one")] = ""
    mode: Annotated[
        Literal["append", "replace"],
        Meta(description="append: rows of new events are added; replace: `previous` and `events` to a table"),
    ] = "append"
    schema: Annotated[str, Meta(description="columns of `previous` before the first round, as DDL")] = ""
    table: Annotated[str, Meta(description="folder of the Parquet table; executors have to see it")] = ""
    to_topic: Annotated[str, Meta(description="topic that the rows are written to, exactly once")] = ""
    state: Annotated[str, Meta(description="with to_topic: folder for the position")] = ""
    rebuild: Annotated[bool, Meta(description="make it anew from the first event")] = False
    archive: Annotated[
        str, Meta(description="folder of an archive to read what the log has not any more")
    ] = ""
    rows_per_round: Annotated[int, Meta(ge=0, description="events of one round at most; 0: all")] = 1_000_000
    interval_s: Annotated[float, Meta(gt=0, description="with --follow: seconds between looks")] = 10.0
    timeout_s: Annotated[float, Meta(gt=0, description="how long a call to the broker may take")] = 30.0


OPTIONS = ProjectOptions


class ProjectSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did, and where the projection is now."""

    result: str
    version: int
    rounds: int
    events: int
    """Offsets that were read in this run."""
    rows: int | None
    """Of the whole table; None for a topic."""
    positions: list[ResultReach]


class ResultReach(msgspec.Struct, frozen=True):
    """Up to where the events of a partition are in the result."""

    topic: str
    partition: int
    end: int


def run(session: SparkSession, options: ProjectOptions, progress: Progress) -> ProjectSummary:
    """Bring a projection up to date, or keep it so until stopped."""
    _check(options)
    projection = Projection(session, options, progress)
    rounds = events = 0
    rebuild = options.rebuild
    while True:
        done = projection.round(rebuild=rebuild)
        if done:
            rounds, events, rebuild = rounds + 1, events + done, False
        elif not options.follow or not progress.again(options.interval_s):
            break
    newest = projection.positions.newest()
    ends = newest.ends if newest else {}
    return ProjectSummary(
        result=options.table or options.to_topic,
        version=newest.version if newest else 0,
        rounds=rounds,
        events=events,
        rows=(newest.rows if newest else 0) if options.table else None,
        positions=[
            ResultReach(t, p, end) for t, found in sorted(ends.items()) for p, end in sorted(found.items())
        ],
    )


def table(session: SparkSession, folder: str) -> DataFrame:
    """The newest version of a projected table."""
    positions = Positions(_local(folder, "table"))
    newest = positions.newest()
    if newest is None:
        raise NotFound(f"{folder}: no projection has written a table here yet", hint=None)
    return session.read.parquet(*positions.folders(newest))


class RoundPlan(NamedTuple):
    """One round before it is done."""

    topics: dict[str, int]
    begins: Offsets
    starts: Offsets
    ends: Offsets

    @property
    def events(self) -> int:
        """How many offsets it reads."""
        return distance(self.starts, self.ends)


class Projection:
    """A projection at work: one round after another."""

    def __init__(self, session: SparkSession, options: ProjectOptions, progress: Progress) -> None:
        self._session = session
        self._options = options
        self._progress = progress
        folder = options.table or options.state
        self.positions = Positions(_local(folder, "table" if options.table else "state"))
        self._program = Program(session, options.function, options.sql, options.mode)
        self._topics = [name.strip() for name in options.topic.split(",") if name.strip()]
        given = {"topic": options.topic, "timeout_s": str(options.timeout_s)}
        if options.url:
            given["url"] = options.url
        if options.archive:
            given.update(mode="archive", archive=options.archive)
        self._given = given
        self._url = read_options(given).url.spelled()
        self._link: BrokerLink = link_to(self._url, options.timeout_s)

    def round(self, *, rebuild: bool) -> int:
        """Read what is new and put it into the result; how many offsets that were, 0 for nothing new."""
        if self._options.table:
            return self._table_round(self.positions.newest(), rebuild)
        return self._topic_round(self.positions.newest(), rebuild)

    # -- tables: rows first, then the version that names them

    def _table_round(self, newest: Position | None, rebuild: bool) -> int:
        base = None if rebuild else newest
        plan = self._plan(newest, base, 0 if rebuild else self._options.rows_per_round)
        if not plan.events:
            return 0
        version = newest.version + 1 if newest else 1
        self._progress.step(f"version {version}: {plan.events:,} events")
        kept = base.folders if base is not None and self._options.mode == "append" else []
        whole = self._options.mode == "replace" or len(kept) >= FOLDERS_MAX
        previous = self._previous(base) if whole else None
        result = self._program(self._events(plan.starts, plan.ends), previous)
        if base is not None and _columns(result) != base.columns:
            raise InvalidRequest(
                f"the program makes other columns than those of {self._options.table}: {result.columns}",
                hint="--option rebuild=true makes the table anew",
            )
        if kept and previous is not None:
            result, kept = previous.unionByName(result), []
        folder = self.positions.new_folder(version)
        result.write.option("compression", "zstd").parquet(str(folder))
        sync_folder(folder)
        rows = self._session.read.parquet(str(folder)).count()
        self._progress.step(f"version {version}: putting it in place")
        self.positions.put(
            Position(
                version=version,
                program=self._program.text,
                topics=plan.topics,
                begins=plan.begins,
                ends=plan.ends,
                folders=[*kept, folder.name],
                rows=rows + (base.rows if base is not None and kept else 0),
                columns=_columns(result),
            )
        )
        self.positions.tidy()
        return plan.events

    def _previous(self, base: Position | None) -> DataFrame | None:
        if base is not None:
            return self._session.read.parquet(*self.positions.folders(base))
        if self._options.schema:
            return self._session.createDataFrame([], self._options.schema)
        return None

    # -- topics: the plan first, then the rows under its version, then the note that they are there

    def _topic_round(self, newest: Position | None, rebuild: bool) -> int:
        if newest is not None and not newest.written:
            if not rebuild:
                self._check_program(newest)
                check_topics(newest.topics, self._topic_ids())
                return self._write(newest)
            # Its rows may be decided already, and must be there before they can be trimmed. If they are not,
            # this decides that there are none.
            self._save(self._session.createDataFrame([], "value binary"), newest)
        base = None if rebuild else newest
        plan = self._plan(newest, base, self._options.rows_per_round)
        if not plan.events:
            return 0
        ends = self._link.offsets(self._options.to_topic, LATEST) if rebuild and newest else []
        planned = Position(
            version=newest.version + 1 if newest else 1,
            program=self._program.text,
            topics=plan.topics,
            begins=plan.begins,
            ends=plan.ends,
            writer=newest.writer if newest else f"project-{uuid.uuid4().hex}",
            starts=plan.starts,
            written=False,
            trims=dict(enumerate(ends)),
        )
        self.positions.put(planned)
        return self._write(planned)

    def _write(self, planned: Position) -> int:
        """Do a round that was planned, be it for the second time: its version is written once at most."""
        events = distance(planned.starts, planned.ends)
        for partition, offset in planned.trims.items():
            self._progress.step(f"version {planned.version}: trimming {self._options.to_topic}")
            self._link.ask(TrimTopic(self._options.to_topic, partition, offset))
        self._progress.step(f"version {planned.version}: {events:,} events")
        self._save(self._program(self._events(planned.starts, planned.ends), None), planned)
        self._progress.step(f"version {planned.version}: noting that it is written")
        self.positions.replace(msgspec.structs.replace(planned, written=True))
        self.positions.tidy()
        return events

    def _save(self, rows: DataFrame, planned: Position) -> None:
        writing = rows.write.format("tailrace").mode("append").option("url", self._url)
        writing = writing.option("timeout_s", str(self._options.timeout_s))
        writing = writing.option("topic", self._options.to_topic)
        writing.option("txn_app_id", planned.writer).option("txn_version", str(planned.version)).save()

    # -- both

    def _plan(self, newest: Position | None, base: Position | None, rows: int) -> RoundPlan:
        """The next round after `base`, or a first one; `newest` is what a rebuild has to be as good as."""
        from tailrace.spark.source.slices import share

        topics = self._topic_ids()
        earliest = {topic: dict(enumerate(self._earliest(topic))) for topic in self._topics}
        latest = {topic: dict(enumerate(self._link.offsets(topic, LATEST))) for topic in self._topics}
        if base is not None:
            self._check_program(base)
            check_topics(base.topics, topics)
            # What came to be since then begins at 0; if that is gone already, the reader says so.
            earliest = {topic: dict.fromkeys(found, 0) for topic, found in earliest.items()}
        elif newest is not None and (gone := list(lost(newest.begins, earliest))):
            raise InvalidRequest(
                f"it cannot be made anew, because events are gone: {'; '.join(gone)}",
                hint="--option archive=FOLDER reads them from an archive",
            )
        begins = known(base.begins if base else {}, earliest)
        starts = known(base.ends if base else {}, earliest)
        spans = pending(starts, latest)
        plan = RoundPlan(topics, begins, starts, advanced(starts, share(spans, rows) if rows else spans))
        if base is None and newest is not None and not plan.events:
            raise InvalidRequest("it cannot be made anew, because there are no events any more")
        return plan

    def _check_program(self, base: Position) -> None:
        if base.program != self._program.text:
            raise InvalidRequest(
                f"the projection was made by {base.program!r}, not by {self._program.text!r}",
                hint="--option rebuild=true makes it anew; another projection needs another folder",
            )

    def _topic_ids(self) -> dict[str, int]:
        return {topic.name: topic.id for topic in self._link.topics() if topic.name in self._topics}

    def _earliest(self, topic: str) -> list[int]:
        """Where each partition begins, in the archive or else in the log."""
        in_log = self._link.offsets(topic, EARLIEST)
        if not self._options.archive:
            return in_log
        from tailrace.spark.manifests import newest

        archived = newest(self._options.archive, topic)
        covers = [archived.cover(partition) if archived else None for partition in range(len(in_log))]
        return [
            begin if cover is None else min(begin, cover.start)
            for begin, cover in zip(in_log, covers, strict=True)
        ]

    def _events(self, starts: Offsets, ends: Offsets) -> DataFrame:
        from pyspark.sql.functions import col

        reading = self._session.read.format("tailrace").options(**self._given).option("url", self._url)
        events = reading.option("start", as_option(starts)).option("end", as_option(ends)).load()
        # Partitions that came to be since the plan was made belong to the next round.
        planned = [
            (col("topic") == topic) & (col("partition") < len(found)) for topic, found in starts.items()
        ]
        return events.where(reduce(or_, planned))


def _check(options: ProjectOptions) -> None:
    if bool(options.function) == bool(options.sql):
        raise InvalidRequest(
            "project needs --option function=MODULE:FUNCTION or --option sql=QUERY, one of them"
        )
    if bool(options.table) == bool(options.to_topic):
        raise InvalidRequest("project needs --option table=FOLDER or --option to_topic=TOPIC, one of them")
    if bool(options.to_topic) != bool(options.state):
        raise InvalidRequest("state: goes together with to_topic; the position of a table lies in its folder")
    if options.to_topic and options.mode == "replace":
        raise InvalidRequest(
            "mode: replace is for tables; rows of a topic stay, so they can only be appended"
        )
    if options.sql and options.mode == "replace" and not options.schema:
        raise InvalidRequest(
            "schema: SQL with mode=replace needs the columns of the table, as in 'k string, n long'"
        )
    if options.to_topic in options.topic.split(","):
        raise InvalidRequest("to_topic: has to be another topic than the events'")


def _local(folder: str, name: str) -> Path:
    path = folder.removeprefix("file://")
    if "://" in path:
        raise InvalidRequest(
            f"{name}: a folder that the driver and all executors have mounted, not {folder!r}"
        )
    return Path(path).absolute()


def _columns(frame: DataFrame) -> str:
    """Names and types; whether they may be null does not matter to a table."""
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in frame.schema.fields)
