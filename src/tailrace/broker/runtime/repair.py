"""Repair of one damaged partition: find its losses, accept them, open the log again without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tailrace.broker.runtime.recovery import accept
from tailrace.broker.runtime.turn import refuse
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import RecordLoss
from tailrace.ports import Losses

if TYPE_CHECKING:
    from tailrace.broker.runtime.partition_runtime import PartitionRuntime

Over = Callable[[Losses | None, Exception | None], None]


def find_losses(shard: PartitionRuntime, over: Over) -> None:
    """Find the frames of a log that cannot be read or applied; changes nothing."""
    entries, snapshots = shard.rebuilt.unfit_entries, shard.rebuilt.unfit_snapshots
    shard.run_in_order(lambda: shard.store.find_losses(shard.name, entries, snapshots), over)


def accept_loss(shard: PartitionRuntime, over: Over) -> None:
    """Give up the damaged frames and open the log again. `over` is called when the partition takes commands,
    or is back in its old state. The first fact appended then records the loss."""
    shard.reopening = True

    def work() -> object:
        shard.log.close()
        try:
            return accept(shard.store, shard.name, shard.rebuilt, shard.open_log)
        except Exception as error:
            return *shard.open_log(), error

    def done(result: Any, error: Exception | None) -> None:
        shard.reopening = False
        if error is not None:  # The log cannot be opened any more.
            shard.fault = refuse(error)
            over(None, error)
            return
        log, rebuilt, losses = result
        if shard.gone is None:
            shard.fault = None
        if shard.take_over(log, rebuilt) and shard.fault is None:
            shard.restart()
            shard.upkeep.save_snapshot()  # So that no replay has to cross the gap: it would know less.
        failed = isinstance(losses, Exception)
        over(None if failed else losses, losses if failed else None)

    shard.upkeep.after_saving(lambda: shard.run_in_order(work, done))


def record_loss(shard: PartitionRuntime) -> None:
    """Append the fact of an accepted loss, before all other commands. When it is synced, whatever the topic
    promises, storage may forget its own note of the loss."""

    def recorded(reply: Any, parts: Any) -> None:
        if type(reply) is Refusal:
            return  # Storage failed: the next opening does it.
        shard.rebuilt.lost = []
        shard.run_in_order(shard.log.loss_recorded, noted)

    def noted(result: object, error: Exception | None) -> None:
        if error is not None:
            shard.fail(error)

    shard.submit(RecordLoss(shard.rebuilt.lost), b"", shard.surely(recorded))
