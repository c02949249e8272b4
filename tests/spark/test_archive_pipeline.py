"""The pipeline `archive`: what was published is in the archive once, and reads go on into the log.

Covers `spark/pipelines/archive.py`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tailrace.errors import NotFound
from tailrace.format.tabular import POSITIONED
from tailrace.spark.archives import Manifest, state_folder
from tailrace.spark.manifests import newest, parquet_files, settled, staging_folder
from tailrace.spark.options import read_options
from tailrace.spark.pipelines import archive, backfill
from tailrace.spark.pipelines.progress import Progress, Stopped
from tailrace.spark.source.archive_reader import ArchiveReader
from tests.e2e.broker_process import BrokerProcess
from tests.spark.driver_process import DriverProcess
from tests.spark.random_messages import publish_random

Read = Callable[..., pa.Table]


class Halting(Progress):
    """Stops at the step whose text begins so."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def step(self, text: str, *, rows: int | None = None) -> None:
        if self.text in text:
            raise Stopped
        super().step(text, rows=rows)


@pytest.fixture
def options(broker: BrokerProcess, tmp_path: Path) -> Callable[..., archive.ArchiveOptions]:
    def make(topic: str, **more: Any) -> archive.ArchiveOptions:
        return archive.ArchiveOptions(topic=topic, url=broker.url, root=str(tmp_path), **more)

    return make


@pytest.fixture
def read(spark: Any, broker: BrokerProcess, tmp_path: Path) -> Read:
    """Rows of a topic from archive and log, by partition and offset."""

    def load(topic: str, **more: Any) -> pa.Table:
        named = {"url": broker.url, "topic": topic, "mode": "archive", "archive": str(tmp_path)}
        found = spark.read.format("tailrace").options(**named, **{k: str(v) for k, v in more.items()}).load()
        return ordered(found.toArrow())

    return load


def ordered(rows: pa.Table) -> pa.Table:
    schema = pa.schema([POSITIONED.field(name) for name in rows.schema.names])
    return rows.cast(schema).sort_by([("partition", "ascending"), ("offset", "ascending")])


def manifest_of(root: Path, topic: str) -> Manifest:
    found = newest(root, topic)
    assert found is not None
    return found


def files_below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("topic=*/**/*.parquet")}


def trim(client: Any, root: Path, topic: str) -> None:
    """Let the broker forget all that is archived."""
    for partition, cover in manifest_of(root, topic).partitions.items():
        client.admin().trim_topic(topic, partition, cover.end)


def test_topic_moves_to_the_archive(spark, client, topic, options, read, tmp_path):
    name = topic(partitions=3)
    first = publish_random(client, name, 400)
    conf = spark.conf.get("spark.sql.maxConcurrentOutputFileWriters")
    summary = archive.run(spark, options(name), Progress())
    assert (summary.rounds, summary.rows) == (1, 400)
    assert summary.files >= 3, "one for each partition, or two around midnight"
    assert spark.conf.get("spark.sql.maxConcurrentOutputFileWriters") == conf
    assert read(name).equals(first)

    trim(client, tmp_path, name)
    both = ordered(pa.concat_tables([first, publish_random(client, name, 300, seed=2)]))
    assert read(name).equals(both), "archive, then log"
    again = archive.run(spark, options(name), Progress())
    assert (again.rounds, again.rows) == (1, 300)
    trim(client, tmp_path, name)
    assert read(name).equals(both), "archive alone"
    assert archive.run(spark, options(name), Progress()).rounds == 0

    manifest = manifest_of(tmp_path, name)
    assert manifest.paths() == files_below(tmp_path)
    assert sum(part.end - part.start for part in summary.partitions) == 400
    for path in manifest.paths():
        metadata = pq.read_metadata(tmp_path / path)
        assert metadata.row_group(0).column(0).compression == "ZSTD"
        names = [metadata.schema.column(at).path for at in range(metadata.num_columns)]
        time = metadata.schema.column(names.index("append_time"))
        assert (time.physical_type, "microseconds" in str(time.logical_type)) == ("INT64", True)
    some = read(name, columns="partition,offset,value,topic", start=10, rows_per_partition=40)
    assert some.equals(both.filter(pc.greater_equal(both["offset"], 10)).select(some.schema.names))
    at = both["timestamp"][50].as_py()
    late = read(name, start=at.isoformat())
    for partition in range(3):
        rows = both.filter(pc.equal(both["partition"], partition))
        place = pc.index(pc.greater_equal(rows["timestamp"], pa.scalar(at)), True).as_py()
        here = late.filter(pc.equal(late["partition"], partition))
        assert here.equals(rows.slice(place) if place >= 0 else rows.slice(0, 0))


