"""Stored frames of one slice, fetched from the broker one answer ahead, without gaps up to its end."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Iterator

import msgspec
import numpy as np

from tailrace.core.model.commands import LATEST, Fetch, Fetched
from tailrace.core.model.identifiers import HAS_OFFSET_DELTA
from tailrace.errors import Corrupt, NotFound, TailraceError, from_code
from tailrace.format import frame
from tailrace.format.batch import stored, take
from tailrace.format.frame import Header
from tailrace.spark.link import Answer, BrokerLink
from tailrace.spark.source.slices import Slice

log = logging.getLogger("tailrace.spark")
FETCH_BYTES_MIN = 64 * 1024
FETCH_BYTES_MAX = 4 * 1024 * 1024
ROW_BYTES_GUESS = 512
WAIT_MS_MAX = 5_000

Stored = tuple[Header, memoryview]


def frames_of(link: BrokerLink, part: Slice, *, fail_on_data_loss: bool = True) -> Iterator[Stored]:
    """Data frames that hold the offsets of a slice, in order and checked; the first and the last may reach
    beyond it. While one answer is worked on, the next one is under way.

    Offsets that are gone raise `NotFound` or, without `fail_on_data_loss`, are left out with a warning.
    """
    feed = _Feed(link, part, fail_on_data_loss)
    try:
        while (data := feed.take()) is not None:
            yield from data
    finally:
        feed.stop()


class _Feed:
    """The fetches of one slice: `_next` is the first offset that has not arrived yet."""

    def __init__(self, link: BrokerLink, part: Slice, fail_on_data_loss: bool) -> None:
        self._link = link
        self._part = part
        self._strict = fail_on_data_loss
        self._next = part.start
        self._floor = 0
        """Where the log begins, if something of the slice is gone: what lies below is not shown any more."""
        self._row_bytes = float(ROW_BYTES_GUESS)
        self._ahead: concurrent.futures.Future[Answer] | None = None

    def take(self) -> Iterator[Stored] | None:
        """The frames of the next answer; None behind the end."""
        while self._next < self._part.end:
            try:
                reply, parts = self._answer()
            except NotFound as error:
                if "start_offset" not in error.details:
                    raise
                self._lost(error)
                continue
            assert isinstance(reply, Fetched)
            data = memoryview(b"" if not parts else parts[0] if len(parts) == 1 else b"".join(parts))
            if not len(data):
                self._short()
                return None
            return self._unpack(data)
        return None

    def stop(self) -> None:
        """Nobody wants the answer that is under way."""
        if self._ahead is not None:
            self._ahead.cancel()

    def _answer(self) -> Answer:
        ahead, self._ahead = self._ahead or self._begin(), None
        stale = ahead.done()
        try:
            return ahead.result()
        except TailraceError as error:
            problem = error
        # It failed while nobody waited: the time that a call may take has not begun yet.
        if stale and problem.retriable:
            try:
                return self._begin().result()
            except TailraceError as error:
                problem = error
        if isinstance(problem, NotFound) and "start_offset" in problem.details:
            raise problem
        text = f"{self._part.name}, at offset {self._next}: {problem.message}"
        raise from_code(problem.code, text, problem.outcome, {}) from problem

    def _begin(self) -> concurrent.futures.Future[Answer]:
        rows = self._part.end - self._next
        size = min(max(int(rows * self._row_bytes), FETCH_BYTES_MIN), FETCH_BYTES_MAX)
        wait_ms = min(WAIT_MS_MAX, int(self._link.timeout_s * 500))
        request = Fetch(self._part.topic, [(self._part.partition, self._next)], size, wait_ms)
        return self._link.begin(request)

    def _unpack(self, data: memoryview) -> Iterator[Stored]:
        """Headers now, to know what to ask for next; bodies when they are wanted."""
        wanted = self._next
        found: list[tuple[Header, int]] = []
        position = 0
        while position < len(data):
            header = frame.parse(data, position)
            if header.kind == frame.DATA and header.end_offset > self._next:
                if header.base_offset > self._next and not header.count < header.span:
                    self._missing(header.base_offset)
                if header.base_offset < self._part.end:
                    found.append((header, position))
                self._next = header.end_offset
            position += header.size
        if self._next == wanted:
            raise Corrupt(f"{self._part.name}: the broker answered without what is at offset {wanted}")
        self._row_bytes = 1.1 * len(data) / (self._next - wanted)
        if self._next < self._part.end:
            self._ahead = self._begin()
        return self._checked(data, found)

    def _checked(self, data: memoryview, found: list[tuple[Header, int]]) -> Iterator[Stored]:
        for header, position in found:
            try:
                body = frame.check_body(header, data, position)
            except Corrupt as error:
                offset = header.base_offset
                raise Corrupt(f"{self._part.name}: the frame at offset {offset}: {error.message}") from error
            yield (header, body) if header.base_offset >= self._floor else _above(header, body, self._floor)

    # -- what is not there

    def _missing(self, found: int) -> None:
        place = f"{self._part.topic}/{self._part.partition}"
        raise Corrupt(f"{place}: offsets {self._next} to {found - 1} are missing in its log")

    def _lost(self, error: NotFound) -> None:
        """The offset wanted was trimmed, or lies beyond the end of the log."""
        start, end = error.details["start_offset"], error.details["end_offset"]
        if self._next < start:
            stop = min(start, self._part.end)
            self._gone(self._next, stop, f"were deleted, its log begins at {start}")
            self._next = self._floor = stop
        else:
            self._gone(self._next, self._part.end, f"are not there any more, its log ends at {end}")
            self._next = self._part.end

    def _short(self) -> None:
        place = (self._part.topic, self._part.partition)
        end = self._link.offsets(place[0], LATEST)[place[1]]
        self._gone(self._next, self._part.end, f"are not there any more, its log ends at {end}")
        self._next = self._part.end

    def _gone(self, first: int, stop: int, what: str) -> None:
        place = f"{self._part.topic}/{self._part.partition}"
        text = f"{place}: offsets {first} to {stop - 1} {what}"
        if self._strict:
            raise NotFound(
                f"{text}. Read from a later start, from the archive (mode=archive), or without them "
                "(fail_on_data_loss=false)",
                first=first,
                end=stop,
            )
        log.warning("%s; they are left out", text)


def _above(header: Header, body: memoryview, floor: int) -> Stored:
    """A frame without its rows below an offset."""
    first = floor - header.base_offset
    if header.columns & HAS_OFFSET_DELTA:
        deltas = np.asarray(stored(body, header.columns).column("offset_delta"))
        rows = np.flatnonzero(deltas >= first)
        changed = msgspec.structs.replace(header, count=len(rows))
    else:
        rows = np.arange(first, header.count)
        changed = msgspec.structs.replace(
            header, base_offset=floor, count=len(rows), span=header.end_offset - floor
        )
    return changed, memoryview(take(body, header.columns, rows))
