"""Blocking reader: one crossing to the loop per batch; messages are made in the thread that reads them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from types import TracebackType

import pyarrow as pa

from tailrace.client.messages import Message, Rows, public_batch
from tailrace.client.read import reader
from tailrace.client.read.reader import Start
from tailrace.sync.portal import Portal


class Reader:
    """Reads one topic from a point on. Use it as a context manager."""

    def __init__(self, portal: Portal, inner: reader.Reader) -> None:
        self.topic = inner.topic
        self._portal = portal
        self._inner = inner
        self._lock = threading.Lock()
        self._taken: deque[tuple[Rows, int]] = deque()

    def __enter__(self) -> Reader:
        self._portal.call(self._inner.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.call(lambda: self._inner.__aexit__(kind, error, trace))
        self._taken.clear()

    def seek(self, start: Start) -> None:
        """Go on from another point; see `tailrace.Reader.seek`."""
        with self._lock:
            self._portal.call(lambda: self._inner.seek(start))
            self._taken.clear()

    def position(self) -> dict[int, int]:
        """The next offset of each partition that the application has not been given."""
        return self._inner.position()

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Message:
        inner = self._inner
        if self._portal.gone is not None:  # A lock from before a fork may never open.
            raise self._portal.gone
        with self._lock:
            while True:
                for message in inner._current:
                    inner._last = message
                    return message
                rows, first = self._next_rows()
                inner._rows, inner._last = rows, None
                inner._current = rows.messages(first)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Arrow batches with everything about their messages; see `tailrace.Reader.batches`."""
        while True:
            with self._lock:
                try:
                    rows, first = self._inner._rest() or self._next_rows()
                except StopIteration:
                    return
                self._inner._next[rows.partition] = rows.header.end_offset
            yield public_batch(rows, first)

    def _next_rows(self) -> tuple[Rows, int]:
        """The next batch. It is left in `_taken` first, so that a wait that Ctrl-C ends loses nothing."""
        previous = self._inner._rows
        if previous is not None:
            self._inner._next[previous.partition] = previous.header.end_offset
            self._inner._rows = self._inner._last = None
        if not self._taken:

            async def take() -> None:
                self._taken.append(await self._inner._take())

            try:
                self._portal.call(take)
            except StopAsyncIteration:
                raise StopIteration from None
        return self._taken.popleft()
