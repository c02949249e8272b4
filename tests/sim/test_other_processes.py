"""A seed is the same run in every process: nothing goes by the order of a set, which is another in each.

Covers all of `sim/worlds` and, of the broker, what has several things to do at once.
"""

import os
import subprocess
import sys

RUNS = """
import logging
from tailrace.sim.__main__ import WORLDS
logging.disable(logging.CRITICAL)
for name, world in WORLDS.items():
    for seed in (0, 1, 2):
        print(name, seed, sorted(world.run(seed).items()))
"""


def test_same_seed_same_run_whatever_strings_hash_to() -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", RUNS],
            env={**os.environ, "PYTHONHASHSEED": number},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in ("0", "1")
    ]
    first, second = (run.communicate()[0].splitlines() for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert first
    assert first == second
