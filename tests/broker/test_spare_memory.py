"""What Arrow's pool does not need any more goes back to the system, seldom and only when it is much."""

from tailrace.broker.spare_memory import LOOK_S, SPARE_BYTES, SparePages


def released(readings: list[int], step_s: float = 1.0) -> list[float]:
    """At which seconds pages were given back."""
    now_s = 0.0
    at: list[float] = []
    spare = SparePages(lambda: at.append(now_s), now_s)
    for used in readings:
        now_s += step_s
        spare.note(used, now_s)
    return at


def test_what_a_moment_needed_goes_back() -> None:
    assert released([10, 3 * SPARE_BYTES, *[10] * 60]) == [LOOK_S]


def test_a_little_stays() -> None:
    assert released([SPARE_BYTES, *[10] * 60]) == []


def test_what_is_needed_all_the_time_stays() -> None:
    assert released([10 * SPARE_BYTES] * 60) == []


def test_a_need_that_goes_up_and_down_is_not_followed_more_than_once_in_ten_seconds() -> None:
    assert len(released([10, 10 * SPARE_BYTES] * 300, step_s=0.1)) <= 60 / LOOK_S
