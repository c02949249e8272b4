"""The five priority lanes: whose turn it is, by weights or strictly; starving messages go first.

The turn is a position in a cyclic pattern of 100 slots, in which each lane has as many slots as its weight,
spread evenly by smooth weighted round robin: each step gives every lane its weight as credit, the lane with
most credit gets the slot and pays the total. With two lanes of the weights 3 and 1, total 4:

    credit     slot       credit afterwards
    3 1        lane 0     -1 1
    2 2        lane 0     -2 2
    1 3        lane 1      1 -1
    4 0        lane 0      0 0         pattern 0 0 1 0

A lane that has nothing gives its slot to the heaviest lane that has something. With `STRICT` every slot
belongs to lane 0, so a lane gets a turn only when all more urgent ones have nothing. A row that waits longer
than `starvation_ms` goes before all others, the oldest first, and uses up no slot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from tailrace.core.model.identifiers import PRIORITY_MAX

LANES = PRIORITY_MAX + 1
LANES_ALL = (1 << LANES) - 1
WEIGHTS = (50, 25, 15, 7, 3)

EMPTY, READY, UNKNOWN = range(3)
OWED_MAX = 6
"""Messages of a lane that may be drawn ahead of its turn and not paid back yet, where lanes have shares."""
FEW = 8
"""Fewer rows than this are taken one by one."""


def smooth_pattern(weights: Sequence[int]) -> tuple[int, ...]:
    """A pattern with as many slots of each lane as its weight, spread evenly."""
    total, credit, slots = sum(weights), [0] * len(weights), []
    for _ in range(total):
        credit = [have + weight for have, weight in zip(credit, weights, strict=True)]
        lane = credit.index(max(credit))
        credit[lane] -= total
        slots.append(lane)
    return tuple(slots)


WEIGHTED = smooth_pattern(WEIGHTS)
STRICT = (0,) * len(WEIGHTED)


def _first_of(slot: int, mask: int) -> int:
    order = (slot, *(lane for lane in range(LANES) if lane != slot))
    return next((lane for lane in order if mask >> lane & 1), -1)


_FIRST = tuple(tuple(_first_of(slot, mask) for mask in range(1 << LANES)) for slot in range(LANES))
"""By slot and mask of the lanes that have something: the lane that gets the slot, -1 if none has."""


class Feed(Protocol):
    """One lane during one selection, block by block.

    READY: `rows` from `at` on are next, all of which wait since `since_us` and have about `row_bytes`.
    UNKNOWN: what is next cannot be known before the frame of `missing` is cached (None: before expired
    messages are settled); it waits since `since_us` at the longest. EMPTY: the lane has nothing.
    """

    state: int
    rows: list[int]
    at: int
    since_us: int
    row_bytes: float
    missing: int | None

    def refill(self) -> bool:
        """All rows of the block were taken: find the next block. Return whether other lanes have changed by
        it."""
        ...


class LaneTurn:
    """Whose turn it is; moves with every delivery. A copy is moved while selecting.

    A member may ask for messages above a lane only: they are drawn ahead of their lane's turn. Where lanes
    have shares, such a row is *owed*: the lane gives up one of its next slots for it, even one for which it
    has nothing. So shares hold, however many urgent messages are asked for. While a lane owes `OWED_MAX`,
    nothing less urgent is drawn ahead either: that would use turns that pay nothing back, as often as it is
    asked for.
    """

    __slots__ = ("ahead", "held_back", "owed", "pattern", "position")

    def __init__(self, pattern: tuple[int, ...], position: int = 0, owed: Sequence[int] = ()) -> None:
        self.pattern = pattern
        self.position = position
        self.owed = list(owed) or [0] * LANES
        self.ahead: list[tuple[int, int]] = []
        """(offset, lane) of rows drawn ahead of their lane's turn; not copied."""
        self.held_back = False
        """Whether a lane was not drawn from because it owes too much; not copied."""

    def copy(self) -> LaneTurn:
        """A copy that moves on its own."""
        return LaneTurn(self.pattern, self.position, self.owed)

    def draw(
        self,
        feeds: Sequence[Feed],
        count_max: int,
        bytes_max: int,
        starved_us: int,
        above: int = LANES,
    ) -> tuple[list[int], int | None]:
        """Take rows from filled feeds in the order of delivery, until there are enough, or none is left, or
        the next one cannot be known: then the offset whose frame is missing is returned, too. Rows that wait
        since `starved_us` or longer go first. With `above`, draw only from lanes that are more urgent, ahead
        of their turn."""
        if above < LANES:
            return self._draw_ahead(feeds, count_max, bytes_max, above)
        taken: list[int] = []
        owed, owing = self.owed, any(self.owed)
        pattern, slots, position = self.pattern, len(self.pattern), self.position
        ready, unknown, starving = _masks(feeds, starved_us)
        missing, nbytes = None, 0.0
        while len(taken) < count_max and nbytes < bytes_max:
            if starving and not unknown:
                many = _starved(feeds, starving, count_max - len(taken), bytes_max - nbytes)
                if many:
                    taken += many[0]
                    nbytes += many[1]
                    ready, unknown, starving = _masks(feeds, starved_us)
                    continue
            slot = pattern[position]
            lane = _oldest(feeds, starving) if starving else _FIRST[slot][ready | unknown]
            if lane < 0:
                break
            if owing and not starving:
                if lane != slot and owed[slot]:
                    owed[slot] -= 1  # It has nothing to use this slot for.
                    owing = any(owed)
                if owed[lane]:
                    owed[lane] -= 1
                    owing = any(owed)
                    if (ready | unknown) & ~(1 << lane):
                        position = (position + 1) % slots  # It had what this slot would give it before.
                        continue
            feed = feeds[lane]
            if unknown and unknown >> lane & 1:
                missing = feed.missing
                break
            if not starving:
                position = (position + 1) % slots
            at = feed.at
            rows = feed.rows
            taken.append(rows[at])
            nbytes += feed.row_bytes
            feed.at = at = at + 1
            if at == len(rows) and (
                feed.refill() or feed.state != READY or starving or feed.since_us <= starved_us
            ):
                ready, unknown, starving = _masks(feeds, starved_us)
        self.position = position
        return taken, missing

    def _draw_ahead(
        self, feeds: Sequence[Feed], count_max: int, bytes_max: int, above: int
    ) -> tuple[list[int], int | None]:
        taken: list[int] = []
        nbytes = 0.0
        for lane in range(above):
            feed = feeds[lane]
            # A lane has a share only where others want theirs.
            shares = self.pattern is not STRICT and any(other.state != EMPTY for other in feeds[lane + 1 :])
            while feed.state != EMPTY:
                if feed.state != READY:
                    return taken, feed.missing
                if shares and self.owed[lane] >= OWED_MAX:
                    self.held_back = True
                    return taken, None
                if len(taken) == count_max or nbytes >= bytes_max:
                    return taken, None
                taken.append(feed.rows[feed.at])
                nbytes += feed.row_bytes
                if shares:
                    self.owed[lane] += 1
                    self.ahead.append((feed.rows[feed.at], lane))
                feed.at += 1
                if feed.at == len(feed.rows):
                    feed.refill()
        return taken, None

    def undo(self, lane: int) -> None:
        """A row that was drawn ahead of its lane's turn went back, and no handler got it: it is not owed."""
        self.owed[lane] = max(0, self.owed[lane] - 1)

    def skip(self, count: int) -> None:
        """Move the turn by deliveries that were not drawn here."""
        self.position = (self.position + count) % len(self.pattern)


