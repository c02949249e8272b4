"""The groups of one partition: to be written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tailrace.core.decisions import Decision
from tailrace.core.facts import Appended
from tailrace.core.policy import GroupPolicy
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

    # What the shell asks (`broker.leasing`, `broker.burial`, `broker.group_figures`).

    def names(self) -> list[str]:
        """The groups."""
        return []

    def policy(self, group: str) -> GroupPolicy | None:
        """The options of a group; None when it is not here."""
        return None

    def generation(self, group: str) -> int | None:
        """The generation that a group has reached here; None when it is not here (`broker.granting`)."""
        return None

    def in_flight(self, group: str, member: str) -> tuple[int, int]:
        """How many messages a member holds, and all members of its group."""
        return 0, 0

    def committed(self, group: str) -> int | None:
        """The first unsettled offset; None when the group is not here."""
        return None

    def dying(self, group: str, limit: int) -> Sequence[Any]:
        """The first messages on their way to the dead letters (see `broker.letters.DyingRow`)."""
        return []

    def figures(self, group: str) -> dict[str, Any]:
        """Figures of a group."""
        return {}

    def buffers(self) -> list[Buffer]:
        """The state for a snapshot."""
        return []

    def load(self, columns: Sequence[memoryview]) -> None:
        """The state that a snapshot holds."""

    def verify(self) -> None:
        """Assert the invariants."""
