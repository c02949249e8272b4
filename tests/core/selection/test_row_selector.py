"""The pool against brute force: lanes, keys, retries, TTL, frames that are not at hand, restarts.

Also covers `core/selection/key_cursors.py`, `core/selection/key_offers.py`, `core/selection/key_queues.py`,
`core/selection/lane_feeds.py`, `core/selection/lane_queues.py` and `core/selection/selection_terms.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.selection import key_queues
from tailrace.core.selection.lanes import OWED_MAX, WEIGHTS
from tailrace.core.selection.selection_terms import Want
from tests.core.pool_model import BACK, DYING, FRESH, LEASED, SECOND_US, SETTLED, World, flat
from tests.mixtures import mixtures

SHARED = {"assignment": "shared", "ordering": "key"}
MEMBERS = ("a", "b", "c")


def world(keyed: bool = False, exact: bool = True, **options: Any) -> World:
    return World(
        GroupPolicy(**({**SHARED, **options} if keyed else {"ordering": "none", **options})), keyed, exact
    )


# --------------------------------------------------------------------------------------------- any mixture

rows = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=8)
publishing = st.tuples(st.just("publish"), rows, st.sampled_from([0, 0, 0, 40 * SECOND_US]))
leasing = st.tuples(st.just("lease"), st.sampled_from(MEMBERS), st.integers(1, 12))
others = [  # the last two are about what the pool remembers
    st.tuples(st.just("ack"), st.integers(0, 99), st.integers(1, 9)),
    st.tuples(st.just("nack"), st.integers(0, 99), st.sampled_from([0, 5 * SECOND_US, 60 * SECOND_US])),
    st.tuples(st.just("die"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("bury"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("settle"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("reopen"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("pass"), st.sampled_from([1, 10, 35]), st.just(0)),
    st.tuples(st.just("evict"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("forget"), st.just(0), st.just(0)),
]
plays = mixtures([publishing, leasing, leasing], others, 10, 45)


def pick(offsets: list[int], number: int, count: int = 1) -> list[int]:
    """Some of the offsets, from anywhere on."""
    at = number % len(offsets) if offsets else 0
    return offsets[at : at + count]


def play(of: World, step: tuple[str, Any, Any]) -> None:
    what, one, two = step
    if what == "publish":
        of.publish(one, two)
    elif what == "lease":
        of.lease(one, two)
    elif what == "ack":
        of.ack(pick(of.of(LEASED), one, two))
    elif what == "nack":
        for offset in pick(of.of(LEASED), one):
            of.give_back(offset, two)
    elif what == "die":
        of.settle(pick(of.of(LEASED, BACK), one), dying=True)
    elif what == "bury":
        of.settle(pick(of.of(DYING), one))
    elif what == "settle":
        of.settle(pick(of.of(FRESH, BACK), one))
    elif what == "reopen":
        for offset in pick(of.of(SETTLED), one):
            of.give_back(offset, 0)
    elif what == "pass":
        of.now_us += one * SECOND_US
    elif what == "evict":
        of.here.discard(one)
    else:
        of.pool.forget()


def drain(of: World) -> None:
    """Whatever is left is delivered and settled in the end."""
    of.now_us += 100 * SECOND_US
    of.settle(of.of(DYING))
    of.ack(of.of(LEASED))
    for turn in range(10_000):
        offsets = of.lease(MEMBERS[turn % 2], 5)
        dying = of.of(DYING)
        of.settle(dying)
        of.ack(offsets)
        if not offsets and not dying:
            break
    assert of.of(FRESH, BACK, LEASED, DYING) == []


modes = st.fixed_dictionaries(
    {
        "priority_mode": st.sampled_from(["weighted", "strict"]),
        "expired_to_dlq": st.booleans(),
        "starvation_ms": st.sampled_from([30_000, 10_000_000]),
    }
)


@pytest.mark.parametrize("keyed", [False, True])
def test_any_mixture_goes_as_by_brute_force_and_nothing_is_lost(keyed: bool) -> None:
    @given(modes, plays)
    def check(options: dict[str, Any], played: list[tuple[str, Any, Any]]) -> None:
        of = world(keyed, **options)
        for step in played:
            play(of, step)
        drain(of)

    check()


SETTLED_AHEAD = [
    ("publish", [(0, 0), (0, 0)], 0),
    ("publish", [(0, 0), (0, 1), (0, 1)], 0),
    ("lease", "a", 1),
    ("forget", 0, 0),
    ("lease", "a", 1),
    ("settle", 2, 0),
    ("reopen", 0, 0),
]
"""An operator settles a message beyond the window and opens it again; one of its key lies between."""

FILLED_BY_A_KEY = [
    ("publish", [(0, 0), (0, 0), (0, 0), (0, 0), (2, 1), (0, 1), (2, 0)], 0),
    ("lease", "a", 2),
    ("die", 0, 0),
    ("lease", "a", 1),
    ("lease", "a", 2),
    ("publish", [(0, 0)], 0),
    ("evict", 1, 0),
    ("lease", "a", 1),
]
"""The frame behind the window is missing; then more of a key is found, with which the window is full."""


@example(SETTLED_AHEAD, 1, 1)
@example(FILLED_BY_A_KEY, 2, 1)
@given(plays, st.integers(1, 9), st.integers(1, 4))
def test_small_windows_change_the_choice_but_never_the_order_of_a_key(
    played: list[tuple[str, Any, Any]], window: int, of_a_key: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_queues, "WINDOW_ROWS", window)
        patch.setattr(key_queues, "KEY_ROWS", of_a_key)
        of = world(keyed=True, exact=False)
        for step in played:
            play(of, step)
        drain(of)


asking = st.tuples(st.just("ask"), st.sampled_from(MEMBERS), st.integers(1, 12))
watched_plays = mixtures([publishing, leasing, leasing, asking, asking], others[:-2], 10, 45)


@pytest.mark.parametrize("keyed", [False, True])
def test_whether_anybody_asked_changes_no_later_answer(keyed: bool) -> None:
    """One of two pools is asked all the time, by whomever. What both lease stays the same."""

    @given(modes, watched_plays)
    def check(options: dict[str, Any], played: list[tuple[str, Any, Any]]) -> None:
        asked, left_alone = world(keyed, exact=False, **options), world(keyed, exact=False, **options)
        left_alone.doubting = False
        for step in played:
            if step[0] == "ask":
                assert asked.ask(step[1], step[2]) == asked.ask(step[1], step[2])
                continue
            play(asked, step)
            play(left_alone, step)
            assert asked.rows == left_alone.rows

    check()


# --------------------------------------------------------------------------------------------------- lanes


def test_the_weights_are_observed_over_any_thousand_deliveries_of_a_backlog() -> None:
    of = world(exact=False)
    for _ in range(20):
        of.publish([(lane, 0) for lane in range(5) for _ in range(100)])
    drawn: list[int] = []
    for size in [1, 37, 250, 500, 500, 12, 500]:
        offsets = of.lease("a", size)
        for offset in offsets[::50]:
            of.give_back(offset, 0)  # retries do not bend the weights either
        drawn += [of.rows[offset].lane for offset in offsets]
    assert len(drawn) == 1_800
    for start in range(0, 801, 40):
        shares = Counter(drawn[start : start + 1_000])
        assert all(9 * weight <= shares[lane] <= 11 * weight for lane, weight in enumerate(WEIGHTS)), start


@pytest.mark.parametrize("keyed", [False, True])
def test_what_was_drawn_ahead_is_not_owed_when_it_goes_back_unstarted(keyed: bool) -> None:
    of = world(keyed, exact=False)
    of.publish([(0, 0)] * 30 + [(2, 0)] * 30)
    for _ in range(3):
        ahead = lease_ahead(of, 20)
        assert ahead == list(range(OWED_MAX))
        of.pool.unstarted(flat(ahead))
        for offset in ahead:
            of.give_back(offset, 0)
    of.ack(lease_ahead(of, 3))
    for offset in lease_ahead(of, OWED_MAX - 3):
        of.give_back(offset, 0)
    assert lease_ahead(of, 1) == [], "what was handled, or failed, is owed"


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_only_what_is_urgent_with_all_before_it_of_its_key_is_drawn_ahead(in_flight: int) -> None:
    of = world(keyed=True, priority_mode="strict")
    of.publish([(0, 1), (3, 1), (0, 1)])  # Another message of the key comes between.
    if in_flight:
        assert of.lease("a", in_flight) == [0, 1][:in_flight]
    of.publish([(0, 2), (1, 2), (0, 2)])
    first = [] if in_flight else [0]
    assert lease_ahead(of, 9) == [*first, 3], "what is behind 1 or 4 helps nobody"
    assert lease_ahead(of, 9) == []
    of.ack([*range(in_flight or 1)])
    assert lease_ahead(of, 9, above=2) == [*([2] if in_flight == 2 else []), 4, 5]


def test_what_is_behind_less_urgent_messages_leaves_the_shares_of_lanes_as_they_are() -> None:
    of = world(keyed=True, exact=False)
    of.publish([(0, 0)] * 30 + [(2, 1), (2, 1)])
    assert lease_ahead(of, 20) == list(range(OWED_MAX)), "others want their share"


def lease_ahead(of: World, count: int, above: int = 1) -> list[int]:
    """Only more urgent lanes are asked for."""
    want = Want("a", count, 1 << 30, len(of.rows), of.now_us, of.now_us, of.keyed, above)
    chosen = of.pool.select(want, of, of, of)
    of._lease("a", chosen)
    return chosen.offsets


def test_strict_goes_by_number_and_first_in_first_out_within_a_lane() -> None:
    of = world(priority_mode="strict")
    of.publish([(4, 0), (2, 0), (0, 0), (2, 0), (0, 0)])
    assert of.lease("a", 4) == [2, 4, 1, 3]
    of.publish([(1, 0), (4, 0)])
    assert of.lease("a", 4) == [5, 0, 6]


def test_a_critical_message_far_behind_is_found_without_reading_what_is_between() -> None:
    of = world()
    for _ in range(50):
        of.publish([(2, 0)] * 10)
    of.publish([(0, 0)])
    of.here = {0}
    assert of.ask("a", 5).missing == 500
    assert of.lease("a", 5)[0] == 500
    assert of.loads == 1
    assert of.here == {0, 50}


def test_what_waited_too_long_goes_next_once() -> None:
    of = world(priority_mode="strict")
    of.publish([(4, 0), (4, 0)])
    of.now_us += 20 * SECOND_US
    of.publish([(3, 0), (0, 0), (0, 0)])
    assert of.ask("a", 2).offsets == [3, 4]
    of.now_us += 10 * SECOND_US
    assert of.lease("a", 5) == [0, 1, 3, 4, 2]


def test_a_retry_comes_first_in_its_lane_when_it_is_due() -> None:
    of = world(priority_mode="strict")
    of.publish([(1, 0), (1, 0), (1, 0), (0, 0)])
    assert of.lease("a", 3) == [3, 0, 1]
    of.give_back(1, SECOND_US)
    assert of.ask("a", 3).offsets == [2]
    of.now_us += SECOND_US
    assert of.lease("a", 3) == [1, 2]


@pytest.mark.parametrize("keyed", [False, True])
def test_what_starves_behind_a_retry_takes_it_along(keyed: bool) -> None:
    of = world(keyed, priority_mode="strict")
    of.publish([(4, 0), (4, 0)])
    assert of.lease("a", 1) == [0]
    of.now_us += 20 * SECOND_US
    of.publish([(0, 0), (0, 0)])
    of.give_back(0, 5 * SECOND_US)
    of.now_us += 10 * SECOND_US
    assert of.lease("a", 9) == [0, 1, 2, 3]


@pytest.mark.parametrize("keyed", [False, True])
def test_what_has_expired_does_not_take_a_retry_along(keyed: bool) -> None:
    of = world(keyed)
    of.publish([(0, 0)])
    assert of.lease("a", 1) == [0]
    of.publish([(0, 0), (0, 1)], ttl_us=2 * SECOND_US)
    of.publish([(2, 0)])
    of.give_back(0, 5 * SECOND_US)
    of.now_us += 40 * SECOND_US
    assert of.lease("a", 1) == [3], "it waits for 40 s, the retry for 35"
    assert of.lease("a", 1) == [0]
    assert of.of(SETTLED) == [1, 2]


@pytest.mark.parametrize("keyed", [False, True])
def test_retries_go_in_the_order_in_which_they_are_due(keyed: bool) -> None:
    of = world(keyed)
    of.publish([(2, 0), (2, 0), (2, 0)])
    assert of.lease("a", 2) == [0, 1]
    of.give_back(0, 5 * SECOND_US)
    of.give_back(1, SECOND_US)
    of.now_us += 10 * SECOND_US
    assert of.lease("a", 3) == [1, 0, 2]


def test_a_retry_that_may_have_expired_does_not_hide_what_starves_behind_it() -> None:
    of = world()
    of.publish([(3, 0)], ttl_us=40 * SECOND_US)
    assert of.lease("a", 1) == [0]
    of.publish([(3, 0), (0, 0)])
    of.give_back(0, SECOND_US)
    of.here = {1}
    of.now_us += 100 * SECOND_US
    assert of.ask("a", 9).missing == 0
    assert of.lease("a", 9) == [1, 2]


def test_asking_twice_gives_the_same_when_the_first_time_shows_that_messages_expire() -> None:
    of = world(keyed=True)
    of.publish([(1, 3)], ttl_us=40 * SECOND_US)
    of.settle([0])
    of.give_back(0, 0)
    of.publish([(0, 3), (0, 0)])
    of.now_us += 100 * SECOND_US
    first = of.ask("a", 9)
    assert (first.offsets, first.lapsed) == ([1, 2], [0])
    assert of.ask("a", 9) == first


def test_asking_does_not_take_anything_away() -> None:
    for keyed in (False, True):
        of = world(keyed)
        of.publish([(number % 5, number % 4) for number in range(40)])
        first = of.ask("a", 10)
        assert of.ask("b", 40).offsets[:10] == first.offsets
        assert of.ask("a", 10) == first


def test_asking_takes_no_offer_out() -> None:
    of = world(keyed=True, priority_mode="strict")
    of.publish([(number % 5, 1 + number % 7) for number in range(60)])
    leased = of.lease("a", 3)
    of.ack(leased[:2])
    of.give_back(leased[2], 0)
    of.ask("c", 1)
    before = offers(of)
    assert before
    for member, count in (("b", 40), ("a", 1), ("c", 12)):
        of.ask(member, count)
        assert offers(of) == before


def offers(of: World) -> dict[int, tuple[int, bool]]:
    """What every key offers: the entry, and whether it stands as it came with the log."""
    queues = of.pool._queues
    assert isinstance(queues, key_queues.KeyQueues)
    return {
        key: (queue.codes[0] if queue.untouched else queue.entry, queue.untouched)
        for key, queue in queues._keys.items()
        if queue.untouched or queue.spot is not None
    }


def test_a_key_with_more_in_a_missing_frame_is_asked_for_until_it_is_there() -> None:
    """Then the others and the keys that are short of messages go in turn, a lease each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_queues, "KEY_ROWS", 1)
        of = world(keyed=True, exact=False)
        of.publish([(2, 1), (2, 2)])
        of.publish([(2, 1), (2, 2)])
        of.publish([(2, 3), (2, 4)])
        assert of.lease("a", 1) == [0]
        of.ack([0])
        of.here = {0, 2}
        first = of.ask("a", 1)
        assert (first.offsets, first.missing) == ([], 2)
        assert of.ask("b", 1) == of.ask("a", 1) == first
        assert of.lease("a", 3) == [1, 2, 4]


