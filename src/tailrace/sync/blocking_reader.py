"""Blocking reader: one crossing to the loop per batch; messages are made in the thread that reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa

from tailrace.client.messages import Message, public_batch
from tailrace.client.read import reader
from tailrace.client.read.reader import Start
from tailrace.sync.blocking_wrapper import BlockingContext
from tailrace.sync.portal import Portal


class Reader(BlockingContext[reader.Reader]):
    """Reads one topic from a point on. Use it as a context manager."""

    def __init__(self, portal: Portal, inner: reader.Reader) -> None:
        super().__init__(portal, inner)
        self.topic = inner.topic
        self._lock = threading.Lock()

    def seek(self, start: Start) -> None:
        """Go on from another point; see `tailrace.Reader.seek`."""
        with self._lock:
            self._portal.call(lambda: self._inner.seek(start))

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
                for message in inner.current:
                    inner.last = message
                    return message
                self._take()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Arrow batches with everything about their messages; see `tailrace.Reader.batches`."""
        while True:
            with self._lock:
                while (piece := self._inner.rest()) is None:
                    try:
                        self._take()
                    except StopIteration:
                        return
            yield public_batch(*piece)

    def _take(self) -> None:
        try:
            self._portal.call(self._inner.take)
        except StopAsyncIteration:
            raise StopIteration from None
