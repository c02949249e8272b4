"""The pool against brute force: lanes, keys, retries, TTL, frames that are not at hand, restarts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core import key_queues
from tailrace.core.policy import GroupPolicy
from tests.core.pool_model import BACK, DYING, FRESH, LEASED, SECOND_US, SETTLED, World

SHARED = {"assignment": "shared", "ordering": "key"}
MEMBERS = ("a", "b", "c")


def world(keyed: bool = False, exact: bool = True, **options: Any) -> World:
    return World(
        GroupPolicy(**({**SHARED, **options} if keyed else {"ordering": "none", **options})), keyed, exact
    )


# --------------------------------------------------------------------------------------------- any mixture

rows = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=8)
steps = st.one_of(
    st.tuples(st.just("publish"), rows, st.sampled_from([0, 0, 0, 40 * SECOND_US])),
    st.tuples(st.just("lease"), st.sampled_from(MEMBERS), st.integers(1, 12)),
    st.tuples(st.just("ack"), st.integers(0, 99), st.integers(1, 9)),
    st.tuples(st.just("nack"), st.integers(0, 99), st.sampled_from([0, 5 * SECOND_US, 60 * SECOND_US])),
    st.tuples(st.just("die"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("bury"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("settle"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("reopen"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("pass"), st.sampled_from([1, 10, 35]), st.just(0)),
    st.tuples(st.just("evict"), st.integers(0, 99), st.just(0)),
    st.tuples(st.just("forget"), st.just(0), st.just(0)),
)


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
    @given(modes, st.lists(steps, max_size=40))
    def check(options: dict[str, Any], played: list[tuple[str, Any, Any]]) -> None:
        of = world(keyed, **options)
        for step in played:
            play(of, step)
        drain(of)

    check()


@given(st.lists(steps, max_size=40), st.integers(1, 9), st.integers(1, 4))
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
