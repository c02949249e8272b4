"""What the runtime asks of the pure part of a partition, and how such a state machine is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from tailrace.core.model.decision import Decision
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.model.turn_input import TurnInput
from tailrace.format.frame import Buffer


class StateMachine(Protocol):
    """State that is decided on and changed by facts only, see `core.partition`."""

    leader_epoch: int

    @property
    def start_offset(self) -> int:
        """Where the readable log begins."""
        ...

    @property
    def end_offset(self) -> int:
        """The offset that the next message will have."""
        ...

    @property
    def append_time_us(self) -> int:
        """The time of the newest fact."""
        ...

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        """Decide a command; changes nothing."""
        ...

    def apply(self, fact: Any) -> None:
        """Apply a fact; the same for new facts and at replay."""
        ...

    def apply_after_loss(self, fact: Any) -> None:
        """Apply a fact at replay, if facts before this one are lost."""
        ...

    def lose(self, end_offset: int) -> None:
        """At replay: the entries here are lost, with the messages up to an offset."""
        ...

    def freeze(self) -> Callable[[], Sequence[Buffer]]:
        """Capture the state now; the returned function encodes it later, on any thread."""
        ...

    def bare(self, start_offset: int, end_offset: int) -> Self:
        """A machine without state, but for where its log begins and ends."""
        ...

    def reconfigure(self, options: TopicOptions) -> None:
        """Take over changed options of the topic."""
        ...


State = TypeVar("State", bound=StateMachine)


class MachineKind(msgspec.Struct, Generic[State], frozen=True, eq=False):
    """One kind of state machine: how it is made empty, restored from a snapshot, and replayed."""

    make: Callable[[TopicOptions], State]
    restore: Callable[[TopicOptions, Sequence[Buffer]], State]
    decode_facts: Callable[[Buffer], list[Any]]
    """Decode the body of a facts frame."""
