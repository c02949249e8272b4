"""Requests and replies about damage: reporting losses, accepting them, and scrubbing."""

from __future__ import annotations

from typing import Any

from tailrace.core.model.identifiers import Command


class AcceptLoss(Command, frozen=True, tag="accept_loss"):
    """Give up the lost messages of a damaged partition and open it again; with `dry_run` only report them."""

    topic: str
    partition: int
    dry_run: bool = True


class Scrub(Command, frozen=True, tag="scrub"):
    """Read and check closed segments and snapshots on the disk: of all topics, of one, or of one partition.
    Without `begin`, only report the progress."""

    topic: str | None = None
    partition: int | None = None
    begin: bool = True


class LossReport(Command, frozen=True, tag="losses"):
    """The losses of a partition. `ranges` has a dict for each lost range (entries, offsets, file, position,
    why, exact), `groups` one for each group with the messages that it will never get, `kept` the files that
    hold the damaged bytes. `fault` is the fault that is left afterwards."""

    ranges: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    kept: list[str] = []
    done: bool = False
    fault: str | None = None


class ScrubState(Command, frozen=True, tag="scrubbing"):
    """The progress of the scrub: `done` of `total` partitions are checked, `bytes` were read. `damage`
    describes each damaged place that it found. Times are 0 if no scrub ever began or ended."""

    running: bool
    done: int
    total: int
    bytes: int
    damage: list[str] = []
    begun_us: int = 0
    ended_us: int = 0


DamageRequest = AcceptLoss | Scrub
DamageReply = LossReport | ScrubState
