"""The consumer of a queue: hands messages out and settles what comes back.

Nothing is awaited per message: rows of a lease are handed out from memory, acknowledgements gather in lists.
What was leased and not settled goes back without a failure when the consumer is left, in whatever way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from tailrace.client.queue.consumer_options import ConsumerOptions
from tailrace.client.queue.delivery import Batch, Delivery
from tailrace.client.queue.handler_runner import Handler, HandlerRunner
from tailrace.client.queue.held_leases import FailedAck
from tailrace.client.queue.lease_prefetch import LeasePrefetch
from tailrace.client.queue.membership import GroupSession, client_name
from tailrace.client.queue.threaded_handlers import runs_here
from tailrace.client.rpc.calls import whole_of
from tailrace.client.sdk_tuning import EXIT_S
from tailrace.core.model.group_commands import JoinGroup, Place
from tailrace.errors import InvalidRequest, TailraceError, Timeout, Unavailable
from tailrace.ports import BrokerVerbs


class Consumer:
    """Consumes topics as a member of a group. Use it as an async context manager: entering joins, leaving
    gives back what is not settled and leaves the group."""

    def __init__(
        self, verbs: BrokerVerbs, topics: Sequence[str], group: str, timeout: float, options: ConsumerOptions
    ) -> None:
        self.topics = list(topics)
        self.group = group
        self.member = options.member
        self._verbs = verbs
        self._timeout = timeout
        self._options = options
        self._intake: LeasePrefetch
        self._closed: TailraceError | None = Unavailable(
            "the consumer is not open: use `async with client.consumer(…)`"
        )

    # -- life

    async def __aenter__(self) -> Consumer:
        if hasattr(self, "_intake"):
            raise InvalidRequest("this consumer was used before: make a new one")
        self._loop = asyncio.get_running_loop()
        options = self._options
        asked = {"mode": options.mode, **options.group}
        request = JoinGroup(self.group, self.member, self.topics, asked, options.wait, client_name())
        session = GroupSession(
            self._verbs,
            request,
            self._timeout,
            on_assigned=options.on_assigned,
            on_revoked=options.on_revoked,
        )
        self._intake = LeasePrefetch(self._verbs, session, request, self._timeout, options)
        self._closed = None
        try:
            await session.join(self._intake)
        except BaseException:
            self.kill(Unavailable("the consumer could not join its group"))
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closed is not None:
            return
        self._closed = Unavailable("the consumer is closed")
        intake = self._intake
        intake.refuse(self._closed)
        intake.return_unstarted()
        try:
            async with asyncio.timeout(min(EXIT_S, self._timeout)):
                await intake.settlement.flushed()
        except TimeoutError:
            self._closed = Timeout("the consumer is closed, and the broker did not answer in time")
        finally:
            intake.end(self._closed)
            # Leaving gives back every lease, without a failure.
            await intake.membership.leave()
        if kind is None:
            intake.settlement.report()

    def kill(self, error: TailraceError) -> None:
        """Stop for good, without a word to the broker."""
        if hasattr(self, "_intake") and self._closed is None:
            self._intake.membership.stop()
            self._intake.end(error)
        self._closed = error

    def opened(self) -> LeasePrefetch:
        """What its messages are taken from; raises while the consumer is not open."""
        if self._closed is not None:
            raise self._closed
        return self._intake

    def stop(self) -> None:
        """Take no more messages: `run` returns when the handlers under way are done, loops end. May be called
        from any thread: also by a plain function that handles a message."""
        if self._closed is None:
            if runs_here(self._loop):
                self._intake.stop()
            else:
                self._loop.call_soon_threadsafe(self.stop)

    # -- messages

    def __aiter__(self) -> Consumer:
        return self

    async def __anext__(self) -> Delivery:
        intake = self._intake if self._closed is None else self.opened()
        message: Delivery
        while True:
            found: Delivery | None = next(intake.current, None)
            if found is None:
                if not intake.take_now():
                    await intake.take()
                found = next(intake.current)
            message = intake.last = found
            if intake.calm_ns <= intake.wall_ns() < intake.until_ns or not intake.is_over(message.rows.lease):
                return message

    async def batches(self, size: int | None = None) -> AsyncIterator[Batch]:
        """Messages as they come, up to `size` at once (default: `batch_size`); waits only for the first."""
        intake = self.opened()
        size = whole_of("size", intake.batch_size if size is None else size)
        now_ms = intake.settlement.now_ms
        intake.sampling = False
        try:
            while True:
                try:
                    batch = Batch([await anext(self)])
                except StopAsyncIteration:
                    return
                while len(batch) < size:
                    for message in intake.current:
                        batch.append(message)
                        if len(batch) == size:
                            break
                    else:
                        if not intake.more():
                            break
                intake.last, intake.latest = batch[-1], batch
                began_ms, count = now_ms(), len(batch)
                yield batch
                intake.pace.took_batch(count, now_ms() - began_ms)
        finally:
            intake.sampling, intake.latest = True, ()

    async def run(self, handler: Handler, *, concurrency: int = 1, settle: bool = True) -> None:
        """Call `handler(delivery)` for every message until `stop`; messages of one key one after the other.

        A coroutine function runs on the event loop, a plain function in one of `concurrency` threads, with a
        `BlockingDelivery`. A message whose handler returns is acknowledged, one whose handler raises is given
        back as a failure; `Retry(delay)` and `Reject(reason)` say more. With `settle=False` that is left to
        the handler, and what else it raises ends the run.
        """
        whole_of("concurrency", concurrency)
        intake = self.opened()
        runner = HandlerRunner(
            self.__anext__,
            intake,
            handler,
            concurrency=concurrency,
            settle=settle,
            ordering=intake.membership.policy.ordering,
            parked_max=max(1, self._options.prefetch),
            pace=intake.pace,
            now_ms=self._verbs.clock.elapsed_ms,
        )
        intake.parking, intake.sampling = runner, concurrency == 1
        try:
            await runner.run()
        finally:
            intake.parking, intake.sampling = None, True

    # -- settling

    @property
    def failures(self) -> list[FailedAck]:
        """Acknowledgements of `ack_nowait` that failed and were not raised yet."""
        return self._intake.settlement.failures if hasattr(self, "_intake") else []

    async def commit(self) -> None:
        """Wait until everything acknowledged so far is durable; raises what failed."""
        settlement = self.opened().settlement
        await settlement.flushed()
        settlement.report()

    # -- partitions

    def assignment(self) -> set[Place]:
        """The (topic, partition) pairs that this member has."""
        return self.opened().membership.assignment()

    def pause(self, *partitions: Place) -> None:
        """Hand out nothing more of these (topic, partition) pairs, or of all that it has. What was leased
        ahead of them is given back."""
        self.opened().pause(set(partitions) or self.assignment())

    def resume(self, *partitions: Place) -> None:
        """Go on with paused partitions, or with all."""
        self.opened().resume(set(partitions))
