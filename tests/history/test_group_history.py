"""The checker of groups itself: a good history passes, and each rule that a history breaks is found."""

from pathlib import Path

import pytest

from tests.history.group_history import (
    Finished,
    Got,
    GroupHistory,
    HistoryFile,
    Late,
    Moved,
    Outcome,
    Row,
    encode_row,
)
from tests.history.record import Sent, Value


def sent(offset: int) -> Sent:
    return Sent(Value("p", offset), "t", "ok", 0, offset, 1, 2)


def got(offset: int, at: int, member: str = "a", lease: int = 1, key: str = "k") -> Got:
    return Got(member, 0, offset, lease, key, Value("p", offset), 1, 1, at)


def acked(offset: int, at: int, member: str = "a", lease: int = 1, outcome: Outcome = "ok") -> Finished:
    return Finished(member, 0, offset, lease, "ack", outcome, at, at + 1)


SENT = [sent(0), sent(1), sent(2)]
GOOD: list[Row] = [
    got(0, 10),
    acked(0, 12),
    got(1, 20),
    # `a` is stopped here; `b` gets the rest, and `a` is told when it goes on.
    got(1, 30, "b", 2),
    acked(1, 32, "b", 2),
    got(2, 40, "b", 2),
    acked(2, 42, "b", 2),
    acked(1, 50, outcome="lost"),
]


def broken(rows: list[Row], sends: list[Sent] = SENT) -> str:
    with pytest.raises(AssertionError) as found:
        GroupHistory(rows, sends).expect_clean()
    return str(found.value)


def without(*places: int) -> list[Row]:
    return [row for at, row in enumerate(GOOD) if at not in places]


def test_a_good_history_passes() -> None:
    history = GroupHistory(GOOD, SENT)
    history.expect_clean()
    assert set(history.repeated()) == {(0, 1)}
    assert history.in_hand(25) == {(0, 1)}
    assert history.in_hand(25, "b") == set()
    assert history.longest_gap_ns(0, 5, 60) == 20


def test_lateness_is_cut_to_the_time_that_is_asked_for() -> None:
    history = GroupHistory([*GOOD, Late("a", 10, 30), Late("b", 25, 60)], SENT)
    history.expect_clean()
    assert history.lateness_ns(0, 100) == [20, 35]
    assert history.lateness_ns(20, 40) == [10, 15]
    assert history.lateness_ns(60, 90) == []


def test_g1_never_delivered() -> None:
    assert "G1: Value(process='p', counter=3) at (0, 3) was never delivered" in broken(GOOD, [*SENT, sent(3)])


def test_g1_never_settled() -> None:
    rows: list[Row] = [*without(6), acked(2, 42, "b", 2, "lost")]
    assert "at (0, 2) was never settled" in broken(rows)


def test_g1_a_killed_process_leaves_a_doubt() -> None:
    GroupHistory(without(6), SENT).expect_clean()


def test_g1_an_answer_that_a_killed_broker_owes_leaves_a_doubt() -> None:
    rows: list[Row] = [*without(6), Finished("b", 0, 2, 2, "ack", "lost", 42, 60)]
    assert "at (0, 2) was never settled" in broken(rows)
    GroupHistory(rows, SENT, kills=[50]).expect_clean()


def test_g1_keys_that_may_die_need_not_be_settled() -> None:
    rows: list[Row] = [*without(6), acked(2, 42, "b", 2, "lost")]
    GroupHistory(rows, SENT).expect_clean(may_die=frozenset({"k"}))


def test_g2_another_message() -> None:
    assert "G2" in broken(GOOD, [sent(0), sent(1), Sent(Value("q", 9), "t", "ok", 0, 2, 1, 2)])


def test_g3_settled_twice() -> None:
    rows: list[Row] = [*without(7), acked(1, 31)]
    assert "G3" in broken(rows)


def test_g4_delivered_after_it_was_settled() -> None:
    assert "G4" in broken([*GOOD, got(0, 60, "b", 3)])


def test_g4_a_sleeper_may_look_at_what_it_had() -> None:
    GroupHistory([*GOOD, got(2, 60), acked(2, 61, outcome="lost")], SENT).expect_clean()


def test_g5_out_of_order() -> None:
    assert "G5: k: 2 was processed before 1" in broken([*GOOD, got(2, 15, "c", 4)])


def test_g5_what_was_processed_in_vain_while_the_broker_was_away_does_not_count() -> None:
    rows: list[Row] = [*GOOD, got(2, 15, "c", 4), acked(2, 16, "c", 4, "lost")]
    assert "G5: k: 2 was processed before 1" in broken(rows)
    GroupHistory(rows, SENT, kills=[9]).expect_clean()


def test_g5_not_settled_before_the_next() -> None:
    rows: list[Row] = [*without(4), acked(1, 45, "b", 2)]
    assert "G5: k: 1 was not settled before 2" in broken(rows)


def test_a_file_is_read_as_far_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    file = HistoryFile(path)
    assert file.rows() == []
    moved = Moved("a", "assigned", [0, 1], 5)
    lines = b"".join(encode_row(row) for row in [*GOOD, moved])
    path.write_bytes(lines[:-3])
    assert file.rows() == GOOD
    path.write_bytes(lines)
    assert file.rows() == [*GOOD, moved]
