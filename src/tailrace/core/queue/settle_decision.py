"""Decisions on leased messages: ack, nack, reject, extend, time-out, and members that are gone.

A message goes to the dead letters at its `max_attempts`-th failure, or when its `max_deliveries`-th delivery
ends without an ack: by a nack, a time-out, or the end of its member. Messages that no handler got are given
back *unstarted*, which undoes the delivery. Messages that go back only because an earlier one of their key
does keep their delivery, because their holder may have begun with them, but do not become dead letters by it.

A receipt is valid for the messages that its lease still holds, until the deadline: then the lease is over,
even if no `ExpireLeases` was decided yet. Messages that were settled through the same lease before may be
settled again; all others are lost.

    lease 7 was of 0-99. 0-39 are acked through it, 60-99 were given back: it still holds 40-59.
    ack (7, [30, 50])    40-49 are settled now, 30-39 were settled before: nothing is lost
    ack (7, [50, 70])    50-59 are settled now; 60-69 are lost
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tailrace.core.collections.span_map import SpanSet, count, flat, pairs, without
from tailrace.core.core_tuning import ERROR_CHARACTERS_MAX, FEW_BOUNDS, TOGETHER_MAX
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.facts import (
    Acked,
    Dying,
    Fact,
    GivenBack,
    LeaseExpired,
    LeaseExtended,
    Nacked,
)
from tailrace.core.model.queue_commands import Ack, Extend, Extended, GiveBack, Nack, RejectMessages, Settled
from tailrace.core.queue.leases import LiveLease
from tailrace.core.queue.ledger import LEASED, MAX_ATTEMPTS, MAX_DELIVERIES, Ledger
from tailrace.core.queue.row_lookup import KeyLookup

EXPIRY = "the lease expired"
MEMBER_GONE = "the member that had it was gone, or lost the partition"
RETURNED = "it was given back"
FOREVER = 1 << 62
"""No limit of deliveries or attempts."""

Lost = list[tuple[int, list[int]]]
Left = list[tuple[int, int, int, int]]
"""First, end, deliveries, failures."""


class SettleDecision:
    """Decisions about the leases of one group at one time."""

    def __init__(self, ledger: Ledger, lookup: KeyLookup, time_us: int) -> None:
        self._ledger = ledger
        self._lookup = lookup
        self._time_us = time_us

    # ----------------------------------------------------------------------------------------- with receipts

    def ack(self, command: Ack) -> Decision:
        """Settle messages."""
        good: list[tuple[int, list[int]]] = []
        lost: Lost = []
        ledger = self._ledger
        for number, spans in command.leases:
            lease = ledger.receipts.live.get(number)
            if lease is not None and lease.deadline_us > self._time_us and len(spans) == 2:
                run = ledger.leased.at(spans[0])
                if run is not None and run[1] >= spans[1] and LEASED.unpack(run[2])[0] == number:
                    good.append((number, spans))
                    continue
            if lease is not None and lease.deadline_us > self._time_us and self._all_held(number, spans):
                good.append((number, spans))
                continue
            pieces, stale = self._sort_out(number, spans)
            if pieces:
                good.append((number, flat([(first, end) for first, end, _, _ in pieces])))
            if stale:
                lost.append((number, stale))
        facts = (Acked(ledger.number, good, self._time_us),) if good else NOTHING
        return Decision(facts, Settled(lost))

    def _all_held(self, number: int, spans: list[int]) -> bool:
        """Whether a lease still holds all of many spans that do not touch each other."""
        if len(spans) <= FEW_BOUNDS or set(spans[1:-1:2]) & set(spans[2::2]):
            return False
        many, values = self._ledger.leased.tally(spans)
        return many == count(spans) and all(LEASED.unpack(value)[0] == number for value in values)

    def nack(self, command: Nack) -> Decision:
        """Give messages back, as a failure or not."""
        pieces, stale = self._sort_out(command.lease, command.spans)
        reply = Settled([(command.lease, stale)] if stale else [])
        if not pieces:
            return Decision(NOTHING, reply)
        known = self._lookup.of_lease(self._ledger.receipts.live[command.lease])
        spans = flat([(first, end) for first, end, _, _ in pieces])
        gone = SpanSet()
        for first, end in pairs(spans):
            gone.add(first, end)
        later, unstarted = self._apart(self._later(spans, known, gone), command.started)
        facts: list[Fact] = [self._given_back(pairs(unstarted), unstarted=True)] if unstarted else []
        error = command.error[:ERROR_CHARACTERS_MAX]
        if not command.failure:
            facts.append(self._given_back(pairs(spans)))
            worn = self._wear_out(pieces, error or RETURNED)
        else:
            pieces = self._bury(pieces, known, error, facts)
            worn = self._wear_out(pieces, error)
        if command.failure and pieces:
            alive = flat([(first, end) for first, end, _, _ in pieces])
            delay_us = -1 if command.delay_ms is None else command.delay_ms * 1000
            keys = self._lookup.row(known, alive)
            facts.append(
                Nacked(self._ledger.number, command.lease, alive, delay_us, self._time_us, keys, error)
            )
        facts += worn
        if later:
            facts.append(self._given_back(pairs(later)))
        return Decision(tuple(facts), reply, soft=not (command.failure or worn))

    def give_back_unstarted(self, command: GiveBack) -> Decision:
        """Give back messages that no handler has got."""
        spans, lost = self._still_held(command.leases)
        return self._untouched(spans, Settled(lost))

    def _untouched(self, spans: list[int], reply: Settled) -> Decision:
        """Give back messages that no handler has got, and later ones of their keys with them."""
        if not spans:
            return Decision(NOTHING, reply)
        known: dict[int, int] = {}
        for number in self._holders(spans) if self._ledger.keyed else ():
            known |= self._lookup.of_lease(self._ledger.receipts.live[number])
        gone = SpanSet()
        for first, end in pairs(spans):
            gone.add(first, end)
        later = self._later(spans, known, gone)
        fact = self._given_back(sorted([*pairs(spans), *pairs(later)]), unstarted=True)
        return Decision((fact,), reply, soft=True)

    @staticmethod
    def _apart(spans: list[int], leases: Sequence[tuple[int, list[int]]]) -> tuple[list[int], list[int]]:
        """Split messages into those that some handler has got and the others."""
        if not (spans and leases):
            return [], spans
        started = SpanSet()
        for _, given in leases:
            for first, end in pairs(given):
                started.add(first, end)
        mine = [part for first, end in pairs(spans) for part in started.intersect(first, end)]
        rest = [part for first, end in pairs(spans) for part in without(first, end, mine)]
        return flat(mine), flat(rest)

    def _still_held(self, leases: Sequence[tuple[int, list[int]]]) -> tuple[list[int], Lost]:
        """The messages of (lease, spans) pairs that these leases still hold, ascending, and the stale
        receipts."""
        held: list[tuple[int, int]] = []
        lost: Lost = []
        for number, spans in leases:
            pieces, stale = self._sort_out(number, spans)
            held += [(first, end) for first, end, _, _ in pieces]
            if stale:
                lost.append((number, stale))
        found = SpanSet()
        for first, end in held:
            found.add(first, end)
        return flat(found.spans()), lost

    def reject(self, command: RejectMessages) -> Decision:
        """Send messages to the dead letters."""
        pieces, stale = self._sort_out(command.lease, command.spans)
        reply = Settled([(command.lease, stale)] if stale else [])
        if not pieces:
            return Decision(NOTHING, reply)
        spans = flat([(first, end) for first, end, _, _ in pieces])
        keys = self._lookup.row(self._lookup.of_lease(self._ledger.receipts.live[command.lease]), spans)
        error = command.error[:ERROR_CHARACTERS_MAX]
        fact = Dying(self._ledger.number, spans, command.reason, self._time_us, error, keys)
        return Decision((fact,), reply)

    def extend(self, command: Extend) -> Decision:
        """Move deadlines; a lease whose messages are all settled needs none."""
        receipts = self._ledger.receipts
        deadline_us = self._time_us + command.lease_ms * 1000
        good, lost = [], []
        for number in dict.fromkeys(command.leases):
            lease = receipts.live.get(number)
            if lease is not None and lease.deadline_us > self._time_us:
                good.append(number)
            elif not receipts.ended_well(number, self._time_us) or receipts.taken_from(number):
                lost.append(number)
        reply = Extended(deadline_us, lost)
        if not good:
            return Decision(NOTHING, reply)
        fact = LeaseExtended(self._ledger.number, good, deadline_us, self._time_us)
        return Decision((fact,), reply, soft=True)

    def _sort_out(self, number: int, spans: list[int]) -> tuple[Left, list[int]]:
        """The runs for which receipts are valid, and the spans for which they are stale."""
        ledger = self._ledger
        receipts = ledger.receipts
        lease = receipts.live.get(number)
        had: Sequence[int]
        taken: Sequence[int]
        if lease is not None and lease.deadline_us > self._time_us:
            pieces = [piece for first, end in pairs(spans) for piece in ledger.pieces_of(lease, first, end)]
            if sum([end - first for first, end, _, _ in pieces]) == count(spans):
                return pieces, []
            had, taken = lease.spans, lease.taken
        elif lease is None and receipts.ended_well(number, self._time_us):
            pieces, had, taken = [], spans, receipts.taken_from(number)
        else:
            return [], spans
        settled = SpanSet()
        for first, end in pairs(had):
            settled.add(first, end)
        for first, end in pairs(taken):
            settled.cut(first, end)
        stale: list[tuple[int, int]] = []
        mine = [(first, end) for first, end, _, _ in pieces]
        for first, end in pairs(spans):
            for start, stop in without(first, end, mine):
                open_again = ledger.unsettled(start, stop)
                stale += without(start, stop, settled.intersect(start, stop))
                stale += [part for a, b in open_again for part in settled.intersect(a, b)]
        return pieces, flat(sorted(stale))

    # -------------------------------------------------------------------------------------- without receipts

    def expire(self) -> tuple[Fact, ...]:
        """Time out leases whose deadline has passed."""
        ledger, time_us = self._ledger, self._time_us
        ledger.backlog.advance(time_us)
        next_us = ledger.receipts.next_deadline_us()
        if next_us is None or next_us > time_us:
            return ()
        facts: list[Fact] = []
        gone = SpanSet()
        over = [lease for lease in ledger.receipts.live.values() if lease.deadline_us <= time_us]
        for lease in sorted(over, key=lambda lease: lease.deadline_us):
            left = [
                (start, stop, deliveries, failures)
                for first, end, deliveries, failures in ledger.left_of(lease)
                for start, stop in without(first, end, gone.intersect(first, end))
            ]
            if not left:
                continue
            known = self._lookup.of_lease(lease)
            spans = flat([(first, end) for first, end, _, _ in left])
            for first, end in pairs(spans):
                gone.add(first, end)
            left = self._bury(left, known, EXPIRY, facts)
            alive = flat([(first, end) for first, end, _, _ in left])
            keys, apart = self._lookup.row(known, alive), self._suspects(left, failed=1)
            facts.append(LeaseExpired(ledger.number, lease.id, time_us, keys, apart))
            facts += self._wear_out(left, EXPIRY)
            later = self._later(spans, known, gone)
            if later:
                facts.append(self._given_back(pairs(later)))
                for first, end in pairs(later):
                    gone.add(first, end)
        return tuple(facts)

    def give_back(
        self, leases: Iterable[LiveLease], error: str = "", *, ended: bool = True
    ) -> tuple[Fact, ...]:
        """Give back all messages of these leases without a failure. With an error, their holder had them and
        is gone, or lost them; without one, it never got them. `ended`: one of them may have ended the
        holder."""
        left = sorted(piece for lease in leases for piece in self._ledger.left_of(lease))
        if not left:
            return ()
        parts = [(first, end) for first, end, _, _ in left]
        if not error:
            return (self._given_back(parts, unstarted=True),)
        apart = self._suspects(left) if ended else ()
        return (self._given_back(parts, apart=apart), *self._wear_out(left, error))

    # --------------------------------------------------------------------------------------------- internals

    def _bury(self, pieces: Left, known: dict[int, int], error: str, facts: list[Fact]) -> Left:
        """Send messages that have failed too often to the dead letters; return the others."""
        last = self._ledger.policy.max_attempts - 1
        dying = flat([(first, end) for first, end, _, failures in pieces if failures >= last])
        if dying:
            number, keys = self._ledger.number, self._lookup.row(known, dying)
            facts.append(Dying(number, dying, MAX_ATTEMPTS, self._time_us, error, keys))
        return [piece for piece in pieces if piece[3] < last]

    def _wear_out(self, pieces: Left, error: str) -> list[Fact]:
        """Send messages that were delivered too often to the dead letters. They have left their leases by the
        fact before, so the end of the last delivery is recorded like that of any other."""
        limit = self._ledger.policy.max_deliveries
        dying = flat([(first, end) for first, end, deliveries, _ in pieces if 0 < limit <= deliveries])
        return [Dying(self._ledger.number, dying, MAX_DELIVERIES, self._time_us, error)] if dying else []

    def _suspects(self, pieces: Left, failed: int = 0) -> list[int]:
        """Spans of messages that may have ended their member, or were only held by it when it ended. From the
        third delivery on, or when one more would be the last, each is leased alone, so that none becomes a
        dead letter because of another. Messages that become dead letters now are left out."""
        policy = self._ledger.policy
        most = policy.max_deliveries or FOREVER
        spans = []
        for first, end, deliveries, failures in pieces:
            attempts_left = policy.max_attempts - failures - 1 if failed else FOREVER
            near = deliveries >= TOGETHER_MAX or min(most - deliveries, attempts_left) <= 1
            if near and deliveries < most:
                spans.append((first, end))
        return flat(spans)

    def _given_back(
        self, parts: Iterable[tuple[int, int]], *, unstarted: bool = False, apart: Sequence[int] = ()
    ) -> GivenBack:
        """The fact for leased messages, with their keys."""
        spans = flat(list(parts))
        known: dict[int, int] = {}
        if self._ledger.keyed:
            for number in self._holders(spans):
                known |= self._lookup.of_lease(self._ledger.receipts.live[number])
        keys = self._lookup.row(known, spans)
        return GivenBack(self._ledger.number, spans, self._time_us, keys, unstarted, list(apart))

    def _holders(self, spans: Sequence[int]) -> dict[int, None]:
        """The leases that hold some of these messages."""
        return {
            LEASED.unpack(value)[0]: None
            for first, end in pairs(spans)
            for _, _, value in self._ledger.leased.within(first, end)
        }

    def _later(self, failed: Sequence[int], known: dict[int, int], gone: SpanSet) -> list[int]:
        """Leased messages that have to come back with those that failed, because they come later in order."""
        ledger = self._ledger
        if ledger.policy.ordering == "partition":
            return flat(
                [
                    part
                    for first, end, _ in ledger.leased.since(failed[0])
                    for part in without(first, end, gone.intersect(first, end))
                ]
            )
        lowest: dict[int, int] = {}
        for first, end in pairs(failed) if known else ():
            for offset in range(first, end):
                if key := known.get(offset):
                    lowest.setdefault(key, offset)
        if not lowest:
            return []
        least = min(lowest.values())
        found = []
        for lease in list(ledger.receipts.live.values()):
            if lease.spans[-1] <= least:
                continue
            keys = self._lookup.of_lease(lease)
            if keys.keys() and not lowest.keys().isdisjoint(keys.values()):
                for first, end, _, _ in ledger.left_of(lease):
                    for offset in range(first, end):
                        low = lowest.get(keys.get(offset, 0))
                        if low is not None and offset > low and offset not in gone:
                            found.append(offset)
        return flat([(offset, offset + 1) for offset in sorted(found)])


def all_lost(command: Ack | Nack | GiveBack | RejectMessages | Extend, time_us: int) -> Settled | Extended:
    """The reply if the group is gone, and all receipts with it."""
    if isinstance(command, Ack | GiveBack):
        return Settled(list(command.leases))
    if isinstance(command, Extend):
        return Extended(time_us + command.lease_ms * 1000, list(command.leases))
    return Settled([(command.lease, command.spans)])
