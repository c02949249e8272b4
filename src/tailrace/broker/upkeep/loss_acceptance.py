"""Loss acceptance: report what a damaged partition has lost and which groups miss it, then open it without.

The steps, each durable before the next: the files are repaired (`storage.files.lost_ranges`); the partition
is rebuilt; the fact `MessagesLost` is the first that it appends; the request is answered. A crash before the
fact leaves the file `loss`, and the next start appends the fact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tailrace.broker.runtime.partition_runtime import PartitionRuntime
from tailrace.broker.runtime.repair import accept_loss, find_losses
from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.broker.topics import Topics
from tailrace.core.collections.span_map import flat
from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.damage_commands import AcceptLoss, LossReport
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import NotFound, Unavailable
from tailrace.format.frame import Buffer
from tailrace.ports import Gate, Losses, Respond


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

        def found(losses: Losses | None, error: Exception | None) -> None:
            if losses is None:
                respond(refuse(error or NotFound("nothing was found")), NOTHING)
                return
            report = _report(runtime, losses)
            if request.dry_run:
                respond(report, NOTHING)
            else:
                accept_loss(runtime, accepted(report))

        def accepted(plan: LossReport) -> Callable[[Losses | None, Exception | None], None]:
            def over(losses: Losses | None, error: Exception | None) -> None:
                if losses is None:
                    respond(refuse(error or NotFound("nothing was found")), NOTHING)
                    return
                fault = None if runtime.fault is None else runtime.fault.message
                report = LossReport(_rows(losses), plan.groups, losses.kept, runtime.fault is None, fault)

                def durable(reply: Reply, parts: Any) -> None:
                    respond(reply if isinstance(reply, Refusal) else report, NOTHING)

                runtime.answer(durable, Done()) if runtime.fault is None else respond(report, NOTHING)

            return over

        find_losses(runtime, found)


def _report(runtime: PartitionRuntime[Any], losses: Losses) -> LossReport:
    spans = flat(sorted((lost.first_offset, lost.end_offset) for lost in losses.ranges))
    missed = runtime.missed(spans)
    return LossReport(
        _rows(losses), [{"group": group, "messages": messages} for group, messages in missed.items()]
    )


def _rows(losses: Losses) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(lost) for lost in losses.ranges]
