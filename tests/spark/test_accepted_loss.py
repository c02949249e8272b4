"""Rows over a gap whose loss was accepted: the rest is read right, in batches and in streams, and the gap is
never passed over in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace import sync
from tailrace.errors import Corrupt
from tests.e2e.broker_process import BrokerProcess

MESSAGES = 60
VALUE_BYTES = 50_000


def _value(number: int) -> bytes:
    return b"%d" % number + b"." * VALUE_BYTES


@pytest.fixture
def damaged(own_broker: BrokerProcess) -> tuple[BrokerProcess, list[int]]:
    """A broker with a topic "a" of which some offsets are lost, and the offsets that are left."""
    with sync.connect(own_broker.url) as client:
        client.admin().create_topic("a", partitions=1, ring_buffer_bytes=0)
        with client.producer("a") as producer:
            for number in range(MESSAGES):
                producer.publish(_value(number))
        segments = sorted((own_broker.data / "topics" / "a~1" / "0").glob("*.log"))
        with segments[0].open("r+b") as file:
            file.seek(int(segments[0].stat().st_size * 0.53))
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 8]))
        with (
            pytest.raises(Corrupt),
            client.reader("a", start="earliest", stop_at_end=True) as reader,
        ):
            list(reader)
        report = client.admin().accept_loss("a", 0, dry_run=False)
        assert report.done
        gone = {offset for span in _ranges(report) for offset in range(*span)}
        assert 0 < len(gone) < MESSAGES
        with client.producer("a") as producer:
            assert producer.publish(_value(MESSAGES)).offset == MESSAGES
    return own_broker, [offset for offset in range(MESSAGES + 1) if offset not in gone]


def _ranges(report: Any) -> list[tuple[int, int]]:
    return [(row["first_offset"], row["end_offset"]) for row in report.ranges]


def _check(rows: list[Any], left: list[int]) -> None:
    assert sorted(row.offset for row in rows) == left
    assert all(bytes(row.value) == _value(row.offset) for row in rows)


def _read(spark: Any, broker: BrokerProcess, **options: str) -> Any:
    given = {"url": broker.url, "topic": "a", "start": "earliest", **options}
    return spark.read.format("tailrace").options(**given).load().select("offset", "value")


@pytest.mark.timeout(300)
def test_rows_over_an_accepted_gap(
    spark: Any, damaged: tuple[BrokerProcess, list[int]], tmp_path: Path
) -> None:
    broker, left = damaged
    first_gone = next(offset for offset in range(MESSAGES) if offset not in left)
    with pytest.raises(Exception, match=rf"offsets {first_gone} to \d+"):
        _read(spark, broker).collect()
    _check(_read(spark, broker, fail_on_data_loss="false").collect(), left)
    # Only what is asked for counts: before and behind the gap nothing is missing.
    last_gone = max(offset for offset in range(MESSAGES) if offset not in left)
    behind = [offset for offset in left if offset > last_gone]
    _check(_read(spark, broker, start=str(last_gone + 1)).collect(), behind)
    before = [offset for offset in left if offset < first_gone]
    _check(_read(spark, broker, end=str(first_gone)).collect(), before)

    def stream(name: str, **options: str) -> list[Any]:
        given = {"url": broker.url, "topic": "a", "start": "earliest", **options}
        frame = spark.readStream.format("tailrace").options(**given).load().select("offset", "value")
        writing = frame.writeStream.format("parquet").trigger(availableNow=True)
        place = str(tmp_path / name)
        writing.option("checkpointLocation", place + "-checkpoint").start(place).awaitTermination(120)
        found: list[Any] = spark.read.parquet(place).collect()
        return found

    with pytest.raises(Exception, match=rf"offsets {first_gone} to \d+"):
        stream("strict")
    _check(stream("lenient", fail_on_data_loss="false", max_rows_per_trigger="25"), left)
