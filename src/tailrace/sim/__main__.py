"""`python -m tailrace.sim`: run seeds through every world, say what was reached, stop at a failure."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from tailrace.sim.worlds import client_world, delivery_world, fairness_world, move_world, storage_world

STATES_CHECKED_FROM = 200
"""Fewer seeds than this need not reach every state."""


class World(NamedTuple):
    """A simulated world: `run(seed)` returns how often each state was reached and raises when a promise is
    broken."""

    run: Callable[[int], Counter[str]]
    states: frozenset[str]


WORLDS: dict[str, World] = {
    "client": World(client_world.run, client_world.STATES),
    "delivery": World(delivery_world.run, delivery_world.STATES),
    "fairness": World(fairness_world.run, fairness_world.STATES),
    "moves": World(move_world.run, move_world.STATES),
    "storage": World(storage_world.run, storage_world.STATES),
}


def run_world(name: str, seeds: range) -> bool:
    """Run the seeds of one world; prints, and returns whether all is well."""
    world, reached, began = WORLDS[name], Counter[str](), time.monotonic()
    for number, seed in enumerate(seeds, 1):
        try:
            reached += world.run(seed)
        except Exception as error:  # a crash of the code under test is a finding like any other
            print(f"{name}: seed {seed} FAILED: {type(error).__name__}: {error}")
            print(f"again with: python -m tailrace.sim --world {name} --first {seed} --seeds 1")
            raise_if_single(seeds, error)
            return False
        if number % 100 == 0:
            print(f"{name}: {number} of {len(seeds)} seeds, {time.monotonic() - began:.1f} s", flush=True)
    print(f"{name}: {len(seeds)} seeds hold, {time.monotonic() - began:.1f} s; reached:")
    for state, count in sorted(reached.items()):
        print(f"  {count:8d}  {state}")
    missing = sorted(world.states - set(reached))
    if missing and len(seeds) >= STATES_CHECKED_FROM:
        print(f"{name}: NEVER REACHED: {', '.join(missing)}")
        return False
    return True


def raise_if_single(seeds: range, error: Exception) -> None:
    """Who runs one seed wants the traceback."""
    if len(seeds) == 1:
        raise error


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tailrace.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--world", choices=sorted(WORLDS), action="append", help="only this world")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    if len(seeds) > 1:
        logging.disable(logging.CRITICAL)  # Simulated brokers fail by the hundred, and say so.
    names = options.world or sorted(WORLDS)
    if len(names) == 1:
        return 0 if run_world(names[0], seeds) else 1
    with ProcessPoolExecutor(min(len(names), os.cpu_count() or 1)) as pool:
        results = list(pool.map(run_world, names, [seeds] * len(names)))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
