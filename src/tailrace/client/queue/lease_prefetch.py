"""What comes in to a consumer of a queue (see `lease_polls`): it is handed out, or goes back.

Messages that no handler has got go back when another member is hungry, when their partition is given up, when
the consumer ends, and behind a message of their key that failed: each time as if they had never been
delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tailrace.client.queue.ack_sender import AckSender
from tailrace.client.queue.consumer_options import ConsumerOptions
from tailrace.client.queue.delivery import Delivery, LeasedMessage, LeasedRows, foreign_rows, order_of, unpack
from tailrace.client.queue.hand import Chosen, Hand, all_of, behind, fit_for_others, of_lease, overtakes
from tailrace.client.queue.held_leases import HeldLease, Unstarted, deadline_ms, spans_of
from tailrace.client.queue.lease_polls import Answer, LeasePolls
from tailrace.client.queue.membership import GroupSession
from tailrace.client.queue.pace import Pace
from tailrace.client.queue.parking import Parking
from tailrace.client.rpc.waiters import AwaitedSupply, Waiters
from tailrace.client.sdk_tuning import CALM_MS, LATE_MS, LOOK_MS, SOON_MS, YIELD_ROWS
from tailrace.core.model.group_commands import JoinGroup, Place
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.queue_commands import GiveBack, Grant
from tailrace.errors import InvalidRequest, TailraceError
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs


class LeasePrefetch(AwaitedSupply):
    """See `membership.Holder` and `lease_polls.Taker`. Messages are taken from `current`; `last` is the one
    that was handed out."""

    def __init__(
        self,
        verbs: BrokerVerbs,
        membership: GroupSession,
        request: JoinGroup,
        timeout: float,
        options: ConsumerOptions,
    ) -> None:
        super().__init__()
        self._verbs = verbs
        self._request = request
        self._loop = asyncio.get_running_loop()
        self.settlement = AckSender(
            verbs,
            request.group,
            timeout,
            behind=self._take_behind,
            started=self._handed_out,
            going_back=lambda place, first: self._polls.going_back(place, first),
            went_back=self._went_back,
            lost=self._lease_lost,
        )
        self.membership = membership
        self.batch_size = options.batch_size
        self._begun = False
        self.pace = Pace()
        self.sampling = True
        """Whether the pace is measured here: from taking some rows to asking for the next ones."""
        self._since_ms = 0.0
        self._taken = 0
        """Messages that were handed out since then, of rows that are current no more."""
        self._started = 0
        """The same since the beginning."""
        self._looking = False
        self.parking: Parking | None = None
        self._hand = Hand()
        self._polls = LeasePolls(verbs, request, options, self, self._hand, self.pace)
        self._rows: LeasedRows | None = None
        self.current: Iterator[Any] = iter(())
        self.last: LeasedMessage | None = None
        self.latest: Sequence[LeasedMessage] = ()
        """What was handed out, where `last` does not say it: a batch, or the last one of rows that were put
        back."""
        self._kind: type[LeasedMessage] = Delivery
        self.wall_ns = verbs.clock.wall_ns
        self.calm_ns = self.until_ns = 0
        """While the wall clock is in this span, the current rows need no look at their lease; see
        `is_over`."""
        self._safe_ms = 0.0
        self.guard: AbstractContextManager[object] = nullcontext()
        """Held by whoever takes from `current` in another thread (see `tailrace.sync`)."""
        self._rank = 0  # Of the rows that were looked at last.
        self._ranked_ms = 0.0  # When the hand was ranked anew last.
        self._streak = 0
        self._taking = False
        self._listeners = Waiters()
        """Who waits to hear what a poll brings, and not for a message."""

    # -- handing out

    async def take(self) -> None:
        """Make the next rows the current ones, as soon as there are any."""
        if self._taking:
            raise InvalidRequest("a consumer serves one task at a time; `run` has `concurrency`")
        self._taking = True
        try:
            if self._streak >= YIELD_ROWS:
                self._streak = 0
                await asyncio.sleep(0)
            while not self.next_rows():
                waiter = self._waiters.join()
                self._streak = 0
                self._begun = True
                self._polls.ask()
                await waiter
        finally:
            self._taking = False

    def take_now(self) -> bool:
        """The same where that needs no wait; False: call `take`."""
        return not self._taking and self._streak < YIELD_ROWS and self.next_rows()

    def next_rows(self) -> bool:
        """Make the next buffered rows the current ones; False when nothing is there."""
        self._check()
        now_ms = self.settlement.now_ms()
        self._count_taken(now_ms)
        if self._hand.count * self.pace.average_ms > LATE_MS:
            self._trim()
        if self._hand.held_back and now_ms - self._ranked_ms > 2 * SOON_MS:
            self._ranked_ms = now_ms
            self._hand.rank_anew(self.membership.policy, self.wall_ns() // 1000)
        while (rank := self._hand.rank()) is not None:
            if rank > self._rank:
                self._polls.ask()  # Now, not when it is handed out.
            self._rank = rank
            if self._polls.may_bring_before(rank):
                break
            rows = self._hand.pop()
            lease = rows.lease
            calm = self.calm_ns <= self.wall_ns() < self.until_ns and lease.deadline_ms > self._safe_ms
            if lease.error is not None if calm else self.is_over(lease):
                continue
            if len(rows) > 1 and (self.sampling or self.pace.workers):
                # So the next ones are asked for in time, and more urgent ones come in between: also those in
                # hand that have to wait no more for one of their key.
                soon = max(1, int(2 * SOON_MS / self.pace.message_ms))
                if len(rows) > soon:
                    self._hand.put_back(rows.rest(soon))
                    rows = rows.part(range(soon))
            self._rows, self._since_ms = rows, now_ms
            self.current = rows.deliveries(self._kind)
            self._streak += len(rows)
            self._polls.ask()
            return True
        return False

    def _trim(self) -> None:
        """It became slower since they were leased. As many as were asked for as urgent ones stay."""
        urgent, wanted = sum(len(rows) for rows in self._hand if rows.urgent), self.pace.wanted()
        others = self._hand.count - urgent
        if others > wanted and others * self.pace.average_ms > LATE_MS:
            self.settlement.give_back(self._hand.take_out(lambda rows: range(len(rows)), urgent + wanted))

    def _count_taken(self, now_ms: float) -> None:
        """All current rows were handed out, and somebody comes for more."""
        if self._rows is not None:
            self._taken += len(self._rows)
            self._started += len(self._rows)
        if self._taken and self.sampling:
            self.pace.took(self._taken, now_ms - self._since_ms)
        self._taken = 0
        self._rows = self.last = None

    def _set_down(self) -> None:
        """What is left of the current rows goes back into the hand, to be treated like the others."""
        with self.guard:
            current, last = self._rows, self.last
            self.current = iter(())
            self._rows = self.last = None
        if last is not None and last not in self.latest:
            self.latest = (last,)
        if current is not None:
            handed = 0 if last is None else last.row + 1
            self._taken += handed
            self._started += handed
            self._hand.put_back(current.rest(handed))

    def is_over(self, lease: HeldLease) -> bool:
        """Whether the lease of the rows that are handed out is over.

        Asked for each message, this would cost more than the message. So it says for how long it need not be
        asked: whatever makes this process stand still moves the wall clock, too, which is cheap to read."""
        now_ms = self.settlement.now_ms()
        self.calm_ns = self.until_ns = 0
        self._safe_ms = now_ms + CALM_MS
        if lease.deadline_ms > self._safe_ms:
            self.calm_ns = self.wall_ns()
            self.until_ns = self.calm_ns + CALM_MS * 1_000_000
        if self._is_slow(now_ms):
            self._set_down()
        return self.settlement.is_over(lease)

    def _is_slow(self, now_ms: float) -> bool:
        """Whether handlers became so slow that the rest of the current rows is not started soon."""
        current, last = self._rows, self.last
        if current is None or last is None or not last.row or not (self.sampling or self.pace.workers):
            return False
        left = len(current) - last.row - 1
        return left * (now_ms - self._since_ms) >= 2 * SOON_MS * last.row

    def more(self) -> bool:
        """The same for who has messages in hand already: trouble, or the end, waits until they are used."""
        trouble = self.closed is not None or self._error is not None or self._stopping
        return not trouble and self.next_rows()

    def ready(self) -> Any:
        """Hand out the next message when one is at hand and nobody else is waiting for it; else None."""
        if self._taking:
            return None
        while True:
            message = next(self.current, None)
            if message is None and self.more():
                message = next(self.current)
            if message is None:
                return None
            self.last = message
            if self.calm_ns <= self.wall_ns() < self.until_ns or not self.is_over(message.rows.lease):
                return message

    def next_rank(self) -> int | None:
        """The rank of what `ready` hands out; None: there is nothing."""
        if self._taking:
            return None
        rows, last = self._rows, self.last
        if rows is not None and (last is None or last.row + 1 < len(rows)):
            return rows.rank
        return self._hand.rank()

    def in_hand(self) -> int:
        """How many messages are there that are not being handed out yet."""
        return self._hand.count

    def share(
        self, guard: AbstractContextManager[object], kind: type[LeasedMessage], wrapper: object
    ) -> None:
        """Let other threads take messages, with the guard held, as deliveries of this kind; see
        `Settling.wrapper`."""
        self.guard = guard
        self.settlement.wrap(wrapper)
        self.hand_out_as(kind)

    def hand_out_as(self, kind: type[LeasedMessage]) -> None:
        """Hand out deliveries of this kind from now on."""
        self._set_down()
        self._kind = kind

    def _wake(self) -> None:
        super()._wake()
        self._listeners.wake()

    def stop(self) -> None:
        """Hand out nothing more."""
        self._stopping = True
        self.return_unstarted()
        self._wake()

    def refuse(self, error: TailraceError) -> None:
        """Nothing is handed out or leased from now on; what is settled still counts."""
        self.closed = error
        self._polls.close()
        self._wake()

    def end(self, error: TailraceError) -> None:
        """Nothing is settled any more either."""
        self.refuse(error)
        self._set_down()
        self._hand.clear()
        self.settlement.close(error)

    # -- dropping what is not handed out

    def _take_behind(self, deliveries: Sequence[LeasedMessage]) -> Unstarted:
        """Messages are about to go back: take out what is in hand behind them, to go back with them."""
        taken = Unstarted()
        ordering = self.membership.policy.ordering
        for failed in deliveries:
            key = failed.key
            if ordering == "none" or (ordering == "key" and key is None):
                continue
            place, number = failed.rows.lease.place, failed.offset
            found = self._take_out(behind(place, number, key if ordering == "key" else None))
            taken.merge(found)
            if self.parking is not None:
                taken.merge(self.parking.behind(failed))
        self._polls.wasted(sum(len(offsets) for offsets in taken.leases.values()))
        return taken

    def _handed_out(self, place: Place) -> list[tuple[int, list[int]]]:
        """What handlers were given of a partition and did not settle yet."""
        waiting: dict[HeldLease, set[int]] = {}
        for rows in self._hand:
            waiting.setdefault(rows.lease, set()).update(rows.offsets())
        parked = Unstarted() if self.parking is None else self.parking.parked()
        for lease, offsets in parked.leases.items():
            waiting.setdefault(lease, set()).update(offsets)
        found = []
        for lease in self.settlement.leases.of(place):
            if given := lease.open - waiting.get(lease, set()):
                found.append((lease.id, spans_of(sorted(given))))
        return found

    def _went_back(self, deliveries: Sequence[LeasedMessage]) -> None:
        """Messages have to come again: the later ones of their keys are not handed out before. The broker
        took them back, too, or is given them now, where nobody here can tell."""
        ordering = self.membership.policy.ordering
        for failed in deliveries:
            lease = failed.rows.lease
            fresh = self.settlement.leases.went_back_before(lease, failed.offset)
            key = failed.key if ordering == "key" else None
            if ordering == "none" or (ordering == "key" and key is None):
                continue
            self.settlement.give_back(self._take_out(behind(lease.place, failed.offset, key, fresh)))

    def _lease_lost(self, lease: HeldLease) -> None:
        """Its messages come again, and what is in hand behind them goes back to come after them."""
        self._forget(self._take_out(lambda rows: range(len(rows)) if rows.lease is lease else ()))
        if lease.gone and self.membership.policy.ordering != "none":
            self.settlement.give_back(self._take_out(behind(lease.place, min(lease.gone), None)))

    def _take_out(self, chosen: Chosen, keep: int = 0) -> Unstarted:
        self._set_down()
        taken = self._hand.take_out(chosen, keep)
        self._polls.ask()
        return taken

    def _take_unstarted(self, places: set[Place]) -> Unstarted:
        """All of some partitions that was not started: also what waits behind a handler."""
        taken = self._take_out(all_of(places))
        if self.parking is not None:
            taken.merge(self.parking.give_up(places))
        return taken

    def _forget(self, taken: Unstarted) -> None:
        for lease, offsets in taken.leases.items():
            self.settlement.leases.forget(lease, offsets)

    def return_unstarted(self) -> None:
        """Nothing more is handed out: all that is in hand goes back at once."""
        self._polls.withdraw()
        self._set_down()
        self.settlement.give_back(self._hand.take_out(lambda rows: range(len(rows))))

    # -- other members

    def hungry(self, places: set[Place]) -> None:
        """See `membership.Holder`: look on for a moment, then give back what is not started soon."""
        if not self._looking and (self._hand.count or self._rows is not None):
            self._looking = True
            seen = self.started(), self.settlement.now_ms()
            self._loop.call_later(LOOK_MS / 1000, self._share, places, *seen)

    def started(self) -> int:
        """See `lease_polls.Taker`."""
        last = self.last
        return self._started + (0 if last is None else last.row + 1)

    def _share(self, places: set[Place], started: int, since_ms: float) -> None:
        self._looking = False
        now_ms = self.settlement.now_ms()
        pace = (self.started() - started) / max(LOOK_MS, now_ms - since_ms)
        soon = int(pace * SOON_MS)
        self._polls.be_modest(soon)
        way_made = self._polls.make_way({topic for topic, _ in places})
        ordering = self.membership.policy.ordering
        held = self._orders_at_work(ordering)
        self.settlement.give_back(self._take_out(fit_for_others(places, soon, held, ordering)), way_made)

    def _orders_at_work(self, ordering: str) -> set[object]:
        """What the messages that handlers have keep their order with: nobody else may have what is behind
        them."""
        handed = [*self.latest] if self.last is None else [self.last, *self.latest]
        given = [message for message in handed if message.rows.lease.is_open(message.offset)]
        held = {order_of(message, ordering) for message in given} - {None}
        return held if self.parking is None else held | self.parking.orders()

    # -- partitions

    def pause(self, places: set[Place]) -> None:
        """Hand out nothing more of these; what was leased ahead of them is given back."""
        self._polls.pause(places)
        self.settlement.give_back(self._take_unstarted(places))

    def resume(self, places: set[Place]) -> None:
        """Go on with these, or with all."""
        self._polls.resume(places)

    def granted(self, places: dict[Place, int]) -> None:
        """See `membership.Holder`."""
        self.settlement.configure(self.membership.policy.lease_ms)
        for (topic, partition), generation in places.items():
            self._polls.ready.setdefault(topic, {})[partition] = generation
        self._polls.renew()

    def reconfigured(self) -> None:
        """See `membership.Holder`."""
        self.settlement.configure(self.membership.policy.lease_ms)
        self._polls.renew()

    def _not_ready(self, places: set[Place]) -> None:
        for topic, partition in places:
            self._polls.ready.get(topic, {}).pop(partition, None)
        self._polls.renew()

    def withdrawn(self, places: set[Place]) -> None:
        """See `membership.Holder`."""
        self._polls.withdraw({topic for topic, _ in places})
        self._not_ready(places)
        self.settlement.give_back(self._take_unstarted(places))

    async def release(self, places: set[Place], seconds: float) -> None:
        """See `membership.Holder`: wait for what is handed out. What is not settled in time goes back with
        the partition, without a failure."""
        until_s = self._loop.time() + seconds
        await self.settlement.settled(places, seconds)
        # What is on its way here goes back before the partition does: later, it would count as delivered.
        await self._polls.answered(places, until_s - self._loop.time())
        await self.settlement.flushed(places)
        for place in places:
            for lease in self.settlement.leases.of(place):
                self.settlement.lose(lease)

    def dropped(self, places: set[Place]) -> None:
        """See `membership.Holder`."""
        self._not_ready(places)
        self._forget(self._take_unstarted(places))

    def tick(self) -> None:
        """See `membership.Holder`."""
        self.settlement.tick()

    def woken(self) -> None:
        """See `membership.Holder`."""
        self._polls.renew()

    # -- what comes

    def is_open(self) -> bool:
        """See `lease_polls.Taker`."""
        return self._begun and self.closed is None and not self._stopping

    def is_waiting(self) -> bool:
        """See `lease_polls.Taker`."""
        return bool(self._waiters)

    def out_of_hand(self) -> int:
        """See `lease_polls.Taker`."""
        current = self._rows
        late = current is not None and len(current) * self.pace.message_ms >= SOON_MS
        return len(current) if late and current is not None else 0

    def parked(self) -> list[tuple[LeasedMessage, bool]]:
        """See `lease_polls.Taker`."""
        return [] if self.parking is None else self.parking.firsts()

    def policy(self) -> GroupPolicy:
        """See `lease_polls.Taker`."""
        return self.membership.policy

    def held(self, topic: str) -> list[int]:
        """See `lease_polls.Taker`."""
        leases = self.settlement.leases.of()
        return [lease.id for lease in leases if lease.place[0] == topic and lease.error is None]

    def fenced(self) -> None:
        """See `lease_polls.Taker`."""
        self.membership.rejoin()

    def arrived(self, answer: Answer) -> None:
        """See `lease_polls.Taker`. Leases may be over already: this process stood still before it looked."""
        topic, parts = answer.topic, answer.parts
        data = memoryview(parts[0]) if len(parts) == 1 else memoryview(b"".join(parts))
        ready = self._polls.ready.get(topic, {})
        in_time = deadline_ms(answer.granted_ms, answer.lease_ms) > self.settlement.now_ms()
        at = 0
        for grant in answer.reply.grants:
            piece = data[at : at + grant.nbytes]
            at += grant.nbytes
            place, generation = (topic, grant.partition), answer.generations.get(grant.partition, -1)
            useful = ready.get(grant.partition) == generation and place not in self._polls.paused
            if useful and in_time and self.closed is None and not self._stopping:
                self._add(place, generation, grant, piece, answer)
            else:
                self._not_wanted(topic, grant)
        self._wake()

    def go_on(self) -> None:
        """See `lease_polls.Taker`."""
        self._wake()

    def may_bring_before(self, rank: int) -> bool:
        """See `handler_runner.Intake`."""
        return not self._stopping and self.closed is None and self._polls.may_bring_before(rank)

    def ask(self) -> None:
        """See `handler_runner.Intake`."""
        self._polls.ask()

    async def news(self) -> None:
        """See `handler_runner.Intake`."""
        await self._listeners.join()

    def _not_wanted(self, topic: str, grant: Grant) -> None:
        """Nobody here wants it any more; when this does not arrive, the lease ends by itself."""
        spans = [n for first, count, _, _ in sorted(grant.runs) for n in (first, first + count)]
        request = GiveBack(topic, grant.partition, self._request.group, [(grant.lease, spans)])
        self._verbs.submit(request, b"", lambda reply, parts: None)

    def _add(self, place: Place, generation: int, grant: Grant, data: Buffer, answer: Answer) -> None:
        for older, offsets in self.settlement.leases.superseded(place, grant.runs).items():
            self._take_out(of_lease(older, offsets))
            self.settlement.leases.forget(older, offsets)
        lease = self.settlement.leases.add(place, generation, grant)
        try:
            found = unpack(lease, self.settlement, grant, data)
        except TailraceError as error:
            self.settlement.lose(lease)
            self.settlement.leases.drop_done(lease)
            self.failed(error)
            return
        self.settlement.started(lease, answer.granted_ms, answer.lease_ms)
        now_us = self.wall_ns() // 1000
        for rows in found:
            foreign = foreign_rows(rows, self._request.group)
            if foreign:
                deliveries = list(rows.deliveries(Delivery))
                for row in foreign:
                    deliveries[row].ack_nowait()
                rows.keep(sorted(set(range(len(rows))) - set(foreign)))
            if early := self._behind_returning(rows, answer.asked):
                self._send_back_early(rows, early)
            if len(rows):
                policy, current = self.membership.policy, self._rows
                rows.urgent = answer.urgent
                if current is not None and overtakes(rows, current, policy, urgent=answer.urgent):
                    self._set_down()
                self._hand.add(rows, policy, now_us, urgent=answer.urgent)

    def _behind_returning(self, rows: LeasedRows, asked: int) -> list[int]:
        """Rows behind messages that went back since they were asked for, and did not come with them: they
        were granted before, and the broker took them back, too, or they wait for the others."""
        ordering = self.membership.policy.ordering
        went_back = self._polls.went_back_since(rows.lease.place, asked)
        if not went_back or ordering == "none":
            return []
        keys = rows.values("key") if ordering == "key" else None
        found: set[int] = set()
        for first in went_back:
            if ordering == "partition":
                lows: list[int | None] = [min(first.values())] * len(rows)
            else:
                lows = [None if key is None else first.get(key) for key in keys or ()]
            known = {low for low in lows if low is not None and not rows.lease.has(low)}
            pairs = zip(rows.offsets(), lows, strict=False)
            found.update(
                row
                for row, (offset, low) in enumerate(pairs)
                if low is not None and low in known and offset > low
            )
        return sorted(found)

    def _send_back_early(self, rows: LeasedRows, early: list[int]) -> None:
        offsets, keys = rows.offsets(), rows.values("key")
        unstarted = Unstarted()
        for row in early:
            unstarted.add(rows.lease, offsets[row], None if keys is None else keys[row])
        rows.keep([row for row in range(len(rows)) if row not in set(early)])
        self._polls.wasted(len(early))
        self.settlement.give_back(unstarted)
