"""Checks of clients' commands about leases: the first problem, naming the field, or None."""

from __future__ import annotations

from itertools import pairwise
from operator import le, lt

from tailrace.core.core_tuning import DELAY_MS_MAX, LEASES_MAX, OFFSET_MAX, SPANS_MAX
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import HoldRun
from tailrace.core.model.queue_commands import (
    Ack,
    Extend,
    GiveBack,
    Nack,
    RejectMessages,
    Reopen,
    SettleOffsets,
)
from tailrace.core.queue.lease_decision import LEASE_MS_MAX
from tailrace.errors import InvalidRequest

REASONS = ("rejected", "poison")

Checked = Ack | Nack | GiveBack | RejectMessages | Extend | Reopen | SettleOffsets | HoldRun


def problem_with(command: Checked) -> Refusal | None:
    """Refuse a malformed command."""
    text = None
    if isinstance(command, Ack | GiveBack):
        text = _leases("leases", command.leases)
    elif isinstance(command, Extend):
        text = _extend(command)
    else:
        text = _spans("spans", command.spans)
        if text is None and isinstance(command, Nack):
            delay_ms = command.delay_ms
            if delay_ms is not None and not 0 <= delay_ms <= DELAY_MS_MAX:
                text = f"delay_ms is from 0 to {DELAY_MS_MAX}, not {delay_ms}"
            elif command.started:
                text = _leases("started", command.started)
        elif text is None and isinstance(command, RejectMessages) and command.reason not in REASONS:
            text = f"reason is {' or '.join(map(repr, REASONS))}, not {command.reason[:80]!r}"
    return None if text is None else Refusal(InvalidRequest.code, text)


def _leases(field: str, leases: list[tuple[int, list[int]]]) -> str | None:
    if not 0 < len(leases) <= LEASES_MAX:
        return f"{field} are from 1 to {LEASES_MAX}, not {len(leases)}"
    for _, spans in leases:
        if len(spans) == 2 and 0 <= spans[0] < spans[1] <= OFFSET_MAX:
            continue
        if text := _spans(field, spans):
            return text
    return None


def _extend(command: Extend) -> str | None:
    if not 0 < len(command.leases) <= LEASES_MAX:
        return f"leases are from 1 to {LEASES_MAX}, not {len(command.leases)}"
    if not 1 <= command.lease_ms <= LEASE_MS_MAX:
        return f"lease_ms is from 1 to {LEASE_MS_MAX}, not {command.lease_ms}"
    return None


def _spans(field: str, spans: list[int]) -> str | None:
    if not spans or len(spans) % 2:
        return f"{field}: spans are pairs of first and end, not {len(spans)} numbers"
    if len(spans) > 2 * SPANS_MAX:
        return f"{field}: at most {SPANS_MAX} spans, not {len(spans) // 2}"
    if not 0 <= spans[0] <= spans[-1] <= OFFSET_MAX:
        return f"{field}: offsets are from 0 to {OFFSET_MAX}"
    if all(map(lt, spans[::2], spans[1::2])) and all(map(le, spans[1:-1:2], spans[2::2])):
        return None
    for at, (one, other) in enumerate(pairwise(spans)):
        # Spans may touch, but none is empty.
        if other < one or (other == one and at % 2 == 0):
            return f"{field}: spans ascend and are not empty, unlike {one}, {other}"
    return None
