"""The token bucket: in any window its rate and a burst at most, exact in the long run, and nobody starves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.access.token_bucket import SECOND_US, WAIT_US_MAX, TokenBucket

RATE = st.integers(1, 2_000)
STEP = st.tuples(st.integers(0, 3 * SECOND_US), st.integers(1, 4_000))


def test_the_example_of_the_docstring() -> None:
    bucket = TokenBucket(100, 0)
    assert bucket.take(60, 0) == 0
    assert bucket.take(60, 0) == 200_000
    assert bucket.take(60, 200_000) == 0
    assert bucket.take(250, 200_000) == SECOND_US
    assert bucket.take(250, 1_200_000) == 0
    assert bucket.take(1, 1_200_000) == 1_510_000
    assert bucket.take(1, 2_710_000) == 0


@given(RATE, st.lists(STEP, max_size=60))
def test_no_window_sees_more_than_the_rate_and_a_burst(rate: int, steps: list[tuple[int, int]]) -> None:
    bucket, now_us = TokenBucket(rate, 0), 0
    taken: list[tuple[int, int]] = []
    for pause_us, n in steps:
        now_us += pause_us
        if bucket.take(n, now_us) == 0:
            taken.append((now_us, n))
    for first, (begin_us, _) in enumerate(taken):
        total = 0
        for end_us, n in taken[first:]:
            total += n
            most = max(rate, n)
            assert total * SECOND_US <= rate * (end_us - begin_us) + most * SECOND_US


@given(RATE, st.lists(STEP, max_size=20), st.integers(1, 4_000))
def test_who_waits_as_long_as_it_was_told_gets_it(rate: int, steps: list[tuple[int, int]], n: int) -> None:
    bucket, now_us = TokenBucket(rate, 0), 0
    for pause_us, many in steps:
        now_us += pause_us
        bucket.charge(many, now_us)
    wait_us = bucket.take(n, now_us)
    if 0 < wait_us < WAIT_US_MAX:
        assert bucket.take(n, now_us + wait_us - 1) > 0
        assert bucket.take(n, now_us + wait_us) == 0


@given(RATE, st.integers(1, 4_000), st.integers(1, 20))
def test_a_single_sender_gets_its_rate(rate: int, n: int, count: int) -> None:
    bucket, now_us = TokenBucket(rate, 0), 0
    for _ in range(count):
        while wait_us := bucket.take(n, now_us):
            now_us += wait_us
    owed = count * n - rate  # After the burst, all of it takes its time, but for what is owed in the end.
    assert now_us * rate >= (owed - max(n - rate, 0)) * SECOND_US
    assert now_us * rate <= max(owed, 0) * SECOND_US + count * rate + min(n, rate) * SECOND_US


@given(st.integers(10, 500), st.integers(1, 4), st.integers(2, 1_000), st.integers(20_000, 50_000))
def test_neither_large_nor_small_amounts_starve(rate: int, small: int, times: int, pause_us: int) -> None:
    """Small amounts are asked for all the time, at least as many as there are; a large one when told."""
    large = small * times
    bucket = TokenBucket(rate, 0)
    small_due_us = large_due_us = large_taken = small_taken = 0
    now_us = 0
    pause_us = min(pause_us, small * SECOND_US // rate or 1)
    for _ in range(2_000):
        now_us = min(small_due_us, large_due_us)
        if now_us == large_due_us:
            wait_us = bucket.take(large, now_us)
            large_taken += not wait_us
            large_due_us = now_us + (wait_us or pause_us)
        else:
            wait_us = bucket.take(small, now_us)
            small_taken += not wait_us
            small_due_us = now_us + pause_us  # It does not wait as long as it is told.
    rounds = now_us // (max(6 * SECOND_US, 2 * large * SECOND_US // rate + 6 * SECOND_US))
    assert large_taken >= rounds
    assert small_taken >= rounds


@given(RATE, st.integers(1, 100_000))
def test_what_is_charged_later_is_owed(rate: int, n: int) -> None:
    bucket = TokenBucket(rate, 0)
    bucket.charge(n, 0)
    wait_us = bucket.take(1, 0)
    assert wait_us == min(max(-(-(n + 1 - rate) * SECOND_US // rate), 0), WAIT_US_MAX)
    assert bucket.owed_us(0) == min(max(-(-(n - rate) * SECOND_US // rate), 0), WAIT_US_MAX)
    assert not bucket.full(0)
    assert bucket.full(-(-(n + 1) * SECOND_US // rate))


def test_a_bucket_of_rate_zero_never_gives() -> None:
    bucket = TokenBucket(0, 0)
    assert bucket.take(1, 0) == WAIT_US_MAX
    assert bucket.take(1, 10**15) == WAIT_US_MAX


def test_another_rate_keeps_what_is_owed() -> None:
    bucket = TokenBucket(10, 0)
    bucket.charge(30, 0)
    bucket.change(20, 0)
    assert bucket.take(1, 0) == 1_050_000
    bucket.change(5, 10 * SECOND_US)
    assert bucket.take(5, 10 * SECOND_US) == 0
    assert bucket.take(1, 10 * SECOND_US) == 200_000


def test_time_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(10, 5 * SECOND_US)
    assert bucket.take(10, 5 * SECOND_US) == 0
    assert bucket.take(1, SECOND_US) == 100_000
