"""The decision on a lease request: how many messages the member may have, and which."""

from __future__ import annotations

from itertools import repeat

import msgspec
import numpy as np

from tailrace.core.collections.span_map import flat
from tailrace.core.model.commands import Done
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.facts import Dying, Fact, Lapsed, Leased
from tailrace.core.model.group_options import RANGES
from tailrace.core.model.identifiers import PRIORITY_DEFAULT, Refusal, Times
from tailrace.core.model.internal_commands import LeaseRun, RunLeased
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.queue.backlog import BACK
from tailrace.core.queue.frame_index import FrameIndex
from tailrace.core.queue.ledger import Ledger
from tailrace.core.queue.row_lookup import KeyLookup, key_at
from tailrace.core.queue.run_selector import RunSelector
from tailrace.core.selection.row_selector import RowSelector, Want
from tailrace.errors import Fenced, InvalidRequest

LEASE_MS_MAX = RANGES["lease_ms"][1]
"""The longest time of a lease and of an extension: the same as for the option of a group."""
EXPIRED = "expired"

NOTHING_NOW = Decision(NOTHING, Done())

Runs = list[tuple[int, int, int, int]]
"""First, end, deliveries and failures so far, in the order of delivery."""
Told = tuple[list[tuple[int, int, int, int]], list[int]]
"""`runs` and `spans` of `RunLeased`."""


def fenced(ledger: Ledger, member: str, generation: int) -> Refusal | None:
    """Why a member may not act for the group now; None if it may."""
    if generation == ledger.generation and (ledger.member == member or ledger.sharing):
        return None
    text = f"generation {generation} of {member!r} is over: it is {ledger.generation}"
    if generation == ledger.generation:
        text = f"generation {generation} does not belong to {member!r}"
    return Refusal(Fenced.code, text, details={"generation": ledger.generation})


