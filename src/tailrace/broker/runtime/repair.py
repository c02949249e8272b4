"""Repair of one damaged partition: find its losses, accept them, open the log again without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tailrace.broker.runtime.partition_runtime import PartitionRuntime
from tailrace.broker.runtime.recovery import Rebuilt, accept
from tailrace.ports import Losses, PartitionLog

Over = Callable[[Losses | None, Exception | None], None]


def find_losses(runtime: PartitionRuntime[Any], over: Over) -> None:
    """Find the frames of a log that cannot be read or applied; changes nothing."""
    entries, snapshots = runtime.rebuilt.unfit_entries, runtime.rebuilt.unfit_snapshots
    runtime.run_in_order(lambda: runtime.store.find_losses(runtime.name, entries, snapshots), over)


def accept_loss(runtime: PartitionRuntime[Any], over: Over) -> None:
    """Give up the damaged frames and open the log again. `over` is called when the partition takes commands,
    or is back in its old state. The first fact appended then records the loss."""
    runtime.reopen(partial(_open_without, runtime), partial(_opened, runtime, over))


def _open_without(runtime: PartitionRuntime[Any]) -> tuple[PartitionLog, Rebuilt[Any], Losses | Exception]:
    """Open the closed log without its damaged frames, or as it is if that fails; blocking."""
    try:
        return accept(runtime.store, runtime.name, runtime.rebuilt, runtime.open_log)
    except Exception as error:
        return *runtime.open_log(), error


def _opened(runtime: PartitionRuntime[Any], over: Over, result: Any, error: Exception | None) -> None:
    if error is not None:
        runtime.not_mended(error)
        over(None, error)
        return
    log, rebuilt, losses = result
    runtime.mended(log, rebuilt)
    failed = isinstance(losses, Exception)
    over(None if failed else losses, losses if failed else None)
