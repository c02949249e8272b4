"""The frame of the tests of worlds: what seeds reach, and which one shows a bug that was planted."""

from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from tailrace.sim.virtual_time import Violation

Plant = Callable[[pytest.MonkeyPatch], None]
Run = Callable[[int], Counter[str]]


def title(plant: object) -> str:
    """What a bug is called among the tests."""
    return getattr(plant, "__name__", "").strip("_")


def reached(run: Run, seeds: Iterable[int]) -> set[str]:
    """The states that seeds reach."""
    return {state for seed in seeds for state in run(seed)}


def first_caught(
    run: Run, seeds: Iterable[int], *, by: type[Exception] = Violation, words: str = ""
) -> int | None:
    """The first seed in which a promise is broken, one that these words are of. `by` is `Exception` where a
    bug may also break the code under test in its own way."""
    for seed in seeds:
        try:
            run(seed)
        except by as error:
            if words in str(error):
                return seed
    return None
