"""Fetch requests: collect committed frames from the hot tail or the log, and wait while there are none.

A fetch covers several partitions of one topic. It looks for frames when it arrives, when one of its
partitions commits more, when its receiver has room again, and at its deadline. It is answered once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from tailrace.broker.metrics import Metrics
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.pump import Pump, Timer
from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.core.model.access import OWNER, Caller
from tailrace.core.model.commands import Fetch, Fetched
from tailrace.core.model.identifiers import Refusal
from tailrace.errors import Corrupt
from tailrace.format import frame
from tailrace.format.frame import Buffer
from tailrace.ports import Gate, PartitionLog, Respond, Waiting

FETCH_BYTES_MAX = 8 * 1024 * 1024
WAIT_MS_MAX = 60_000
PACE_US = 1_000
"""A reader that was answered less than this ago is not answered again for less than `PACE_BYTES`: at
thousands of small appends a second, an answer for each would cost more than the appends themselves."""
PACE_BYTES = 64 * 1024
_DROPPED = Refusal("unavailable", "the receiver is gone")


class OpenGate:
    """The gate of a receiver in the same process, which has no send buffer to protect."""

    def __init__(self, caller: Caller = OWNER) -> None:
        self.caller = caller
        self.answered_us: dict[str, int] = {}
        self.fetches: dict[Waiting, None] = {}

    def blocked(self, resume: Callable[[], None]) -> bool:
        """Never."""
        return False

    def reserve(self, nbytes: int, resume: Callable[[], None]) -> bool:
        """Always."""
        return True

    def release(self, nbytes: int) -> None:
        """Nothing is counted."""


class _ColdRead(NamedTuple):
    """A read of one partition's log, because what is wanted is not in its hot tail."""

    partition: int
    runtime: QueuePartition
    log: PartitionLog
    offset: int
    end: int