def test_bytes_bound_a_selection() -> None:
    for keyed in (False, True):
        of = world(keyed)
        of.publish([(2, 0)] * 20)
        assert len(of.ask("a", 20, bytes_max=500).offsets) == 5
        assert len(of.ask("a", 20, bytes_max=1).offsets) == 1


def test_a_long_dead_backlog_lapses_in_pieces() -> None:
    of = world()
    of.publish([(2, 0)] * 10_000, ttl_us=SECOND_US)
    of.publish([(2, 0)])
    of.now_us += SECOND_US
    chosen = of.ask("a", 10)
    assert chosen.offsets == []
    assert 0 < len(chosen.lapsed) < 10_000
    assert chosen.lapsed == sorted(chosen.lapsed)
    of.settle(chosen.lapsed)
    while not (chosen := of.ask("a", 10)).offsets:
        of.settle(chosen.lapsed)
    assert chosen.offsets == [10_000]


# ---------------------------------------------------------------------------------------------------- keys


def test_a_key_is_in_flight_to_one_member_and_the_others_go_on() -> None:
    of = world(keyed=True)
    of.publish([(2, 1), (2, 2), (2, 1), (2, 0), (2, 3)])
    assert of.lease("a", 1) == [0]
    assert of.lease("b", 9) == [1, 3, 4]
    assert of.lease("a", 9) == [2]
    of.publish([(2, 1), (2, 2)])
    assert of.lease("b", 9) == [6]
    of.ack([0, 2])
    assert of.lease("b", 9) == [5]


