"""Reads by key: the messages of one key, in order, for topics with `key_index`; the content of a stream.

The core counts the messages of every key (`core.publish.key_index`), and the log finds them by the hash of
the key, the newest first (`PartitionLog.find_key`). Both answers are about the same moment: the count is
taken together with the end of the partition, and the search begins when everything up to that end is durable.
So the newest message below that end has the count as its number, its *version*, and the others are numbered
backwards from there, whatever was trimmed:

    versions    1 2 3 4 5 6 7       the count is 7; 1 and 2 were trimmed, 3 is the oldest that is found
    asked       since 3, limit 2    passes over the newest 2 (6 and 7), takes 2: versions 4 and 5

So a search never goes back further than the messages that are asked for. If it comes to the start of the log
with fewer messages than it should have found, some were trimmed: then it begins again at the oldest that is
left.

Two keys may share a hash. The core knows whether another key of the partition shares the 64 bits that the log
finds by. If one does, or if a message turns out to have another key, every message found is compared first;
that takes a read of each, and nothing else changes.

A request does all its reading on reader threads, in steps of bounded bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from tailrace.broker.metrics import Metrics
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.broker.topics import Topics
from tailrace.core.model.commands import Done, KeyRead, ReadKey, Reply
from tailrace.core.model.identifiers import KEY_BYTES_MAX, Refusal
from tailrace.errors import InvalidRequest
from tailrace.format.batch import stored
from tailrace.format.frame import Buffer, Frame
from tailrace.format.gathering import hash_of_key, pick
from tailrace.ports import Gate, KeyPlaces, PartitionLog, Respond, Verb

READ_BYTES_MAX = 8 * 1024 * 1024
"""Bytes of frames that are read for one answer."""
INDEX_BYTES = 4 * 1024 * 1024
"""Bytes of frames whose keys are read in one step."""
ROWS_MAX = 10_000
_SPAN_MAX = (1 << 32) - 1
_AGAIN = object()
"""Result of a step that is not the last one."""
_DROPPED = Refusal("unavailable", "the receiver is gone")


class KeyReads:
    """Answers `ReadKey`, and indexes the keys of frames written before the broker started."""

    def __init__(self, topics: Topics, pump: Pump, metrics: Metrics) -> None:
        self.verbs: dict[type[Any], Verb] = {ReadKey: self._read}
        self._topics = topics
        self._pump = pump
        self._metrics = metrics
        self._closed = False
        self._unindexed: list[PartitionLog] = []
        """Logs with keys to be indexed, the last one first."""

    def close(self) -> None:
        """Stop indexing."""
        self._closed = True

    def _read(self, request: ReadKey, body: Buffer, respond: Respond, gate: Gate) -> None:
        runtime = self._topics.partition(request.topic, request.partition)
        if not runtime.options.key_index:
            raise InvalidRequest(f"topic {request.topic!r} was made without key_index: it has no streams")
        if len(request.key) > KEY_BYTES_MAX:
            raise InvalidRequest(f"key: at most {KEY_BYTES_MAX} bytes, not {len(request.key)}")
        if request.since < 0 or request.until < 0:
            raise InvalidRequest("since, until: versions, 0 or more")
        if request.limit < 1 or request.bytes_max < 1:
            raise InvalidRequest("limit, bytes_max: at least 1")
        KeyRequest(request, runtime, self._pump, self._metrics, gate, respond).start()

    def warm(self) -> None:
        """Begin to index the keys of open segments, one partition after the other and in steps, so that the
        first search need not wait for it."""
        self._unindexed = [
            runtime.log
            for runtime in self._topics.queues()
            if runtime.options.key_index and not runtime.fault
        ]
        self._index()

    def _index(self) -> None:
        if self._unindexed and not self._closed:
            self._pump.threads.read(partial(self._unindexed[-1].index_keys, INDEX_BYTES), self._indexed)

    def _indexed(self, complete: Any, error: Exception | None) -> None:
        if error is not None or complete:
            self._unindexed.pop()  # An error will be raised again to a reader of this log.
        self._index()


class KeyRequest:
    """One `ReadKey` under way."""

    def __init__(
        self,
        request: ReadKey,
        runtime: QueuePartition,
        pump: Pump,
        metrics: Metrics,
        gate: Gate,
        respond: Respond,
    ) -> None:
        self._request = request
        self._runtime = runtime
        self._pump = pump
        self._metrics = metrics
        self._gate = gate
        self._respond: Respond | None = respond
        self._bytes_max = min(request.bytes_max, READ_BYTES_MAX)
        self._hash = hash_of_key(request.key)
        self._count = self._end = 0
        self._alone = True
        """Whether every message with the hash has the key, as far as is known."""
        self._compared = _Compared()

    def start(self) -> None:
        """Wait for room, then count, and search when the count is durable."""
        if self._respond is None:
            return
        self._gate.fetches[self] = None
        if self._gate.blocked(self.start) or not self._gate.reserve(self._bytes_max, self.start):
            return
        runtime = self._runtime
        refusal = runtime.gone or runtime.lost or runtime.fault
        if refusal is not None:
            self._answer(refusal, NOTHING)
            return
        self._count, self._end, self._alone = runtime.key_rows(self._request.key)
        runtime.answer(self._counted, Done())

    def hang_up(self) -> None:
        """The receiver sends nothing more; it gets its answer all the same."""

    def drop(self) -> None:
        """The receiver is gone."""
        respond, self._respond = self._respond, None
        self._gate.fetches.pop(self, None)
        if respond is not None:
            respond(_DROPPED, NOTHING)

    def _counted(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        if isinstance(reply, Refusal):
            self._answer(reply, NOTHING)
        else:
            self._go_on()

    def _go_on(self) -> None:
        if self._respond is None:
            self._gate.release(self._bytes_max)
            return
        work = partial(self._step, self._runtime.log, self._runtime.start_offset)
        self._pump.threads.read(work, self._stepped)

    def _stepped(self, result: Any, error: Exception | None) -> None:
        if error is not None:
            self._answer(refuse(error), NOTHING)
        elif result is _AGAIN:
            self._go_on()
        else:
            self._answer(*result)

    def _answer(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        respond, self._respond = self._respond, None
        self._gate.fetches.pop(self, None)
        if respond is not None:
            if isinstance(reply, KeyRead):
                self._metrics.delivered(self._request.topic, sum(len(part) for part in parts), reply.count)
            respond(reply, parts)
        self._gate.release(self._bytes_max)

    # -- on a reader thread

    def _step(self, log: PartitionLog, begin: int) -> Any:
        """The answer, or `_AGAIN` when more has to be read first."""
        request, total = self._request, self._count
        until = min(request.until or total, total)
        if not self._alone and not self._compare(log, begin, total - request.since):
            return _AGAIN
        since, places = request.since, self._chosen(log, begin, request.since, until)
        if places is not None and not request.newest_first:
            there = places.passed + len(places.offsets)
            if there < total - since:  # Some of these messages, or newer ones, were trimmed.
                since = total - there
                places = self._chosen(log, begin, since, until)
        if places is None:
            log.index_keys(INDEX_BYTES)
            return _AGAIN
        if not len(places.offsets):
            return KeyRead(0, 0, total, False), NOTHING
        return self._gathered(log, places, since, until)

    def _chosen(self, log: PartitionLog, begin: int, since: int, until: int) -> KeyPlaces | None:
        """Places of the requested messages, of the versions in (since, until]."""
        count = min(self._request.limit, ROWS_MAX, max(until - since, 0))
        last = until if self._request.newest_first else since + count
        skip = self._count - last
        if count and not self._alone:
            return self._compared.places(skip, count)
        return log.find_key(self._hash, begin, self._end, skip, count)

    def _gathered(self, log: PartitionLog, places: KeyPlaces, since: int, until: int) -> Any:
        """The answer: as many of these messages as fit, in one frame."""
        newest_first, offsets = self._request.newest_first, places.offsets
        version = self._count - places.passed - len(offsets) + 1  # Of the first one.
        if newest_first:
            places = places._replace(offsets=offsets[::-1], positions=places.positions[::-1])
        frames = log.read_places(places, self._bytes_max)
        if not frames:  # Some were trimmed meanwhile.
            self._compared = _Compared()
            return _AGAIN
        if newest_first:
            kept = offsets[offsets >= max(frames[-1].header.base_offset, int(offsets[-1]) - _SPAN_MAX + 1)]
            version += len(offsets) - len(kept)
            frames.reverse()
            cut = len(kept) < len(offsets) or len(kept) >= min(self._request.limit, ROWS_MAX)
            more = cut and version - 1 > since
        else:
            kept = offsets[offsets < min(frames[-1].header.end_offset, int(offsets[0]) + _SPAN_MAX)]
            more = version + len(kept) - 1 < until
        item = pick(frames, kept)
        if not _all_have(item, self._request.key):
            self._alone = False
            return _AGAIN
        return KeyRead(version, len(kept), self._count, more), item.parts()

    def _compare(self, log: PartitionLog, begin: int, count: int) -> bool:
        """Compare the keys of the next messages with the hash, newest first; true when `count` messages have
        the key or no more are left."""
        compared = self._compared
        if compared.complete or len(compared.offsets) >= count:
            return True
        places = log.find_key(self._hash, begin, min(compared.end, self._end), 0, ROWS_MAX)
        if places is None:
            log.index_keys(INDEX_BYTES)
            return False
        if not len(places.offsets):
            compared.complete = True
            return True
        turned = places._replace(offsets=places.offsets[::-1], positions=places.positions[::-1])
        frames = log.read_places(turned, READ_BYTES_MAX)
        if frames:
            oldest = max(frames[-1].header.base_offset, int(places.offsets[-1]) - _SPAN_MAX + 1)
            rows = places.offsets >= oldest
            frames.reverse()
            taken = places._replace(offsets=places.offsets[rows], positions=places.positions[rows])
            if not compared.add(frames, taken, self._request.key):
                self._compared = _Compared()
        return False


class _Compared:
    """Messages that were read and have the key, newest first."""

    def __init__(self) -> None:
        self.end = 1 << 62
        """All messages with the hash from this offset on were compared."""
        self.complete = False
        self.offsets: list[int] = []
        self._positions: list[int] = []
        self._generation = 0

    def add(self, frames: list[Frame], places: KeyPlaces, key: bytes) -> bool:
        """Add the older messages that have the key; false when the log has shrunk since the first ones."""
        if self.offsets and places.generation != self._generation:
            return False
        mine = np.flatnonzero(_having(frames, places.offsets, key))[::-1]
        self.offsets += places.offsets[mine].tolist()
        self._positions += places.positions[mine].tolist()
        self._generation, self.end = places.generation, int(places.offsets[0])
        return True

    def places(self, skip: int, count: int) -> KeyPlaces:
        """Places, as `PartitionLog.find_key` would give them."""
        chosen = slice(skip, skip + count)
        offsets = np.array(self.offsets[chosen][::-1], np.int64)
        positions = np.array(self._positions[chosen][::-1], np.int64)
        return KeyPlaces(offsets, positions, min(skip, len(self.offsets)), self._generation)


def _all_have(item: Frame, key: bytes) -> bool:
    return bool(_same(item, key).all())


def _having(frames: list[Frame], offsets: npt.NDArray[np.int64], key: bytes) -> npt.NDArray[np.bool_]:
    """Which of the messages have the key."""
    return _same(pick(frames, offsets), key)


def _same(item: Frame, key: bytes) -> npt.NDArray[np.bool_]:
    keys = stored(item.body, item.header.columns).column("key")
    same: npt.NDArray[np.bool_] = pc.fill_null(pc.equal(keys, key), False).to_numpy(zero_copy_only=False)
    return same
