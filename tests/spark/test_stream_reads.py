"""Stream reads: the reader against a real broker without Spark, and whole queries with it.

Covers `spark/source/stream_reader.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from tailrace import sync
from tailrace.core.model.group_commands import LeaveGroup
from tailrace.errors import InvalidRequest, NotFound, Timeout, Unavailable
from tailrace.spark.link import link_to
from tailrace.spark.options import read_options
from tailrace.spark.source.stream_reader import MEMBER, StreamReader
from tailrace.sync import Client
from tests.e2e.broker_process import BrokerProcess, eventually

Row = tuple[str, int, int, bytes]
MakeTopic = Callable[..., str]
SCHEMA = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("value", BinaryType()),
    ]
)


def publish(client: Client, topic: str, partition: int, *values: bytes) -> list[Row]:
    """The rows that a reader has to give for them."""
    with client.producer(topic) as producer:
        results = producer.send_many(values, partition=partition).result(20)
    offsets = [result.offset for result in results]
    assert None not in offsets
    return [(topic, partition, int(offset or 0), v) for offset, v in zip(offsets, values, strict=True)]


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


# --------------------------------------------------------------------------- the reader, as Spark calls it


class Query:
    """What Spark does with a reader: offsets go through JSON, a restart has nothing but them."""

    def __init__(self, url: str, **options: Any) -> None:
        self.given = {"url": url, **{name: str(value) for name, value in options.items()}}
        self.reader = self._make()
        self.offset = self._stored(self.reader.initialOffset())

    def _make(self) -> StreamReader:
        return StreamReader(read_options(self.given, streaming=True), SCHEMA)

    @staticmethod
    def _stored(offset: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(json.dumps(offset))
        return result

    def restart(self, **options: Any) -> None:
        self.given |= {name: str(value) for name, value in options.items()}
        self.reader = self._make()

    def plan(self) -> tuple[dict[str, Any], list[InputPartition]]:
        end = self._stored(self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit()))
        return end, list(self.reader.partitions(self.offset, end))

    def trigger(self) -> list[Row]:
        end, tasks = self.plan()
        rows = self.read(tasks)
        self.offset = end
        return rows

    def read(self, tasks: list[InputPartition]) -> list[Row]:
        # Workers have copies that were never asked for offsets.
        worker = self._make()
        return [
            (row["topic"], row["partition"], row["offset"], row["value"])
            for task in tasks
            for batch in worker.read(task)
            for row in batch.to_pylist()
        ]

    def no_news(self) -> bool:
        end, _ = self.plan()
        return json.dumps(end) == json.dumps(self.offset)


def test_triggers_and_restarts_read_each_row_once(
    broker: BrokerProcess, client: Client, topic: MakeTopic
) -> None:
    name = topic(partitions=2)
    rows = publish(client, name, 0, *numbered(30)) + publish(client, name, 1, *numbered(3))
    query = Query(broker.url, topic=name, max_rows_per_trigger=10)
    seen = [query.trigger()]
    query.restart(start="latest")
    rows += publish(client, name, 1, *numbered(5, 3))
    while not query.no_news():
        seen.append(query.trigger())
    assert [len(batch) for batch in seen] == [10, 10, 10, 8]
    assert sorted(row for batch in seen for row in batch) == sorted(rows)
    assert {partition for _, partition, _, _ in seen[0]} == {0, 1}


@pytest.mark.parametrize("start", ["earliest", "latest", "2", "time", "offsets"])
def test_a_new_checkpoint_begins_at_the_start_asked_for(
    broker: BrokerProcess, client: Client, topic: MakeTopic, start: str
) -> None:
    name = topic(partitions=2)
    publish(client, name, 0, *numbered(4))
    with client.producer(name) as producer:
        time_us = 1_700_000_000_000_000
        producer.send_many(numbered(3), partition=1, timestamps=[time_us + n for n in range(3)]).result(20)
    values = {
        "earliest": ("earliest", [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]),
        "latest": ("latest", []),
        "2": ("2", [(0, 2), (0, 3), (1, 2)]),
        "time": (
            datetime.fromtimestamp(time_us / 1e6, UTC).replace(microsecond=2).isoformat(),
            [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)],
        ),
        "offsets": (json.dumps({name: {"0": 3, "1": -1}}), [(0, 3)]),
    }
    text, wanted = values[start]
    query = Query(broker.url, topic=name, start=text)
    assert [(partition, offset) for _, partition, offset, _ in query.trigger()] == wanted
    assert query.no_news()


def test_partitions_and_topics_that_come_later_are_read_from_their_beginning(
    broker: BrokerProcess, client: Client, topic: MakeTopic
) -> None:
    name = topic(partitions=1)
    publish(client, name, 0, b"old")
    query = Query(broker.url, topic_pattern=f"{name}.*", start="latest")
    client.admin().alter_topic(name, partitions=3)
    client.admin().create_topic(f"{name}.more", partitions=2)
    assert query.no_news()
    rows = publish(client, name, 2, b"a", b"b") + publish(client, f"{name}.more", 1, b"c")
    assert query.trigger() == rows
    query.restart()
    rows = publish(client, name, 1, b"d") + publish(client, f"{name}.more", 0, b"e")
    assert query.trigger() == rows
    assert query.no_news()


def test_available_now_ends_at_the_head_that_was_there(
    broker: BrokerProcess, client: Client, topic: MakeTopic
) -> None:
    name = topic(partitions=1)
    rows = publish(client, name, 0, *numbered(5))
    query = Query(broker.url, topic=name, max_rows_per_trigger=2)
    query.reader.prepareForTriggerAvailableNow()
    seen = []
    while not query.no_news():
        publish(client, name, 0, b"late")
        seen += query.trigger()
    assert seen == rows


def test_available_now_of_a_new_checkpoint_at_the_end_has_nothing(
    broker: BrokerProcess, client: Client, topic: MakeTopic
) -> None:
    name = topic(partitions=1)
    publish(client, name, 0, b"old")
    reader = StreamReader(
        read_options({"url": broker.url, "topic": name, "start": "latest"}, streaming=True), SCHEMA
    )
    reader.prepareForTriggerAvailableNow()
    publish(client, name, 0, b"late")
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) == start


def test_what_was_trimmed_unread_is_an_error_or_left_out(
    broker: BrokerProcess, client: Client, topic: MakeTopic
) -> None:
    name = topic(partitions=1)
    publish(client, name, 0, *numbered(10))
    query = Query(broker.url, topic=name, max_rows_per_trigger=4)
    assert len(query.trigger()) == 4
    client.admin().trim_topic(name, 0, 7)
    with pytest.raises(
        NotFound, match=rf"{name}/0 begins at 7: offsets 4 to 6 were trimmed.*fail_on_data_loss"
    ):
        query.trigger()
    query.restart(fail_on_data_loss="false")
    assert [offset for _, _, offset, _ in query.trigger()] == [7, 8, 9]
    assert query.no_news()


def test_what_is_trimmed_between_plan_and_read_is_an_error_or_left_out(
    broker: BrokerProcess, client: Client, topic: MakeTopic
) -> None:
    name = topic(partitions=1)
    publish(client, name, 0, *numbered(7))
    publish(client, name, 0, *numbered(3))
    query = Query(broker.url, topic=name)
    _, tasks = query.plan()
    client.admin().trim_topic(name, 0, 7)
    with pytest.raises(NotFound, match="offsets 0 to 6"):
        query.read(tasks)
    query.restart(fail_on_data_loss="false")
    assert [offset for _, _, offset, _ in query.read(tasks)] == [7, 8, 9]


def test_a_topic_that_was_made_anew_is_another_one(
    broker: BrokerProcess, client: Client, topic: MakeTopic
) -> None:
    name = topic(partitions=1)
    publish(client, name, 0, *numbered(3))
    query = Query(broker.url, topic=name)
    query.trigger()
    client.admin().delete_topic(name)
    with pytest.raises(NotFound, match=f"topic '{name}' was deleted[^ ]"):
        query.trigger()
    client.admin().create_topic(name, partitions=1)
    rows = publish(client, name, 0, *numbered(8))
    with pytest.raises(NotFound, match=f"topic '{name}' was deleted and made anew"):
        query.trigger()
    query.restart(fail_on_data_loss="false")
    assert query.trigger() == rows
    assert query.no_news()


def test_a_planned_batch_is_not_read_from_another_topic_of_that_name(
    broker: BrokerProcess, client: Client, topic: MakeTopic
) -> None:
    name = topic(partitions=1)
    publish(client, name, 0, *numbered(3))
    query = Query(broker.url, topic=name)
    end, _ = query.plan()
    client.admin().delete_topic(name)
    client.admin().create_topic(name, partitions=1)
    publish(client, name, 0, *numbered(9))
    query.restart()
    with pytest.raises(NotFound, match="made anew"):
        query.reader.partitions(query.offset, end)


def test_positions_are_committed_to_a_group(broker: BrokerProcess, client: Client, topic: MakeTopic) -> None:
    name, group = topic(partitions=2), "spark-lag"
    publish(client, name, 0, *numbered(10))
    publish(client, name, 1, *numbered(10))
    query = Query(broker.url, topic=name, group=group, max_rows_per_trigger=6)
    lags = []
    while not query.no_news():
        lags.append(client.groups().describe(group).lag)
        query.trigger()
    assert lags == [20, 14, 8, 2]
    found = client.groups().describe(group)
    assert found.options["mode"] == "stream"
    assert [row["committed"] for row in found.partitions] == [10, 10]
    # A new life of the query, a grown topic, a session that ran out, a group that was deleted: it goes on.
    client.admin().alter_topic(name, partitions=3)
    publish(client, name, 2, b"x")
    query.restart()
    query.trigger()
    assert query.no_news()
    assert client.groups().describe(group).lag == 0
    link_to(broker.url, 20).ask(LeaveGroup(group, MEMBER))
    publish(client, name, 2, b"y")
    query.trigger()
    assert query.no_news()
    assert client.groups().describe(group).lag == 0
    client.groups().delete(group, force=True)
    publish(client, name, 2, b"z")
    query.trigger()
    assert query.no_news()
    assert [row["committed"] for row in client.groups().describe(group).partitions] == [10, 10, 3]


def test_a_query_that_begins_at_the_end_has_no_lag(
    broker: BrokerProcess, client: Client, topic: MakeTopic
) -> None:
    name = topic(partitions=1)
    publish(client, name, 0, *numbered(10))
    query = Query(broker.url, topic=name, group="spark-at-end", start="latest")
    assert query.no_news()
    assert client.groups().describe("spark-at-end").lag == 0


def test_a_group_that_others_use_is_refused(broker: BrokerProcess, client: Client, topic: MakeTopic) -> None:
    name = topic(partitions=1)
    publish(client, name, 0, b"x")
    with client.consumer(name, group="spark-others", mode="stream"):
        query = Query(broker.url, topic=name, group="spark-others")
        with pytest.raises(InvalidRequest, match="group: 'spark-others' has members"):
            query.trigger()
    client.groups().create("spark-queue", name)
    query = Query(broker.url, topic=name, group="spark-queue")
    with pytest.raises(InvalidRequest, match="'spark-queue' exists with other options: mode"):
        query.trigger()


def test_few_rows_are_one_task_and_rows_per_partition_cuts(
    broker: BrokerProcess, client: Client, topic: MakeTopic
) -> None:
    name = topic(partitions=4)
    rows = [row for partition in range(4) for row in publish(client, name, partition, *numbered(10))]
    query = Query(broker.url, topic=name)
    assert len(query.plan()[1]) == 1
    query.restart(rows_per_partition=4)
    _, tasks = query.plan()
    assert len(tasks) == 12
    assert query.read(tasks) == rows


def test_wrong_topics_columns_and_addresses_are_named(broker: BrokerProcess, topic: MakeTopic) -> None:
    with pytest.raises(NotFound, match="topic: there is no topic 'nowhere'"):
        Query(broker.url, topic="nowhere")
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        Query("tailrace://127.0.0.1:1", topic="any", timeout_s=0.2)
    options = read_options({"url": broker.url, "topic": topic()}, streaming=True)
    with pytest.raises(InvalidRequest, match="no column colour"):
        StreamReader(options, StructType([StructField("colour", StringType())]))


def test_a_broker_that_dies_is_an_error_and_when_it_is_back_nothing_is_missing(
    own_broker: BrokerProcess,
) -> None:
    with sync.connect(own_broker.url) as client:
        client.admin().create_topic("t", partitions=1, durability="interval")
        rows = publish(client, "t", 0, *numbered(6))
    query = Query(own_broker.url, topic="t", group="g", max_rows_per_trigger=2)
    seen = query.trigger()
    end, tasks = query.plan()
    own_broker.kill()
    query.restart(timeout_s=0.3)
    for call in (query.plan, lambda: query.read(tasks)):
        with pytest.raises((Unavailable, Timeout), match=re.escape(own_broker.listen)):
            call()
    own_broker.start()
    query.restart(timeout_s=20)
    seen += query.read(tasks)
    query.offset = end
    seen += query.trigger()
    assert seen == rows


# --------------------------------------------------------------------------------------- whole queries


class Seen:
    """Rows of the micro-batches of a query, by batch."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Row]] = {}
        self.then: Callable[[int], None] = lambda batch: None

    def take(self, frame: Any, batch: int) -> None:
        rows = [(row.topic, row.partition, row.offset, bytes(row.value)) for row in frame.collect()]
        self.then(batch)
        self.batches[batch] = rows

    def rows(self) -> list[Row]:
        return [row for batch in sorted(self.batches) for row in self.batches[batch]]