class LeaseDecision:
    """One request of one member."""

    __slots__ = ("_at_hand", "_command", "_ledger", "_time_us", "_traits", "_wall_us")

    def __init__(self, ledger: Ledger, command: LeaseRun, traits: FrameIndex, turn: TurnInput) -> None:
        self._ledger = ledger
        self._command = command
        self._traits = traits
        self._at_hand = turn.frames
        self._time_us = turn.now_us
        self._wall_us = turn.wall_us

    def decide(self) -> Decision:
        """Lease messages that the member may have now, from cached frames."""
        ledger, command, traits = self._ledger, self._command, self._traits
        problem = fenced(ledger, command.member, command.generation) or self._unfit()
        if problem is not None:
            return Decision(NOTHING, problem)
        room = self._room()
        if room <= 0:
            return NOTHING_NOW
        backlog = ledger.backlog
        if command.alone:
            return self._alone()
        if self._is_careful():
            return self._careful(room)
        if ledger.pool is not None and ledger.pool.for_keys and not ledger.divided:
            ledger.pool = None  # The partition has one member again: keys in flight do not matter.
        if command.above <= PRIORITY_DEFAULT:
            return NOTHING_NOW  # All messages have the default priority, or priority does not matter.
        if command.sharers > 1:
            room = min(room, self._share(ledger.free(command.end_offset, self._time_us)))
        cursor = backlog.cursor
        if self._is_mixed(cursor):
            chosen = RunSelector(ledger, traits, self._at_hand, self._time_us, self._wall_us)
            chosen.select(room, command.bytes_max, command.end_offset)
            return self._decision(_told(chosen.runs), [], chosen.lapsed, chosen.missing)
        if cursor >= command.end_offset:
            return NOTHING_NOW
        end = min(self._at_hand.reach(cursor, command.bytes_max), cursor + room, command.end_offset)
        if end <= cursor:
            return Decision(NOTHING, Done(), missing=cursor)
        return self._decision(([(cursor, end - cursor, 1, 0)], [cursor, end]), [], [], None)

    def _alone(self) -> Decision:
        """Lease one message that is set apart: the least delivered of those that may go by the order."""
        ledger, command = self._ledger, self._command
        ledger.backlog.advance(self._time_us)
        for deliveries, offset, failures, key in ledger.suspects():
            if self._is_first(offset, key):
                chosen = RunSelector(ledger, self._traits, self._at_hand, self._time_us, self._wall_us)
                chosen.only(offset, deliveries, failures, key, command.bytes_max)
                keys = [key] * len(chosen.runs) if self._is_careful() else []
                return self._decision(_told(chosen.runs), keys, chosen.lapsed, chosen.missing)
        return NOTHING_NOW

    def _is_first(self, offset: int, key: int) -> bool:
        """Whether no message has to go before this one, which was delivered before, and no member has its
        key."""
        ledger, backlog = self._ledger, self._ledger.backlog
        if ledger.policy.ordering == "partition":
            return ledger.committed() == offset
        if not key:
            return True
        if backlog.waits_behind(key, offset):
            return False
        if any(older < offset and older in backlog.fresh for older in backlog.held.get(key, ())):
            return False
        lookup = KeyLookup(ledger, self._traits, self._at_hand)
        for lease in ledger.receipts.live.values():
            known = lookup.of_lease(lease)
            if key in known.values() and any(
                its_key == key and other in ledger.leased for other, its_key in known.items()
            ):
                return False
        return True

    def _is_mixed(self, cursor: int) -> bool:
        """Whether any message other than the next ones of the log may have to go, be passed over or wait.
        Messages that wait and are not due yet do not matter, unless they hold others."""
        backlog = self._ledger.backlog
        if backlog.back:
            backlog.advance(self._time_us)
        return bool(
            backlog.fresh
            or backlog.ready
            or backlog.renewed
            or backlog.blockers
            or backlog.scanned > cursor
            or self._traits.ending(cursor)
            or ((backlog.back or backlog.dying) and self._ledger.policy.ordering == "partition")
        )

    def _share(self, free: int) -> int:
        """The share of one of the waiting members in the free messages: at least one."""
        return max(1, -(-free // self._command.sharers))

    # ------------------------------------------------------------------------------------------- who may what

    def _unfit(self) -> Refusal | None:
        command = self._command
        problem = None
        if command.count_max < 1:
            problem = f"count_max is at least 1, not {command.count_max}"
        elif command.bytes_max < 1:
            problem = f"bytes_max is at least 1, not {command.bytes_max}"
        elif command.lease_ms is not None and not 1 <= command.lease_ms <= LEASE_MS_MAX:
            problem = f"lease_ms is from 1 to {LEASE_MS_MAX}, not {command.lease_ms}"
        elif self._ledger.policy.mode == "stream":
            problem = f"group {self._ledger.name!r} is a stream: it commits offsets and leases nothing"
        return None if problem is None else Refusal(InvalidRequest.code, problem)

    def _room(self) -> int:
        """How many more messages the member may have now."""
        ledger, policy, member = self._ledger, self._ledger.policy, self._command.member
        if ledger.paused:
            return 0
        flying = ledger.in_flight
        if policy.ordering == "partition" and flying and member not in flying:
            return 0
        return min(
            self._command.count_max,
            policy.in_flight_max - flying.get(member, 0),
            policy.group_in_flight_max - ledger.leased.total,
        )

    def _is_careful(self) -> bool:
        """Whether lanes or keys in flight matter: then messages are selected row by row."""
        ledger, traits = self._ledger, self._traits
        if ledger.policy.ordering == "partition":
            return False
        shared_keys = ledger.keyed and ledger.divided
        if not (traits.laned(0) or (shared_keys and traits.keyed(0))):
            return False
        committed = ledger.committed()
        return traits.laned(committed) or (shared_keys and traits.keyed(committed))

    # --------------------------------------------------------------------------------------------- outcomes

    def _careful(self, room: int) -> Decision:
        ledger, command = self._ledger, self._command
        if ledger.pool is None or self._time_us < ledger.backlog.clock_us:  # Its offers are of a later time.
            ledger.pool = RowSelector(ledger.policy)
        if ledger.pool.for_keys and self._traits.laned(ledger.committed()):
            ledger.pool.lanes_matter()
        ledger.backlog.advance(self._time_us)
        keyed = ledger.keyed and self._traits.keyed(ledger.committed())
        times = self._time_us, self._wall_us
        want = Want(command.member, room, command.bytes_max, command.end_offset, *times, keyed, command.above)
        chosen = ledger.pool.select(want, ledger, self._traits, self._at_hand)
        if command.sharers > 1 and len(chosen.offsets) > 1:
            # If it found fewer than the member may have, there are no more for it; else there may be.
            found = len(chosen.offsets)
            free = found if found < room else max(found, ledger.free(command.end_offset, self._time_us))
            share = self._share(free)
            if share < found:
                want = msgspec.structs.replace(want, count_max=share)
                chosen = ledger.pool.select(want, ledger, self._traits, self._at_hand)
        lapsed = [(offset, 0) for offset in chosen.lapsed]
        if chosen.lapsed and keyed and ledger.policy.expired_to_dlq:
            keys = [key_at(self._at_hand, offset) for offset in chosen.lapsed]
            lapsed = list(zip(chosen.lapsed, keys, strict=True))
        offsets = chosen.offsets
        told = _told(self._runs(offsets)) if ledger.backlog.back or not offsets else _told_fresh(offsets)
        return self._decision(told, chosen.keys, lapsed, chosen.missing)

    def _runs(self, offsets: list[int]) -> Runs:
        """Offsets in the order of delivery, as runs with their counters so far."""
        back, runs = self._ledger.backlog.back, Runs()
        first = end = deliveries = failures = -1
        for offset in offsets:
            run = back.at(offset)
            counters = (0, 0) if run is None else BACK.unpack(run[2])[:2]
            if offset == end and counters == (deliveries, failures):
                end += 1
                continue
            if end >= 0:
                runs.append((first, end, deliveries, failures))
            first, end, (deliveries, failures) = offset, offset + 1, counters
        if end >= 0:
            runs.append((first, end, deliveries, failures))
        return runs

    def _decision(
        self, told: Told, keys: list[int], lapsed: list[tuple[int, int]], missing: int | None
    ) -> Decision:
        """The facts of a selection; `keys` are those of the messages, in the order of delivery."""
        runs, spans = told
        if not runs and not lapsed:
            return NOTHING_NOW if missing is None else Decision(NOTHING, Done(), missing=missing)
        ledger, command, time_us = self._ledger, self._command, self._time_us
        facts: tuple[Fact, ...] = ()
        reply: RunLeased | Done = Done()
        if runs:
            lease_ms = ledger.policy.lease_ms if command.lease_ms is None else command.lease_ms
            deadline_us = time_us + lease_ms * 1000
            if any(keys):
                offsets = [offset for first, many, _, _ in runs for offset in range(first, first + many)]
                keys = list(map(keys.__getitem__, np.argsort(offsets, kind="stable").tolist()))
            else:
                keys = []
            facts = (Leased(ledger.number, command.lease, command.member, spans, deadline_us, time_us, keys),)
            reply = RunLeased(command.lease, deadline_us, runs, spans)
        if not lapsed:
            return Decision(facts, reply, soft=True)
        lapsed.sort()
        spans = flat([(offset, offset + 1) for offset, _ in lapsed])
        if ledger.policy.expired_to_dlq:
            dead = [key for _, key in lapsed]
            fact: Fact = Dying(ledger.number, spans, EXPIRED, time_us, "", dead if any(dead) else [])
        else:
            fact = Lapsed(ledger.number, spans, time_us)
        return Decision((*facts, fact), reply)


def _told(runs: Runs) -> Told:
    told = [(first, end - first, tries + 1, failures) for first, end, tries, failures in runs]
    return told, flat(sorted([(first, end) for first, end, _, _ in runs]))


def _told_fresh(offsets: list[int]) -> Told:
    """`_told` for one or more messages that were never delivered. From lanes they come in hundreds of
    runs."""
    rows = np.array(offsets, np.int64)
    firsts, ends = _edges(rows)
    runs = list(zip(firsts.tolist(), (ends - firsts).tolist(), repeat(1), repeat(0)))
    spans: list[int] = np.stack(_edges(np.sort(rows)), axis=1).ravel().tolist()
    return runs, spans


def _edges(rows: Times) -> tuple[Times, Times]:
    """Firsts and ends of the runs in which offsets follow each other."""
    breaks = np.flatnonzero(rows[1:] - rows[:-1] != 1)
    firsts, lasts = np.concatenate((rows[:1], rows[breaks + 1])), np.concatenate((rows[breaks], rows[-1:]))
    return firsts, lasts + 1
