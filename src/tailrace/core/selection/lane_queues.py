"""Messages by lane where no keys matter: each lane looks ahead over the whole backlog on its own.

For each lane, the free rows found so far are kept per frame (a `LaneChunk`), with how far the lane has
looked. Without keys no message waits for another, so a lane whose next message is far away looks past all
others. Frames that have nothing of a lane, by the frame index, are skipped unread. A frame that has to be
opened for one lane is opened for all lanes that have come just as far.

Example: frames F0 (offsets 0-99, lane 2), F1 (100-199, lanes 0 and 2), F2 (200-299, lane 2). Lane 0 skips F0,
opens F1 and finds its rows there. Lane 2 has looked at nothing yet, so it does not take its rows of F1 with
it: it opens F0 first, then F1 itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain

import numpy as np
import numpy.typing as npt

from tailrace.core.core_tuning import AHEAD_FRAMES
from tailrace.core.model.identifiers import PRIORITY_DEFAULT, CachedFrames, Columns, Times
from tailrace.core.selection.lanes import LANES
from tailrace.core.selection.selection_terms import LedgerView, Traits, Want

NEVER_US = 1 << 62

Mask = npt.NDArray[np.bool_]


class View:
    """The inputs of one selection, and the expired messages that it found (`lapsed`)."""

    __slots__ = ("at_hand", "lapsed", "source", "traits", "want")

    def __init__(self, want: Want, source: LedgerView, traits: Traits, at_hand: CachedFrames) -> None:
        self.want = want
        self.source = source
        self.traits = traits
        self.at_hand = at_hand
        self.lapsed: dict[int, None] = {}

    def fresh(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Spans in [first, end) that were never delivered, on both sides of the cursor."""
        cursor = self.source.cursor
        if first < cursor:
            yield from self.source.fresh_spans(first, min(end, cursor))
        if max(first, cursor) < end:
            yield max(first, cursor), end

    def lane_by_traits(self, offset: int) -> int | None:
        """The lane of a message, if the frame index alone says it."""
        lanes, _ = self.traits.lanes(offset)
        return lanes.bit_length() - 1 if lanes.bit_count() == 1 else None


def row_bytes(columns: Columns) -> float:
    """The average size of a row of a frame, in bytes."""
    rows = columns.end_offset - columns.base_offset if columns.offsets is None else len(columns.offsets)
    return columns.nbytes / max(rows, 1)


def row_of(columns: Columns, offset: int) -> int:
    """The row of a frame that has an offset."""
    if columns.offsets is None:
        return offset - columns.base_offset
    return int(columns.offsets.searchsorted(offset))


def lane_of(columns: Columns, offset: int) -> int:
    """The lane of a message, from its frame."""
    return (
        PRIORITY_DEFAULT if columns.priorities is None else int(columns.priorities[row_of(columns, offset)])
    )


def fresh_rows(columns: Columns, first: int, end: int, view: View) -> npt.NDArray[np.int64]:
    """The rows of a frame with offsets in [first, end) that were never delivered."""
    offsets = columns.offsets
    if offsets is None:
        offsets = np.arange(columns.base_offset, columns.end_offset, dtype=np.int64)
    spans = [*view.fresh(first, end)]
    if len(spans) == 1:
        low, high = offsets.searchsorted(spans[0])
        return np.arange(low, high, dtype=np.int64)
    bounds = np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(spans))
    return np.flatnonzero(_inside(offsets, bounds))


def _inside(offsets: Times, bounds: Times) -> Mask:
    """Which offsets lie in one of the ascending spans: those with an odd number of bounds at or below
    them."""
    inside: Mask = bounds.ravel().searchsorted(offsets, "right") & 1 == 1
    return inside


class LaneChunk:
    """Rows of one lane in one frame that are free, ascending."""

    __slots__ = ("append_time_us", "expires", "offsets", "row_bytes")

    def __init__(self, columns: Columns, offsets: Times, expires: Times | None) -> None:
        self.offsets = offsets
        self.expires = expires
        self.append_time_us = columns.append_time_us
        self.row_bytes = row_bytes(columns)

    def cut(self, bounds: Times) -> None:
        """Remove rows in these spans: they are not free any more."""
        inside = _inside(self.offsets, bounds)
        if inside.any():
            self.offsets = self.offsets[~inside]
            self.expires = None if self.expires is None else self.expires[~inside]