def start(
    spark: Any, url: str, seen: Seen, checkpoint: Path, available_now: bool = True, **options: Any
) -> Any:
    frame = spark.readStream.format("tailrace").options(
        url=url, columns="topic,partition,offset,value", **options
    )
    writer = frame.load().writeStream.foreachBatch(seen.take).option("checkpointLocation", str(checkpoint))
    trigger = {"availableNow": True} if available_now else {"processingTime": "0 seconds"}
    return writer.trigger(**trigger).start()


def run(spark: Any, url: str, seen: Seen, checkpoint: Path, **options: Any) -> Any:
    """To the end of what is there."""
    query = start(spark, url, seen, checkpoint, **options)
    try:
        assert query.awaitTermination(60), "the query does not end"
    finally:
        query.stop()
    return query


def test_a_query_reads_each_row_once_over_restarts_growth_and_limits(
    spark: Any, broker: BrokerProcess, client: Client, topic: MakeTopic, tmp_path: Path
) -> None:
    name, group, seen = topic(partitions=2), "spark-query", Seen()
    rows = publish(client, name, 0, *numbered(50)) + publish(client, name, 1, *numbered(10))
    common = {"topic": name, "group": group, "max_rows_per_trigger": 25}
    query = run(spark, broker.url, seen, tmp_path / "c", **common)
    assert [len(batch) for _, batch in sorted(seen.batches.items())] == [25, 25, 10]
    assert [progress.numInputRows for progress in query.recentProgress if progress.numInputRows] == [
        25,
        25,
        10,
    ]
    assert client.groups().describe(group).lag == 0
    client.admin().alter_topic(name, partitions=4)
    rows += publish(client, name, 3, *numbered(7)) + publish(client, name, 0, *numbered(5, 50))

    def late(batch: int) -> None:
        publish(client, name, 1, b"late")

    seen.then = late  # A query that reads what is available now must not see these.
    run(spark, broker.url, seen, tmp_path / "c", **common, start="latest")
    assert sorted(seen.rows()) == sorted(rows)
    stored = json.loads((tmp_path / "c" / "offsets" / str(max(seen.batches))).read_text().splitlines()[-1])
    assert stored["version"] == 1
    assert stored["topics"][name]["offsets"] == {"0": 55, "1": 10, "3": 7}
    assert client.groups().describe(group).lag == 1


