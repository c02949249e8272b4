"""Reads of facts: the log of what happened to the messages of a partition, for analysis elsewhere.

The log is walked on a reader thread, headers first, a bounded piece at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.read_queue import ReadQueue, Work
from tailrace.broker.runtime.turn import error_of
from tailrace.broker.topics import Topics
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.queue_commands import FactsRead, ReadFacts
from tailrace.errors import Corrupt, InvalidRequest
from tailrace.format import frame
from tailrace.format.frame import Buffer, Frame
from tailrace.ports import Gate, PartitionLog, Respond, Verb

WAITING_MAX = 256
BYTES_MAX = 8 * 1024 * 1024
APPENDED_MAX = 10_000
"""Data frames in one answer; they travel in its header."""
FRAMES_MAX = 20_000
"""Frames that are visited for one answer."""

Piece = tuple[int, bool, list[tuple[int, int, int, int]], list[Buffer]]
"""Entry of the next piece, whether there is one, the data frames passed, and the facts frames in parts."""


class FactReads:
    """Answers `ReadFacts`."""

    def __init__(self, topics: Topics, pump: Pump) -> None:
        self.verbs: dict[type[Any], Verb] = {ReadFacts: self._read}
        self._topics = topics
        self._turns = ReadQueue(pump, "readers of facts", WAITING_MAX, retry_after_ms=100)

    def _read(self, request: ReadFacts, body: Buffer, respond: Respond, gate: Gate) -> None:
        self._topics.partition(request.topic, request.partition)
        if request.bytes_max < 1 or request.entry < 0:
            raise InvalidRequest("bytes_max: at least 1; entry: 0 or more")
        self._turns.add(partial(self._begin, request), respond)

    def _begin(self, request: ReadFacts) -> Work:
        runtime = self._topics.get(request.topic).runtimes[request.partition]
        if runtime.lost is not None:
            raise error_of(runtime.lost)
        log, end_entry, groups = runtime.log, runtime.end_entry, runtime.group_numbers()
        return partial(_read_facts, request, log, end_entry, groups, runtime.damage)


def _read_facts(
    request: ReadFacts, log: PartitionLog, end_entry: int, groups: dict[int, str], damage: Refusal | None
) -> tuple[FactsRead, list[Buffer]]:
    entry = request.entry
    if request.from_us > 0:
        entry = max(entry, log.entry_at(request.from_us))
    found = facts_from(log, min(entry, end_entry), end_entry, min(request.bytes_max, BYTES_MAX))
    next_entry, more, appended, parts = found
    if damage is not None and not more:
        if not (parts or appended):
            raise Corrupt(damage.message)
        # Claim that there is more, so that a reader who continues gets to the damage.
        return FactsRead(next_entry, next_entry + 1, groups, appended), parts
    return FactsRead(next_entry, end_entry if more else next_entry, groups, appended), parts


def facts_from(log: PartitionLog, entry: int, end: int, bytes_max: int) -> Piece:
    """Read one piece of a log, at least one frame if there is any; blocking."""
    appended: list[tuple[int, int, int, int]] = []
    parts: list[Buffer] = []
    size = frames = 0
    for header, read in log.scan(entry, end):
        if header.kind == frame.FACTS:
            if size and size + header.size > bytes_max:
                return header.entry, True, appended, parts
            size += header.size
            parts += Frame(header, frame.pack(header), read()).parts()
        elif header.kind == frame.DATA:
            appended.append((header.entry, header.base_offset, header.span, header.append_time_us))
        frames, entry = frames + 1, header.entry + 1
        if len(appended) >= APPENDED_MAX or frames >= FRAMES_MAX:
            return entry, entry < end, appended, parts
    return entry, False, appended, parts
