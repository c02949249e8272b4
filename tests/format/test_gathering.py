"""Rows out of stored frames: the columns for decisions, zero-copy answers, and gathered frames."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.model.identifiers import HASH_OF_EMPTY, key_hash
from tailrace.errors import Corrupt
from tailrace.format import batch, frame, gathering
from tailrace.format.frame import Frame, Header
from tailrace.format.gathering import Run, columns_of, gather
from tests.format.samples import Sample, samples


def stored(sample: Sample, base: int, time_us: int = 7, compression: str | None = None) -> Frame:
    columns, body = sample.encode(compression)
    count = len(sample.values)
    header = Header(frame.DATA, columns, len(body), frame.crc32c(body), 3, base, count, count, 0, time_us)
    return frame.make(header, body)


def plain(count: int, base: int) -> Frame:
    ids = batch.make_ids(count, 5, 5, 5)
    return stored(Sample([b"%d" % (base + row) for row in range(count)], {"ids": ids, "timestamps": 9}), base)


def run(first: int, count: int) -> Run:
    return first, count, 1, 0


def rows_of(frames: Any) -> list[dict[str, Any]]:
    """All rows with their offsets, in order; the checksums hold."""
    found = []
    for item in frames:
        raw = b"".join(item.parts())
        for header, body in frame.walk(raw):
            rows = batch.decode(body, header.columns).to_pylist()
            assert header.count == len(rows)
            for row, fields in enumerate(rows):
                offset = header.base_offset + fields.pop("offset_delta", row)
                assert header.base_offset <= offset < header.end_offset
                found.append({"offset": offset, **fields})
    return found


@given(samples(), st.integers(0, 1000), st.sampled_from([None, "lz4"]))
def test_columns_are_those_of_the_rows(sample: Sample, base: int, compression: str | None) -> None:
    item = stored(sample, base, compression=compression)
    found = columns_of(item.header, item.body)
    count = len(sample.values)
    assert (found.base_offset, found.end_offset, found.append_time_us) == (base, base + count, 7)
    assert found.offsets is None
    rows = sample.rows(item.header.columns)

    def same(column: Any, name: str, expected: list[int]) -> None:
        assert (column is None) == (name not in rows)
        assert column is None or column.tolist() == expected

    same(found.priorities, "priority", rows.get("priority", []))
    hashes = [0 if key is None else key_hash(key) or HASH_OF_EMPTY[0] for key in rows.get("key", [])]
    same(found.key_hashes, "key_hash", hashes)
    same(
        found.expires_us,
        "expires_at",
        [0 if time is None else time or 1 for time in rows.get("expires_at", [])],
    )


def test_columns_do_not_keep_the_body_in_memory() -> None:
    sample = Sample([b"v"], {"ids": bytes(16), "timestamps": 1, "keys": [b"k"], "priorities": [1]})
    item = stored(sample, 0)
    found = columns_of(item.header, item.body)
    assert found.key_hashes is not None
    assert found.priorities is not None
    assert not any(np.shares_memory(a, np.frombuffer(item.body, np.uint8)) for a in found_arrays(found))


def found_arrays(found: Any) -> list[Any]:
    return [found.key_hashes, found.priorities]


@given(
    st.lists(samples(rows_max=6), min_size=1, max_size=4),
    st.sampled_from([None, "lz4"]),
    st.data(),
)
def test_every_row_comes_in_the_order_asked_for(
    batches: list[Sample], compression: str | None, choose: st.DataObject
) -> None:
    frames: list[Frame] = []
    offset = choose.draw(st.integers(0, 50))
    for number, sample in enumerate(batches):
        frames.append(stored(sample, offset, 100 + number, compression if number % 2 else None))
        offset += len(sample.values)
    whole = rows_of(frames)
    wanted = choose.draw(st.lists(st.sampled_from(whole), min_size=1, unique_by=lambda row: row["offset"]))
    offsets = [row["offset"] for row in wanted]
    needed = [f for f in frames if any(f.header.base_offset <= o < f.header.end_offset for o in offsets)]
    found = gather(needed, [run(offset, 1) for offset in offsets])
    rows = rows_of(found)
    if found is needed:
        assert offsets == sorted(offsets)
        assert 2 * len(offsets) >= sum(item.header.count for item in needed)
        rows = [row for row in rows if row["offset"] in set(offsets)]
    else:
        assert found[0].header.append_time_us == needed[0].header.append_time_us
    for got, expected in zip(rows, wanted, strict=True):
        for name, value in got.items():
            assert value == expected.get(name, 2 if name == "priority" else None)


def test_half_of_the_rows_are_enough_for_the_stored_frames() -> None:
    frames = [plain(10, 0), plain(10, 10)]
    assert gather(frames, [run(5, 10)]) is frames
    (made,) = gather(frames, [run(6, 8), run(19, 1)])
    assert [row["value"] for row in rows_of([made])] == [b"%d" % n for n in (*range(6, 14), 19)]


def test_a_piece_of_one_large_frame_needs_no_list_of_offsets() -> None:
    (made,) = gather([plain(5000, 100)], [run(700, 50)])
    assert (made.header.base_offset, made.header.span, made.header.count) == (700, 50, 50)
    assert not made.header.columns
    assert [row["value"] for row in rows_of([made])] == [b"%d" % n for n in range(700, 750)]


def test_gathered_frames_can_be_gathered_from_again() -> None:
    (picked,) = gather([plain(20, 0)], [run(3, 1), run(9, 1), run(12, 1)])
    assert columns_of(picked.header, picked.body).offsets is not None
    (again,) = gather([picked], [run(9, 1)])
    assert [row["offset"] for row in rows_of([again])] == [9]


def test_a_row_that_is_not_there_is_noticed() -> None:
    (picked,) = gather([plain(20, 0)], [run(3, 1), run(9, 1), run(12, 1)])
    with pytest.raises(Corrupt):
        gather([picked], [run(4, 1)])


@pytest.mark.parametrize("copied_max", [0, 1 << 20])
def test_rows_of_many_frames_come_in_the_order_asked_for(
    copied_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "COPIED_BYTES_MAX", copied_max)
    frames = [plain(100, base) for base in (0, 100, 300)]
    wanted = [399, 5, 120, 6, 7, 300, 199, 0]
    found = rows_of(gather(frames, [run(offset, 1) for offset in wanted]))
    assert [row["offset"] for row in found] == wanted
    assert [row["value"] for row in found] == [b"%d" % offset for offset in wanted]
    with pytest.raises(Corrupt):
        gather(frames, [run(5, 1), run(250, 1)])
