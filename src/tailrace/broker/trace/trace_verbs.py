"""The verb of traces: message histories, searched for in the logs of a topic on a reader thread."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.read_queue import ReadQueue, Work
from tailrace.broker.runtime.turn import NOTHING, error_of, together
from tailrace.broker.topics import Topics
from tailrace.broker.trace.trace_search import ID_WINDOW_US, Budget, SearchedPartition, TraceQuery, search
from tailrace.core.model.queue_commands import Trace, TraceFound
from tailrace.core.trace.message_history import STATUSES
from tailrace.errors import Corrupt, InvalidRequest, NotFound
from tailrace.format.frame import Buffer
from tailrace.format.wire import HEADER_BYTES_MAX
from tailrace.ports import Gate, Respond, Verb

WAITING_MAX = 64
COUNT_MAX = 1_000
TIME_END_US = 1 << 62
ANSWER_BYTES_MAX = HEADER_BYTES_MAX * 3 // 4
"""Histories travel in the header of the answer. A single one fits, because its events are bounded."""


class TraceVerbs:
    """Answers `Trace`."""

    def __init__(self, topics: Topics, pump: Pump) -> None:
        self.verbs: dict[type[Any], Verb] = {Trace: self._trace}
        self._topics = topics
        self._pump = pump
        self._turns = ReadQueue(pump, "traces", WAITING_MAX, retry_after_ms=1000)

    def _trace(self, request: Trace, body: Buffer, respond: Respond, gate: Gate) -> None:
        self._runtimes(request)
        self._wanted(request)
        self._turns.add(partial(self._begin, request), respond)

    def _wanted(self, request: Trace) -> TraceQuery:
        kept_us = self._topics.get(request.topic).info.options.trace_retention_ms * 1000
        return wanted_of(request, self._pump.clock.now_us(), kept_us)

    def _runtimes(self, request: Trace) -> list[tuple[int, QueuePartition]]:
        host = self._topics.get(request.topic)
        if request.partition is None:
            return list(enumerate(host.runtimes))
        return [(request.partition, host.partition(request.partition))]

    def _begin(self, request: Trace) -> Work:
        wanted = self._wanted(request)
        ill = {
            number: runtime.lost for number, runtime in self._runtimes(request) if runtime.lost is not None
        }
        refusal = together(request.topic, ill)
        if refusal is not None:
            raise error_of(refusal)
        sources = [
            source_of(request.topic, partition, runtime) for partition, runtime in self._runtimes(request)
        ]
        if wanted.offset is not None and not 0 <= wanted.offset < sources[0].end_offset:
            damage = self._runtimes(request)[0][1].damage
            if damage is not None:
                raise Corrupt(damage.message)
            raise NotFound(f"offset {wanted.offset} is beyond the end, {sources[0].end_offset}")
        return partial(_search_all, wanted, sources)


def _search_all(
    wanted: TraceQuery, sources: Sequence[SearchedPartition]
) -> tuple[TraceFound, Sequence[Buffer]]:
    budget = Budget()
    messages: list[dict[str, Any]] = []
    for source in sources:
        messages += search(wanted, source, budget)
    messages.sort(key=lambda message: message["events"][0]["time_us"])
    kept = fitting(messages[: wanted.count_max])
    return TraceFound(kept, budget.complete and len(kept) == len(messages)), NOTHING


def wanted_of(request: Trace, now_us: int, kept_us: int) -> TraceQuery:
    """Check a request; returns the query with the time to search, `kept_us` back at most unless `full`."""
    if request.status is not None and request.status not in STATUSES:
        raise InvalidRequest(f"status: one of {', '.join(STATUSES)}, not {request.status[:80]!r}")
    if not 1 <= request.count_max <= COUNT_MAX:
        raise InvalidRequest(f"count_max: 1 to {COUNT_MAX}, not {request.count_max}")
    if request.offset is not None:
        if request.partition is None:
            raise InvalidRequest("offset: only together with a partition")
        return TraceQuery(0, TIME_END_US, request.count_max, offset=request.offset, status=request.status)
    from_us, to_us = request.from_us, request.to_us or TIME_END_US
    if request.id is not None:
        if len(request.id) != 16:
            raise InvalidRequest(f"id: 16 bytes, not {len(request.id)}")
        time_us = time_of(request.id)
        if request.full:
            from_us, to_us = 0, TIME_END_US
        elif time_us is None:
            raise InvalidRequest("id: not a UUIDv7, so its time is not known: search everything with full")
        else:
            from_us, to_us = time_us - ID_WINDOW_US, time_us + ID_WINDOW_US
    elif from_us >= to_us:
        raise InvalidRequest("until: it has to be later than since")
    elif not request.full:
        from_us = max(from_us, now_us - kept_us)
        if from_us >= to_us:
            text = f"longer ago than traces are searched by themselves, {kept_us // 1000} ms"
            raise InvalidRequest(f"until: {text} (trace_retention_ms): search everything with full")
    return TraceQuery(
        max(from_us, 0), to_us, request.count_max, None, request.id, request.key, request.status
    )


def fitting(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first messages, as many as fit an answer."""
    room = ANSWER_BYTES_MAX
    for number, message in enumerate(messages):
        room -= len(msgspec.msgpack.encode(message))
        if room < 0:
            return messages[: max(number, 1)]
    return messages


def time_of(id_bytes: bytes) -> int | None:
    """The time in a UUIDv7, in microseconds; None for any other id."""
    if id_bytes[6] >> 4 != 7 or id_bytes[8] >> 6 != 2:
        return None
    return int.from_bytes(id_bytes[:6], "big") * 1000


def source_of(topic: str, partition: int, runtime: QueuePartition) -> SearchedPartition:
    """Capture, on the loop, what a search needs of a partition."""
    numbers = runtime.group_numbers()
    committed: dict[int, int] = {}
    for number, name in numbers.items():
        first = runtime.first_unsettled(name)
        if first is not None:
            committed[number] = first
    time_us = runtime.time_us()
    ahead_us = time_us - runtime.pump.clock.wall_us()
    times = time_us, max(0, -ahead_us), max(runtime.clock.lead_us, ahead_us)
    return SearchedPartition(
        topic,
        partition,
        runtime.log,
        runtime.end_offset,
        numbers,
        committed,
        runtime.machine.decode_facts,
        *times,
    )
