"""`python -m bench.pairs BASE`: this tree against an earlier commit, case by case, in five interleaved pairs.

The same cases drive both: only the package is another one, taken from a checkout of BASE by `PYTHONPATH`. All
cases are measured once on each side before any of them again, and the two sides take turns in going first, so
that a machine that changes its pace hurts both alike. A figure has become worse when the median of its five
ratios is below 0.95 and at least four of them are below 1. Cases that BASE does not have are named and left
out.

Exit status: 0 nothing became worse, 1 something did or could not be measured, 2 the command line or this
machine is unfit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

from bench.__main__ import SUITES
from bench.harness import Case, Plan, Suite
from bench.machine import Unfit
from bench.processes import ROOT
from bench.results import FOLDER, Figure, load, readable

PAIRS = 5
MEDIAN_MIN = 0.95
WORSE_MIN = 4
CHECKOUT = ROOT / "bench" / ".scratch-base"
UNFIT = 2

Side = Literal["base", "here"]
LIST_FIGURES = """
import json
from bench.__main__ import SUITES
print(json.dumps([name for suite in SUITES.values() for case in suite.cases for name in case.figures]))
"""


class Compared(msgspec.Struct, frozen=True):
    """One figure on both sides, a pair of values for each round; `higher` says what is better."""

    name: str
    unit: str
    higher: bool
    base: tuple[float, ...]
    here: tuple[float, ...]

    def ratios(self) -> list[float] | None:
        """For each pair how good it is here over there: above 1 is better, whatever the figure counts. None
        where a value is not above 0, so that a ratio says nothing."""
        if min(*self.base, *self.here) <= 0:
            return None
        pairs = zip(self.base, self.here, strict=True)
        return [here / base if self.higher else base / here for base, here in pairs]

    def worse(self) -> bool:
        """Whether it became worse, beyond what chance explains."""
        ratios = self.ratios()
        if ratios is None:
            return False
        return statistics.median(ratios) < MEDIAN_MIN and sum(ratio < 1 for ratio in ratios) >= WORSE_MIN


def is_higher_better(suite: Suite, name: str, unit: str) -> bool:
    """By the bar of the figure; without one, what is counted by the second is a rate."""
    for bar in suite.bars:
        if bar.name == name:
            return bar.sense == ">="
    return unit.endswith("/s")


def compare(suite: Suite, rounds: Sequence[tuple[list[Figure], list[Figure]]]) -> list[Compared]:
    """Figures of one case from every round, (base, here); only what both sides have in each of them."""
    names = [figure.name for figure in rounds[0][0]]
    found = []
    for name in names:
        base = [figure for ours, _ in rounds for figure in ours if figure.name == name]
        here = [figure for _, ours in rounds for figure in ours if figure.name == name]
        if len(base) == len(here) == len(rounds):
            higher = is_higher_better(suite, name, here[0].unit)
            values = tuple(figure.value for figure in base), tuple(figure.value for figure in here)
            found.append(Compared(name, here[0].unit, higher, *values))
    return found


def split(cases: Sequence[Case], known: set[str]) -> tuple[list[Case], list[str]]:
    """The cases that the base has, too, and the figures of those that it lacks."""
    shared = [case for case in cases if set(case.figures) & known]
    return shared, [name for case in cases if case not in shared for name in case.figures]


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The package and the benchmarks of a commit in a folder of their own, gone afterwards."""
    packed = subprocess.run(
        ["git", "archive", "--format=tar", commit, "src", "bench"], cwd=ROOT, capture_output=True, check=False
    )
    if packed.returncode:
        raise Unfit(f"{commit!r} cannot be checked out: {packed.stderr.decode(errors='replace').strip()}")
    shutil.rmtree(CHECKOUT, ignore_errors=True)
    try:
        CHECKOUT.mkdir()
        subprocess.run(["tar", "-x", "-C", str(CHECKOUT)], input=packed.stdout, check=True)
        yield CHECKOUT
    finally:
        shutil.rmtree(CHECKOUT, ignore_errors=True)


def figures_of(tree: Path) -> set[str]:
    """The figures that the benchmarks of a tree know."""
    path = f"{tree}{os.pathsep}{tree / 'src'}"
    told = subprocess.run(
        [sys.executable, "-c", LIST_FIGURES],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    if told.returncode:
        words = told.stderr.decode(errors="replace").strip()[-500:]
        raise Unfit(f"the benchmarks of the base cannot be listed: {words}")
    return set(msgspec.json.decode(told.stdout, type=list[str]))


def measure(suite: Suite, case: Case, tree: Path, seconds: float | None) -> list[Figure] | str:
    """One case once, with the package of a tree; a text says why it could not be measured."""
    path = FOLDER / f"{suite.name}.partial.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench", suite.name, "--runs", "1", "--unprobed"]
    command += ["--only", case.figures[0]]
    if seconds is not None:
        command += ["--seconds", str(seconds)]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == UNFIT or not path.exists():
        return (done.stdout + done.stderr).strip()[-1000:]
    try:
        found = [figure for figure in load(path) if figure.name in case.figures]
    finally:
        path.unlink()
    return found or done.stdout.strip()[-1000:]


