"""Where messages wait that were handed out and not started: `handler_runner` fills it, `lease_prefetch` gives
back from it."""

from __future__ import annotations

from typing import Protocol

from tailrace.client.queue.delivery import LeasedMessage
from tailrace.client.queue.held_leases import Unstarted
from tailrace.core.model.group_commands import Place


class Parking(Protocol):
    """Where messages wait that were taken and not started, because their key is at work."""

    def give_up(self, places: set[Place]) -> Unstarted:
        """Those of partitions that are given up; they are not started any more."""
        ...

    def parked(self) -> Unstarted:
        """All of them; they stay."""
        ...

    def firsts(self) -> list[tuple[LeasedMessage, bool]]:
        """The next one of each key, and whether it may start now."""
        ...

    def orders(self) -> set[object]:
        """What these and those at work keep their order with, as `order_of` has it."""
        ...

    def behind(self, failed: LeasedMessage) -> Unstarted:
        """Those that have to come after a message that comes again; they are not started any more."""
        ...
