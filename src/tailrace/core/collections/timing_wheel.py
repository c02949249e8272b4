"""A hierarchical timing wheel in columns: rows that wait for a time, 32 bytes each, no object per row.

A row is (deliver_at, ref, high, low): the due time in microseconds, where the message is stored (`ref_of`),
and the two halves of its id. Rows are ordered by (deliver_at, ref).

Time is cut into ticks of 10 ms, and `position` is the tick that the wheel has reached. A row whose tick is at
or before the position is *due*: due rows lie in sorted runs. All other rows lie in slots, unsorted.

Write a row's tick and the position in base 64. The highest digit in which they differ is the row's *level*.
Its *slot* is the tick without the digits below the level. A slot of level 0 is one tick wide, of level 1 64
ticks (640 ms), of level 2 4096 ticks (41 s), of level 3 44 minutes, and so on up to any time. All rows of a
lower level come before those of a higher one, because they share more digits with the position.

When the position reaches the first tick of a slot, the slot is emptied: each of its rows is now due, or
differs from the position in a lower digit and goes to the slot of that level. So a row moves at most once per
level, together with all rows of its slot.

Example. The position is 1000, in base 64 (15, 40). Four rows are inserted:

    tick    base 64       differs in    slot
    1003    (15, 43)      digit 0       level 0, number 1003: only this tick
    1030    (16, 6)       digit 1       level 1, number 16: ticks 1024 to 1087
    1100    (17, 12)      digit 1       level 1, number 17: ticks 1088 to 1151
    5000    (1, 14, 8)    digit 2       level 2, number 1: ticks 4096 to 8191

    advance to 1030    The first two slots are emptied: 1003 and 1030 are due.
    advance to 4100    4100 is (1, 0, 4). Slot 17 is emptied: 1100 is due. Slot 1 of level 2 is emptied, too:
                       5000 now differs in digit 1 and goes to level 1, number 78 (ticks 4992 to 5055).
    advance to 5000    Slot 78 is emptied: 5000 is due.

Emptying a large slot at once would take long. So its blocks become *unsorted* first. Each move places
`MOVED_BLOCKS` of them, and of the others only rows that are due or will be within `SOON_TICKS`. A due row is
therefore never among the unsorted ones.

A cancelled row stays as a tombstone (a bit in its ref) until its time has passed. Blocks are only appended to
or replaced, never changed in place, so a snapshot takes references and copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tailrace.core.collections.hash_table import Buffer
from tailrace.errors import Corrupt

TICK_US = 10_000
DIGIT_BITS = 6
BLOCK_ROWS = 4096
MOVED_BLOCKS = 8
"""Unsorted blocks that one move of the position places."""
SOON_TICKS = 64
RUNS_MAX = 64
"""With more sorted runs of due rows than this, they are merged into one. Due rows leave soon, unless the
clock by which messages are released was put back: then they pile up in many small runs."""
ROW_BITS = 20
"""Bits of a ref for the row; the entry has the bits above them."""
CANCELLED = 1 << 62
"""Set in the ref of a tombstone."""
NEVER = (1 << 63) - 1
REF_MAX = CANCELLED - 1

AT, REF, HIGH, LOW = range(4)
WIDTH = 4
_ROW_BYTES = 8 * WIDTH
_LEVEL_BITS = 56
_DIGIT_MASK = (1 << DIGIT_BITS) - 1
_LEVELS = np.array([1 << DIGIT_BITS * level for level in range(1, 10)], np.int64)

Rows = npt.NDArray[np.int64]
"""Shape (rows, 4): due time, ref, and the two halves of the id."""


def ref_of(entry: int, row: int) -> int:
    """The ref of a message: the entry of its frame and the row in it, as one number."""
    return entry << ROW_BITS | row


def in_order(rows: Rows) -> Rows:
    """Sort rows by (deliver_at, ref)."""
    if len(rows) < 2:
        return rows
    if (rows[1:, REF] > rows[:-1, REF]).all():
        return np.take(rows, np.argsort(rows[:, AT], kind="stable"), axis=0)
    return np.take(rows, np.lexsort((rows[:, REF], rows[:, AT])), axis=0)


def some(rows: Rows, mask: npt.NDArray[np.bool_]) -> Rows:
    """Select rows by a mask. Indexing with the mask itself takes forty times as long for rows."""
    return np.take(rows, np.flatnonzero(mask), axis=0)


class _Block:
    """Up to `BLOCK_ROWS` rows, with bounds by which a search can skip the whole block."""

    __slots__ = ("fill", "high", "low", "newest", "oldest", "rows", "soonest")

    def __init__(self, capacity: int) -> None:
        self.rows: Rows = np.empty((capacity, WIDTH), np.int64)
        self.fill = 0
        self.soonest = self.oldest = NEVER
        self.newest = -1
        self.low, self.high = NEVER, -NEVER

    @property
    def used(self) -> Rows:
        return self.rows[: self.fill]

    def add(self, rows: Rows) -> None:
        """Append rows that fit. Rows that a snapshot refers to do not change."""
        end = self.fill + len(rows)
        if end > len(self.rows):
            larger = np.empty((min(max(2 * len(self.rows), end), BLOCK_ROWS), WIDTH), np.int64)
            larger[: self.fill] = self.used
            self.rows = larger
        self.rows[self.fill : end] = rows
        self.fill = end
        self._widen(rows)

    def _widen(self, rows: Rows) -> None:
        at, ref, high = rows[:, AT], rows[:, REF], rows[:, HIGH]
        self.low, self.high = min(self.low, int(high.min())), max(self.high, int(high.max()))
        newest = int(ref.max())
        if newest >= CANCELLED:
            newest = int((ref & REF_MAX).max())
            live = ref < CANCELLED
            at, ref = at[live], ref[live]
        self.newest = max(self.newest, newest)
        if len(ref):
            self.soonest, self.oldest = min(self.soonest, int(at.min())), min(self.oldest, int(ref.min()))

    def cancel(self, refs: Rows) -> Rows:
        """Turn the live rows with these refs into tombstones, in a copy of the block; return the rows as they
        were."""
        hit = np.isin(self.used[:, REF], refs)
        found = some(self.used, hit)
        if len(found):
            self.rows = self.used.copy()
            self.rows[hit, REF] |= CANCELLED
            self.soonest = self.oldest = NEVER
            self._widen(self.rows)
        return found


class _Slot:
    """Rows of one span of time in the order of insertion. All blocks but the last are full."""

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks: list[_Block] = []

    def add(self, rows: Rows) -> None:
        at = 0
        while at < len(rows):
            if not self.blocks or self.blocks[-1].fill == BLOCK_ROWS:
                self.blocks.append(_Block(min(max(len(rows) - at, 4), BLOCK_ROWS)))
            room = BLOCK_ROWS - self.blocks[-1].fill
            self.blocks[-1].add(rows[at : at + room])
            at += room

    @property
    def soonest(self) -> int:
        return min(block.soonest for block in self.blocks)

    def __len__(self) -> int:
        return sum(block.fill for block in self.blocks)


class TimingWheel:
    """The wheel. Only `insert`, `advance`, `drop` and `cancel` change it."""

    __slots__ = ("_live", "_loose", "_ripe", "_slots", "_tombstones", "position")

    def __init__(self) -> None:
        self.position = 0
        """The tick up to which rows are due."""
        self._slots: dict[int, _Slot] = {}
        """By level and number (`_key`): keys in ascending order are slots in the order of time."""
        self._ripe: list[Rows] = []
        self._loose: list[_Block] = []
        self._live = 0
        self._tombstones = False
        """Whether the due rows may contain tombstones."""

    def __len__(self) -> int:
        """The number of rows that wait, without tombstones."""
        return self._live

    # ---------------------------------------------------------------------------------------------- changes

    def insert(self, rows: Rows) -> None:
        """Add rows, due at any time."""
        self._live += int(np.count_nonzero(rows[:, REF] < CANCELLED))
        self._place(rows)

    def _place(self, rows: Rows) -> None:
        ticks = rows[:, AT] // TICK_US
        ripe = ticks <= self.position
        if ripe.any():
            self._ripe.append(in_order(some(rows, ripe)))
            if len(self._ripe) > RUNS_MAX:
                together = np.concatenate(self._ripe)
                self._ripe = [in_order(some(together, together[:, REF] < CANCELLED))]
                self._tombstones = False
            rows, ticks = some(rows, ~ripe), ticks[~ripe]
            if not len(rows):
                return
        levels = np.searchsorted(_LEVELS, ticks ^ self.position, "right")
        # Level and digit name a slot, as all rows of a level share the digits above: 16 bits sort quickly.
        codes = (levels << DIGIT_BITS | ticks >> DIGIT_BITS * levels & _DIGIT_MASK).astype(np.uint16)
        if (codes == codes[0]).all():
            self._slot(_key(int(levels[0]), int(ticks[0]))).add(rows)
            return
        order = np.argsort(codes, kind="stable")
        codes, rows = codes[order], np.take(rows, order, axis=0)
        starts = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1]))).tolist()
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            first = order[start]
            self._slot(_key(int(levels[first]), int(ticks[first]))).add(rows[start:end])

    def _slot(self, key: int) -> _Slot:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = _Slot()
        return slot

    def advance(self, time_us: int) -> None:
        """Move the position to a time: rows up to there become due. Tombstones whose time has passed are
        removed."""
        tick = time_us // TICK_US
        if tick <= self.position:
            return
        self.position = tick
        if self._tombstones:
            runs = [some(run, run[:, REF] < CANCELLED) for run in self._ripe]
            self._ripe = [run for run in runs if len(run)]
            self._tombstones = False
        for key in sorted(key for key in self._slots if _start(key) <= tick):
            self._loose += self._slots.pop(key).blocks
        if self._loose:
            self._sort_out()

    def _sort_out(self) -> None:
        """Place `MOVED_BLOCKS` of the unsorted blocks, and of the others the rows that are due or nearly
        so."""
        moved, self._loose = self._loose[:MOVED_BLOCKS], self._loose[MOVED_BLOCKS:]
        parts = [block.used for block in moved]
        kept: list[_Block] = []
        for block in self._loose:
            if block.soonest // TICK_US > self.position:
                kept.append(block)
                continue
            soon = block.used[:, AT] // TICK_US <= self.position + SOON_TICKS
            parts.append(some(block.used, soon))
            if not soon.all():
                kept.append(_block(some(block.used, ~soon)))
        self._loose = kept
        rows = np.concatenate(parts)
        gone = (rows[:, REF] >= CANCELLED) & (rows[:, AT] // TICK_US <= self.position)
        rows = some(rows, ~gone) if gone.any() else rows
        if len(rows):
            self._place(rows)

    def drop(self, until_us: int, until_ref: int) -> None:
        """Remove all rows up to (until_us, until_ref) in the order; they must be due."""
        assert until_us // TICK_US <= self.position, "rows are dropped when they are ripe"
        kept = []
        for run in self._ripe:
            end = end_of(run, until_us, until_ref)
            self._live -= int(np.count_nonzero(run[:end, REF] < CANCELLED))
            if end < len(run):
                kept.append(run[end:])
        self._ripe = kept

    def cancel(self, refs: Sequence[int]) -> Rows:
        """Turn rows into tombstones; return those that waited until now, sorted by ref."""
        wanted = np.array(sorted(refs), np.int64)
        low, high = int(wanted[0]), int(wanted[-1])
        found = [np.empty((0, WIDTH), np.int64)]
        for block in self._blocks():
            if block.oldest <= high and block.newest >= low:
                found.append(block.cancel(wanted))
        for number, run in enumerate(self._ripe):
            hit = np.isin(run[:, REF], wanted)
            if hit.any():
                found.append(some(run, hit))
                changed = run.copy()
                changed[hit, REF] |= CANCELLED
                self._ripe[number] = changed
                self._tombstones = True
        rows = np.concatenate(found)
        self._live -= len(rows)
        return np.take(rows, np.argsort(rows[:, REF]), axis=0)

    # ----------------------------------------------------------------------------------------------- looking

    def _blocks(self) -> Iterator[_Block]:
        yield from self._loose
        for slot in self._slots.values():
            yield from slot.blocks

    def next_us(self) -> int | None:
        """The due time of the first row that waits."""
        soonest = NEVER
        for run in self._ripe:
            live = run[:, REF] < CANCELLED
            first = int(live.argmax())
            if live[first]:
                soonest = min(soonest, int(run[first, AT]))
        if soonest == NEVER:
            for key in sorted(self._slots):
                soonest = self._slots[key].soonest
                if soonest != NEVER:
                    break
            soonest = min([soonest, *(block.soonest for block in self._loose)])
        return None if soonest == NEVER else soonest

    def oldest_ref(self) -> int | None:
        """The lowest ref among the rows that wait."""
        oldest = min((block.oldest for block in self._blocks()), default=NEVER)
        for run in self._ripe:
            oldest = min(oldest, int(run[:, REF].min()))
        return oldest if oldest < CANCELLED else None

    def newest_ref(self) -> int:
        """The highest ref of all rows, tombstones included; -1 without any."""
        newest = max((block.newest for block in self._blocks()), default=-1)
        return max([newest, *(int((run[:, REF] & REF_MAX).max()) for run in self._ripe)])

    def first(
        self,
        until_us: int,
        limit: int,
        until_ref: int = REF_MAX,
        *,
        after_us: int = -1,
        refs_end: int = REF_MAX,
    ) -> Rows:
        """The first `limit` rows in the order that wait, up to (until_us, until_ref); only rows due after
        `after_us` whose ref is below `refs_end`."""
        found: list[Rows] = []
        count, reach = 0, -1
        for run in sorted(self._ripe, key=lambda rows: int(rows[0, AT])):
            if count >= limit and int(run[0, AT]) > reach:
                break
            rows = run[: end_of(run, until_us, until_ref)]
            rows = some(rows, (rows[:, REF] < refs_end) & (rows[:, AT] > after_us))[:limit]
            if len(rows):
                found.append(rows)
                count, reach = count + len(rows), max(reach, int(rows[-1, AT]))
        if count < limit:
            for block in self._loose:  # Rows of any time: they do not count towards the limit.
                if block.soonest <= until_us:
                    found.append(_within(block.used, until_us, until_ref, after_us, refs_end))
            for key in sorted(self._slots):
                if count >= limit or _start(key) > until_us // TICK_US:
                    break
                for block in self._slots[key].blocks:
                    if block.soonest <= until_us:
                        found.append(_within(block.used, until_us, until_ref, after_us, refs_end))
                        count += len(found[-1])
        if not found:
            return np.empty((0, WIDTH), np.int64)
        rows = found[0] if len(found) == 1 else np.concatenate(found)
        if len(rows) > 2 * limit:
            # A whole slot of far rows: sort only what can be among the first.
            rows = some(rows, rows[:, AT] <= np.partition(rows[:, AT], limit - 1)[limit - 1])
        return in_order(rows)[:limit]

    def between(self, after: tuple[int, int], until_us: int, since_ref: int) -> tuple[Rows, Rows]:
        """Rows that wait and are due up to a time, in two parts: those behind `after` in the order, and those
        up to there whose ref is at or above `since_ref`. Not sorted."""
        behind, recent = [], []
        for rows in self._near(until_us):
            rows = _upto(rows, until_us, REF_MAX)
            at, ref = rows[:, AT], rows[:, REF]
            beyond = (at > after[0]) | ((at == after[0]) & (ref > after[1]))
            behind.append(some(rows, beyond))
            recent.append(some(rows, ~beyond & (ref >= since_ref)))
        nothing = np.empty((0, WIDTH), np.int64)
        return np.concatenate([nothing, *behind]), np.concatenate([nothing, *recent])

    def _near(self, until_us: int) -> Iterator[Rows]:
        yield from self._ripe
        yield from (block.used for block in self._loose if block.soonest <= until_us)
        for key in sorted(self._slots):
            if _start(key) > until_us // TICK_US:
                return
            for block in self._slots[key].blocks:
                if block.soonest <= until_us:
                    yield block.used

    def find(self, high: int, low: int, at_us: int = 0) -> list[int]:
        """Refs of the rows with an id, tombstones included (with their bit). `at_us` is a hint: slots in
        which a row of that time cannot lie are not searched."""
        found: list[int] = []
        tick = at_us // TICK_US
        for key, slot in self._slots.items():
            level = key >> _LEVEL_BITS
            if at_us and key != _key(level, tick):
                continue
            for block in slot.blocks:
                if block.low <= high <= block.high:
                    found += _with_id(block.used, high, low)
        for block in self._loose:
            if block.low <= high <= block.high:
                found += _with_id(block.used, high, low)
        for run in self._ripe:
            found += _with_id(run, high, low)
        return found

    # ---------------------------------------------------------------------------------------------- snapshot

    def buffers(self) -> list[Buffer]:
        """The state for a snapshot: numbers, then the rows as they lie in memory, by reference."""
        keys = sorted(self._slots)
        whole = [*self._ripe, *(block.used for block in self._loose)]
        numbers = [self.position, int(self._tombstones), len(self._ripe), len(whole), *map(len, whole)]
        for key in keys:
            numbers += (key, len(self._slots[key]))
        parts = [*whole, *(block.used for key in keys for block in self._slots[key].blocks)]
        return [np.array(numbers, np.int64).tobytes(), *(part.data.cast("B") for part in parts)]

    def load(self, buffers: Sequence[Buffer]) -> None:
        """Restore the state from `buffers`."""
        numbers = np.frombuffer(buffers[0], np.int64).tolist()
        data = memoryview(b"".join(buffers[1:]))
        if len(numbers) < 4 or len(data) % _ROW_BYTES:
            raise Corrupt("the delayed messages of the snapshot cannot be read")
        rows = np.frombuffer(data, np.int64).reshape(-1, WIDTH)
        position, tombstones, ripe, whole = numbers[:4]
        sizes, slots = numbers[4 : 4 + whole], numbers[4 + whole :]
        if sum(sizes) + sum(slots[1::2]) != len(rows) or len(slots) % 2:
            raise Corrupt(f"the snapshot has {len(rows)} delayed messages, others are listed")
        self.position, self._tombstones = position, bool(tombstones)
        pieces, at = [], 0
        for size in (*sizes, *slots[1::2]):
            pieces.append(rows[at : at + size])
            at += size
        self._ripe = [piece.copy() for piece in pieces[:ripe]]
        self._loose = [_block(piece) for piece in pieces[ripe:whole]]
        self._slots = {}
        for key, piece in zip(slots[::2], pieces[whole:], strict=True):
            self._slot(key).add(piece)
        self._live = int(np.count_nonzero(rows[:, REF] < CANCELLED))

    def verify(self) -> None:
        """Assert the invariants."""
        live = 0
        for run in self._ripe:
            assert len(run), "a run is empty"
            masked = run.copy()
            masked[:, REF] &= REF_MAX
            assert np.array_equal(masked, in_order(masked)), "a run is not sorted"
            assert (run[:, AT] // TICK_US <= self.position).all(), "a ripe row is not"
            live += int(np.count_nonzero(run[:, REF] < CANCELLED))
        for block in self._loose:
            assert block.fill, "a loose block is empty"
            assert block.soonest // TICK_US > self.position, "a ripe row is loose"
            live += int(np.count_nonzero(block.used[:, REF] < CANCELLED))
        for key, slot in self._slots.items():
            level = key >> _LEVEL_BITS
            for block in slot.blocks:
                ticks = block.used[:, AT] // TICK_US
                assert (ticks > self.position).all(), "a ripe row stands in a slot"
                assert (ticks >> DIGIT_BITS * level == key & ((1 << _LEVEL_BITS) - 1)).all(), "a wrong slot"
                live += int(np.count_nonzero(block.used[:, REF] < CANCELLED))
            assert all(block.fill == BLOCK_ROWS for block in slot.blocks[:-1])
        assert live == self._live, f"{live} rows wait, {self._live} are counted"


def _key(level: int, tick: int) -> int:
    """The key of the slot in which a tick lies on a level."""
    return level << _LEVEL_BITS | tick >> DIGIT_BITS * level


def _start(key: int) -> int:
    """The first tick of a slot."""
    return (key & ((1 << _LEVEL_BITS) - 1)) << DIGIT_BITS * (key >> _LEVEL_BITS)


def end_of(run: Rows, until_us: int, until_ref: int) -> int:
    """The number of rows of a sorted run up to (until_us, until_ref) in the order."""
    first = int(np.searchsorted(run[:, AT], until_us, "left"))
    end = int(np.searchsorted(run[:, AT], until_us, "right"))
    return first + int(np.searchsorted(run[first:end, REF] & REF_MAX, until_ref, "right"))


def _block(rows: Rows) -> _Block:
    """A new block with these rows."""
    block = _Block(len(rows))
    block.add(rows)
    return block


def _within(rows: Rows, until_us: int, until_ref: int, after_us: int, refs_end: int) -> Rows:
    """The rows that wait, up to (until_us, until_ref), due after a time and with a ref below an end."""
    rows = _upto(rows, until_us, until_ref)
    if after_us < 0 and refs_end == REF_MAX:
        return rows
    return some(rows, (rows[:, REF] < refs_end) & (rows[:, AT] > after_us))


def _upto(rows: Rows, until_us: int, until_ref: int) -> Rows:
    """The rows that wait, up to (until_us, until_ref) in the order."""
    at, ref = rows[:, AT], rows[:, REF]
    return some(rows, (ref < CANCELLED) & ((at < until_us) | ((at == until_us) & (ref <= until_ref))))


def _with_id(rows: Rows, high: int, low: int) -> list[int]:
    hit = (rows[:, HIGH] == high) & (rows[:, LOW] == low)
    refs: list[int] = rows[hit, REF].tolist()
    return refs
