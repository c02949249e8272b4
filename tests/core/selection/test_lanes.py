"""The pattern of the lanes: its weights in every stretch, and who gets the slots of an empty lane."""

from __future__ import annotations

from collections import Counter

import pytest

from tailrace.core.selection.lanes import EMPTY, OWED_MAX, READY, STRICT, UNKNOWN, WEIGHTED, WEIGHTS, LaneTurn

NEVER_US, LONG_AGO_US, LIMIT_US = 1_000, 0, 10


class Supply:
    """A lane with a number of rows, all of which wait since the same time."""

    def __init__(self, lane: int, count: int, since_us: int = NEVER_US, state: int = READY) -> None:
        self.rows = [lane * 1_000_000 + row for row in range(count)]
        self.at = 0
        self.since_us = since_us
        self.row_bytes = 100.0
        self.missing: int | None = 77 if state == UNKNOWN else None
        self.state = state if count or state == UNKNOWN else EMPTY

    def refill(self) -> bool:
        self.state = EMPTY
        return False


def lanes_of(rows: list[int]) -> list[int]:
    return [row // 1_000_000 for row in rows]


def draw(turn: LaneTurn, supplies: list[Supply], count: int, bytes_max: int = 1 << 40) -> list[int]:
    return lanes_of(turn.draw(supplies, count, bytes_max, LIMIT_US)[0])


def test_the_pattern_has_the_weights_and_is_spread_evenly() -> None:
    assert Counter(WEIGHTED) == dict(enumerate(WEIGHTS))
    endless = WEIGHTED * 3
    for lane, weight in enumerate(WEIGHTS):
        for length in (10, 20, 50):
            found = [endless[start : start + length].count(lane) for start in range(100)]
            assert max(found) - min(found) <= 2, (lane, length)
        assert 0.9 * weight * 10 <= (WEIGHTED * 10).count(lane) <= 1.1 * weight * 10


def test_all_lanes_have_a_backlog() -> None:
    turn, supplies = LaneTurn(WEIGHTED), [Supply(lane, 5_000) for lane in range(5)]
    drawn = [lane for size in (1, 7, 499, 500, 993) for lane in draw(turn, supplies, size)]
    for start in range(0, 1_000, 50):
        shares = Counter(drawn[start : start + 1_000])
        assert all(
            0.9 * 10 * weight <= shares[lane] <= 1.1 * 10 * weight for lane, weight in enumerate(WEIGHTS)
        )


def test_an_empty_lane_gives_its_slots_to_the_heaviest() -> None:
    turn = LaneTurn(WEIGHTED)
    drawn = draw(turn, [Supply(0, 0), *(Supply(lane, 500) for lane in range(1, 5))], 100)
    assert Counter(drawn) == {1: 75, 2: 15, 3: 7, 4: 3}
    assert draw(turn, [Supply(lane, 0) for lane in range(4)] + [Supply(4, 9)], 100) == [4] * 9


def test_strict_takes_the_lowest_number() -> None:
    drawn = draw(LaneTurn(STRICT), [Supply(lane, 3) for lane in range(5)], 100)
    assert drawn == sorted(drawn) == [lane for lane in range(5) for _ in range(3)]


def test_bytes_bound_a_draw_but_one_row_always_comes() -> None:
    assert len(draw(LaneTurn(STRICT), [Supply(lane, 9) for lane in range(5)], 100, 250)) == 3
    assert len(draw(LaneTurn(STRICT), [Supply(lane, 9) for lane in range(5)], 100, 1)) == 1


@pytest.mark.parametrize(("pattern", "first"), [(STRICT, []), (WEIGHTED, [1])])
def test_what_cannot_be_told_is_asked_for(pattern: tuple[int, ...], first: list[int]) -> None:
    supplies = [Supply(0, 0, state=UNKNOWN), *(Supply(lane, 9) for lane in range(1, 5))]
    turn = LaneTurn(pattern, position=pattern.index(first[0]) if first else 0)
    rows, missing = turn.draw(supplies, 100, 1 << 40, LIMIT_US)
    assert (lanes_of(rows), missing) == (first, 77)


def test_what_starves_goes_next() -> None:
    supplies = [Supply(0, 500), Supply(1, 0), Supply(2, 0), Supply(3, 3, LONG_AGO_US), Supply(4, 0)]
    assert draw(LaneTurn(STRICT), supplies, 6) == [3, 3, 3, 0, 0, 0]
    supplies = [Supply(0, 500), Supply(1, 0), Supply(2, 500, LONG_AGO_US), Supply(3, 0), Supply(4, 0)]
    assert draw(LaneTurn(STRICT), supplies, 502) == [2] * 500 + [0, 0]


def test_the_oldest_of_those_that_starve_goes_first() -> None:
    supplies = [Supply(lane, 1, since_us) for lane, since_us in enumerate((9, 5, 7, 1, 3))]
    assert draw(LaneTurn(WEIGHTED), supplies, 5) == [3, 4, 1, 2, 0]


def draw_ahead(turn: LaneTurn, supplies: list[Supply], count: int, above: int) -> list[int]:
    return lanes_of(turn.draw(supplies, count, 1 << 40, LIMIT_US, above)[0])


def test_ahead_of_their_turn_only_more_urgent_lanes_are_drawn_from() -> None:
    supplies = [Supply(lane, 3) for lane in range(5)]
    assert draw_ahead(LaneTurn(STRICT), supplies, 100, 2) == [0, 0, 0, 1, 1, 1]
    assert draw_ahead(LaneTurn(STRICT), supplies, 2, 4) == [2, 2]
    assert draw_ahead(LaneTurn(STRICT), [Supply(0, 0, state=UNKNOWN), Supply(1, 3)], 2, 2) == []


def test_what_a_lane_took_ahead_of_its_turn_it_gives_back() -> None:
    turn, supplies = LaneTurn(WEIGHTED), [Supply(lane, 5_000) for lane in range(5)]
    drawn = [lane for _ in range(700) for lane in draw_ahead(turn, supplies, 1, 3) + draw(turn, supplies, 1)]
    for start in range(0, 300, 50):
        shares = Counter(drawn[start : start + 1_000])
        assert all(
            0.9 * 10 * weight <= shares[lane] <= 1.1 * 10 * weight for lane, weight in enumerate(WEIGHTS)
        ), shares


def test_a_lane_that_owes_much_waits_for_its_turn_unless_it_is_alone() -> None:
    turn, supplies = (
        LaneTurn(WEIGHTED),
        [Supply(0, 100), Supply(1, 0), Supply(2, 100), Supply(3, 0), Supply(4, 0)],
    )
    assert len(draw_ahead(turn, supplies, 100, 2)) == OWED_MAX
    assert turn.held_back
    assert draw_ahead(turn, supplies, 100, 2) == []
    assert draw(turn, supplies, 3) == [2, 0, 0]  # It pays back with its own slots and those left to it.
    alone = [Supply(0, 100), *(Supply(lane, 0) for lane in range(1, 5))]
    assert len(draw_ahead(LaneTurn(WEIGHTED), alone, 100, 2)) == 100


def test_a_lane_that_has_nothing_pays_with_the_slots_that_it_cannot_use() -> None:
    turn, others = LaneTurn(WEIGHTED), [Supply(1, 0), Supply(2, 500), Supply(3, 0), Supply(4, 0)]
    for _ in range(20):
        assert draw_ahead(turn, [Supply(0, 5), *others], 100, 2) == [0] * 5
        assert draw(turn, [Supply(0, 0), *others], 12) == [2] * 12


def test_nothing_less_urgent_is_drawn_ahead_while_a_lane_owes_much() -> None:
    turn, supplies = LaneTurn(WEIGHTED), [Supply(lane, 100) for lane in range(5)]
    assert draw_ahead(turn, supplies, 100, 3) == [0] * OWED_MAX
    assert draw_ahead(turn, supplies, 100, 4) == []
    assert turn.held_back
    drawn = draw(turn, supplies, 40)
    assert Counter(drawn)[0] >= 12, "it has paid, and has its share again"
