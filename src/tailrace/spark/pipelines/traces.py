"""The pipeline `traces`: where the time of messages goes, out of what happened to them (view `lifecycle`).

It gives latencies by stage, causes of retries and dead letters, slow consumers and stuck keys: as a table, as
Parquet files and as an HTML page with plots. Each run writes a version of its own beside the last ones, whole
or not at all; `report.html` in the folder is always the newest.

    published ──▶ appended ──▶ delivered (first) ──▶ settled: acked, dead-lettered, lapsed, …
"""

from __future__ import annotations

import os
import shutil
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from tailrace.errors import InvalidRequest
from tailrace.spark.pipelines import CommonOptions
from tailrace.spark.pipelines.progress import Progress
from tailrace.spark.pipelines.trace_report import (
    BUCKETS_PER_DOUBLING,
    STAGES,
    Bar,
    Cause,
    ConsumerTimes,
    Moment,
    Report,
    StageTimes,
    StuckKey,
    in_order,
    page,
    with_slow_ones,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

NAME = "traces"
HELP = "latencies, causes of retries and dead letters, slow consumers and stuck keys, as tables and a report"

SETTLED = ("acked", "dead_lettered", "lapsed", "settled", "committed")
STRETCHES = 60
"""Points of the plot over time."""
CAUSE_CHARACTERS = 160
BUILDING = ".building-"
PLACE = ["topic", "partition", "offset"]


class TraceOptions(CommonOptions, frozen=True, kw_only=True):
    """Options of `traces`."""

    out: Annotated[str, Meta(min_length=1, description="folder for the results")]
    group: Annotated[str, Meta(description="only this group; all when empty")] = ""
    since: Annotated[str, Meta(description="only what happened from a time on, 2026-01-31T12:00:00Z")] = ""
    until: Annotated[str, Meta(description="only what happened before a time")] = ""
    stuck_s: Annotated[float, Meta(ge=0, description="a key is stuck when it waits for so long")] = 60.0
    rows_max: Annotated[int, Meta(ge=1, description="rows of each table of the report")] = 50
    keep: Annotated[int, Meta(ge=1, description="versions of the result that are kept")] = 3
    interval_s: Annotated[float, Meta(gt=0, description="with --follow: seconds between reports")] = 60.0
    timeout_s: Annotated[float, Meta(gt=0, description="how long a call to the broker may take")] = 30.0


OPTIONS = TraceOptions


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found."""

    report: str
    folder: str
    events: int
    messages: int
    stages: list[StageTimes]
    causes: list[Cause]
    consumers: list[ConsumerTimes]
    stuck: list[StuckKey]


def run(session: SparkSession, options: TraceOptions, progress: Progress) -> TraceSummary:
    """Make a report, or one after the other until stopped."""
    check_times(options)
    while True:
        summary = _once(session, options, progress)
        if not options.follow or not progress.again(options.interval_s):
            return summary


def _once(session: SparkSession, options: TraceOptions, progress: Progress) -> TraceSummary:
    out = Path(options.out)
    building = out / f"{BUILDING}{uuid.uuid4().hex}"
    building.mkdir(parents=True)
    try:
        analysis = Analysis(session, options, progress)
        try:
            report = analysis.report(building)
        finally:
            analysis.close()
        _write(report, building)
        folder = publish(building, options.keep)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    lists = {name: getattr(report, name) for name in ("stages", "causes", "consumers", "stuck")}
    return TraceSummary(
        report=str(out / "report.html"),
        folder=str(folder),
        events=report.events,
        messages=report.messages,
        **lists,
    )


# ------------------------------------------------------------------------------------------------ results


def _write(report: Report, folder: Path) -> None:
    """The small tables and the page; the journeys are there already."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds: dict[str, type[msgspec.Struct]] = {
        "stages": StageTimes,
        "causes": Cause,
        "consumers": ConsumerTimes,
        "stuck": StuckKey,
    }
    types = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    for name, kind in kinds.items():
        fields = [(field.name, types[field.type.__name__]) for field in msgspec.structs.fields(kind)]
        rows = [msgspec.structs.asdict(row) for row in getattr(report, name)]
        table = pa.Table.from_pylist(rows, schema=pa.schema(fields))
        pq.write_table(table, folder / f"{name}.parquet", compression="zstd")
    (folder / "report.html").write_text(page(report), encoding="utf-8")


