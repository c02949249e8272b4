"""Delayed messages of one partition, written as plainly as possible: a list, sorted when somebody asks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tailrace.core.delay.delay_queue import DelayQueue
from tailrace.core.model.facts import Delayed
from tailrace.core.model.queue_commands import Cancelled, CancelScheduled
from tests.core.delivery_model import Letter

WAITS, CANCELLED, RELEASED = "waits", "cancelled", "released"


@dataclass
class WaitingRow:
    """One delayed message; `ref` is where it is stored."""

    letter: Letter
    id: bytes
    deliver_at_us: int
    ref: int
    state: str = WAITS


class DelayModel:
    """All of a partition."""

    def __init__(self) -> None:
        self.rows: list[WaitingRow] = []
        self._ids = 0

    def halves(self, count: int) -> tuple[list[bytes], np.ndarray[tuple[int, ...], np.dtype[np.uint64]]]:
        """New ids, as bytes and as the core sees them; some are negative as signed numbers."""
        ids = [(self._ids + 1 + at).to_bytes(8, "little") * 2 for at in range(count)]
        self._ids += count
        pairs = [(int.from_bytes(one[:8], "big"), int.from_bytes(one[8:], "big")) for one in ids]
        return ids, np.array(pairs, np.uint64).reshape(-1, 2)

    def schedule(self, fact: Delayed, letters: list[Letter], ids: list[bytes], times: list[int]) -> None:
        for row, (letter, name, time_us) in enumerate(zip(letters, ids, times, strict=True)):
            self.rows.append(WaitingRow(letter, name, time_us, fact.entry << 20 | row))

    def waiting(self) -> list[WaitingRow]:
        """In the order of their release."""
        rows = [row for row in self.rows if row.state == WAITS]
        return sorted(rows, key=lambda row: (row.deliver_at_us, row.ref))

    def due(self, timetable: DelayQueue, now_us: int, limit: int) -> tuple[list[WaitingRow], int, int]:
        """What the partition says is due: exactly what is."""
        refs, until_us, until_ref = timetable.due(now_us, limit)
        rows = [row for row in self.waiting() if row.deliver_at_us <= now_us][:limit]
        assert [row.ref for row in rows] == [int(ref) for ref in refs]
        if rows:
            assert (until_us, until_ref) == (rows[-1].deliver_at_us, rows[-1].ref)
        return rows, until_us, until_ref

    def cancel(self, command: CancelScheduled, reply: object, now_us: int) -> None:
        assert isinstance(reply, Cancelled), reply
        known = {row.id: row for row in self.rows}
        for name, done in zip(command.ids, reply.done, strict=True):
            row = known.get(name)
            if row is None or row.state == RELEASED:
                assert not done, "cancelled what was not there"
            elif row.state == WAITS:
                assert done, "not cancelled, although it waits"
                row.state = CANCELLED
            else:
                assert done, "a cancelled message was forgotten"

    def check(self, timetable: DelayQueue) -> None:
        rows = self.waiting()
        next_us = timetable.next_due_us()
        if rows:
            assert next_us is not None, "somebody waits, and nobody will look"
            assert next_us <= rows[0].deliver_at_us
            lowest = timetable.lowest_entry()
            assert lowest is not None
            assert lowest <= min(row.ref for row in rows) >> 20, "a frame that is needed may be trimmed"
