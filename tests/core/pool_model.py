"""A partition with one group: a list of rows with a state each, and the choice by brute force."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.core.core_tuning import LAPSED_MAX
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import PRIORITY_DEFAULT, Columns
from tailrace.core.selection.lanes import LANES, STRICT, WEIGHTED
from tailrace.core.selection.row_selector import RowSelector, Selection, Want

T0 = 1_700_000_000_000_000
SECOND_US = 1_000_000
FRESH, BACK, LEASED, DYING, SETTLED = "fresh", "back", "leased", "dying", "settled"


@dataclass
class Row:
    """A message and what has become of it."""

    offset: int
    lane: int
    key: int
    expires_us: int
    append_time_us: int
    state: str = FRESH
    due_us: int = 0
    member: str = ""


def flat(offsets: Sequence[int]) -> list[int]:
    """Spans of offsets as facts have them."""
    spans: list[int] = []
    for offset in sorted(offsets):
        if spans and spans[-1] == offset:
            spans[-1] += 1
        else:
            spans += [offset, offset + 1]
    return spans


class World:
    """The rows, the frames that are at hand, and a pool that is told what happens to them."""

    def __init__(self, policy: GroupPolicy, keyed: bool, exact: bool = True, doubting: bool = True) -> None:
        self.policy = policy
        self.keyed = keyed
        self.exact = exact
        """Every choice is compared with that by brute force."""
        self.doubting = doubting
        """Every question is put twice."""
        self.rows: list[Row] = []
        self.frames: list[Columns] = []
        self.here: set[int] = set()
        self.frame_of: list[int] = []
        self.now_us = T0
        self.pool = RowSelector(policy)
        self.pattern = STRICT if policy.priority_mode == "strict" else WEIGHTED
        self.position = 0
        self.loads = 0

    # ------------------------------------------------------------------------------------ what the pool sees

    @property
    def cursor(self) -> int:
        return max((row.offset + 1 for row in self.rows if row.state != FRESH), default=0)

    def fresh_spans(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        free = flat([row.offset for row in self.rows[first : min(end, self.cursor)] if row.state == FRESH])
        yield from zip(free[::2], free[1::2], strict=True)

    def back_rows(self) -> Iterator[tuple[int, int, int, Sequence[int]]]:
        return ((row.offset, row.offset + 1, row.due_us, [row.key]) for row in self.rows if row.state == BACK)

    def leased_rows(self) -> Iterator[tuple[str, int, int, Sequence[int]]]:
        return ((row.member, row.offset, row.offset + 1, []) for row in self.rows if row.state == LEASED)

    def dying_rows(self) -> Iterator[tuple[int, int, Sequence[int]]]:
        return ((row.offset, row.offset + 1, []) for row in self.rows if row.state == DYING)

    def lanes(self, offset: int) -> tuple[int, int]:
        frame = self.frames[self.frame_of[offset]]
        lanes = {row.lane for row in self.rows[frame.base_offset : frame.end_offset]}
        return sum(1 << lane for lane in lanes), frame.end_offset

    def columns(self, offset: int) -> Columns | None:
        place = self.frame_of[offset]
        return self.frames[place] if place in self.here else None

    def reach(self, offset: int, bytes_max: int) -> int:
        raise AssertionError("the pool does not lease whole runs")

    # ---------------------------------------------------------------------------------------- what happens

    def publish(self, rows: Sequence[tuple[int, int]], ttl_us: int = 0) -> None:
        """Append a frame of (lane, key) rows, all of them with the same TTL."""
        base, expires_us = len(self.rows), self.now_us + ttl_us if ttl_us else 0
        self.rows += [
            Row(base + at, lane, key, expires_us, self.now_us) for at, (lane, key) in enumerate(rows)
        ]
        lanes, keys = (
            np.array([row[0] for row in rows], np.uint8),
            np.array([row[1] for row in rows], np.uint64),
        )
        self.frame_of += [len(self.frames)] * len(rows)
        self.here.add(len(self.frames))
        self.frames.append(
            Columns(
                base,
                base + len(rows),
                self.now_us,
                priorities=lanes if (lanes != PRIORITY_DEFAULT).any() else None,
                key_hashes=keys if keys.any() else None,
                expires_us=np.full(len(rows), expires_us, np.int64) if ttl_us else None,
                nbytes=100 * len(rows),
            )
        )

    def ask(self, member: str, count: int, bytes_max: int = 1 << 30) -> Selection:
        want = Want(member, count, bytes_max, len(self.rows), self.now_us, self.now_us, self.keyed)
        return self.pool.select(want, self, self, self)

    def lease(self, member: str, count: int) -> list[int]:
        """Lease as a ledger would; frames that are missing are loaded, one at a time."""
        while True:
            chosen = self.ask(member, count)
            assert not self.doubting or self.ask(member, count) == chosen, "asking changes nothing"
            lapsing = self._lapsing()
            if self.exact and not lapsing:
                complete = chosen.missing is None and len(chosen.lapsed) < LAPSED_MAX
                expected = self.expected(member, count if complete else len(chosen.offsets))
                assert chosen.offsets == expected, (chosen, expected)
            if chosen.lapsed:
                assert all(self._expired(self.rows[offset]) for offset in chosen.lapsed)
                for offset in chosen.lapsed:
                    self.rows[offset].state = DYING if self.policy.expired_to_dlq else SETTLED
            if chosen.offsets:
                self._lease(member, chosen)
            if chosen.lapsed:
                (self.pool.dying if self.policy.expired_to_dlq else self.pool.settled)(flat(chosen.lapsed))
            if lapsing:
                self.position = self.pool._turn.position
            if chosen.offsets or (chosen.missing is None and not chosen.lapsed):
                return chosen.offsets
            if chosen.missing is not None and not chosen.lapsed:
                self.loads += 1
                place = self.frame_of[chosen.missing]
                assert place not in self.here, "asked for a frame that is at hand"
                self.here.add(place)

    def _lapsing(self) -> bool:
        """Whether keys have something expired in them: it lapses when it is looked at, perhaps before its
        turn, and gives its key another lane then. So more than one order is right."""
        return self.keyed and any(self._expired(self.rows[offset]) for offset in self.of(FRESH, BACK))

    def _lease(self, member: str, chosen: Selection) -> None:
        for offset in chosen.offsets:
            row = self.rows[offset]
            assert row.state == FRESH or (row.state == BACK and row.due_us <= self.now_us), row
            assert not self._expired(row)
            assert self.frame_of[offset] in self.here
            assert self._may(row, member), f"{offset} overtakes its key or goes to a second member"
            row.state, row.member = LEASED, member
        keys = dict(zip(chosen.offsets, chosen.keys, strict=True)) if self.keyed else {}
        assert all(self.rows[offset].key == key for offset, key in keys.items())
        self.pool.leased(member, flat(chosen.offsets), [keys[offset] for offset in sorted(keys)])

    def ack(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            assert self.rows[offset].state == LEASED
            self.rows[offset].state = SETTLED
        self.pool.acked(flat(offsets))

    def settle(self, offsets: Sequence[int], dying: bool = False) -> None:
        for offset in offsets:
            self.rows[offset].state = DYING if dying else SETTLED
        (self.pool.dying if dying else self.pool.settled)(flat(offsets))

    def give_back(self, offset: int, delay_us: int) -> None:
        """One message waits, and the later ones of its key that are in flight come back with it."""
        mine = self.rows[offset]
        self._back(mine, self.now_us + delay_us)
        if self.keyed and mine.key:
            for row in self.rows[offset + 1 :]:
                if row.state == LEASED and row.key == mine.key:
                    self._back(row, self.now_us)

    def _back(self, row: Row, due_us: int) -> None:
        row.state, row.due_us, row.member = BACK, due_us, ""
        self.pool.returned([(row.offset, row.offset + 1, due_us)])

    def of(self, *states: str) -> list[int]:
        return [row.offset for row in self.rows if row.state in states]

    # ----------------------------------------------------------------------------------------- brute force

    def expected(self, member: str, count: int) -> list[int]:
        """What a member is to get next, one row after the other."""
        saved = [(row.state, row.member) for row in self.rows]
        chosen: list[int] = []
        while len(chosen) < count:
            heads, waits = self._heads(member)
            expired = [row for row in heads.values() if self._expired(row)]
            for row in expired:
                row.state = DYING if self.policy.expired_to_dlq else SETTLED
            if not heads:
                break
            if not expired:
                best = self._best(heads, waits)
                best.state, best.member = LEASED, member
                chosen.append(best.offset)
        for row, (state, holder) in zip(self.rows, saved, strict=True):
            row.state, row.member = state, holder
        return chosen

    def _expired(self, row: Row) -> bool:
        return 0 < row.expires_us <= self.now_us

    def _ready(self, row: Row) -> bool:
        return row.state == FRESH or (row.state == BACK and row.due_us <= self.now_us)

    def _unsettled(self, key: int) -> list[Row]:
        return [row for row in self.rows if row.key == key and row.state != SETTLED]

    def _may(self, row: Row, member: str) -> bool:
        """Whether a row that is ready may go to a member, for all that its key says."""
        if not self.keyed or not row.key:
            return True
        siblings = self._unsettled(row.key)
        before = [other for other in siblings if other.offset < row.offset]
        return all(other.state == LEASED for other in before) and all(
            other.member == member for other in siblings if other.state == LEASED
        )

    def _lane(self, row: Row) -> int:
        return self._unsettled(row.key)[0].lane if self.keyed and row.key else row.lane

    def _heads(self, member: str) -> tuple[dict[int, Row], dict[int, int]]:
        """By lane: the row that is next, and since when one of its rows waits; what has expired does not."""
        heads, waits = dict[int, Row](), dict[int, int]()
        for row in self.rows:
            if self._ready(row) and self._may(row, member):
                lane = self._lane(row)
                head = heads.get(lane)
                if head is None or self._place(row) < self._place(head):
                    heads[lane] = row
                if not self._expired(row):
                    waits[lane] = min(waits.get(lane, self.now_us), self.since(row))
        return heads, waits

    def _place(self, row: Row) -> tuple[int, ...]:
        """Where a row stands in its lane: what came back by when it is due, before all others."""
        fresh = row.state == FRESH
        return fresh, 0 if fresh else row.due_us, row.offset

    @property
    def _starved_us(self) -> int:
        return self.now_us - self.policy.starvation_ms * 1000

    def _best(self, heads: dict[int, Row], waits: dict[int, int]) -> Row:
        starving = [
            (since_us, heads[lane].offset) for lane, since_us in waits.items() if since_us <= self._starved_us
        ]
        if starving:
            return self.rows[min(starving)[1]]
        slot = self.pattern[self.position]
        self.position = (self.position + 1) % len(self.pattern)
        return heads[next(lane for lane in (slot, *range(LANES)) if lane in heads)]

    def since(self, row: Row) -> int:
        return row.due_us if row.state == BACK else row.append_time_us
