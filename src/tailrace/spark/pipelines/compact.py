"""The pipeline `compact`: the newest message of every key, as a Parquet table or as a topic.

It is a projection (see `project`) with a program of its own: the table is folded with the messages that are
new, so a run costs what is new and the size of the table. A message without a value deletes its key. Into a
topic, each round writes the newest message of the keys that changed, deletions too. Messages without a key
belong to no state and are left out.

What "newest" means is in `ORDER` alone: append times never go back in a partition, and a key that moved to
another partition, because there are more now, has later ones there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from tailrace.errors import InvalidRequest
from tailrace.spark.pipelines import CommonOptions, project
from tailrace.spark.pipelines.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME = "compact"
HELP = "keep the newest message of every key of a topic, in a Parquet table or in another topic"

TOPIC_ROWS_MAX = 2_000_000
"""A round into a topic is staged as a whole, and a partition has room for 1 GiB of that."""
ORDER = ("append_time", "partition", "offset")
"""Columns that say which of two messages of a key is newer."""


class CompactOptions(CommonOptions, frozen=True, kw_only=True):
    """Options of `compact`; one of table and to_topic."""

    table: Annotated[str, Meta(description="folder of the Parquet table; executors have to see it")] = ""
    to_topic: Annotated[str, Meta(description="topic that the newest messages are written to")] = ""
    state: Annotated[str, Meta(description="with to_topic: folder for the position")] = ""
    keep_deleted: Annotated[bool, Meta(description="in a table: keys whose newest value is null stay")] = (
        False
    )
    archive: Annotated[
        str, Meta(description="folder of an archive to read what the log has not any more")
    ] = ""
    rebuild: Annotated[bool, Meta(description="make it anew from the first message")] = False
    rows_per_round: Annotated[
        int, Meta(ge=0, description="messages of one round at most, 2000000 into a topic; 0: all")
    ] = 20_000_000
    interval_s: Annotated[float, Meta(gt=0, description="with --follow: seconds between looks")] = 60.0
    timeout_s: Annotated[float, Meta(gt=0, description="how long a call to the broker may take")] = 30.0


OPTIONS = CompactOptions


def run(session: SparkSession, options: CompactOptions, progress: Progress) -> project.ProjectSummary:
    """Bring the table or topic up to date, or keep it so until stopped."""
    if "," in options.topic:
        raise InvalidRequest("topic: one; keys of different topics have nothing to do with each other")
    rows = options.rows_per_round
    if options.to_topic:
        program, mode = "newest_changes", "append"
        rows = min(rows or TOPIC_ROWS_MAX, TOPIC_ROWS_MAX)
    else:
        program, mode = ("newest_with_deleted" if options.keep_deleted else "newest_rows"), "replace"
    given = project.ProjectOptions(
        topic=options.topic,
        url=options.url,
        follow=options.follow,
        function=f"{__name__}:{program}",
        mode="append" if mode == "append" else "replace",
        table=options.table,
        to_topic=options.to_topic,
        state=options.state,
        rebuild=options.rebuild,
        archive=options.archive,
        rows_per_round=rows,
        interval_s=options.interval_s,
        timeout_s=options.timeout_s,
    )
    return project.run(session, given, progress)


def newest_per_key(messages: DataFrame) -> DataFrame:
    """One row for each key: its newest, in the columns that there are."""
    from pyspark.sql import functions

    columns = messages.columns
    keyed = messages.where("key is not null")
    newest = functions.max_by(functions.struct(*columns), functions.struct(*ORDER))
    rows = keyed.groupBy("key").agg(newest.alias("newest"))
    return rows.select(*(functions.col(f"newest.{name}").alias(name) for name in columns))


def newest_with_deleted(events: DataFrame, previous: DataFrame | None) -> DataFrame:
    """The table after these events, with a row for deleted keys, too."""
    return newest_per_key(events if previous is None else previous.unionByName(events))


def newest_rows(events: DataFrame, previous: DataFrame | None) -> DataFrame:
    """The table after these events."""
    return newest_with_deleted(events, previous).where("value is not null")


def newest_changes(events: DataFrame) -> DataFrame:
    """What these events change, as messages for another topic."""
    return newest_per_key(events).drop("topic", "deliver_at")
