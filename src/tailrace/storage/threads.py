"""Storage threads between the event loop and the disks: a queue per log, group commit, one wake-up per batch.

    loop                       writer thread                            loop
    append a, b, c to log 1    takes a: write, sync
      (b and c wait)           takes b and c: one write, one sync       completed(): a
                                                                        completed(): b, c

Each log has a queue, which one worker at a time empties; so appends to one log are in order, and up to
`count` logs are written side by side. Appends that wait together become one write and at most one sync: the
group commit. Reads have threads of their own and never delay appends.

Results collect until the owner fetches them. `notify` is called from a worker when there is something to
fetch, and not again before `completed` was called, so it may be `lambda: loop.call_soon_threadsafe(drain)`
with `for done, result, error in threads.completed(): done(result, error)`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from queue import SimpleQueue
from typing import Any, NamedTuple

from tailrace.errors import Unavailable
from tailrace.format.frame import Frame
from tailrace.ports import PartitionLog

Done = Callable[[Any, Exception | None], None]
"""The owner calls it with a result (None for appends) or the error."""


class Completion(NamedTuple):
    """A finished piece of work; the owner calls `done(result, error)`."""

    done: Done
    result: Any
    error: Exception | None


class _Append(NamedTuple):
    frames: Sequence[Frame]
    sync: bool
    done: Done


class _Act(NamedTuple):
    work: Callable[[], Any]
    done: Done


class _Results:
    """Completions for the owner; one `notify` per batch."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._ready: list[Completion] = []
        self._told = False
        self._lock = threading.Lock()

    def add(self, completions: list[Completion]) -> None:
        with self._lock:
            self._ready += completions
            tell, self._told = not self._told, True
        if tell:
            self._notify()

    def take(self) -> list[Completion]:
        with self._lock:
            ready, self._ready = self._ready, []
            self._told = False
        return ready


class _Lane:
    """The queue of one log. `busy` from the moment the queue is given to a worker until it is empty."""

    __slots__ = ("busy", "lock", "log", "waiting")

    def __init__(self, log: PartitionLog) -> None:
        self.log = log
        self.waiting: deque[_Append | _Act] = deque()
        self.busy = False
        self.lock = threading.Lock()


