"""One partition that is damaged: what it has lost, and how it opens again without that."""

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
    """What of its log cannot be read or applied; changes nothing."""
    entries, snapshots = shard.rebuilt.unfit_entries, shard.rebuilt.unfit_snapshots
    shard.run_in_order(lambda: shard.store.find_losses(shard.name, entries, snapshots), over)


def accept_loss(shard: PartitionRuntime, over: Over) -> None:
    """Give up what is damaged, and open again with the rest. `over` is called when it takes commands, or is
    as it was; that messages were lost is the first fact that is appended then."""
    shard.reopening = True

    def work() -> object:
        shard.log.close()
        try:
            return accept(shard.store, shard.name, shard.rebuilt, shard.open_log)
        except Exception as error:
            return *shard.open_log(), error

    def done(result: Any, error: Exception | None) -> None:
        shard.reopening = False
        if error is not None:  # It cannot be opened any more.
            shard.fault = refuse(error)
            over(None, error)
            return
        log, rebuilt, losses = result
        if shard.gone is None:
            shard.fault = None
        if shard.take_over(log, rebuilt) and shard.fault is None:
            shard.restart()
            shard.upkeep.save_snapshot()  # A replay that crosses the gap has to do with less.
        failed = isinstance(losses, Exception)
        over(None if failed else losses, losses if failed else None)

    shard.upkeep.after_saving(lambda: shard.run_in_order(work, done))


def record_loss(shard: PartitionRuntime) -> None:
    """Append the fact of a loss that was accepted, in front of all other commands; when it is synced,
    whatever the topic promises, the log need not say so any more."""

    def recorded(reply: Any, parts: Any) -> None:
        if type(reply) is Refusal:
            return  # Storage failed: at the next opening it is still to be done.
        shard.rebuilt.lost = []
        shard.run_in_order(shard.log.loss_recorded, noted)

    def noted(result: object, error: Exception | None) -> None:
        if error is not None:
            shard.fail(error)

    shard.submit(RecordLoss(shard.rebuilt.lost), b"", shard.surely(recorded))
