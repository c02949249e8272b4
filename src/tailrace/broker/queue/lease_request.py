"""Lease requests: collect messages from several partitions, and wait while there are none.

A request covers several partitions of one topic and is answered once. It has a part for each of them
(`lease_part`), which alone speaks with the partition. Each partition is asked when the request arrives, and
then only when something may have changed there (`lease_waiters`). The decision what to lease is the
partition's own; the request adds up the answers:

    pending ──look──▶ asked ──▶ leased something      added to the answer
       ▲                  ├───▶ nothing there         waits in the line of that partition
       │                  └───▶ refused               the answer, if nothing was leased
       └───────woken, has room or credit again────────┘

When no question is open, the request is answered if it has messages or its time is up. With `count_max` = 10
on three partitions, partition 1 served last:

    ask 2     4 messages are free there, 2 members wait: its share will be 2, so 8 are still wanted
    ask 0     12 are free, nobody else waits: its share covers the 8, so partition 1 is not asked
    2 leases  2 messages;  0 leases 5, because a lease by somebody else came before
    ask 1     there was less than it seemed: 3 are still wanted, 1 leases 3
    answer    10 messages in three grants

*When a request cannot ask.* Its receiver may have no room; the member may have been answered with little less
than `PACE_US` ago; its member or group may have no credit. Then the request leaves all lines, so that freed
messages go to others, and asks everywhere again once it can. A wake-up that it does not use is passed on.

*Messages set apart* may have ended the members that had them (`core.queue.apart`). They are leased one at a
time, when there is nothing else and the member has nothing else in flight, so that only one message is at
risk.

*One request of a member at a time*, per topic and connection. A newer one ends the wait of the older one and
begins when that is answered, because two at a time would lease messages that arrive in the wrong order.
Messages that were leased for a receiver that is gone are given back, without a counted delivery.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.queue.fetch_request import PACE_BYTES, PACE_US, WAIT_MS_MAX
from tailrace.broker.queue.lease_book import LeaseBook, LeaseJob
from tailrace.broker.queue.lease_part import LeasePart
from tailrace.broker.runtime.pump import Timer
from tailrace.broker.runtime.turn import refuse
from tailrace.core.collections import span_map
from tailrace.core.model.access import Caller
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import RunLeased
from tailrace.core.model.queue_commands import Grant, Lease, Leases
from tailrace.core.selection.lanes import LANES
from tailrace.errors import Full, TailraceError
from tailrace.format.frame import Buffer
from tailrace.ports import Gate, Respond

LEASE_BYTES_MAX = 8 * 1024 * 1024
QUOTA_US = 100_000
"""A request that waits because of a quota asks again after this time."""
UNPACED_MAX = 8
"""Requests for at most this many messages are not paced: they are answered as soon as there is one."""
_STORAGE = frozenset(("storage_fault", "corrupt", "full"))
"""Refusals of a partition whose storage failed: the other partitions go on without it."""


class LeaseRequest:
    """One lease request under way; it is answered once."""

    def __init__(
        self,
        request: Lease,
        runtimes: Sequence[QueuePartition],
        book: LeaseBook,
        gate: Gate,
        respond: Respond,
    ) -> None:
        self.request = request
        self.number = book.next_number()
        self.above = LANES if request.above is None else request.above
        self.book = book
        self._pump = book.pump
        self._gate = gate
        self._respond: Respond | None = respond
        self._started_us = self._pump.clock.now_us()
        self._count_left = request.count_max
        self.bytes_left = min(request.bytes_max, LEASE_BYTES_MAX)
        self._expired = request.wait_ms <= 0
        self._waited = False
        self._waited_ms = 0
        self._timer: Timer | None = None
        self._pace: Timer | None = None
        self._parked = False
        self._short: GroupPolicy | None = None
        """The policy whose limits of messages in flight were in the way."""
        self._capped = False
        """Whether a quota of the caller was in the way, not a limit of the policy."""
        self._recheck: Timer | None = None
        self._by_credit = False
        """Whether the request asks because there was credit."""
        self._under_way = 0
        self._grants: list[Grant] = []
        self._taken: list[tuple[LeasePart, RunLeased]] = []
        self._body: list[Buffer] = []
        self._parts = [
            LeasePart(self, partition, generation, runtime)
            for (partition, generation), runtime in zip(request.partitions, runtimes, strict=True)
        ]
        self._pending: list[LeasePart] = []
        self._lone: set[LeasePart] = set()
        """Partitions asked for messages set apart since the last question for others."""
        self._key = (gate, request.topic, request.group, request.member)
        self._begun = False
        self._then: LeaseJob | None = None
        """The next request of the same member; it begins when this one is answered."""

    # -- asking

    def start(self, first: int) -> None:
        """Ask every partition, beginning with number `first` of the list, and set the deadline.

        An older request of the same member is answered first."""
        self._parts = self._parts[first:] + self._parts[:first]
        older = self.book.latest.get(self._key)
        self.book.latest[self._key] = self
        self._gate.fetches[self] = None
        self.book.jobs[self] = None
        if older is not None:
            older.supersede(self)
        else:
            self._begin()

    def supersede(self, newer: LeaseJob) -> None:
        """The member has sent another request: ask no more, and answer with what there is."""
        self._then = newer
        if self._begun:
            self._expired = True
            self._pending.clear()
            self._check()

    def _begin(self) -> None:
        self._begun = True
        if self._then is not None:
            self._answer(Leases([]))
            return
        self._pending = [part for part in self._parts if not self._waits_unasked(part)]
        if not self._expired:
            wait_us = min(self.request.wait_ms, WAIT_MS_MAX) * 1000
            self._timer = self._pump.at(self._started_us + wait_us, self.expire)
        self.look()
        if not self._pending:
            self._check()

    def _waits_unasked(self, part: LeasePart) -> bool:
        """A request for urgent messages follows most answers, and mostly there are none: it joins the line
        without a question, which would cost more than an ack."""
        quiet = self.above < LANES and part.nothing_above()
        if quiet:
            part.asked = False
            self._wait(part)
        return quiet

    def look(self) -> None:
        """Ask the pending partitions, if the receiver has room."""
        self._parked = False
        if self._respond is None or not self._pending:
            return
        if self._early():
            self._step_aside()
            return
        if self._gate.blocked(self.look):
            self._parked = True
            self._step_aside()
            return
        pending, self._pending = self._pending, []
        self._lone.clear()
        wanted = self._count_left
        for part in pending:
            if wanted <= 0 < self._count_left and not part.roused:
                self._pending.append(part)  # Asked if the others have less than it seems.
                continue
            self._under_way += 1
            part.ask()
            if len(pending) > 1 and self.above == LANES:
                wanted -= part.share()

    def woken(self, part: LeasePart) -> bool:
        """A waiter was woken; true when the partition is asked."""
        if self._respond is None:
            return False
        if part.alone:
            part.roused = True  # Passed on when the question for the one message is answered.
        if not part.asked:
            part.asked = part.roused = True
            self._pending.append(part)
            self.look()
        return part.roused

    def _step_aside(self) -> None:
        """The request cannot ask now: leave all lines; later it asks everywhere again."""
        for part in self._pending:
            part.roused = False
        for part in self._parts:
            part.leave_line()
            if not part.asked:
                part.asked = True
                self._pending.append(part)
        self._pass_credit_on()

    def _pass_credit_on(self) -> None:
        """If the request was woken for credit, let others use what it left."""
        if self._by_credit:
            self._by_credit = False
            self.book.credit.pass_on(self.request.group)

    def _early(self) -> bool:
        """Whether to wait a moment for more messages, because little was handed over just now. Requests for
        few messages would gain nothing by that."""
        if self._expired or self.request.count_max <= UNPACED_MAX:
            return False
        if self._pace is None:
            due_us = self._gate.answered_us.get(self._pace_key(), 0) + PACE_US
            if self._pump.clock.now_us() >= due_us:
                return False
            self._pace = self._pump.at(due_us, self._paced)
        return True

    def _paced(self, now_us: int) -> None:
        self._pace = None
        self.look()

    def _pace_key(self) -> str:
        request = self.request
        return f"{request.topic}/{request.group}/{request.member}"

    def wanted(self, policy: GroupPolicy | None) -> int:
        """See `LeaseAsker.wanted`."""
        count = self._count_left
        if self._respond is None or count <= 0 or self.bytes_left <= 0:
            return 0
        if policy is None:
            return count  # The partition itself refuses.
        request = self.request
        credit = self.book.credit.left(
            request.group, request.member, policy.in_flight_max, policy.group_in_flight_max
        )
        if credit > 0 and self.book.ceiling.active:
            left = self.book.ceiling.in_flight_left(self._gate.caller, request.group, request.member)
            if left is not None:
                credit, self._capped = min(credit, left), left <= 0
        if credit > 0:
            return count if count < credit else credit
        self._short = policy
        return 0

    def unasked(self, part: LeasePart) -> None:
        """See `LeaseAsker.unasked`."""
        part.asked = part.alone = False
        self._under_way -= 1
        part.pass_on()
        self._check()

    # -- answers of partitions

    def decided(self, part: LeasePart, reply: Any) -> None:
        """A partition has leased messages, has none, or refuses."""
        self._under_way -= 1
        alone, part.alone = part.alone, False
        if type(reply) is RunLeased:
            if alone:
                part.pass_on()
            if self._respond is None:
                part.give_back(reply)
            else:
                self._take(part, reply)
        elif type(reply) is Refusal:
            self._refused(part, reply)
            part.pass_on()
        else:
            part.ill = None
            self._wait(part)
            if alone:
                part.pass_on()  # To the first in line, perhaps this one: now it asks for all messages.
            else:
                roused, part.roused = part.roused, False
                if roused and part.passing:
                    part.in_vain()
        self._check()

    def _take(self, part: LeasePart, leased: RunLeased) -> None:
        """Add leased messages to the answer. They were cached at the decision, and mostly still are."""
        try:
            frames = part.frames(leased)
        except TailraceError as error:
            part.give_back(leased)
            self._refused(part, refuse(error))
            return
        if isinstance(frames, int):
            self._under_way += 1
            part.load(frames, partial(self._loaded, part, leased))
            return
        size = 0
        for item in frames:
            self._body += item.parts()
            size += item.size
        rows = span_map.count(leased.spans)
        waited_ms = (part.asked_us - self._started_us) // 1000
        self._waited_ms = min(self._waited_ms, waited_ms) if self._grants else waited_ms
        self._count_left -= rows
        self.bytes_left -= size
        self._taken.append((part, leased))
        self._grants.append(Grant(part.partition, leased.lease, leased.deadline_us, size, leased.runs))
        self.book.metrics.delivered(self.request.topic, size, rows)
        roused, part.roused = part.roused, False
        if roused:
            part.took()

    def _loaded(self, part: LeasePart, leased: RunLeased, error: Exception | None) -> None:
        if error is None:
            self.decided(part, leased)
        else:
            part.give_back(leased)
            self.decided(part, refuse(error))

    def _refused(self, part: LeasePart, refusal: Refusal) -> None:
        if self._respond is None or self._grants:
            return  # Messages go first; the next request is refused again.
        if part.gone is not None:
            refusal = part.gone
        elif refusal.code in _STORAGE:
            part.ill = refusal
            self._wait(part)
            if not all(other.ill for other in self._parts):
                return
        self._answer(refusal)

    def _wait(self, part: LeasePart) -> None:
        if self._respond is not None:
            part.wait()
            if self.above == LANES:
                self.book.hunger.waits(self.request.group, self.request.topic)

    # -- the end

    def _check(self) -> None:
        """Answer if no question is open and there are messages or time is up; else wait."""
        if self._under_way or self._respond is None:
            return
        if self._asks_on() or self._ask_alone():
            return
        if self._grants or (self._expired and not self._pending):
            self._answer(self._damage() or Leases(self._grants, self._waited_ms))
        elif self._short is not None:
            self._wait_for_credit(self._short)
        else:
            self._pass_credit_on()

    def _ask_alone(self) -> bool:
        """There is nothing else: ask one partition for one message that is set apart. A member that has other
        messages in flight waits until it has none, because these might end with it."""
        request = self.request
        if self._grants or self._pending or self._short is not None or self.above < LANES:
            return False
        found = []
        for number, part in enumerate(self._parts):
            if part not in self._lone and not part.ill:
                least = part.apart()
                if least is not None:
                    found.append((least, number))
        if not found:
            return False
        if self.book.credit.held(request.group, request.member):
            self.book.credit.wait_for_less(request.group, request.member, self)
            return False
        part = self._parts[min(found)[1]]
        self._lone.add(part)
        part.asked = part.alone = True
        self._under_way += 1
        part.ask()
        return True

    def _wait_for_credit(self, policy: GroupPolicy) -> None:
        """The member or the group has too many messages in flight, perhaps on other partitions: ask again
        when there are fewer."""
        self._short, self._by_credit = None, False
        for part in self._parts:
            part.leave_line()
        if self._capped:
            # What is settled in other groups makes room, too, and nobody tells.
            self._capped = False
            self.book.credit.wait_for_less(self.request.group, self.request.member, self)
            self._recheck = self._pump.at(self._pump.clock.now_us() + QUOTA_US, self._check_quota)
            return
        self.book.credit.wait(
            self.request.group, self.request.member, self, policy.in_flight_max, policy.group_in_flight_max
        )

    def _asks_on(self) -> bool:
        """Ask partitions that were left out, if the others had less than it seemed; true when some question
        is open."""
        if self._pending and self._count_left > 0 and self.bytes_left > 0 and not self._parked:
            self.look()
        return self._under_way > 0

    def _damage(self) -> Refusal | None:
        """The refusal to answer with when the time is up and no partition had a message: that of a partition
        which is damaged or whose storage failed, because it may hold the messages waited for."""
        if self._grants or not self._waited:
            return None
        return next((p.ill for p in self._parts if p.ill and p.ill.code != Full.code), None)

    def _check_quota(self, now_us: int) -> None:
        self.book.credit.leave(self.request.group, self.request.member, self)
        self.credit_freed()

    def credit_freed(self) -> None:
        """There may be credit: ask everywhere again."""
        if self._recheck is not None:
            self._recheck.cancel()
        self._by_credit = True
        for part in self._parts:
            if not part.asked:
                part.asked = True
                self._pending.append(part)
        self.look()

    def expire(self, now_us: int) -> None:
        """The deadline has come: answer, possibly with nothing."""
        self._expired = self._waited = True
        if self._parked:
            self._pending.clear()  # The receiver has no room for more.
        self.look()
        self._check()

    def drop(self) -> None:
        """The receiver is gone: give back the messages leased for it."""
        if self._respond is not None:
            for part, leased in self._taken:
                part.give_back(leased)
            self._finish()

    @property
    def caller(self) -> Caller:
        """See `LeaseJob.caller`."""
        return self._gate.caller

    def evict(self, refusal: Refusal) -> None:
        """The member is gone: refuse, and give back the messages leased for it."""
        self._end(refusal)

    def hang_up(self) -> None:
        """Answer with nothing: the receiver sends nothing more or let a lease time out, so nobody would
        settle the messages."""
        self._end(Leases([]))

    def _end(self, reply: Leases | Refusal) -> None:
        respond = self._respond
        self.drop()
        if respond is not None:
            respond(reply, ())
        self._go_on()

    def give_up(self) -> None:
        """The broker closes: answer with nothing. Leases of the last turn are not logged any more."""
        respond = self._finish()
        assert respond is not None
        respond(Leases([]), ())

    def _finish(self) -> Respond | None:
        respond, self._respond = self._respond, None
        self._gate.fetches.pop(self, None)
        self.book.jobs.pop(self, None)
        for timer in (self._timer, self._pace, self._recheck):
            if timer is not None:
                timer.cancel()
        if self.book.latest.get(self._key) is self:
            del self.book.latest[self._key]
        group = self.request.group
        for part in self._parts:
            part.leave_line()
        self.book.credit.leave(group, self.request.member, self)
        self._pass_credit_on()
        # Break the reference cycle, so that the request is freed now and not by the garbage collector.
        self._parts, self._pending, self._taken = [], [], []
        return respond

    def _answer(self, reply: Leases | Refusal) -> None:
        respond = self._finish()
        assert respond is not None
        now_us = self._pump.clock.now_us()
        self.book.metrics.leased((now_us - self._started_us) / 1e6)
        if self._grants:
            self.book.served(self.request, self._grants[-1].partition)
            if sum(grant.nbytes for grant in self._grants) < PACE_BYTES:
                self._gate.answered_us[self._pace_key()] = now_us
        respond(reply, self._body)
        self._go_on()

    def _go_on(self) -> None:
        newer, self._then = self._then, None
        if newer is not None:
            newer.begin_late()

    def begin_late(self) -> None:
        """The request before this one is over: begin, unless this one is over as well."""
        if self._respond is not None:
            self._begin()