class Report(msgspec.Struct, frozen=True):
    """What was compared, and which cases could not be measured."""

    compared: list[Compared]
    failures: list[str]


def execute(
    suite: Suite, cases: Sequence[Case], base: Path, seconds: float | None, console: Console
) -> Report:
    """All pairs of all cases."""
    rounds: dict[Case, list[tuple[list[Figure], list[Figure]]]] = {case: [] for case in cases}
    failures: dict[Case, str] = {}
    trees: dict[Side, Path] = {"base": base, "here": ROOT}
    for number in range(PAIRS):
        order: tuple[Side, Side] = ("base", "here") if number % 2 == 0 else ("here", "base")
        for case in cases:
            found: dict[Side, list[Figure]] = {}
            for side in order:
                if case in failures:
                    break
                measured = measure(suite, case, trees[side], seconds)
                if isinstance(measured, str):
                    failures[case] = f"{case.figures[0]} ({side}): {measured}"
                else:
                    found[side] = measured
                    values = ", ".join(f"{figure.name} {readable(figure.value)}" for figure in measured)
                    console.print(f"pair {number + 1}/{PAIRS} {side}: {values}", highlight=False)
            if len(found) == len(trees):
                rounds[case].append((found["base"], found["here"]))
    compared = [one for case in cases if case not in failures for one in compare(suite, rounds[case])]
    return Report(compared, list(failures.values()))


def show(console: Console, title: str, compared: Sequence[Compared]) -> None:
    """Print the table."""
    table = Table(title=title, title_justify="left")
    for heading in ("figure", "unit", "base", "here", "ratios (above 1 is better)", "median", "worse"):
        table.add_column(heading)
    for one in compared:
        ratios = one.ratios()
        table.add_row(
            one.name,
            one.unit,
            readable(statistics.median(one.base)),
            readable(statistics.median(one.here)),
            "not comparable" if ratios is None else " ".join(f"{ratio:.3f}" for ratio in ratios),
            "" if ratios is None else f"{statistics.median(ratios):.3f}",
            "[red]YES[/]" if one.worse() else "no",
        )
    console.print(table)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.pairs", description=__doc__)
    parser.add_argument("base", metavar="BASE", help="the commit to compare with")
    parser.add_argument("--suite", choices=sorted(SUITES), action="append", help="only this suite")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this figure's case")
    parser.add_argument("--seconds", type=float, help="length of each case; counts of messages shrink alike")
    return parser.parse_args()


def chosen(suite: Suite, only: Sequence[str]) -> list[Case]:
    """The cases of a suite that answer the names asked for; a name may be of another suite."""
    own = {name for case in suite.cases for name in case.figures}
    mine = tuple(name for name in only if name in own)
    return Plan(mine).chosen(suite) if mine or not only else []


def run(given: argparse.Namespace, console: Console) -> int:
    """Compare the chosen suites."""
    suites = [SUITES[name] for name in given.suite or sorted(SUITES)]
    known = {name for suite in suites for case in suite.cases for name in case.figures}
    if unknown := [name for name in given.only if name not in known]:
        raise Unfit(f"no figure is called {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    problems: list[str] = []
    with checkout(given.base) as base:
        there = figures_of(base)
        for suite in suites:
            cases, lacking = split(chosen(suite, given.only), there)
            if lacking:
                console.print(f"left out, {given.base} lacks them: {', '.join(lacking)}", highlight=False)
            if not cases:
                continue
            report = execute(suite, cases, base, given.seconds, console)
            show(console, f"{suite.name}: here against {given.base}", report.compared)
            problems += [f"not measured: {line}" for line in report.failures]
            problems += [f"became worse: {one.name}" for one in report.compared if one.worse()]
    for line in problems:
        console.print(line, markup=False, highlight=False)
    return 1 if problems else 0


def main() -> int:
    """The command."""
    given = arguments()
    # Leave as after Ctrl-C: through the blocks that remove the checkout.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        return run(given, console)
    except Unfit as error:
        console.print(f"not measured: {error}", markup=False)
        return UNFIT


if __name__ == "__main__":
    sys.exit(main())
