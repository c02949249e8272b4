"""The pipeline `backfill`: the same messages in the same order, once, whatever stops it.

Covers `spark/pipelines/backfill.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import InvalidRequest, NotFound
from tailrace.spark.archives import Manifest, manifest_name
from tailrace.spark.manifests import newest_version, publish, replace_file
from tailrace.spark.pipelines import archive, backfill
from tailrace.spark.pipelines.backfill import BackfillChunk, chunk_rows, next_chunk, pause_s
from tailrace.spark.pipelines.progress import Progress, Stopped
from tests.e2e.broker_process import BrokerProcess
from tests.spark.random_messages import publish_random

FIELDS = ("key", "value", "headers", "timestamp", "priority", "expires_at")


class Halting(Progress):
    """Stops when so many steps have begun."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def step(self, text: str, *, rows: int | None = None) -> None:
        self.left -= 1
        if self.left < 0:
            raise Stopped
        super().step(text, rows=rows)


# -- the plan


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200)), min_size=1, max_size=5), st.integers(1, 100)
)
def test_chunks_cover_everything_once(spans, rows_max):
    starts = {part: start for part, (start, _) in enumerate(spans)}
    until = {part: start + length for part, (start, length) in enumerate(spans)}
    chunk = BackfillChunk(0, "w", "s", "t", 1, until, starts, starts, True)
    seen: dict[int, list[int]] = {part: [] for part in starts}
    rows = 0
    while (following := next_chunk(chunk, rows_max)) is not None:
        assert following.version == chunk.version + 1
        assert not following.written
        assert following.rows == rows
        count = sum(following.ends[part] - at for part, at in following.starts.items())
        assert 0 < count <= rows_max
        for part, at in following.starts.items():
            seen[part] += range(at, following.ends[part])
        rows += count
        chunk = following
    assert seen == {part: list(range(starts[part], until[part])) for part in starts}
    assert chunk.ends == until


def test_chunks_and_pauses_keep_limits():
    options = backfill.BackfillOptions(topic="t", chunk_rows=1000, chunk_bytes=10_000)
    assert chunk_rows(options, 1.0) == 1000
    assert chunk_rows(options, 100.0) == 100
    assert chunk_rows(options, 1e9) == 1
    assert chunk_rows(msgspec.structs.replace(options, rows_per_second=20.0), 1.0) == 100
    assert pause_s(100, 20.0, 3.0) == 2.0
    assert pause_s(100, 20.0, 6.0) == 0.0
    assert pause_s(100, 0.0, 0.0) == 0.0


# -- with Spark


