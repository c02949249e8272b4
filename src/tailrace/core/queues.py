"""The groups of one partition: to be written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tailrace.core.decisions import Decision
from tailrace.core.facts import Appended
from tailrace.core.table import Buffer

if TYPE_CHECKING:
    from tailrace.core.partition import Partition


class Queues:
    """The groups of one partition."""

    COMMANDS: tuple[type, ...] = ()
    FACTS: tuple[type, ...] = ()

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def decide(self, command: Any, now_us: int) -> Decision:
        """What a command leads to."""
        raise NotImplementedError

    def apply(self, fact: Any) -> None:
        """Let a fact happen."""
        raise NotImplementedError

    def appended(self, fact: Appended) -> None:
        """More messages are there; the columns that they have are remembered for leasing."""

    def trimmed(self, offset: int) -> None:
        """Everything below an offset is gone: what was not settled there counts as collected."""

    def next_due_us(self) -> int | None:
        """The earliest lease deadline or back-off that is not over yet."""
        return None

    def buffers(self) -> list[Buffer]:
        """The state for a snapshot."""
        return []

    def load(self, columns: Sequence[memoryview]) -> None:
        """The state that a snapshot holds."""

    def verify(self) -> None:
        """Assert the invariants."""
