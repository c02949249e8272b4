"""A producer's flow to one partition, without I/O: batches, their numbers, and what to do when they fail.

    open ──full or due──▶ queue ──≤ 16──▶ flight ──stored──▶ settled
                            ▲               │
                            └──retriable────┘   (in order, same numbers, after a pause)

The rules that make a retry harmless:
- Batches are numbered when they first leave, and keep number and boundaries when they leave again; the broker
  knows the last 16.
- After any failure nothing more leaves until everything in flight has come back; then all of it goes again,
  in order.
- A batch that is refused for good did not use its number: those behind it were refused too (a gap) and are
  numbered anew.
- A batch given up with an unknown outcome may have used its number. The flow then takes a new identity, so
  that a reused number can never swallow another batch; what was in flight with it and is equally unknown is
  given up too.
- A quota on bytes or requests is no failure: the flow goes on at that pace. It pauses as long as it is told,
  this does not count as waiting, and afterwards it sends one batch, then two, then four at a time.
- A copy sent over a connection that broke may arrive at any later time. So once a batch was in doubt, no
  later refusal makes its outcome certain, and it is never renumbered under the same identity.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from tailrace.client.messages import Pending, Stored
from tailrace.client.rpc.calls import told_wait_s
from tailrace.client.sdk_tuning import IN_FLIGHT_MAX, PAUSE_S_MAX, PAUSE_S_MIN
from tailrace.core.model.commands import Claimed, ClaimProducer, Publish, Published, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Fenced, TailraceError, Timeout, from_code
from tailrace.format.frame import Buffer

PACING_QUOTAS = frozenset(("requests_per_second", "bytes_per_second"))
"""What refusals call the quotas under which a flow goes on more slowly."""


class Outside(Protocol):
    """What the flow asks of its surroundings."""

    def submit(self, request: Any, body: Buffer, respond: Callable[[Reply, Sequence[Buffer]], None]) -> None:
        """Send a request."""
        ...

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call back after a while."""
        ...

    def now_s(self) -> float:
        """Monotonic time, for deadlines."""
        ...

    def new_producer_id(self) -> int:
        """A fresh random identity."""
        ...

    def retried(self, error: TailraceError) -> None:
        """A batch was refused and is sent again after a pause."""
        ...

    def settled(self, batch: PendingBatch) -> None:
        """A batch has its result or its error."""
        ...

    def future(self) -> Any:
        """An asyncio future."""
        ...


class PendingBatch(Pending):
    """Messages for one partition that travel together. Lists are parallel; a list that nobody needed stays
    None.
    """

    __slots__ = (
        "body",
        "columns",
        "crc",
        "dedup_ids",
        "deliver_ats",
        "doubtful",
        "error",
        "expected_key_sequences",
        "expected_sequence",
        "expires",
        "fielded",
        "gap",
        "give_up_s",
        "headers",
        "ids",
        "keys",
        "nbytes",
        "noticed",
        "outside",
        "partition",
        "priorities",
        "reason",
        "sequence",
        "stored",
        "timestamps",
        "values",
        "waiters",
    )

    def __init__(self, outside: Outside, partition: int, give_up_s: float) -> None:
        self.outside = outside
        self.partition = partition
        self.give_up_s = give_up_s
        self.values: list[Any] = []
        self.keys: list[Any] | None = None
        self.headers: list[Any] | None = None
        self.priorities: list[Any] | None = None
        self.timestamps: list[Any] | None = None
        self.expires: list[Any] | None = None
        self.dedup_ids: list[Any] | None = None
        self.deliver_ats: list[int] | None = None
        self.expected_sequence = 0
        self.expected_key_sequences: list[int] | None = None
        self.fielded = False
        self.nbytes = 0
        self.columns = 0
        self.ids = b""
        self.body: Buffer = b""
        self.crc = 0
        self.sequence: int | None = None
        self.doubtful = False
        self.gap: int | None = None
        self.reason: TailraceError | None = None
        self.stored: Stored | None = None
        self.error: TailraceError | None = None
        self.noticed = False
        self.waiters: list[Any] = []

    @property
    def done(self) -> bool:
        """Whether it has its result or error."""
        return self.stored is not None or self.error is not None

    def settle(self, stored: Stored | None, error: TailraceError | None) -> None:
        """Set the result, once, and wake whoever waits."""
        if self.done:
            return
        self.stored, self.error = stored, error
        self.body = b""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                self.noticed = True
                waiter.set_result(None)
        self.outside.settled(self)

    def wait(self) -> Generator[Any, None, Stored]:
        """Suspend until settled. Cancelling the wait does not touch the batch."""
        if not self.done:
            waiter = self.outside.future()
            self.waiters.append(waiter)
            try:
                yield from waiter
            finally:
                if not self.done:
                    self.waiters.remove(waiter)
        if self.error is not None:
            self.noticed = True
            raise self.error.with_traceback(None)
        assert self.stored is not None
        return self.stored