def test_a_failure_holds_its_key_until_it_is_delivered_again_before_the_later_ones() -> None:
    of = world(keyed=True)
    of.publish([(2, 1), (2, 1), (2, 2), (2, 1)])
    assert of.lease("a", 2) == [0, 1]
    of.give_back(0, SECOND_US)
    assert of.lease("b", 9) == [2]
    of.now_us += SECOND_US
    assert of.lease("b", 9) == [0, 1, 3]


def test_a_dying_message_holds_its_key_until_it_is_buried() -> None:
    of = world(keyed=True)
    of.publish([(2, 1), (2, 1), (2, 2)])
    assert of.lease("a", 1) == [0]
    of.settle([0], dying=True)
    assert of.lease("b", 9) == [2]
    of.settle([0])
    assert of.lease("b", 9) == [1]


def test_the_oldest_unsettled_message_gives_the_key_its_lane() -> None:
    of = world(keyed=True, priority_mode="strict")
    of.publish([(4, 1), (0, 1), (2, 2), (3, 3)])
    assert of.lease("a", 3) == [2, 3, 0]
    of.publish([(3, 4)])
    assert of.ask("a", 1).offsets == [4]
    of.ack([0])
    assert of.lease("a", 9) == [1, 4]


@pytest.mark.parametrize(("to_dlq", "offsets"), [(False, [2, 3]), (True, [3])])
def test_a_lapsed_message_frees_its_key_unless_it_has_to_be_buried(to_dlq: bool, offsets: list[int]) -> None:
    of = world(keyed=True, expired_to_dlq=to_dlq)
    of.publish([(2, 1), (2, 1)], ttl_us=SECOND_US)
    of.publish([(2, 1), (2, 2)])
    of.now_us += SECOND_US
    chosen = of.ask("a", 9)
    assert chosen.offsets == offsets
    assert chosen.lapsed == ([0] if to_dlq else [0, 1])


