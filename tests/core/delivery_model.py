"""What one group may be given on one partition, written as plainly as possible: a dict of messages.

The model is told of every command and checks the reply. Where the rules leave a choice (which messages to
lease, when in a range a back-off ends, when an overdue lease is found out) it takes over what was chosen,
if that was allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tailrace.core.model import internal_commands as inner
from tailrace.core.model import queue_commands as wire
from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.facts import Dying, Lapsed, LeaseExpired
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import PRIORITY_DEFAULT, Refusal

FREE, LEASED, DYING, SETTLED = "free", "leased", "dying", "settled"
RETRY, FRESH, EITHER = "retry", "fresh", "either"


@dataclass(frozen=True)
class Letter:
    """A message as it lies in the log, for all groups."""

    key: str | None = None
    priority: int = PRIORITY_DEFAULT
    expires_us: int = 0
    append_us: int = 0


@dataclass
class State:
    """What has become of a message in one group. It is available from some moment between the `due` ones."""

    state: str = FREE
    deliveries: int = 0
    failures: int = 0
    due: tuple[int, int] = (0, 0)
    lease: int = 0
    kind: str = FRESH
    apart: bool = False

    def back(self, due: tuple[int, int], kind: str = RETRY) -> None:
        self.state, self.lease, self.due, self.kind = FREE, 0, due, kind
        self.apart = False


@dataclass
class Held:
    """A lease: who has it, until when, and what was settled through it."""

    member: str
    deadline_us: int
    settled: set[int] = field(default_factory=set)


def numbers(spans: Iterable[int]) -> list[int]:
    """The offsets in flat spans."""
    flat = list(spans)
    return [offset for first, end in zip(flat[::2], flat[1::2], strict=True) for offset in range(first, end)]


class DeliveryModel:
    """One group. `log` is shared with the other groups: every message ever appended, by offset."""

    def __init__(self, policy: GroupPolicy, log: list[Letter], start: int) -> None:
        self.policy, self.log = policy, log
        self.states: dict[int, State] = {}
        self.leases: dict[int, Held] = {}
        self.holder: tuple[str, int] = ("", 0)
        self.paused = False
        self.trimmed = 0
        self.lapsing: set[str] = set()
        """Keys of which something expired in the decision that is looked at."""
        self.floor = start
        self.appended()

    def copy(self) -> DeliveryModel:
        """As it is now; the log is the same one."""
        other = copy.copy(self)
        other.states = {offset: copy.copy(state) for offset, state in self.states.items()}
        other.leases = {
            lease: Held(held.member, held.deadline_us, set(held.settled))
            for lease, held in self.leases.items()
        }
        other.lapsing = set(self.lapsing)
        return other

    def appended(self) -> None:
        """The log has grown."""
        for offset in range(max(self.floor, max(self.states, default=-1) + 1), len(self.log)):
            self.states[offset] = State()

    # ------------------------------------------------------------------------------------------ questions

    def unsettled(self) -> list[int]:
        return [offset for offset, state in self.states.items() if state.state != SETTLED]

    def offsets(self, *wanted: str) -> list[int]:
        return sorted(offset for offset, state in self.states.items() if state.state in wanted)

    def committed(self) -> int:
        """The first unsettled offset."""
        return min(self.unsettled(), default=max(self.floor, len(self.log)))

    def of_lease(self, lease: int) -> list[int]:
        return [o for o, state in self.states.items() if state.state == LEASED and state.lease == lease]

    def in_flight(self, member: str) -> int:
        return sum(self.leases[self.states[o].lease].member == member for o in self.offsets(LEASED))

    def expired(self, offset: int, now_us: int) -> bool:
        return 0 < self.log[offset].expires_us <= now_us

    def order_key(self, offset: int) -> str | None:
        """Messages with the same one are delivered in order; None: in any order."""
        if self.policy.ordering == "partition":
            return "the partition"
        return self.log[offset].key if self.policy.ordering == "key" else None

    def siblings(self, offset: int) -> list[int]:
        """Other unsettled messages of the same key."""
        key = self.order_key(offset)
        if key is None:
            return []
        return [o for o in self.unsettled() if o != offset and self.order_key(o) == key]

    def unblocked(self, offset: int, member: str) -> bool:
        """Whether order lets this member have it: whatever of its key comes before it is this member's, and
        nobody else has anything of its key."""
        for other in self.siblings(offset):
            state = self.states[other]
            if state.state == LEASED and self.leases[state.lease].member != member:
                return False
            if state.state != LEASED and other < offset:
                return False
        return True

    def waiting_for(self, member: str, now_us: int, end: int) -> list[int]:
        """What this member can have now for certain."""
        return [
            offset
            for offset in self.offsets(FREE)
            if offset < end
            and self.states[offset].due[1] <= now_us
            and self.unblocked(offset, member)
            and not any(o > offset and self.states[o].state == LEASED for o in self.siblings(offset))
        ]

    def next_due_us(self, now_us: int) -> int | None:
        """The latest moment at which somebody has to look after this group again; None: nothing waits."""
        ends = [self.leases[self.states[o].lease].deadline_us for o in self.offsets(LEASED)]
        ends += [self.states[o].due[1] for o in self.offsets(FREE) if self.states[o].due[0] > now_us]
        return min(ends, default=None)

    # --------------------------------------------------------------------------------------------- leases

    def fenced(self, member: str, generation: int) -> bool:
        if self.policy.assignment == "shared":
            return generation != self.holder[1]
        return (member, generation) != self.holder

    def lease(
        self, command: inner.LeaseRun, reply: Reply, here: Callable[[int], bool], now_us: int, certain: bool
    ) -> None:
        """`here`: whether an offset is at hand; `certain`: this is the last word, there is nothing now."""
        if self.fenced(command.member, command.generation):
            assert isinstance(reply, Refusal), f"a stale generation leased: {reply}"
            assert reply.code == "fenced"
            assert reply.details["generation"] == self.holder[1]
            return
        room = self.policy.in_flight_max - self.in_flight(command.member)
        if isinstance(reply, Done):
            if command.alone:
                left = [o for o in self.offsets(FREE) if self.states[o].apart and self._undisturbed(o)]
                assert not certain or self.paused or room <= 0 or not left, f"{left} wait, set apart"
            elif certain and not self.paused and room > 0:
                left = self.waiting_for(command.member, now_us, command.end_offset)
                assert not left, f"{left} could be delivered to {command.member}, and were not"
            return
        assert isinstance(reply, inner.RunLeased), reply
        assert not self.paused, "leased while paused"
        assert reply.lease == command.lease
        lease_ms = self.policy.lease_ms if command.lease_ms is None else command.lease_ms
        assert reply.deadline_us == now_us + lease_ms * 1000
        given = [(first + i, run) for first, *run in reply.runs for i in range(run[0])]
        assert 0 < len(given) <= min(command.count_max, room), f"{len(given)} leased"
        self.leases[reply.lease] = Held(command.member, reply.deadline_us)
        for offset, (_, deliveries, failures) in given:
            assert offset < command.end_offset, f"{offset} is not committed"
            assert here(offset), f"{offset} was leased without being at hand"
            state = self.states[offset]
            assert state.state == FREE, f"{offset} was leased, but it is {state.state}"
            if command.alone:
                assert state.apart, f"{offset} is not set apart"
                assert len(given) == 1, "together with others"
                least = min(self.states[o].deliveries for o in self.offsets(FREE) if self._suspected(o))
                assert state.deliveries == least, f"{offset} was delivered more often than another"
            else:
                assert state.due[0] <= now_us, f"{offset} was leased {state.due[0] - now_us} us early"
            assert not self.expired(offset, now_us), f"{offset} was leased after its end"
            assert (deliveries, failures) == (state.deliveries + 1, state.failures), f"counters of {offset}"
            assert self.unblocked(offset, command.member), f"{offset} overtook its key"
            if not command.alone:
                self._in_turn(offset, command, here, now_us)
            state.state, state.lease, state.deliveries = LEASED, reply.lease, deliveries
        self.lapsing.clear()

    def _suspected(self, offset: int) -> bool:
        return self.states[offset].apart and self._undisturbed(offset)

    def _undisturbed(self, offset: int) -> bool:
        """Whether nothing is before it, and nobody has anything of its key."""
        others = self.siblings(offset)
        return not any(o < offset or self.states[o].state == LEASED for o in others)

    def _in_turn(
        self, offset: int, command: inner.LeaseRun, here: Callable[[int], bool], now_us: int
    ) -> None:
        """Of all that could be given instead, nothing has to come first."""
        if self.policy.ordering == "partition":
            return
        lanes = any(self.log[o].priority != PRIORITY_DEFAULT for o in self.unsettled())
        for other in self.waiting_for(command.member, now_us, command.end_offset):
            if other == offset or not here(other) or self.expired(other, now_us):
                continue
            if {self.order_key(offset), self.order_key(other)} & self.lapsing:
                continue  # what a key offers next is found while choosing
            lane, its_lane = self._lane(offset), self._lane(other)
            if lanes:
                mine_us, its = self._lane_since(lane), self._since(other)
                limit = now_us - self.policy.starvation_ms * 1000
                assert its[1] > limit or mine_us <= limit, f"{other} starves, and {offset} was given"
                late = its[1] <= limit and its[1] < mine_us
                assert not late, f"{other} starved before {offset}, which was given"
                if lane != its_lane and min(mine_us, self._lane_since(its_lane)) <= limit:
                    continue
            strict = self.policy.priority_mode == "strict"
            assert not (strict and its_lane < lane), f"{other} of lane {its_lane} before {offset} of {lane}"
            kinds = self.states[offset].kind, self.states[other].kind
            if lane == its_lane and EITHER not in kinds:
                assert kinds != (FRESH, RETRY), f"the retry of {other} comes before {offset}"
                assert kinds != (FRESH, FRESH) or offset < other, f"{other} comes before {offset}"

    def _lane_since(self, lane: int) -> int:
        """Since when something in a lane waits, perhaps."""
        return min(self._since(o)[0] for o in self.offsets(FREE) if self._lane(o) == lane)

    def _since(self, offset: int) -> tuple[int, int]:
        """Since when it waits, between two times."""
        state, append_us = self.states[offset], self.log[offset].append_us
        if state.kind == FRESH:
            return append_us, append_us
        return state.due if state.kind == RETRY else (min(append_us, state.due[0]), state.due[1])

    def _lane(self, offset: int) -> int:
        """That of the oldest unsettled message of its key."""
        return self.log[min([offset, *self.siblings(offset)])].priority

    # ----------------------------------------------------------------------------------------- settlement

    def sort_out(self, lease: int, offsets: list[int], now_us: int) -> tuple[list[int], set[int], set[int]]:
        """Offsets that a receipt settles, those for which it is lost, and those where either is right."""
        held = self.leases.get(lease)
        if held is None or held.deadline_us <= now_us:
            return [], set(offsets), set()
        mine = [o for o in offsets if o in self.of_lease(lease)]
        others = [o for o in offsets if o not in mine and o not in held.settled]
        done = not self.of_lease(lease)
        either = {o for o in others if o < self.trimmed or (done and self.gone(o))}
        either |= {o for o in held.settled if o < self.trimmed or not self.gone(o)}
        return mine, set(others) - either, either

    def gone(self, offset: int) -> bool:
        return offset not in self.states or self.states[offset].state == SETTLED

    def _lost(self, reply: Reply, lease: int, lost: set[int], either: set[int]) -> None:
        assert isinstance(reply, wire.Settled), reply
        told = {o for name, spans in reply.lost if name == lease for o in numbers(spans)}
        assert lost <= told, f"stale receipts taken for {sorted(lost - told)}"
        assert told <= lost | either, f"receipts refused for {sorted(told - lost - either)}"

    def ack(self, command: wire.Ack, reply: Reply, now_us: int) -> None:
        for lease, spans in command.leases:
            mine, lost, either = self.sort_out(lease, numbers(spans), now_us)
            self._lost(reply, lease, lost, either)
            self._settle(mine, lease)

    def _settle(self, offsets: list[int], lease: int) -> None:
        for offset in offsets:
            assert self.states[offset].state != SETTLED, f"{offset} was settled twice"
            self.states[offset].state, self.states[offset].lease = SETTLED, 0
            self.leases[lease].settled.add(offset)

    def nack(self, command: wire.Nack, reply: Reply, now_us: int) -> None:
        mine, lost, either = self.sort_out(command.lease, numbers(command.spans), now_us)
        self._lost(reply, command.lease, lost, either)
        started = {offset for _, spans in command.started for offset in numbers(spans)}
        if not command.failure:
            self._give_back(mine, now_us)
        else:
            delay_us = None if command.delay_ms is None else command.delay_ms * 1000
            self._fail(mine, now_us, delay_us)
        self._give_back_later(mine, now_us, started)

    def give_back(self, command: wire.GiveBack, reply: Reply, now_us: int) -> None:
        for lease, spans in command.leases:
            mine, lost, either = self.sort_out(lease, numbers(spans), now_us)
            self._lost(reply, lease, lost, either)
            self._undo(mine, now_us)

    def _undo(self, offsets: list[int], now_us: int) -> None:
        """No handler got these, nor what comes behind them: they were never delivered."""
        behind = [o for offset in offsets for o in self.siblings(offset) if o > offset]
        for offset in {*offsets, *(o for o in behind if self.states[o].state == LEASED)}:
            self.states[offset].deliveries -= 1
            self.states[offset].back((now_us, now_us))

    def _give_back(self, offsets: list[int], now_us: int, *, silent: bool = False) -> None:
        """Without a failure; but the delivery counts, and may have been the last. `silent`: the member that
        had them is gone, perhaps because of one of them."""
        limit = self.policy.max_deliveries
        for offset in offsets:
            state = self.states[offset]
            state.back((now_us, now_us))
            if 0 < limit <= state.deliveries:
                state.state = DYING
            elif silent and (state.deliveries >= 3 or limit - state.deliveries == 1):
                self._set_apart(state, now_us)

    def _set_apart(self, state: State, now_us: int) -> None:
        due_us = now_us + self.policy.starvation_ms * 1000
        state.back((due_us, due_us))
        state.apart = True

    def _give_back_later(self, failed: list[int], now_us: int, started: set[int] | None = None) -> None:
        """What was leased of a key behind a message that came back comes back, too, and dies not of it. What
        was not started counts as never delivered (None: that all was)."""
        for offset in failed:
            for other in self.siblings(offset):
                if other > offset and self.states[other].state == LEASED:
                    self.states[other].deliveries -= started is not None and other not in started
                    self.states[other].back((now_us, now_us))

    def _fail(self, offsets: list[int], now_us: int, delay_us: int | None, *, silent: bool = False) -> None:
        policy = self.policy
        for offset in offsets:
            state = self.states[offset]
            state.failures += 1
            if state.failures >= policy.max_attempts or 0 < policy.max_deliveries <= state.deliveries:
                state.state, state.lease = DYING, 0
                continue
            due = now_us, now_us
            if delay_us is not None:
                due = now_us + delay_us, now_us + delay_us
            else:
                longest = 1000 * min(policy.backoff_ms * 2 ** (state.failures - 1), policy.backoff_max_ms)
                due = now_us + longest // 2, now_us + longest
            state.back(due)
            last = policy.max_attempts - state.failures == 1 or policy.max_deliveries - state.deliveries == 1
            if silent and (state.deliveries >= 3 or last):
                self._set_apart(state, now_us)

    def reject(self, command: wire.RejectMessages, reply: Reply, now_us: int) -> None:
        mine, lost, either = self.sort_out(command.lease, numbers(command.spans), now_us)
        self._lost(reply, command.lease, lost, either)
        for offset in mine:
            self.states[offset].state, self.states[offset].lease = DYING, 0

    def extend(self, command: wire.Extend, reply: Reply, now_us: int) -> None:
        assert isinstance(reply, wire.Extended), reply
        for lease in command.leases:
            held = self.leases.get(lease)
            if held is None or held.deadline_us <= now_us:
                assert lease in reply.lost, "a lease was extended after its end"
            elif self.of_lease(lease):
                assert lease not in reply.lost, "a live lease was not extended"
            if held is not None and lease not in reply.lost and self.of_lease(lease):
                assert reply.deadline_us == now_us + command.lease_ms * 1000
                held.deadline_us = reply.deadline_us

    # ------------------------------------------------------------------------------ what the partition found

    def found(self, fact: Any, now_us: int) -> None:
        """A choice that was the partition's own: it has to be allowed."""
        if isinstance(fact, LeaseExpired):
            held = self.leases.pop(fact.lease)
            assert held.deadline_us <= now_us, "a lease expired before its time"
            left = self._of(held, fact.lease)
            self._fail(left, now_us, 0, silent=True)
            self._give_back_later(left, now_us)
        elif isinstance(fact, Lapsed) or (isinstance(fact, Dying) and fact.reason == "expired"):
            for offset in numbers(fact.spans):
                state = self.states[offset]
                assert state.state == FREE, f"{offset} lapsed although it is {state.state}"
                assert state.apart or state.due[0] <= now_us, f"{offset} lapsed while it waits"
                assert self.expired(offset, now_us), f"{offset} lapsed before its time"
                assert self.policy.expired_to_dlq == isinstance(fact, Dying)
                state.state = DYING if isinstance(fact, Dying) else SETTLED
                if (key := self.order_key(offset)) is not None:
                    self.lapsing.add(key)

    def _of(self, held: Held, lease: int) -> list[int]:
        return [o for o, state in self.states.items() if state.state == LEASED and state.lease == lease]

    def looked(self, now_us: int) -> None:
        """After `ExpireLeases` nothing is overdue."""
        late = [o for o in self.offsets(LEASED) if self.leases[self.states[o].lease].deadline_us <= now_us]
        assert not late, f"{late} are overdue, and were not taken back"

    # --------------------------------------------------------------------------------------- administration

    def grant(self, member: str, generation: int, now_us: int) -> None:
        if (member, generation) != self.holder:
            self.holder = (member, generation)
            self._give_back(self.offsets(LEASED), now_us, silent=True)

    def evict(self, member: str, now_us: int) -> None:
        self._give_back(
            [o for o in self.offsets(LEASED) if self.leases[self.states[o].lease].member == member],
            now_us,
            silent=True,
        )

    def reset(self, offset: int) -> None:
        self.states, self.leases, self.floor = {}, {}, max(offset, self.trimmed)
        self.holder = (self.holder[0], self.holder[1] + 1)
        self.appended()

    def reopen(self, command: wire.Reopen, reply: Reply, now_us: int) -> None:
        offsets = numbers(command.spans)

        def lost(offset: int) -> bool:
            state = self.states.get(offset)
            busy = state is not None and state.state in (LEASED, DYING)
            return offset < self.trimmed or (self.expired(offset, now_us) and not busy)

        def dying(offset: int) -> bool:
            state = self.states.get(offset)
            return offset >= self.trimmed and state is not None and state.state == DYING

        if any(dying(offset) for offset in offsets):
            assert isinstance(reply, Refusal), "what is on its way to the dead letters was opened again"
            assert reply.code == "unavailable"
            return
        if any(lost(offset) for offset in offsets if offset < len(self.log)):
            assert isinstance(reply, Refusal), "what is gone was opened again"
            assert reply.code == "not_found"
            return
        assert isinstance(reply, Done | wire.Settled), reply
        for offset in offsets:
            if offset < len(self.log) and self.gone(offset):
                self.states[offset] = State(due=(now_us, now_us), kind=EITHER)
                for held in self.leases.values():
                    held.settled.discard(offset)

    def settle_offsets(self, spans: list[int]) -> None:
        for offset in numbers(spans):
            if offset in self.states:
                self.states[offset].state, self.states[offset].lease = SETTLED, 0

    def bury(self, spans: list[int]) -> None:
        for offset in numbers(spans):
            if offset in self.states and self.states[offset].state == DYING:
                self.states[offset].state = SETTLED

    def trim(self, offset: int) -> None:
        self.trimmed = max(self.trimmed, offset)
        self.states = {o: state for o, state in self.states.items() if o >= self.trimmed}
        self.floor = max(self.floor, self.trimmed)
