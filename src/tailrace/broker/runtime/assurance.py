"""Assurances: answers that wait until what they were decided on is synced, whatever the topic promises.

An ordinary answer leaves when its turn is as durable as the topic asks: on an `interval` topic that is when
it is written. A *move* between two logs needs more. Its source is settled in one log because its target is in
the other, and each log is synced at times of its own: if the target is only written, a power failure can keep
the settlement and take the target. So every step of a move that another log relies on is assured:

    target: written ──▶ synced ──▶ answer ──▶ source: settled

`PartitionRuntime.surely` turns the one who waits for an answer into one who waits for the sync as well. All
that wait for one log share a sync, which runs beside its appends: that is the group commit. A turn that was
written with a sync of its own needs no other. Topics with `durability = memory` promise nothing and sync
nothing.

When storage fails, whoever waits is refused with the outcome `unknown`: what was written may come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.core.model.identifiers import Refusal
from tailrace.ports import Respond

if TYPE_CHECKING:
    from tailrace.broker.runtime.partition_runtime import PartitionRuntime


class Reach(NamedTuple):
    """How far a log goes: the ends of its entries and messages, and where it begins for readers by then."""

    entry: int
    end_offset: int
    start_offset: int


Over = Callable[[Exception | None], None]
_Waits = tuple[int, Respond, Any]
"""Up to which entry the log has to be synced, who waits, and the answer."""


class Assurance:
    """Up to where the log of one partition is synced, and who waits for more. Runs on the pump's thread."""

    def __init__(self, shard: PartitionRuntime) -> None:
        self._shard = shard
        self._flusher = object()
        self.written = self.synced = Reach(0, 0, 0)
        """What is written, and what is synced of it: all that is left to show when a sync fails."""
        self._waiting: list[_Waits] = []
        self._flushing = False

    def opened(self, reach: Reach) -> None:
        """The log was opened, which syncs what it holds."""
        self.written = self.synced = reach

    def stored(self, reach: Reach, synced: bool) -> None:
        """A turn is in the log, with a sync of its own or without."""
        self.written = reach
        if synced or self._shard.options.durability == "memory":
            self.synced = reach
        if self._waiting:
            self._go_on()

    def surely(self, respond: Respond) -> Respond:
        """Who waits for an answer, and for all that was decided by then to be synced; refusals do not
        wait."""

        def answered(reply: Any, parts: Any) -> None:
            shard = self._shard
            if (
                type(reply) is Refusal
                or shard.options.durability == "memory"
                or self.synced.entry >= shard.entry
            ):
                respond(reply, parts)
            else:
                self._waiting.append((shard.entry, respond, reply))
                self._go_on()

        return answered

    def _go_on(self) -> None:
        """Answer those whose part is synced, and sync for the others what is written."""
        ready = [item for item in self._waiting if item[0] <= self.synced.entry]
        if ready:
            self._waiting = [item for item in self._waiting if item[0] > self.synced.entry]
            for _, respond, reply in ready:
                respond(reply, NOTHING)
        if not self._flushing and any(
            self.synced.entry < need <= self.written.entry for need, _, _ in self._waiting
        ):
            self._flushing = True
            self.flush(self._flushed)

    def _flushed(self, error: Exception | None) -> None:
        self._flushing = False
        if error is None:
            self._go_on()

    def flush(self, over: Over) -> None:
        """Make durable what is written, beside the appends, which do not wait for it."""
        shard = self._shard
        written, failures = self.written, shard.failures

        def done(result: object, error: Exception | None) -> None:
            if error is not None:
                shard.fail(error, outcome="unknown")  # What waits may have been written all the same.
            elif failures == shard.failures:
                self.synced = max(self.synced, written)
            over(error)

        shard.pump.threads.run(self._flusher, shard.log.flush, done)

    def fail(self, error: Exception) -> None:
        """Storage failed: nobody knows what of it will be there."""
        waiting, self._waiting = self._waiting, []
        refusal = refuse(error)
        refusal = Refusal(refusal.code, refusal.message, "unknown", refusal.details)
        for _, respond, _ in waiting:
            respond(refusal, NOTHING)

    def forget(self) -> None:
        """The storage threads need not know of it any more."""
        self._shard.pump.threads.forget(self._flusher)
