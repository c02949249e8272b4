"""Writes from Spark: what is written, exactly once, and what is refused.

Covers `spark/sink/staged_tasks.py` and `spark/sink/writers.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from tailrace import sync
from tailrace.core.model.identifiers import partition_of
from tailrace.core.model.queue_commands import StageRows
from tailrace.errors import InvalidRequest, NotFound, TooLarge, Unavailable
from tailrace.format.tabular import POSITIONED
from tailrace.spark.link import Answer, BrokerLink
from tailrace.spark.options import WriteOptions
from tailrace.spark.sink.message_columns import message_columns
from tailrace.spark.sink.staged_tasks import PlaceStaged, TaskStaged, abort_places, stage_task
from tailrace.spark.sink.writers import BatchWriter, StreamWriter, decide
from tests.e2e.broker_process import BrokerProcess
from tests.spark.conftest import MakeTopic
from tests.spark.random_messages import publish_random

ONLY_VALUES = StructType([StructField("value", BinaryType())])


def read(client: sync.Client, topic: str) -> list[Any]:
    """All messages, by partition and offset."""
    with client.reader(topic, start="earliest", stop_at_end=True) as reader:
        return sorted(reader, key=lambda message: (message.partition, message.offset))


def values(client: sync.Client, topic: str) -> Counter[bytes]:
    return Counter(message.value for message in read(client, topic))


def table(client: sync.Client, topic: str) -> pa.Table:
    with client.reader(topic, start="earliest", stop_at_end=True) as reader:
        rows = pa.Table.from_batches(list(reader.batches()), schema=POSITIONED)
    return rows.sort_by([("partition", "ascending"), ("offset", "ascending")])


# -- tasks and decisions, without Spark


@pytest.fixture
def link(broker: BrokerProcess) -> Iterator[BrokerLink]:
    made = BrokerLink(broker.url, 20)
    yield made
    made.close()


def staged(
    link: BrokerLink, topic: str, writer: str, version: int, task: int, rows: list[bytes]
) -> TaskStaged:
    columns = message_columns({"value": "binary"}, topic, False)
    batch = pa.record_batch({"value": pa.array(rows, pa.binary())})
    return stage_task(link, columns, [batch], writer, version, (task, 0))


def test_only_what_is_decided_is_there(link: BrokerLink, client: sync.Client, topic: MakeTopic) -> None:
    name, writer = topic(partitions=1), "w1"
    rows = {task: [b"%d-%d" % (task, row) for row in range(3)] for task in range(5)}
    loser = staged(link, name, writer, 1, 0, [b"x", b"y"])
    tasks = [staged(link, name, writer, 1, task, rows[task]) for task in rows]
    assert read(client, name) == []
    random.Random(1).shuffle(tasks)
    assert decide(link, writer, 1, tasks).won
    written = [value for task in rows for value in rows[task]]
    assert [message.value for message in read(client, name)] == written
    assert decide(link, writer, 1, tasks).won
    assert not decide(link, writer, 1, [loser]).won
    assert not decide(link, writer, 0, [staged(link, name, writer, 0, 0, [b"z"])]).won
    abort_places(link, writer, [target for task in [*tasks, loser] for target in task.targets])
    assert decide(link, writer, 2, []).won
    assert [message.value for message in read(client, name)] == written


def test_what_was_aborted_cannot_be_decided(link: BrokerLink, client: sync.Client, topic: MakeTopic) -> None:
    name = topic(partitions=1)
    task = staged(link, name, "w2", 0, 0, [b"x"])
    abort_places(link, "w2", task.targets)
    with pytest.raises(NotFound, match=r"version 0 of w2: 1 attempts are not staged.*run it again"):
        decide(link, "w2", 0, [task])
    assert read(client, name) == []


def test_a_message_tells_what_was_staged(link: BrokerLink, topic: MakeTopic) -> None:
    name = topic(partitions=4)
    keyed = pa.table({"value": [b"v"] * 100, "key": [b"%d" % row for row in range(100)]})
    columns = message_columns({"value": "binary", "key": "binary"}, name, False)
    first = stage_task(link, columns, keyed.to_batches(), "w3", 7, (2, 1))
    again = stage_task(link, columns, keyed.to_batches(), "w3", 7, (2, 2))
    assert (first.writer, first.version, first.spark_partition) == ("w3", 7, 2)
    assert first.attempt.startswith("7-2-1-")
    assert again.attempt.startswith("7-2-2-")
    counts = Counter(partition_of(b"%d" % row, 4) for row in range(100))
    assert {place.partition: place.rows for place in first.places} == counts
    assert all(place.batches == 1 and place.topic == name for place in first.places)
    assert {place.crc for place in first.places}.isdisjoint({place.crc for place in again.places}), (
        "ids differ"
    )


class LateLink(BrokerLink):
    """Of each partition, the second batch arrives behind those that are sent later."""

    def begin(self, request: Any, body: Any = b"") -> Future[Answer]:
        if isinstance(request, StageRows) and request.number == 1 and request.partition not in self.late:
            held: Future[Answer] = Future()
            self.late[request.partition] = held, request, body
            return held
        begun = super().begin(request, body)
        if isinstance(request, StageRows) and request.number == 4:
            begun.exception(20)
            held, *sent = self.late[request.partition]
            super().begin(*sent).add_done_callback(lambda done: held.set_result(done.result()))
        return begun

    def __init__(self, url: str, timeout_s: float) -> None:
        super().__init__(url, timeout_s)
        self.late: dict[int, tuple[Future[Answer], Any, Any]] = {}


def test_batches_that_overtake_each_other(
    broker: BrokerProcess, client: sync.Client, topic: MakeTopic
) -> None:
    name = topic(partitions=1)
    link = LateLink(broker.url, 20)
    rows = [b"%07d" % row + bytes(500_000) for row in range(20)]
    decide(link, "w4", 0, [staged(link, name, "w4", 0, 0, rows)])
    assert link.late
    link.close()
    assert [message.value for message in read(client, name)] == rows


def test_a_broker_that_is_killed_while_rows_are_staged(own_broker: BrokerProcess) -> None:
    with sync.connect(own_broker.url) as client:
        client.admin().create_topic("t", partitions=3)
    link = BrokerLink(own_broker.url, 20)

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(12):
            if number == 6:
                own_broker.restart()
            rows = [b"%d" % row + bytes(2000) for row in range(1000 * number, 1000 * number + 1000)]
            yield pa.record_batch({"value": rows, "key": [row[:5] for row in rows]})

    columns = message_columns({"value": "binary", "key": "binary"}, "t", False)
    task = stage_task(link, columns, batches(), "w", 0, (0, 0))
    decide(link, "w", 0, [task])
    link.close()
    with sync.connect(own_broker.url) as client:
        found = read(client, "t")
        numbers = [int(message.value.rstrip(b"\0")) for message in found]
        assert sorted(numbers) == list(range(12_000))
        for partition in range(3):
            own = [n for message, n in zip(found, numbers, strict=True) if message.partition == partition]
            assert own == sorted(own)


def test_a_broker_that_goes_away_is_an_error_in_time(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data").start() as broker:
        with sync.connect(broker.url) as client:
            client.admin().create_topic("t", partitions=1)
        link = BrokerLink(broker.url, 1)

        def batches() -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"value": [bytes(900_000)] * 3})
            broker.kill()
            yield pa.record_batch({"value": [bytes(900_000)] * 3})

        with pytest.raises(Unavailable):
            stage_task(link, message_columns({"value": "binary"}, "t", False), batches(), "w", 0, (0, 0))


# -- writers


def places(count: int) -> list[PlaceStaged]:
    return [PlaceStaged("t", partition, 1, 1, 0) for partition in range(count)]


def test_too_many_places_for_one_decision(link: BrokerLink) -> None:
    tasks = [TaskStaged("w", 0, task, f"0-{task}-0-abcdef00", places(100)) for task in range(1000)]
    with pytest.raises(TooLarge, match=r"1000 tasks write to 100000 places .* df.coalesce\(500\)"):
        decide(link, "w", 0, tasks)
    with pytest.raises(NotFound):  # So many are well, if only they were there.
        decide(link, "w", 0, [TaskStaged("w", 0, task, f"{task}", places(100)) for task in range(500)])


def test_a_commit_needs_every_task() -> None:
    options = WriteOptions(url="tailrace://127.0.0.1:1", topic="t", txn_app_id="a", txn_version=3)
    writer = BatchWriter(options, ONLY_VALUES, False)
    good = TaskStaged(writer.writer, 3, 0, "3-0-0-abcdef00", places(1))
    for messages in ([good, None], [good, good], [TaskStaged(writer.writer, 2, 1, "x", []), good]):
        with pytest.raises(InvalidRequest, match="commit: "):
            writer.commit(messages)


def test_an_abort_without_a_broker_is_no_error() -> None:
    options = WriteOptions(url="tailrace://127.0.0.1:1", timeout_s=0.2, topic="t")
    StreamWriter(options, ONLY_VALUES, False).abort([None], 1)
    StreamWriter(options, ONLY_VALUES, False).abort([TaskStaged("w", 1, 0, "a", places(1)), None], 1)


def test_the_same_version_may_go_to_several_topics() -> None:
    def writer(topic: str, app: str = "a") -> str:
        version = 3 if app else None
        options = WriteOptions(url="", topic=topic, txn_app_id=app, txn_version=version)
        return BatchWriter(options, ONLY_VALUES, False).writer

    with pytest.raises(InvalidRequest, match="txn_app_id, with the topic: 1 to 245 bytes"):
        writer("t", "a" * 250)
    assert writer("t") == writer("t") != writer("u")
    assert writer("t", "") != writer("t", "")


@pytest.mark.parametrize("kind", [BatchWriter, StreamWriter])
def test_overwriting_is_refused(kind: type[Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"mode overwrite: .* append"):
        kind(WriteOptions(url="", topic="t"), ONLY_VALUES, True)


# -- batch writes with Spark


def write(frame: Any, url: str, topic: str, mode: str = "append", **options: object) -> None:
    writer = frame.write.format("tailrace").option("url", url).option("topic", topic).mode(mode)
    for name, option in options.items():
        writer = writer.option(name, str(option))
    writer.save()


def test_columns_become_fields(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic
) -> None:
    name = topic(partitions=3)
    at = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
    data = [
        (number, f"k{number % 7}", {"h": f"v{number}"}, number % 5, at + timedelta(seconds=number))
        for number in range(500)
    ]
    frame = spark.createDataFrame(
        data, "number int, key string, headers map<string,string>, priority int, timestamp timestamp"
    )
    frame = frame.selectExpr(
        "cast(number as string) value", "key", "headers", "priority", "timestamp", "3600000L ttl_ms"
    )
    write(frame.coalesce(1), broker.url, name)
    messages = read(client, name)
    assert sorted(int(message.value) for message in messages) == list(range(500))
    for message in messages:
        number = int(message.value)
        assert message.key == b"k%d" % (number % 7)
        assert message.partition == partition_of(message.key, 3)
        assert message.headers == [("h", b"v%d" % number)]
        assert message.priority == number % 5
        assert message.timestamp == at + timedelta(seconds=number)
        assert message.expires_at is not None
    for key in range(7):
        own = [int(message.value) for message in messages if message.key == b"k%d" % key]
        assert own == sorted(own)


def test_delayed_rows_wait(spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic) -> None:
    name = topic(partitions=2)
    frame = spark.range(20).selectExpr(
        "cast(id as string) value", "if(id % 2 = 0, 3600000L, null) delay_ms", "cast(id % 3 as string) key"
    )
    write(frame, broker.url, name)
    assert values(client, name) == Counter(b"%d" % number for number in range(1, 20, 2))
    waiting = client.scheduled(name)
    assert Counter(message.value for message in waiting) == Counter(
        b"%d" % number for number in range(0, 20, 2)
    )


def test_a_topic_is_copied(spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic) -> None:
    source, target = topic(partitions=3), topic(partitions=3)
    publish_random(client, source, 2000, seed=4)
    frame = spark.read.format("tailrace").option("url", broker.url).option("topic", source).load()
    write(frame, broker.url, target, keep_partition="true")
    wanted, found = table(client, source), table(client, target)
    for name in ("partition", "offset", "key", "value", "headers", "timestamp", "expires_at", "priority"):
        assert found.column(name).to_pylist() == wanted.column(name).to_pylist(), name


def test_a_version_is_written_once(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic
) -> None:
    name, other = topic(), topic()
    frames = [spark.range(n * 100, n * 100 + 50).selectExpr("cast(id as string) value") for n in range(4)]
    for version, frame in ((5, 0), (5, 1), (4, 2), (6, 3), (6, 0)):
        write(frames[frame], broker.url, name, txn_app_id="job", txn_version=version)
    expected = Counter(b"%d" % number for number in (*range(50), *range(300, 350)))
    assert values(client, name) == expected
    write(frames[1], broker.url, other, txn_app_id="job", txn_version=5)
    assert values(client, other) == Counter(b"%d" % number for number in range(100, 150))
    for _ in range(2):
        write(frames[1], broker.url, other)
    assert sum(values(client, other).values()) == 150, "without a version a rerun is a new write"


def test_rows_choose_their_topics(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic
) -> None:
    names = [topic(), topic()]
    frame = spark.range(100).selectExpr(
        "cast(id as string) value",
        f"if(id % 2 = 0, '{names[0]}', '{names[1]}') topic",
        "int(id % 2) partition",
    )
    frame.write.format("tailrace").option("url", broker.url).mode("append").save()
    for place, name in enumerate(names):
        messages = read(client, name)
        assert [int(message.value) for message in messages] == list(range(place, 100, 2))
        assert {message.partition for message in messages} == {place}


def test_nothing_is_written_of_nothing(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic
) -> None:
    name = topic()
    empty = spark.createDataFrame([], "value binary")
    write(empty, broker.url, name)
    write(
        spark.range(0).selectExpr("cast(id as string) value"), broker.url, name, txn_app_id="a", txn_version=1
    )
    write(spark.range(8).where("id = 3").selectExpr("cast(id as string) value"), broker.url, name)
    assert values(client, name) == Counter([b"3"])


@pytest.mark.parametrize(
    ("columns", "options", "problem"),
    [
        (["cast(id as string) colour", "'v' value"], {}, "colour: no column of a message"),
        (["id value"], {}, "value: binary or string is needed, not bigint"),
        (["'v' value"], {"txn_app_id": "a"}, "txn_app_id: goes together with txn_version"),
        (["'v' value"], {"colour": "red"}, "colour: no such option"),
        (["'v' value"], {"mode": "overwrite"}, "mode overwrite: messages of a topic cannot be replaced"),
        (["'v' value"], {"url": "tailrace://127.0.0.1:1", "timeout_s": 0.5}, "no broker at"),
        (["'v' value"], {"topic": "nowhere"}, "nowhere"),
        (
            ["'v' value", "if(id = 17, 9, 1) priority"],
            {},
            "priority: 0 to 4 are allowed, not 9, in row 17 of Spark partition 0",
        ),
        (["if(id = 17, null, 'v') value"], {}, "value: null without a key"),
        (["if(id = 17, repeat('v', 2000000), 'v') value"], {}, "value: 2000000 bytes in row 17"),
    ],
)
def test_what_cannot_be_written_is_said(
    spark: Any,
    broker: BrokerProcess,
    client: sync.Client,
    topic: MakeTopic,
    columns: list[str],
    options: dict[str, Any],
    problem: str,
) -> None:
    name = topic(message_bytes_max=1_000_000)
    frame = spark.range(20).coalesce(1).selectExpr(*columns)
    with pytest.raises(Exception) as caught:
        write(frame, **{"url": broker.url, "topic": name, **options})
    assert problem in str(caught.value)
    assert read(client, name) == []


# -- stream writes with Spark


def copy_stream(spark: Any, url: str, source: str, target: str, checkpoint: Path) -> list[dict[str, Any]]:
    rows = (
        spark.readStream.format("tailrace")
        .option("url", url)
        .option("topic", source)
        .option("max_rows_per_trigger", 100)
        .load()
    )
    query = (
        rows.writeStream.format("tailrace")
        .option("url", url)
        .option("topic", target)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    return list(query.recentProgress)


def test_a_stream_is_written_once(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic, tmp_path: Path
) -> None:
    source, target = topic(partitions=2), topic(partitions=3)
    expected: Counter[bytes] = Counter()
    for round_ in range(2):
        with client.producer(source) as producer:
            for number in range(150):
                value = b"%d-%d" % (round_, number)
                expected[value] += 1
                producer.send(value, key=b"%d" % (number % 10))
        copy_stream(spark, broker.url, source, target, tmp_path / "checkpoint")
        assert values(client, target) == expected
    copy_stream(spark, broker.url, source, target, tmp_path / "checkpoint")
    assert values(client, target) == expected
    numbers = [message.value for message in read(client, target) if message.key == b"7"]
    assert numbers == [b"%d-%d" % (round_, number) for round_ in range(2) for number in range(7, 150, 10)]


def test_batches_of_a_stream_that_writes_to_two_topics(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic, tmp_path: Path
) -> None:
    source, targets = topic(), [topic(), topic()]
    with client.producer(source) as producer:
        for number in range(120):
            producer.send(b"%d" % number)
    failures = iter([True, False])

    def both(frame: Any, batch: int) -> None:
        for target in targets:
            write(frame, broker.url, target, txn_app_id="both", txn_version=batch)
            if next(failures, False):
                raise RuntimeError("between the two")

    rows = spark.readStream.format("tailrace").option("url", broker.url).option("topic", source).load()
    stream = rows.writeStream.foreachBatch(both).option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(Exception, match="between the two"):
        stream.trigger(availableNow=True).start().awaitTermination(60)
    assert stream.trigger(availableNow=True).start().awaitTermination(60)
    for target in targets:
        assert values(client, target) == Counter(b"%d" % number for number in range(120))


def test_a_stream_of_whole_results_is_refused(
    spark: Any, broker: BrokerProcess, topic: MakeTopic, tmp_path: Path
) -> None:
    counts = (
        spark.readStream.format("rate").load().groupBy().count().selectExpr("cast(count as string) value")
    )
    stream = counts.writeStream.format("tailrace").option("url", broker.url).option("topic", topic())
    stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).outputMode("complete")
    with pytest.raises(Exception, match="mode overwrite: messages of a topic cannot be replaced"):
        stream.start().awaitTermination(60)
