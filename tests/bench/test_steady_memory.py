"""The slope of memory over time: what counts, what is left out, and what the suite asks for."""

import random

import pytest

from bench.cases.steady_memory import CASE, SUITE_S, mb_per_hour, said
from bench.delivery import BARS, SUITE
from bench.processes import BenchmarkFailed
from bench.roles.churn import Churned, ChurnJob


def test_the_slope_is_that_of_the_lowest_readings_of_each_minute() -> None:
    draw = random.Random(1)
    readings = [(float(at), 100 + at / 600 + 20 * draw.random()) for at in range(0, 3600, 5)]
    assert mb_per_hour(readings, 600) == pytest.approx(6, abs=3)


def test_a_flat_memory_has_no_slope_however_it_began() -> None:
    readings = [(float(at), 50 + at if at < 300 else 350.0) for at in range(0, 900, 5)]
    assert mb_per_hour(readings, 300) == pytest.approx(0, abs=1e-6)


def test_a_leak_is_not_hidden_by_what_goes_up_and_down() -> None:
    draw = random.Random(2)
    readings = [(float(at), 100 + 30 * at / 3600 + 10 * draw.random()) for at in range(0, 900, 5)]
    assert mb_per_hour(readings, 300) > 15


def test_two_minutes_are_needed() -> None:
    with pytest.raises(BenchmarkFailed, match="too few"):
        mb_per_hour([(0.0, 1.0), (5.0, 1.0)], 0)


def test_what_is_said_names_the_true_rate() -> None:
    job = ChurnJob(url="tailrace://127.0.0.1:1", rate=10_000, seconds=100)
    done = Churned(sent=900_000, delayed=1, nacked=2, lost=3, seconds=100)
    told = said(job, done, 990_000, [(0.0, 50.0), (60.0, 90.0), (100.0, 80.0)], 33)
    assert (told["rate_msg_s"], told["wanted_msg_s"]) == (9_000, 10_000)
    assert told["handed_out_each"] == 1.1
    assert (told["first_mb"], told["last_mb"], told["highest_mb"]) == (50.0, 80.0, 90.0)


def test_the_suite_measures_both_and_soaks_once() -> None:
    known = {name for case in SUITE.cases for name in case.figures}
    bars = {bar.name: (bar.sense, bar.value) for bar in BARS}
    assert {"restart_after_kills_s", "soak_mb_per_hour"} <= known
    assert bars["restart_after_kills_s"] == ("<=", 1)
    assert bars["soak_mb_per_hour"] == ("<=", 10)
    assert (CASE.seconds, CASE.runs_max) == (SUITE_S, 1) == (900.0, 1)
