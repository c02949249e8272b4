"""Random plays for models: how many, and not everything in every play."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st


def dear(percent: int) -> settings:
    """So many in a hundred of the usual number of examples: each of them takes long."""
    return settings(max_examples=settings.default.max_examples * percent // 100)


def mixtures(
    always: Sequence[st.SearchStrategy[Any]],
    others: Sequence[st.SearchStrategy[Any]],
    min_size: int = 0,
    max_size: int = 40,
) -> st.SearchStrategy[list[Any]]:
    """Lists of steps, of some of the other kinds only: what one kind builds up, another often takes down
    again, so that together they never come far."""
    return st.sets(st.sampled_from(range(len(others)))).flatmap(
        lambda chosen: st.lists(
            st.one_of(*always, *(others[kind] for kind in sorted(chosen))),
            min_size=min_size,
            max_size=max_size,
        )
    )
