"""`python -m bench.soak --minutes 60`: the memory of a broker under a steady load, and its slope.

The load ends by itself, and the broker with it. Exit status: 0 when the slope stays below the bar of the
suite `delivery`, 1 when it does not, 2 when this machine or the command line is unfit.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time

from bench.cases.steady_memory import LEFT_OUT_SHARE, RATE, STRETCH_S, Reading, mb_per_hour, said, soak
from bench.delivery import BARS
from bench.harness import SCRATCH, Run
from bench.machine import Unfit
from bench.processes import BenchmarkFailed
from bench.roles.churn import ChurnJob

FIGURE = "soak_mb_per_hour"
WARM_S_MAX = 600.0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the load lasts (default 60)")
    parser.add_argument("--rate", type=int, default=RATE, help=f"messages a second (default {RATE})")
    given = parser.parse_args()
    if given.minutes < 5 or given.rate < 1:
        parser.error("--minutes is 5 or more, --rate above 0")
    return given


def main() -> int:
    """Soak."""
    given = arguments()
    # Leave as after Ctrl-C: through the blocks that end the children and remove the data.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = SCRATCH / f"soak-{time.time_ns()}"
    readings: list[Reading] = []

    def tell(reading: Reading) -> None:
        if not readings or reading[0] // STRETCH_S != readings[-1][0] // STRETCH_S:
            print(f"{reading[0] / 60:6.1f} min {reading[1]:8.1f} MB", flush=True)
        readings.append(reading)

    try:
        SCRATCH.mkdir(exist_ok=True)
        folder.mkdir()
        run = Run(folder, seconds=given.minutes * 60, scale=1.0, limits={})
        with run.broker() as broker:
            job = ChurnJob(url=broker.url, rate=given.rate, seconds=run.seconds)
            done, handed_out = soak(run, broker, job, tell)
    except (Unfit, BenchmarkFailed) as error:
        print(f"not measured: {error}")
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    left_out_s = min(run.seconds * LEFT_OUT_SHARE, WARM_S_MAX)
    for name, value in said(job, done, handed_out, readings, left_out_s).items():
        print(f"{name:24} {value}")
    slope = mb_per_hour(readings, left_out_s)
    (bar,) = (bar for bar in BARS if bar.name == FIGURE)
    print(f"{FIGURE:24} {slope:.1f} ({bar.text(0.0)}), without the first {left_out_s / 60:.0f} minutes")
    return 0 if bar.met(slope, None, 0.0) else 1


if __name__ == "__main__":
    sys.exit(main())
