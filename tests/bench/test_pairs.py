"""Interleaved pairs: ratios that know which way is better, the verdict, and who is left out."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench import pairs
from bench.delivery import SUITE
from bench.harness import Case
from bench.machine import Unfit
from bench.pairs import (
    PAIRS,
    Compared,
    checkout,
    chosen,
    compare,
    execute,
    figures_of,
    is_higher_better,
    split,
)
from bench.processes import ROOT
from bench.results import Figure


def compared(base: list[float], here: list[float], *, higher: bool) -> Compared:
    return Compared("name", "unit", higher, tuple(base), tuple(here))


def figure(name: str, value: float, unit: str = "msg/s") -> Figure:
    return Figure(name=name, value=value, unit=unit, limit_share=None, conditions={})


@pytest.mark.parametrize(
    ("here", "worse"),
    [
        ([94, 94, 94, 94, 120], True),  # the median is below 0.95, four of five are below 1
        ([94, 94, 94, 101, 120], False),  # only three are below 1
        ([96, 96, 96, 96, 96], False),  # all are below 1, but not by much
        ([80, 80, 96, 96, 96], False),
        ([95, 95, 95, 95, 95], False),  # 0.95 is just good enough
        ([94.9, 94.9, 94.9, 94.9, 94.9], True),
        ([100, 100, 100, 100, 100], False),
    ],
)
def test_worse_when_the_median_is_low_and_nearly_all_agree(here: list[float], worse: bool) -> None:
    assert compared([100] * PAIRS, here, higher=True).worse() is worse


def test_a_latency_that_grows_is_worse_and_a_rate_that_grows_is_not() -> None:
    assert compared([10] * 5, [12] * 5, higher=False).worse()
    assert not compared([10] * 5, [12] * 5, higher=True).worse()
    assert compared([10] * 5, [8] * 5, higher=True).worse()
    assert not compared([10] * 5, [8] * 5, higher=False).worse()


def test_ratios_are_of_pairs_not_of_medians() -> None:
    """A machine that becomes slower half-way slows both sides of a pair."""
    slower = compared([100, 100, 50, 50, 50], [99, 99, 50.5, 50.5, 50.5], higher=True)
    assert slower.ratios() == pytest.approx([0.99, 0.99, 1.01, 1.01, 1.01])
    assert not slower.worse()


def test_values_around_zero_have_no_ratio() -> None:
    slope = compared([-1, 2, 3, 1, 1], [5, 5, 5, 5, 5], higher=False)
    assert slope.ratios() is None
    assert not slope.worse()


def test_the_bar_says_which_way_is_better_and_else_the_unit() -> None:
    assert is_higher_better(SUITE, "queue_e2e_100b", "msg/s")
    assert not is_higher_better(SUITE, "rebalance_s", "s")
    assert is_higher_better(SUITE, "without a bar", "msg/s")
    assert not is_higher_better(SUITE, "without a bar", "s/GB")
    assert not is_higher_better(SUITE, "without a bar", "bytes")


def test_figures_that_one_side_lacks_in_a_round_are_not_compared() -> None:
    rounds = [([figure("a", 1), figure("b", 1)], [figure("a", 2)]), ([figure("a", 3)], [figure("a", 4)])]
    (found,) = compare(SUITE, rounds)
    assert (found.name, found.base, found.here) == ("a", (1, 3), (2, 4))


def case_of(*names: str) -> Case:
    return Case(names, 1.0, lambda run: [])


def test_cases_that_the_base_lacks_are_named_and_left_out() -> None:
    old, new = case_of("old", "old_share"), case_of("new", "newer")
    assert split([old, new], {"old", "gone"}) == ([old], ["new", "newer"])


def test_names_choose_cases_of_their_own_suite_only() -> None:
    assert chosen(SUITE, []) == list(SUITE.cases)
    assert [case.figures for case in chosen(SUITE, ["urgent_wait_ms"])] == [("urgent_wait_ms",)]
    assert chosen(SUITE, ["startup_s"]) == []


def test_sides_take_turns_and_all_cases_come_before_the_next_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def fake(suite: object, case: Case, tree: Path, seconds: object) -> list[Figure]:
        asked.append((case.figures[0], "here" if tree == ROOT else "base"))
        return [figure(name, 1.0) for name in case.figures]

    monkeypatch.setattr(pairs, "measure", fake)
    report = execute(SUITE, [case_of("a"), case_of("b")], Path("/base"), None, Console(file=io.StringIO()))
    first, second = [("a", "base"), ("a", "here"), ("b", "base"), ("b", "here")], asked[4:8]
    assert asked[:4] == first
    assert second == [("a", "here"), ("a", "base"), ("b", "here"), ("b", "base")]
    assert len(asked) == 4 * PAIRS
    assert [(one.name, one.worse()) for one in report.compared] == [("a", False), ("b", False)]


def test_a_case_that_fails_is_reported_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(suite: object, case: Case, tree: Path, seconds: object) -> list[Figure] | str:
        return "it broke" if case.figures == ("a",) else [figure("b", 1.0)]

    monkeypatch.setattr(pairs, "measure", fake)
    report = execute(SUITE, [case_of("a"), case_of("b")], Path("/base"), None, Console(file=io.StringIO()))
    assert report.failures == ["a (base): it broke"]
    assert [one.name for one in report.compared] == ["b"]


def test_an_unknown_commit_is_refused() -> None:
    with pytest.raises(Unfit, match="no-such-commit"), checkout("no-such-commit"):
        pass


def test_the_base_tells_which_figures_it_has() -> None:
    assert "queue_e2e_100b" in figures_of(ROOT)


def test_each_side_is_measured_with_its_own_package(tmp_path: Path) -> None:
    (tmp_path / "src" / "tailrace").mkdir(parents=True)
    (tmp_path / "src" / "tailrace" / "__init__.py").write_text("raise SystemExit('the package of the base')")
    said = pairs.measure(SUITE, case_of("urgent_wait_ms"), tmp_path, None)
    assert isinstance(said, str)
    assert "the package of the base" in said