def test_rounds_hours_and_small_files(spark, client, topic, options, read, tmp_path):
    name = topic(partitions=2)
    published = publish_random(client, name, 500)
    many = options(name, hourly=True, rows_per_round=180, rows_per_file=25, merge_min=2, keep_s=0.0)
    summary = archive.run(spark, many, Progress())
    assert summary.rounds == 3
    assert summary.merged >= 10
    manifest = manifest_of(tmp_path, name)
    assert sum(len(cover.files) for cover in manifest.partitions.values()) <= 2 * 3
    assert all("/hour=" in path for path in manifest.paths())
    half = {part: pc.sum(pc.equal(published["partition"], part)).as_py() // 2 for part in (0, 1)}
    some = read(name, end=json.dumps({name: half}))["offset"].to_pylist()
    assert some == [*range(half[0]), *range(half[1])]
    assert archive.run(spark, many, Progress()).removed > 0, "what was merged belongs to nothing any more"
    assert manifest.paths() == files_below(tmp_path)
    assert len(list((tmp_path / state_folder(name)).iterdir())) == 1, "one manifest, and nothing staged"
    assert read(name).equals(published)


def test_killed_before_the_manifest(spark, client, topic, options, read, tmp_path):
    """The files are in their places, and nobody names them."""
    name = topic(partitions=2)
    published = publish_random(client, name, 200)
    work = archive.Archiver(spark, options(name), Progress())
    _, ranges, bounds = work.plan(name)
    staging = staging_folder(tmp_path, name, "killed")
    work.write(work.messages(name, ranges, bounds), str(staging))
    assert read(name).equals(published), "what is staged does not count"
    settled(tmp_path, name, parquet_files(staging), "killed", hourly=False)
    left = files_below(tmp_path)
    assert len(left) >= 2
    assert read(name).equals(published), "files that nobody names do not count"
    with pytest.raises(Stopped):
        archive.run(spark, options(name), Halting("putting version"))
    assert newest(tmp_path, name) is None
    assert files_below(tmp_path) == left, "who stops in an orderly way leaves nothing"
    for path in [*(tmp_path / path for path in left), staging]:
        os.utime(path, (0, 0))
    assert archive.run(spark, options(name), Progress()).rows == 200
    trim(client, tmp_path, name)
    assert read(name).equals(published)
    assert files_below(tmp_path) == manifest_of(tmp_path, name).paths()
    assert not staging.exists()


DRIVER = """
import json, sys
from tailrace.spark import sessions
from tailrace.spark.pipelines import archive, backfill
from tailrace.spark.pipelines.progress import Progress

class Telling(Progress):
    def step(self, text, *, rows=None):
        super().step(text, rows=rows)
        print(json.dumps(text), flush=True)
        sys.stdin.readline()

session = sessions.session("killed", master="local[2]")
pipeline = {"archive": archive, "backfill": backfill}[sys.argv[1]]
pipeline.run(session, pipeline.OPTIONS(**json.loads(sys.argv[2])), Telling())
print(json.dumps("done"), flush=True)
"""


def kill_at(log: Path, words: str, name: str, options: Any) -> None:
    """Run a pipeline in a process of its own, and kill it with its JVM when such a step begins."""
    given = json.dumps({k: v for k, v in msgspec.to_builtins(options).items() if v is not None})
    with DriverProcess(log, "-c", DRIVER, name, given) as driver:
        while words not in (step := driver.answer()):
            assert step != "done"
            driver.tell("")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", ["putting version 3", "naming the files of version 3", "merging"])
def test_driver_killed_while_it_archives(words, spark, client, topic, options, read, tmp_path):
    name = topic(partitions=2)
    published = publish_random(client, name, 400)
    # The first round is version 1, the merge of its files version 2.
    many = options(name, rows_per_round=150, rows_per_file=40, merge_min=2, keep_s=0.0)
    kill_at(tmp_path / "driver.log", words, "archive", many)
    assert read(name).equals(published)
    archive.run(spark, many, Progress())
    trim(client, tmp_path, name)
    assert read(name).equals(published)
    assert files_below(tmp_path) >= manifest_of(tmp_path, name).paths()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", ["chunk 2", "chunk 3"])
def test_driver_killed_while_it_fills_back(words, spark, broker, client, topic, options, read, tmp_path):
    name, target = topic(partitions=2), topic(partitions=2)
    published = publish_random(client, name, 400)
    archive.run(spark, options(name), Progress())
    back = backfill.BackfillOptions(
        topic=target, url=broker.url, archive=str(tmp_path), from_topic=name, chunk_rows=100
    )
    kill_at(tmp_path / "driver.log", words, "backfill", back)
    assert backfill.run(spark, back, Progress()).rows_total == 400
    again = read(target)
    same = ["partition", "offset", "key", "value", "headers", "timestamp"]
    assert again.select(same).equals(published.select(same))


def test_two_runs_at_once(spark, client, topic, options, read, tmp_path):
    name = topic(partitions=2)
    published = publish_random(client, name, 300)
    found: list[archive.ArchiveSummary] = []

    def run() -> None:
        found.append(archive.run(spark, options(name, rows_per_round=150), Progress()))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(summary.rows for summary in found) == 300
    trim(client, tmp_path, name)
    assert read(name).equals(published)
    assert files_below(tmp_path) == manifest_of(tmp_path, name).paths()


def test_what_was_trimmed_too_early_is_named(spark, client, topic, options, read):
    name = topic(partitions=1)
    published = publish_random(client, name, 100)
    archive.run(spark, options(name), Progress())
    published = ordered(pa.concat_tables([published, publish_random(client, name, 50, seed=2)]))
    client.admin().trim_topic(name, 0, 120)
    with pytest.raises(NotFound, match=r"offsets 100 to 119 .*accept_loss"):
        archive.run(spark, options(name), Progress())
    with pytest.raises(Exception, match="offsets 100 to 119 lies between the archive and the log"):
        read(name)
    archive.run(spark, options(name, accept_loss=True), Progress())
    with pytest.raises(Exception, match="offsets 100 to 119 is not in the archive"):
        read(name)
    left = read(name, fail_on_data_loss="false")
    assert left.equals(pa.concat_tables([published.slice(0, 100), published.slice(120)]).combine_chunks())


def test_retention_overtakes_a_read(spark, broker, client, topic, options, tmp_path):
    """What the plan expects in the log is in the archive when it is read."""
    name = topic(partitions=1)
    published = publish_random(client, name, 200)
    given = {"url": broker.url, "topic": name, "mode": "archive", "archive": str(tmp_path)}
    schema = spark.read.format("tailrace").options(**given).load().schema
    reader = ArchiveReader(read_options(given | {"rows_per_partition": "150"}), schema)
    parts = reader.partitions()
    archive.run(spark, options(name), Progress())
    client.admin().trim_topic(name, 0, 130)
    rows = pa.Table.from_batches([batch for part in parts for batch in reader.read(part)], POSITIONED)
    assert rows.equals(published)
    whole = read_options(given | {"end": json.dumps({name: {0: 200}}), "url": "tailrace://127.0.0.1:1"})
    alone = ArchiveReader(whole, schema)
    assert len(alone.partitions()) == 1, "no broker is needed for what is archived"
