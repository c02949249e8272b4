"""Mode segments: sealed files give the rows that the broker gives, and nothing in their folder changes.

Covers `spark/source/sealed_logs.py` and `spark/source/segment_rows.py`.
"""

from __future__ import annotations

import os
import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace import sync
from tailrace.errors import Corrupt, InvalidRequest, NotFound
from tailrace.format.tabular import POSITIONED
from tailrace.spark.options import ReadOptions, read_options
from tailrace.spark.source.row_batches import row_batches
from tailrace.spark.source.sealed_logs import TOPICS, SealedLog, load_catalog, sealed_log
from tailrace.spark.source.segment_rows import planned, segment_frames
from tailrace.storage.files.inspect import ViewedDisk
from tests.e2e.broker_process import BrokerProcess
from tests.spark.random_messages import publish_random

VALUE_BYTES = 12_000
COUNT = 2_000


def options_of(data: Path, topic: str, **more: Any) -> ReadOptions:
    given = {"topic": topic, "mode": "segments", "data": str(data)}
    return read_options(given | {name: str(value) for name, value in more.items()})


def rows(data: Path, topic: str, **more: Any) -> pa.Table:
    """What the tasks of a read give, all of them, in the order of their slices."""
    options = options_of(data, topic, **more)
    found = [
        batch
        for part in planned(options)
        for batch in row_batches(
            segment_frames(options.data, part, fail_on_data_loss=options.fail_on_data_loss), part
        )
    ]
    return pa.Table.from_batches(found, POSITIONED)


def logs(data: Path, topic: str) -> list[SealedLog]:
    entry = load_catalog(str(data)).topics[topic]
    disk = ViewedDisk(data / TOPICS)
    return [sealed_log(disk, f"{entry.folder}/{partition}") for partition in range(entry.options.partitions)]


def first_files(data: Path, topic: str, suffix: str) -> list[Path]:
    folder = data / TOPICS / load_catalog(str(data)).topics[topic].folder / "0"
    return sorted(path for path in folder.iterdir() if path.suffix == suffix)


def readable(published: pa.Table, found: list[SealedLog]) -> pa.Table:
    mask = [
        found[partition].start <= offset < found[partition].end
        for partition, offset in zip(
            published["partition"].to_pylist(), published["offset"].to_pylist(), strict=True
        )
    ]
    return published.filter(pa.array(mask))


@pytest.fixture(scope="session")
def written(client: sync.Client) -> tuple[str, pa.Table]:
    """A topic with several sealed segments, and what was published to it; Spark comes much later."""
    client.admin().create_topic("sealed", partitions=2, durability="interval")
    return "sealed", publish_random(client, "sealed", COUNT, value_bytes_max=VALUE_BYTES)


@pytest.fixture
def copied(broker: BrokerProcess, written: tuple[str, pa.Table], tmp_path: Path) -> Path:
    """A copy of the broker's folder, made while it runs."""
    entry = load_catalog(str(broker.data)).topics[written[0]]
    shutil.copy(broker.data / "catalog.json", tmp_path / "catalog.json")
    shutil.copytree(broker.data / TOPICS / entry.folder, tmp_path / TOPICS / entry.folder)
    return tmp_path


def test_sealed_part_is_what_was_published(broker, written):
    name, published = written
    found = logs(broker.data, name)
    assert sum(len(log.segments) for log in found) >= 3
    expected = readable(published, found)
    assert 0 < len(expected) < len(published)
    assert rows(broker.data, name).equals(expected)
    assert rows(broker.data, name, rows_per_partition=100).equals(expected)


