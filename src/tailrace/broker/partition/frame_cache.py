"""Cached frames of one partition: the committed frames in memory that leases are decided on and made of.

A frame is cached when it is in the hot tail, or in one of a few *cold runs*: neighbouring frames that were
read from the log lately, because a lease or a retry needed a message further back. A decision asks for
`columns` (keys, priorities, expiry, …), a delivery for whole `frames`. If a frame is not cached, the caller
calls `load` and asks again; a consumer that goes through a backlog in order finds the next run loaded ahead.

Cold runs are bounded by bytes and by time. `age` is called every few seconds and drops the runs that nobody
has used since the last call, with everything derived from frames that are not cached any more. Without the
bound in time, a message that is retried now and then would fill the memory of every partition within hours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from pyarrow import RecordBatch

from tailrace.broker.partition.hot_tail import HotTail
from tailrace.core.collections.span_map import pairs
from tailrace.core.log_head import LogHead
from tailrace.core.lost_offsets import LostOffsets
from tailrace.core.model.identifiers import Columns
from tailrace.errors import Corrupt
from tailrace.format import frame
from tailrace.format.batch import stored
from tailrace.format.frame import Frame
from tailrace.format.gathering import columns_of
from tailrace.ports import Finished, PartitionLog

COLD_BYTES = 8 * 1024 * 1024
"""Memory of one partition for frames read from the log."""
COLD_BYTES_TOTAL = 64 * 1024 * 1024
"""The same for all partitions of a node together; each gets a share."""
LOAD_SHARE = 16
"""Reads that fit the memory together: each lane is at another point of a backlog and reads ahead."""
_RUNS_MAX = 32
_COLUMNS_MAX = 4096
_OPENED_MAX = 64
_OPENED_BYTES_MAX = 256 * 1024
"""Larger frames are not kept open, because one alone makes a delivery."""
_UNBOUNDED = 1 << 62
Loaded = Callable[[Exception | None], None]


class ColdRun:
    """Neighbouring frames that were read from the log, and their bytes."""

    __slots__ = ("frames", "size", "used")

    def __init__(self, frames: HotTail, size: int) -> None:
        self.frames = frames
        self.size = size
        self.used = True
        """Whether the run was used since the last `age`."""


class ColdFrames(NamedTuple):
    """Where frames that are not cached are read from."""

    name: str
    log: PartitionLog
    read: Callable[[Callable[[], object], Finished], None]
    """Does work on a reader thread."""
    current: Callable[[PartitionLog], bool]
    """Whether a log is the one in use; it may have been opened again meanwhile."""
    damaged: Callable[[Exception, PartitionLog], None]
    """A read found damage."""


class FrameCache:
    """The hot tail and the cold runs of one partition, as long as its state is the same."""

    def __init__(
        self, source: ColdFrames, tail: HotTail, head: LogHead, lost: LostOffsets, bytes_max: int
    ) -> None:
        self._source = source
        self._tail = tail
        self._head = head
        self._lost = lost
        self.bytes_max = bytes_max
        self._cold: list[ColdRun] = []
        """Ordered by last use; the most recent run is at the end."""
        self._columns: dict[int, Columns] = {}
        self._opened: dict[int, tuple[Frame, RecordBatch]] = {}
        self._loading: dict[int, list[Loaded]] = {}

    def limit(self, bytes_max: int) -> None:
        """Set the bound on cold runs; it counts from the next load on."""
        self.bytes_max = bytes_max

    # -- what decisions ask for

    def columns(self, offset: int) -> Columns | None:
        """The columns that decisions need, of the frame that holds an offset; None when it is not cached."""
        found = self._run(offset)
        if found is None:
            return None
        (item,) = found.frames(offset, offset + 1)
        columns = self._columns.get(item.header.base_offset)
        if columns is None:
            if len(self._columns) >= _COLUMNS_MAX:
                del self._columns[next(iter(self._columns))]
            columns = self._columns[item.header.base_offset] = columns_of(item.header, item.body)
        return columns

    def reach(self, offset: int, bytes_max: int) -> int:
        """See `core.model.identifiers.CachedFrames`."""
        end = self._tail.reach(offset, bytes_max)
        if end == offset:
            found = self._run(offset)
            if found is not None:
                return found.reach(offset, bytes_max)
        return end

    def append_time_us(self, offset: int) -> int | None:
        """Append time of the message at an offset; if that is not cached, the later one of the oldest frame
        in the hot tail; None when the hot tail is empty."""
        run = self._run(offset) or self._tail
        found = run.frames(max(offset, run.start_offset), max(offset, run.start_offset) + 1)
        return found[0].header.append_time_us if found else None

    # -- what deliveries are made of

    def frames(self, spans: Sequence[int]) -> list[Frame] | int:
        """The frames that hold ascending spans of offsets, each once; or an offset that is not cached."""
        if len(spans) == 2:
            return self._between(*spans)
        found: list[Frame] = []
        high = 0
        for first, end in pairs(spans):
            if end <= high:
                continue  # Neighbours mostly share a frame.
            some = self._between(max(first, high), end)
            if isinstance(some, int):
                return some
            found += some
            high = some[-1].header.end_offset
        return found

    def opened(self, item: Frame) -> RecordBatch:
        """The rows of a frame. The frames opened last are kept open, for deliveries that take a few messages
        from each of many frames."""
        base = item.header.base_offset
        kept = self._opened.get(base)
        if kept is not None and kept[0] is item:
            return kept[1]
        batch = stored(item.body, item.header.columns)
        if kept is not None or len(self._opened) >= _OPENED_MAX:
            self._opened.pop(base if kept is not None else next(iter(self._opened)))
        if item.size <= _OPENED_BYTES_MAX:
            self._opened[base] = (item, batch)
        return batch

    def _between(self, first: int, end: int) -> list[Frame] | int:
        found = self._tail.frames(first, end)
        while not found or found[-1].header.end_offset < end:
            at = found[-1].header.end_offset if found else first
            run = self._run(at)
            if run is None:
                return at
            found += run.frames(at, end)
        return found

    def _run(self, offset: int) -> HotTail | None:
        """The run that holds an offset; None when it is not cached."""
        tail = self._tail
        if tail.start_offset <= offset < tail.end_offset:
            return tail
        cold = self._cold
        for index in range(len(cold) - 1, -1, -1):
            run = cold[index].frames
            if run.start_offset <= offset < run.end_offset:
                cold[index].used = True
                if index < len(cold) - 1:
                    cold.append(cold.pop(index))
                if 2 * offset > run.start_offset + run.end_offset:
                    self._read_ahead(run.end_offset)
                return run
        return None

    def _read_ahead(self, offset: int) -> None:
        """Load the frames from an offset on, so that a consumer that goes on in order finds them cached."""
        lost = self._lost.range_at(offset)
        if lost is not None:
            offset = lost[1]
        if offset in self._loading or offset >= self._tail.start_offset:
            return
        if self._is_cold(offset):
            return
        self.load(offset, lambda error: None)

    # -- loading

    def load(self, offset: int, loaded: Loaded) -> None:
        """Read the frame that holds an offset, and some after it, from the log; then call `loaded`."""
        waiting = self._loading.get(offset)
        if waiting is not None:
            waiting.append(loaded)
            return
        self._loading[offset] = [loaded]
        log, room = self._source.log, max(1, self.bytes_max // LOAD_SHARE)
        end = self._lost.next_from(offset, self._tail.end_offset)
        self._source.read(partial(_read, log, offset, end, room), partial(self._loaded, log, offset))

    def _loaded(self, log: PartitionLog, offset: int, result: Any, error: Exception | None) -> None:
        source = self._source
        if not source.current(log):
            error = None  # It was opened again meanwhile: who asked may ask that one.
        elif error is None:
            self._keep(*result)
            if offset >= self._head.start_offset and self._run(offset) is None:
                error = Corrupt(f"{source.name}: offset {offset} is missing in the log")
                source.damaged(error, log)
        for action in self._loading.pop(offset):
            action(error)

    def _keep(self, frames: HotTail, size: int) -> None:
        """Add a run and drop the oldest beyond the bounds. The new run stays, whatever its size, so that the
        caller of `load` finds it."""
        self._cold.append(ColdRun(frames, size))
        held = sum(run.size for run in self._cold)
        while len(self._cold) > 1 and (held > self.bytes_max or len(self._cold) > _RUNS_MAX):
            held -= self._cold.pop(0).size

    # -- dropping

    @property
    def cold_bytes(self) -> int:
        """Bytes of all cold runs."""
        return sum(run.size for run in self._cold)

    def age(self) -> None:
        """Drop the runs that were not used since the last call."""
        self._cold = [run for run in self._cold if run.used]
        for run in self._cold:
            run.used = False
        lowest = self._tail.start_offset
        for derived in (self._columns, self._opened):
            for base in [base for base in derived if base < lowest and not self._is_cold(base)]:
                del derived[base]

    def _is_cold(self, offset: int) -> bool:
        return any(run.frames.start_offset <= offset < run.frames.end_offset for run in self._cold)


def _read(log: PartitionLog, offset: int, end: int, bytes_max: int) -> tuple[HotTail, int]:
    """The frames from an offset on, and their bytes; blocking."""
    run = HotTail(_UNBOUNDED, offset)
    size = 0
    for part in log.read(offset, end, bytes_max):
        for item in frame.data_frames(part):
            run.push(item)
        size += len(part)
    return run, size