def publish(building: Path, keep: int) -> Path:
    """Give a finished result the next number, and let `report.html` show it; older ones go, but for some."""
    out = building.parent
    while True:
        known = versions(out)
        folder = out / f"{known[-1] + 1 if known else 1:06d}"
        try:
            building.rename(folder)
            break
        except OSError:
            if not folder.exists():  # Else another run was as fast: the next number is free.
                raise
    copy = out / f".report-{uuid.uuid4().hex}"
    shutil.copyfile(folder / "report.html", copy)
    os.replace(copy, out / "report.html")
    for version in versions(out)[:-keep]:
        shutil.rmtree(out / f"{version:06d}", ignore_errors=True)
    return folder


def versions(out: Path) -> list[int]:
    """Numbers of the results in a folder, the newest at the end."""
    return sorted(int(path.name) for path in out.iterdir() if path.is_dir() and path.name.isdecimal())


# ----------------------------------------------------------------------------------------------- analysis


class Analysis:
    """One look at a topic: the rows that Spark makes of it, and the figures."""

    def __init__(self, session: SparkSession, options: TraceOptions, progress: Progress) -> None:
        self._session = session
        self._options = options
        self._progress = progress
        self._kept: list[DataFrame] = []
        self._as_of = datetime.now(UTC)

    def close(self) -> None:
        """Let go of what Spark keeps for it."""
        for frame in self._kept:
            frame.unpersist()

    def _read(self, **more: str) -> DataFrame:
        options = self._options
        given = {"topic": options.topic, "timeout_s": str(options.timeout_s), **more}
        if options.url is not None:
            given["url"] = options.url
        return self._session.read.format("tailrace").options(**given).load()

    def _keep(self, frame: DataFrame) -> DataFrame:
        self._kept.append(frame.persist())
        return frame

    def report(self, folder: Path) -> Report:
        """All figures; the journeys of messages go to a folder as Parquet."""
        from pyspark.sql import functions as F

        progress = self._progress
        progress.step("reading what happened")
        events = self._keep(self._events())
        time_us = F.unix_micros("time")
        appended = F.count(F.when(F.col("event") == "appended", 1))
        found = events.agg(F.count("*"), appended, F.min(time_us), F.max(time_us)).first()
        assert found is not None
        progress.step("following messages", rows=found[1])
        messages = self._keep(self._messages(events))
        journeys_path = str(folder / "journeys")
        self._journeys(events, messages).write.option("compression", "zstd").parquet(journeys_path)
        journeys = self._keep(self._session.read.parquet(journeys_path))
        progress.step("latencies")
        stages, bars = self._stages(journeys, messages)
        progress.step("causes, consumers, keys")
        return Report(
            topic=self._options.topic,
            as_of=self._as_of.isoformat(timespec="seconds"),
            span=f"{_moment(found[2])} to {_moment(found[3])}" if found[0] else "nothing happened",
            events=found[0],
            messages=found[1],
            stages=stages,
            bars=bars,
            moments=self._moments(events, found[2], found[3]) if found[0] else [],
            causes=self._causes(events),
            consumers=self._consumers(events),
            stuck=self._stuck(journeys, messages),
        )

    def _events(self) -> DataFrame:
        from pyspark.sql import functions as F

        options = self._options
        bounds = {name: text for name, text in (("start", options.since), ("end", options.until)) if text}
        events = self._read(view="lifecycle", **bounds)
        if options.group:
            events = events.where(F.col("group").isNull() | (F.col("group") == options.group))
        return events

    def _messages(self, events: DataFrame) -> DataFrame:
        """When messages were published and appended, and their keys, as far as they are still there; `seen`
        are those that were appended in the time that is looked at."""
        from pyspark.sql import functions as F

        columns = "topic,partition,offset,key,timestamp,append_time"
        there = self._read(columns=columns, fail_on_data_loss="false")
        there = there.select(
            *PLACE, "key", F.col("timestamp").alias("published"), F.col("append_time").alias("stored")
        )
        appended = events.where("event = 'appended'").select(*PLACE, F.col("time").alias("appended"))
        return (
            appended.join(there, PLACE, "full")
            .withColumn("seen", F.col("appended").isNotNull())
            .withColumn("appended", F.coalesce("appended", "stored"))
            .drop("stored")
        )

    def _journeys(self, events: DataFrame, messages: DataFrame) -> DataFrame:
        """One row for each message and group that it was delivered to, or settled for."""
        from pyspark.sql import functions as F

        def when(*names: str) -> Column:
            return F.when(F.col("event").isin(*names), F.col("time"))

        def number(*names: str) -> Column:
            return F.count(when(*names)).cast("int")

        ended = when(*SETTLED)
        journeys = (
            events.where("group is not null and offset is not null and event <> 'reset'")
            .groupBy(*PLACE, "group")
            .agg(
                F.min(when("delivered")).alias("delivered"),
                F.max(ended).alias("settled"),
                F.max_by("event", ended).alias("outcome"),
                F.max(when("redriven")).alias("redriven"),
                number("delivered").alias("deliveries"),
                number("nacked", "expired").alias("failures"),
                F.max_by("member", when("delivered")).alias("member"),
                F.max_by("reason", when("dying", "dead_lettered")).alias("reason"),
                F.max_by("error", F.when(F.col("error").isNotNull(), F.col("time"))).alias("error"),
            )
        )
        resets = (
            events.where("event = 'reset'")
            .groupBy("topic", "partition", "group")
            .agg(F.collect_list(F.struct("offset", "time")).alias("resets"))
        )
        journeys = journeys.join(F.broadcast(resets), ["topic", "partition", "group"], "left")

        def undone(reset: Column) -> Column:
            return (reset["offset"] <= F.col("offset")) & (reset["time"] >= F.col("settled"))

        nothing = F.lit(False)
        again = F.coalesce(F.col("redriven") >= F.col("settled"), nothing)
        again = again | F.coalesce(F.exists("resets", undone), nothing)
        journeys = journeys.withColumn("again", again)
        for name in ("settled", "outcome"):
            journeys = journeys.withColumn(name, F.when(~F.col("again"), F.col(name)))
        journeys = journeys.drop("redriven", "resets", "again")
        return journeys.join(messages.drop("seen"), PLACE, "left")

    # -- figures

    def _stages(self, journeys: DataFrame, messages: DataFrame) -> tuple[list[StageTimes], list[Bar]]:
        from pyspark.sql import functions as F

        def took(frame: DataFrame, stage: str, group: Column) -> DataFrame:
            first, _, last = stage.partition("_to_")
            ms = (F.unix_micros(last) - F.unix_micros(first)) / 1000.0
            both = frame.where(f"{first} is not null and {last} is not null")
            # Clocks of producers differ from the broker's: what seems to take less than nothing took nothing.
            return both.select(
                group.alias("group"), F.lit(stage).alias("stage"), F.greatest(ms, F.lit(0.0)).alias("ms")
            )

        times = took(messages.where("seen"), STAGES[0], F.lit(""))
        for stage in STAGES[1:]:
            times = times.union(took(journeys, stage, F.col("group")))
        times = self._keep(times)
        quantiles = F.percentile_approx("ms", [0.5, 0.9, 0.95, 0.99], 10_000).alias("q")
        sums = times.groupBy("group", "stage").agg(
            F.count("ms").alias("n"), F.avg("ms").alias("mean"), quantiles, F.max("ms").alias("most")
        )
        stages = [
            StageTimes(*[row["group"], row["stage"], row["n"], row["mean"], *row["q"], row["most"]])
            for row in sums.collect()
        ]
        bucket = F.floor(F.log2(F.greatest("ms", F.lit(0.5))) * BUCKETS_PER_DOUBLING).cast("int")
        counted = times.groupBy("group", "stage", F.greatest(bucket, F.lit(-1)).alias("bucket")).count()
        bars = [Bar(row["group"], row["stage"], row["bucket"], row["count"]) for row in counted.collect()]
        return in_order(stages), bars

    def _moments(self, events: DataFrame, first_us: int, last_us: int) -> list[Moment]:
        from pyspark.sql import functions as F

        width_us = (last_us - first_us) // STRETCHES + 1
        at = F.floor((F.unix_micros("time") - first_us) / width_us).alias("at")
        counts: list[Any] = [
            F.count(F.when(F.col("event").isin(*names), 1)).alias(name)
            for name, names in (
                ("delivered", ("delivered",)),
                ("settled", SETTLED),
                ("failed", ("nacked", "expired")),
            )
        ]
        rows = {row["at"]: row for row in events.groupBy(at).agg(*counts).collect()}
        return [
            Moment(
                (first_us + number * width_us) / 1e6,
                *(rows[number][name] if number in rows else 0 for name in ("delivered", "settled", "failed")),
            )
            for number in range(max(rows) + 1)
        ]

    def _causes(self, events: DataFrame) -> list[Cause]:
        from pyspark.sql import functions as F

        short = F.substring(F.regexp_replace("error", r"\d+", "#"), 1, CAUSE_CHARACTERS)
        # The error stands where a message begins to die, the reason there and at its end.
        kind = F.when(F.col("event") == "dying", "dead_lettered").otherwise(F.col("event"))
        plain = F.when(F.col("event") == "expired", "the lease expired").otherwise("no error was given")
        said = F.when(F.col("event") == "dying", F.concat_ws(": ", "reason", short))
        place = [F.col(name).cast("string") for name in PLACE]
        why = F.coalesce(said, short, plain)
        found = (
            events.where(F.col("event").isin("nacked", "expired", "dying"))
            .groupBy("group", kind.alias("kind"), why.alias("cause"))
            .agg(
                F.count("*").alias("events"),
                F.count_distinct(*PLACE).alias("messages"),
                F.max_by(F.concat_ws("/", *place), F.col("time")).alias("example"),
            )
            .orderBy(F.desc("events"), "group", "kind", "cause")
            .limit(self._options.rows_max)
        )
        return [Cause(*row) for row in found.collect()]

    def _consumers(self, events: DataFrame) -> list[ConsumerTimes]:
        from pyspark.sql import functions as F

        ends = ("acked", "nacked", "expired", "given_back", "dying")
        held = (
            events.where("lease is not null and offset is not null")
            .groupBy(*PLACE, "group", "lease")
            .agg(
                F.max("member").alias("member"),
                F.min(F.when(F.col("event") == "delivered", F.col("time"))).alias("since"),
                F.max(F.when(F.col("event").isin(*ends), F.col("time"))).alias("until"),
                F.max_by("event", F.when(F.col("event").isin(*ends), F.col("time"))).alias("how"),
            )
            .where("member is not null")
            .withColumn("ms", (F.unix_micros("until") - F.unix_micros("since")) / 1000.0)
        )
        counts = [
            F.count(F.when(F.col("how") == name, 1)).alias(name)
            for name in ("acked", "nacked", "expired", "given_back")
        ]
        sums = held.groupBy("group", "member").agg(
            F.count("since").alias("deliveries"),
            *counts,
            F.percentile_approx("ms", [0.5, 0.95], 10_000).alias("q"),
            F.max("ms").alias("most"),
        )
        most = sums.orderBy(F.desc("deliveries"), "group", "member").limit(self._options.rows_max).collect()
        found = []
        for row in most:
            names = ("group", "member", "deliveries", "acked", "nacked", "expired", "given_back")
            times = [*(row["q"] or (0.0, 0.0)), row["most"] or 0.0]
            found.append(ConsumerTimes(*[row[name] for name in names], *times))
        return with_slow_ones(found)

    def _stuck(self, journeys: DataFrame, messages: DataFrame) -> list[StuckKey]:
        """Keys whose oldest message that a group has not settled is older than `stuck_s`."""
        from pyspark.sql import functions as F

        options = self._options
        places = self._read(view="groups").where("mode in ('queue', 'exclusive')")
        if options.group:
            places = places.where(F.col("group") == options.group)
        places = places.where("lag > 0").select("group", "topic", "partition", "position")
        keyed = messages.where("key is not null and appended is not null").select(*PLACE, "key", "appended")
        waiting = keyed.join(F.broadcast(places), ["topic", "partition"]).where("offset >= position")
        told = journeys.select(*PLACE, "group", "settled", "deliveries", "failures", "error")
        unsettled = waiting.join(told, [*PLACE, "group"], "left").where("settled is null")
        oldest = unsettled.groupBy("group", "topic", "partition", "key").agg(
            F.min(F.struct("offset", "appended", "deliveries", "failures", "error")).alias("first"),
            F.count("*").alias("n"),
        )
        age_s = F.lit(self._as_of.timestamp()) - F.unix_micros("first.appended") / 1e6
        found = (
            oldest.withColumn("age_s", age_s)
            .where(F.col("age_s") >= options.stuck_s)
            .orderBy(F.desc("age_s"), "group", "key")
            .limit(options.rows_max)
        )
        return [
            StuckKey(
                row["group"],
                row["topic"],
                row["partition"],
                shown(bytes(row["key"])),
                row["first"]["offset"],
                row["age_s"],
                row["first"]["deliveries"] or 0,
                row["first"]["failures"] or 0,
                row["n"] - 1,
                row["first"]["error"] or "",
            )
            for row in found.collect()
        ]


def _moment(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="seconds")


def shown(key: bytes) -> str:
    """A key for people: as text where it is one, else in hexadecimal."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return "0x" + key.hex()[:120]
    return text[:120] if text.isprintable() else "0x" + key.hex()[:120]


def check_times(options: TraceOptions) -> None:
    """Refuse bounds that are no times before anything runs."""
    for name in ("since", "until"):
        text = getattr(options, name)
        if text:
            try:
                moment = datetime.fromisoformat(text)
            except ValueError:
                moment = None
            if moment is None or moment.tzinfo is None:
                raise InvalidRequest(f"{name}: a time with its zone (2026-01-31T12:00:00Z), not {text!r}")
