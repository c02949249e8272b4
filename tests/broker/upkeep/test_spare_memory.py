"""What the allocators do not need any more goes back to the system: soon when it is much, else seldom."""

import platform
import subprocess
import sys

import pytest

from tailrace.broker.upkeep.spare_memory import HOLES_S, LOOK_S, SPARE_BYTES, SparePages


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
    assert released([10, 3 * SPARE_BYTES, *[10] * 50]) == [LOOK_S]


def test_a_little_stays_for_a_minute() -> None:
    assert released([SPARE_BYTES, *[10] * 130]) == [HOLES_S, 2 * HOLES_S]


def test_what_is_needed_all_the_time_has_its_holes_given_back_every_minute() -> None:
    assert released([10 * SPARE_BYTES] * 130) == [HOLES_S, 2 * HOLES_S]


def test_a_need_that_goes_up_and_down_is_not_followed_more_than_once_in_ten_seconds() -> None:
    assert len(released([10, 10 * SPARE_BYTES] * 300, step_s=0.1)) <= 60 / LOOK_S


HOLES = """
from pathlib import Path
from tailrace.broker.upkeep.spare_memory import heap_trimmer

def anon_kb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

kept = [bytes([number % 256]) * 4096 for number in range(12_000)]
kept = kept[::100]
before_kb = anon_kb()
heap_trimmer()()
print(before_kb - anon_kb())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked to")
def test_pages_between_what_is_kept_go_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 20_000
