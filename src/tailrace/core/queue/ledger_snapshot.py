"""A ledger as columns of bytes, for snapshots: capturing it is quick, however many messages wait."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from struct import Struct

import msgspec

from tailrace.core.collections.hash_table import Buffer
from tailrace.core.collections.span_map import Runs, count, flat, pairs, without
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.queue.backlog import BACK, DYING
from tailrace.core.queue.ledger import LEASED, Counters, Ledger

EMPTY = Struct("")
COLUMNS = 16
"""Buffers of one ledger."""


class _LedgerHead(msgspec.Struct, frozen=True, array_like=True):
    """The small state of a ledger."""

    number: int
    name: str
    policy: GroupPolicy
    member: str
    generation: int
    paused: bool
    counters: Counters
    cursor: int
    texts: list[tuple[int, str, int]]
    id: int = 0
    apart: list[int] = []
    sharing: bool | None = None
    """None: written by a release in which the policy alone said whether a partition is shared."""


def freeze(ledger: Ledger) -> Callable[[], list[Buffer]]:
    """Capture the state of a ledger now; the returned function encodes it later, as `COLUMNS` buffers."""
    head = _LedgerHead(
        ledger.number,
        ledger.name,
        ledger.policy,
        ledger.member,
        ledger.generation,
        ledger.paused,
        ledger.counters,
        ledger.cursor,
        ledger.texts.rows(),
        ledger.id,
        flat(ledger.apart.union().spans()),
        ledger.sharing,
    )
    backlog = ledger.backlog
    small: list[Buffer] = [msgspec.msgpack.encode(head), *ledger.receipts.columns()]
    copies = [runs.frozen() for runs in (backlog.fresh, ledger.leased, backlog.back, backlog.dying)]
    return lambda: small + [column for runs in copies for column in runs.columns()]


def ledger_of(columns: Sequence[memoryview], time_us: int) -> Ledger:
    """Restore a ledger from its buffers; raises `ValueError`."""
    head = msgspec.msgpack.decode(columns[0], type=_LedgerHead)
    ledger = Ledger(head.number, head.name, head.policy, head.cursor)
    ledger.member, ledger.generation, ledger.paused = head.member, head.generation, head.paused
    ledger.counters, ledger.id = head.counters, head.id
    if head.sharing is not None:
        ledger.sharing = head.sharing
    ledger.texts.fill(head.texts)
    ledger.receipts.fill(*columns[1:4])
    backlog = ledger.backlog
    sets = ((backlog.fresh, EMPTY), (ledger.leased, LEASED), (backlog.back, BACK), (backlog.dying, DYING))
    for at, (runs, shape) in enumerate(sets):
        _fill(runs, shape.size, columns[4 + at * 3 : 7 + at * 3])
    for first, end in pairs(head.apart):
        for start, stop, value in backlog.back.within(first, end):
            deliveries, *_, due_us, _ = BACK.unpack(value)
            ledger.apart.add(start, stop, deliveries, due_us)
    backlog.rebuild(time_us)
    for lease in ledger.receipts.live.values():
        ledger.in_flight.add(lease.member, lease.left)
    return ledger


def verify(ledger: Ledger) -> None:
    """Assert the invariants: every message is in one state only, and numbers that are counted twice agree."""
    backlog = ledger.backlog
    backlog.verify()
    ledger.leased.verify()
    ledger.receipts.verify()
    ends = 0
    places = [*backlog.fresh, *ledger.leased, *backlog.back, *backlog.dying]
    for first, end, _ in sorted(places):
        assert first >= ends, f"{first} is in two places"
        ends = end
    assert ends <= ledger.cursor, "something lies above the cursor"
    back = [(first, end) for first, end, _ in backlog.back]
    for first, end in ledger.apart:
        assert not without(first, end, back), f"{first} is set apart and does not wait"
    told = [suspect[0] for suspect in ledger.suspects()]
    assert told == sorted(told), "set apart under another number of deliveries"
    assert ledger.apart.total == sum(end - first for first, end in ledger.apart)
    late = ledger.apart.starving_after(backlog.clock_us)
    assert late == _unstarved(ledger), "what is set apart under another due time"
    left: dict[int, int] = {}
    for first, end, value in ledger.leased:
        number = LEASED.unpack(value)[0]
        left[number] = left.get(number, 0) + end - first
    live = ledger.receipts.live
    assert left == {number: lease.left for number, lease in live.items()}, "leases and their messages"
    flying: dict[str, int] = {}
    for lease in live.values():
        flying[lease.member] = flying.get(lease.member, 0) + lease.left
        assert lease.left <= count(lease.spans)
    assert flying == ledger.in_flight, "messages in flight by member"
    uses: dict[int, int] = {}
    for runs, shape, places_of_texts in ((backlog.back, BACK, (4,)), (backlog.dying, DYING, (4, 6, 7))):
        for first, end, value in runs:
            fields = shape.unpack(value)
            for place in places_of_texts:
                if fields[place]:
                    uses[fields[place]] = uses.get(fields[place], 0) + end - first
    assert uses == {number: many for number, _, many in ledger.texts.rows()}, "uses of texts"


def _fill(runs: Runs, size: int, columns: Sequence[memoryview]) -> None:
    firsts, ends = array("Q"), array("Q")
    firsts.frombytes(columns[0])
    ends.frombytes(columns[1])
    values = columns[2]
    if len(firsts) != len(ends) or len(values) != size * len(firsts):
        raise ValueError("columns of a snapshot have different lengths")
    pieces = [bytes(values[at : at + size]) for at in range(0, len(values), size)] if size else []
    runs.fill(firsts, ends, pieces if size else [b""] * len(firsts))


def _unstarved(ledger: Ledger) -> int:
    """How many messages that are set apart are not due yet, one by one."""
    runs = (run for first, end in ledger.apart for run in ledger.backlog.back.within(first, end))
    return sum(end - first for first, end, value in runs if BACK.unpack(value)[5] > ledger.backlog.clock_us)