def _starved(
    feeds: Sequence[Feed], starving: int, count_max: int, bytes_max: float
) -> tuple[list[int], float] | None:
    """Take the rows that wait longest, from all lanes that have such rows, in one step. The result is the
    same as one by one, as long as none of the lanes runs out. None: one by one is as good."""
    since_us = min(feed.since_us for lane, feed in enumerate(feeds) if starving >> lane & 1)
    oldest = [feed for lane, feed in enumerate(feeds) if starving >> lane & 1 and feed.since_us == since_us]
    last = min(feed.rows[-1] for feed in oldest)
    row_bytes = max(feed.row_bytes for feed in oldest)
    if row_bytes:
        count_max = min(count_max, int(bytes_max / row_bytes))
    ends = [bisect_right(feed.rows, last, feed.at) for feed in oldest]
    if count_max < FEW or sum(ends) - sum(feed.at for feed in oldest) < FEW:
        return None
    rows = sorted(row for feed, end in zip(oldest, ends, strict=True) for row in feed.rows[feed.at : end])
    rows = rows[:count_max]
    nbytes = 0.0
    for feed in oldest:
        end = bisect_right(feed.rows, rows[-1], feed.at)
        nbytes += feed.row_bytes * (end - feed.at)
        feed.at = end
    for feed in oldest:
        if feed.at == len(feed.rows):
            feed.refill()
    return rows, nbytes


def _masks(feeds: Sequence[Feed], starved_us: int) -> tuple[int, int, int]:
    ready = unknown = starving = 0
    for lane, feed in enumerate(feeds):
        if feed.state == EMPTY:
            continue
        if feed.state == READY:
            ready |= 1 << lane
        else:
            unknown |= 1 << lane
        if feed.since_us <= starved_us:
            starving |= 1 << lane
    return ready, unknown, starving


def _oldest(feeds: Sequence[Feed], starving: int) -> int:
    """The lane whose head waits longest, or may wait longest."""
    oldest = (
        (feed.since_us, feed.rows[feed.at] if feed.state == READY else -1, lane)
        for lane, feed in enumerate(feeds)
        if starving >> lane & 1
    )
    return min(oldest)[2]
