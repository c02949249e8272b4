"""Handlers at work: `Consumer.run` with several at a time, messages of one key one after the other.

Coroutine functions run on the loop, plain functions in threads (`plain_handlers`). A key whose handler is
slow parks only its own messages; others go on, up to a bound on what is parked. What is parked may start as
soon as its key is free; what is more urgent and in hand goes before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from tailrace.client.queue.delivery import Delivery, LeasedMessage, order_of
from tailrace.client.queue.hand import rank_of
from tailrace.client.queue.handler_verdicts import Reject, Retry, as_text, delay_of, described
from tailrace.client.queue.held_leases import Unstarted
from tailrace.client.queue.pace import Pace
from tailrace.client.queue.threaded_handlers import BlockingDelivery, PlainHandler, is_async
from tailrace.core.model.group_commands import Place
from tailrace.errors import TailraceError

log = logging.getLogger("tailrace.consumer")
Handler = Callable[[Delivery], Awaitable[Any]] | Callable[[BlockingDelivery], Any]
Picked = tuple[Delivery, object]
"""A message and its key; None: it has none."""


class Intake(Protocol):
    """What is at hand."""

    def ready(self) -> Delivery | None:
        """Hand out the next message when one is at hand and nobody else is waiting for it."""
        ...

    def next_rank(self) -> int | None:
        """The rank of what `ready` hands out; None: there is nothing."""
        ...

    def may_bring_before(self, rank: int) -> bool:
        """Whether something more urgent than this may come in a moment, and shall be waited for."""
        ...

    def ask(self) -> None:
        """Something that was handed out before is started now: other messages may be wanted."""
        ...

    async def news(self) -> None:
        """Return when something has come, or does not come."""
        ...


class HandlerRunner:
    """One run of a handler over a consumer."""

    def __init__(
        self,
        pull: Callable[[], Awaitable[Delivery]],
        intake: Intake,
        handler: Handler,
        *,
        concurrency: int,
        settle: bool,
        ordering: str,
        parked_max: int,
        pace: Pace,
        now_ms: Callable[[], float],
    ) -> None:
        self._next = pull
        self._intake = intake
        self._handler: Callable[[Any], Any] = handler
        self._plain = None if is_async(handler) else PlainHandler(handler, concurrency)
        self._concurrency = concurrency
        self._settle = settle
        self._ordering = ordering
        self._parked_max = parked_max
        self._pace = pace
        self._now_ms = now_ms
        self._parked: dict[object, deque[Delivery]] = {}
        """Keys at work, or free again, and what waits behind the message that is or was handled."""
        self._free: list[object] = []
        """Keys of these that nobody works on, in the order in which they became free."""
        self._parked_count = 0
        self._room = asyncio.Event()
        self._pulling = asyncio.Lock()
        self._over = False

    async def run(self) -> None:
        """Until the source ends. What a handler raises is raised here when it has to settle by itself."""
        try:
            await self._run()
        finally:
            if self._plain is not None:
                self._plain.close()

    async def _run(self) -> None:
        if self._concurrency == 1:
            next_one, handle = self._next, self._handle
            while True:
                try:
                    delivery = await next_one()
                except StopAsyncIteration:
                    return
                await handle(delivery)
        loop = asyncio.get_running_loop()
        self._pace.begin(self._concurrency)
        workers = [loop.create_task(self._work()) for _ in range(self._concurrency)]
        try:
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in done:
                worker.result()
        finally:
            self._over = True
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for parked in self._parked.values():
                self._return(parked)
            self._parked.clear()
            self._pace.begin(0)

    async def _pull(self) -> Delivery | None:
        try:
            return await self._next()
        except StopAsyncIteration:
            self._over = True
            return None

    async def _work(self) -> None:
        """One of the workers. While messages are at hand and none that was parked may start, each costs one
        look at the clock and no coroutine but that of its handler."""
        pace, now_ms = self._pace, self._now_ms
        began_ms = now_ms()
        while True:
            picked = None if self._free else self._pick_ready()
            if picked is None:
                picked = await self._pick()
                if picked is None:
                    return
                began_ms = now_ms()
            delivery, key = picked
            pace.busy += 1
            try:
                await self._handle(delivery)
            finally:
                pace.busy -= 1
            ended_ms = now_ms()
            pace.worked(ended_ms - began_ms)
            began_ms = ended_ms
            if key is not None:
                self._set_free(key, delivery)

    def _set_free(self, key: object, delivery: Delivery) -> None:
        """A message was handled: what was parked behind it may start."""
        parked = self._parked[key]
        if delivery.rows.lease.comes_again(delivery.offset):
            self._return_stale(parked, delivery)
        if parked:
            self._free.append(key)
        else:
            del self._parked[key]

    async def _pick(self) -> Picked | None:
        """The same as `_pick_ready`, or one that was parked and may start; wait for a message while there is
        neither."""
        while not self._over:
            full = self._parked_count >= self._parked_max
            rank = self._rank_parked()
            in_hand = None if full else self._intake.next_rank()
            if rank is not None and (in_hand is None or rank <= in_hand):
                if self._intake.may_bring_before(rank):
                    await self._intake.news()
                elif (picked := self._unparked()) is not None:
                    return picked
                continue
            if full:
                self._room.clear()
                await self._room.wait()
                continue
            if rank is None or in_hand is None:
                if (picked := self._pick_ready()) is not None:
                    return picked
                if self._parked_count >= self._parked_max:
                    continue
            elif (delivery := self._intake.ready()) is not None:
                if (picked := self._claim(delivery)) is not None:
                    return picked
                continue
            elif self._intake.may_bring_before(in_hand):
                await self._intake.news()
                continue
            elif self._intake.next_rank() is None:
                continue  # The leases of all that was in hand are over.
            self._pace.waits(1)
            try:
                async with self._pulling:  # One of the workers waits for more, the others for their turn.
                    delivery = await self._pull()
            finally:
                self._pace.waits(-1)
            if delivery is None:
                break
            if (picked := self._claim(delivery)) is not None:
                return picked
        return None

    def _pick_ready(self) -> Picked | None:
        """The next message at hand whose key nobody works on, and that key; others are parked behind their
        key, as long as there is room."""
        while not self._over and self._parked_count < self._parked_max:
            delivery = self._intake.ready()
            if delivery is None:
                break
            picked = self._claim(delivery)
            if picked is not None:
                return picked
        return None

    def _claim(self, delivery: Delivery) -> Picked | None:
        """Begin with the key of a message, or park it behind the one that is at work."""
        key = order_of(delivery, self._ordering)
        if key is not None:
            parked = self._parked.get(key)
            if parked is not None:
                parked.append(delivery)
                self._parked_count += 1
                self._pace.parked()
                return None
            self._parked[key] = deque()
        self._pace.started()
        return delivery, key

    def _rank_parked(self) -> int | None:
        """The most urgent rank of those that were parked and may start now."""
        for key in [key for key in self._free if not self._parked[key]]:
            self._free.remove(key)
            del self._parked[key]
        return min((rank_of(self._parked[key][0]) for key in self._free), default=None)

    def _unparked(self) -> Picked | None:
        """The most urgent one of those, the first of several; None: its lease is over."""
        key = min(self._free, key=lambda key: rank_of(self._parked[key][0]))
        delivery = self._parked[key].popleft()
        self._parked_count -= 1
        self._room.set()
        lease = delivery.rows.lease
        if delivery.rows.settling.is_over(lease) or lease.is_lost(delivery.offset):
            return None
        self._free.remove(key)
        self._intake.ask()
        return delivery, key

    async def _handle(self, delivery: Delivery) -> None:
        stopped: asyncio.CancelledError | None = None
        try:
            if self._plain is None:
                await self._handler(delivery)
            else:
                loop = asyncio.get_running_loop()
                subject = BlockingDelivery(delivery.rows, delivery.value, delivery.row, loop)
                error, stopped = await self._plain.call(subject)
                if error is not None:
                    raise error
        except (Retry, Reject) as verdict:
            await self._failed(delivery, verdict)
        except Exception as error:
            if not self._settle:
                raise
            place = f"{delivery.topic}/{delivery.partition}@{delivery.offset}"
            log.exception("the handler failed on %s, attempt %d", place, delivery.attempt)
            await self._failed(delivery, error)
        else:
            # Not `settled`: that searches what has gathered, and to acknowledge twice is harmless.
            if self._settle and delivery.rows.lease.is_open(delivery.offset):
                try:
                    delivery.ack_nowait()
                except TailraceError as error:
                    log.warning("not acknowledged: %s", error)
        if stopped is not None:
            raise stopped

    async def _failed(self, delivery: Delivery, error: Exception) -> None:
        """Give back as a failure, or reject. Later messages of its key go back with a failure and are not
        handled; those behind a rejected message stay."""
        rejected = isinstance(error, Reject)
        try:
            if rejected:
                await delivery.reject(as_text(error))
            else:
                await delivery.nack(delay_of(error), described(error))
        except TailraceError as problem:
            log.warning("not given back: %s", problem)
            # Nobody works on it any more: not extended, its lease ends by itself if this does not arrive.
            delivery.rows.settling.let_go(delivery)
            rejected = False
        if not rejected and (parked := self._parked.get(order_of(delivery, self._ordering))):
            self._return_stale(parked, delivery)

    def _return_stale(self, parked: deque[Delivery], before: Delivery) -> None:
        """A message comes again: what was parked behind it comes after it, but for what was leased since."""
        fresh = before.rows.settling.went_back_before(before)
        stale = [delivery for delivery in parked if delivery.rows.lease.number < fresh]
        if stale:
            self._return(stale)
            kept = [delivery for delivery in parked if delivery.rows.lease.number >= fresh]
            parked.clear()
            parked.extend(kept)

    def _return(self, stale: Iterable[Delivery]) -> None:
        """Give back what was not started, without waiting for it."""
        returned = list(stale)
        if returned:
            returned[0].rows.settling.give_back(self._unpark(returned))

    def _unpark(self, gone: Iterable[Delivery]) -> Unstarted:
        """These do not wait here any more; they were not started."""
        unstarted = Unstarted()
        for delivery in gone:
            unstarted.add(delivery.rows.lease, delivery.offset, delivery.key)
            self._parked_count -= 1
        self._room.set()
        return unstarted

    # -- as `parking.Parking`

    def give_up(self, places: set[Place]) -> Unstarted:
        """See `parking.Parking`."""
        gone = []
        for parked in self._parked.values():
            mine = [delivery for delivery in parked if delivery.rows.lease.place in places]
            if mine:
                kept = [delivery for delivery in parked if delivery.rows.lease.place not in places]
                parked.clear()
                parked.extend(kept)
                gone += mine
        return self._unpark(gone)

    def parked(self) -> Unstarted:
        """See `parking.Parking`."""
        unstarted = Unstarted()
        for parked in self._parked.values():
            for delivery in parked:
                unstarted.add(delivery.rows.lease, delivery.offset, delivery.key)
        return unstarted

    def orders(self) -> set[object]:
        """See `parking.Parking`."""
        free = set(self._free)
        return {key for key, parked in self._parked.items() if parked or key not in free}

    def firsts(self) -> list[tuple[LeasedMessage, bool]]:
        """See `parking.Parking`."""
        free = set(self._free)
        return [(parked[0], key in free) for key, parked in self._parked.items() if parked]

    def behind(self, failed: LeasedMessage) -> Unstarted:
        """See `parking.Parking`."""
        parked = self._parked.get(order_of(failed, self._ordering))
        if not parked:
            return Unstarted()
        gone = [delivery for delivery in parked if delivery.offset > failed.offset]
        kept = [delivery for delivery in parked if delivery.offset <= failed.offset]
        parked.clear()
        parked.extend(kept)
        return self._unpark(gone)
