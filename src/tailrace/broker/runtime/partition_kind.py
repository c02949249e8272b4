"""What a kind of partition adds to the runtime: a method for each moment at which it may have more to do.

    opened, or rebuilt      _started; after a rebuild _reopened, too
    a turn                  _missing for a decision that misses frames, _decided, _turned
    the turn is committed   `PartitionRuntime._committed`
    storage fails           _ended for the old state, _look_again for requests that wait

All are called on the pump's thread, and none of them by anybody but the runtime, except for `missed`, which a
report on losses asks. The kinds are in `broker.partition`: one with messages, one with a coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.broker.runtime.turn import Decided, Turn
from tailrace.core.model.internal_commands import StagedFrames
from tailrace.format.frame import Buffer
from tailrace.ports import Respond


class PartitionKind:
    """A partition that adds nothing."""

    def _started(self) -> None:
        """Commands are taken (again)."""

    def _missing(self, missing: int | StagedFrames, work: Any, body: Buffer, respond: Respond) -> None:
        """A command needs frames of the log: read them, then submit it again."""
        raise NotImplementedError

    def _decided(self, turn: Turn, decided: Decided) -> None:
        """Facts of a turn were applied; they are not stored yet."""

    def _turned(self) -> None:
        """A turn is over, and its replies to soft decisions are out."""

    def _ended(self) -> None:
        """Nothing of this state can be settled any more: it is given up, or the partition is damaged."""

    def _look_again(self) -> None:
        """The state was replaced or dropped: requests that wait look again."""

    def _reopened(self) -> None:
        """The state was rebuilt from the log, and commands are taken again: tell the node."""

    def missed(self, spans: Sequence[int]) -> dict[str, int]:
        """By group: the number of messages of these offsets that it has not settled."""
        return {}

    def lowest_entry(self) -> int | None:
        """The oldest entry outside of the readable log that the state refers to; None without any."""
        return None
