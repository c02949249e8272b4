"""Bodies: what is encoded comes back, pyarrow agrees with the direct writer, and the limits hold.

Also covers `format/builder.py`, `format/message.py` and `format/schema.py`.
"""

import itertools
import struct
import uuid
from array import array
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tailrace.core.model import identifiers
from tailrace.errors import Corrupt, InvalidRequest, TooLarge
from tailrace.format import batch, frame, message
from tailrace.format.frame import Buffer
from tests.format.samples import NOW_US, Sample, samples

KEY = b"k"
FULL: dict[str, Any] = {
    "keys": [KEY, None, b""],
    "headers": [[("a", b"1"), ("a", b"")], None, []],
    "priorities": [0, 2, 4],
    "deliver_at": [NOW_US, NOW_US + 1, NOW_US + 2],
    "expires_at": [None, NOW_US, None],
    "dedup_ids": [b"d", b"", None],
}


def plain(found: pa.RecordBatch) -> dict[str, list[Any]]:
    """Columns as Python values, times as numbers."""
    columns = {}
    for name, column in zip(found.schema.names, found.columns, strict=True):
        columns[name] = (
            column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
        ).to_pylist()
    return columns


def made(values: list[Any], **options: Any) -> tuple[int, Buffer]:
    options.setdefault("timestamps", NOW_US)
    return batch.encode(values, ids=batch.make_ids(len(values), NOW_US // 1000, 1, 1), **options)


@given(samples())
def test_what_is_encoded_comes_back(sample: Sample) -> None:
    columns, body = sample.encode()
    found = pa.ipc.read_record_batch(body, batch.schema_of(columns))
    found.validate(full=True)
    assert plain(found) == sample.rows(columns)
    assert plain(batch.decode(body, columns)) == sample.rows(columns)
    assert len(body) % frame.ALIGNMENT == 0


@pytest.mark.parametrize("chosen", list(itertools.product([False, True], repeat=6)))
def test_every_set_of_columns(chosen: tuple[bool, ...]) -> None:
    options = {name: FULL[name] for name, there in zip(FULL, chosen, strict=True) if there}
    sample = Sample([b"", b"x", b"yy"], options | {"timestamps": NOW_US, "ids": batch.make_ids(3, 1, 1, 1)})
    columns, body = sample.encode()
    assert columns == sum(1 << bit for bit, there in enumerate(chosen) if there)
    view, found = batch.open_body(body, columns, want_keys=True)
    assert plain(found) == sample.rows(columns)
    assert (view.count, view.nbytes, view.timestamp_max_us) == (3, len(body), NOW_US)
    assert view.value_bytes_max == 2
    assert (view.keys is not None, view.dedup_ids is not None) == (chosen[0], chosen[5])
    assert view.header_bytes_max == (3 if chosen[1] else 0)


@given(samples(), st.sampled_from(["lz4", "zstd"]))
def test_compressed_bodies_read_the_same(sample: Sample, compression: str) -> None:
    columns, body = sample.encode(compression)
    assert plain(batch.decode(body, columns)) == sample.rows(columns)


@given(samples(nulls=False))
def test_the_check_sees_compressed_and_plain_alike(sample: Sample) -> None:
    columns, body = sample.encode()
    squeezed = batch.body_of(batch.decode(body, columns), columns, "lz4")
    one, two = (batch.open_body(data, columns, want_keys=True)[0] for data in (body, squeezed))
    for name in ("count", "timestamp_max_us", "key_bytes_max", "header_bytes_max", "value_bytes_max"):
        assert getattr(one, name) == getattr(two, name)
    assert (one.keys is None) == (two.keys is None)
    if one.keys is not None and two.keys is not None:
        assert np.array_equal(one.keys, two.keys)


@given(samples())
def test_both_ways_through_the_metadata_agree(sample: Sample) -> None:
    """The template's short way and the flatbuffer's long way see the same numbers."""
    columns, body = sample.encode()
    view = memoryview(body)
    short = message._own(view, columns)
    assert short is not None
    assert short == message._foreign(view, columns)._replace(own=True)
    pyarrows = memoryview(batch.decode(body, columns).serialize())
    assert message._own(pyarrows, columns) is None
    foreign = message.inspect(pyarrows, columns)
    assert (foreign.rows, foreign.nodes, foreign.buffers[1::2]) == (
        short.rows,
        short.nodes,
        short.buffers[1::2],
    )


@given(samples(), st.data())
def test_take_keeps_the_rows_asked_for(sample: Sample, data: st.DataObject) -> None:
    columns, body = sample.encode()
    rows = data.draw(st.lists(st.integers(0, len(sample.values) - 1), min_size=1, max_size=5))
    kept = batch.take(body, columns, np.array(rows))
    expected = {name: [column[row] for row in rows] for name, column in sample.rows(columns).items()}
    assert plain(batch.decode(kept, columns)) == expected
    assert len(kept) % frame.ALIGNMENT == 0


@given(samples(nulls=False))
def test_a_stored_frame_gives_the_same_hashes(sample: Sample) -> None:
    columns, body = sample.encode()
    view, _ = batch.open_body(body, columns, want_keys=True)
    rows = len(sample.values)
    header = frame.Header(
        frame.DATA,
        columns | frame.MORE,
        len(body),
        0,
        0,
        0,
        rows,
        rows,
        timestamp_max_us=view.timestamp_max_us,
    )
    again = batch.view_of(header, body, want_keys=True)
    assert (again.count, again.columns, again.nbytes) == (view.count, view.columns, view.nbytes)
    assert again.timestamp_max_us == view.timestamp_max_us
    for one, two in ((view.keys, again.keys), (view.dedup_ids, again.dedup_ids)):
        assert (one is None) == (two is None)
        assert one is None or np.array_equal(one, two)  # type: ignore[arg-type]
    if view.keys is not None:
        assert [tuple(map(int, row)) for row in view.keys] == [
            identifiers.hash128(key) for key in sample.options["keys"]
        ]


def test_a_view_without_hashes_does_not_open_the_body() -> None:
    header = frame.Header(frame.DATA, identifiers.HAS_KEY, 5, 0, 0, 0, 2, 2)
    assert batch.view_of(header, b"trash").count == 2
    with pytest.raises(Corrupt):
        batch.view_of(header, b"trash", want_keys=True)


def test_hashes_of_absent_fields_are_zero() -> None:
    columns, body = made([b"", b""], keys=[None, KEY], dedup_ids=[KEY, None])
    view, _ = batch.open_body(body, columns, want_keys=True)
    assert view.keys is not None
    assert view.dedup_ids is not None
    assert view.keys.tolist() == [[0, 0], list(identifiers.hash128(KEY))]
    assert view.dedup_ids.tolist() == [list(identifiers.hash128(KEY)), [0, 0]]


def test_columns_of_nothing_are_left_out() -> None:
    columns, _ = made([b"a", b"b"], keys=[None, None], headers=[None, None], expires_at=[None, None])
    assert columns == 0


# ------------------------------------------------------------------------------------------ identifiers


@given(st.integers(1, 50), st.integers(0, 2**48 - 1), st.integers(0, 2**62 - 1), st.integers(0, 2**12 - 1))
def test_ids_are_version_7_and_count_up(count: int, unix_ms: int, tail: int, head: int) -> None:
    packed = batch.make_ids(count, unix_ms, tail, head)
    ids = [uuid.UUID(bytes=packed[at : at + 16]) for at in range(0, len(packed), 16)]
    assert len(set(ids)) == len(ids) == count
    for row, one in enumerate(ids):
        assert (one.version, one.variant) == (7, uuid.RFC_4122)
        assert (one.int >> 80, one.int >> 64 & 0xFFF) == (unix_ms, head)
        assert one.int & (2**62 - 1) == (tail + row) % 2**62


# ------------------------------------------------------------------------------------------ refusals

K64 = 64 * 1024


@pytest.mark.parametrize(
    ("options", "column"),
    [
        ({"keys": [bytes(K64 + 1)]}, "key"),
        ({"headers": [[("n", bytes(K64))]]}, "headers"),
        ({"headers": [[("n", bytes(K64 // 2)), ("m", bytes(K64 // 2))]]}, "headers"),
        ({"dedup_ids": [bytes(1025)]}, "dedup_id"),
    ],
)
def test_large_fields_are_refused_by_name(options: dict[str, Any], column: str) -> None:
    columns, body = made([b""], **options)
    with pytest.raises(TooLarge, match=f"^{column}: .* row 0"):
        batch.open_body(body, columns)


def test_limits_themselves_are_allowed() -> None:
    columns, body = made(
        [bytes(identifiers.VALUE_BYTES_MAX)],
        keys=[bytes(K64)],
        headers=[[("n", bytes(K64 - 1))]],
        dedup_ids=[bytes(1024)],
    )
    view, _ = batch.open_body(body, columns)
    assert (view.key_bytes_max, view.header_bytes_max) == (K64, K64)
    assert view.value_bytes_max == identifiers.VALUE_BYTES_MAX


def test_a_large_value_is_refused_by_its_row() -> None:
    columns, body = made([b"", bytes(identifiers.VALUE_BYTES_MAX + 1)])
    with pytest.raises(TooLarge, match=r"^value: 16777217 bytes in row 1"):
        batch.open_body(body, columns)
    with pytest.raises(TooLarge, match=r"^batch: "):
        batch.open_body(body, columns, bytes_max=1_000_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priorities": [1, 5]}, "priority: 5 in row 1"),
        ({"timestamps": [1, -1]}, "timestamp: "),
        ({"timestamps": batch.TIME_US_END}, "timestamp: "),
        ({"expires_at": [None, -5]}, "expires_at: "),
        ({"deliver_at": [None, 5]}, "deliver_at: "),
        ({"deliver_at": -5}, "deliver_at: "),
    ],
)
def test_wrong_fields_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    columns, body = made([b"", b""], **options)
    with pytest.raises(InvalidRequest, match=f"^{message}"):
        batch.open_body(body, columns)


@pytest.mark.parametrize("keys", [None, [KEY, None]])
def test_only_a_key_makes_a_tombstone(keys: list[bytes | None] | None) -> None:
    columns, body = made([b"", None], keys=keys)
    with pytest.raises(InvalidRequest, match=r"^value: null in row 1"):
        batch.open_body(body, columns)
    columns, body = made([None, b""], keys=[KEY, None])
    assert batch.open_body(body, columns)[1].column("value").to_pylist() == [None, b""]


def rebuilt(columns: int, body: Buffer, **replaced: pa.Array) -> Buffer:
    """The same body with columns exchanged, whatever they hold."""
    found = batch.decode(body, columns)
    arrays = [replaced.get(name, found.column(name)) for name in found.schema.names]
    return batch.body_of(pa.RecordBatch.from_arrays(arrays, schema=found.schema), columns)


def test_hashes_must_fit_their_keys() -> None:
    columns, body = made([b"", b""], keys=[KEY, None])
    right = identifiers.key_hash(KEY)
    for hashes in ([right, 5], [None, right], [None, None]):
        wrong = rebuilt(columns, body, key_hash=pa.array(hashes, pa.uint64()))
        with pytest.raises(InvalidRequest, match=r"^key_hash: must be there"):
            batch.open_body(wrong, columns)
    wrong = rebuilt(columns, body, key_hash=pa.array([right + 1, None], pa.uint64()))
    with pytest.raises(InvalidRequest, match=r"^key_hash: row 0"):
        batch.open_body(wrong, columns, want_keys=True)


@pytest.mark.parametrize("name", ["id", "timestamp", "priority"])
def test_nulls_are_refused_where_none_may_be(name: str) -> None:
    columns, body = made([b"", b""], priorities=[1, 2])
    kind = batch.schema_of(columns).field(name).type
    wrong = rebuilt(columns, body, **{name: pa.array([None, None], kind)})
    with pytest.raises(InvalidRequest, match=f"^{name}: a row is null"):
        batch.open_body(wrong, columns)


def test_null_header_values_are_refused() -> None:
    columns, body = made([b""], headers=[[("a", b"")]])
    nulls = pa.array([[("a", None)]], batch.schema_of(columns).field("headers").type)
    with pytest.raises(InvalidRequest, match=r"^headers: "):
        batch.open_body(rebuilt(columns, body, headers=nulls), columns)
    with pytest.raises(InvalidRequest, match=r"^headers: "):
        made([b""], headers=[[("a", None)]])


def test_header_names_are_text() -> None:
    columns, body = made([b""], headers=[[("name", b"")]])
    with pytest.raises(InvalidRequest):
        batch.open_body(bytes(body).replace(b"name", b"n\xffme"), columns)


def test_offset_deltas_are_not_the_producers() -> None:
    with pytest.raises(InvalidRequest, match=r"^offset_delta: "):
        batch.open_body(made([b""])[1], identifiers.HAS_OFFSET_DELTA)


@pytest.mark.parametrize("columns", [1 << 7, 1 << 40, -1, 1, 63])
def test_columns_must_be_those_of_the_body(columns: int) -> None:
    with pytest.raises(InvalidRequest):
        batch.open_body(made([b""])[1], columns)


def test_row_counts_are_bounded() -> None:
    rows = identifiers.BATCH_ROWS_MAX
    columns, body = made([b""] * rows)
    assert batch.open_body(body, columns)[0].count == rows
    with pytest.raises(InvalidRequest):
        made([b""] * (rows + 1))
    with pytest.raises(InvalidRequest):
        made([])
    one_more = pa.concat_batches([batch.decode(body, columns), batch.decode(made([b""])[1], 0)]).serialize()
    with pytest.raises(TooLarge):
        batch.open_body(memoryview(one_more), columns)
    none = batch.decode(body, columns).slice(0, 0).serialize()
    with pytest.raises(InvalidRequest):
        batch.open_body(memoryview(none), columns)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_bombs_are_refused_before_they_are_inflated(compression: str) -> None:
    """60 MiB of zeros in a few hundred kilobytes: pyarrow must not allocate anything for them."""
    columns, body = made([bytes(10 << 20)] * 4)
    found = batch.decode(body, columns)
    bomb = batch.body_of(pa.concat_batches([found, found]), columns, compression)
    assert len(bomb) < 1 << 20
    before = pa.total_allocated_bytes()
    with pytest.raises(TooLarge, match="decompressed"):
        batch.open_body(bomb, columns)
    assert pa.total_allocated_bytes() == before


@given(samples(), st.data())
def test_truncated_and_extended_bodies_are_refused(sample: Sample, data: st.DataObject) -> None:
    columns, body = sample.encode()
    length = data.draw(st.integers(0, len(body) - 1))
    for wrong in (bytes(body)[:length], bytes(body) + bytes(64), bytes(body) + b"x"):
        with pytest.raises(Corrupt):
            batch.decode(wrong, columns)


@given(samples(), st.data())
def test_lying_offsets_are_refused(sample: Sample, data: st.DataObject) -> None:
    """The offsets of the values, one of them changed to something that is not between its neighbours."""
    columns, body = sample.encode()
    found = message.inspect(body, columns)
    at = found.start + found.buffers[2 * 3]
    offsets = list(struct.unpack_from(f"<{found.rows + 1}i", body, at))
    row = data.draw(st.integers(0, found.rows))
    wrong = data.draw(st.integers(-(2**31), 2**31 - 1))
    low = offsets[row - 1] if row else 0
    high = offsets[row + 1] if row < found.rows else found.buffers[2 * 4 + 1]
    assume(not low <= wrong <= high)
    lying = bytearray(body)
    struct.pack_into("<i", lying, at + 4 * row, wrong)
    with pytest.raises(Corrupt):
        batch.decode(lying, columns)


def test_encode_refuses_what_does_not_fit_together() -> None:
    with pytest.raises(InvalidRequest):
        made([b"a", b"b"], keys=[KEY])
    with pytest.raises(InvalidRequest):
        made([b"a", b"b"], timestamps=np.array([1]))
    with pytest.raises(InvalidRequest):
        batch.encode([b"a"], ids=bytes(32), timestamps=1)
    with pytest.raises(InvalidRequest, match="single bytes"):
        made([memoryview(array("i", [1, 2]))])
    for options in (
        {"timestamps": 2**63},
        {"expires_at": [2**63]},
        {"priorities": [256]},
        {"priorities": [-1]},
    ):
        with pytest.raises(InvalidRequest):
            made([b"a"], **options)
    with pytest.raises(TooLarge):
        made([bytes(1 << 20)] * 49)
    with pytest.raises(TypeError):
        made(["text"])
