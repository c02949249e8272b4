"""Settling what a consumer holds: acknowledgements in the background, nacks, rejections, extensions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from tailrace.client.queue.delivery import LeasedMessage
from tailrace.client.queue.held_leases import (
    UNDER_WAY,
    AckRun,
    FailedAck,
    FirstOfKeys,
    HeldLease,
    HeldLeases,
    Unstarted,
    failures,
    offsets_of,
    spans_of,
)
from tailrace.client.rpc.calls import error_of
from tailrace.client.rpc.waiters import Waiters
from tailrace.client.sdk_tuning import (
    DELAY_S_MAX,
    ERROR_CHARS_MAX,
    FAILED_ACKS_KEPT,
    PAUSE_S_MAX,
    PAUSE_S_MIN,
    TICK_S_MIN,
)
from tailrace.core.model.commands import Reply, Request
from tailrace.core.model.group_commands import Place
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import Ack, Extend, Extended, GiveBack, Nack, RejectMessages, Settled
from tailrace.errors import InvalidRequest, LeaseLost, TailraceError
from tailrace.format.frame import Buffer
from tailrace.ports import BrokerVerbs

_SILENCE = Refusal("timeout", "no answer in time", "unknown")


class AckSender:
    """See `deliveries.Settling`. `behind` is called when messages are about to be given back: it takes out
    what is in hand behind them. `started` tells what handlers have of a partition. `going_back` is called
    when a request leaves that gives messages back, with the first of each key. `went_back` is called when
    messages have to come again, because they were given back or could not be acknowledged, so that those
    behind them wait until they do; `lost` when a lease is over."""

    def __init__(
        self,
        verbs: BrokerVerbs,
        group: str,
        timeout: float,
        *,
        behind: Callable[[Sequence[LeasedMessage]], Unstarted],
        started: Callable[[Place], list[tuple[int, list[int]]]],
        going_back: Callable[[Place, FirstOfKeys], None],
        went_back: Callable[[Sequence[LeasedMessage]], None],
        lost: Callable[[HeldLease], None],
    ) -> None:
        self.group = group
        self.leases = HeldLeases(self._gathered)
        self.failures: list[FailedAck] = []
        self.lease_ms = 30_000
        self.wrapper: object = None
        self._verbs = verbs
        self._timeout = timeout
        self._behind = behind
        self._started = started
        self._going_back = going_back
        self._went_back = went_back
        self._lost = lost
        self._loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._clock = verbs.clock
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0
        self._under_way: dict[int, tuple[float, Callable[[Reply], None]]] = {}
        """Requests without an answer: until when they may have one, and who is told."""
        self._watch: asyncio.TimerHandle | None = None
        self._idle = Waiters()
        self._closed = False

    # -- time

    def now_ms(self) -> float:
        """Time as far as leases are concerned."""
        return self._clock.elapsed_ms()

    def is_over(self, lease: HeldLease) -> bool:
        """Whether a lease is over, or may be: this process stood still, and nobody extended it. Then nothing
        of it is handed out any more."""
        if lease.error is None and lease.deadline_ms <= self.now_ms():
            self.lose(lease)
        return lease.error is not None

    def configure(self, lease_ms: int) -> None:
        """The group has this option from now on."""
        self.lease_ms = lease_ms

    def wrap(self, wrapper: object) -> None:
        """See `delivery.Settling.wrapper`."""
        self.wrapper = wrapper

    def went_back_before(self, delivery: LeasedMessage) -> int:
        """See `delivery.Settling.went_back_before`."""
        return self.leases.went_back_before(delivery.rows.lease, delivery.offset)

    # -- acknowledgements

    def _gathered(self, place: Place) -> None:
        self._loop.call_soon(self._flush, place)

    def _flush(self, place: Place) -> None:
        run, failed = self.leases.take(place, self._loop.time())
        if failed:
            self._add_failures(failed)
        if run is not None:
            self._send(run, PAUSE_S_MIN)
        else:
            self._idle.wake()

    def _send(self, run: AckRun, pause_s: float) -> None:
        topic, partition = run.place

        def answered(reply: Reply) -> None:
            if self._closed:
                return
            if isinstance(reply, Refusal):
                error = error_of(reply)
                late = self._loop.time() - run.since_s >= self._timeout
                if error.retriable and not late:
                    self._loop.call_later(pause_s, self._send, run, min(pause_s * 2, PAUSE_S_MAX))
                    return
                self._over(run, error)
            else:
                assert isinstance(reply, Settled)
                self._over(run, reply)

        self._submit(Ack(topic, partition, self.group, run.leases()), answered)

    def _over(self, run: AckRun, answer: Settled | TailraceError) -> None:
        if isinstance(answer, Settled) and answer.lost:
            self._suspect()
        if failed := self.leases.answered(run, answer):
            self._add_failures(failed)
        self._flush(run.place)

    def _submit(self, request: Request, answered: Callable[[Reply], None]) -> None:
        """Send, and be answered once, within the client's timeout. One timer serves all requests: they are
        due in the order in which they left."""
        self._count += 1
        number, under_way = self._count, self._under_way

        def once(reply: Reply, parts: Sequence[Buffer]) -> None:
            if under_way.pop(number, None) is not None:
                answered(reply)

        under_way[number] = (self._loop.time() + self._timeout, answered)
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout, self._give_up)
        try:
            self._verbs.submit(request, b"", once)
        except BaseException:
            under_way.pop(number, None)
            raise

    def _give_up(self) -> None:
        """Answer the requests that got no answer in time."""
        self._watch = None
        now_s = self._loop.time()
        while self._under_way:
            number, (due_s, answered) = next(iter(self._under_way.items()))
            if due_s > now_s:
                self._watch = self._loop.call_at(due_s, self._give_up)
                return
            del self._under_way[number]
            answered(_SILENCE)

    def _add_failures(self, failed: list[FailedAck]) -> None:
        self.failures += failed[: max(0, FAILED_ACKS_KEPT - len(self.failures))]

    def ack_late(self, delivery: LeasedMessage) -> None:
        """An acknowledgement from another thread. If it comes too late, that thread is told by `failures`."""
        lease = delivery.rows.lease
        lease.acks.append(delivery.offset)
        if lease.idle:
            try:
                lease.wake()
            except TailraceError as error:
                self._add_failures(failures(lease.place, [delivery.offset], error))

    async def flushed(self, places: Iterable[Place] | None = None) -> None:
        """Wait until the acknowledgements so far have been answered."""
        wanted = None if places is None else list(places)
        while self.leases.pending(wanted):
            await self._idle.join()

    async def settled(self, places: Iterable[Place], seconds: float) -> None:
        """Wait until nothing of these partitions is left to settle, so long at most."""
        wanted = set(places)
        until_s = self._loop.time() + seconds
        while self.leases.left(wanted) and self._loop.time() < until_s and not self._closed:
            await asyncio.wait([self._idle.join()], timeout=until_s - self._loop.time())

    def report(self) -> None:
        """Raise one error for all background failures since the last report."""
        failures, self.failures = self.failures, []
        if failures:
            error = failures[0].error
            if len(failures) > 1 or failures[0].end - failures[0].first > 1:
                shown = "; ".join(str(failure) for failure in failures[:20])
                count = sum(failure.end - failure.first for failure in failures)
                error = type(error)(
                    f"{count} acknowledgements failed: {shown}", outcome=error.outcome, failures=failures
                )
            raise error

    # -- settling and waiting

    async def ack(self, deliveries: Sequence[LeasedMessage]) -> None:
        """Acknowledge; returns when all are durable, raises the first failure."""
        answers: list[asyncio.Future[None]] = []
        for delivery in deliveries:
            answer: asyncio.Future[None] = self._loop.create_future()
            answers.append(answer)
            self.leases.ack(delivery.rows.lease, delivery.offset, _telling(answer))
        if len(answers) == 1:
            try:
                await answers[0]
            except LeaseLost:
                self._went_back(deliveries)
                raise
            return
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
        late = [d for d, error in zip(deliveries, outcomes, strict=True) if isinstance(error, LeaseLost)]
        if late:
            self._went_back(late)
        for error in outcomes:
            if error is not None:
                raise error

    async def nack(
        self, deliveries: Sequence[LeasedMessage], delay: float | None, error: str, failure: bool
    ) -> None:
        """Give back, as a failure or without one."""
        delay_ms = None if delay is None else _delay_ms(delay)
        text = _sendable("error", error)
        behind = self._behind([delivery for delivery in deliveries if not delivery.settled])
        for lease, offsets in behind.leases.items():
            self.leases.forget(lease, offsets)
        places = {delivery.rows.lease.place for delivery in deliveries}

        def make(lease: HeldLease, spans: list[int]) -> Request:
            topic, partition = lease.place
            started = self._started(lease.place)
            return Nack(topic, partition, self.group, lease.id, spans, delay_ms, text, failure, started)

        def done(lease: HeldLease, offsets: Iterable[int]) -> None:
            # Now, not when the caller goes on: what is granted after this answer is as it should be.
            back = set(offsets)
            lease.failed.update(dict.fromkeys(back, self.leases.granted))
            self._went_back([d for d in deliveries if d.rows.lease is lease and d.offset in back])

        for place in places:
            self._going_back(place, _first_of(deliveries, place))
        try:
            await self._settle(deliveries, make, done)
        except LeaseLost:
            self._went_back(deliveries)
            raise
        finally:
            for place in places:
                if leases := behind.spans(place):
                    # Mostly they went with it; nobody knows for sure.
                    self._send_back(place, leases, behind.first[place])

    async def reject(self, deliveries: Sequence[LeasedMessage], reason: str, poison: bool) -> None:
        """Send to the dead letters."""
        kind = "poison" if poison else "rejected"
        text = _sendable("reason", reason)

        def make(lease: HeldLease, spans: list[int]) -> Request:
            topic, partition = lease.place
            return RejectMessages(topic, partition, self.group, lease.id, spans, kind, text)

        try:
            await self._settle(deliveries, make)
        except LeaseLost:
            self._went_back(deliveries)
            raise

    async def _settle(
        self,
        deliveries: Sequence[LeasedMessage],
        make: Callable[[HeldLease, list[int]], Request],
        done: Callable[[HeldLease, Iterable[int]], None] = lambda lease, offsets: None,
    ) -> None:
        """One request for each lease, all at once; raises the first failure when all are answered. `done` is
        called with what is settled as soon as an answer is there."""
        taken: dict[HeldLease, list[int]] = {}
        problem: TailraceError | None = None
        for delivery in deliveries:
            lease, offset = delivery.rows.lease, delivery.offset
            try:
                if lease.take(offset):
                    taken.setdefault(lease, []).append(offset)
            except TailraceError as error:
                problem = problem or error
        works = [self._settle_lease(lease, sorted(offsets), make, done) for lease, offsets in taken.items()]
        if len(works) == 1:
            await works[0]
        else:
            for outcome in await asyncio.gather(*works, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        if problem is not None:
            raise problem

    async def _settle_lease(
        self,
        lease: HeldLease,
        offsets: list[int],
        make: Callable[[HeldLease, list[int]], Request],
        done: Callable[[HeldLease, Iterable[int]], None],
    ) -> None:
        """Whatever ends the wait, the request goes on by itself until it is answered."""
        answer = self._loop.create_future()
        request, asked = make(lease, spans_of(offsets)), frozenset(offsets)
        since_s = self._loop.time()
        doubtful = False

        def answered(reply: Reply, pause_s: float = PAUSE_S_MIN) -> None:
            nonlocal doubtful
            if isinstance(reply, Refusal):
                error = error_of(reply)
                doubtful = doubtful or error.outcome == "unknown"
                late = self._loop.time() - since_s >= self._timeout
                if error.retriable and not late and not self._closed:
                    again = min(pause_s * 2, PAUSE_S_MAX)
                    self._loop.call_later(
                        pause_s, self._submit, request, lambda reply: answered(reply, again)
                    )
                    return
                self.leases.refused(lease, offsets)
                _telling(answer)(error)
                return
            assert isinstance(reply, Settled)
            stale = (spans for number, spans in reply.lost if number == lease.id)
            lost = [offset for spans in stale for offset in offsets_of(spans) if offset in asked]
            # After an attempt whose answer was lost the receipt may be stale because of that very attempt.
            if doubtful and isinstance(request, Nack):
                lost = []
            if lost:
                self._suspect()
            self.leases.settled(lease, offsets, lost)
            done(lease, set(offsets).difference(lost))
            self._idle.wake()
            _telling(answer)(lease.lost(lost[0]) if lost else None)

        try:
            self._submit(request, answered)
        except Exception:  # It cannot even be sent.
            self.leases.refused(lease, offsets)
            raise
        await answer

    async def extend(self, lease: HeldLease, ms: int) -> None:
        """Move the deadline of a lease to now + `ms`."""
        if isinstance(ms, bool) or not isinstance(ms, int) or ms < 1:
            raise InvalidRequest(f"extend: milliseconds, at least 1, not {ms!r}")
        if lease.error is not None:
            raise lease.error
        if lease.done:
            raise LeaseLost("every message of this lease is settled: there is nothing to extend")
        answer: asyncio.Future[None] = self._loop.create_future()
        self._extend(lease.place, [lease], ms, _telling(answer))
        await answer
        if lease.error is not None:
            raise lease.error

    def let_go(self, delivery: LeasedMessage) -> None:
        """Return a message that a handler had, without a failure; nobody waits for it."""
        lease, offset = delivery.rows.lease, delivery.offset
        if offset in lease.open:
            place, spans = lease.place, [offset, offset + 1]
            self.leases.forget(lease, [offset])
            self._going_back(place, _first_of((delivery,), place))
            started = self._started(place)
            request = Nack(*place, self.group, lease.id, spans, failure=False, started=started)
            # When it does not arrive, the lease ends by itself.
            self._verbs.submit(request, b"", lambda reply, parts: None)
            self._went_back((delivery,))
            self._idle.wake()

    def give_back(self, unstarted: Unstarted, then: Callable[[], None] | None = None) -> None:
        """Return messages that no handler got, as if they had never been delivered. `then` is called once the
        broker has answered, whatever it said, or at once if there is nothing to return."""
        for lease, offsets in unstarted.leases.items():
            offsets[:] = lease.open.intersection(offsets)
            self.leases.forget(lease, offsets)
        returns = [(place, unstarted.spans(place), first) for place, first in unstarted.first.items()]
        returns = [item for item in returns if item[1]]
        left = len(returns)

        def answered() -> None:
            nonlocal left
            left -= 1
            if then is not None and left <= 0:
                then()

        for place, leases, first in returns:
            self._send_back(place, leases, first, answered)
        if not returns:
            answered()

    def _send_back(
        self,
        place: Place,
        leases: list[tuple[int, list[int]]],
        first: FirstOfKeys,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        request = GiveBack(*place, self.group, leases)
        since_s = self._loop.time()
        told = False

        def send(pause_s: float) -> None:
            self._going_back(place, first)
            self._submit(request, lambda reply: answered(reply, pause_s))

        def answered(reply: Reply, pause_s: float) -> None:
            nonlocal told
            late = self._loop.time() - since_s >= self._timeout
            if isinstance(reply, Refusal) and error_of(reply).retriable and not (late or self._closed):
                self._loop.call_later(pause_s, send, min(pause_s * 2, PAUSE_S_MAX))
            if not told:
                told = True
                then()

        send(PAUSE_S_MIN)

    # -- extension

    def started(self, lease: HeldLease, granted_ms: float, lease_ms: int) -> None:
        """A lease has been granted, at that time or later, for so long."""
        self.leases.started(lease, granted_ms, lease_ms)
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is None and not self._closed:
            due_ms = self.leases.next_due_ms()
            if due_ms < UNDER_WAY:
                wait_s = max(TICK_S_MIN, (due_ms - self.now_ms()) / 1000)
                self._timer = self._loop.call_later(wait_s, self._on_timer)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self.tick()
        self._schedule()

    def tick(self) -> None:
        """Extend what wants to be extended now or soon, one request for each partition. The next one leaves
        when it is answered, so that they do not pile up while the broker is away."""
        for place, leases in self.leases.due(self.now_ms() + self.lease_ms / 12).items():
            for lease in leases:
                lease.extend_ms = UNDER_WAY
            self._extend(place, leases, self.lease_ms)

    def _suspect(self) -> None:
        """A receipt was stale. If this process slept, others are, too: find out, before more of what is
        buffered is handed out in vain."""
        for lease in self.leases.of():
            if lease.extend_ms != UNDER_WAY:
                lease.extend_ms = 0
        self.tick()

    def _extend(
        self,
        place: Place,
        leases: list[HeldLease],
        ms: int,
        told: Callable[[TailraceError | None], None] = lambda error: None,
    ) -> None:
        sent_ms = self.now_ms()

        def answered(reply: Reply) -> None:
            if isinstance(reply, Refusal):
                again_ms = self.now_ms() + self.lease_ms / 6
                for lease in leases:
                    lease.extend_ms = min(lease.extend_ms, again_ms)
                told(error_of(reply))
                self._cancel_timer()  # It may be set for a later moment.
                self._schedule()
                return
            assert isinstance(reply, Extended)
            stale = set(reply.lost)
            for lease in leases:
                if lease.id in stale:
                    self.lose(lease)
                else:
                    self.leases.started(lease, sent_ms, ms)
            told(None)
            self._schedule()

        request = Extend(place[0], place[1], self.group, [lease.id for lease in leases], ms)
        self._submit(request, answered)

    def lose(self, lease: HeldLease, error: TailraceError | None = None) -> None:
        """A lease is over before everything was settled."""
        if not lease.done:
            topic, partition = lease.place
            text = f"a lease on {topic}/{partition} is over; its messages may have been delivered again"
            self.leases.lose(lease, error or LeaseLost(text))
            self._lost(lease)
            self._idle.wake()

    def close(self, error: TailraceError) -> None:
        """Nothing is settled any more; who tries hears why not."""
        self._closed = True
        self._add_failures(self.leases.abandon(error))
        self._cancel_timer()
        for lease in self.leases.of():
            self.leases.lose(lease, error)
        self._idle.wake()


def _first_of(deliveries: Sequence[LeasedMessage], place: Place) -> FirstOfKeys:
    first: FirstOfKeys = {}
    for delivery in deliveries:
        if delivery.rows.lease.place == place:
            first[delivery.key] = min(delivery.offset, first.get(delivery.key, delivery.offset))
    return first


def _delay_ms(delay: float) -> int:
    number = isinstance(delay, int | float) and not isinstance(delay, bool)
    if not (number and 0 <= delay <= DELAY_S_MAX):
        raise InvalidRequest(f"delay: seconds, from 0 to {DELAY_S_MAX:,}, not {delay!r}")
    return round(delay * 1000)


def _sendable(name: str, text: str) -> str:
    """A text for the broker: what cannot be encoded (an undecodable file name in an error) is spelt out."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{name}: a text, not {text!r}")
    return text[:ERROR_CHARS_MAX].encode(errors="backslashreplace").decode()


def _telling(answer: asyncio.Future[None]) -> Callable[[TailraceError | None], None]:
    def told(error: TailraceError | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    return told
