"""Assurance: replies that wait for a sync of everything they were decided on, whatever the topic promises.

An ordinary reply leaves when its turn is as durable as the topic asks; on an `interval` topic that is when
the turn is written. A *move* between two logs needs more: a message is settled in one log because it is in
the other, and each log is synced at times of its own. A dead letter on two `interval` topics, without
assurance:

    orders.dlq   append the dead letter     written, not synced
    orders       settle the message         written, synced by chance
    power failure
    orders.dlq   the dead letter is gone    orders: the message is settled     ──▶ the message is lost

So every step of a move that another log relies on is assured:

    orders.dlq: written ──▶ synced ──▶ reply ──▶ orders: settled

The worst that a crash can do now is to leave the message unsettled with its dead letter stored; the move is
repeated, and its dedup id makes the second append a duplicate.

`PartitionRuntime.surely(respond)` wraps the receiver of a reply. When the reply arrives, the wrapper notes
the entry up to which the log was decided and calls `respond` once the log is synced that far. Suppose the log
is written up to entry 40 and synced up to 30, and replies wait for 35, 38 and 44:

    one flush begins          it covers everything written when it began: entries below 40
    turns up to 44 are written meanwhile, beside the flush
    the flush ends            synced = 40: the replies for 35 and 38 leave; a second flush begins, for 44

So all that wait for one log share a sync: a group commit. A turn that was written with its own sync needs no
other. Topics with `durability = memory` promise nothing, and nothing waits there. Refusals never wait.

When storage fails, the waiting replies become refusals with the outcome `unknown`: what was written may come
back. `docs/formats.md` lists all moves and their order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tailrace.broker.runtime.turn import NOTHING, NOWHERE, Reach, refuse, unknown
from tailrace.core.model.identifiers import Refusal
from tailrace.ports import PartitionLog, Respond, Threads

Over = Callable[[Exception | None], None]
_Waits = tuple[int, Respond, Any]
"""The entry below which the log has to be synced, the receiver, and the reply."""


class Assurance:
    """How far the log of one partition is synced, and the replies that wait. Runs on the pump's thread."""

    def __init__(
        self,
        threads: Threads,
        log: Callable[[], PartitionLog],
        decided: Callable[[], int],
        failed: Callable[[Exception], None],
        durability: str,
    ) -> None:
        self._threads = threads
        self._log = log
        """The log, as it was opened last."""
        self._decided = decided
        """The entry below which everything was decided, written or not."""
        self._failed = failed
        """Called when a sync failed."""
        self._promises = durability != "memory"
        """Whether the topic promises to keep anything: with `durability = memory` nothing waits."""
        self._flusher = object()
        self.written = self.synced = NOWHERE
        """How far the log is written, and how far it is synced: all that can be shown when a sync fails."""
        self._waiting: list[_Waits] = []
        self._flushing = False
        self.failures = 0
        """How often storage has failed: what was begun before says nothing about what came after."""

    def opened(self, reach: Reach) -> None:
        """The log was opened; opening syncs everything in it."""
        self.written = self.synced = reach

    def reconfigure(self, durability: str) -> None:
        """Take a changed option."""
        self._promises = durability != "memory"

    def stored(self, reach: Reach, synced: bool) -> None:
        """A turn was written, with its own sync or without. Replies that wait for that leave with `release`,
        behind those that the turn itself was waiting for."""
        self.written = reach
        if synced or not self._promises:
            self.synced = reach

    def release(self) -> None:
        """Let replies leave that nothing keeps any more."""
        if self._waiting:
            self._go_on()

    def surely(self, respond: Respond) -> Respond:
        """A receiver that passes a reply on when everything decided by then is synced; refusals at once."""
        return partial(self._answered, respond)

    def _answered(self, respond: Respond, reply: Any, parts: Any) -> None:
        decided = self._decided()
        if type(reply) is Refusal or not self._promises or self.synced.entry >= decided:
            respond(reply, parts)
        else:
            self._waiting.append((decided, respond, reply))
            self._go_on()

    def _go_on(self) -> None:
        """Release the replies whose entries are synced; begin a flush if it helps any of the others."""
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
        """Sync what is written, beside the appends, which do not wait for it."""
        synced = partial(self._log_synced, over, self.written, self.failures)
        self._threads.run(self._flusher, self._log().flush, synced)

    def _log_synced(
        self, over: Over, written: Reach, failures: int, result: object, error: Exception | None
    ) -> None:
        if error is not None:
            self._failed(error)  # What waits may be on the disk all the same.
        elif failures == self.failures:
            self.synced = max(self.synced, written)
        over(error)

    def cut(self) -> None:
        """Storage failed: what is under way says nothing about what is written from now on."""
        self.failures += 1

    def fail(self, error: Exception) -> None:
        """Storage failed: refuse the waiting replies, with the outcome `unknown`."""
        waiting, self._waiting = self._waiting, []
        refusal = unknown(refuse(error))
        for _, respond, _ in waiting:
            respond(refusal, NOTHING)

    def forget(self) -> None:
        """Let the storage threads forget the flushes of this log."""
        self._threads.forget(self._flusher)
