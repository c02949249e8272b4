"""One turn of a partition: what it wrote, and which replies wait for that to be durable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Outcome, TailraceError, from_code
from tailrace.format.frame import Buffer, Frame
from tailrace.ports import Respond

if TYPE_CHECKING:
    from tailrace.broker.runtime.partition_runtime import PartitionRuntime

NOTHING: tuple[Buffer, ...] = ()
"""The body of a reply that has none."""


def together(topic: str, refusals: Mapping[int, Refusal]) -> Refusal | None:
    """One refusal for those of several partitions that cannot answer, by number, which names each of them;
    None when all can."""
    if not refusals:
        return None
    first = next(iter(refusals.values()))
    text = "; ".join(f"{topic}/{partition}: {refusal.message}" for partition, refusal in refusals.items())
    return Refusal(first.code, text, first.outcome, {**first.details, "partitions": list(refusals)})


class Turn:
    """What one turn wrote and which replies wait for it."""

    __slots__ = (
        "_shard",
        "at_once",
        "dropped",
        "dying",
        "frames",
        "hard",
        "replies",
        "start_offset",
        "started_us",
        "synced",
    )

    def __init__(self, shard: PartitionRuntime, started_us: int) -> None:
        self._shard = shard
        self.started_us = started_us
        self.frames: list[Frame] = []
        self.replies: list[tuple[Respond, Any]] = []
        """Replies (`core.commands.Reply`, and what partitions say to the broker itself) that wait for it."""
        self.at_once: list[tuple[Respond, Any]] = []
        """Replies that wait for nothing."""
        self.hard = False
        """Whether somebody waits for it to be durable."""
        self.dying = False
        """Whether messages go to the dead letters once it is durable."""
        self.start_offset = 0
        """Where the readable log begins when it is stored."""
        self.synced = False
        """Whether it is written with a sync of its own."""
        self.dropped = False

    def stored(self, result: object, error: Exception | None) -> None:
        """Storage is through with it. A turn that an earlier failure dropped has nobody waiting any more."""
        self._shard.landed()
        if not self.dropped:
            self._shard.stored(self, error)


def error_of(refusal: Refusal) -> TailraceError:
    """The error that a refusal of the broker's own tells of."""
    outcome: Outcome = "none" if refusal.outcome == "none" else "unknown"
    return from_code(refusal.code, refusal.message, outcome, refusal.details)


def refuse(error: Exception) -> Refusal:
    """The refusal that tells a client about an error of the broker's own."""
    if isinstance(error, TailraceError):
        return Refusal(error.code, error.message, error.outcome, error.details)
    return Refusal("error", f"the broker failed: {type(error).__name__}: {error}", "unknown")
