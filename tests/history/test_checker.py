"""The checker itself: clean histories pass, and each invariant that a history breaks is found."""

import pytest

from tests.history.checker import Report, check
from tests.history.record import (
    Drained,
    History,
    Outcome,
    Read,
    Row,
    Sent,
    Value,
    decode_value,
    encode_value,
)


def sent(process: str, counter: int, offset: int | None, outcome: Outcome = "ok", at: int = 0) -> Sent:
    return Sent(Value(process, counter), "t", outcome, 0, offset, 10 * at, 10 * at + 5 if at else 0)


def read(offset: int, process: str, counter: int, reader: str = "drain") -> Read:
    return Read(reader, "t", 0, offset, Value(process, counter))


def drained(end: int, start: int = 0) -> Drained:
    return Drained("t", 0, start, end, "drain")


GOOD: list[Row] = [
    sent("a", 0, 0, at=1),
    sent("b", 0, 1, at=2),
    sent("a", 1, 2, at=3),
    sent("b", 1, None, "unknown"),
    sent("b", 2, None, "fail"),
    sent("a", 2, None, "unknown"),
    read(0, "a", 0),
    read(1, "b", 0),
    read(2, "a", 1),
    read(3, "b", 1),
    drained(4),
]


def report(*more: Row, without: tuple[int, ...] = ()) -> Report:
    rows = [row for at, row in enumerate(GOOD) if at not in without]
    return check(History([*rows, *more]))


def broken(found: Report) -> set[str]:
    return {violation.invariant for violation in found.violations}


def test_a_good_history_passes_and_is_counted() -> None:
    found = report().expect_clean()
    assert (found.acknowledged, found.unknown, found.recovered, found.seen) == (3, 2, 1, 4)


@pytest.mark.parametrize(
    ("gone", "part"),
    [(6, "prefix"), (7, "middle")],
)
def test_i1_lost(gone: int, part: str) -> None:
    found = report(without=(gone,))
    assert {"I1"} <= broken(found) <= {"I1", "I5"}  # A hole is also a step that was skipped.
    assert found.lost == {part: 1}
    with pytest.raises(AssertionError, match="was acknowledged at"):
        found.expect_clean()


def test_i1_lost_at_the_end() -> None:
    found = report(sent("c", 0, 4, at=9))
    assert broken(found) == {"I1"}
    assert found.lost == {"postfix": 1}


def test_i1_without_a_drain_only_what_lies_below_the_highest_read() -> None:
    assert not report(sent("c", 0, 4, at=9), without=(10,)).violations
    assert broken(report(without=(7, 10))) == {"I1", "I5"}


def test_i1_what_was_trimmed_is_not_lost() -> None:
    assert not report(drained(4, start=1), without=(6, 10)).violations


def test_i2_nobody_sent_it() -> None:
    assert broken(report(read(4, "x", 7), drained(5))) == {"I2"}


def test_i2_damaged() -> None:
    assert broken(report(Read("drain", "t", 0, 4, None), drained(5))) == {"I2"}


def test_i2_in_another_topic() -> None:
    assert "I2" in broken(report(Read("drain", "u", 0, 0, Value("a", 2))))


def test_i3_failed_and_seen() -> None:
    assert broken(report(read(4, "b", 2), drained(5))) == {"I3"}


def test_i4_two_readers_disagree() -> None:
    assert "I4" in broken(report(read(0, "a", 2, "other")))


def test_i4_reader_and_sender_disagree() -> None:
    assert "I4" in broken(report(sent("c", 5, 3, at=8)))


def test_i4_two_acknowledgements_of_one_offset() -> None:
    assert "I4" in broken(report(sent("c", 5, 2, at=8)))


@pytest.mark.parametrize("offset", [1, 3])
def test_i5_goes_back_or_repeats(offset: int) -> None:
    value = {1: ("b", 0), 3: ("b", 1)}[offset]
    assert broken(report(read(offset, *value))) == {"I5"}


def test_i5_skips() -> None:
    reads = [read(0, "a", 0, "other"), read(2, "a", 1, "other")]
    assert broken(report(*reads)) == {"I5"}


def test_i5_a_drain_with_holes() -> None:
    assert broken(report(drained(5))) == {"I5"}


def test_i6_twice() -> None:
    assert broken(report(read(4, "a", 1), drained(5))) == {"I6"}


def test_i6_out_of_order() -> None:
    rows: list[Row] = [
        sent("a", 0, None, "unknown"),
        sent("a", 1, None, "unknown"),
        read(0, "a", 1),
        read(1, "a", 0),
    ]
    assert broken(check(History(rows))) == {"I6"}


def test_i7_real_time() -> None:
    rows: list[Row] = [sent("a", 0, 1, at=1), sent("b", 0, 0, at=2), read(0, "b", 0), read(1, "a", 0)]
    assert broken(check(History(rows))) == {"I7"}


def test_payloads_prove_themselves() -> None:
    payload = encode_value(Value("p1", 42), padding=10)
    assert decode_value(payload) == Value("p1", 42)
    for at in range(len(payload)):
        damaged = bytearray(payload)
        damaged[at] ^= 1
        assert decode_value(bytes(damaged)) is None
    assert decode_value(None) is None
    assert decode_value(b"") is None
