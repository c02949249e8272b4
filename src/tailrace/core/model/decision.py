"""The answer of a state machine of the core to a command: facts to store and apply, and the reply."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.core.model.commands import Reply
from tailrace.core.model.internal_commands import GroupHeld, RunLeased, StagedFrames

NOTHING: tuple[Any, ...] = ()


class Decision(msgspec.Struct, frozen=True, eq=False):
    """Facts to store and apply, in order, all or none, and the reply that leaves when they are durable.

    `keep` are the rows of a published body that go into the data frame, `late` the delayed ones, which go
    into the scheduled frame; None: all. The reply of a `soft` decision leaves at once, and losing its facts
    in a crash does no harm. `missing` is an offset whose frame must be cached before the command can be
    decided, or the staged frames that have to go with it: the shell loads them and asks again, and nothing
    else of such a decision counts.
    """

    facts: tuple[Any, ...]
    """Facts of a partition (`core.model.facts`) or of a coordinator (`core.model.group_facts`)."""
    reply: Reply | RunLeased | GroupHeld
    keep: npt.NDArray[np.int64] | None = None
    late: npt.NDArray[np.int64] | None = None
    soft: bool = False
    missing: int | StagedFrames | None = None
