"""Tables in and out: casts, what is refused, and the place of every row."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given

from tailrace.core.model import identifiers
from tailrace.errors import Corrupt, InvalidRequest
from tailrace.format import batch, frame
from tailrace.format.tabular import POSITIONED
from tests.format.samples import NOW_US, Sample, samples


def ids(rows: int) -> bytes:
    return batch.make_ids(rows, NOW_US // 1000, 3, 3)


def encoded(table: pa.Table) -> tuple[identifiers.BatchView, dict[str, list[Any]]]:
    """The body of a table as a broker takes it."""
    columns, body = batch.encode_table(table, ids=ids(table.num_rows), timestamp=NOW_US)
    assert len(body) % frame.ALIGNMENT == 0
    view, found = batch.open_body(body, columns, want_keys=True)
    return view, found.to_pydict()


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.string(), pa.large_binary(), pa.large_string(), pa.binary(2)]
)
def test_values_of_every_binary_type(kind: pa.DataType) -> None:
    table = pa.table({"value": pa.array([b"aa", b"bb", b"cc"]).cast(kind)}).slice(1)
    assert encoded(table)[1]["value"] == [b"bb", b"cc"]


def test_all_columns_are_cast() -> None:
    table = pa.table(
        {
            "value": pa.chunked_array([["a"], ["b"]]),
            "key": pa.array(["k", None]).dictionary_encode(),
            "headers": pa.array([[("n", "1"), ("n", "2")], None], pa.map_(pa.string(), pa.string())),
            "timestamp": pa.array([5, None], pa.timestamp("ms")),
            "priority": pa.array([None, 4], pa.int64()),
            "expires_at": pa.array([None, 7], pa.timestamp("s", tz="Europe/Berlin")),
            "dedup_id": pa.array(["d", "e"]),
        }
    )
    view, found = encoded(table)
    present = (
        identifiers.HAS_KEY,
        identifiers.HAS_HEADERS,
        identifiers.HAS_PRIORITY,
        identifiers.HAS_EXPIRES_AT,
        identifiers.HAS_DEDUP_ID,
    )
    assert view.columns == sum(present)
    assert view.timestamp_max_us == NOW_US
    assert found["value"] == [b"a", b"b"]
    assert found["key"] == [b"k", None]
    assert found["key_hash"] == [identifiers.key_hash(b"k"), None]
    assert found["headers"] == [[("n", b"1"), ("n", b"2")], None]
    assert [round(time.timestamp() * 1e6) for time in found["timestamp"]] == [5000, NOW_US]
    assert found["priority"] == [2, 4]
    assert found["expires_at"][0] is None
    assert found["expires_at"][1].timestamp() == 7
    assert found["dedup_id"] == [b"d", b"e"]


@pytest.mark.parametrize("priorities", [[2, 2], [None, 2], [None, None]])
def test_the_default_priority_alone_is_no_column(priorities: list[int | None]) -> None:
    view, _ = encoded(pa.table({"value": ["a", "b"], "priority": pa.array(priorities, pa.int64())}))
    assert view.columns == 0


@given(samples(nulls=False))
def test_tables_and_lists_make_equal_bodies(sample: Sample) -> None:
    if set(sample.options.get("priorities") or []) == {identifiers.PRIORITY_DEFAULT}:
        del sample.options["priorities"]  # A table leaves the column out when it says nothing.
    columns, body = sample.encode()
    found = pa.table(batch.decode(body, columns)).drop_columns(["id"])
    if columns & identifiers.HAS_KEY:
        found = found.drop_columns(["key_hash"])
    assert batch.encode_table(found, ids=sample.options["ids"], timestamp=0) == (columns, body)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"key": ["a"]}, "table: "),
        ({"value": ["a"], "valeu": ["b"]}, "valeu"),
        ({"value": [1.5]}, "value: "),
        ({"value": ["a"], "priority": [-1]}, "priority: "),
        ({"value": ["a"], "headers": ["b"]}, "headers: "),
        ({"value": ["a"], "timestamp": ["yesterday"]}, "timestamp: "),
    ],
)
def test_tables_that_do_not_fit_are_refused_by_name(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        batch.encode_table(pa.table(columns), ids=ids(1), timestamp=0)


def test_empty_tables_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        batch.encode_table(pa.table({"value": pa.array([], pa.binary())}), ids=b"", timestamp=0)


# ------------------------------------------------------------------------------------------ positions


def header_of(columns: int, rows: int, span: int = 0) -> frame.Header:
    return frame.Header(frame.DATA, columns, 0, 0, 9, 1000, span or rows, rows, 1, NOW_US)


@given(samples())
def test_every_row_knows_its_place(sample: Sample) -> None:
    columns, body = sample.encode()
    rows = len(sample.values)
    found = batch.with_positions(
        batch.decode(body, columns), header_of(columns | frame.MORE, rows), "eu/orders", 4
    )
    found.validate(full=True)
    assert found.schema.equals(POSITIONED)
    assert all(field.nullable for field in found.schema)
    assert found["topic"].to_pylist() == ["eu/orders"] * rows
    assert found["partition"].to_pylist() == [4] * rows
    assert found["offset"].to_pylist() == list(range(1000, 1000 + rows))
    assert found["sequence"].to_pylist() == list(range(1001, 1001 + rows))
    assert found["append_time"].cast(pa.int64()).to_pylist() == [NOW_US] * rows
    expected = sample.rows(columns)
    for name in ("id", "key", "value", "headers", "timestamp", "priority", "deliver_at", "expires_at"):
        column = found[name].cast(pa.int64()) if pa.types.is_timestamp(found[name].type) else found[name]
        absent = 2 if name == "priority" else None
        assert column.to_pylist() == expected.get(name, [absent] * rows)


def compacted(deltas: list[int]) -> pa.RecordBatch:
    _, body = batch.encode([b""] * len(deltas), ids=ids(len(deltas)), timestamps=1)
    plain = batch.decode(body, 0)
    schema = batch.schema_of(identifiers.HAS_OFFSET_DELTA)
    made = pa.RecordBatch.from_arrays([*plain.columns, pa.array(deltas, pa.uint32())], schema=schema)
    return batch.decode(batch.body_of(made, identifiers.HAS_OFFSET_DELTA), identifiers.HAS_OFFSET_DELTA)


def test_compacted_rows_keep_their_offsets() -> None:
    found = batch.with_positions(compacted([0, 4, 7]), header_of(identifiers.HAS_OFFSET_DELTA, 3, 8), "t", 0)
    assert found["offset"].to_pylist() == [1000, 1004, 1007]


@pytest.mark.parametrize("deltas", [[0, 4, 8], [4, 4], [4, 0], [2**32 - 1]])
def test_deltas_must_grow_within_the_frame(deltas: list[int]) -> None:
    with pytest.raises(Corrupt):
        batch.with_positions(
            compacted(deltas), header_of(identifiers.HAS_OFFSET_DELTA, len(deltas), 8), "t", 0
        )


def test_positions_of_another_frame_are_refused() -> None:
    columns, body = batch.encode([b""], ids=ids(1), timestamps=1)
    found = batch.decode(body, columns)
    with pytest.raises(Corrupt):
        batch.with_positions(found, header_of(columns, 2), "t", 0)
    with pytest.raises(Corrupt):
        batch.with_positions(found, frame.Header(frame.DATA, 0, 0, 0, 0, 2**63, 1, 1), "t", 0)
