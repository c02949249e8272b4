"""Messages that an operator reserves, offset by offset, before they are settled."""

from __future__ import annotations

from tailrace.core.collections.span_map import flat, pairs, without
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.facts import Leased
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import HoldRun
from tailrace.core.model.queue_commands import OffsetsHeld
from tailrace.core.queue.ledger import LEASED, Ledger
from tailrace.errors import InvalidRequest


def hold(ledger: Ledger, command: HoldRun, time_us: int) -> Decision:
    """Lease the free ones of these messages to a member, which keeps those that it has: the request may be
    repeated."""
    if ledger.policy.ordering != "none":
        text = f"group {command.group!r} keeps an order: its messages are leased, not held one by one"
        return Decision(NOTHING, Refusal(InvalidRequest.code, text))
    free: list[tuple[int, int]] = []
    mine: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    for first, end in pairs(command.spans):
        end = min(end, command.end_offset)
        for start, stop in ledger.unsettled(first, end) if first < end else ():
            busy = [(one, other) for one, other, _ in ledger.backlog.dying.within(start, stop)]
            for one, other, value in ledger.leased.within(start, stop):
                lease = ledger.receipts.live[LEASED.unpack(value)[0]]
                (mine if lease.member == command.member else others).append((one, other))
                busy.append((one, other))
            free += without(start, stop, sorted(busy))
    reply = OffsetsHeld(flat(sorted(free + mine)), flat(sorted(others)))
    if not free:
        return Decision(NOTHING, reply)
    spans, deadline_us = flat(sorted(free)), time_us + command.lease_ms * 1000
    fact = Leased(ledger.number, command.lease, command.member, spans, deadline_us, time_us)
    return Decision((fact,), reply, soft=True)
