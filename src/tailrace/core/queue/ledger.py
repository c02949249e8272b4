"""One group on one partition: the state of every message, and how each fact changes it.

Every message of the log is in one of these states; each fact moves messages from one to another:

    state      where it is kept                       reached by
    new        at or above `backlog.cursor`           (nothing: every message begins here)
    fresh      `backlog.fresh`                        a lease of later messages (it was passed over)
    leased     `leased`, with its lease               Leased
    waiting    `backlog.back`, with its due time      Nacked, LeaseExpired, GivenBack, Reopened
    dying      `backlog.dying`, with a reason         Dying
    settled    nowhere: below the cursor, in no set   Acked, Buried, Lapsed, OffsetsSettled

So settled messages take no room, and there is no separate record of acknowledgements. All sets are maps of
runs (`span_map`), so a batch of 5,000 neighbours costs what a single message does. The values of the runs are
packed structs: equal counters and times make one run.

Example: ada leases 100 messages of a log with 1,000, and then settles most of them.

    fact                                     cursor    leased              waiting             settled
    Leased, lease 7, spans [0, 100]          100       0-99                                    none
    Acked, lease 7, spans [0, 40, 60, 100]   100       40-59                                   0-39, 60-99
    Nacked, spans [40, 41]                   100       41-59               40, due in 0.5-1 s  as before
    LeaseExpired, lease 7                    100                           40, 41-59           as before

Then the first unsettled offset (`committed`) is 40. Message 40 has had 1 delivery and 1 failure; so have 41
to 59, which are due at once, because a lease that times out waits for no back-off. After a nack, each run of
messages gets one due time, from the back-off of its first offset: a hash of group, offset and number of
failures serves as dice, so that a replay of the log computes the same time again.

Facts are trusted: whether something may happen was decided before. Nothing here looks at a clock or into a
frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct

import mmh3
import msgspec

from tailrace.core.collections.span_map import Runs, SpanSet, count, flat, pairs
from tailrace.core.collections.string_pool import StringPool
from tailrace.core.core_tuning import FEW_BOUNDS, NEAR
from tailrace.core.model import facts
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.queue.apart import Apart
from tailrace.core.queue.backlog import BACK, DYING, Backlog
from tailrace.core.queue.in_flight import InFlight
from tailrace.core.queue.leases import GroupLeases, KeyRuns, LiveLease
from tailrace.core.selection.row_selector import RowSelector


def back_off_us(policy: GroupPolicy, group: str, offset: int, failures: int) -> int:
    """The delay after a failure: between half and the whole of the policy's back-off, by the hash of this
    failure."""
    longest_us = 1000 * min(policy.backoff_ms << min(failures - 1, 40), policy.backoff_max_ms)
    dice: int = mmh3.hash(f"{group}/{offset}/{failures}", 0, signed=False)
    return longest_us - (longest_us // 2) * dice // 0xFFFFFFFF


LEASED = Struct("<QIIQ")
"""Lease, deliveries, failures, time of the first delivery."""

Piece = tuple[int, int, int, int, int, int, str, int]
"""A run of messages that leaves its state: first, end, deliveries, failures, times of the first and last
delivery, last member, key (0: none or not known)."""

MAX_ATTEMPTS, MAX_DELIVERIES = "max_attempts", "max_deliveries"


class Counters(msgspec.Struct, array_like=True):
    """Numbers of messages since the group was enlisted, by event."""

    deliveries: int = 0
    failures: int = 0
    acked: int = 0
    dead_lettered: int = 0
    lapsed: int = 0
    collected: int = 0
    purged: int = 0

    def delivered(self, many: int) -> None:
        """Messages were leased; a negative number: no handler got them."""
        self.deliveries += many

    def failed(self, many: int) -> None:
        """Messages failed."""
        self.failures += many

    def settled_by_ack(self, many: int) -> None:
        """Messages were acknowledged."""
        self.acked += many

    def buried(self, many: int) -> None:
        """Messages became dead letters."""
        self.dead_lettered += many

    def expired(self, many: int) -> None:
        """Messages expired."""
        self.lapsed += many

    def vanished(self, many: int) -> None:
        """Messages were trimmed or lost."""
        self.collected += many

    def settled_by_hand(self, many: int) -> None:
        """An operator settled messages."""
        self.purged += many


class Ledger:
    """The state of one group. Only the methods for facts change it."""

    def __init__(self, number: int, name: str, policy: GroupPolicy, start: int) -> None:
        self.number = number
        self.name = name
        self.policy = policy
        self.member = ""
        self.generation = 0
        self.sharing = policy.assignment == "shared"
        """Whether every member of the group may lease here, and not only the owner of the partition."""
        self.paused = False
        self.id = 0
        """Tells the group from earlier and later ones of the same name."""
        self.counters = Counters()
        self.backlog = Backlog()
        self.backlog.clear(start)
        self.leased = Runs()
        self.receipts = GroupLeases()
        self.in_flight = InFlight()
        self.texts = StringPool()
        self.apart = Apart()
        """Waiting messages that may have ended the members that held them."""
        self.pool: RowSelector | None = None
        """Selection row by row. Made when first needed; every change is reported to it from then on."""
        self.keys_of_lease: dict[int, dict[int, int]] = {}
        """Keys of leased messages by lease, as found in frames after a failure. A cache, not state."""

    # ------------------------------------------------------------------------------------------- questions

    @property
    def cursor(self) -> int:
        """Nothing at or above it was ever leased or settled."""
        return self.backlog.cursor

    @property
    def keyed(self) -> bool:
        """Whether messages of one key keep their order."""
        return self.policy.ordering == "key"

    @property
    def divided(self) -> bool:
        """Whether keys in flight matter: several members may lease here, or a member other than the owner
        still has leases from a time when several could."""
        return self.sharing or len(self.in_flight) > (self.member in self.in_flight)

    def committed(self) -> int:
        """The first unsettled offset."""
        backlog = self.backlog
        lowest = backlog.cursor
        for runs in (backlog.fresh, self.leased, backlog.back, backlog.dying):
            if runs:
                first = runs.first
                if first is not None and first < lowest:
                    lowest = first
        return lowest

    def free(self, end_offset: int, time_us: int) -> int:
        """How many messages below an offset are due and not leased. Messages never delivered all count, also
        where they wait for another of their key."""
        backlog = self.backlog
        if backlog.back:
            backlog.advance(max(time_us, backlog.clock_us))
        many = backlog.fresh.total + backlog.ready.total + backlog.renewed.total
        if self.apart:  # Those that starve are among the ready ones.
            many += self.apart.starving_after(backlog.clock_us)
        return many + end_offset - backlog.cursor if end_offset > backlog.cursor else many

    def came_due(self, time_us: int) -> int | None:
        """How many messages have become available by time alone since this was asked last; None: more may go
        with them, as one member leases here and takes what waits behind them, too."""
        many = self.backlog.told_due(max(time_us, self.backlog.clock_us))
        return many if self.sharing else None

    def suspects(self) -> Iterator[tuple[int, int, int, int]]:
        """Messages that are set apart, least delivered first: (deliveries, offset, failures, key), one for
        each run. Nothing may change during iteration."""
        for first, end in self.apart:
            for start, _, value in self.backlog.back.since(first):
                if start >= end:
                    break
                deliveries, failures, _, _, _, _, key = BACK.unpack(value)
                yield deliveries, start, failures, key

    def unsettled(self, first: int, end: int) -> list[tuple[int, int]]:
        """Spans in [first, end) that are not settled."""
        backlog = self.backlog
        found = [
            (start, stop)
            for runs in (backlog.fresh, self.leased, backlog.back, backlog.dying)
            for start, stop, _ in runs.within(first, end)
        ]
        if end > backlog.cursor:
            found.append((max(first, backlog.cursor), end))
        return sorted(found)

    def pieces_of(self, lease: LiveLease, first: int, end: int) -> list[tuple[int, int, int, int]]:
        """Runs that a lease still holds in [first, end): (first, end, deliveries, failures)."""
        found = []
        for start, stop, value in self.leased.within(first, end):
            number, deliveries, failures, _ = LEASED.unpack(value)
            if number == lease.id:
                found.append((start, stop, deliveries, failures))
        return found

    def left_of(self, lease: LiveLease) -> list[tuple[int, int, int, int]]:
        """All runs that a lease still holds."""
        return [piece for first, end in pairs(lease.spans) for piece in self.pieces_of(lease, first, end)]

    def next_due_us(self) -> int | None:
        """When the next lease times out or the next message becomes due."""
        deadline_us, due_us = self.receipts.next_deadline_us(), self.backlog.next_due_us()
        if deadline_us is None or due_us is None:
            return deadline_us if due_us is None else due_us
        return min(deadline_us, due_us)

    # ---------------------------------------------------------------------- the view of the pool (LedgerView)

    def fresh_spans(self, first: int, end: int) -> Iterable[tuple[int, int]]:
        """Spans below the cursor that were never delivered, ascending, clipped to [first, end)."""
        fresh = self.backlog.fresh
        return fresh.spans(first, end) if end - first > NEAR else fresh.intersect(first, end)

    def back_rows(self) -> Iterable[tuple[int, int, int, Sequence[int]]]:
        """(first, end, due_us, keys) of runs that wait for another delivery."""
        for first, end, value in self.backlog.back:
            due_us, key = BACK.unpack(value)[5:]
            yield first, end, due_us, [key] * (end - first) if self.keyed else ()

    def leased_rows(self) -> Iterable[tuple[str, int, int, Sequence[int]]]:
        """(member, first, end, keys) of runs in flight."""
        for lease in self.receipts.live.values():
            places, at = {}, 0
            for first, end in pairs(lease.spans):
                places[first] = at
                at += end - first
                for start, stop, _, _ in self.pieces_of(lease, first, end):
                    place = places[first] + start - first
                    yield lease.member, start, stop, lease.keys[place : place + stop - start]

    def dying_rows(self) -> Iterable[tuple[int, int, Sequence[int]]]:
        """(first, end, keys) of runs on their way to the dead letters."""
        for first, end, value in self.backlog.dying:
            key = DYING.unpack(value)[5]
            yield first, end, [key] * (end - first) if self.keyed else ()

    # --------------------------------------------------------------------------------------------- leases

    def lease(self, fact: facts.Leased) -> None:
        """Messages are leased to a member."""
        spans, time_us = fact.spans, fact.time_us
        many = count(spans)
        self.receipts.open(
            LiveLease(fact.lease, fact.member, fact.deadline_us, time_us, spans, many, fact.keys)
        )
        self.in_flight.add(fact.member, many)
        self.counters.delivered(many)
        first_time = LEASED.pack(fact.lease, 1, 0, time_us)
        taken = 0
        again: Iterable[tuple[int, int]] = pairs(spans)
        if len(spans) > FEW_BOUNDS:
            again, new = self.backlog.apart(spans)
            if new:
                taken = self.backlog.take_many(new)
                self.leased.put_many(new, first_time)
        for first, end in again:
            if self.backlog.back and first < self.backlog.cursor:
                for start, stop, deliveries, failures, first_us, *_ in self._from_back(first, end):
                    value = LEASED.pack(fact.lease, deliveries + 1, failures, first_us or time_us)
                    self.leased.put(start, stop, value)
                    taken += stop - start
            for start, stop in self.backlog.take_new(first, end):
                self.leased.put(start, stop, first_time)
                taken += stop - start
        assert taken == many, f"{many} leased, {taken} of them were free"
        if self.pool is not None:
            self.pool.leased(fact.member, spans, fact.keys)

    def extend(self, fact: facts.LeaseExtended) -> None:
        """Leases get a new deadline."""
        for number in fact.leases:
            self.receipts.extend(self.receipts.live[number], fact.deadline_us)

    def expire(self, fact: facts.LeaseExpired) -> None:
        """A lease timed out: messages left in it have failed. None are left if the others died by a fact
        before."""
        lease = self.receipts.live.get(fact.lease)
        if lease is None:
            return
        spans = flat((first, end) for first, end, _, _ in self.left_of(lease))
        self._fail(spans, fact.keys, 0, fact.time_us, fact.apart)

    def ack(self, fact: facts.Acked) -> None:
        """Messages are settled through their leases."""
        for number, spans in fact.leases:
            lease = self.receipts.live.get(number)
            if lease is None:  # The same lease twice in one request.
                continue
            many = self.leased.cut_many(spans)
            self.counters.settled_by_ack(many)
            self._leave(lease, many, fact.time_us)
            if self.pool is not None:
                self.pool.acked(spans)

    def nack(self, fact: facts.Nacked) -> None:
        """Messages failed and wait for another delivery."""
        self._fail(fact.spans, fact.keys, fact.delay_us, fact.time_us)

    def give_back(self, fact: facts.GivenBack) -> None:
        """Messages left their leases without a failure. If no handler got them, the delivery is not
        counted."""
        pieces = self._unlease(fact.spans, fact.keys, fact.time_us)
        if fact.unstarted:
            self.counters.delivered(-sum(piece[1] - piece[0] for piece in pieces))
            pieces = [_undelivered(piece) for piece in pieces]
            if self.pool is not None:
                self.pool.unstarted(fact.spans)
        self._return(pieces, 0, 0, fact.time_us, fact.apart)

    # ------------------------------------------------------------------------------------ ways to be settled

    def die(self, fact: facts.Dying) -> None:
        """Messages are on their way to the dead letters, from any state but settled."""
        failed = fact.reason == MAX_ATTEMPTS
        if failed:
            self.counters.failed(count(fact.spans))
        for piece in self._take(fact.spans, fact.keys, fact.time_us):
            first, end, deliveries, failures, first_us, last_us, member, key = piece
            many, texts = end - first, self.texts
            numbers = (
                texts.use(member, many),
                key,
                texts.use(fact.reason, many),
                texts.use(fact.error, many),
            )
            # Without a delivery, the time of dying tells this dead letter from another after a redrive.
            value = DYING.pack(deliveries, failures + failed, first_us, last_us or fact.time_us, *numbers)
            self.backlog.put_dying(first, end, value)
        if self.pool is not None:
            self.pool.dying(fact.spans)

    def bury(self, fact: facts.Buried) -> None:
        """Dead letters are written: the messages are settled."""
        self.counters.buried(self._drop_dying(fact.spans))
        if self.pool is not None:
            self.pool.settled(fact.spans)

    def lapse(self, fact: facts.Lapsed) -> None:
        """Messages expired."""
        self.counters.expired(self._settle(fact.spans, fact.time_us))

    def settle_offsets(self, fact: facts.OffsetsSettled) -> None:
        """An operator settled messages, in any state."""
        self.counters.settled_by_hand(self._settle(fact.spans, fact.time_us))

    def settled_anyhow(self, spans: Sequence[int], time_us: int) -> int:
        """Settle all messages of these spans, dying ones too; return how many were not settled."""
        return self._drop_dying(spans) + self._settle(spans, time_us)

    def lose(self, spans: Sequence[int], time_us: int) -> None:
        """Messages are lost by damage. A stream is not changed: it reaches them by itself and is informed."""
        if self.policy.mode != "stream":
            self.counters.vanished(self.settled_anyhow(spans, time_us))

    def trimmed(self, offset: int) -> None:
        """The log was trimmed up to an offset: everything below it is settled."""
        first = self.committed()
        if first >= offset:
            return
        spans = flat(self.unsettled(first, offset))
        dying = self._drop_dying(spans)
        self.counters.vanished(dying + self._settle(spans, 0))

    # ---------------------------------------------------------------------------------------- administration

    def grant(self, fact: facts.Granted) -> None:
        """The partition gets another owner, or all members share it; see `facts.Granted`."""
        if not fact.kept:
            spans = flat((first, end) for first, end, _ in self.leased)
            self._return(self._unlease(spans, [], fact.time_us), 0, 0, fact.time_us)
        self.member, self.generation, self.sharing = fact.member, fact.generation, fact.shared

    def pause(self, fact: facts.GroupPaused) -> None:
        """Leasing pauses or resumes."""
        self.paused = fact.paused

    def reset(self, fact: facts.GroupReset) -> None:
        """The group starts again from an offset."""
        self.backlog.clear(fact.offset)
        self.leased.clear()
        self.receipts.clear()
        self.texts.clear()
        self.apart.clear()
        self.in_flight.end()
        self.keys_of_lease.clear()
        self.generation = fact.generation
        if self.pool is not None:
            self.pool.forget()

    def reopen(self, fact: facts.Reopened) -> None:
        """Settled messages are redriven: they wait again, with counters at zero. Receipts for them are stale
        from now on."""
        keys = KeyRuns(fact.keys)
        for first, end in pairs(fact.spans):
            for start, stop, key in keys.runs(first, end):
                value = BACK.pack(0, 0, 0, 0, 0, fact.time_us, key)
                self.backlog.put_back(start, stop, value, fact.time_us)
        for lease in self.receipts.live.values():
            for first, end in pairs(lease.spans):
                for start, stop in pairs(fact.spans):
                    if start < end and stop > first:
                        lease.taken += (max(first, start), min(end, stop))
        if self.pool is not None:
            self.pool.returned([(first, end, fact.time_us) for first, end in pairs(fact.spans)])

    def move_cursor(self, fact: facts.CursorMoved) -> None:
        """A stream has committed an offset."""
        self.backlog.clear(fact.offset)

    def change_policy(self, policy: GroupPolicy, time_us: int) -> None:
        """The group gets other options. Earlier decisions stay."""
        self.policy = policy
        self.backlog.rebuild(time_us)
        self.pool = None

    # --------------------------------------------------------------------------------------------- internals

    def _leave(self, lease: LiveLease, many: int, time_us: int) -> None:
        """Count messages that left a lease; end the lease when none is left."""
        lease.left -= many
        self.in_flight.add(lease.member, -many)
        if not lease.left:
            self.receipts.end(lease, time_us)
            if self.keys_of_lease:
                self.keys_of_lease.pop(lease.id, None)

    def _unlease(self, spans: Sequence[int], keys: Sequence[int], time_us: int) -> list[Piece]:
        """Take messages away from the leases that hold them. `keys` has one for each message in the spans."""
        found: list[Piece] = []
        known = KeyRuns(keys)
        for first, end in pairs(spans):
            pieces = self.leased.cut(first, end)
            at = first
            for start, stop, value in pieces:
                number, deliveries, failures, first_us = LEASED.unpack(value)
                lease = self.receipts.live[number]
                lease.taken += (start, stop)
                known.skip(start - at)
                for a, b, key in known.runs(start, stop):
                    found.append((a, b, deliveries, failures, first_us, lease.time_us, lease.member, key))
                at = stop
                self._leave(lease, stop - start, time_us)
            known.skip(end - at)
        return found

    def _from_back(self, first: int, end: int) -> list[Piece]:
        """Take messages out of those that wait."""
        found: list[Piece] = []
        for start, stop, value in self.backlog.take_back(first, end):
            deliveries, failures, first_us, last_us, member, due_us, key = BACK.unpack(value)
            if self.apart:
                self.apart.cut(start, stop, deliveries, due_us)
            found.append((start, stop, deliveries, failures, first_us, last_us, self.texts[member], key))
            self.texts.drop(member, stop - start)
        return found

    def _take(self, spans: Sequence[int], keys: Sequence[int], time_us: int) -> list[Piece]:
        """Take messages out of any state but dying."""
        found = self._unlease(spans, keys, time_us) if self.leased else []
        known = KeyRuns(keys)
        for first, end in pairs(spans):
            if self.backlog.back:
                found += self._from_back(first, end)
            at = first
            for start, stop in self.backlog.take_new(first, end):
                known.skip(start - at)
                found += [(a, b, 0, 0, 0, 0, "", key) for a, b, key in known.runs(start, stop)]
                at = stop
            known.skip(end - at)
        return found

    def _settle(self, spans: Sequence[int], time_us: int) -> int:
        pieces = self._take(spans, [], time_us)
        if self.pool is not None:
            self.pool.settled(spans)
        return sum(piece[1] - piece[0] for piece in pieces)

    def _drop_dying(self, spans: Sequence[int]) -> int:
        many = 0
        for first, end in pairs(spans):
            for start, stop, value in self.backlog.take_dying(first, end):
                _, _, _, _, member, _, reason, error = DYING.unpack(value)
                for number in (member, reason, error):
                    self.texts.drop(number, stop - start)
                many += stop - start
        return many

    def _fail(
        self,
        spans: Sequence[int],
        keys: Sequence[int],
        delay_us: int,
        time_us: int,
        apart: Sequence[int] = (),
    ) -> None:
        pieces = self._unlease(spans, keys, time_us)
        self.counters.failed(sum(piece[1] - piece[0] for piece in pieces))
        self._return(pieces, 1, delay_us, time_us, apart)

    def _return(
        self,
        pieces: Iterable[Piece],
        failed: int,
        delay_us: int,
        time_us: int,
        apart: Sequence[int] = (),
    ) -> None:
        """Messages wait for another delivery, for `delay_us` or (-1) for the policy's back-off. Messages in
        `apart` are due only when they starve; until then they go to members that ask for them alone."""
        returned = []
        alone = SpanSet()
        for first, end in pairs(apart):
            alone.add(first, end)
        for first, end, deliveries, failures, first_us, last_us, member, key in pieces:
            failures += failed
            due_us = time_us + (
                back_off_us(self.policy, self.name, first, failures) if delay_us < 0 else delay_us
            )
            if apart and first in alone:
                due_us = time_us + self.policy.starvation_ms * 1000
                self.apart.add(first, end, deliveries, due_us)
            number = self.texts.use(member, end - first)
            value = BACK.pack(deliveries, failures, first_us, last_us, number, due_us, key)
            self.backlog.put_back(first, end, value, time_us)
            returned.append((first, end, due_us))
        if self.pool is not None and returned:
            self.pool.returned(returned)


def _undelivered(piece: Piece) -> Piece:
    """The same messages without their last delivery."""
    first, end, deliveries, failures, first_us, last_us, member, key = piece
    if deliveries == 1:
        return first, end, 0, failures, 0, 0, "", key
    return first, end, deliveries - 1, failures, first_us, last_us, member, key