def messages(rows: pa.Table) -> dict[int, list[tuple[Any, ...]]]:
    """What must be the same of every message, in order, for each partition."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for row in rows.sort_by([("partition", "ascending"), ("offset", "ascending")]).to_pylist():
        found.setdefault(row["partition"], []).append(tuple(row[name] for name in FIELDS))
    return found


@pytest.fixture
def read(spark: Any, broker: BrokerProcess) -> Callable[[str], pa.Table]:
    def load(topic: str) -> pa.Table:
        return spark.read.format("tailrace").options(url=broker.url, topic=topic).load().toArrow()

    return load


def test_archive_and_log_come_back(spark, broker, client, topic, read, tmp_path):
    """archive, trim, read across, backfill: the same bytes in the same order."""
    source, target = topic(partitions=2), topic(partitions=2)
    published = [publish_random(client, source, 300)]
    kept = archive.ArchiveOptions(topic=source, url=broker.url, root=str(tmp_path))
    ends = {part.partition: part.end for part in archive.run(spark, kept, Progress()).partitions}
    for partition, end in ends.items():
        client.admin().trim_topic(source, partition, end)
    published.append(publish_random(client, source, 100, seed=2))
    expected = messages(pa.concat_tables(published))

    options = backfill.BackfillOptions(
        topic=target, url=broker.url, archive=str(tmp_path), from_topic=source, chunk_rows=150
    )
    with pytest.raises(Stopped):
        backfill.run(spark, options, Halting(2))
    publish_random(client, source, 10, seed=3)  # Not part of it: the first run has fixed where it ends.
    summary = backfill.run(spark, options, Progress())
    assert (summary.rows, summary.rows_total, summary.complete) == (250, 400, True)
    assert messages(read(target)) == expected
    again = backfill.run(spark, options, Progress())
    assert (again.chunks, again.rows, again.rows_total, again.complete) == (0, 0, 400, True)
    # Killed behind the write and before the note: the version is written again, and that writes nothing.
    (state,) = tmp_path.rglob("backfill-*")
    last = msgspec.json.decode(newest_version(state) or b"", type=BackfillChunk)
    unwritten = msgspec.json.encode(msgspec.structs.replace(last, written=False))
    replace_file(state / manifest_name(last.version), unwritten)
    assert backfill.run(spark, options, Progress()).chunks == 1
    assert messages(read(target)) == expected


def test_any_dataframe_in_order_of_its_keys(spark, broker, topic, read, tmp_path):
    target = topic(partitions=3)
    rows = [(b"key-%d" % key, b"%d" % number, number) for key in range(20) for number in range(15)]
    random.Random(1).shuffle(rows)
    path = str(tmp_path / "rows")
    spark.createDataFrame(rows, "key binary, value binary, number long").repartition(4).write.parquet(path)
    frame = spark.read.parquet(path)
    options = backfill.BackfillOptions(
        topic=target,
        url=broker.url,
        state=str(tmp_path / "state"),
        chunks=2,
        order_by=["number"],
        rows_per_second=1e6,
    )
    with pytest.raises(Exception, match="number"):
        backfill.backfill_frame(frame, options, Progress())
    ordered = frame.selectExpr("key", "value", "timestamp_micros(number) AS timestamp")
    by_time = msgspec.structs.replace(options, order_by=["timestamp"], state=str(tmp_path / "other"))
    summary = backfill.backfill_frame(ordered, by_time, Progress())
    assert (summary.chunks, summary.rows, summary.complete) == (2, 300, True)
    assert backfill.backfill_frame(ordered, by_time, Progress()).chunks == 0
    found = read(target).sort_by([("partition", "ascending"), ("offset", "ascending")])
    by_key: dict[bytes, list[int]] = {}
    for key, value in zip(found["key"].to_pylist(), found["value"].to_pylist(), strict=True):
        by_key.setdefault(key, []).append(int(value))
    assert by_key == {b"key-%d" % key: list(range(15)) for key in range(20)}


def test_an_archive_without_the_topic_is_refused_and_not_taken_for_an_empty_one(tmp_path):
    publish(tmp_path, Manifest("orders", 7, 1))
    options = backfill.BackfillOptions(topic="copy", archive=str(tmp_path))
    session: Any = None
    with pytest.raises(NotFound, match="has nothing of 'copy'; its topics: orders"):
        backfill.run(session, options, Progress())


def test_what_cannot_be_is_refused(spark, broker, topic, tmp_path):
    one, other = topic(), topic()
    options = backfill.BackfillOptions(topic=one, url=broker.url)
    with pytest.raises(InvalidRequest, match="from_topic"):
        backfill.run(spark, options, Progress())
    with pytest.raises(InvalidRequest, match="follow"):
        backfill.run(spark, msgspec.structs.replace(options, follow=True), Progress())
    copy = msgspec.structs.replace(options, from_topic=other)
    with pytest.raises(InvalidRequest, match="state"):
        backfill.run(spark, copy, Progress())
    copy = msgspec.structs.replace(copy, state=str(tmp_path))
    assert backfill.run(spark, copy, Progress()).complete, "nothing to do"
    with pytest.raises(InvalidRequest, match=f"state: .* to {one}"):
        backfill.run(spark, msgspec.structs.replace(copy, topic=other, from_topic=one), Progress())
    assert [path.name for path in Path(tmp_path).iterdir()] == [manifest_name(0)]
