"""Frames as Spark's batches: equal to what readers of the SDK get, whatever is chosen, cut and gathered.

Covers `spark/source/row_batches.py`.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.core.model.identifiers import HAS_OFFSET_DELTA
from tailrace.errors import Corrupt, InvalidRequest
from tailrace.format import batch, frame
from tailrace.format.builder import body_of
from tailrace.format.schema import schema_of
from tailrace.format.tabular import POSITIONED, with_positions
from tailrace.spark.source import row_batches as rows
from tailrace.spark.source.slices import Slice

START = 1000
TIMES = st.integers(0, 10**12)
MESSAGE = st.fixed_dictionaries(
    {
        "value": st.binary(max_size=20),
        "key": st.none() | st.binary(max_size=5),
        "headers": st.none() | st.dictionaries(st.text(max_size=3), st.binary(max_size=3), max_size=2),
        "priority": st.integers(0, 4),
        "timestamp": TIMES,
        "expires_at": st.none() | TIMES,
    }
)
FRAMES = st.lists(
    st.tuples(
        st.lists(MESSAGE, min_size=1, max_size=6),
        st.sets(st.sampled_from(("key", "headers", "priority", "expires_at"))),
    ),
    min_size=1,
    max_size=8,
)
Stored = tuple[frame.Header, memoryview]


def stored(blocks: list[tuple[list[dict[str, object]], set[str]]], base: int = START) -> list[Stored]:
    """One frame for each block, with the columns named there."""
    frames = []
    for number, (messages, has) in enumerate(blocks):
        count = len(messages)
        optional = {
            argument: [message[name] for message in messages]
            for argument, name in (
                ("keys", "key"),
                ("headers", "headers"),
                ("priorities", "priority"),
                ("expires_at", "expires_at"),
            )
            if name in has
        }
        columns, body = batch.encode(
            [message["value"] for message in messages],
            ids=batch.make_ids(count, 1_700_000_000_000 + number, 7 * number, 5),
            timestamps=[message["timestamp"] for message in messages],
            **optional,
        )
        frames.append((header_of(columns, body, base, count, count, number), memoryview(body)))
        base += count
    return frames


def header_of(columns: int, body: object, base: int, span: int, count: int, number: int) -> frame.Header:
    return frame.Header(
        frame.DATA,
        columns,
        len(body),
        frame.crc32c(body),
        number,
        base_offset=base,
        span=span,
        count=count,
        append_time_us=5_000_000 + number,
    )


def positioned(frames: list[Stored], start: int = 0, end: int = 1 << 40) -> pa.Table:
    """The same through the SDK's own conversion."""
    tables = [
        with_positions(batch.decode(body, header.columns), header, "orders", 3) for header, body in frames
    ]
    whole = pa.Table.from_batches(tables)
    offsets = np.asarray(whole["offset"])
    return whole.filter(pa.array((offsets >= start) & (offsets < end)))


def table(batches: list[pa.RecordBatch], schema: pa.Schema = POSITIONED) -> pa.Table:
    for found in batches:
        found.validate(full=True)
        assert found.schema.equals(schema)
        assert found.num_rows
    return pa.Table.from_batches(batches, schema)


@settings(max_examples=60)
@given(FRAMES, st.data())
def test_rows_are_those_of_the_frames_within_the_slice(blocks, data):
    frames = stored(blocks)
    end = frames[-1][0].end_offset
    first = data.draw(st.integers(START, end - 1))
    stop = data.draw(st.integers(first + 1, end))
    names = data.draw(st.lists(st.sampled_from(POSITIONED.names), unique=True))
    schema = pa.schema([POSITIONED.field(name) for name in names or POSITIONED.names])
    part = Slice("orders", 3, first, stop)
    found = table(list(rows.row_batches(frames, part, names)), schema)
    assert found.equals(positioned(frames, first, stop).select(schema.names))


@settings(max_examples=30)
@given(FRAMES, TIMES)
def test_rows_that_have_expired_are_left_out_when_asked(blocks, now):
    frames = stored(blocks)
    part = Slice("orders", 3, 0, 1 << 40)
    found = table(list(rows.row_batches(frames, part, (), [rows.unexpired(now)])))
    whole = positioned(frames)
    expires = whole["expires_at"].cast(pa.int64()).to_pylist()
    assert found.equals(whole.filter(pa.array([at is None or at > now for at in expires])))


