"""The key index: the sequence of each key, row by row."""

from __future__ import annotations

import pytest

from tailrace.core.model.identifiers import Refusal, hash128
from tailrace.core.publish.key_index import KeyIndex
from tests.core.oracle import hashes


def index(*keys: str, entries_max: int = 100) -> KeyIndex:
    made = KeyIndex(entries_max)
    if keys:
        made.add(hashes(list(keys)))
    made.verify()
    return made


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["a"], [2]),
        (["a"], [-1]),
        (["new"], [0]),
        (["a", "a", "a"], [2, 3, 4]),
        (["new", "b", "new"], [0, 1, 1]),
        (["new", "new"], [-1, 1]),
        ([None, "a"], [-1, 2]),
        (["a", "b"], None),
    ],
)
def test_accepted(keys: list[str | None], expected: list[int] | None) -> None:
    assert index("a", "b", "a").check(hashes(keys), expected) is None


@pytest.mark.parametrize(
    ("keys", "expected", "row", "now"),
    [
        (["a"], [0], 0, 2),
        (["a"], [1], 0, 2),
        (["a"], [3], 0, 2),
        (["new"], [1], 0, 0),
        (["new", "new"], [0, 0], 1, 1),
        (["b", "a", "b"], [1, -1, 1], 2, 2),
        ([None, "a"], [-1, 0], 1, 2),
    ],
)
def test_conflicts_name_the_row_and_where_the_key_is(
    keys: list[str | None], expected: list[int], row: int, now: int
) -> None:
    outcome = index("a", "b", "a").check(hashes(keys), expected)
    assert isinstance(outcome, Refusal)
    assert outcome.code == "sequence_conflict"
    assert (outcome.details["row"], outcome.details["current_key_sequence"]) == (row, now)


@pytest.mark.parametrize(
    ("keys", "expected"), [(["a"], [0, 1]), (["a"], [-2]), (["a"], [1 << 62]), ([None], [0]), (["a"], [])]
)
def test_malformed(keys: list[str | None], expected: list[int]) -> None:
    outcome = index().check(hashes(keys), expected)
    assert isinstance(outcome, Refusal)
    assert outcome.code == "invalid_request"


def test_the_index_has_a_bound() -> None:
    full = index("a", "b", entries_max=3)
    assert full.check(hashes(["c", "a", "c"]), None) is None
    outcome = full.check(hashes(["c", "d"]), None)
    assert isinstance(outcome, Refusal)
    assert (outcome.code, outcome.details["limit"]) == ("overloaded", 3)


def test_counts_and_snapshot() -> None:
    keys = index("a", "", "a")
    keys.add(hashes(["a", None, ""]))
    assert [keys.count(*hash128(key)) for key in (b"a", b"", b"b")] == [3, 2, 0]
    copy = index()
    copy.load(keys.buffers())
    assert copy.buffers() == keys.buffers()
    assert copy.count(*hash128(b"a")) == 3
