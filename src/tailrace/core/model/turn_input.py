"""The input of a decision beside the command and the state: the times of a turn, and the frames in memory.

It is a value: the same command on the same state with the same input gives the same decision.
"""

from __future__ import annotations

import msgspec

from tailrace.core.model.identifiers import CachedFrames, Columns


class _NoFrames:
    """Nothing is in memory."""

    def columns(self, offset: int) -> Columns | None:
        return None

    def reach(self, offset: int, bytes_max: int) -> int:
        return offset


NO_FRAMES: CachedFrames = _NoFrames()


class TurnInput(msgspec.Struct, frozen=True, eq=False):
    """The input of one decision.

    `now_us` is the time of the partition (see `core.partition_clock`); absolute times of users are compared
    with `wall_us`. `next_entry` is the index that the next frame with a body will have. Decisions about
    delivery may look at `frames`.
    """

    now_us: int
    wall_us: int
    next_entry: int = 0
    frames: CachedFrames = NO_FRAMES

    def not_before(self, time_us: int) -> TurnInput:
        """The same, on a log whose newest fact has this time: its time never goes back."""
        if self.now_us >= time_us:
            return self
        return TurnInput(time_us, self.wall_us, self.next_entry, self.frames)