def plain(count: int, value: bytes = b"v") -> dict[str, object]:
    return {"value": value, "timestamp": count}


def test_small_frames_are_gathered_and_large_ones_handed_on():
    large = [plain(n) for n in range(rows.ROWS_ALONE)]
    small = [plain(n) for n in range(50)]
    blocks = [(small, set())] * 3 + [(large, set())] + [(small, set())] * 400
    frames = stored(blocks)
    batches = list(rows.row_batches(frames, Slice("orders", 3, 0, 1 << 40)))
    counts = [found.num_rows for found in batches]
    assert counts[:2] == [150, rows.ROWS_ALONE]
    assert counts[2:] == [rows.ROWS_WANTED, rows.ROWS_WANTED, 400 * 50 - 2 * rows.ROWS_WANTED]
    assert table(batches).equals(positioned(frames))
    value = batches[1].column(POSITIONED.names.index("value")).buffers()[2]
    body = pa.py_buffer(frames[3][1])
    assert body.address <= value.address < body.address + body.size, "the values were copied"


@pytest.mark.parametrize("has", [[False], [False, True], [True, False, False]])
def test_a_priority_is_never_null(has):
    blocks = [([plain(1) | {"priority": 4}] * 2, {"priority"} if stores else set()) for stores in has]
    wanted = [4 if stores else 2 for stores in has for _ in range(2)]
    [found] = rows.row_batches(stored(blocks), Slice("orders", 3, 0, 1 << 40), ["priority"])
    assert found.column("priority").to_pylist() == wanted
    [found] = rows.row_batches(
        stored(blocks),
        Slice("orders", 3, 0, 1 << 40),
        ["offset"],
        [lambda piece: pc.greater_equal(piece.column("priority"), 1)],
    )
    assert found.num_rows == len(wanted)


def test_batches_of_large_values_stay_small():
    heavy = [plain(1, bytes(300_000))]
    batches = list(rows.row_batches(stored([(heavy, set())] * 60), Slice("orders", 3, 0, 1 << 40)))
    assert sum(found.num_rows for found in batches) == 60
    assert all(found.nbytes < 2 * rows.BYTES_WANTED for found in batches)
    assert len(batches) < 10


def test_frames_with_gaps_keep_their_offsets():
    ids = batch.make_ids(3, 1, 2, 3)
    columns, body = batch.encode([b"a", b"b", b"c"], ids=ids, timestamps=1)
    opened = batch.decode(body, columns)
    columns |= HAS_OFFSET_DELTA
    arrays = [*opened.columns, pa.array([0, 4, 9], pa.uint32())]
    body = memoryview(body_of(pa.RecordBatch.from_arrays(arrays, schema=schema_of(columns)), columns))
    header = header_of(columns, body, 100, 12, 3, 0)
    part = Slice("orders", 3, 101, 109)
    assert table(list(rows.row_batches([(header, body)], part)))["offset"].to_pylist() == [104]
    short = header_of(columns, body, 100, 9, 3, 0)
    with pytest.raises(Corrupt, match=r"orders/3: offset_delta"):
        list(rows.row_batches([(short, body)], part))


def test_a_frame_with_too_few_rows_is_an_error():
    ((header, body),) = stored([([plain(1), plain(2)], set())])
    wrong = header_of(header.columns, body, START, 3, 3, 0)
    with pytest.raises(Corrupt, match=f"orders/3: the frame at offset {START} should have 3 rows, it has 2"):
        list(rows.row_batches([(wrong, body)], Slice("orders", 3, 0, 1 << 40)))


def test_schemas_are_checked_by_name_and_type():
    assert rows.ddl(("offset", "value")) == "`offset` BIGINT, `value` BINARY"
    assert rows.ddl().count(",") == len(POSITIONED.names)
    rows.check_schema(["offset", "headers"], ["bigint", "map<string,binary>"])
    with pytest.raises(InvalidRequest, match="schema: no column colour"):
        rows.check_schema(["colour"], ["string"])
    with pytest.raises(InvalidRequest, match="schema: value is BINARY, not STRING"):
        rows.check_schema(["value"], ["string"])
