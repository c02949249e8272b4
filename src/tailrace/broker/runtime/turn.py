"""One turn of a partition: the frames it wrote, and the replies that wait until these are durable."""

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
"""Body of a reply without one."""


def together(topic: str, refusals: Mapping[int, Refusal]) -> Refusal | None:
    """Join the refusals of several partitions, by number, into one that names each; None without any."""
    if not refusals:
        return None
    first = next(iter(refusals.values()))
    text = "; ".join(f"{topic}/{partition}: {refusal.message}" for partition, refusal in refusals.items())
    return Refusal(first.code, text, first.outcome, {**first.details, "partitions": list(refusals)})


class Turn:
    """The frames of one turn and its replies."""

    __slots__ = (
        "_runtime",
        "at_once",
        "dropped",
        "frames",
        "hard",
        "replies",
        "start_offset",
        "started_us",
        "synced",
        "watched",
    )

    def __init__(self, runtime: PartitionRuntime, started_us: int) -> None:
        self._runtime = runtime
        self.started_us = started_us
        self.frames: list[Frame] = []
        self.replies: list[tuple[Respond, Any]] = []
        """Replies that wait until the turn is durable: to clients, and to the broker itself."""
        self.at_once: list[tuple[Respond, Any]] = []
        """Replies to soft decisions, which wait for nothing."""
        self.hard = False
        """Whether some reply waits until the turn is durable."""
        self.watched: list[Any] = []
        """Facts that processes are told of once the turn is durable."""
        self.start_offset = 0
        """Start of the readable log once the turn is stored."""
        self.synced = False
        """Whether the turn is written with its own sync."""
        self.dropped = False

    def stored(self, result: object, error: Exception | None) -> None:
        """Storage has finished the write. Nothing waits for a turn that an earlier failure dropped."""
        self._runtime.pump.writing.pop(self, None)
        self._runtime.landed()
        if not self.dropped:
            self._runtime.stored(self, error)


def error_of(refusal: Refusal) -> TailraceError:
    """The error that a refusal describes."""
    outcome: Outcome = "none" if refusal.outcome == "none" else "unknown"
    return from_code(refusal.code, refusal.message, outcome, refusal.details)


def refuse(error: Exception) -> Refusal:
    """The refusal that describes an error of the broker to a client."""
    if isinstance(error, TailraceError):
        return Refusal(error.code, error.message, error.outcome, error.details)
    return Refusal("error", f"the broker failed: {type(error).__name__}: {error}", "unknown")
