"""`python -m bench SUITE`: measure, print the table, keep the figures, and fail when a bar is missed.

Exit status: 0 all bars met, 1 a bar missed or a case failed, 2 this machine or the command line is unfit.
"""

from __future__ import annotations

import argparse
import signal
import sys

from rich.console import Console

from bench import delivery, foundation, results, security, spark
from bench.harness import RUNS, Plan, execute
from bench.machine import Unfit

SUITES = {suite.name: suite for suite in (foundation.SUITE, delivery.SUITE, spark.SUITE, security.SUITE)}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("suite", choices=sorted(SUITES))
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only the case of this figure"
    )
    parser.add_argument("--runs", type=int, default=RUNS, help=f"repetitions of each case (default {RUNS})")
    parser.add_argument("--seconds", type=float, help="length of each case; counts of messages shrink alike")
    parser.add_argument(
        "--write", action="store_true", help="put figures of a partial run among the kept ones"
    )
    parser.add_argument(
        "--unprobed", action="store_true", help="do not measure disk, memory and bare server: for comparisons"
    )
    given = parser.parse_args()
    if given.runs < 1 or (given.seconds is not None and given.seconds <= 0):
        parser.error("--runs and --seconds are above 0")
    return given


def main() -> int:
    """Run a suite."""
    given = arguments()
    # Leave as after Ctrl-C: through the blocks that end the children and remove the data.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    suite = SUITES[given.suite]
    plan = Plan(tuple(given.only), given.runs, given.seconds, not given.unprobed)
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        report = execute(suite, plan, console)
    except Unfit as error:
        console.print(f"not measured: {error}", markup=False)
        return 2
    results.show(console, suite.name + (" (partial)" if plan.partial else ""), report.figures)
    whole = not plan.partial and not report.failures
    kept = (whole and plan.probed) or given.write
    path = results.FOLDER / (f"{suite.name}.json" if kept else f"{suite.name}.partial.json")
    results.save(path, report.figures, merge=not whole and kept)
    console.print(f"written to bench/results/{path.name}", highlight=False)
    problems = [f"not measured: {line}" for line in report.failures]
    problems += [f"bar missed: {line}" for line in results.missed(report.figures)]
    for line in problems:
        console.print(line, markup=False, highlight=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
