"""The pipeline `compact`: the newest message of each key, over archive and log, round after round.

Covers `spark/pipelines/compact.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tailrace import sync
from tailrace.errors import InvalidRequest
from tailrace.spark.pipelines import archive, compact, project
from tailrace.spark.pipelines.progress import Progress
from tests.e2e.broker_process import BrokerProcess


def put(client: sync.Client, topic: str, **values: bytes | None) -> None:
    """One message for each key, and one without a key."""
    with client.producer(topic) as producer:
        for key, value in values.items():
            producer.send(value, key=key.encode()).result(30)
        producer.send(b"nobody's").result(30)


def state(frame: Any) -> dict[bytes, bytes | None]:
    rows = [(bytes(row.key), None if row.value is None else bytes(row.value)) for row in frame.collect()]
    assert len(rows) == len(dict(rows)), "a key is there once"
    return dict(rows)


def test_table_follows_archive_and_log(spark, broker: BrokerProcess, client, topic, tmp_path):
    name, root = topic(partitions=2), str(tmp_path / "archive")
    put(client, name, a=b"1", b=b"1", c=b"1")
    put(client, name, a=b"2", c=None)
    done = archive.run(spark, archive.ArchiveOptions(topic=name, url=broker.url, root=root), Progress())
    for part in done.partitions:
        client.admin().trim_topic(name, part.partition, part.end)
    put(client, name, b=b"3", d=b"1")
    options = compact.CompactOptions(topic=name, url=broker.url, archive=root, table=str(tmp_path / "table"))
    assert compact.run(spark, options, Progress()).rows == 3
    assert state(project.table(spark, options.table)) == {b"a": b"2", b"b": b"3", b"d": b"1"}
    put(client, name, a=None, c=b"again", d=b"2")
    put(client, name, d=b"3")
    assert compact.run(spark, options, Progress()).rounds == 1
    assert state(project.table(spark, options.table)) == {b"b": b"3", b"c": b"again", b"d": b"3"}
    assert compact.run(spark, options, Progress()).rounds == 0


def test_topic_gets_what_changed(spark, broker: BrokerProcess, client, topic, tmp_path):
    name, target = topic(partitions=2), topic(partitions=1)
    put(client, name, a=b"1", b=b"1")
    put(client, name, a=b"2", c=b"1")
    options = compact.CompactOptions(topic=name, url=broker.url, to_topic=target, state=str(tmp_path))
    compact.run(spark, options, Progress())
    put(client, name, b=None)
    compact.run(spark, options, Progress())
    assert compact.run(spark, options, Progress()).rounds == 0
    rows = spark.read.format("tailrace").options(url=broker.url, topic=target).load().orderBy("offset")
    found = [(bytes(row.key), None if row.value is None else bytes(row.value)) for row in rows.collect()]
    assert sorted(found[:3]) == [(b"a", b"2"), (b"b", b"1"), (b"c", b"1")]
    assert found[3:] == [(b"b", None)]


def test_deleted_keys_stay_where_asked(spark):
    rows = [(b"a", b"1", 1, 0, 1), (b"a", None, 2, 0, 2), (b"b", b"1", 1, 0, 3), (None, b"x", 9, 0, 4)]
    columns = "key binary, value binary, append_time int, partition int, offset long"
    events = spark.createDataFrame(rows, columns)
    assert state(compact.newest_with_deleted(events, None)) == {b"a": None, b"b": b"1"}
    assert state(compact.newest_rows(events, None)) == {b"b": b"1"}
    later = spark.createDataFrame([(b"a", b"2", 3, 1, 0)], columns)
    table = compact.newest_rows(events, None)
    assert state(compact.newest_rows(later, table)) == {b"a": b"2", b"b": b"1"}


def test_one_topic_only(spark):
    with pytest.raises(InvalidRequest, match="topic"):
        compact.run(spark, compact.CompactOptions(topic="a,b", table="t"), Progress())
