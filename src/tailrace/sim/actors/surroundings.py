"""What actors ask of the worlds that they live in. Each world has more than that."""

from __future__ import annotations

from typing import Any, Protocol

from tailrace.sim.delivery_history import History
from tailrace.sim.network import Surroundings


class ChancyWorld(Surroundings, Protocol):
    """A world in which things happen by chance."""

    def chance(self, probability: float) -> bool:
        """Whether it happens this time."""
        ...

    def value(self) -> bytes:
        """A value that nobody else has."""
        ...


class TopicWorld(ChancyWorld, Protocol):
    """A world of one topic, with an account of all that happens to its messages."""

    topic: str
    partitions: int
    history: History
    healed: bool
    """Whether the trouble is over."""


class GroupWorld(TopicWorld, Protocol):
    """A world in which groups consume the topic."""

    options: dict[str, dict[str, Any]]
    """Of each group."""
    obedience: float
    """How likely a member acks what it handled."""
    careless: float
    """How likely a member does not say that it is done with a partition."""

    def true_us(self, partition: int, time_us: int) -> int:
        """The true time of a time that a partition has told."""
        ...

    def known_as(self, value: bytes, partition: int, offset: int) -> bytes:
        """The name of a message in the accounts."""
        ...

    def kills(self, value: bytes) -> bool:
        """Whether a message is the end of its member."""
        ...

    def killed(self, group: str) -> None:
        """A message has killed its member."""
        ...
