"""The hot tail of a partition: the newest committed frames, kept in memory for readers at the end."""

from __future__ import annotations

from bisect import bisect_right

from tailrace.format.frame import Buffer, Frame


class HotTail:
    """A ring of data frames bounded in bytes: contiguous, and ending at the committed end."""

    def __init__(self, bytes_max: int, end_offset: int) -> None:
        self.bytes_max = bytes_max
        self._frames: list[Frame] = []
        self._bases: list[int] = []
        self._ends: list[int] = []
        """For each frame, the sum of bytes pushed up to its end."""
        self._first = 0
        self._pushed = 0
        self._gone = 0
        self.end_offset = end_offset

    @property
    def start_offset(self) -> int:
        """The lowest offset that the ring can serve; the end when the ring is empty."""
        return self._bases[self._first] if self._first < len(self._bases) else self.end_offset

    def limit(self, bytes_max: int) -> None:
        """Set the bound; it counts from the next frame on."""
        self.bytes_max = bytes_max

    def push(self, frame: Frame) -> None:
        """Add a committed data frame, and drop the oldest frames beyond the bound."""
        self.end_offset = frame.header.end_offset
        self._pushed += frame.size
        self._frames.append(frame)
        self._bases.append(frame.header.base_offset)
        self._ends.append(self._pushed)
        first, frames = self._first, self._frames
        while self._pushed - self._gone > self.bytes_max and first < len(frames):
            self._gone = self._ends[first]
            first += 1
        self._first = first
        if first >= 64 or first == len(frames):
            del self._frames[:first], self._bases[:first], self._ends[:first]
            self._first = 0
        else:
            # The slots before `first` are deleted later, in bulk; their memory is freed now.
            for index in range(first - 1, -1, -1):
                if frames[index] is _GONE:
                    break
                frames[index] = _GONE

    def read(self, offset: int, bytes_max: int) -> tuple[list[Buffer], int, int]:
        """Parts, bytes and rows of the frames from the one that holds `offset`; at least one frame."""
        index = max(bisect_right(self._bases, offset, lo=self._first) - 1, self._first)
        parts: list[Buffer] = []
        size = rows = 0
        for frame in self._frames[index:]:
            if size and size + frame.size > bytes_max:
                break
            parts += frame.parts()
            size += frame.size
            rows += frame.header.count
        return parts, size, rows

    def reach(self, offset: int, bytes_max: int) -> int:
        """End offset of the frames from the one that holds `offset`, as many as fit but at least one;
        `offset` itself when it is not here."""
        first = self._first
        if offset >= self.end_offset or first == len(self._bases) or offset < self._bases[first]:
            return offset
        index = bisect_right(self._bases, offset, lo=first) - 1
        before = self._ends[index] - self._frames[index].size
        after = max(bisect_right(self._ends, before + bytes_max, lo=index), index + 1)
        return self._bases[after] if after < len(self._bases) else self.end_offset

    def frames(self, offset: int, end: int) -> list[Frame]:
        """The frames that hold [offset, end), as far as they are here; empty when the first is not."""
        if not self.start_offset <= offset < self.end_offset:
            return []
        index = bisect_right(self._bases, offset, lo=self._first) - 1
        return self._frames[index : bisect_right(self._bases, end - 1, lo=index)]

    def clear(self, end_offset: int) -> None:
        """Drop all frames and set the committed end."""
        self._frames.clear()
        self._bases.clear()
        self._ends.clear()
        self._first = 0
        self._gone = self._pushed
        self.end_offset = end_offset


_GONE: Frame = None  # type: ignore[assignment]
