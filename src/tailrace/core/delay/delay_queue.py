"""Delayed messages of one partition: stored in scheduled frames, without offsets until they are due.

    Delayed ──▶ waits ──ReleaseDue──▶ Appended (fresh offsets) + Released      in one group of frames
                  └────CancelScheduled──▶ ScheduleCancelled                    never appended

The wheel keeps one row per message: when it is due, its id, and its *ref*, the entry of its frame and the row
in it. The body stays in the log. Messages are released in the order of (due time, ref), so in the order of
publishing where they are due at one time.

The core does no I/O, so it cannot read the bodies. They are read ahead of time
(`core.process.release_process`); those that are due are gathered into one batch and come back as
`ReleaseDue`, together with the place in the order up to which the batch has every row. Meanwhile rows may
have been cancelled or added. So the command is checked when it is decided: it holds only if its refs are
exactly the rows that wait up to that place; otherwise nothing happens, and the next tick tries again. A
message that was cancelled a moment before is therefore never appended.

Example. At time 0, entry 7 stores three messages, due at 5 s, 2 s and 2 s, and entry 8 one, due at 4 s:

    due     ref        rows in the order of their release; the partition still has no offset
    2 s     (7, 1)
    2 s     (7, 2)
    4 s     (8, 0)
    5 s     (7, 0)

    CancelScheduled of (7, 2)    a tombstone stays in the wheel until its time; three messages wait
    at 4 s                       `due` gives the refs (7, 1), (8, 0) and the place (4 s, (8, 0))
    ReleaseDue with these        Appended with offsets 0 and 1, Released up to (4 s, (8, 0)); (7, 0) waits on

Had (8, 0) been cancelled after `due` was asked, the command would name two refs where one waits: nothing
happens.

A cancelled message leaves the wheel at its time. The latest cancelled ids are remembered beyond that, so that
a client that lost the answer and asks again gets the same one. Dedup ids of delayed messages count from when
the messages were stored, in a window of their own (`delayed_dedup`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from tailrace.core.collections.hash_table import Buffer
from tailrace.core.collections.timing_wheel import (
    AT,
    CANCELLED,
    HIGH,
    LOW,
    REF,
    ROW_BITS,
    WIDTH,
    Rows,
    TimingWheel,
    ref_of,
)
from tailrace.core.core_tuning import CANCELLED_IDS_MAX
from tailrace.core.delay.cancelled_ids import CancelledIds
from tailrace.core.log_head import LogHead
from tailrace.core.model.commands import Done, Published
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.facts import Appended, Delayed, Released, ScheduleCancelled
from tailrace.core.model.identifiers import Hashes, Refusal, Times
from tailrace.core.model.internal_commands import ReleaseDue
from tailrace.core.model.queue_commands import Cancelled, CancelScheduled
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.publish.delayed_dedup import DelayedDedup
from tailrace.errors import InvalidRequest


class DelayQueue:
    """The delayed messages of one partition."""

    COMMANDS: tuple[type, ...] = (ReleaseDue, CancelScheduled)
    FACTS: tuple[type, ...] = (Released, ScheduleCancelled)

    def __init__(self, head: LogHead) -> None:
        self._head = head
        self.wheel = TimingWheel()
        options = head.options
        self.cancelled = CancelledIds()
        self.dedup = DelayedDedup(options.dedup_window_ms, options.dedup_max)
        self.scheduled = 0
        """The number of messages that were ever delayed."""
        self.releases = 0
        self.released = (-1, 0)
        """The number of releases since the start, and the due time and ref up to which the last one went. Not
        stored: `core.process.release_process` learns from them whether its command took effect."""

    def __len__(self) -> int:
        return len(self.wheel)

    # ----------------------------------------------------------------------------------------------- views

    def next_due_us(self) -> int | None:
        """When the next message is due."""
        return self.wheel.next_us()

    def due_rows(self, wall_us: int, limit: int) -> Rows:
        """The first messages that are due, in the order of their release."""
        return self.wheel.first(wall_us, limit)

    def due(self, wall_us: int, limit: int) -> tuple[Times, int, int]:
        """Refs of the first messages that are due, and the due time and ref of the last of them."""
        rows = self.due_rows(wall_us, limit)
        return rows[:, REF], *(rows[-1, :HIGH].tolist() if len(rows) else (0, 0))

    def lowest_entry(self) -> int | None:
        """The entry of the oldest frame with a message that still waits; None if there is none."""
        oldest = self.wheel.oldest_ref()
        return None if oldest is None else oldest >> ROW_BITS

    # ---------------------------------------------------------------------------------------------- decide

    def decide(self, command: ReleaseDue | CancelScheduled, turn: TurnInput) -> Decision:
        """Decide a release or a cancellation."""
        time_us, wall_us = turn.now_us, turn.wall_us
        if isinstance(command, CancelScheduled):
            return self._cancel(command, time_us)
        rows = self.wheel.first(command.until_us, command.view.count + 1, command.until_ref)
        same = len(rows) == command.view.count
        if same and command.refs is not None:
            same = np.array_equal(rows[:, REF], command.refs)
        if command.until_us > wall_us or not same:
            return Decision(
                NOTHING, Done()
            )  # These are not the due rows any more: the next tick tries again.
        end_offset = self._head.end_offset
        appended = Appended(end_offset, command.view, time_us, released=True, wall_us=wall_us)
        released = Released(command.until_us, command.until_ref, time_us)
        return Decision((appended, released), Published(end_offset, time_us))

    def _cancel(self, command: CancelScheduled, time_us: int) -> Decision:
        ids, hints = command.ids, command.deliver_at_us
        problem = None
        if not 0 < len(ids) <= CANCELLED_IDS_MAX or any(len(item) != 16 for item in ids):
            problem = f"ids: 1 to {CANCELLED_IDS_MAX} of 16 bytes each"
        elif hints and len(hints) != len(ids):
            problem = f"deliver_at_us: {len(hints)} times for {len(ids)} ids"
        if problem is not None:
            return Decision(NOTHING, Refusal(InvalidRequest.code, problem))
        done: list[bool] = []
        refs: set[int] = set()
        for item, hint in zip(ids, hints or [0] * len(ids), strict=True):
            high, low = (int.from_bytes(item[at : at + 8], "big", signed=True) for at in (0, 8))
            found = self.wheel.find(high, low, hint)
            done.append(bool(found) or item in self.cancelled)
            refs.update(ref for ref in found if ref < CANCELLED)
        facts = (ScheduleCancelled(sorted(refs), time_us),) if refs else NOTHING
        return Decision(facts, Cancelled(done))

    # ----------------------------------------------------------------------------------------------- apply

    def schedule(self, fact: Delayed) -> None:
        """Apply: a batch of delayed messages is stored."""
        view, count = fact.view, fact.view.count
        assert view.deliver_at_us is not None
        assert view.ids is not None
        assert count < 1 << ROW_BITS
        rows = np.empty((count, WIDTH), np.int64)
        # Staged messages may have become due while they were applied.
        wall_us = fact.wall_us or fact.append_time_us
        rows[:, AT] = np.maximum(view.deliver_at_us, wall_us)
        rows[:, REF] = np.arange(count) + ref_of(fact.entry, 0)
        rows[:, HIGH : LOW + 1] = view.ids.view(np.int64)
        self.wheel.advance(wall_us)
        self.wheel.insert(rows)
        if view.dedup_ids is not None:
            self.dedup.add(view.dedup_ids, ref_of(fact.entry, 0), fact.append_time_us)
        self.scheduled += count

    def land(self, ids: Hashes, base_offset: int, time_us: int, wall_us: int) -> None:
        """The first due messages, which have these dedup ids, got their offsets."""
        refs = self.wheel.first(wall_us, len(ids))[:, REF]
        assert len(refs) == len(ids), f"{len(ids)} were released, {len(refs)} are due"
        self.dedup.land(ids, refs, base_offset, time_us)

    def apply(self, fact: Released | ScheduleCancelled) -> None:
        """Apply a fact."""
        self._head.pass_time(fact.time_us)
        if isinstance(fact, Released):
            self.wheel.advance(fact.until_us)
            self.wheel.drop(fact.until_us, fact.until_ref)
            self.releases += 1
            self.released = (fact.until_us, fact.until_ref)
        else:
            rows = self.wheel.cancel(fact.refs)
            self.cancelled.add(row.tobytes() for row in rows[:, HIGH : LOW + 1].astype(">i8"))

    # -------------------------------------------------------------------------------------------- snapshot

    def buffers(self) -> list[Buffer]:
        """The state for a snapshot."""
        if not self.scheduled:
            return []
        cancelled, dedup = self.cancelled.buffers(), self.dedup.buffers()
        numbers = array("q", (self.scheduled, len(cancelled), len(dedup)))
        return [numbers.tobytes(), *cancelled, *dedup, *self.wheel.buffers()]

    def load(self, columns: Sequence[memoryview]) -> None:
        """Restore the state from a snapshot."""
        if not columns:
            return
        numbers = array("q")
        numbers.frombytes(columns[0])
        self.scheduled, cancelled, dedup = numbers
        self.cancelled.load(columns[1 : 1 + cancelled])
        self.dedup.load(columns[1 + cancelled : 1 + cancelled + dedup])
        self.wheel.load(columns[1 + cancelled + dedup :])

    def verify(self) -> None:
        """Assert the invariants."""
        self.wheel.verify()
        self.dedup.verify()
        self.cancelled.verify()
        assert len(self.wheel) <= self.scheduled
