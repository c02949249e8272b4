"""Options: each is checked by name, in reads and writes, and points are understood as people write them.

Covers `spark/options.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tailrace.client.rpc.broker_url import parse_url
from tailrace.core.model.commands import EARLIEST, LATEST
from tailrace.errors import InvalidRequest
from tailrace.format.tabular import POSITIONED
from tailrace.spark.options import (
    BATCH,
    OPTIONS,
    STREAM,
    WRITE,
    ReadOptions,
    WriteOptions,
    point_of,
    read_options,
    write_options,
)

URL = "tailrace://somewhere:7400"


def test_defaults_are_those_of_the_table(monkeypatch):
    monkeypatch.setenv("TAILRACE_URL", URL)
    assert read_options({"topic": "t"}) == ReadOptions(url=parse_url(URL), topics=["t"])
    assert write_options({}) == WriteOptions(url=parse_url(URL))
    stated = {o.name: o.default for o in OPTIONS if o.default and not o.default.startswith("TAILRACE_")}
    for use, parse in (
        (BATCH, lambda given: read_options(given)),
        (STREAM, lambda given: read_options(given, streaming=True)),
        (WRITE, lambda given: write_options(given)),
    ):
        named = {o.name: stated[o.name] for o in OPTIONS if use in o.uses and o.name in stated}
        assert parse({"topic": "t", **named}) == parse({"topic": "t"}), use


def test_names_come_in_any_case_and_path_is_a_topic():
    given = {"PATH": "a, b", "Rows_Per_Partition": " 5 ", "URL": URL, "columns": "value ,offset"}
    options = read_options(given)
    assert (options.topics, options.rows_per_partition) == (["a", "b"], 5)
    assert options.columns == ["value", "offset"]
    assert read_options({"path": "a", "topic": "a"}).topics == ["a"]
    with pytest.raises(InvalidRequest, match="topic: 'b', but load/save was called with 'a'"):
        read_options({"path": "a", "topic": "b"})


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("earliest", EARLIEST),
        (" latest ", LATEST),
        ("17", 17),
        ("2026-01-31T12:00:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T13:00:00+01:00", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ('{"t": {"0": 17, "1": -2}}', {"t": {0: 17, 1: -2}}),
    ],
)
def test_points(text, point):
    assert point_of(text, "start") == point


@pytest.mark.parametrize(
    "text", ["", "-1", "yesterday", "2026-01-31T12:00:00", '{"t": 5}', '{"t": {"x": 1}}', "{", "1.5"]
)
def test_points_that_make_no_sense(text):
    with pytest.raises(InvalidRequest, match="end: "):
        point_of(text, "end")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"topic": "t", "colour": "red"}, "colour: no such option; there are archive"),
        ({"topic": "t", "topic_pattern": "x"}, "topic: topic and topic_pattern are both given"),
        ({"topic": ""}, "topic: either topic or topic_pattern is needed"),
        ({"topic_pattern": "["}, "topic_pattern: '\\[' is no regular expression"),
        ({"topic": "t", "mode": "moon"}, "mode: one of broker, segments, archive"),
        ({"topic": "t", "mode": "segments"}, "data: mode segments needs the folder"),
        ({"topic": "t", "view": "moon"}, "view: one of messages"),
        ({"topic": "t", "columns": "value,value"}, "columns: each once"),
        ({"topic": "t", "rows_per_partition": "many"}, "rows_per_partition: a whole number"),
        ({"topic": "t", "timeout_s": "0"}, "timeout_s: seconds, above 0"),
        ({"topic": "t", "timeout_s": "nan"}, "timeout_s: seconds, above 0"),
        ({"topic": "t", "skip_expired": "perhaps"}, "skip_expired: true or false"),
        ({"topic": "t", "filters": "auto"}, "filters: true or false"),
        ({"topic": "t", "url": "embedded:./data"}, "url: tailrace://host:port is needed"),
        ({"topic": "t", "txn_app_id": "a"}, "txn_app_id: an option for write only, this is a batch read"),
        ({"topic": "t", "group": "g"}, "group: an option for stream read only"),
    ],
)
def test_reads_that_cannot_work_are_refused_by_name(given, text):
    with pytest.raises(InvalidRequest, match=text):
        read_options(given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"topic": "a,b"}, "topic: one"),
        ({"txn_app_id": "a"}, "txn_app_id: goes together with txn_version"),
        ({"txn_app_id": "a", "txn_version": "-1"}, "txn_version: a whole number"),
        ({"start": "earliest"}, "start: an option for batch read and stream read only, this is a write"),
    ],
)
def test_writes_that_cannot_work_are_refused_by_name(given, text):
    with pytest.raises(InvalidRequest, match=text):
        write_options(given)


def test_a_stream_has_no_version_of_its_own():
    with pytest.raises(InvalidRequest, match="txn_app_id: only for batch writes"):
        write_options({"txn_app_id": "a", "txn_version": "1"}, streaming=True)
    assert write_options({"checkpointLocation": "c", "queryName": "q"}, streaming=True).txn_version is None


def test_every_column_may_be_chosen():
    names = ",".join(POSITIONED.names)
    assert read_options({"topic": "t", "columns": names}).columns == POSITIONED.names
