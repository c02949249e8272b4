"""The input of a decision, as tests say it: a time, and what else matters."""

from tailrace.core.model.identifiers import CachedFrames
from tailrace.core.model.turn_input import NO_FRAMES, TurnInput


def at(
    now_us: int, frames: CachedFrames = NO_FRAMES, *, next_entry: int = 0, wall_us: int | None = None
) -> TurnInput:
    """A turn at this time; the wall clock shows the same unless said otherwise."""
    return TurnInput(now_us, now_us if wall_us is None else wall_us, next_entry, frames)
