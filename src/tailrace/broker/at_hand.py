"""The committed frames that a partition has in memory for deciding about deliveries and making them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tailrace.core.model import Columns

if TYPE_CHECKING:
    from tailrace.broker.shard import Shard


class FramesAtHand:
    """The hot tail, and a few frames that were read from the log lately."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def columns(self, offset: int) -> Columns | None:
        """What decisions look at of the frame that holds an offset; None when it is not at hand."""
        return None

    def reach(self, offset: int, bytes_max: int) -> int:
        """See `core.model.AtHand`."""
        return offset

    def load(self, offset: int, loaded: Callable[[Exception | None], None]) -> None:
        """Read the frame that holds an offset (and some after it) from the log, then call."""
        raise NotImplementedError
