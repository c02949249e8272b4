"""Tables on their way to partitions: every row goes out once, to the partition of its key, in order."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.client.publish import table_split
from tailrace.client.publish.table_split import split_table
from tailrace.core.model.identifiers import partition_of
from tailrace.errors import InvalidRequest

items = st.one_of(st.none(), st.binary(max_size=4))


@given(st.lists(st.tuples(items, items), max_size=40), st.integers(1, 5))
def test_rows_go_where_their_key_or_dedup_id_says(rows: list[tuple[Any, Any]], partitions: int) -> None:
    table = pa.table(
        {
            "value": pa.array([b"%d" % number for number in range(len(rows))], pa.binary()),
            "key": pa.array([key for key, _ in rows], pa.binary()),
            "dedup_id": pa.array([dedup for _, dedup in rows], pa.binary()),
        }
    )
    seen: list[int] = []
    for partition, places, piece in split_table(table, partitions, None):
        assert piece["value"].to_pylist() == [b"%d" % place for place in places]
        assert list(places) == sorted(places)
        for place in places:
            key, dedup = rows[place]
            source = key if key is not None else dedup
            assert partition == (None if source is None else partition_of(source, partitions))
        seen += places
    assert sorted(seen) == list(range(len(rows)))


def test_without_keys_it_stays_together_and_is_cut_by_rows_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_split, "PIECE_ROWS", 10)
    table = pa.table({"value": [b"x"] * 25})
    assert [(partition, list(places)) for partition, places, _ in split_table(table, 3, None)] == [
        (None, list(range(10))),
        (None, list(range(10, 20))),
        (None, list(range(20, 25))),
    ]
    monkeypatch.setattr(table_split, "PIECE_BYTES", 2500)
    large = pa.table({"value": [bytes(1000)] * 7})
    assert [piece.num_rows for _, _, piece in split_table(large, 3, 2)] == [2, 2, 2, 1]
    assert {partition for partition, _, _ in split_table(large, 3, 2)} == {2}


def test_record_batches_and_text_keys_are_fine_and_empty_tables_are_nothing() -> None:
    batch = pa.RecordBatch.from_pydict({"value": [b"a"], "key": ["text"]})
    ((partition, places, _),) = split_table(batch, 7, None)
    assert (partition, list(places)) == (partition_of(b"text", 7), [0])
    assert list(split_table(pa.table({"value": pa.array([], pa.binary())}), 3, None)) == []


@pytest.mark.parametrize(("table", "word"), [([1], "list"), (pa.table({"val": [b"a"]}), "val")])
def test_what_is_no_table_of_messages_is_refused(table: Any, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        list(split_table(table, 3, None))
