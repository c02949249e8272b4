"""Projections: tables and topics that follow their events, are stopped anywhere, and are made anew.

Covers `spark/pipelines/project.py`, `spark/pipelines/programs.py` and `spark/pipelines/projections.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace import sync
from tailrace.errors import Corrupt, Fenced, InvalidRequest, NotFound
from tailrace.spark.pipelines import archive, project
from tailrace.spark.pipelines.progress import Progress, Stopped
from tailrace.spark.pipelines.projections import (
    LEFTOVERS_KEPT_S,
    Position,
    Positions,
    advanced,
    as_option,
    check_topics,
    distance,
    known,
    lost,
    pending,
)
from tests.e2e.broker_process import SRC, BrokerProcess
from tests.spark import process_tree
from tests.spark.conftest import MakeTopic

pytestmark = pytest.mark.timeout(300)
SUMS = """
SELECT key, sum(n) AS n FROM (
  SELECT cast(key AS string) AS key, cast(cast(value AS string) AS long) AS n FROM events
  UNION ALL SELECT key, n FROM previous
) GROUP BY key
"""
PROGRAM = '''
from pyspark.sql import functions as F

def numbers(events):
    """Each event as a row; the UDF shows that functions of this module reach the workers."""
    double = F.udf(twice, "long")
    return events.select("partition", "offset", double(F.col("value").cast("string")).alias("n"))

def twice(text):
    return 2 * int(text)

def messages(events):
    return events.select("key", F.concat(F.lit("saw "), F.col("value").cast("string")).alias("value"))

def sums(events, previous):
    n = F.col("value").cast("string").cast("long")
    rows = events.select(F.col("key").cast("string").alias("key"), n.alias("n"))
    rows = rows if previous is None else rows.unionByName(previous)
    return rows.groupBy("key").agg(F.sum("n").alias("n"))

def other(events):
    return events.select("offset")

nothing = 7
'''


class Halting(Progress):
    """Stops at its n-th step, like somebody who pulls the plug there."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def step(self, text: str, *, rows: int | None = None) -> None:
        self.left -= 1
        if self.left < 0:
            raise Stopped
        super().step(text, rows=rows)


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of somebody with a module of projections."""
    (tmp_path / "views_of_test.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("views_of_test", None)


def publish(client: sync.Client, topic: str, numbers: range, partition: int | None = None) -> None:
    with client.producer(topic) as producer:
        for n in numbers:
            producer.send(b"%d" % n, key=b"k%d" % (n % 5), partition=partition)


def options(broker: BrokerProcess, topic: str, **more: Any) -> project.ProjectOptions:
    return project.ProjectOptions(topic=topic, url=broker.url, **more)


def position(version: int, **more: Any) -> Position:
    return Position(
        version=version, program="p", topics={"t": 1}, begins={}, ends={"t": {0: version}}, **more
    )


# --------------------------------------------------------------------------------------- without Spark


def test_positions_are_put_once(tmp_path: Path) -> None:
    positions = Positions(tmp_path / "table")
    assert positions.newest() is None
    positions.put(position(1))
    positions.put(position(2, written=False))
    with pytest.raises(Fenced, match="another run has put version 2 in place"):
        positions.put(position(2))
    assert positions.newest() == position(2, written=False)
    positions.replace(position(2))
    assert positions.newest() == position(2)
    assert sorted(os.listdir(tmp_path / "table" / "_tailrace")) == [f"{n:020}.json" for n in (1, 2)]
    (tmp_path / "table" / "_tailrace" / f"{3:020}.json").write_text("{")
    with pytest.raises(Corrupt, match=r"0003\.json"):
        positions.newest()


def test_old_versions_and_leftovers_go(tmp_path: Path) -> None:
    positions = Positions(tmp_path)
    folders = [positions.new_folder(n) for n in range(1, 7)]
    for folder in folders:
        folder.mkdir()
    first, *others, leftover = [folder.name for folder in folders]
    for number, name in enumerate(others, 2):
        positions.put(position(number, folders=[first, name]))
    now = leftover_time = folders[-1].stat().st_mtime
    positions.tidy(now)
    kept = sorted([first, *others[-3:], leftover])
    assert sorted(os.listdir(tmp_path / "_versions")) == kept
    assert len(os.listdir(tmp_path / "_tailrace")) == 3
    positions.tidy(leftover_time + LEFTOVERS_KEPT_S + 1)
    kept.remove(leftover)
    assert sorted(os.listdir(tmp_path / "_versions")) == kept


def test_what_is_pending() -> None:
    earliest, latest = {"t": {0: 5, 1: 0}}, {"t": {0: 9, 1: 0}}
    starts = known({}, earliest)
    assert starts == earliest
    spans = pending(starts, latest)
    assert spans == {("t", 0): (5, 9)}
    ends = advanced(starts, spans)
    assert ends == {"t": {0: 9, 1: 0}}
    assert distance(starts, ends) == 4
    # A partition and a topic more, at their beginnings; what was known stays.
    assert known(ends, {"t": {0: 0, 1: 0, 2: 0}, "u": {0: 0}}) == {"t": {0: 9, 1: 0, 2: 0}, "u": {0: 0}}
    assert as_option({"t": {0: 1, 12: 5}}) == '{"t":{"0":1,"12":5}}'


def test_events_that_are_gone_and_topics_made_anew() -> None:
    assert list(lost({"t": {0: 0, 1: 3}}, {"t": {0: 4, 1: 3}})) == ["t/0 begins at 4, the projection at 0"]
    check_topics({"t": 1}, {"t": 1, "u": 2})
    with pytest.raises(InvalidRequest, match="t was deleted and created again"):
        check_topics({"t": 1}, {"t": 3})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"table": "x"}, "function=MODULE:FUNCTION or --option sql=QUERY"),
        ({"table": "x", "sql": "a", "function": "m:f"}, "one of them"),
        ({"sql": "a"}, "table=FOLDER or --option to_topic=TOPIC"),
        ({"sql": "a", "to_topic": "x"}, "state: goes together with to_topic"),
        ({"sql": "a", "to_topic": "x", "state": "s", "mode": "replace"}, "mode: replace is for tables"),
        ({"sql": "a", "table": "x", "mode": "replace"}, "schema: SQL with mode=replace"),
        ({"sql": "a", "to_topic": "t", "state": "s"}, "to_topic: has to be another topic"),
        ({"function": "views_of_test", "table": "x"}, "MODULE:FUNCTION"),
        ({"function": "no_such_views:f", "table": "x"}, "no such module"),
        ({"function": "views_of_test:nothing", "table": "x"}, "has no function 'nothing'"),
        ({"function": "views_of_test:sums", "table": "x"}, "has to take 1: the events"),
        ({"function": "views_of_test:numbers", "table": "x", "mode": "replace"}, "has to take 2"),
        ({"sql": "@missing.sql", "table": "x"}, "sql: missing.sql: No such file"),
        ({"sql": "a", "table": "s3://x/y"}, "table: a folder that the driver"),
    ],
)
def test_options_that_do_not_fit(given: dict[str, Any], says: str) -> None:
    options = project.ProjectOptions(topic="t", url="tailrace://127.0.0.1:1", **given)
    with pytest.raises(InvalidRequest, match=says):
        project.run(None, options, Progress())  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------- with Spark


def test_a_table_grows_with_its_events(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic
) -> None:
    events = topic(partitions=2)
    wanted = options(broker, events, function="views_of_test:numbers", table="grown")
    with pytest.raises(NotFound, match="no projection has written"):
        project.table(spark, "grown")
    assert project.run(spark, wanted, Progress()).version == 0
    publish(client, events, range(20))
    first = project.run(spark, wanted, Progress())
    assert (first.version, first.rounds, first.events, first.rows) == (1, 1, 20, 20)
    again = project.run(spark, wanted, Progress())
    assert (again.version, again.rounds, again.events) == (1, 0, 0)
    client.admin().alter_topic(events, partitions=3)
    publish(client, events, range(20, 25), partition=2)
    second = project.run(spark, wanted, Progress())
    assert (second.version, second.events, second.rows) == (2, 5, 25)
    assert second.positions[2] == project.ResultReach(events, 2, 5)
    rows = project.table(spark, "grown").collect()
    assert sorted(row["n"] for row in rows) == [2 * n for n in range(25)]
    with pytest.raises(InvalidRequest, match="made by 'views_of_test:numbers', not by 'views_of_test:other'"):
        project.run(spark, options(broker, events, function="views_of_test:other", table="grown"), Progress())


@pytest.mark.long
def test_many_small_rounds_become_one_folder(
    spark: Any,
    broker: BrokerProcess,
    client: sync.Client,
    topic: MakeTopic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(project, "FOLDERS_MAX", 2)
    events = topic(partitions=1)
    publish(client, events, range(7))
    sql = "SELECT offset, value FROM events"
    done = project.run(spark, options(broker, events, sql=sql, table="small", rows_per_round=2), Progress())
    assert (done.rounds, done.events, done.rows) == (4, 7, 7)
    newest = Positions(Path("small").absolute()).newest()
    assert newest is not None
    assert len(newest.folders) == 2
    assert sorted(row["offset"] for row in project.table(spark, "small").collect()) == list(range(7))


def test_sums_are_the_same_in_rounds_and_anew_wherever_it_is_stopped(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic
) -> None:
    events = topic(partitions=3)
    Path("sums.sql").write_text(SUMS)
    given: dict[str, Any] = {
        "sql": "@sums.sql",
        "schema": "key string, n long",
        "mode": "replace",
        "table": "sums",
    }
    published = 0
    # Before anything is written, when the first version is written, and when the second one is.
    for stop_at in (0, 1, 3):
        publish(client, events, range(published, published + 30))
        published += 30
        with pytest.raises(Stopped):
            project.run(spark, options(broker, events, rows_per_round=60, **given), Halting(stop_at))
    expected = {f"k{k}": sum(n for n in range(published) if n % 5 == k) for k in range(5)}
    done = project.run(spark, options(broker, events, **given), Progress())
    assert (done.version, sum(reached.end for reached in done.positions)) == (2, published)
    assert {row["key"]: row["n"] for row in project.table(spark, "sums").collect()} == expected
    anew = project.run(spark, options(broker, events, rebuild=True, **given), Progress())
    assert (anew.version, anew.rounds, anew.events) == (3, 1, published)
    assert {row["key"]: row["n"] for row in project.table(spark, "sums").collect()} == expected


@pytest.mark.long
def test_a_function_gets_the_previous_table(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic
) -> None:
    events = topic(partitions=1)
    publish(client, events, range(10))
    wanted = options(
        broker, events, function="views_of_test:sums", mode="replace", table="folded", rows_per_round=5
    )
    assert project.run(spark, wanted, Progress()).rounds == 2
    rows = {row["key"]: row["n"] for row in project.table(spark, "folded").collect()}
    assert rows == {f"k{k}": 2 * k + 5 for k in range(5)}


def test_a_topic_gets_each_round_once_wherever_it_is_stopped(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic
) -> None:
    events, target = topic(partitions=2), topic(partitions=2)
    given = {"function": "views_of_test:messages", "to_topic": target, "state": "state"}
    published = 0
    # Before the first round is written, when it is, and after the second one is.
    for stop_at in (0, 1, 3):
        publish(client, events, range(published, published + 10))
        published += 10
        with pytest.raises(Stopped):
            project.run(spark, options(broker, events, **given), Halting(stop_at))
    done = project.run(spark, options(broker, events, **given), Progress())
    assert done.rows is None
    assert in_order(client, target) == per_key(published)
    nothing = project.run(spark, options(broker, events, **given), Progress())
    assert (nothing.rounds, nothing.version) == (0, done.version)
    # Made anew while a round is planned and not written: that one is never written.
    publish(client, events, range(published, published + 10))
    published += 10
    with pytest.raises(Stopped):
        project.run(spark, options(broker, events, **given), Halting(0))
    anew = project.run(spark, options(broker, events, rebuild=True, **given), Progress())
    assert (anew.version, anew.events) == (done.version + 2, published)
    assert in_order(client, target) == per_key(published)
    assert all(row["start_offset"] > 0 for row in client.admin().describe_topic(target).partitions)


def in_order(client: sync.Client, topic: str) -> dict[bytes, list[int]]:
    """The numbers in the messages of a topic, by key, in the order of the log."""
    found: dict[bytes, list[int]] = {}
    admin = client.admin()
    count = sum(row["end_offset"] - row["start_offset"] for row in admin.describe_topic(topic).partitions)
    with client.reader(topic, start="earliest") as reader:
        for _, message in zip(range(count), reader, strict=False):
            found.setdefault(message.key, []).append(int(message.value.removeprefix(b"saw ")))
    return found


def per_key(count: int) -> dict[bytes, list[int]]:
    return {b"k%d" % k: list(range(k, count, 5)) for k in range(5)}


def test_what_cannot_be_made_anew_is_refused(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic
) -> None:
    events = topic(partitions=1)
    publish(client, events, range(10))
    given: dict[str, Any] = {"sql": "SELECT offset FROM events", "table": "kept"}
    project.run(spark, options(broker, events, **given), Progress())
    client.admin().trim_topic(events, 0, 4)
    with pytest.raises(InvalidRequest, match=f"{events}/0 begins at 4, the projection at 0"):
        project.run(spark, options(broker, events, rebuild=True, **given), Progress())
    assert project.table(spark, "kept").count() == 10
    publish(client, events, range(10, 20))
    client.admin().trim_topic(events, 0, 15)
    with pytest.raises(Exception, match=f"offsets 10 to 14 of {events}/0 are gone"):
        project.run(spark, options(broker, events, **given), Progress())
    client.admin().delete_topic(events)
    client.admin().create_topic(events, partitions=1)
    with pytest.raises(InvalidRequest, match="deleted and created again"):
        project.run(spark, options(broker, events, **given), Progress())


def test_other_columns_are_refused(
    spark: Any,
    broker: BrokerProcess,
    client: sync.Client,
    topic: MakeTopic,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = topic(partitions=1)
    publish(client, events, range(3))
    wanted = options(broker, events, function="views_of_test:changing", table="changing")
    views_of_test = importlib.import_module("views_of_test")
    monkeypatch.setattr(views_of_test, "changing", lambda events: events.select("offset"), raising=False)
    project.run(spark, wanted, Progress())
    publish(client, events, range(3))
    monkeypatch.setattr(views_of_test, "changing", lambda events: events.select("offset", "key"))
    with pytest.raises(InvalidRequest, match="makes other columns than those of changing"):
        project.run(spark, wanted, Progress())
    assert project.table(spark, "changing").count() == 3


@pytest.mark.long
def test_follow_goes_on_until_it_is_stopped(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic
) -> None:
    events = topic(partitions=1)
    publish(client, events, range(3))

    class Following(Progress):
        waits = 0

        def again(self, seconds: float) -> bool:
            self.waits += 1
            if self.waits == 1:
                publish(client, events, range(3))
            return self.waits < 2

    wanted = options(broker, events, sql="SELECT offset FROM events", table="followed", follow=True)
    done = project.run(spark, wanted, Following())
    assert (done.rounds, done.events, done.rows) == (2, 6, 6)
    assert json.loads((Path("followed") / "_tailrace" / f"{2:020}.json").read_text())["ends"] == {
        events: {"0": 6}
    }


@pytest.mark.long
def test_made_anew_from_an_archive(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic
) -> None:
    events = topic(partitions=2)
    publish(client, events, range(40))
    given: dict[str, Any] = {"sql": "SELECT partition, offset, value FROM events", "table": "kept"}
    project.run(spark, options(broker, events, **given), Progress())
    before = sorted(project.table(spark, "kept").collect())
    kept = archive.ArchiveOptions(topic=events, url=broker.url, root=str(Path("archive").absolute()))
    archive.run(spark, kept, Progress())
    for partition, row in enumerate(client.admin().describe_topic(events).partitions):
        client.admin().trim_topic(events, partition, row["end_offset"])
    publish(client, events, range(40, 50))
    anew = options(broker, events, rebuild=True, archive=str(Path("archive").absolute()), **given)
    done = project.run(spark, anew, Progress())
    assert (done.rounds, done.events, done.rows) == (1, 50, 50)
    after = sorted(project.table(spark, "kept").collect())
    assert [row for row in after if row in before] == before
    assert sorted(int(row["value"]) for row in after) == list(range(50))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_runs_leave_a_whole_table(
    spark: Any, broker: BrokerProcess, client: sync.Client, topic: MakeTopic, tmp_path: Path
) -> None:
    events = topic(partitions=2)
    words = ["--topic", events, "--url", broker.url, "--master", "local[2]", "-o", "mode=replace"]
    words += ["-o", "function=views_of_test:sums", "-o", "table=killed", "-o", "rows_per_round=20"]
    published = 0
    for said in (b"events", b"putting it in place", b"version 3"):
        publish(client, events, range(published, published + 50))
        published += 50
        running = subprocess.Popen(
            [sys.executable, "-m", "tailrace.cli", "pipeline", "run", "project", *words],
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": SRC},
        )
        try:
            assert running.stderr is not None
            while said not in (line := running.stderr.readline()):
                assert line
        finally:
            process_tree.kill(process_tree.tree(running.pid))
            running.communicate()
    wanted = options(broker, events, function="views_of_test:sums", mode="replace", table="killed")
    project.run(spark, wanted, Progress())
    expected = {f"k{k}": sum(n for n in range(published) if n % 5 == k) for k in range(5)}
    assert {row["key"]: row["n"] for row in project.table(spark, "killed").collect()} == expected
