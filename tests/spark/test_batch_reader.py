"""Batch reads with Spark: what was published is what is read, and what cannot be read is named.

Covers `spark/source/data_source.py`, `spark/source/views.py` and `spark/source/batch_reader.py`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from tailrace import sync
from tailrace.errors import InvalidRequest, TailraceError
from tailrace.format.tabular import POSITIONED
from tailrace.spark.link import BrokerLink
from tailrace.spark.options import read_options
from tailrace.spark.source.batch_reader import planned
from tailrace.spark.source.data_source import DefaultSource
from tests.e2e.broker_process import BrokerProcess
from tests.spark.random_messages import publish_random

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
Read = Callable[..., Any]


@pytest.fixture
def read(spark: Any, broker: BrokerProcess) -> Read:
    """`read(topic=…, start=…)` on the shared broker."""

    def load(**options: Any) -> Any:
        named = {"url": broker.url, **{name: str(value) for name, value in options.items()}}
        return spark.read.format("tailrace").options(**named).load()

    return load


def table(df: Any) -> pa.Table:
    """The rows by topic, partition and offset."""
    found = df.toArrow()
    schema = pa.schema([POSITIONED.field(name) for name in found.schema.names])
    return found.cast(schema).sort_by([(name, "ascending") for name in ("topic", "partition", "offset")])


def numbered(client: sync.Client, topic: str, count: int, **fields: Any) -> None:
    """Values that are the numbers 0 to count - 1, each at that offset of partition 0."""
    with client.producer(topic) as producer:
        for first in range(0, count, 500):
            values = [b"%d" % number for number in range(first, min(first + 500, count))]
            producer.send_many(values, partition=0, **fields).result(30)


def numbers(df: Any) -> list[int]:
    return sorted(int(row.value) for row in df.select("value").collect())


# -- what was published is what is read


def test_everything_published_is_read(read, client, topic):
    name = topic(partitions=3)
    published = publish_random(client, name, 1200)
    whole = read(topic=name)
    assert table(whole).equals(published)
    cut = read(topic=name, rows_per_partition=100)
    assert cut.rdd.getNumPartitions() >= 12
    assert table(cut).equals(published)
    some = read(topic=name, columns="headers,offset,partition,topic")
    assert some.columns == ["headers", "offset", "partition", "topic"]
    assert table(some).equals(published.select(some.columns))


def test_tasks_follow_partitions_and_offsets(read, client, topic):
    name = topic(partitions=1)
    numbered(client, name, 3000)
    slices = read(topic=name, rows_per_partition=1000, columns="value").rdd.glom().collect()
    assert [int(row.value) for part in slices for row in part] == list(range(3000))
    assert [len(part) for part in slices] == [1000] * 3


def test_large_values_are_read_from_a_list_of_topics(read, client, topic):
    names = sorted((topic(partitions=1), topic(partitions=1)))
    published = [
        publish_random(client, name, 12, value_bytes_max=1024 * 1024, seed=seed)
        for name, seed in zip(names, (5, 6), strict=True)
    ]
    assert max(len(value or b"") for value in published[1]["value"].to_pylist()) > 1_000_000
    assert table(read(topic=", ".join(names))).equals(pa.concat_tables(published))


def test_many_partitions_are_read_by_a_pattern(read, client, topic):
    name = topic(partitions=100)
    with client.producer(name) as producer:
        for number in range(150):
            producer.send(b"%d" % number, partition=number % 100)
    found = table(read(topic_pattern=f"{name[:-2]}.*{name[-1]}", columns="topic,partition,offset,value"))
    assert found["partition"].to_pylist() == sorted(number % 100 for number in range(150))
    assert sorted(found["value"].to_pylist(), key=int) == [b"%d" % number for number in range(150)]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_random_topics_of_all_sizes(read, client, topic):
    for seed, (partitions, rows_max, value_max) in enumerate(
        ((1, 0, 50_000), (7, 333, 200), (100, 0, 2_000), (3, 50, 1_000_000))
    ):
        name = topic(partitions=partitions)
        count = 300 if value_max > 500_000 else 4000
        published = publish_random(client, name, count, seed=100 + seed, value_bytes_max=value_max)
        assert table(read(topic=name, rows_per_partition=rows_max)).equals(published), seed


def test_delayed_messages_are_read_when_they_are_there(read, client, topic):
    name = topic(partitions=1)
    with client.producer(name) as producer:
        for delay in (0.3, 0.1, 0.2):
            producer.send(b"%d" % round(delay * 10), delay=delay, priority=4, partition=0)
        producer.send(b"0", partition=0)
        producer.send(b"never", delay=3600, partition=0)
        producer.flush()
    with client.reader(name, start="earliest") as reader:
        for _ in range(4):
            next(iter(reader))
    rows = sorted(read(topic=name).collect(), key=lambda row: row.offset)
    assert [row.value for row in rows] == [b"0", b"1", b"2", b"3"]
    assert [row.deliver_at is None for row in rows] == [True, False, False, False]
    assert [row.priority for row in rows] == [2, 4, 4, 4]


def test_reads_beside_writes_rotation_and_deletion(read, client, topic):
    name = topic(partitions=1)
    numbered(client, name, 20_000)
    stop, written = threading.Event(), [20_000]

    def write() -> None:
        with client.producer(name) as producer:
            while not stop.is_set() and written[0] < 60_000:
                values = [b"%d" % n + b" " * 200 for n in range(written[0], written[0] + 500)]
                producer.send_many(values, partition=0).result(30)
                written[0] += 500

    writer = threading.Thread(target=write)
    writer.start()
    try:
        kept = 0
        for _ in range(3):
            before = written[0]
            df = read(topic=name, columns="offset,value", start=kept, rows_per_partition=4000)
            rows = sorted((row.offset, int(row.value)) for row in df.collect())
            end = rows[-1][0] + 1
            assert end >= before
            assert rows == [(offset, offset) for offset in range(kept, end)]
            kept += 9_000
            client.admin().trim_topic(name, 0, kept)
    finally:
        stop.set()
        writer.join()


# -- from where to where


def test_points(read, client, topic):
    name = topic(partitions=2)
    base = datetime(2025, 1, 1, tzinfo=UTC)
    with client.producer(name) as producer:
        for number in range(10):
            time = base + timedelta(minutes=number)
            producer.send(b"%d" % number, partition=0, timestamp=time)
        producer.send(b"100", partition=1, timestamp=base)
    both = [*range(10), 100]
    assert numbers(read(topic=name)) == both
    assert numbers(read(topic=name, start="latest")) == []
    assert numbers(read(topic=name, start=1)) == list(range(1, 10))
    assert numbers(read(topic=name, end=1)) == [0, 100]
    assert numbers(read(topic=name, start="2025-01-01T00:04:00Z")) == [4, 5, 6, 7, 8, 9]
    assert numbers(read(topic=name, start="2025-01-01T01:03:30+01:00", end="2025-01-01T00:06:00Z")) == [4, 5]
    by_place = {"start": json.dumps({name: {"0": 7, "1": -1}}), "end": json.dumps({name: {"0": 9, "1": -1}})}
    assert numbers(read(topic=name, **by_place)) == [7, 8]
    assert numbers(read(topic=name, start=json.dumps({name: {"1": 1}}))) == list(range(10))
    assert numbers(read(topic=name, end=json.dumps({name: {"0": -2}}))) == [100]


def test_expired_messages_are_left_out_when_asked(read, client, topic):
    name = topic(partitions=1)
    with client.producer(name) as producer:
        producer.send(b"1", expires_at=EPOCH + timedelta(microseconds=1), partition=0)
        producer.send(b"2", ttl=3600, partition=0)
        producer.send(b"3", partition=0)
    assert numbers(read(topic=name)) == [1, 2, 3]
    assert numbers(read(topic=name, skip_expired=True, columns="value")) == [2, 3]


# -- filters


@pytest.fixture
def pushing(spark: Any) -> Iterator[Callable[[bool], None]]:
    before = spark.conf.get(PUSHDOWN)
    yield lambda on: spark.conf.set(PUSHDOWN, str(on).lower())
    spark.conf.set(PUSHDOWN, before)


def plan_of(df: Any) -> str:
    return str(df._jdf.queryExecution().executedPlan().toString())


def test_filters_give_the_same_rows_pushed_or_not(spark, read, client, topic, pushing):
    name = topic(partitions=3)
    published = publish_random(client, name, 600, seed=9)
    middle = sorted(published["timestamp"].to_pylist())[300].isoformat()
    memory = spark.createDataFrame(published)
    pushed = (
        "partition IN (0, 2) AND offset BETWEEN 10 AND 90",
        f"timestamp >= TIMESTAMP '{middle}' AND partition = 1",
        f"timestamp < TIMESTAMP '{middle}' AND key = X'6B65792D31'",
        "key IS NULL AND offset IN (1, 5, 60)",
        "key <> X'' AND partition != 0",
    )
    mixed = ("priority = 3 AND partition >= 1", "priority >= 1", "offset = 3 OR key IS NULL")
    for text in pushed + mixed:
        expected = table(memory.where(text))
        assert 0 < expected.num_rows < published.num_rows, text
        narrow = read(topic=name, filters=True).where(text)
        assert table(narrow).equals(expected), text
        assert ("Filter (" in plan_of(narrow)) == (text in mixed), text
    pushing(False)
    plain = read(topic=name, filters=True).where(text)
    assert table(plain).equals(expected), "a session that does not allow it"


def test_a_data_frame_serves_queries_with_different_filters(read, client, topic, pushing):
    """Spark keeps the plan of the last query that pushed filters; that must not cost rows by default."""
    name = topic(partitions=2)
    published = publish_random(client, name, 100, seed=2)
    pushing(True)
    shared = read(topic=name)
    first, second = shared.where("partition = 0"), shared.where("partition = 1")
    assert 0 < first.count() < shared.count() == published.num_rows
    assert first.union(second).count() == published.num_rows


# -- what cannot be read


@contextmanager
def fails(*texts: str) -> Iterator[None]:
    with pytest.raises(Exception) as caught:
        yield
    for text in texts:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"colour": "red"}, "colour: no such option"),
        ({"columns": "value,colour"}, "columns: each once"),
        ({"start": "yesterday"}, "start: earliest, latest"),
        ({"rows_per_partition": "-1"}, "rows_per_partition: a whole number"),
        ({"topic": ""}, "topic: either topic or topic_pattern is needed"),
        ({"max_rows_per_trigger": "5", "end": "7"}, "end: an option for batch read only"),
        ({"mode": "archive"}, "archive: mode archive needs the folder"),
    ],
)
def test_bad_options_are_named_when_the_schema_is_asked_for(options, text):
    with pytest.raises(InvalidRequest, match=text):
        DefaultSource({"topic": "t", **options}).schema()


def test_what_only_the_broker_knows_is_named(read, broker, client, topic):
    name = topic(partitions=2)
    numbered(client, name, 10)
    link = BrokerLink(broker.url, 10.0)
    for options, text in (
        ({"topic": f"{name},nowhere"}, "no topic 'nowhere'"),
        ({"topic_pattern": "nowhere"}, "topic_pattern: .*'nowhere'"),
        ({"topic": name, "start": json.dumps({"other": {"0": 1}})}, "start: topic 'other' is not among"),
        ({"topic": name, "end": json.dumps({name: {"7": 1}})}, f"end: topic '{name}' has no partition 7"),
        ({"topic": name, "start": json.dumps({name: {"0": -3}})}, f"start: {name}/0 has no offset -3"),
        ({"topic": name, "start": "5", "end": "3"}, "start: 5 lies behind end, 3"),
        ({"topic": name, "start": "11"}, f"start: {name}/0 has no offset 11: it ends at 10"),
    ):
        with pytest.raises(TailraceError, match=text):
            planned(link, read_options({"url": broker.url, **options}))
    link.close()
    with fails("colour: no such option"):
        read(topic=name, colour="red")
    with fails("no topic 'nowhere'"):
        read(topic="nowhere").collect()
    with fails("max_rows_per_trigger: an option for stream read only"):
        read(topic=name, max_rows_per_trigger=5).collect()


def test_schemas_that_do_not_fit_are_named(spark, broker, client, topic):
    name = topic(partitions=1)
    numbered(client, name, 3)
    source = spark.read.format("tailrace").option("url", broker.url)
    chosen = source.schema("value BINARY, offset BIGINT").load(name)
    assert sorted(chosen.collect()) == [(b"0", 0), (b"1", 1), (b"2", 2)]
    with fails("schema: value is BINARY, not STRING"):
        source.schema("value STRING").load(name).collect()
    with fails("schema: no column colour"):
        source.schema("colour STRING").load(name).collect()
    spark.sql(f"CREATE TEMPORARY VIEW seen USING tailrace OPTIONS (url '{broker.url}', topic '{name}')")
    assert spark.sql("SELECT max(offset) FROM seen").collect() == [(2,)]
    spark.catalog.dropTempView("seen")


def test_deleted_offsets_are_named(read, client, topic):
    name = topic(partitions=1)
    numbered(client, name, 100)
    df = read(topic=name, start=10)
    client.admin().trim_topic(name, 0, 50)
    with fails(f"start: offsets 10 to 49 of {name}/0 are gone"):
        df.collect()
    with fails(f"start: offsets 0 to 19 of {name}/0 are gone"):
        read(topic=name, start=0, end=20).collect()
    assert numbers(read(topic=name, start=10, fail_on_data_loss=False)) == list(range(50, 100))
    assert numbers(read(topic=name)) == list(range(50, 100))


def test_an_unreachable_broker_is_named(spark):
    with fails("127.0.0.1:9"):
        spark.read.format("tailrace").options(url="tailrace://127.0.0.1:9", timeout_s="1").load("t").count()


def _halting(address: tuple[str, int]) -> Callable[[Iterator[Any]], None]:
    """For foreachPartition: says that it has its first row, and goes on when it is told to."""

    def take(rows: Iterator[Any]) -> None:
        if next(rows).offset == 0:
            with socket.create_connection(address) as test:
                test.recv(1)
        for _ in rows:
            pass

    return take


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_broker_that_dies_in_the_middle(spark, own_broker, comes_back):
    with sync.connect(own_broker.url) as client:
        client.admin().create_topic("t", partitions=1, durability="interval")
        numbered(client, "t", 40_000)
    options = {"url": own_broker.url, "timeout_s": "20" if comes_back else "2", "rows_per_partition": "2000"}
    df = spark.read.format("tailrace").options(**options).load("t").select("offset")
    outcome: list[BaseException | None] = []

    def run(take: Any) -> None:
        try:
            df.foreachPartition(take)
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    with socket.create_server(("127.0.0.1", 0)) as server:
        job = threading.Thread(target=run, args=(_halting(server.getsockname()),))
        job.start()
        halted, _ = server.accept()
        own_broker.kill()
        if comes_back:
            own_broker.start()
        halted.close()
        job.join(60)
    assert not job.is_alive()
    if comes_back:
        assert outcome == [None]
        assert df.count() == 40_000
    else:
        assert "t/0 from" in str(outcome[0]) or "no broker at" in str(outcome[0])
        assert own_broker.listen in str(outcome[0])
