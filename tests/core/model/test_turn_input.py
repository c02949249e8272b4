"""The input of a decision: its time does not lie before the newest fact."""

from tailrace.core.model.turn_input import NO_FRAMES, TurnInput
from tests.core.turns import at


def test_the_time_of_a_turn_is_not_before_that_of_the_log() -> None:
    turn = TurnInput(10, 7, 3)
    assert turn.not_before(10) is turn
    later = turn.not_before(11)
    assert (later.now_us, later.wall_us, later.next_entry, later.frames) == (11, 7, 3, turn.frames)


def test_without_frames_nothing_is_in_memory() -> None:
    assert at(10).frames is NO_FRAMES
    assert NO_FRAMES.columns(0) is None
    assert NO_FRAMES.reach(5, 1 << 20) == 5