class FetchRequest:
    """One fetch under way."""

    def __init__(
        self,
        fetch: Fetch,
        runtimes: Sequence[QueuePartition],
        pump: Pump,
        metrics: Metrics,
        gate: Gate,
        respond: Respond,
        over: Callable[[FetchRequest], None],
    ) -> None:
        self.request = fetch
        self._runtimes = runtimes
        self._pump = pump
        self._metrics = metrics
        self._gate = gate
        self._respond: Respond | None = respond
        self._over = over
        self._started_us = pump.clock.now_us()
        self._bytes_max = min(fetch.bytes_max, FETCH_BYTES_MAX)
        self._timer: Timer | None = None
        self._pace: Timer | None = None
        self._expired = fetch.wait_ms <= 0
        self._reading = False
        self._watching = False
        self._unreadable: dict[int, Refusal] = {}
        """Partitions whose next messages cannot be read; the fetch is refused if the others have none."""

    def start(self) -> None:
        """Look for the first time; set the deadline if there is nothing yet."""
        self._gate.fetches[self] = None
        self.look()
        if self._respond is not None and not self._expired:
            wait_us = min(self.request.wait_ms, WAIT_MS_MAX) * 1000
            self._timer = self._pump.at(self._pump.clock.now_us() + wait_us, self.expire)

    def expire(self, now_us: int) -> None:
        """The deadline has come: answer, possibly with nothing."""
        self._expired = True
        self.look()

    @property
    def caller(self) -> Caller:
        """Who waits."""
        return self._gate.caller

    def evict(self, refusal: Refusal) -> None:
        """The receiver may not read this any more."""
        self._answer(refusal, NOTHING)

    def hang_up(self) -> None:
        """The receiver sends nothing more: answer with what there is now."""
        self.expire(0)

    def drop(self) -> None:
        """The receiver is gone."""
        self._answer(_DROPPED, NOTHING)

    def look(self) -> None:
        """Answer if there are frames or a refusal; else wait."""
        self._watching = False
        if self._respond is None or self._reading:
            return
        if self._gate.blocked(self.look):
            return
        cold: tuple[int, QueuePartition, int] | None = None
        parts: list[Buffer] = []
        slices: list[tuple[int, int, int, int]] = []
        room = self._bytes_max
        rows = 0
        damage: Refusal | None = None
        for (partition, offset), runtime in zip(self.request.positions, self._runtimes, strict=True):
            end, start = runtime.end_offset, runtime.start_offset
            if runtime.gone is not None:
                self._answer(runtime.gone, NOTHING)
                return
            ill = self._unreadable.get(partition) or (runtime.damage if offset >= end else None)
            if ill is not None:
                damage = damage or ill
                continue
            if (lost := runtime.lost_at(offset)) is not None and start <= offset:
                self._answer(self._lost(partition, lost, end), NOTHING)
                return
            if offset < start or offset > end:
                self._answer(self._out_of_range(partition, offset, start, end), NOTHING)
                return
            if offset == end or room <= 0:
                continue
            if offset < runtime.tail.start_offset:
                if not slices:
                    cold = (partition, runtime, offset)
                    break
                continue  # Hot data first; the cold partition leads the next fetch of a reader that rotates.
            found, size, count = runtime.tail.read(offset, room)
            parts += found
            slices.append((partition, size, start, end))
            room -= size
            rows += count
        if cold is not None:
            self._read_cold(*cold)
        elif slices and self._early(self._bytes_max - room):
            return
        elif damage is not None and not slices:
            self._answer(damage, NOTHING)
        elif slices or self._expired:
            self._gate.answered_us[self.request.topic] = self._pump.clock.now_us()
            self._metrics.delivered(self.request.topic, self._bytes_max - room, rows)
            self._answer(Fetched(slices), parts)
        elif not self._watching:
            self._watching = True
            for runtime in self._runtimes:
                runtime.wakeups.watch(self.look)

    def _early(self, nbytes: int) -> bool:
        """Whether to wait a moment for more frames; a timer looks again."""
        if nbytes >= PACE_BYTES or self._expired:
            return False
        now_us = self._pump.clock.now_us()
        due_us = self._gate.answered_us.get(self.request.topic, 0) + PACE_US
        if now_us >= due_us:
            return False
        if self._pace is None:
            self._pace = self._pump.at(due_us, self._paced)
        return True

    def _paced(self, now_us: int) -> None:
        self._pace = None
        self.look()

    def _out_of_range(self, partition: int, offset: int, start: int, end: int) -> Refusal:
        place = f"{self.request.topic}/{partition}"
        if offset > end:
            message = f"offset {offset} of {place} is beyond the end, {end}"
        else:
            message = f"offset {offset} of {place} is trimmed: the log starts at {start}"
        details = {"partition": partition, "start_offset": start, "end_offset": end}
        return Refusal("not_found", message, "none", details)

    def _lost(self, partition: int, lost: tuple[int, int], end: int) -> Refusal:
        """The refusal for a reader at a lost offset; it names the next offset that is there."""
        first, stop = lost
        place = f"{self.request.topic}/{partition}"
        message = f"offsets {first} to {stop - 1} of {place} are lost, as accepted: go on at {stop}"
        details = {"partition": partition, "start_offset": stop, "end_offset": end, "lost": [first, stop]}
        return Refusal("not_found", message, "none", details)

    def _read_cold(self, partition: int, runtime: QueuePartition, offset: int) -> None:
        if self._gate.reserve(self._bytes_max, self.look):
            self._reading = True
            cold = _ColdRead(partition, runtime, runtime.log, offset, runtime.lost_next(offset))
            self._pump.threads.read(partial(self._read, cold), partial(self._have_read, cold))

    def _read(self, cold: _ColdRead) -> tuple[Sequence[Buffer], int]:
        """On a reader thread: frames and the number of messages in them."""
        gone = self._respond is None
        parts = NOTHING if gone else cold.log.read(cold.offset, cold.end, self._bytes_max)
        return parts, sum(_rows_of(part) for part in parts)

    def _have_read(self, cold: _ColdRead, result: Any, error: Exception | None) -> None:
        self._reading = False
        runtime = cold.runtime
        parts, rows = result if error is None else (NOTHING, 0)
        if cold.end > runtime.end_offset:
            parts, error = NOTHING, None  # Storage failed meanwhile: some of these may be gone.
        if self._respond is not None and parts:
            size = sum(len(part) for part in parts)
            self._metrics.delivered(self.request.topic, size, rows)
            self._answer(Fetched([(cold.partition, size, runtime.start_offset, runtime.end_offset)]), parts)
        self._gate.release(self._bytes_max)
        if self._respond is not None:
            there = runtime.start_offset <= cold.offset < cold.end <= runtime.end_offset
            if there and cold.log is runtime.log:  # Else trimmed or dropped by now, or opened again.
                missing = Corrupt(f"{runtime.name}: offset {cold.offset} is missing in the log")
                known = runtime.damage if error is None else None
                self._unreadable[cold.partition] = known or refuse(error or missing)
                if error is None and known is None:
                    runtime.damaged(missing, cold.log)
            self.look()

    def _answer(self, reply: Fetched | Refusal, parts: Sequence[Buffer]) -> None:
        respond, self._respond = self._respond, None
        self._gate.fetches.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._pace is not None:
            self._pace.cancel()
        for runtime in self._runtimes:
            runtime.wakeups.unwatch(self.look)
        self._over(self)
        if respond is not None:
            self._metrics.fetched((self._pump.clock.now_us() - self._started_us) / 1e6)
            respond(reply, parts)


def _rows_of(frames: Buffer) -> int:
    """Messages in raw frames."""
    headers = (header for header, _ in frame.walk(frames, check=False))
    return sum(header.count for header in headers if header.kind == frame.DATA)
