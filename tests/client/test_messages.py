"""Results of batches with duplicates, receipts, messages and times."""

from collections.abc import Generator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.client.messages import Message, Pending, Receipt, Receipts, Rows, Stored, moment, to_us
from tailrace.core.model.commands import Published
from tailrace.errors import InvalidRequest
from tailrace.format import batch as arrow
from tailrace.format import frame
from tailrace.format.frame import Header

IDS = b"".join(bytes([n]) * 16 for n in range(10))


class Settled(Pending):
    """A batch that is through, or failed."""

    def __init__(self, stored: Stored | Exception) -> None:
        self._stored = stored

    def wait(self) -> Generator[Any, None, Stored]:
        yield from ()
        if isinstance(self._stored, Exception):
            raise self._stored
        return self._stored


def finish(awaitable: Any) -> Any:
    """The result of something that does not have to wait."""
    with pytest.raises(StopIteration) as stopped:
        next(awaitable.__await__())
    return stopped.value.value


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.integers(0, 1000))
def test_rows_that_are_no_duplicates_follow_each_other(duplicate: list[bool], base: int) -> None:
    duplicates = [(row, 5 + row if row % 2 else -1) for row, known in enumerate(duplicate) if known]
    stored = Stored("t", 0, IDS, Published(base, 7, duplicates or None))
    results = [stored.result(row) for row in range(len(duplicate))]
    fresh = [result.offset for result, known in zip(results, duplicate, strict=True) if not known]
    assert fresh == list(range(base, base + len(fresh)))
    assert [result.duplicate for result in results] == duplicate
    for row, first in duplicates:
        assert results[row].offset == (None if first < 0 else first)
    assert [result.id.bytes for result in results] == [bytes([n]) * 16 for n in range(len(results))]


def test_the_place_of_an_old_duplicate_may_be_unknown() -> None:
    result = Stored("t", 0, IDS, Published(9, 7, [(0, -1)])).result(0)
    assert (result.offset, result.sequence, result.duplicate) == (None, None, True)
    known = Stored("t", 0, IDS, Published(9, 7, [(0, -1)])).result(1)
    assert (known.offset, known.sequence, known.duplicate) == (9, 10, False)


def test_receipts_come_in_the_order_sent() -> None:
    first = Settled(Stored("t", 0, IDS, Published(10, 7)))
    second = Settled(Stored("t", 1, IDS, Published(20, 7)))
    assert finish(Receipt(first, 2)).offset == 12
    plain = Receipts([(first, range(2), None), (second, range(2), None)])
    assert [result.offset for result in finish(plain)] == [10, 11, 20, 21]
    mixed = Receipts([(first, [0, 3], [0, 2]), (second, [1], [1])])
    assert [result.offset for result in finish(mixed)] == [10, 21, 13]
    assert (len(plain), len(mixed)) == (4, 3)
    assert finish(Receipts([])) == []


def test_receipts_raise_the_first_failure() -> None:
    good = Settled(Stored("t", 0, IDS, Published(10, 7)))
    with pytest.raises(InvalidRequest):
        next(Receipts([(good, range(1), None), (Settled(InvalidRequest("no")), range(1), None)]).__await__())


def rows_of(columns: int, body: Any, count: int) -> Rows:
    header = Header(frame.DATA, columns, len(body), 0, 0, 100, count, count, 1, 5_000_000)
    return Rows("t", 3, header, arrow.decode(body, columns))


def test_a_message_shows_its_fields_and_where_it_was() -> None:
    columns, body = arrow.encode(
        [b"a", None],
        ids=bytes(range(32)),
        timestamps=[1_000_000, 2_000_000],
        keys=[None, b"k"],
        headers=[[("h", b"1"), ("h", b"2")], None],
        priorities=[0, 4],
        expires_at=[None, 9_000_000],
        dedup_ids=[b"d", None],
    )
    first, second = rows_of(columns, body, 2).messages(0)
    assert (first.topic, first.partition, first.offset, first.sequence) == ("t", 3, 100, 101)
    assert (first.value, first.key, first.priority, first.dedup_id) == (b"a", None, 0, b"d")
    assert first.headers == [("h", b"1"), ("h", b"2")]
    assert (first.timestamp, first.append_time) == (moment(1_000_000), moment(5_000_000))
    assert (second.value, second.key, second.headers, second.dedup_id) == (None, b"k", [], None)
    assert (first.expires_at, second.expires_at) == (None, moment(9_000_000))
    assert second.id.bytes == bytes(range(16, 32))
    assert repr(second) == "Message(t/3@101, key=b'k', value=None)"


def test_a_plain_message_has_defaults_and_a_batch_can_be_entered_in_the_middle() -> None:
    columns, body = arrow.encode([b"a", b"b", b"c"], ids=bytes(48), timestamps=1)
    rows = rows_of(columns, body, 3)
    (last,) = rows.messages(rows.first_row(102))
    assert isinstance(last, Message)
    assert (last.value, last.key, last.headers, last.priority, last.expires_at) == (b"c", None, [], 2, None)
    assert [message.value for message in rows.messages(0)] == [b"a", b"b", b"c"]


@given(st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(9000, 1, 1), timezones=st.just(UTC)))
def test_times_there_and_back(time: datetime) -> None:
    assert moment(to_us(time, "time", InvalidRequest)) == time


@pytest.mark.parametrize("wrong", [datetime(2020, 1, 1), True, 1.5, "now", None])
def test_what_is_no_time_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="expires_at"):
        to_us(wrong, "expires_at", InvalidRequest)
