"""Hostile bodies never crash, hang or bloat the process: the corpus runs in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GROWTH_KIB_MAX = 200 * 1024


def run(seed: int, cases: int, seconds: float) -> None:
    program = [sys.executable, "-m", "tests.format.hostile", str(seed), str(cases)]
    path = f"{ROOT / 'src'}:{ROOT}"
    try:
        done = subprocess.run(
            program, cwd=ROOT, env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        pytest.fail(f"hangs at {output.splitlines()[-1:]}")
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"exit {done.returncode} after {last}\n{done.stderr}"
    words = last[0].split()
    assert words[0] == "done"
    assert int(words[1]) > cases // 50, "hardly anything was taken: the mutations are too coarse to test much"
    assert int(words[3]) < GROWTH_KIB_MAX, f"memory grew: {last}"


@pytest.mark.parametrize("seed", [1, 2])
def test_hostile_bodies(seed: int) -> None:
    run(seed, 3000, 60)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 15))
def test_many_hostile_bodies(seed: int) -> None:
    run(seed, 40_000, 110)
