"""The hash table against a dict, with hashes that collide on purpose."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.collections.hash_table import (
    MISSING,
    MOVES,
    SMALL_SLOTS,
    STEP,
    HashTable,
    group_rows,
    present_rows,
)
from tailrace.core.model.identifiers import HASH_OF_EMPTY, hash128

# Few low halves, so that runs are long and wrap around the end.
LOWS = st.sampled_from([0, 1, 2, 13, 14, 15, 16, 31, 1 << 63, (1 << 64) - 1])
HASHES = st.tuples(LOWS, st.integers(0, 5) | st.just((1 << 64) - 1)).filter(lambda pair: pair != (0, 0))
STEPS = st.lists(
    st.tuples(st.just("put"), HASHES, st.integers(0, 1 << 62))
    | st.tuples(st.just("put_many"), st.lists(HASHES, max_size=20, unique=True), st.integers(0, 1000)),
    max_size=60,
)


def matrix(pairs: list[tuple[int, int]]) -> npt.NDArray[np.uint64]:
    return np.array(pairs, np.uint64).reshape(-1, 2)


@given(STEPS, st.sampled_from([(4096, 64, 4, 256), (16, 2, 4, 1), (16, 64, 2, 8), (32, 8, 4, 16)]))
def test_the_table_is_a_dict(steps: list[tuple[str, Any, int]], pace: tuple[int, int, int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, number in zip(("SMALL_SLOTS", "CLEARS", "MOVES", "STEP"), pace, strict=True):
            patch.setattr(f"tailrace.core.collections.hash_table.{name}", number)
        check_against_a_dict(steps)


def check_against_a_dict(steps: list[tuple[str, Any, int]]) -> None:
    table, model = HashTable(), dict[tuple[int, int], int]()
    for verb, what, value in steps:
        if verb == "put":
            table.put(what[0], what[1], value)
            model[what] = value
        else:
            values = np.arange(value, value + len(what))
            table.put_many(matrix(what), values)
            model.update(zip(what, values.tolist(), strict=True))
        table.check()
        assert len(table) == len(model)
    asked = [*model, (0, 7), (15, 99), (1 << 63, 99)]
    wanted = [model.get(pair, MISSING) for pair in asked]
    assert table.get_many(matrix(asked)).tolist() == wanted
    assert [table.get(*pair) for pair in asked] == wanted

    copy = HashTable.from_buffers(table.buffers())
    assert copy.buffers() == table.buffers()
    assert len(copy) == len(table)
    for number in range(40):  # A copy goes on exactly as the original does, in the middle of a move too.
        table.put(number + 1, number, number)
        copy.put(number + 1, number, number)
    assert copy.buffers() == table.buffers()
    copy.check()


def test_a_large_table_grows_and_keeps_everything() -> None:
    pairs = matrix([hash128(str(number).encode()) for number in range(20_000)])
    table = HashTable()
    for start in range(0, len(pairs), 777):
        table.put_many(pairs[start : start + 777], np.arange(start, min(start + 777, len(pairs))))
    table.check()
    assert table.get_many(pairs).tolist() == list(range(len(pairs)))


@pytest.mark.parametrize("step", [1, 500])
def test_no_single_put_moves_a_large_table(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    insert = HashTable._insert

    def counted(table: HashTable, entries: npt.NDArray[np.uint64], *, replace: bool = True) -> int:
        moved.append(len(entries))
        return insert(table, entries, replace=replace)

    monkeypatch.setattr(HashTable, "_insert", counted)
    random = np.random.default_rng(1)
    pairs = random.integers(1, 1 << 63, (60_000, 2), np.uint64)
    table = HashTable()
    for start in range(0, len(pairs), step):
        if step == 1:
            table.put(int(pairs[start, 0]), int(pairs[start, 1]), start)
        else:
            table.put_many(pairs[start : start + step], np.arange(start, start + step))
    assert max(moved) <= max(SMALL_SLOTS, step * MOVES + STEP)
    table.check()
    assert table.get_many(pairs).tolist() == list(range(len(pairs)))


@pytest.mark.parametrize("entries", [0, 10, 11, 1000])
def test_room_asked_for_is_room_there(entries: int) -> None:
    table = HashTable(entries)
    size = len(table.buffers()[0])
    for number in range(entries):
        table.put(number + 1, 0, number)
    assert len(table.buffers()[0]) == size
    table.check()


def test_the_zero_hash_is_reserved() -> None:
    assert hash128(b"") == HASH_OF_EMPTY
    with pytest.raises(AssertionError):
        HashTable().put(0, 0, 1)


@given(st.lists(HASHES | st.just((0, 0)), min_size=1, max_size=30))
def test_rows_are_grouped_in_order(pairs: list[tuple[int, int]]) -> None:
    groups = group_rows(matrix(pairs))
    for row, pair in enumerate(pairs):
        first = int(groups.first[groups.group[row]])
        assert first == pairs.index(pair)
        assert groups.rank[row] == pairs[:row].count(pair)
    assert present_rows(matrix(pairs)).tolist() == [row for row, pair in enumerate(pairs) if pair != (0, 0)]
