"""Figures: medians over runs, bars, the table and the file."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from bench.foundation import BARS, SUITE
from bench.harness import Plan
from bench.machine import Unfit
from bench.results import Bar, Figure, Sample, figures, load, missed, save, show


def samples(name: str, values: list[float], **fields: object) -> list[Sample]:
    return [Sample(name=name, value=value, unit="msg/s", **fields) for value in values]  # type: ignore[arg-type]


def figure(name: str, value: float) -> Figure:
    return Figure(name=name, value=value, unit="s", limit_share=None, conditions={})


def test_median_and_share_of_the_limit() -> None:
    runs = [
        Sample(name="a", value=value, limit=limit, unit="msg/s")
        for value, limit in ((10.0, 100.0), (30.0, 60.0), (20.0, 50.0))
    ]
    (found,) = figures(runs, [], {"cores": 2})
    assert (found.value, found.limit_share, found.met) == (20.0, 0.4, None)
    assert found.conditions == {"cores": 2, "runs": [10.0, 30.0, 20.0], "limit": 60.0}


@pytest.mark.parametrize(
    ("bar", "value", "limit", "sync_ms", "met"),
    [
        (Bar(name="a", sense=">=", value=100), 100, None, 0, True),
        (Bar(name="a", sense=">=", value=100), 99, None, 0, False),
        (Bar(name="a", sense="<=", value=100), 101, None, 0, False),
        (Bar(name="a", sense=">=", value=100, limit_share=0.5), 150, 300, 0, True),
        (Bar(name="a", sense=">=", value=100, limit_share=0.5), 150, 301, 0, False),
        (Bar(name="a", sense=">=", value=100, limit_share=0.5), 150, None, 0, False),
        (Bar(name="a", sense="<=", value=5, syncs=3), 8, None, 1, True),
        (Bar(name="a", sense="<=", value=5, syncs=3), 8.1, None, 1, False),
    ],
)
def test_bars(bar: Bar, value: float, limit: float | None, sync_ms: float, met: bool) -> None:
    found = figures(samples("a", [value], limit=limit, sync_ms=sync_ms), [bar], {})
    assert found[0].met is met
    assert bool(missed(found)) is not met


def test_table_names_the_bar_and_the_miss() -> None:
    out = io.StringIO()
    found = figures(samples("slow", [1234.0]), [Bar(name="slow", sense=">=", value=2000)], {})
    show(Console(file=out, width=140), "title", found)
    for text in ("slow", "1,234", ">= 2,000", "NO"):
        assert text in out.getvalue()


def test_partial_figures_replace_only_their_own(tmp_path: Path) -> None:
    path = tmp_path / "results" / "suite.json"
    save(path, [figure("a", 1), figure("b", 1)], merge=False)
    save(path, [figure("a", 2)], merge=True)
    assert {found.name: found.value for found in load(path)} == {"a": 2, "b": 1}
    save(path, [figure("c", 3)], merge=False)
    assert load(path) == [figure("c", 3)]


def test_every_figure_of_the_suite_has_one_bar() -> None:
    measured = [name for case in SUITE.cases for name in case.figures]
    assert sorted(measured) == sorted(bar.name for bar in BARS)
    assert len(set(measured)) == len(measured)


def test_a_plan_knows_what_is_partial() -> None:
    assert not Plan().partial
    assert Plan(runs=1).partial
    assert Plan(seconds=1.0).partial
    only = Plan(only=("e2e_p99_ms_20k",))
    assert only.partial
    assert [case.figures[0] for case in only.chosen(SUITE)] == ["publish_p99_ms_20k"]
    with pytest.raises(Unfit, match="no figure is called nothing"):
        Plan(only=("nothing",)).chosen(SUITE)