def test_a_batch_that_failed_is_read_again_with_the_same_rows(
    spark: Any, broker: BrokerProcess, client: Client, topic: MakeTopic, tmp_path: Path
) -> None:
    name, seen = topic(partitions=2), Seen()
    rows = publish(client, name, 0, *numbered(12)) + publish(client, name, 1, *numbered(3))

    def fail(batch: int) -> None:
        if batch == 1:
            publish(client, name, 1, b"later")
            raise ValueError("the sink is broken")

    seen.then = fail
    with pytest.raises(StreamingQueryException, match="the sink is broken"):
        run(spark, broker.url, seen, tmp_path / "c", topic=name, max_rows_per_trigger=5)
    assert list(seen.batches) == [0]
    seen.then = lambda batch: None
    run(spark, broker.url, seen, tmp_path / "c", topic=name, max_rows_per_trigger=100)
    assert len(seen.batches[1]) == 5
    assert len(seen.rows()) == len(rows) + 1
    assert set(rows) < set(seen.rows())


def test_a_running_query_sees_what_comes_and_says_how_far_it_is(
    spark: Any, broker: BrokerProcess, client: Client, topic: MakeTopic, tmp_path: Path
) -> None:
    name, seen = topic(partitions=2), Seen()
    pattern = f"{name}.*"
    query = start(
        spark, broker.url, seen, tmp_path / "c", False, topic_pattern=pattern, group="spark-running"
    )
    try:
        rows = publish(client, name, 0, *numbered(10))
        eventually(lambda: sorted(seen.rows()) == sorted(rows), "the first rows", 30)
        client.admin().create_topic(f"{name}.new", partitions=1)
        rows += publish(client, f"{name}.new", 0, *numbered(4))
        eventually(lambda: sorted(seen.rows()) == sorted(rows), "the rows of the new topic", 30)

        def caught_up() -> bool:
            found = client.groups().describe("spark-running")
            return found.lag == 0 and len(found.partitions) == 3

        # Without another batch: the next question for news is enough.
        eventually(caught_up, "the group to follow", 30)
        assert query.exception() is None
    finally:
        query.stop()


def test_errors_of_a_query_say_what_is_wrong(
    spark: Any, broker: BrokerProcess, client: Client, topic: MakeTopic, tmp_path: Path
) -> None:
    name, seen = topic(partitions=1), Seen()
    publish(client, name, 0, *numbered(5))
    with pytest.raises(StreamingQueryException, match="there is no topic 'nowhere'"):
        run(spark, broker.url, seen, tmp_path / "a", topic="nowhere")
    with pytest.raises(StreamingQueryException, match=r"127\.0\.0\.1:1"):
        run(spark, "tailrace://127.0.0.1:1", seen, tmp_path / "b", topic=name, timeout_s="0.5")
    run(spark, broker.url, seen, tmp_path / "c", topic=name)
    publish(client, name, 0, *numbered(5))
    client.admin().trim_topic(name, 0, 8)
    with pytest.raises(StreamingQueryException, match="offsets 5 to 7 were trimmed"):
        run(spark, broker.url, seen, tmp_path / "c", topic=name)
    run(spark, broker.url, seen, tmp_path / "c", topic=name, fail_on_data_loss="false")
    assert [offset for _, _, offset, _ in seen.rows()] == [0, 1, 2, 3, 4, 8, 9]
