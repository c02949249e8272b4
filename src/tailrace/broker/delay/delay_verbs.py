"""Verbs on delayed messages: cancel some, list those that are not due yet."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tailrace.broker.partition.delay_prefetch import TooMuch, pick
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING, refuse, together
from tailrace.broker.topics import Topics
from tailrace.core.model.queue_commands import CancelScheduled, ListScheduled, ScheduledList
from tailrace.errors import InvalidRequest
from tailrace.format.frame import Buffer
from tailrace.ports import Gate, PartitionLog, Respond, Verb

LIST_MAX = 1000
LIST_BYTES = 4 * 1024 * 1024

_Asked = tuple[int, PartitionLog, list[int]]
"""A partition, its log, and the refs to read there."""


class DelayVerbs:
    """Answers `CancelScheduled` and `ListScheduled`."""

    def __init__(self, topics: Topics, pump: Pump) -> None:
        self.verbs: dict[type[Any], Verb] = {CancelScheduled: self._cancel, ListScheduled: self._list}
        self._topics = topics
        self._pump = pump

    def _cancel(self, request: CancelScheduled, body: Buffer, respond: Respond, gate: Gate) -> None:
        self._topics.partition(request.topic, request.partition).submit(request, b"", respond)

    def _list(self, request: ListScheduled, body: Buffer, respond: Respond, gate: Gate) -> None:
        if not 1 <= request.count_max <= LIST_MAX:
            raise InvalidRequest(f"count_max: 1 to {LIST_MAX}, not {request.count_max}")
        runtimes = self._topics.get(request.topic).runtimes
        ill = {
            partition: runtime.lost for partition, runtime in enumerate(runtimes) if runtime.lost is not None
        }
        refusal = together(request.topic, ill)
        if refusal is not None:
            respond(refusal, NOTHING)
            return
        found = [
            (at_us, partition, ref)
            for partition, runtime in enumerate(runtimes)
            for at_us, ref in runtime.delayed(request.after_us, request.count_max)
        ]
        places = [(partition, ref) for _, partition, ref in sorted(found)[: request.count_max]]
        asked: list[_Asked] = [
            (partition, runtime.log, [ref for place, ref in places if place == partition])
            for partition, runtime in enumerate(runtimes)
        ]
        read = partial(_read, [part for part in asked if part[2]], places)
        self._pump.threads.read(read, partial(_listed, respond))


def _listed(respond: Respond, result: Any, error: Exception | None) -> None:
    respond(ScheduledList(result) if error is None else refuse(error), NOTHING)


def _read(asked: list[_Asked], places: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Read the messages at these places, in order, until the answer is full; blocking."""
    messages: dict[tuple[int, int], dict[str, Any]] = {}
    for partition, log, refs in asked:
        for ref, message in zip(refs, _messages(log, refs), strict=False):
            messages[partition, ref] = {"partition": partition, **message}
    listed: list[dict[str, Any]] = []
    size = 0
    for place in places:
        if place not in messages:
            break
        message = messages[place]
        size += len(message["value"] or b"") + len(message["key"] or b"") + 256
        if size > LIST_BYTES and listed:
            break
        listed.append(message)
    return listed


def _messages(log: PartitionLog, refs: list[int]) -> list[dict[str, Any]]:
    """Messages as dicts; only the first ones when all together have too many bytes."""
    while True:
        try:
            batch = pick(log, refs, LIST_BYTES).batch
            break
        except TooMuch as much:
            refs = refs[: max(1, min(len(refs) // 2, LIST_BYTES // much.row_bytes))]
    times = np.asarray(batch.column("deliver_at").cast("int64")).tolist()
    names = batch.schema.names
    keys, headers = (
        batch.column(name).to_pylist() if name in names else [None] * len(times)
        for name in ("key", "headers")
    )
    rows = zip(
        batch.column("id").to_pylist(), times, keys, batch.column("value").to_pylist(), headers, strict=True
    )
    return [
        {"id": id_, "deliver_at_us": at, "key": key, "value": value, "headers": list(pairs or ())}
        for id_, at, key, value, pairs in rows
    ]
