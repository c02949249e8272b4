"""The groups of one partition: decides every command on queues, and applies every fact of delivery."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from tailrace.core.collections.hash_table import Buffer
from tailrace.core.collections.span_map import count, flat, pairs, without
from tailrace.core.log_head import LogHead
from tailrace.core.lost_offsets import LostOffsets
from tailrace.core.model import facts
from tailrace.core.model import internal_commands as inner
from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import Done
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.queue import ledger_snapshot
from tailrace.core.queue.command_rules import problem_with
from tailrace.core.queue.frame_index import FrameIndex
from tailrace.core.queue.hold_decision import hold
from tailrace.core.queue.in_flight import GroupSums
from tailrace.core.queue.lease_decision import LeaseDecision, fenced
from tailrace.core.queue.ledger import Ledger
from tailrace.core.queue.ledger_stats import Dead, dead_of, figures_of, held_of, unsettled_of
from tailrace.core.queue.row_lookup import FrameMissing, KeyLookup, RowLookup
from tailrace.core.queue.settle_decision import MEMBER_GONE, SettleDecision, all_lost
from tailrace.errors import Fenced, InvalidRequest, NotFound, Unavailable

DONE = Decision(NOTHING, Done())
Settling = wire.Ack | wire.Nack | wire.GiveBack | wire.RejectMessages | wire.Extend
ANEW_US = 1
"""A reset or redrive is stamped 1 µs later, so that a second dead letter of the same message gets another
dedup id even if the clock did not move."""


class _QueuesHead(msgspec.Struct, frozen=True, array_like=True):
    """The head of the ledgers in a snapshot."""

    next_number: int


class GroupQueues:
    """The groups of one partition. `decide` only reads (and fills caches), `apply` is the only mutator."""

    COMMANDS: tuple[type, ...] = (
        *(
            wire.Ack,
            wire.Nack,
            wire.GiveBack,
            wire.RejectMessages,
            wire.Extend,
            wire.Reopen,
            wire.SettleOffsets,
        ),
        inner.LeaseRun,
        inner.HoldRun,
        inner.Enlist,
        inner.Delist,
        inner.ReportGroup,
        inner.GrantTo,
        inner.EvictMember,
        inner.PauseLeases,
        inner.ResetTo,
        inner.MoveCursor,
        inner.ExpireLeases,
        inner.BuryDone,
    )
    FACTS: tuple[type, ...] = facts.DeliveryFact.__args__

    def __init__(self, head: LogHead, lost: LostOffsets) -> None:
        self._head = head
        self._lost = lost
        self._ledgers: dict[str, Ledger] = {}
        self._by_number: dict[int, Ledger] = {}
        self._next_number = 1
        self._sums: GroupSums | None = None
        self.traits = FrameIndex()
        self._originals = RowLookup(self.traits)
        self._decide: dict[type, Callable[[Any, TurnInput], Decision]] = {
            inner.LeaseRun: self._lease,
            wire.Ack: self._settle,
            wire.Nack: self._settle,
            wire.GiveBack: self._settle,
            wire.RejectMessages: self._settle,
            wire.Extend: self._settle,
            wire.Reopen: self._reopen,
            wire.SettleOffsets: self._settle_offsets,
            inner.HoldRun: self._hold,
            inner.Enlist: self._enlist,
            inner.Delist: self._delist,
            inner.ReportGroup: self._report,
            inner.GrantTo: self._grant,
            inner.EvictMember: self._evict,
            inner.PauseLeases: self._pause,
            inner.ResetTo: self._reset,
            inner.MoveCursor: self._move_cursor,
            inner.ExpireLeases: self._expire,
            inner.BuryDone: self._bury,
        }
        self._apply: dict[type, Callable[[Ledger, Any], None]] = {
            facts.Granted: Ledger.grant,
            facts.Leased: Ledger.lease,
            facts.LeaseExtended: Ledger.extend,
            facts.LeaseExpired: Ledger.expire,
            facts.Acked: Ledger.ack,
            facts.Nacked: Ledger.nack,
            facts.GivenBack: Ledger.give_back,
            facts.Dying: Ledger.die,
            facts.Buried: Ledger.bury,
            facts.Lapsed: Ledger.lapse,
            facts.CursorMoved: Ledger.move_cursor,
            facts.GroupReset: Ledger.reset,
            facts.Reopened: Ledger.reopen,
            facts.GroupPaused: Ledger.pause,
            facts.OffsetsSettled: Ledger.settle_offsets,
        }

    # ------------------------------------------------------------------------------------------- questions

    def names(self) -> list[str]:
        """The names of the groups, in the order of enlisting."""
        return list(self._ledgers)

    def numbers(self) -> dict[int, str]:
        """The names of the groups by the numbers that facts have for them."""
        return {number: ledger.name for number, ledger in self._by_number.items()}

    def policy(self, group: str) -> GroupPolicy | None:
        """The options of a group; None if it is not here."""
        ledger = self._ledgers.get(group)
        return None if ledger is None else ledger.policy

    def id_of(self, group: str) -> int | None:
        """The id of a group; None if it is not here."""
        ledger = self._ledgers.get(group)
        return None if ledger is None else ledger.id

    def grant(self, group: str) -> tuple[str, int] | None:
        """The owner of the partition and its generation; None if the group is not here."""
        ledger = self._ledgers.get(group)
        return None if ledger is None else (ledger.member, ledger.generation)

    def is_shared(self, group: str) -> bool:
        """Whether every member of the group may lease here."""
        ledger = self._ledgers.get(group)
        return ledger is not None and ledger.sharing

    def is_paused(self, group: str) -> bool:
        """Whether leasing is paused for a group."""
        return self._ledgers[group].paused

    def committed(self, group: str) -> int | None:
        """The first unsettled offset; None if the group is not here."""
        ledger = self._ledgers.get(group)
        return None if ledger is None else ledger.committed()

    def places(self) -> list[int]:
        """The first unsettled offset of each group."""
        return [ledger.committed() for ledger in self._ledgers.values()]

    def holders(self, group: str) -> Collection[str]:
        """The members that have messages in flight."""
        ledger = self._ledgers.get(group)
        return () if ledger is None else ledger.in_flight.keys()

    def free(self, group: str, end_offset: int, time_us: int) -> int:
        """How many messages below the committed end may be leased now, at most: some of them may have to wait
        for others of their key that are in flight."""
        ledger = self._ledgers.get(group)
        return 0 if ledger is None or ledger.paused else ledger.free(end_offset, time_us)

    def came_due(self, time_us: int) -> dict[str, int | None]:
        """By group, how many messages have become available by time alone; see `Ledger.came_due`."""
        return {ledger.name: ledger.came_due(time_us) for ledger in self._ledgers.values()}

    def apart(self, group: str) -> int | None:
        """The lowest number of deliveries among messages that are set apart; None if there are none, or the
        group is paused."""
        ledger = self._ledgers.get(group)
        return None if ledger is None or ledger.paused else ledger.apart.least

    def laned(self, group: str) -> bool:
        """Whether some unsettled message may have another priority than the default."""
        ledger = self._ledgers.get(group)
        return ledger is not None and self.traits.laned(ledger.committed())

    def held_back(self, group: str) -> bool:
        """Whether, since the last call, a member was refused urgent messages because their lane had more than
        its share."""
        ledger = self._ledgers.get(group)
        return ledger is not None and ledger.pool is not None and ledger.pool.held_back()

    def takers(self, group: str) -> Collection[str]:
        """Members that may have messages that others may not: with ordering=partition those with messages of
        the partition in flight; else those with messages of a key in flight, as far as they were not named
        before."""
        ledger = self._ledgers.get(group)
        if ledger is None:
            return ()
        if ledger.policy.ordering == "partition":
            return ledger.in_flight.keys()
        return () if ledger.pool is None else ledger.pool.takers()

    def figures(self, group: str) -> dict[str, Any]:
        """The stats of a group."""
        return figures_of(self._ledgers[group], self._head.end_offset)

    def dying(self, group: str, limit: int) -> list[Dead]:
        """The first `limit` messages of a group on their way to the dead letters."""
        return dead_of(self._ledgers[group], limit)

    def unsettled(self, group: str, offset: int, end: int, limit: int) -> list[int]:
        """The first `limit` unsettled messages of a group in [offset, end), flat; all if the group is not
        here."""
        ledger = self._ledgers.get(group)
        if ledger is None:
            return [offset, min(end, offset + limit)] if offset < end else []
        return unsettled_of(ledger, offset, end, limit)

    def next_due_us(self) -> int | None:
        """When the next lease times out or the next message becomes due, in any group."""
        dues = [due for ledger in self._ledgers.values() if (due := ledger.next_due_us()) is not None]
        return min(dues, default=None)

    def overdue(self, time_us: int) -> list[tuple[str, str]]:
        """The groups and members with leases whose deadline has passed, but which have not been timed out
        yet: each once, in the order of their leases."""
        found: dict[tuple[str, str], None] = {}
        for ledger in self._ledgers.values():
            next_us = ledger.receipts.next_deadline_us()
            if next_us is not None and next_us <= time_us:
                leases = ledger.receipts.live.values()
                over = [(ledger.name, lease.member) for lease in leases if lease.deadline_us <= time_us]
                found.update(dict.fromkeys(over))
        return list(found)

    # ---------------------------------------------------------------------------------------------- decide

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        """Decide a command. Only `expires_at` is compared with the wall clock."""
        try:
            return self._decide[type(command)](command, turn)
        except FrameMissing as missing:
            return Decision(NOTHING, Done(), missing=missing.offset)

    def _lease(self, command: inner.LeaseRun, turn: TurnInput) -> Decision:
        ledger = self._ledgers.get(command.group)
        if ledger is None:
            return Decision(NOTHING, self._unknown(command.group))
        return LeaseDecision(ledger, command, self.traits, turn).decide()

    def _hold(self, command: inner.HoldRun, turn: TurnInput) -> Decision:
        ledger = self._queue(command)
        return (
            Decision(NOTHING, ledger) if isinstance(ledger, Refusal) else hold(ledger, command, turn.now_us)
        )

    def _settle(self, command: Settling, turn: TurnInput) -> Decision:
        problem = problem_with(command)
        if problem is not None:
            return Decision(NOTHING, problem)
        ledger = self._ledgers.get(command.group)
        if ledger is None:
            return Decision(NOTHING, all_lost(command, turn.now_us))
        settlement = self._settlement(ledger, turn)
        if isinstance(command, wire.Ack):
            return settlement.ack(command)
        if isinstance(command, wire.Nack):
            return settlement.nack(command)
        if isinstance(command, wire.GiveBack):
            return settlement.give_back_unstarted(command)
        return (
            settlement.reject(command)
            if isinstance(command, wire.RejectMessages)
            else settlement.extend(command)
        )

    def _expire(self, command: inner.ExpireLeases, turn: TurnInput) -> Decision:
        found = [
            fact for ledger in self._ledgers.values() for fact in self._settlement(ledger, turn).expire()
        ]
        soft = not any(isinstance(fact, facts.Dying) for fact in found)
        return Decision(tuple(found), Done(), soft=soft) if found else DONE

    def _evict(self, command: inner.EvictMember, turn: TurnInput) -> Decision:
        ledger = self._ledgers.get(command.group)
        if ledger is None or command.member not in ledger.in_flight:
            return DONE
        held = frozenset(command.held or ())
        leases = [
            lease
            for lease in ledger.receipts.live.values()
            if lease.member == command.member and lease.id not in held
        ]
        why = MEMBER_GONE if command.held is None else ""
        found = self._settlement(ledger, turn).give_back(leases, why, ended=not command.left)
        return Decision(found, Done(), soft=len(found) == 1) if found else DONE

    def _reopen(self, command: wire.Reopen, turn: TurnInput) -> Decision:
        ledger = self._queue(command)
        if isinstance(ledger, Refusal):
            return Decision(NOTHING, ledger)
        start, end_offset = self._head.start_offset, self._head.end_offset
        gone = [(first, min(end, start)) for first, end in pairs(command.spans) if first < start]
        gone += self._lost.within(command.spans)
        here = [(max(first, start), min(end, end_offset)) for first, end in pairs(command.spans)]
        here = [(first, end) for first, end in here if first < end]
        if any(ledger.backlog.dying.within(first, end) for first, end in here):
            # Its dead letter may be readable already. If this succeeded, the dead letter would be taken off
            # the list, and then the message would be settled.
            text = "a message is still on its way to the dead letters: try again"
            return Decision(NOTHING, Refusal(Unavailable.code, text, details={"retry_after_ms": 100}))
        known = self._originals.look(flat(here), turn.frames, keyed=ledger.keyed)
        # An expired message would not be delivered again: it counts as gone, unless it is leased now.
        for first, end in here if any(expires_us for _, expires_us in known.values()) else ():
            busy = [run[:2] for run in ledger.leased.within(first, end)]
            for one, other in without(first, end, busy):
                over = [o for o in range(one, other) if 0 < known.get(o, (0, 0))[1] <= turn.wall_us]
                gone += [(offset, offset + 1) for offset in over]
        if gone:
            spans = flat(sorted(gone))
            text = f"{count(spans)} of the messages are gone: the partition begins at {start}"
            text += ", and some have expired or are lost" if spans[-1] > start else ""
            return Decision(NOTHING, Refusal(NotFound.code, text, details={"spans": spans}))
        settled = [without(first, end, ledger.unsettled(first, end)) for first, end in here]
        spans = flat([part for parts in settled for part in parts])
        if not spans:
            return DONE
        keys = self._lookup(ledger, turn).row({o: key for o, (key, _) in known.items() if key}, spans)
        return Decision((facts.Reopened(ledger.number, spans, turn.now_us + ANEW_US, keys),), Done())

    def _settle_offsets(self, command: wire.SettleOffsets, turn: TurnInput) -> Decision:
        ledger = self._queue(command)
        if isinstance(ledger, Refusal):
            return Decision(NOTHING, ledger)
        end_offset, dying = self._head.end_offset, ledger.backlog.dying
        spans = []
        for first, end in pairs(command.spans):
            for start, stop in ledger.unsettled(first, min(end, end_offset)) if first < end_offset else ():
                holes = [(one, other) for one, other, _ in dying.within(start, stop)]
                spans += without(start, stop, holes)
        if not spans:
            return DONE
        return Decision((facts.OffsetsSettled(ledger.number, flat(spans), turn.now_us),), Done())

    def _bury(self, command: inner.BuryDone, turn: TurnInput) -> Decision:
        ledger = self._ledgers.get(command.group)
        if ledger is None:
            return DONE
        spans, places, at = [], [], 0
        told = len(command.places) == 2 * count(command.spans)
        for first, end in pairs(command.spans):
            for start, stop, _ in ledger.backlog.dying.within(first, end):
                spans.append((start, stop))
                if told:
                    places += command.places[2 * (at + start - first) : 2 * (at + stop - first)]
            at += end - first
        if not spans:
            return DONE
        fact = facts.Buried(ledger.number, flat(spans), turn.now_us, command.topic, places)
        return Decision((fact,), Done())

    # -------------------------------------------------------------------------------------- administration

    def _enlist(self, command: inner.Enlist, turn: TurnInput) -> Decision:
        head, ledger = self._head, self._ledgers.get(command.group)
        if ledger is not None:
            if ledger.policy == command.policy and command.id in (0, ledger.id):
                return DONE
            number, id_ = ledger.number, command.id or ledger.id
            fact = facts.Enlisted(number, command.group, command.policy, ledger.cursor, turn.now_us, id_)
            return Decision((fact,), Done())
        start = command.start
        if start is None:
            latest = command.policy.start == "latest"
            start = head.end_offset if latest else head.start_offset
        problem = self._outside("start", start)
        if problem is not None:
            return Decision(NOTHING, problem)
        start = max(start, head.start_offset)
        fact = facts.Enlisted(
            self._next_number, command.group, command.policy, start, turn.now_us, command.id
        )
        return Decision((fact,), Done())

    def _delist(self, command: inner.Delist, turn: TurnInput) -> Decision:
        ledger = self._ledgers.get(command.group)
        if ledger is None or command.id not in (None, ledger.id):
            return DONE
        return Decision((facts.Delisted(ledger.number, turn.now_us + ANEW_US),), Done())

    def _report(self, command: inner.ReportGroup, turn: TurnInput) -> Decision:
        return Decision(NOTHING, held_of(self._ledgers.get(command.group), self._head.start_offset))

    def _grant(self, command: inner.GrantTo, turn: TurnInput) -> Decision:
        ledger = self._ledgers.get(command.group)
        if ledger is None:
            return Decision(NOTHING, self._unknown(command.group))
        have = ledger.member, ledger.generation, ledger.sharing
        if have == (command.member, command.generation, command.shared):
            return DONE
        # A reset raises the generation, so no member may have this one yet: then it can be given. Within a
        # generation, one member's partition can become shared, and a shared one can become one member's.
        same = command.generation == ledger.generation
        if command.generation < ledger.generation or (same and ledger.member and not command.shared):
            text = f"generation {command.generation} of {command.group!r} is over: it is {ledger.generation}"
            refusal = Refusal(Fenced.code, text, details={"generation": ledger.generation})
            return Decision(NOTHING, refusal)
        leases = list(ledger.receipts.live.values())
        lost = [] if same else [lease for lease in leases if ledger.sharing or lease.member == ledger.member]
        returned = self._settlement(ledger, turn).give_back(lost, MEMBER_GONE)
        kept = len(lost) < len(leases)
        grant = command.member, command.generation, turn.now_us, command.shared, kept
        return Decision((*returned, facts.Granted(ledger.number, *grant)), Done())

    def _pause(self, command: inner.PauseLeases, turn: TurnInput) -> Decision:
        ledger = self._ledgers.get(command.group)
        if ledger is None:
            return Decision(NOTHING, self._unknown(command.group))
        if ledger.paused == command.paused:
            return DONE
        return Decision((facts.GroupPaused(ledger.number, command.paused, turn.now_us),), Done())

    def _reset(self, command: inner.ResetTo, turn: TurnInput) -> Decision:
        ledger = self._ledgers.get(command.group)
        problem = self._outside("offset", command.offset)
        if ledger is None or problem is not None:
            return Decision(NOTHING, problem or self._unknown(command.group))
        offset = max(command.offset, self._head.start_offset)
        fact = facts.GroupReset(ledger.number, offset, ledger.generation + 1, turn.now_us + ANEW_US)
        return Decision((fact,), Done())

    def _move_cursor(self, command: inner.MoveCursor, turn: TurnInput) -> Decision:
        ledger = self._ledgers.get(command.group)
        if ledger is None:
            return Decision(NOTHING, self._unknown(command.group))
        problem = fenced(ledger, command.member, command.generation) or self._outside(
            "offset", command.offset
        )
        if problem is None and ledger.policy.mode != "stream":
            text = f"group {command.group!r} is no stream: its messages are settled one by one"
            problem = Refusal(InvalidRequest.code, text)
        if problem is not None:
            return Decision(NOTHING, problem)
        if command.offset == ledger.cursor:
            return DONE
        fact = facts.CursorMoved(ledger.number, command.member, command.offset, turn.now_us)
        return Decision((fact,), Done())

    def _lookup(self, ledger: Ledger, turn: TurnInput) -> KeyLookup:
        return KeyLookup(ledger, self.traits, turn.frames)

    def _settlement(self, ledger: Ledger, turn: TurnInput) -> SettleDecision:
        return SettleDecision(ledger, self._lookup(ledger, turn), turn.now_us)

    def _queue(self, command: wire.Reopen | wire.SettleOffsets | inner.HoldRun) -> Ledger | Refusal:
        """The ledger of a group that settles its messages one by one, or a refusal."""
        ledger = self._ledgers.get(command.group)
        if ledger is not None and ledger.policy.mode == "stream":
            return Refusal(InvalidRequest.code, f"group {command.group!r} is a stream: it settles nothing")
        return problem_with(command) or ledger or self._unknown(command.group)

    def _unknown(self, group: str) -> Refusal:
        return Refusal(NotFound.code, f"there is no group {group[:250]!r} on this partition")

    def _outside(self, field: str, offset: int) -> Refusal | None:
        if 0 <= offset <= self._head.end_offset:
            return None
        text = f"{field} {offset} is not in the partition, which ends at {self._head.end_offset}"
        return Refusal(InvalidRequest.code, text)

    # ----------------------------------------------------------------------------------------------- apply

    def apply(self, fact: Any) -> None:
        """Apply a fact."""
        self._head.pass_time(fact.time_us)
        kind = type(fact)
        if kind is facts.Enlisted:
            self._enlisted(fact)
            self._lose_again(self._by_number[fact.group], fact.time_us)
        elif kind is facts.Delisted:
            ledger = self._by_number.pop(fact.group)
            del self._ledgers[ledger.name]
            if self._sums is not None:
                self._sums.count_out(ledger.name, ledger.in_flight)
        else:
            ledger = self._by_number[fact.group]
            self._apply[kind](ledger, fact)
            if kind is facts.GroupReset:
                self._lose_again(ledger, fact.time_us)

    def find(self, number: int) -> Ledger | None:
        """The ledger of a group by its number."""
        return self._by_number.get(number)

    def missing(self, group: str, spans: Sequence[int]) -> list[tuple[int, int]]:
        """The parts of spans that a group has not settled; of a stream, those that are still ahead of it."""
        ledger = self._ledgers[group]
        return [part for first, end in pairs(spans) if first < end for part in ledger.unsettled(first, end)]

    def lost(self, spans: Sequence[int], time_us: int) -> None:
        """Messages are lost: unsettled ones among them count as collected."""
        for ledger in self._ledgers.values():
            ledger.lose(spans, time_us)

    def _lose_again(self, ledger: Ledger, time_us: int) -> None:
        """Apply known losses to a group that begins, or begins again, before them."""
        spans = self._lost.spans
        if spans and spans[-1] > ledger.committed():
            first = ledger.committed()
            ledger.lose(flat((max(a, first), b) for a, b in pairs(spans) if b > first), time_us)

    def _enlisted(self, fact: facts.Enlisted) -> None:
        ledger = self._by_number.get(fact.group)
        if ledger is not None:
            ledger.id = fact.id
            if ledger.policy != fact.policy:
                ledger.change_policy(fact.policy, fact.time_us)
            return
        ledger = Ledger(fact.group, fact.name, fact.policy, fact.start)
        ledger.id = fact.id
        self._ledgers[fact.name] = self._by_number[fact.group] = ledger
        self._next_number = max(self._next_number, fact.group + 1)
        if self._sums is not None:
            self._sums.count_in(ledger.name, ledger.in_flight)

    def count_in(self, sums: GroupSums) -> None:
        """Make messages in flight part of the sums over all partitions, from now on."""
        self._sums = sums
        for ledger in self._ledgers.values():
            sums.count_in(ledger.name, ledger.in_flight)

    def count_out(self) -> None:
        """Take messages in flight out of the sums: this state is replaced, or the partition is out of
        service."""
        sums, self._sums = self._sums, None
        if sums is not None:
            for ledger in self._ledgers.values():
                sums.count_out(ledger.name, ledger.in_flight)

    def appended(self, fact: facts.Appended) -> None:
        """A batch was appended: remember its columns for leasing."""
        self.traits.appended(fact.base_offset, fact.view)

    def trimmed(self, offset: int) -> None:
        """The partition was trimmed up to an offset: unsettled messages below it count as collected."""
        self.traits.trimmed(offset)
        for ledger in self._ledgers.values():
            ledger.trimmed(offset)

    # -------------------------------------------------------------------------------------------- snapshot

    def freeze(self) -> Callable[[], list[Buffer]]:
        """Capture the state now; the returned function encodes it for a snapshot later."""
        small: list[Buffer] = [msgspec.msgpack.encode(_QueuesHead(self._next_number)), *self.traits.buffers()]
        images = [ledger_snapshot.freeze(ledger) for ledger in self._ledgers.values()]
        return lambda: small + [column for image in images for column in image()]

    def buffers(self) -> list[Buffer]:
        """The state for a snapshot."""
        return self.freeze()()

    def load(self, columns: Sequence[memoryview]) -> None:
        """Restore the state from a snapshot; it may be from before there were groups."""
        if not columns:
            return
        self._next_number = msgspec.msgpack.decode(columns[0], type=_QueuesHead).next_number
        self.traits.load(columns[1], columns[2], self._head.end_offset)
        for at in range(3, len(columns), ledger_snapshot.COLUMNS):
            part = columns[at : at + ledger_snapshot.COLUMNS]
            ledger = ledger_snapshot.ledger_of(part, self._head.append_time_us)
            self._ledgers[ledger.name] = self._by_number[ledger.number] = ledger

    def verify(self) -> None:
        """Assert the invariants."""
        self.traits.verify()
        assert {ledger.number: ledger for ledger in self._ledgers.values()} == self._by_number
        for ledger in self._ledgers.values():
            assert ledger.number < self._next_number
            assert ledger.cursor <= self._head.end_offset, "a cursor is above the end"
            ledger_snapshot.verify(ledger)
