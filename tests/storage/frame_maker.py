"""Frames and a clock for the tests of storage."""

from tailrace.errors import Corrupt
from tailrace.format.frame import DATA, FACTS, MORE, SCHEDULED, Frame, Header, crc32c, make
from tailrace.ports import PartitionLog


def unheard(error: Corrupt, log: PartitionLog) -> None:
    """Nobody listens for the damage of a log."""


class TestClock:
    """A clock that stands still until it is told."""

    __test__ = False

    def __init__(self) -> None:
        self.time_us = 1_000_000_000

    def now_us(self) -> int:
        return self.time_us


class FrameMaker:
    """Frames whose indexes and offsets follow on."""

    def __init__(self, entry: int = 0, offset: int = 0) -> None:
        self.entry = entry
        self.offset = offset

    def data(
        self,
        size: int = 100,
        *,
        span: int = 10,
        time: int | None = None,
        stamp: int | None = None,
        more: bool = False,
    ) -> Frame:
        """A data frame; append time and greatest timestamp are the entry's number unless given."""
        body = bytes([self.entry % 251]) * size
        append_time = self.entry if time is None else time
        header = Header(
            DATA,
            MORE if more else 0,
            size,
            crc32c(body),
            self.entry,
            self.offset,
            span,
            span,
            1,
            append_time,
            timestamp_max_us=self.entry if stamp is None else stamp,
        )
        self.entry += 1
        self.offset += span
        return make(header, body)

    def facts(self, size: int = 50, *, base: int = 0, span: int = 0, more: bool = False) -> Frame:
        """A facts frame; base and span name offsets and use none."""
        body = b"f" * size
        header = Header(
            FACTS, MORE if more else 0, size, crc32c(body), self.entry, base, span, 0, 1, self.entry
        )
        self.entry += 1
        return make(header, body)

    def scheduled(self, size: int = 100, *, kind: int = SCHEDULED, more: bool = False) -> Frame:
        """A frame of messages without offsets."""
        body = bytes([self.entry % 251]) * size
        header = Header(kind, MORE if more else 0, size, crc32c(body), self.entry, 0, 0, 3, 1, self.entry)
        self.entry += 1
        return make(header, body)
