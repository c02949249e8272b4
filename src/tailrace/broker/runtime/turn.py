"""One turn of a partition: the frames it wrote, and the replies that wait until these are durable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Outcome, TailraceError, from_code
from tailrace.format.frame import Buffer, Frame
from tailrace.ports import Respond

NOTHING: tuple[Buffer, ...] = ()
"""Body of a reply without one."""


def together(topic: str, refusals: Mapping[int, Refusal]) -> Refusal | None:
    """Join the refusals of several partitions, by number, into one that names each; None without any."""
    if not refusals:
        return None
    first = next(iter(refusals.values()))
    text = "; ".join(f"{topic}/{partition}: {refusal.message}" for partition, refusal in refusals.items())
    return Refusal(first.code, text, first.outcome, {**first.details, "partitions": list(refusals)})


class Countdown:
    """Calls `over` when each of some pieces of work has called `one`; at once if there are none."""

    def __init__(self, count: int, over: Callable[[], None]) -> None:
        self._left = count
        self._over = over
        if not count:
            over()

    def one(self, *told: object) -> None:
        """One more piece of work has ended."""
        self._left -= 1
        if not self._left:
            self._over()


Item = tuple[Any, Buffer, Respond]
"""A command (of `core.model`, or a `Late` one), its body, and the receiver of its reply."""
Decided = list[tuple[Any, Sequence[Any], bool]]
"""Commands of one turn that led to facts: the command, its facts, and whether the decision was soft."""


class Reach(NamedTuple):
    """A point in a log: the end of its entries, the end of its messages, and the readable start by then."""

    entry: int
    end_offset: int
    start_offset: int


NOWHERE = Reach(0, 0, 0)


class Late:
    """A command that is made when its turn has come, from what is known then; None when it is not wanted any
    more."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


class Turn:
    """The frames of one turn and its replies."""

    __slots__ = (
        "at_once",
        "dropped",
        "frames",
        "hard",
        "reach",
        "replies",
        "started_us",
        "synced",
        "watched",
    )

    def __init__(self, started_us: int) -> None:
        self.started_us = started_us
        self.frames: list[Frame] = []
        self.reach = NOWHERE
        """The point that the log has reached when the turn is stored."""
        self.replies: list[tuple[Respond, Any]] = []
        """Replies that wait until the turn is committed: to clients, and to the broker itself."""
        self.at_once: list[tuple[Respond, Any]] = []
        """Replies to soft decisions, which wait for nothing."""
        self.hard = False
        """Whether some reply waits until the turn is durable."""
        self.watched: list[Any] = []
        """Facts that processes are told of once the turn is committed."""
        self.synced = False
        """Whether the turn is written with its own sync."""
        self.dropped = False


def error_of(refusal: Refusal) -> TailraceError:
    """The error that a refusal describes."""
    outcome: Outcome = "none" if refusal.outcome == "none" else "unknown"
    return from_code(refusal.code, refusal.message, outcome, refusal.details)


def unknown(refusal: Refusal) -> Refusal:
    """The refusal of something that may have been stored all the same."""
    return Refusal(refusal.code, refusal.message, "unknown", refusal.details)


def refuse(error: Exception) -> Refusal:
    """The refusal that describes an error of the broker to a client."""
    if isinstance(error, TailraceError):
        return Refusal(error.code, error.message, error.outcome, error.details)
    return Refusal("error", f"the broker failed: {type(error).__name__}: {error}", "unknown")