def test_parts_begin_and_end_where_asked(broker, written):
    name, published = written
    end = logs(broker.data, name)[0].end
    spans = {"start": f'{{"{name}": {{"0": 17, "1": -1}}}}', "end": f'{{"{name}": {{"0": {end - 3}}}}}'}
    found = rows(broker.data, name, **spans)
    assert found["offset"].to_pylist() == list(range(17, end - 3))
    assert set(found["partition"].to_pylist()) == {0}
    for part in planned(options_of(broker.data, name, rows_per_partition=50)):
        assert part.end - part.start <= 50
    one = published["timestamp"][len(published) // 3].as_py()
    start = rows(broker.data, name, start=one.isoformat())
    asked = broker_offsets(broker, name, one)
    for partition, log in enumerate(logs(broker.data, name)):
        here = start.filter(pa.compute.equal(start["partition"], partition))
        assert here["offset"].to_pylist() == list(range(min(asked[partition], log.end), log.end))
    assert len(rows(broker.data, name, start=(datetime.now(UTC) + timedelta(days=1)).isoformat())) == 0


def broker_offsets(broker: BrokerProcess, topic: str, at: datetime) -> list[int]:
    with sync.connect(broker.url) as client:
        return client.admin().find_offsets(topic, at)


def test_end_behind_the_sealed_part_is_refused(broker, written):
    name, published = written
    end = max(published["offset"].to_pylist()) + 1
    with pytest.raises(InvalidRequest, match=r"end: .*sealed part"):
        planned(options_of(broker.data, name, end=end))


def test_what_was_trimmed_stays_away(broker, client, topic):
    name = topic(partitions=1)
    published = publish_random(client, name, COUNT, value_bytes_max=VALUE_BYTES)
    client.admin().trim_topic(name, 0, 100)
    found = logs(broker.data, name)
    assert found[0].start == 100
    assert found[0].segments[0].base_offset == 0, "the messages are in the files still"
    assert rows(broker.data, name).equals(readable(published, found))
    with pytest.raises(NotFound, match="offsets 5 to 99"):
        planned(options_of(broker.data, name, start=5))
    left = rows(broker.data, name, start=5, fail_on_data_loss="false")
    assert left["offset"][0].as_py() == 100


def test_snapshot_knows_the_start(own_broker, tmp_path):
    with sync.connect(own_broker.url) as client:
        client.admin().create_topic("t", partitions=1, durability="interval")
        published = publish_random(client, "t", COUNT // 2, value_bytes_max=VALUE_BYTES)
        client.admin().trim_topic("t", 0, 333)
    own_broker.stop()
    found = logs(own_broker.data, "t")
    folder = own_broker.data / TOPICS / load_catalog(str(own_broker.data)).topics["t"].folder / "0"
    assert list(folder.glob("*.snap")), "a clean stop leaves a snapshot"
    # Without the facts behind it, the snapshot alone has to know.
    first_files(own_broker.data, "t", ".log")[-1].write_bytes(b"")
    assert logs(own_broker.data, "t")[0].start == found[0].start == 333
    assert rows(own_broker.data, "t").equals(readable(published, found))


def test_deleted_segment_is_loss(copied, written, caplog):
    name, _ = written
    options = options_of(copied, name)
    parts = planned(options)
    first_files(copied, name, ".log")[0].unlink()
    with pytest.raises(NotFound, match=f"{name}/0 from 0 to .*deleted.*fail_on_data_loss"):
        list(segment_frames(options.data, parts[0]))
    left = [
        header.base_offset for header, _ in segment_frames(options.data, parts[0], fail_on_data_loss=False)
    ]
    assert left[0] == parts[0].parts[1].start, "only what the deleted segment held is left out"
    assert "left out" in caplog.text
    # A segment that goes while it is open is read to its end.
    reading = segment_frames(options.data, parts[1])
    next(reading)
    for path in (*first_files(copied, name, ".log"), *first_files(copied, name, ".idx")):
        path.unlink()
    rest = list(reading)
    assert rest[-1][0].end_offset >= parts[1].end


def test_missing_index_is_no_loss(copied, written):
    name, _ = written
    before = rows(copied, name)
    for path in first_files(copied, name, ".idx"):
        path.unlink()
    assert rows(copied, name).equals(before)


def test_damage_is_named(copied, written):
    name, _ = written
    path = first_files(copied, name, ".log")[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=path.name):
        rows(copied, name)


def test_segment_that_is_missing_in_the_middle_is_named(copied, written):
    name, _ = written
    first_files(copied, name, ".log")[1].unlink()
    with pytest.raises(Corrupt, match="entries are missing"):
        planned(options_of(copied, name))


def test_folder_stays_as_it_is(copied, written):
    name, _ = written

    def state() -> list[tuple[str, int, int]]:
        paths = sorted(path for path in copied.rglob("*"))
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]

    before = state()
    for folder, _, _ in os.walk(copied):
        os.chmod(folder, 0o500)
    try:
        assert len(rows(copied, name)) > 0
    finally:
        for folder, _, _ in os.walk(copied):
            os.chmod(folder, 0o700)
    assert state() == before


def test_errors_name_the_option(broker, topic, tmp_path):
    with pytest.raises(NotFound, match=r"data: .*catalog\.json"):
        planned(options_of(tmp_path, "t"))
    with pytest.raises(NotFound, match="no folder"):
        planned(options_of(tmp_path / "absent", "t"))
    with pytest.raises(NotFound, match=r"topic: .*'nothing'"):
        planned(options_of(broker.data, "nothing"))
    with pytest.raises(InvalidRequest, match=r"topic: .*memory"):
        planned(options_of(broker.data, topic(storage="memory", durability="memory")))
    assert planned(options_of(broker.data, topic())) == []


def test_while_the_broker_writes_and_deletes(broker, client, topic):
    """Looks at a log that grows, rotates and is trimmed: without gaps, and never behind the last look."""
    name = topic(partitions=1)
    stop = threading.Event()

    def publish() -> None:
        with client.producer(name) as producer:
            while not stop.is_set():
                producer.send_many([os.urandom(4000)] * 200).result(30)

    writer = threading.Thread(target=publish)
    writer.start()
    try:
        ends = [0]
        trimmed = 0
        while len(set(ends)) < 6 or "0" * 20 in first_files(broker.data, name, ".log")[0].name:
            found = rows(broker.data, name, fail_on_data_loss="false")["offset"].to_pylist()
            if found:
                assert found == list(range(found[0], found[-1] + 1))
                assert found[0] >= trimmed
                assert found[-1] >= ends[-1]
                ends.append(found[-1])
                trimmed = (found[0] + found[-1]) // 2
                client.admin().trim_topic(name, 0, trimmed)
    finally:
        stop.set()
        writer.join()


def test_spark_reads_the_same_from_files_and_broker(spark, broker, written):
    name, published = written
    reading = spark.read.format("tailrace").options(mode="segments", data=str(broker.data), topic=name)
    found = logs(broker.data, name)
    ends = f'{{"{name}": {{"0": {found[0].end}, "1": {found[1].end}}}}}'
    through = spark.read.format("tailrace").options(url=broker.url, topic=name, end=ends).load()
    files = reading.load()
    assert files.schema == through.schema
    assert files.rdd.getNumPartitions() == len(found) < sum(len(log.segments) for log in found)
    order = [(column, "ascending") for column in ("partition", "offset")]
    assert files.toArrow().sort_by(order).equals(through.toArrow().sort_by(order))
    assert files.count() == len(readable(published, found))
    some = reading.option("columns", "offset,value").load()
    assert some.columns == ["offset", "value"]
    assert reading.option("end", "earliest").load().count() == 0