def test_a_stuck_key_with_a_long_tail_does_not_stop_the_others() -> None:
    of = world(keyed=True, exact=False)
    of.publish([(2, 1)] * (key_queues.WINDOW_ROWS + 10))
    tail = len(of.rows)
    of.publish([(2, 2), (2, 3)])
    assert of.lease("a", 1) == [0]
    of.give_back(0, 60 * SECOND_US)
    assert of.lease("b", 9) == [tail, tail + 1]
    of.now_us += 60 * SECOND_US
    want = Want("b", 5_000, 1 << 30, len(of.rows), of.now_us, of.now_us, keyed=True)
    seen: list[int] = []
    while offsets := of.pool.select(want, of, of, of).offsets:
        for offset in offsets:
            of.rows[offset].state, of.rows[offset].member = LEASED, "b"
        of.pool.leased("b", flat(offsets), [])
        seen += offsets
    assert seen == list(range(tail))


def test_the_next_of_a_key_is_offered_when_an_operator_settles_the_one_before() -> None:
    of = world(keyed=True)
    of.publish([(2, 1), (2, 1), (2, 1)])
    assert of.lease("a", 1) == [0]
    of.settle([1])
    assert of.lease("a", 9) == [2]


def test_a_retry_beyond_the_window_waits_for_what_is_before_it_in_its_key() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_queues, "WINDOW_ROWS", 1)
        of = world(keyed=True, exact=False)
        of.publish([(2, 2), (2, 1), (2, 1)])
        of.settle([2])
        of.give_back(2, 0)
        assert of.lease("a", 9) == [0]
        assert of.lease("a", 9) == [1, 2]


def test_a_message_that_is_not_loaded_may_share_the_lane_of_its_key() -> None:
    of = world(keyed=True, priority_mode="strict")
    of.publish([(2, 1), (3, 2)])
    of.publish([(4, 1)])
    of.here = {0}
    chosen = of.ask("a", 3)
    assert (chosen.offsets, chosen.missing) == ([0], 2)
    of.here = {0, 1}
    assert of.lease("a", 3) == [0, 2, 1]


def test_what_starves_is_asked_for_when_its_frame_is_not_at_hand() -> None:
    of = world(priority_mode="strict")
    of.publish([(4, 0)])
    assert of.ask("a", 1).offsets == [0]
    of.now_us += 30 * SECOND_US
    of.publish([(0, 0)])
    of.here = {1}
    chosen = of.ask("a", 2)
    assert (chosen.offsets, chosen.missing) == ([], 0)
