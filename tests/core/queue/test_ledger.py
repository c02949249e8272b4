"""The parts of a ledger by themselves: back-off, texts, frame_index, leases, what waits and what may go.

Also covers `core/collections/string_pool.py`, `core/queue/backlog.py`, `core/queue/frame_index.py` and
`core/queue/leases.py`.
"""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.collections.string_pool import StringPool
from tailrace.core.model import facts
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import HAS_EXPIRES_AT, HAS_KEY, HAS_PRIORITY, BatchView
from tailrace.core.queue import frame_index, leases, ledger_snapshot
from tailrace.core.queue.backlog import BACK, Backlog
from tailrace.core.queue.frame_index import FrameIndex
from tailrace.core.queue.leases import GroupLeases, KeyRuns, LiveLease
from tailrace.core.queue.ledger import Ledger, back_off_us


def test_the_back_off_doubles_up_to_its_limit_and_is_jittered() -> None:
    policy = GroupPolicy()
    for failures, longest in ((1, 1), (2, 2), (6, 32), (7, 60), (1_000_000, 60)):
        waits = {back_off_us(policy, "g", offset, failures) for offset in range(200)}
        assert 0.5 * longest * 10**6 <= min(waits) < 0.55 * longest * 10**6
        assert 0.95 * longest * 10**6 < max(waits) <= longest * 10**6
        assert len(waits) > 190
    assert back_off_us(GroupPolicy(backoff_ms=0), "g", 0, 1) == 0
    assert back_off_us(policy, "g", 7, 1) == back_off_us(policy, "g", 7, 1) != back_off_us(policy, "h", 7, 1)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2))))
def test_texts_are_kept_as_long_as_they_are_used(steps: list[tuple[str, int]]) -> None:
    texts, uses = StringPool(), dict[str, int]()
    numbers: dict[str, int] = {}
    for text, change in steps:
        if change > 0:
            numbers[text] = texts.use(text, change)
            uses[text] = uses.get(text, 0) + change
        elif change and uses.get(text, 0) >= -change:
            texts.drop(numbers[text], -change)
            uses[text] += change
        uses = {text: many for text, many in uses.items() if many}
        assert {text: many for _, text, many in texts.rows()} == uses
        assert all(texts[numbers[text]] == text for text in uses)
        live, again = deepcopy(texts), StringPool()
        again.fill(texts.rows())
        assert [again.use(text, 1) for text in "xyz"] == [live.use(text, 1) for text in "xyz"]
    assert texts.use("", 5) == 0
    assert texts[0] == ""


# ------------------------------------------------------------------------------------------------- traits


def _view(columns: int, lanes: list[int] | None = None, count: int = 4) -> BatchView:
    priorities = None if lanes is None else np.array(lanes, np.uint8)
    return BatchView(count, columns, 100, 1, priorities=priorities)


def test_traits_say_which_columns_and_lanes_lie_where() -> None:
    found = FrameIndex()
    views = [
        _view(0),
        _view(HAS_KEY),
        _view(HAS_KEY),
        _view(HAS_PRIORITY, [0, 4, 0, 4]),
        _view(HAS_EXPIRES_AT | HAS_PRIORITY),
    ]
    for number, view in enumerate(views):
        found.appended(number * 4, view)
    found.verify()
    assert found.columns(0, 4) == 0
    assert found.columns(0, 5) == found.columns(7, 9) == HAS_KEY
    assert found.columns(11, 17) == HAS_KEY | HAS_EXPIRES_AT
    assert found.lanes(0) == (1 << 2, 4)
    assert found.lanes(5) == (1 << 2, 12)
    assert found.lanes(12) == (1 << 0 | 1 << 4, 16)
    assert found.lanes(17) == (1 << 2, 20)
    assert found.laned(15)
    assert not found.laned(16)
    assert found.keyed(11)
    assert not found.keyed(12)
    assert found.ending(19)
    assert not found.ending(20)
    again = FrameIndex()
    again.load(*(memoryview(buffer) for buffer in found.buffers()), 20)
    assert again.buffers() == found.buffers()
    assert [again.laned(15), again.keyed(12), again.ending(19)] == [True, False, True]
    found.trimmed(13)
    found.verify()
    assert found.lanes(13) == (1 << 0 | 1 << 4, 16)


def test_too_many_traits_become_coarser_and_never_say_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_index, "INDEX_ENTRIES_MAX", 8)
    found = FrameIndex()
    for number in range(100):
        found.appended(number * 4, _view(HAS_KEY if number % 2 else 0))
        found.verify()
        assert len(found.buffers()[0]) <= 8 * 9
    assert all(found.columns(number * 4, number * 4 + 4) == HAS_KEY for number in range(1, 100, 2))


# ----------------------------------------------------------------------------------------------- receipts


