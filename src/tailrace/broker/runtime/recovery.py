"""Recovery: a partition's state rebuilt from its log, out of the newest snapshot and every fact after it.

The log is the only truth; a snapshot only shortens the way. Suppose a snapshot was taken as of entry 120:

    snapshot                     frames after it
    the state after entry 120    121 DATA        122 FACTS        123 DATA
          │                       │ Appended      │ Leased, Acked  │ Appended
          ▼                       ▼               ▼                ▼
       restore ────────────────▶ apply ────────▶ apply, apply ──▶ apply ────▶ the state, end_entry = 124

A data frame is a fact by itself: its header and columns say what was appended. No command is decided again,
so it does not matter what the clock shows now.

The steps, and what each of them checks:

    recover   storage finds the end of the log and cuts a torn tail (`storage.files.opening`)
    restore   the restored state ends at the offset that was stored beside the snapshot
    apply     every fact fits the state; a broken invariant in `apply` raises
    compare   the state ends at the offset at which the log ends; and the log does not begin above the point
              to which the state says that it was trimmed, or its first segments are missing

Whatever is wrong stops this partition and no other. The partition gets a `fault`, which names the entry or
the snapshot, and takes no commands. What was built so far is used as far as it is certain:

    a snapshot that cannot be restored   an empty state that knows where the log begins and ends: all
                                         messages can be read, nothing can be leased or published
    entry 122 cannot be applied          the state up to 121: readers get the messages up to there, and
                                         the fault where they would go on

*Accepted loss.* An operator may give up damaged frames. Storage then puts a LOST frame in their place, which
keeps their entries and offsets taken. Behind a LOST frame, facts may refer to something that is gone, so they
are salvaged (`core.salvage`) instead of applied strictly: in doubt a message is delivered again.

Everything here blocks, and touches no state of the pump.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic

import msgspec

from tailrace.broker.runtime.framing import facts_of
from tailrace.broker.runtime.replay_debt import ReplayDebt
from tailrace.broker.runtime.state_machines import MachineKind, State
from tailrace.core.model.topic_options import TopicOptions
from tailrace.errors import Corrupt
from tailrace.format import frame
from tailrace.ports import LogStore, Losses, PartitionLog, Recovery

log = logging.getLogger("tailrace.recovery")

ROUNDS_MAX = 100
"""Rounds of one `accept`; each gives up one entry or snapshot that is whole but cannot be applied."""


class Rebuilt(msgspec.Struct, Generic[State], eq=False):
    """The result of a replay."""

    state: State
    end_entry: int
    end_offset: int
    cut_bytes: int = 0
    fault: str | None = None
    """Why the state is incomplete: which file, entry or snapshot is wrong."""
    unfit_entries: tuple[int, ...] = ()
    """Entries of frames that are whole, but whose facts cannot be applied."""
    unfit_snapshots: tuple[int, ...] = ()
    """Entries of snapshots that are whole, but cannot be restored."""
    debt: ReplayDebt = msgspec.field(default_factory=ReplayDebt)
    """Cost of the frames that were replayed, and that another restart would replay again."""
    lost: list[int] = []
    """Lost offsets as flat spans: their loss is accepted, and not yet a fact in the log."""


def rebuild(
    name: str, source: PartitionLog, machine: MachineKind[State], options: TopicOptions
) -> Rebuilt[State]:
    """Open a log and replay it; raises `StorageFault` when it cannot be opened."""
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
    store: LogStore,
    name: str,
    found: Rebuilt[State],
    reopen: Callable[[], tuple[PartitionLog, Rebuilt[State]]],
) -> tuple[PartitionLog, Rebuilt[State], Losses]:
    """Give up the damaged frames of a closed log, and frames and snapshots that cannot be applied, round by
    round until the log opens well. Lost offsets are never used again."""
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
    rebuilt: Rebuilt[State],
    name: str,
    source: PartitionLog,
    machine: MachineKind[State],
    options: TopicOptions,
    recovery: Recovery,
) -> bool:
    snapshot = recovery.snapshot
    if snapshot is None:
        return True
    rebuilt.debt.stored(sum(len(chunk) for chunk in snapshot.chunks))
    try:
        rebuilt.state = machine.restore(options, snapshot.chunks)
        restored_end = rebuilt.state.end_offset
        if restored_end != snapshot.offset:
            raise Corrupt(f"it ends at offset {restored_end}, and {snapshot.offset} was stored beside it")
        return True
    except Exception as error:
        _unexpected(name, error)
        what = f"the snapshot as of entry {snapshot.entry} cannot be restored: {_words(error)}"
        rebuilt.fault = rebuilt.fault or f"{name}: {what}"
        rebuilt.unfit_snapshots = (snapshot.entry,)
        # Only the log itself is known now: it can be read, and nothing else.
        rebuilt.state = machine.make(options).bare(source.stats().start_offset, recovery.end_offset)
        return False


def _replayed(
    rebuilt: Rebuilt[State], name: str, machine: MachineKind[State], options: TopicOptions, recovery: Recovery
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
    rebuilt.end_offset = state.end_offset  # Readers get there, and then the fault.


def _words(error: Exception) -> str:
    return error.message if isinstance(error, Corrupt) else f"{type(error).__name__}: {error}"


def _unexpected(name: str, error: Exception) -> None:
    if not isinstance(error, Corrupt):
        log.error("%s: its replay failed", name, exc_info=error)
