"""Loss acceptance: report what a damaged partition has lost and which groups miss it, then open it without.

The steps, each durable before the next: the files are repaired (`storage.files.lost_ranges`); the partition
is rebuilt; the fact `MessagesLost` is the first that it appends; the request is answered. A crash before the
fact leaves the file `loss`, and the next start appends the fact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from tailrace.broker.runtime.partition_runtime import PartitionRuntime
from tailrace.broker.runtime.repair import accept_loss, find_losses
from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.broker.topics import Topics
from tailrace.core.collections.span_map import flat
from tailrace.core.model.damage_commands import AcceptLoss, LossReport
from tailrace.errors import NotFound, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import Gate, Losses, Respond

log = logging.getLogger("tailrace.storage")


class LossAcceptance:
    """Answers `AcceptLoss`."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self.verbs: dict[type[Any], Callable[[Any, Buffer, Respond, Gate], None]] = {AcceptLoss: self._accept}

    def _accept(self, request: AcceptLoss, body: Buffer, respond: Respond, gate: Gate) -> None:
        runtime = self._topics.known(request.topic).partition(request.partition)
        if runtime.damage is None:
            respond(LossReport([], [], done=not request.dry_run), NOTHING)
            return
        if runtime.reopening:
            raise Unavailable(f"{runtime.topic}/{runtime.partition} is being opened; try again in a moment")
        _Acceptance(runtime, request, respond).begin()


class _Acceptance:
    """One request: find the losses, repair and rebuild, answer when the fact of the loss is durable."""

    def __init__(self, runtime: PartitionRuntime[Any], request: AcceptLoss, respond: Respond) -> None:
        self._runtime = runtime
        self._request = request
        self._respond = respond

    def begin(self) -> None:
        find_losses(self._runtime, self._found)

    def _found(self, losses: Losses | None, error: Exception | None) -> None:
        if losses is None:
            self._failed(error)
            return
        report = _report(self._runtime, losses)
        if self._request.dry_run:
            self._respond(report, NOTHING)
        else:
            accept_loss(self._runtime, partial(self._rebuilt, report.groups))

    def _rebuilt(self, groups: list[dict[str, Any]], losses: Losses | None, error: Exception | None) -> None:
        if losses is None:
            self._failed(error)
            return
        fault = self._runtime.fault
        why = None if fault is None else fault.message
        report = LossReport(_rows(losses), groups, losses.kept, fault is None, why)
        _tell(f"{self._runtime.topic}/{self._runtime.partition}", losses)
        if fault is None:
            self._runtime.answer(self._respond, report)
        else:
            self._respond(report, NOTHING)

    def _failed(self, error: Exception | None) -> None:
        self._respond(refuse(error or NotFound("nothing was found")), NOTHING)


def _tell(name: str, losses: Losses) -> None:
    """Note in the log what was given up: afterwards nothing else names it but the answer to the command."""
    for lost in losses.ranges:
        known = "" if lost.exact else " at most: nothing says how many there were"
        count = f"{lost.end_offset - lost.first_offset} messages{known}"
        text = "%s: loss accepted of offsets from %d to below %d, %s (%s: %s)"
        log.warning(text, name, lost.first_offset, lost.end_offset, count, lost.file, lost.why)


def _report(runtime: PartitionRuntime[Any], losses: Losses) -> LossReport:
    spans = flat(sorted((lost.first_offset, lost.end_offset) for lost in losses.ranges))
    missed = runtime.missed(spans)
    return LossReport(
        _rows(losses), [{"group": group, "messages": messages} for group, messages in missed.items()]
    )


def _rows(losses: Losses) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(lost) for lost in losses.ranges]
