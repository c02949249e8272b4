"""The clock of a partition: never back, never early, and back to the wall clock in the end."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.partition_clock import SLEW, PartitionClock

HOUR_US = 3_600_000_000
times = st.integers(0, 1 << 52)
spans = st.one_of(st.integers(0, 300), st.integers(0, 500 * HOUR_US))


@given(times, times, st.lists(spans, max_size=20))
def test_it_begins_at_the_last_append_and_goes_on_a_little_slower(
    append_us: int, now_us: int, steps: list[int]
) -> None:
    clock = PartitionClock(append_us, now_us)
    last_us = clock.time_us(now_us)
    assert last_us == max(append_us, now_us)
    for step in steps:
        now_us += step
        time_us = clock.time_us(now_us)
        assert step - step // SLEW - 1 <= time_us - last_us <= step
        assert time_us >= now_us
        last_us = time_us
    assert clock.time_us(now_us + SLEW * clock.lead_us) == now_us + SLEW * clock.lead_us


@given(times, times, spans)
def test_a_timer_fires_at_the_first_moment_that_is_not_too_early(
    append_us: int, now_us: int, ahead_us: int
) -> None:
    clock = PartitionClock(append_us, now_us)
    due_us = clock.time_us(now_us) + ahead_us
    steady_us = clock.steady_us(due_us)
    assert clock.time_us(steady_us) >= due_us
    assert steady_us <= now_us + ahead_us + ahead_us // (SLEW - 1) + 1
    if steady_us > now_us:
        assert clock.time_us(steady_us - 2) < due_us


def test_an_hour_is_taken_back_in_a_hundred_hours() -> None:
    clock = PartitionClock(HOUR_US, 0)
    assert clock.time_us(0) == HOUR_US
    assert clock.time_us(50 * HOUR_US) == int(50.5 * HOUR_US)
    assert clock.time_us(100 * HOUR_US) == clock.time_us(100 * HOUR_US) == 100 * HOUR_US
