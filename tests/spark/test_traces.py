"""The views lifecycle and groups in Spark, and the pipeline `traces` on them.

Covers `spark/pipelines/traces.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tailrace import sync
from tailrace.errors import LeaseLost
from tailrace.spark.pipelines import traces
from tailrace.spark.pipelines.progress import Progress
from tests.e2e.broker_process import BrokerProcess
from tests.spark.conftest import MakeTopic

MESSAGES = 40
GOOD, BAD = "good", "bad"


@pytest.fixture
def story(client: sync.Client, topic: MakeTopic) -> str:
    """A topic with a past: one group has acked all; the other rejected the messages of one key, and holds
    those of another because it nacked the first of them."""
    name = topic(partitions=2)
    for group in (GOOD, BAD):
        client.groups().create(f"{name}-{group}", name)
    with client.producer(name) as producer:
        for number in range(MESSAGES):
            producer.publish(b"%d" % number, key=b"key-%d" % (number % 4))
    consume(client, name, GOOD, MESSAGES, lambda message: message.ack())
    consume(client, name, BAD, 3 * MESSAGES // 4 + 1, misbehave)
    return name


def consume(client: sync.Client, name: str, group: str, count: int, act: Callable[[Any], None]) -> None:
    """Do something with so many messages."""
    with client.consumer(name, f"{name}-{group}") as consumer:
        for message in consumer:
            try:
                act(message)
            except LeaseLost:
                continue  # It waits behind one of its key that failed.
            count -= 1
            if not count:
                return


def misbehave(message: Any) -> None:
    number = int(message.value)
    if number % 4 == 0:
        message.nack(delay=3600, error=f"no stock for {number}")
    elif number % 4 == 1:
        message.reject("bad address")
    else:
        message.ack()


def load(spark: Any, broker: BrokerProcess, name: str, **options: str) -> Any:
    return spark.read.format("tailrace").options(url=broker.url, topic=name, **options).load()


def test_views_and_pipeline(
    spark: Any, broker: BrokerProcess, client: sync.Client, story: str, tmp_path: Path
) -> None:
    events = load(spark, broker, story, view="lifecycle").toArrow().to_pylist()
    check_lifecycle(events, story)
    hour = timedelta(hours=1)
    later = (datetime.now(UTC) + hour).isoformat()
    assert load(spark, broker, story, view="lifecycle", start=later).count() == 0
    assert load(spark, broker, story, view="lifecycle", end=later).count() == len(events)
    check_groups(load(spark, broker, story, view="groups").toArrow().to_pylist(), story)
    with pytest.raises(Exception, match="view=lifecycle"):
        load(spark, broker, story, view="lifecycle", start="17").count()
    options = traces.TraceOptions(topic=story, url=broker.url, out=str(tmp_path / "out"), stuck_s=0)
    summary = traces.run(spark, options, Progress())
    check_summary(summary, story)
    check_files(summary, tmp_path / "out")


@pytest.mark.long
def test_a_second_report_of_one_group(
    spark: Any, broker: BrokerProcess, client: sync.Client, story: str, tmp_path: Path
) -> None:
    good = f"{story}-{GOOD}"
    for number in (1, 2):
        options = traces.TraceOptions(topic=story, url=broker.url, out=str(tmp_path), group=good, stuck_s=0)
        summary = traces.run(spark, options, Progress())
        assert summary.folder.endswith(f"00000{number}")
        assert {stage.group for stage in summary.stages} == {"", good}
        assert summary.causes == summary.stuck == []
    client.groups().reset(good, story, "earliest")
    summary = traces.run(spark, options, Progress())
    assert sorted((key.key, key.behind) for key in summary.stuck) == [
        (f"key-{number}", MESSAGES // 4 - 1) for number in range(4)
    ]


@pytest.mark.long
def test_a_topic_without_messages(
    spark: Any, broker: BrokerProcess, topic: MakeTopic, tmp_path: Path
) -> None:
    options = traces.TraceOptions(topic=topic(), url=broker.url, out=str(tmp_path))
    summary = traces.run(spark, options, Progress())
    assert (summary.messages, summary.events, summary.stages) == (0, 0, [])
    assert "nothing happened" in (tmp_path / "report.html").read_text()


def check_lifecycle(events: list[dict[str, Any]], name: str) -> None:
    good, bad = f"{name}-{GOOD}", f"{name}-{BAD}"
    count = Counter((row["group"], row["event"]) for row in events)
    assert count[None, "appended"] == MESSAGES
    assert count[good, "delivered"] == count[good, "acked"] == MESSAGES
    assert count[bad, "dying"] == count[bad, "dead_lettered"] == MESSAGES // 4
    assert count[bad, "nacked"] >= 1
    assert {row["reason"] for row in events if row["event"] == "dying"} == {"rejected"}
    assert all(row["member"] for row in events if row["event"] in ("delivered", "acked", "nacked"))
    assert {row["topic"] for row in events} == {name}
    assert {row["partition"] for row in events} <= {0, 1}


def check_groups(rows: list[dict[str, Any]], name: str) -> None:
    lags = Counter[str]()
    for row in rows:
        assert (row["topic"], row["mode"]) == (name, "queue")
        assert row["lag"] <= row["end_offset"] - row["position"]
        lags[row["group"]] += row["lag"]
    assert len(rows) == 4
    assert lags[f"{name}-{GOOD}"] == 0
    assert lags[f"{name}-{BAD}"] > 0


def check_summary(summary: traces.TraceSummary, name: str) -> None:
    assert summary.messages == MESSAGES
    stages = {(stage.group, stage.stage): stage for stage in summary.stages}
    assert stages["", "published_to_appended"].count == MESSAGES
    settled = stages[f"{name}-{GOOD}", "delivered_to_settled"]
    assert (settled.count, settled.p50_ms <= settled.p99_ms <= settled.max_ms) == (MESSAGES, True)
    causes = {(cause.kind, cause.cause): cause for cause in summary.causes}
    assert causes["dead_lettered", "rejected: bad address"].messages == MESSAGES // 4
    assert causes["nacked", "no stock for #"].events >= 1
    acked = {(one.group, one.acked) for one in summary.consumers}
    assert (f"{name}-{GOOD}", MESSAGES) in acked
    (stuck,) = [key for key in summary.stuck if key.key == "key-0"]
    assert (stuck.group, stuck.failures, stuck.behind) == (f"{name}-{BAD}", 1, MESSAGES // 4 - 1)
    assert stuck.error.startswith("no stock for ")


def check_files(summary: traces.TraceSummary, out: Path) -> None:
    journeys = pq.read_table(Path(summary.folder) / "journeys").to_pylist()
    outcomes = Counter(row["outcome"] for row in journeys if row["group"].endswith(GOOD))
    assert outcomes == {"acked": MESSAGES}
    assert "<svg" in (out / "report.html").read_text()
    assert not list(out.glob(".*"))
    assert pq.read_table(Path(summary.folder) / "stages.parquet").num_rows == len(summary.stages)