class StorageThreads:
    """`count` threads that write, so that as many logs may sync side by side, and `readers` that read."""

    def __init__(self, notify: Callable[[], None], *, count: int = 8, readers: int = 2) -> None:
        self._results = _Results(notify)
        self._lanes: dict[int, _Lane] = {}
        self._ready: SimpleQueue[_Lane | None] = SimpleQueue()
        self._reads: SimpleQueue[_Act | None] = SimpleQueue()
        self._closed = False
        self._writers = [self._start(self._write_loop, f"storage-{number}") for number in range(count)]
        self._readers = [self._start(self._read_loop, f"storage-read-{number}") for number in range(readers)]

    @staticmethod
    def _start(target: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def append(self, log: PartitionLog, frames: Sequence[Frame], sync: bool, done: Done) -> None:
        """Append when the log's turn comes, joined with the appends that wait for it. Owner's thread only."""
        self._submit(log, _Append(frames, sync, done))

    def run(self, log: PartitionLog, work: Callable[[], Any], done: Done) -> None:
        """Run `work` between the appends of a log, in the order of submission."""
        self._submit(log, _Act(work, done))

    def read(self, work: Callable[[], Any], done: Done) -> None:
        """Run `work` on a reader thread; reads never delay appends."""
        if self._closed:
            raise Unavailable("the storage threads are closed")
        self._reads.put(_Act(work, done))

    def tell(self, done: Done, result: object) -> None:
        """Make the owner call `done`; from any thread."""
        self._results.add([Completion(done, result, None)])

    def completed(self) -> list[Completion]:
        """Take what has finished since the last call."""
        return self._results.take()

    def forget(self, log: PartitionLog) -> None:
        """Drop the queue of a closed log."""
        lane = self._lanes.get(id(log))
        if lane is not None and not lane.busy:
            del self._lanes[id(log)]

    def close(self) -> None:
        """Finish all submitted work, then end the threads; results can still be fetched."""
        if self._closed:
            return
        self._closed = True
        for _ in self._readers:
            self._reads.put(None)
        # the last act of each lane tells that everything before it is done
        ended = threading.Semaphore(0)
        lanes = list(self._lanes.values())  # The loop may still forget logs that were closed.
        for lane in lanes:
            self._enqueue(lane, _Act(ended.release, _nobody))
        for _ in lanes:
            ended.acquire()
        for _ in self._writers:
            self._ready.put(None)
        for thread in (*self._readers, *self._writers):
            thread.join()

    def _submit(self, log: PartitionLog, item: _Append | _Act) -> None:
        if self._closed:
            raise Unavailable("the storage threads are closed")
        lane = self._lanes.get(id(log))
        if lane is None:
            lane = self._lanes[id(log)] = _Lane(log)
        self._enqueue(lane, item)

    def _enqueue(self, lane: _Lane, item: _Append | _Act) -> None:
        with lane.lock:
            lane.waiting.append(item)
            wake, lane.busy = not lane.busy, True
        if wake:
            self._ready.put(lane)

    def _write_loop(self) -> None:
        while (lane := self._ready.get()) is not None:
            self._empty(lane)

    def _empty(self, lane: _Lane) -> None:
        """Do the work that waits, and keep no reference to it afterwards."""
        with lane.lock:
            batch = list(lane.waiting)
            lane.waiting.clear()
        for completions in _run_batch(lane.log, batch):
            self._results.add(completions)
        with lane.lock:
            lane.busy = again = bool(lane.waiting)
        if again:
            self._ready.put(lane)

    def _read_loop(self) -> None:
        while (act := self._reads.get()) is not None:
            self._results.add([_run_act(act)])


def _nobody(result: Any, error: Exception | None) -> None:
    """Ignore a completion."""


class InlineThreads:
    """The same interface without threads: all work runs at once in the caller, for virtual time and
    simulation."""

    def __init__(self, notify: Callable[[], None]) -> None:
        self._results = _Results(notify)
        self._closed = False

    def append(self, log: PartitionLog, frames: Sequence[Frame], sync: bool, done: Done) -> None:
        """See `StorageThreads.append`."""
        self._require_open()
        self._results.add(_run_appends(log, [_Append(frames, sync, done)]))

    def run(self, log: PartitionLog, work: Callable[[], Any], done: Done) -> None:
        """See `StorageThreads.run`."""
        self._require_open()
        self._results.add([_run_act(_Act(work, done))])

    def read(self, work: Callable[[], Any], done: Done) -> None:
        """See `StorageThreads.read`."""
        self._require_open()
        self._results.add([_run_act(_Act(work, done))])

    def tell(self, done: Done, result: object) -> None:
        """See `StorageThreads.tell`."""
        self._results.add([Completion(done, result, None)])

    def completed(self) -> list[Completion]:
        """See `StorageThreads.completed`."""
        return self._results.take()

    def forget(self, log: PartitionLog) -> None:
        """See `StorageThreads.forget`."""

    def close(self) -> None:
        """See `StorageThreads.close`."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise Unavailable("the storage threads are closed")


def _run_batch(log: PartitionLog, batch: list[_Append | _Act]) -> Iterator[list[Completion]]:
    """Run the waiting work of a log in order, appends joined; each result is out before the next work
    begins."""
    for is_append, items in groupby(batch, lambda item: isinstance(item, _Append)):
        if is_append:
            yield _run_appends(log, [item for item in items if isinstance(item, _Append)])
        else:
            for item in items:
                if isinstance(item, _Act):
                    yield [_run_act(item)]


def _run_appends(log: PartitionLog, joined: list[_Append]) -> list[Completion]:
    """Group commit: one write and at most one sync for all; a failure is the failure of all."""
    error: Exception | None = None
    try:
        if len(joined) == 1:
            log.append(joined[0].frames, sync=joined[0].sync)
        else:
            frames = [frame for item in joined for frame in item.frames]
            log.append(frames, sync=any(item.sync for item in joined))
    except Exception as caught:  # of any kind: the owner has to hear of it
        error = caught
    return [Completion(item.done, None, error) for item in joined]


def _run_act(act: _Act) -> Completion:
    try:
        return Completion(act.done, act.work(), None)
    except Exception as caught:  # of any kind: the owner has to hear of it
        return Completion(act.done, None, caught)
