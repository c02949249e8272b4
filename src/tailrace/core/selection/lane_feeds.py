"""One lane during one selection where no keys matter: what `lane_queues` knows of it, block by block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tailrace.core.core_tuning import BLOCK_ROWS, LAPSED_MAX
from tailrace.core.model.identifiers import Times
from tailrace.core.selection.lane_queues import NEVER_US, LaneChunk, LaneQueues, View, row_bytes, row_of
from tailrace.core.selection.lanes import EMPTY, LANES, READY, UNKNOWN


class LaneFeed:
    """A lane during one selection: retries by due time, then fresh messages by offset. While a retry is next,
    the lane waits since the retry was due, or, if the fresh message behind it starves, since that was
    appended, if that is longer ago."""

    __slots__ = (
        *("_chunk", "_lane", "_queues", "_retries", "_retry", "_row", "_starved_us", "_view"),
        *("at", "missing", "row_bytes", "rows", "since_us", "state"),
    )

    def __init__(self, queues: LaneQueues, lane: int, view: View, starved_us: int) -> None:
        self._queues = queues
        self._lane = lane
        self._view = view
        self._starved_us = starved_us
        self._retries = queues.retries(lane)
        self._retry = self._chunk = self._row = 0
        self.state = EMPTY
        self.rows: list[int] = []
        self.at = 0
        self.since_us = 0
        self.row_bytes = 0.0
        self.missing: int | None = None

    def refill(self) -> bool:
        """Find the next block of rows. Other lanes never change by it."""
        self.rows, self.at, self.state, self.since_us = [], 0, UNKNOWN, 0
        while not self.rows:
            if len(self._view.lapsed) >= LAPSED_MAX:
                return False
            if not (self._next_retries() if self._has_retries() else self._next_fresh()):
                return False
        self.state = READY
        return False

    def _has_retries(self) -> bool:
        while self._retry < len(self._retries) and not self._queues.waits(self._retries[self._retry]):
            self._retry += 1
        return self._retry < len(self._retries)

    def _next_retries(self) -> bool:
        """Show a run of retries in one frame with one due time; return whether one was found."""
        due_us, offset = self._retries[self._retry]
        fresh_us, missing = self._fresh_since()
        if len(self._view.lapsed) >= LAPSED_MAX:
            return False
        self.since_us = min(due_us, fresh_us) if fresh_us <= self._starved_us else due_us
        if missing is not None and self.since_us < due_us:
            self.missing = missing
            return False
        columns = self._view.at_hand.columns(offset)
        if columns is None:
            self.missing = offset
            return False
        block = self._retries[self._retry : self._retry + BLOCK_ROWS]
        run = 0
        while run < len(block) and block[run][0] == due_us and block[run][1] < columns.end_offset:
            run += 1
        self._retry += run
        rows = [row[1] for row in block[:run] if self._queues.waits(row)]
        expires = None
        if columns.expires_us is not None:
            expires = columns.expires_us[[row_of(columns, row) for row in rows]]
        self._show(np.array(rows, np.int64), expires)
        self.row_bytes = row_bytes(columns)
        return True

    def _fresh_since(self) -> tuple[int, int | None]:
        """Since when the next fresh message waits, and the offset of a missing frame: then it waits since
        that time at the longest. Expired messages do not wait."""
        chunks = self._queues.chunks(self._lane)
        missing = None
        while missing is None:
            if self._chunk < len(chunks):
                chunk = chunks[self._chunk]
                if not self._pass_lapsed(chunk) or len(self._view.lapsed) >= LAPSED_MAX:
                    return chunk.append_time_us, None
                continue
            missing = self._queues.look(self._lane, self._view)
            if missing is None and self._chunk == len(chunks):
                return NEVER_US, None
        return self._queues.latest_us[self._lane], missing

    def _pass_lapsed(self, chunk: LaneChunk) -> bool:
        """Pass over the first rows if they have expired; return whether nothing of the chunk is left."""
        if chunk.expires is None:
            return False
        expires = chunk.expires[self._row :]
        left = np.flatnonzero((expires <= 0) | (expires > self._view.want.wall_us))
        end = self._row + int(left[0]) if len(left) else len(chunk.offsets)
        self._view.lapsed.update(dict.fromkeys(chunk.offsets[self._row : end].tolist()))
        self._row = end
        if end < len(chunk.offsets):
            return False
        self._chunk, self._row = self._chunk + 1, 0
        return True

    def _next_fresh(self) -> bool:
        chunks = self._queues.chunks(self._lane)
        if self._chunk == len(chunks):
            self.missing = self._queues.look(self._lane, self._view)
            if self._chunk == len(chunks):
                self.state = EMPTY if self.missing is None else UNKNOWN
                self.since_us = self._queues.latest_us[self._lane]
                return False
        chunk, row = chunks[self._chunk], self._row
        self.since_us = chunk.append_time_us
        offsets = chunk.offsets[row : row + BLOCK_ROWS]
        if self._view.at_hand.columns(int(offsets[0])) is None:
            self.missing = int(offsets[0])
            return False
        self._row += len(offsets)
        self._show(offsets, None if chunk.expires is None else chunk.expires[row : row + BLOCK_ROWS])
        self.row_bytes = chunk.row_bytes
        if self._row == len(chunk.offsets):
            self._chunk, self._row = self._chunk + 1, 0
        return True

    def _show(self, offsets: Times, expires: Times | None) -> None:
        """Show the rows that have not expired; note the others."""
        if expires is not None:
            lapsed = (expires > 0) & (expires <= self._view.want.wall_us)
            if lapsed.any():
                self._view.lapsed.update(dict.fromkeys(offsets[lapsed].tolist()))
                offsets = offsets[~lapsed]
        self.rows = offsets.tolist()


def lane_feeds(queues: LaneQueues, view: View, starved_us: int) -> Sequence[LaneFeed] | int:
    """The filled feeds of all lanes, or an offset whose frame has to be cached first."""
    missing = queues.sort_due(view)
    if missing is not None:
        return missing
    feeds = [LaneFeed(queues, lane, view, starved_us) for lane in range(LANES)]
    for feed in feeds:
        feed.refill()
    return feeds
