"""Columns of a DataFrame become messages: every row once, on its partition, in order; bad rows are named.

Covers `spark/sink/message_columns.py` and `spark/sink/parcels.py`.
"""

from collections import defaultdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.model.identifiers import HAS_DELIVER_AT, HAS_HEADERS, HAS_KEY, partition_of
from tailrace.errors import InvalidRequest, TailraceError, TooLarge
from tailrace.format.batch import open_body
from tailrace.format.frame import crc32c
from tailrace.format.tabular import POSITIONED
from tailrace.spark.sink import parcels as module
from tailrace.spark.sink.message_columns import message_columns
from tailrace.spark.sink.parcels import Parcel, Sorting, TopicShape

NOW_US = 1_800_000_000_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOW = datetime.fromtimestamp(NOW_US / 1e6, UTC)
TIME = pa.timestamp("us", tz="UTC")
ZONED = pa.timestamp("us", tz="Asia/Tokyo")
TYPES = {
    "binary": pa.binary(),
    "string": pa.string(),
    "map<string,binary>": pa.map_(pa.string(), pa.binary()),
    "map<string,string>": pa.map_(pa.string(), pa.field("value", pa.string(), nullable=False)),
    "timestamp": ZONED,
    "tinyint": pa.int8(),
    "int": pa.int32(),
    "bigint": pa.int64(),
}
TARGETS = {"t": TopicShape(4, 1000), "u": TopicShape(1, 10)}