class LaneQueues:
    """Per lane: the free rows found so far, how far the lane has looked, and messages that came back."""

    def __init__(self, source: LedgerView) -> None:
        self._chunks: list[list[LaneChunk]] = [[] for _ in range(LANES)]
        self._looked = [0] * LANES
        self.latest_us = [0] * LANES
        """By lane: append time of the last frame that the lane has looked at."""
        self._due: dict[int, int] = {}
        """Messages that came back, and when they are due. The lists below may have entries that are gone."""
        self._waiting: list[tuple[int, int]] = []
        self._retries: list[list[tuple[int, int]]] = [[] for _ in range(LANES)]
        self.returned([(first, end, due_us) for first, end, due_us, _ in source.back_rows()])

    # ---------------------------------------------------------------------------------------------- events

    def leased(self, member: str, spans: Sequence[int], keys: Sequence[int]) -> None:
        """Messages are in flight."""
        self.settled(spans)

    def acked(self, spans: Sequence[int]) -> None:
        """Messages in flight are settled: nothing to do, they were removed when leased."""

    def dying(self, spans: Sequence[int]) -> None:
        """Messages are on their way to the dead letters."""
        self.settled(spans)

    def settled(self, spans: Sequence[int]) -> None:
        """Messages are not free any more."""
        if not spans:
            return
        self._drop_back(spans)
        firsts, ends = spans[::2], spans[1::2]
        bounds = np.array(spans, np.int64).reshape(-1, 2)
        for chunks in self._chunks:
            place = bisect_left(chunks, spans[0], key=_last)
            beyond = bisect_left(chunks, spans[-1], place, key=_first)
            emptied = False
            for chunk in chunks[place:beyond]:
                at = bisect_right(ends, _first(chunk))
                if firsts[at] <= _last(chunk):
                    chunk.cut(bounds[at:])
                    emptied = emptied or not len(chunk.offsets)
            if emptied:
                chunks[place:beyond] = [chunk for chunk in chunks[place:beyond] if len(chunk.offsets)]

    def returned(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """(first, end, due_us): messages are to be delivered again when they are due."""
        for first, end, due_us in runs:
            for offset in range(first, end):
                self._due[offset] = due_us
                heappush(self._waiting, (due_us, offset))

    def _drop_back(self, spans: Sequence[int]) -> None:
        due = self._due
        for first, end in zip(spans[::2], spans[1::2], strict=True):
            if not due:
                break
            if end - first <= len(due):
                for offset in range(first, end):
                    due.pop(offset, None)
            else:
                for offset in [offset for offset in due if first <= offset < end]:
                    del due[offset]

    # --------------------------------------------------------------------------------------------- selecting

    def sort_due(self, view: View) -> int | None:
        """Put messages that have become due into their lanes; return an offset whose frame is missing."""
        waiting, touched = self._waiting, set()
        missing = None
        while waiting and waiting[0][0] <= view.want.now_us:
            due_us, offset = waiting[0]
            if self.waits((due_us, offset)):
                lane = view.lane_by_traits(offset)
                if lane is None:
                    columns = view.at_hand.columns(offset)
                    if columns is None:
                        missing = offset
                        break
                    lane = lane_of(columns, offset)
                self._retries[lane].append((due_us, offset))
                touched.add(lane)
            heappop(waiting)
        for lane in touched:
            self._retries[lane] = sorted({row for row in self._retries[lane] if self.waits(row)})
        if len(waiting) > 2 * len(self._due) + 1_000:
            self._waiting = [row for row in waiting if self.waits(row)]
            heapify(self._waiting)
        return missing

    def waits(self, row: tuple[int, int]) -> bool:
        """Whether a message (due_us, offset) came back and is still there."""
        return self._due.get(row[1]) == row[0]

    def retries(self, lane: int) -> list[tuple[int, int]]:
        """(due_us, offset) of messages that came back and are due, ascending; some may be gone."""
        rows = self._retries[lane]
        gone = 0
        while gone < len(rows) and not self.waits(rows[gone]):
            gone += 1
        del rows[:gone]
        return rows

    def chunks(self, lane: int) -> list[LaneChunk]:
        """The free rows found for a lane so far."""
        return self._chunks[lane]

    def look(self, lane: int, view: View) -> int | None:
        """Look further for a lane until rows are found. Return the offset where the search stopped because
        the frame is not cached; None if rows were found or the end was reached."""
        chunks, end_offset = self._chunks[lane], view.want.end_offset
        known = len(chunks)
        while len(chunks) == known:
            place = next(view.fresh(self._looked[lane], end_offset), None)
            if place is None:
                self._looked[lane] = max(self._looked[lane], end_offset)
                return None
            offset, _ = place
            lanes, end = view.traits.lanes(offset)
            if not lanes >> lane & 1:
                self._looked[lane] = min(end, end_offset)
                continue
            columns = view.at_hand.columns(offset)
            if columns is None:
                return offset
            self._absorb(columns, lane, offset, view)
        return None

    def _absorb(self, columns: Columns, lane: int, first: int, view: View) -> None:
        """Take the free rows of a frame for a lane, and for other lanes that have come just as far."""
        end, looked = min(columns.end_offset, view.want.end_offset), self._looked[lane]
        rows = fresh_rows(columns, first, end, view)
        priorities = None if columns.priorities is None else columns.priorities[rows]
        for other in range(LANES):
            if other != lane and (self._looked[other] != looked or len(self._chunks[other]) >= AHEAD_FRAMES):
                continue
            self._looked[other] = end
            self.latest_us[other] = columns.append_time_us
            if priorities is not None:
                mine = rows[priorities == other]
            else:
                mine = rows if other == PRIORITY_DEFAULT else rows[:0]
            if len(mine):
                offsets = mine + columns.base_offset if columns.offsets is None else columns.offsets[mine]
                expires = None if columns.expires_us is None else columns.expires_us[mine]
                self._chunks[other].append(LaneChunk(columns, offsets, expires))


def _first(chunk: LaneChunk) -> int:
    return int(chunk.offsets[0])


def _last(chunk: LaneChunk) -> int:
    return int(chunk.offsets[-1])