class PartitionFlow:
    """Everything on its way to one partition."""

    def __init__(self, outside: Outside, topic: str, partition: int, named_id: int | None) -> None:
        self._outside = outside
        self._topic = topic
        self._partition = partition
        self._named = named_id is not None
        self._producer_id = named_id if named_id is not None else outside.new_producer_id()
        self._epoch: int | None = None if self._named else 0
        self._claimed: int | None = None
        self._claiming = False
        self._advancing = False
        self._next_sequence = 0
        self.queue: deque[PendingBatch] = deque()
        self.flight: list[PendingBatch] = []
        self._returned: list[PendingBatch] = []
        self._recovering = False
        self._paused = False
        self._pause_s = PAUSE_S_MIN
        self._told_s = 0.0
        """How long the broker wants to be left alone, by the refusals since the last pause."""
        self._throttled = False
        """Whether one of them was that of a quota that is so much in so much time."""
        self._window = IN_FLIGHT_MAX
        self._hole: int | None = None
        self._renew = False
        self.dead: TailraceError | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is in flight; a linger makes sense only then."""
        return bool(self.flight) or self._recovering or self._claiming or self._paused

    @property
    def idle(self) -> bool:
        """Whether nothing at all is on its way."""
        return not (self.flight or self.queue or self._returned)

    def enqueue(self, batch: PendingBatch) -> None:
        """Take an encoded batch; it leaves as soon as the window allows."""
        self.queue.append(batch)
        self.advance()

    def advance(self) -> None:
        """Send what may leave."""
        if self.dead is not None:
            self._bury()
            return
        if self._advancing:
            return  # An answer came while its request was being sent: the loop below goes on by itself.
        self._advancing = True
        try:
            while self.queue and self._may_send():
                if self._epoch is None:
                    self._claim()
                    continue
                batch = self.queue.popleft()
                if batch.done:
                    continue
                if batch.sequence is None:
                    batch.sequence = self._next_sequence
                    self._next_sequence += 1
                self.flight.append(batch)
                self._send(batch)
        finally:
            self._advancing = False

    def _may_send(self) -> bool:
        held = self._recovering or self._paused or self._claiming
        return not held and len(self.flight) < self._window

    def _send(self, batch: PendingBatch) -> None:
        assert batch.sequence is not None
        assert self._epoch is not None
        request = Publish(
            self._topic,
            self._partition,
            batch.columns,
            batch.crc,
            self._producer_id,
            self._epoch,
            batch.sequence,
            batch.expected_sequence,
            batch.expected_key_sequences,
        )
        self._outside.submit(request, batch.body, lambda reply, parts: self._answered(batch, reply))

    def _answered(self, batch: PendingBatch, reply: Reply) -> None:
        if batch not in self.flight:
            return  # Given up meanwhile.
        self.flight.remove(batch)
        if type(reply) is Published:
            self._pause_s = PAUSE_S_MIN
            self._window = min(2 * self._window, IN_FLIGHT_MAX)
            batch.settle(Stored(self._topic, self._partition, batch.ids, reply, batch.deliver_ats), None)
        else:
            self._refused(batch, reply)
        if self._recovering:
            if not self.flight:
                self._recover()
        elif self.queue:
            self.advance()

    def _refused(self, batch: PendingBatch, reply: Reply) -> None:
        assert isinstance(reply, Refusal), f"not an answer to a publish: {reply!r}"
        error = _error(reply)
        self._recovering = True
        if reply.outcome == "unknown":
            batch.doubtful = True
        if isinstance(error, Fenced):
            self.dead = error
        batch.gap, batch.reason = error.details.get("expected"), error
        if error.retriable and self._outside.now_s() < batch.give_up_s:
            self._returned.append(batch)
            self._note(error)
            self._outside.retried(error)
            return
        if error.outcome == "unknown" or batch.doubtful:
            self._renew = True
        else:
            assert batch.sequence is not None
            self._hole = batch.sequence if self._hole is None else min(self._hole, batch.sequence)
        _fail(batch, error)

    def _note(self, error: TailraceError) -> None:
        """The broker may say when to come back, and that a quota is used up."""
        self._told_s = max(self._told_s, told_wait_s(error))
        if error.details.get("quota") in PACING_QUOTAS:
            self._throttled, self._window = True, 1

    def give_up(self, now_s: float) -> None:
        """Fail what has waited past its time."""
        for batch in (*self.flight, *self._returned, *self.queue):
            if now_s < batch.give_up_s or batch.done:
                continue
            sent = batch in self.flight or batch.doubtful
            outcome: Any = "unknown" if sent else "none"
            if sent:
                self._renew = self._recovering = True
            elif batch.sequence is not None:
                self._hole = batch.sequence if self._hole is None else min(self._hole, batch.sequence)
            error: TailraceError = Timeout(
                f"{self._topic}/{self._partition}: not stored in time", outcome=outcome
            )
            if batch.reason is not None and not sent:
                error = batch.reason  # Why it was refused again and again says more than how long that went.
            batch.settle(None, error)
        self.flight = [batch for batch in self.flight if not batch.done]
        if self._recovering and not self.flight and not self._paused:
            self._recover()

    def _recover(self) -> None:
        """Everything is back: number it anew where needed, and send it again after a pause."""
        numbered = [b for b in (*self._returned, *self.queue) if b.sequence is not None and not b.done]
        numbered.sort(key=lambda batch: batch.sequence or 0)
        fresh = [b for b in self.queue if b.sequence is None]
        first = numbered[0] if numbered else None
        hole = self._hole
        if hole is not None and any(batch.doubtful and (batch.sequence or 0) > hole for batch in numbered):
            # A copy of it may still be under way and must not find its number in use.
            self._renew = True
        if self._renew:
            for batch in numbered:
                # Behind a hole nothing was or will be stored: nobody takes the number of the hole any more.
                if batch.doubtful and (hole is None or (batch.sequence or 0) < hole):
                    text = "a batch near it failed, and what became of this one is not known"
                    batch.settle(None, Timeout(f"{self._topic}/{self._partition}: {text}"))
            self._renew_identity(numbered)
        elif hole is not None:
            self._next_sequence = hole
            for batch in numbered:
                if (batch.sequence or 0) > hole:  # Those before it keep theirs: some between them are stored.
                    batch.sequence = self._next_sequence
                    self._next_sequence += 1
        elif first is not None and first.gap is not None:
            # The broker misses a batch that this flow does not have any more: it lost or forgot its memory of
            # this producer.
            self._renew_identity(numbered)
        self._returned, self._hole, self._renew, self._recovering = [], None, False, False
        self.queue = deque(b for b in (*numbered, *fresh) if not b.done)
        if self.dead is not None:
            self._bury()
        elif numbered:
            self._pause()
        else:
            self.advance()

    def _renew_identity(self, numbered: list[PendingBatch]) -> None:
        for batch in numbered:
            batch.sequence, batch.doubtful = None, False
        self._next_sequence = 0
        if self._named:
            self._epoch = None
        else:
            self._producer_id = self._outside.new_producer_id()

    def _pause(self) -> None:
        self._paused = True

        def resume() -> None:
            self._paused = False
            if self._recovering and not self.flight:
                self._recover()
            else:
                self.advance()

        pause_s = max(self._pause_s, self._told_s)
        if self._throttled:
            for batch in self.queue:
                batch.give_up_s += pause_s
        self._outside.later(pause_s, resume)
        self._pause_s = min(self._pause_s * 2, PAUSE_S_MAX)
        self._told_s, self._throttled = 0.0, False

    def _claim(self) -> None:
        self._claiming = True

        def answered(reply: Reply, parts: Sequence[Buffer]) -> None:
            self._claiming = False
            if isinstance(reply, Claimed):
                self._epoch = self._claimed = reply.epoch
                self.advance()
                return
            assert isinstance(reply, Refusal)
            error = _error(reply)
            if error.retriable:
                self._note(error)
                self._pause()
            else:
                self.dead = error
                self._bury()

        # Its own epoch goes along: one that was fenced without knowing must not fence its successor in turn.
        claim = ClaimProducer(self._topic, self._partition, self._producer_id, self._claimed)
        self._outside.submit(claim, b"", answered)

    def end(self, error: TailraceError) -> None:
        """Nothing leaves any more; what is on its way fails, with an unknown outcome where it may arrive."""
        self.dead = error
        for batch in self.flight:
            batch.doubtful = True
        self.queue = deque((*self.flight, *self._returned, *self.queue))
        self.flight, self._returned = [], []
        self._bury()

    def _bury(self) -> None:
        """Nothing more can leave: most often a newer producer of this name has taken over."""
        assert self.dead is not None
        queue, self.queue = self.queue, deque()
        for batch in queue:
            _fail(batch, self.dead)


def _fail(batch: PendingBatch, error: TailraceError) -> None:
    """Settle with an error. It may be certain of itself, but not of the copies that were sent before."""
    if batch.doubtful and error.outcome == "none":
        error = from_code(error.code, error.message, "unknown", error.details)
    batch.settle(None, error)


def _error(refusal: Refusal) -> TailraceError:
    outcome: Any = refusal.outcome
    return from_code(refusal.code, refusal.message, outcome, refusal.details)
