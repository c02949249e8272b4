"""What a state machine of the core answers to a command: facts to store and apply, and the reply."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.core.model.commands import Reply
from tailrace.core.model.internal_commands import RunLeased

NOTHING: tuple[Any, ...] = ()


class Decision(msgspec.Struct, frozen=True, eq=False):
    """What shall happen: facts to store and apply, in order, whole or not at all, and the reply that leaves
    when they are safe.

    `keep` are the rows of a published body that go into the data frame, `late` those that go into the
    scheduled frame; None: all. A `soft` decision gates nothing: its reply leaves at once, and losing its
    facts in a crash does no harm. `missing` is the offset of a frame that must be at hand before this can be
    decided: the shell loads it and asks again; nothing else of such a decision counts.
    """

    facts: tuple[Any, ...]
    """Of the machine that decides: `core.facts` or `core.coordination_facts`."""
    reply: Reply | RunLeased
    keep: npt.NDArray[np.int64] | None = None
    late: npt.NDArray[np.int64] | None = None
    soft: bool = False
    missing: int | None = None