def rows_of(parcels: list[Parcel]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The messages of parcels by place, in order; each body is proved as the broker proves it."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for parcel in parcels:
        view, batch = open_body(parcel.body, parcel.columns, want_keys=True)
        assert view.count == parcel.rows <= module.PARCEL_ROWS
        assert crc32c(parcel.body) == parcel.crc
        found[parcel.topic, parcel.partition] += batch.to_pylist()
    return found


def sort(
    kinds: dict[str, str],
    batches: list[list[dict[str, Any]]],
    *,
    topic: str = "t",
    keep: bool = False,
    task: int = 0,
) -> list[Parcel]:
    schema = pa.schema([pa.field(name, TYPES[kind]) for name, kind in kinds.items()])
    sorting = Sorting(message_columns(kinds, topic, keep), TARGETS.__getitem__, task)
    parcels: list[Parcel] = []
    for rows in batches:
        parcels += sorting.add(pa.RecordBatch.from_pylist(rows, schema=schema), NOW_US)
    parcels += sorting.rest(NOW_US)
    return parcels


# -- columns


def test_columns_of_read_rows_can_be_written_again() -> None:
    kinds = dict.fromkeys(POSITIONED.names, "")
    kinds |= {"topic": "string", "partition": "int", "offset": "bigint", "sequence": "bigint"}
    kinds |= {"key": "binary", "value": "binary", "headers": "map<string,binary>", "priority": "int"}
    kinds |= dict.fromkeys(("timestamp", "append_time", "deliver_at", "expires_at"), "timestamp")
    columns = message_columns(kinds, "copy", False)
    assert columns.used == ["key", "value", "headers", "timestamp", "priority", "deliver_at", "expires_at"]
    assert "partition" in message_columns(kinds, "copy", True).used
    assert "topic" in message_columns(kinds, "", False).used


@pytest.mark.parametrize(
    ("kinds", "topic", "problem"),
    [
        ({"key": "binary"}, "t", "value: a column of that name is needed, there are key"),
        ({"value": "int"}, "t", "value: binary or string is needed, not int"),
        ({"value": "binary", "colour": "string"}, "t", "colour: no column of a message"),
        ({"value": "binary", "priority": "double"}, "t", "priority: tinyint or smallint or int or bigint"),
        ({"value": "binary", "deliver_at": "timestamp_ntz"}, "t", "deliver_at: timestamp is needed"),
        ({"value": "binary", "headers": "map<int,string>"}, "t", "headers: map<string,binary> or"),
        ({"value": "binary"}, "", "topic: name one by an option, or in a column"),
    ],
)
def test_columns_that_cannot_be_are_named(kinds: dict[str, str], topic: str, problem: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        message_columns(kinds, topic, False)
    assert str(caught.value).startswith(problem)


# -- rows

ROW = st.fixed_dictionaries(
    {
        "value": st.binary(max_size=12),
        "key": st.none() | st.binary(max_size=2),
        "headers": st.none() | st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=2),
        "timestamp": st.none() | st.integers(0, NOW_US),
        "priority": st.none() | st.integers(0, 4),
        "deliver_at": st.none() | st.integers(NOW_US - 3, NOW_US + 3),
        "expires_at": st.none() | st.integers(0, 2 * NOW_US),
        "partition": st.none() | st.integers(0, 3),
    }
)
ALL = {
    "value": "binary",
    "key": "binary",
    "headers": "map<string,binary>",
    "timestamp": "timestamp",
    "priority": "int",
    "deliver_at": "timestamp",
    "expires_at": "timestamp",
    "partition": "int",
}


@given(st.lists(st.lists(ROW, max_size=12), max_size=4), st.sets(st.sampled_from(sorted(ALL)[:-1])))
def test_every_row_is_one_message(batches: list[list[dict[str, Any]]], left_out: set[str]) -> None:
    kinds = {name: kind for name, kind in ALL.items() if name == "value" or name not in left_out}
    given = [[{name: row[name] for name in kinds} for row in rows] for rows in batches]
    number = 0
    expected: dict[tuple[int, bool], list[dict[str, Any]]] = defaultdict(list)
    for rows in given:
        for row in rows:
            row["value"] = b"%d" % number
            number += 1
            late = (row.get("deliver_at") or 0) > NOW_US
            partition = row.get("partition")
            if partition is None:
                key = row.get("key")
                partition = 2 if key is None else partition_of(key, 4)
            expected[partition, late].append(row)
    found: dict[tuple[int, bool], list[dict[str, Any]]] = defaultdict(list)
    for parcel in sort(kinds, given, task=6):
        assert parcel.topic == "t"
        late = bool(parcel.columns & HAS_DELIVER_AT)
        found[parcel.partition, late] += rows_of([parcel])["t", parcel.partition]
    assert found.keys() == expected.keys()
    for (partition, late), rows in expected.items():
        messages = found[partition, late]
        assert [message["value"] for message in messages] == [row["value"] for row in rows]
        for row, message in zip(rows, messages, strict=True):
            check(row, message, late)
    ids = [message["id"] for messages in found.values() for message in messages]
    assert len(set(ids)) == number


def check(row: dict[str, Any], message: dict[str, Any], late: bool) -> None:
    def us(name: str) -> int | None:
        time = message.get(name)
        return (
            None if time is None else (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
        )

    timestamp = row.get("timestamp")
    assert us("timestamp") == (NOW_US if timestamp is None else timestamp)
    assert message.get("key") == row.get("key")
    assert message.get("headers") == row.get("headers")
    priority = row.get("priority")
    assert message.get("priority", 2) == (2 if priority is None else priority)
    assert us("deliver_at") == (row["deliver_at"] if late else None)
    assert us("expires_at") == row.get("expires_at")


def test_texts_and_spans() -> None:
    kinds = {"key": "string", "value": "string", "headers": "map<string,string>", "delay_ms": "int"}
    kinds |= {"ttl_ms": "bigint", "priority": "tinyint"}
    row = {
        "key": "ключ",
        "value": "wert",
        "headers": [("h", "ö")],
        "delay_ms": 1500,
        "ttl_ms": 1,
        "priority": 4,
    }
    [messages] = rows_of(sort(kinds, [[row]])).values()
    [message] = messages
    assert (message["key"], message["value"]) == ("ключ".encode(), b"wert")
    assert message["headers"] == [("h", "ö".encode())]
    assert message["deliver_at"] == NOW + timedelta(milliseconds=1500)
    assert message["expires_at"] == NOW + timedelta(milliseconds=1)
    assert message["priority"] == 4


def test_no_delay_is_no_delay() -> None:
    kinds = {"value": "binary", "delay_ms": "int", "deliver_at": "timestamp"}
    rows = [
        {"value": b"a", "delay_ms": 0, "deliver_at": None},
        {"value": b"b", "delay_ms": None, "deliver_at": NOW},
        {"value": b"c", "delay_ms": None, "deliver_at": None},
    ]
    [parcel] = sort(kinds, [rows])
    assert parcel.columns == 0
    assert [message["value"] for message in rows_of([parcel])["t", 0]] == [b"a", b"b", b"c"]


def test_columns_of_nothing_are_left_out() -> None:
    kinds = {"value": "binary", "key": "binary", "headers": "map<string,binary>"}
    rows = [{"value": b"a", "key": None, "headers": []}]
    [parcel] = sort(kinds, [rows])
    assert parcel.columns == HAS_HEADERS
    [parcel] = sort(kinds, [[{"value": None, "key": b"", "headers": None}]])
    assert parcel.columns == HAS_KEY
    for priority in (2, None):
        [parcel] = sort({"value": "binary", "priority": "int"}, [[{"value": b"a", "priority": priority}]])
        assert parcel.columns == 0, "the default priority says no more than its absence"
    assert sort(kinds, [[], []]) == []


def test_rows_name_their_topics() -> None:
    kinds = {"value": "binary", "topic": "string", "partition": "int"}
    rows = [
        {"value": b"%d" % number, "topic": "tu"[number % 2], "partition": None if number % 2 else number}
        for number in range(4)
    ]
    found = rows_of(sort(kinds, [rows], topic=""))
    values = {place: [message["value"] for message in messages] for place, messages in found.items()}
    assert values == {("t", 0): [b"0"], ("t", 2): [b"2"], ("u", 0): [b"1", b"3"]}


def test_sliced_batches() -> None:
    schema = pa.schema({"value": pa.binary(), "headers": TYPES["map<string,binary>"]})
    rows = [{"value": b"%d" % number, "headers": [("n", b"%d" % number)]} for number in range(6)]
    rows[4]["headers"] = None
    whole = pa.RecordBatch.from_pylist(rows, schema=schema)
    kinds = {"value": "binary", "headers": "map<string,binary>"}
    sorting = Sorting(message_columns(kinds, "t", False), TARGETS.__getitem__, 0)
    parcels = [*sorting.add(whole.slice(2, 3), NOW_US), *sorting.rest(NOW_US)]
    found = [(message["value"], message["headers"]) for message in rows_of(parcels)["t", 0]]
    assert found == [(b"2", [("n", b"2")]), (b"3", [("n", b"3")]), (b"4", None)]


# -- parcels


def test_rows_without_a_key_take_turns_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARCEL_BYTES", 10 * (module.ROW_BYTES + 1))
    monkeypatch.setattr(module, "ROWS_TOGETHER", 1)
    batches = [[{"value": b"%d" % batch}] * 5 for batch in range(9)]
    parcels = sort({"value": "binary"}, batches, task=7)
    places = {partition: [m["value"] for m in rows] for (_, partition), rows in rows_of(parcels).items()}
    assert places[3] == [b"0"] * 5 + [b"1"] * 5 + [b"8"] * 5
    assert places[0] == [b"2"] * 5 + [b"3"] * 5
    assert places[1] == [b"4"] * 5 + [b"5"] * 5
    assert places[2] == [b"6"] * 5 + [b"7"] * 5


@given(st.lists(st.lists(st.integers(0, 400), min_size=1, max_size=30), max_size=5))
def test_parcels_are_cut_by_rows_and_bytes(batches: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PARCEL_BYTES", 1000)
        patch.setattr(module, "PARCEL_ROWS", 7)
        patch.setattr(module, "GATHERED_BYTES_MAX", 2500)
        rows = [[{"value": bytes(size), "key": b"%d" % (size % 3)} for size in sizes] for sizes in batches]
        parcels = sort({"value": "binary", "key": "binary"}, rows)
        lengths: dict[bytes, list[int]] = defaultdict(list)
        for parcel in parcels:
            messages = rows_of([parcel])["t", parcel.partition]
            sizes = [len(message["value"]) + 1 + module.ROW_BYTES for message in messages]
            assert len(sizes) <= 7
            assert sum(sizes) <= 1000
            for message in messages:
                lengths[message["key"]].append(len(message["value"]))
    expected: dict[bytes, list[int]] = defaultdict(list)
    for sizes in batches:
        for size in sizes:
            expected[b"%d" % (size % 3)].append(size)
    assert lengths == expected


def test_a_message_above_the_size_of_a_parcel_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARCEL_BYTES", 300)
    rows = [{"value": bytes(size)} for size in (10, 900, 10, 10, 900, 900)]
    parcels = sort({"value": "binary"}, [rows])
    assert [parcel.rows for parcel in parcels] == [1, 1, 2, 1, 1]
    assert [len(m["value"]) for m in rows_of(parcels)["t", 0]] == [10, 900, 10, 10, 900, 900]


def test_headers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARCEL_BYTES", 1000)
    kinds = {"value": "binary", "headers": "map<string,binary>", "topic": "string"}
    rows = [{"value": b"", "headers": [("h", bytes(size))], "topic": "t"} for size in (10, 500, 500, 10, 10)]
    rows += [{"value": b"", "headers": None, "topic": "t"}]
    for topic in ("", "t"):
        assert [parcel.rows for parcel in sort(kinds, [rows], topic=topic)] == [2, 4]


# -- what is refused


@pytest.mark.parametrize(
    ("kinds", "bad", "problem"),
    [
        ({"priority": "int"}, {"priority": 5}, "priority: 0 to 4 are allowed, not 5, in row 4 of Spark"),
        ({"priority": "bigint"}, {"priority": -1}, "priority: 0 to 4 are allowed, not -1, in row 4"),
        ({}, {"value": bytes(1001)}, "value: 1001 bytes in row 4 of Spark partition 9, at most 1000"),
        ({}, {"value": None}, "value: null without a key; only a message with a key may have none, in row 4"),
        ({"key": "binary"}, {"value": None, "key": None}, "value: null without a key"),
        ({"key": "string"}, {"key": "k" * 65537}, "key: 65537 bytes in row 4"),
        (
            {"headers": "map<string,binary>"},
            {"headers": [("a", b"x"), ("b", None)]},
            "headers: 'b' has no value",
        ),
        (
            {"headers": "map<string,binary>"},
            {"headers": [("a", bytes(65536))]},
            "headers: 65537 bytes in row 4",
        ),
        (
            {"timestamp": "timestamp"},
            {"timestamp": -1},
            "timestamp: not between the years 1970 and 9999, in row 4",
        ),
        (
            {"timestamp": "timestamp"},
            {"timestamp": NOW + timedelta(hours=2)},
            "timestamp: more than an hour ahead of the clock, in row 4",
        ),
        ({"delay_ms": "int"}, {"delay_ms": -1}, "delay_ms: 0 to"),
        ({"ttl_ms": "int"}, {"ttl_ms": 0}, "ttl_ms: 1 to"),
        ({"ttl_ms": "bigint"}, {"ttl_ms": 1 << 62}, "ttl_ms: 1 to"),
        (
            {"delay_ms": "int", "deliver_at": "timestamp"},
            {"delay_ms": 1, "deliver_at": NOW},
            "delay_ms: together with deliver_at, in row 4",
        ),
        ({"partition": "int"}, {"partition": 4}, "partition: 0 to 3 are allowed, not 4, in row 4"),
        ({"partition": "bigint"}, {"partition": -1}, "partition: 0 to 3 are allowed, not -1, in row 4"),
        ({"topic": "string"}, {"topic": None}, "topic: null, and no option `topic` names one, in row 4"),
    ],
)
def test_bad_rows_are_named(kinds: dict[str, str], bad: dict[str, Any], problem: str) -> None:
    kinds = {"value": "binary", **kinds}
    good: dict[str, Any] = dict.fromkeys(kinds) | {"value": b"v"}
    if "topic" in kinds:
        good["topic"] = "t"
    with pytest.raises(TailraceError) as caught:
        sort(
            kinds, [[good] * 3, [good, good | bad, good | bad]], topic="" if "topic" in kinds else "t", task=9
        )
    assert str(caught.value).startswith(problem)
    assert "row 4 of Spark partition 9" in str(caught.value)


def test_values_too_large_for_their_topic_are_named_by_their_place() -> None:
    kinds = {"value": "binary", "topic": "string"}
    rows = [{"value": bytes(20), "topic": "t"}] * 3 + [{"value": bytes(11), "topic": "u"}]
    with pytest.raises(
        TooLarge, match="value: 11 bytes in row 3 of Spark partition 0, at most 10 are allowed"
    ):
        sort(kinds, [rows], topic="")
