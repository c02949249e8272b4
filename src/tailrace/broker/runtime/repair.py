"""Repair of one damaged partition: find its losses, accept them, open the log again without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.broker.runtime.partition_runtime import PartitionRuntime
from tailrace.broker.runtime.recovery import accept
from tailrace.broker.runtime.turn import refuse
from tailrace.ports import Losses

Over = Callable[[Losses | None, Exception | None], None]


def find_losses(runtime: PartitionRuntime[Any], over: Over) -> None:
    """Find the frames of a log that cannot be read or applied; changes nothing."""
    entries, snapshots = runtime.rebuilt.unfit_entries, runtime.rebuilt.unfit_snapshots
    runtime.run_in_order(lambda: runtime.store.find_losses(runtime.name, entries, snapshots), over)


def accept_loss(runtime: PartitionRuntime[Any], over: Over) -> None:
    """Give up the damaged frames and open the log again. `over` is called when the partition takes commands,
    or is back in its old state. The first fact appended then records the loss."""
    runtime.reopening = True

    def work() -> object:
        runtime.log.close()
        try:
            return accept(runtime.store, runtime.name, runtime.rebuilt, runtime.open_log)
        except Exception as error:
            return *runtime.open_log(), error

    def done(result: Any, error: Exception | None) -> None:
        runtime.reopening = False
        if error is not None:  # The log cannot be opened any more.
            runtime.fault = refuse(error)
            over(None, error)
            return
        log, rebuilt, losses = result
        if runtime.gone is None:
            runtime.fault = None
        if runtime.take_over(log, rebuilt) and runtime.fault is None:
            runtime.restart()
            runtime.upkeep.save_snapshot()  # So that no replay has to cross the gap: it would know less.
        failed = isinstance(losses, Exception)
        over(None if failed else losses, losses if failed else None)

    runtime.upkeep.after_saving(lambda: runtime.run_in_order(work, done))
