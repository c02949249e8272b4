"""The dedup window over virtual time, against a dict; its bound; and large windows that rotate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.model.identifiers import Refusal
from tailrace.core.publish.dedup import ROTATE_MIN, DedupWindow, Filtered
from tests.core.oracle import hashes

T0 = 1_700_000_000_000_000
WINDOW_MS = 100
WINDOW_US = WINDOW_MS * 1000


def taken(window: DedupWindow, ids: list[str | None], offset: int, time_us: int) -> dict[int, int]:
    """Add a batch as a partition would; gives what was a duplicate."""
    found = window.find(hashes(ids), offset, time_us)
    assert not isinstance(found, Refusal), found
    kept = ids if found is None else [ids[row] for row in found.keep]
    if kept:
        window.add(hashes(kept), offset, time_us)
    window.verify()
    return {} if found is None else dict(found.duplicates)


def test_an_id_counts_for_exactly_the_window() -> None:
    window = DedupWindow(WINDOW_MS, 10)
    assert taken(window, ["a"], 0, T0) == {}
    assert taken(window, ["a"], 1, T0) == {0: 0}
    assert taken(window, ["a", "b"], 1, T0 + WINDOW_US - 1) == {0: 0}
    assert taken(window, ["a", "b"], 2, T0 + WINDOW_US) == {1: 1}
    assert taken(window, ["a"], 3, T0 + 2 * WINDOW_US - 1) == {0: 2}


def test_duplicates_inside_a_batch() -> None:
    window = DedupWindow(WINDOW_MS, 10)
    assert taken(window, ["x"], 0, T0) == {}
    ids = [None, "a", "x", "a", None, "b", "x", "a"]
    found = window.find(hashes(ids), 1, T0)
    assert isinstance(found, Filtered)
    assert found.keep.tolist() == [0, 1, 4, 5]
    assert found.duplicates == [(2, 0), (3, 2), (6, 0), (7, 2)]


def test_rows_without_an_id_are_never_duplicates() -> None:
    window = DedupWindow(WINDOW_MS, 1)
    assert taken(window, [None, None], 0, T0) == {}
    assert taken(window, [None, None], 2, T0) == {}
    assert window.live(T0) == 0


def test_a_full_window_says_when_to_come_back() -> None:
    window = DedupWindow(WINDOW_MS, 4)
    taken(window, ["a", "b"], 0, T0)
    taken(window, ["c", "d"], 2, T0 + 7_500)
    assert taken(window, ["a", "d"], 4, T0 + 8_000) == {0: 0, 1: 3}
    for ids, wait_ms in ((["e"], 92), (["e", "f"], 92), (["e", "f", "g"], 100), (["a", "e"], 92)):
        found = window.find(hashes(list(ids)), 4, T0 + 8_000)
        assert isinstance(found, Refusal)
        assert (found.code, found.details["retry_after_ms"]) == ("overloaded", wait_ms)
        later = window.find(hashes(list(ids)), 4, T0 + 8_000 + wait_ms * 1000)
        assert not isinstance(later, Refusal)
    found = window.find(hashes(["e", "f", "g", "h", "i"]), 4, T0 + 8_000)
    assert isinstance(found, Refusal)
    assert found.code == "too_large"


def test_recall_of_a_filtered_batch() -> None:
    window = DedupWindow(WINDOW_MS, 10)
    taken(window, ["x", "y"], 0, T0)
    ids: list[str | None] = [None, "x", "a", "a", "y", "b"]
    assert taken(window, ids, 2, T0) == {1: 0, 3: 3, 4: 1}
    assert window.recall(hashes(ids), 2, 3) == [(1, 0), (3, 3), (4, 1)]
    # All of a batch filtered: no row was kept, it would have started at 5.
    assert window.recall(hashes(["y", "b"]), 5, 0) == [(0, 1), (1, 4)]


def test_recall_of_what_is_forgotten_says_so() -> None:
    window = DedupWindow(WINDOW_MS, 10)
    taken(window, ["x"], 0, T0)
    taken(window, ["x", "a"], 1, T0 + 1)
    taken(window, ["x"], 2, T0 + WINDOW_US)
    assert window.recall(hashes(["x", "a"]), 1, 1) == [(0, -1), (1, 1)]
    assert window.recall(hashes(["x", None, "a"]), 1, 1) == [(0, -1), (1, -1), (2, 1)]
    assert window.recall(hashes(["q", "r"]), 5, 0) == [(0, -1), (1, -1)]


@given(st.data())
def test_large_windows_rotate_and_lose_nothing(data: st.DataObject) -> None:
    """Hundreds of ids at a time, so that tables are dropped; ids come again before and after their window."""
    window, model, offset, time_us = DedupWindow(WINDOW_MS, 1_000_000), dict[int, tuple[int, int]](), 0, T0
    for _ in range(data.draw(st.integers(5, 12))):
        time_us += data.draw(st.sampled_from([0, 10_000, 30_000, 60_000, WINDOW_US]))
        first = data.draw(st.integers(0, 3000))
        ids = np.arange(first, first + data.draw(st.integers(1, ROTATE_MIN)), dtype=np.uint64)
        pairs = np.stack([ids * np.uint64(0x9E3779B97F4A7C15), ids + np.uint64(1)], axis=1)
        found = window.find(pairs, offset, time_us)
        assert not isinstance(found, Refusal)
        duplicates = {} if found is None else dict(found.duplicates)
        for row, number in enumerate(ids.tolist()):
            known = model.get(number)
            alive = known is not None and time_us - known[1] < WINDOW_US
            assert duplicates.get(row) == (known[0] if known is not None and alive else None)
        keep = np.arange(len(ids)) if found is None else found.keep
        for position, row in enumerate(keep.tolist()):
            model[int(ids[row])] = offset + position, time_us
        if len(keep):
            window.add(pairs[keep], offset, time_us)
        offset += len(keep)
        window.verify()
        assert window.live(time_us) == sum(1 for _, at in model.values() if time_us - at < WINDOW_US)
    copy = DedupWindow(WINDOW_MS, 1_000_000)
    copy.load(window.buffers())
    copy.verify()
    assert copy.buffers() == window.buffers()


@pytest.mark.parametrize("rows", [1, 3])
def test_memory_does_not_grow_with_time(rows: int) -> None:
    window, offset = DedupWindow(WINDOW_MS, 1_000_000), 0
    sizes = []
    for turn in range(6000):
        ids = np.array([[offset + row + 1, turn + 1] for row in range(rows)], np.uint64)
        window.add(ids, offset, T0 + turn * 1000)
        offset += rows
        if turn % 1000 == 999:
            sizes.append(sum(len(buffer) for buffer in window.buffers()))
    assert max(sizes[1:]) <= 2 * sizes[0]
    assert window.live(T0 + 5999 * 1000) == WINDOW_MS * rows
