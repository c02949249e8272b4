"""Views of a ledger: the stats of its group, its unsettled messages, and its dying ones."""

from __future__ import annotations

from typing import Any

import msgspec

from tailrace.core.collections.span_map import flat
from tailrace.core.model.internal_commands import GroupHeld
from tailrace.core.queue.backlog import DYING
from tailrace.core.queue.ledger import Ledger


class Dead(msgspec.Struct, frozen=True):
    """One message on its way to the dead letters."""

    offset: int
    reason: str
    error: str
    deliveries: int
    failures: int
    first_us: int
    last_us: int
    member: str


def held_of(ledger: Ledger | None, start_offset: int) -> GroupHeld:
    """The report on a group; None: the partition does not have it."""
    if ledger is None:
        return GroupHeld(start_offset)
    holding = ledger.member, ledger.generation, ledger.sharing
    return GroupHeld(start_offset, ledger.id, *holding, ledger.paused, ledger.policy)


def dead_of(ledger: Ledger, limit: int) -> list[Dead]:
    """The first `limit` messages on their way to the dead letters."""
    found: list[Dead] = []
    texts = ledger.texts
    for first, end, value in ledger.backlog.dying:
        tries, failures, first_us, last_us, member, _, reason, error = DYING.unpack(value)
        told = texts[reason], texts[error], tries, failures, first_us, last_us, texts[member]
        found += [Dead(offset, *told) for offset in range(first, min(end, first + limit - len(found)))]
        if len(found) >= limit:
            break
    return found


def unsettled_of(ledger: Ledger, offset: int, end: int, limit: int) -> list[int]:
    """The first `limit` unsettled messages in [offset, end), as flat spans."""
    backlog = ledger.backlog
    found = [(max(offset, backlog.cursor), end)]
    for runs in (backlog.fresh, ledger.leased, backlog.back, backlog.dying):
        room = limit
        for first, stop, _ in runs.since(offset):
            if room <= 0 or first >= end:
                break
            found.append((first, min(stop, end)))
            room -= stop - first
    spans: list[tuple[int, int]] = []
    for first, stop in sorted(found):
        if limit > 0 and first < stop:
            spans.append((first, min(stop, first + limit)))
            limit -= stop - first
    return flat(spans)


def figures_of(ledger: Ledger, end_offset: int) -> dict[str, Any]:
    """The stats of a group on a partition that ends at `end_offset`."""
    backlog = ledger.backlog
    waiting, held, dying = backlog.back.total, backlog.fresh.total, backlog.dying.total
    unseen = max(end_offset - ledger.cursor, 0)
    return {
        "committed": ledger.committed(),
        "lag": unseen + held + waiting + dying + ledger.leased.total,
        "in_flight": ledger.leased.total,
        "waiting": waiting,
        "held": held,
        "dying": dying,
        "member": ledger.member,
        "generation": ledger.generation,
        "paused": ledger.paused,
        **msgspec.structs.asdict(ledger.counters),
    }