def test_ended_leases_are_forgotten_in_time_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASES_REMEMBERED_MAX", 3)
    book = GroupLeases()
    for number in range(1, 6):
        lease = LiveLease(number, "m", 1000 + number, 0, [0, 1], 1)
        book.open(lease)
        book.end(lease, 0)
        book.verify()
    assert [book.ended_well(number, 0) for number in range(1, 6)] == [False, False, True, True, True]
    assert not book.ended_well(3, 1003)
    lease = LiveLease(9, "m", 5000, 0, [0, 1], 1)
    book.open(lease)
    book.end(lease, 1004)
    assert [book.ended_well(number, 0) for number in (3, 4, 5, 9)] == [False, False, True, True]
    again = GroupLeases()
    again.fill(*(memoryview(column) for column in book.columns()))
    assert again.columns() == book.columns()


def test_the_next_deadline_follows_extensions() -> None:
    book = GroupLeases()
    one, other = LiveLease(1, "m", 100, 0, [0, 1], 1), LiveLease(2, "m", 200, 0, [1, 2], 1)
    book.open(one)
    book.open(other)
    assert book.next_deadline_us() == 100
    book.extend(one, 300)
    assert book.next_deadline_us() == 200
    book.end(other, 0)
    assert book.next_deadline_us() == 300
    book.drop(one)
    assert book.next_deadline_us() is None


def test_keys_are_read_along_with_spans() -> None:
    keys = KeyRuns([5, 5, 0, 7])
    assert keys.runs(10, 13) == [(10, 12, 5), (12, 13, 0)]
    assert keys.runs(20, 21) == [(20, 21, 7)]
    assert KeyRuns([]).runs(3, 9) == [(3, 9, 0)]
    with pytest.raises(AssertionError):
        KeyRuns([5]).runs(0, 2)


# ------------------------------------------------------------------------------------------------ backlog


def _back(due_us: int, key: int, deliveries: int = 1) -> bytes:
    return BACK.pack(deliveries, 0, 0, 0, 0, due_us, key)


def test_a_message_is_ready_when_nothing_older_of_its_key_waits() -> None:
    backlog = Backlog()
    backlog.clear(100)
    backlog.put_back(5, 6, _back(50, 7), 10)
    backlog.put_back(8, 9, _back(10, 7), 10)
    backlog.put_back(9, 12, _back(10, 0), 10)
    assert list(backlog.ready.spans()) == [(9, 12)]
    assert backlog.next_due_us() == 50
    backlog.advance(50)
    assert list(backlog.ready.spans()) == [(5, 6), (8, 12)]
    assert backlog.next_due_us() == 50, "until somebody was told of it"
    assert [backlog.told_due(50), backlog.told_due(50)] == [2, 0]
    assert backlog.next_due_us() is None
    backlog.put_back(3, 4, _back(99, 7), 50)
    assert list(backlog.ready.spans()) == [(9, 12)], "an older one has to wait"
    backlog.take_back(3, 4)
    assert list(backlog.ready.spans()) == [(5, 6), (8, 12)]
    backlog.advance(10)
    assert list(backlog.ready.spans()) == [(9, 12)], "time went back"
    backlog.verify()


def test_messages_passed_over_stay_fresh() -> None:
    backlog = Backlog()
    assert backlog.take_new(3, 5) == [(3, 5)]
    assert backlog.cursor == 5
    assert list(backlog.fresh.spans()) == [(0, 3)]
    assert backlog.take_new(1, 7) == [(1, 3), (5, 7)]
    assert list(backlog.open.spans()) == [(0, 1)]
    backlog.verify()


# ----------------------------------------------------------------------------------------------- the whole


def test_a_plain_run_is_one_run_whatever_its_length() -> None:
    ledger = Ledger(1, "g", GroupPolicy(ordering="none"), 0)
    for number in range(1000):
        first = number * 5000
        ledger.lease(facts.Leased(1, number + 1, "m", [first, first + 5000], 10**6, 1))
        ledger.nack(facts.Nacked(1, number + 1, [first + 7, first + 4000], 10**9, 2))
        ledger.ack(facts.Acked(1, [(number + 1, [first, first + 7, first + 4000, first + 5000])], 3))
    assert len(ledger.backlog.back) == 1000
    assert not ledger.leased
    assert ledger.backlog.fresh.total == 0
    assert sum(map(len, ledger_snapshot.freeze(ledger)())) < 200_000
    ledger_snapshot.verify(ledger)


def test_a_broken_image_is_refused() -> None:
    ledger = Ledger(1, "g", GroupPolicy(), 0)
    ledger.lease(facts.Leased(1, 5, "m", [0, 3], 9, 1))
    ledger.nack(facts.Nacked(1, 5, [1, 2], 5, 2))
    columns = [memoryview(bytes(column)) for column in ledger_snapshot.freeze(ledger)()]
    assert len(columns) == ledger_snapshot.COLUMNS
    assert ledger_snapshot.freeze(ledger_snapshot.ledger_of(columns, 5))() == ledger_snapshot.freeze(ledger)()
    for number in range(4, len(columns)):
        broken = list(columns)
        broken[number] = memoryview(bytes(columns[number]) + bytes(8))
        with pytest.raises(ValueError, match="snapshot"):
            ledger_snapshot.ledger_of(broken, 5)
