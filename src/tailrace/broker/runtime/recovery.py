"""A partition's state out of its log: the newest snapshot, then every fact behind it.

Whatever is wrong with what is read stops this partition and no other: the replay ends there, the entry or the
snapshot is named, and the partition takes no commands. What was built up to there is not thrown away, and
never taken for the whole. Runs on a storage thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from tailrace.broker.runtime.framing import facts_of
from tailrace.broker.runtime.replay_debt import ReplayDebt
from tailrace.broker.runtime.state_machines import MachineKind
from tailrace.core.model.topic_options import TopicOptions
from tailrace.errors import Corrupt
from tailrace.format import frame
from tailrace.ports import LogStore, Losses, PartitionLog, Recovery

log = logging.getLogger("tailrace.recovery")

ROUNDS_MAX = 100
"""So many facts that cannot be applied are given up at once; for more, loss is accepted again."""


class Rebuilt(msgspec.Struct, eq=False):
    """What a replay came to."""

    state: Any
    end_entry: int
    end_offset: int
    cut_bytes: int = 0
    fault: str | None = None
    """Why it is not the state as it was: which file, entry or snapshot is wrong."""
    unfit_entries: tuple[int, ...] = ()
    """Frames that are whole and whose facts cannot be applied."""
    unfit_snapshots: tuple[int, ...] = ()
    """Snapshots, by their entry, that are whole and cannot be restored."""
    debt: ReplayDebt = msgspec.field(default_factory=ReplayDebt)
    """What was replayed, and would be again."""
    lost: list[int] = []
    """Offsets, flat, whose loss was accepted and has still to become a fact."""


def rebuild(name: str, source: PartitionLog, machine: MachineKind, options: TopicOptions) -> Rebuilt:
    """Open a log and replay it; raises what opening raises."""
    recovery = source.recover()
    rebuilt = Rebuilt(machine.make(options), recovery.end_entry, recovery.end_offset, recovery.cut_bytes)
    rebuilt.fault, rebuilt.lost = recovery.fault, list(recovery.lost)
    if _restored(rebuilt, name, source, machine, options, recovery):
        _replayed(rebuilt, name, machine, options, recovery)
        end_offset = rebuilt.state.end_offset
        if rebuilt.fault is None and end_offset != recovery.end_offset:
            rebuilt.fault = f"{name}: the log ends at {recovery.end_offset}, its replay at {end_offset}"
        begins, start = source.stats().start_offset, rebuilt.state.start_offset
        if rebuilt.fault is None and start < min(begins, end_offset):
            lost = (
                f"the log begins at {begins} and was trimmed to {start} only: its first segments are missing"
            )
            rebuilt.fault = f"{name}: {lost}"
    return rebuilt


def accept(
    store: LogStore, name: str, found: Rebuilt, reopen: Callable[[], tuple[PartitionLog, Rebuilt]]
) -> tuple[PartitionLog, Rebuilt, Losses]:
    """Give up what of a log nobody has open is damaged, and what of it cannot be applied, until it opens well
    or nothing more can be done. Offsets that are lost are never used again."""
    ranges, kept = [], []
    for _ in range(ROUNDS_MAX):
        losses = store.accept_losses(name, found.unfit_entries, found.unfit_snapshots)
        ranges += losses.ranges
        kept += losses.kept
        source, found = reopen()
        if not (found.unfit_entries or found.unfit_snapshots):
            break
        source.close()
    else:
        source, found = reopen()
    return source, found, Losses(ranges, kept)


def _restored(
    rebuilt: Rebuilt,
    name: str,
    source: PartitionLog,
    machine: MachineKind,
    options: TopicOptions,
    recovery: Recovery,
) -> bool:
    snapshot = recovery.snapshot
    if snapshot is None:
        return True
    rebuilt.debt.snapshot_bytes = sum(len(chunk) for chunk in snapshot.chunks)
    try:
        rebuilt.state = machine.restore(options, snapshot.chunks)
        restored_end: int = rebuilt.state.end_offset
        if restored_end != snapshot.offset:
            raise Corrupt(f"it ends at offset {restored_end}, and {snapshot.offset} was stored beside it")
        return True
    except Exception as error:
        _unexpected(name, error)
        what = f"the snapshot as of entry {snapshot.entry} cannot be restored: {_words(error)}"
        rebuilt.fault = rebuilt.fault or f"{name}: {what}"
        rebuilt.unfit_snapshots = (snapshot.entry,)
        # Nothing is known but what the log itself says: readers go on, and nothing else does.
        rebuilt.state = machine.make(options)
        rebuilt.state.start_offset = source.stats().start_offset
        rebuilt.state.end_offset = recovery.end_offset
        return False


def _replayed(
    rebuilt: Rebuilt, name: str, machine: MachineKind, options: TopicOptions, recovery: Recovery
) -> None:
    state, entry = rebuilt.state, -1
    try:
        apply = state.apply
        for header, body in recovery.frames:
            entry = header.entry
            rebuilt.debt.add(header)
            if header.kind == frame.LOST:
                state.lose(header.timestamp_max_us)
                apply = state.apply_after_loss
            for fact in facts_of(header, body, want_keys=options.key_index, decode=machine.decode_facts):
                apply(fact)
            entry = -1
    except Exception as error:
        _unexpected(name, error)
        if entry >= 0:
            fault = f"{name}: entry {entry} cannot be applied: {_words(error)}"
            rebuilt.unfit_entries = (entry,)
        else:  # The log's own damage.
            fault = _words(error) if name in _words(error) else f"{name}: {_words(error)}"
        rebuilt.fault = rebuilt.fault or fault
    rebuilt.end_offset = state.end_offset  # Reads go on up to there, and are told of the fault then.


def _words(error: Exception) -> str:
    return error.message if isinstance(error, Corrupt) else f"{type(error).__name__}: {error}"


def _unexpected(name: str, error: Exception) -> None:
    if not isinstance(error, Corrupt):
        log.error("%s: its replay failed", name, exc_info=error)
