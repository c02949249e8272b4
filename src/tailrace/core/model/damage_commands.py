"""Requests and replies about damage: what is lost, accepting that, and reading everything to find out."""

from __future__ import annotations

from typing import Any

from tailrace.core.model.identifiers import Command


class AcceptLoss(Command, frozen=True, tag="accept_loss"):
    """Give up what of a damaged partition is lost, and open it again; with `dry_run` only say what that
    is."""

    topic: str
    partition: int
    dry_run: bool = True


class Scrub(Command, frozen=True, tag="scrub"):
    """Read and check the closed segments and the snapshots of everything, of a topic or of a partition, from
    the disk; without `begin`, only say how far that is."""

    topic: str | None = None
    partition: int | None = None
    begin: bool = True


class LossReport(Command, frozen=True, tag="losses"):
    """`ranges` has a dict for each lost range (entries, offsets, file, position, why, exact), `groups` one
    for each group with the messages that it will never get, `kept` the files that hold the damaged bytes.
    `fault` is what is still wrong when it is done."""

    ranges: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    kept: list[str] = []
    done: bool = False
    fault: str | None = None


class ScrubState(Command, frozen=True, tag="scrubbing"):
    """How far the scrub is: partitions of so many are through, so many bytes were read. `damage` has the
    words for each place that was found by it. Times are 0 where nothing ever began or ended."""

    running: bool
    done: int
    total: int
    bytes: int
    damage: list[str] = []
    begun_us: int = 0
    ended_us: int = 0


DamageRequest = AcceptLoss | Scrub
DamageReply = LossReport | ScrubState
