"""JSON values by a schema: decoded, or named, nulled and set apart."""

from __future__ import annotations

import json

import pytest

from tailrace.errors import InvalidRequest
from tailrace.spark.json_rows import from_json_value

SCHEMA = "a BIGINT, b STRUCT<c: STRING>"
GOOD = [
    (b'{"a": 1, "b": {"c": "x"}}', {"a": 1, "b": {"c": "x"}}),
    (b'{"a": null, "other": 7}', {"a": None, "b": None}),
    (b"{}", {"a": None, "b": None}),
    ('{"b": {"c": "é"}}'.encode(), {"a": None, "b": {"c": "é"}}),
    (None, None),
]
BAD = [b"", b"nonsense", b'{"a": "text"}', b'{"a": 1', b'["a"]', b"null", b'{"b": {"c": "\xff"}}', b"7"]


@pytest.fixture
def rows(spark):
    values = [value for value, _ in GOOD] + BAD
    data = [("t", 0, offset, value) for offset, value in enumerate(values)]
    return spark.createDataFrame(data, "topic STRING, partition INT, offset BIGINT, value BINARY")


def plain(row):
    return None if row is None else row.asDict(recursive=True)


def test_undecodable_values_become_null_or_go_apart(rows):
    nulled = from_json_value(rows, SCHEMA, "null").orderBy("offset").collect()
    assert [plain(row.data) for row in nulled] == [data for _, data in GOOD] + [None] * len(BAD)
    decoded, bad = from_json_value(rows, SCHEMA, "dead_letter", column="json")
    good = decoded.orderBy("offset").collect()
    assert [(row.value, plain(row.json)) for row in good] == GOOD
    assert bad.columns == [*rows.columns, "error"]
    apart = bad.orderBy("offset").collect()
    assert [row.value for row in apart] == BAD
    assert (
        apart[0].error == f"value: not a JSON object of the schema, topic t, partition 0, offset {len(GOOD)}"
    )


def test_an_undecodable_value_fails_by_its_place(rows):
    fine = from_json_value(rows.where(f"offset < {len(GOOD)}"), SCHEMA)
    assert [plain(row.data) for row in fine.orderBy("offset").collect()] == [data for _, data in GOOD]
    failing = from_json_value(rows.where(f"offset = {len(GOOD) + 1}"), SCHEMA)
    with pytest.raises(Exception, match=f"topic t, partition 0, offset {len(GOOD) + 1}"):
        failing.collect()


def test_what_cannot_work_is_refused(rows):
    with pytest.raises(InvalidRequest, match="mode: one of"):
        from_json_value(rows, SCHEMA, "ignore")  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="column: the rows have a column offset"):
        from_json_value(rows, SCHEMA, column="offset")
    with pytest.raises(InvalidRequest, match="value: the rows have no such column"):
        from_json_value(rows.drop("value"), SCHEMA)
    assert json.loads(from_json_value(rows, SCHEMA).schema.json())["fields"][-1]["name"] == "data"
