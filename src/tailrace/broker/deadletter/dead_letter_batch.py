"""Batches of dead letters: messages read back from the log, with the story of their end in their headers.

`core.process.dead_letter_process` says when; this is its reader.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from tailrace.broker.metrics import Metrics
from tailrace.broker.runtime.framing import publish_batch
from tailrace.broker.runtime.process_driver import ProcessKind
from tailrace.core.model.commands import Publish
from tailrace.core.model.dead_letter_headers import NAMES, PREFIX, STORY
from tailrace.core.model.identifiers import PRIORITY_DEFAULT, TopicPartition
from tailrace.core.partition import Partition
from tailrace.core.process.dead_letter_process import (
    DeadLetterOrigin,
    DeadLetterProcess,
    DeadLettersRead,
    ReadDying,
)
from tailrace.core.queue.ledger_stats import Dead
from tailrace.errors import Corrupt, StorageFault
from tailrace.format import batch, frame
from tailrace.format.frame import Buffer, Header
from tailrace.ports import PartitionLog

_log = logging.getLogger("tailrace.burial")

BYTES_MAX = 4 * 1024 * 1024
"""A batch of dead letters ends with the message that brings its bodies above this."""


def dead_letters(home: TopicPartition, topic_id: int, metrics: Metrics) -> ProcessKind:
    """The process that writes the dead letters of a partition."""
    return ProcessKind(
        make=partial(_make, home, topic_id),
        watches=DeadLetterProcess.WATCHES,
        log=_log,
        readers={ReadDying: read_dying},
        failed=partial(metrics.burial_failed, home.topic),
    )


def _make(home: TopicPartition, topic_id: int, state: Partition) -> DeadLetterProcess:
    return DeadLetterProcess(home, topic_id, state.queues)


def read_dying(
    log: PartitionLog, end: int, request: ReadDying
) -> tuple[DeadLettersRead, StorageFault | None]:
    """Read dying messages below the committed end, and make a batch of them; blocking."""
    rows: list[dict[str, Any]] = []
    offsets: list[int] = []
    deaths: list[str] = []
    unreadable: list[int] = []
    problem: StorageFault | None = None
    size = 0
    origin, reader = request.origin, _Reader(log, end)
    for item in request.rows:
        try:
            row = reader.row(item.offset)
        except StorageFault as error:  # One bad place on the disk does not hold up the others.
            unreadable.append(item.offset)
            problem = error
            continue
        if row is None:
            continue
        row["headers"] = _headers(row, origin, item)
        rows.append(row)
        offsets.append(item.offset)
        deaths.append(f"{item.offset}/{origin.group}/{item.first_us or item.last_us}")
        size += len(row["value"] or b"")
        if size > BYTES_MAX:
            break
    told = "" if problem is None else str(problem)
    if not rows:
        return DeadLettersRead(offsets, unreadable, problem=told), problem
    header, body = _encode(rows, origin, deaths)
    # The view has no sizes: a message within the limits of its own topic always fits, with the added headers,
    # too.
    view = batch.view_of(header, body, want_keys=True)
    publish = Publish(request.dead_letters, origin.partition, header.columns, header.body_crc)
    return DeadLettersRead(offsets, unreadable, publish_batch(publish, view, body), body, told), problem


def _encode(rows: list[dict[str, Any]], origin: DeadLetterOrigin, deaths: list[str]) -> tuple[Header, Buffer]:
    """Encode dead letters. Each entry of `deaths` names offset, group and time and becomes the dedup id: the
    same death is recognised after a crash, but not taken for a later death after a redrive or a reset."""
    place = f"{origin.topic}~{origin.topic_id}/{origin.partition}"
    priorities = None
    if any("priority" in row for row in rows):
        priorities = [row.get("priority", PRIORITY_DEFAULT) for row in rows]
    timestamps = [row["timestamp"] for row in rows]
    columns, body = batch.encode(
        [row["value"] for row in rows],
        ids=b"".join(row["id"] for row in rows),
        timestamps=timestamps,
        keys=[row.get("key") for row in rows],
        headers=[row["headers"] for row in rows],
        priorities=priorities,
        dedup_ids=[f"{place}/{death}".encode() for death in deaths],
    )
    count = len(rows)
    header = Header(
        frame.DATA,
        columns,
        len(body),
        frame.crc32c(body),
        0,
        0,
        count,
        count,
        timestamp_max_us=max(timestamps),
    )
    return header, body


def _headers(row: dict[str, Any], origin: DeadLetterOrigin, item: Dead) -> list[tuple[str, bytes]]:
    """The message's own headers, without those of an earlier death, and the story of this death."""
    story = (
        origin.topic,
        origin.partition,
        item.offset,
        row["append_time"],
        origin.topic_id,
        origin.group,
        item.failures,
        item.deliveries,
        item.first_us,
        item.last_us if item.deliveries else 0,
        item.member,
        item.reason,
        item.error,
    )
    headers = [(name, value) for name, value in row.get("headers") or () if name not in NAMES]
    headers += [
        (PREFIX + name, str(value).encode(errors="replace")) for name, value in zip(STORY, story, strict=True)
    ]
    return headers


class _Reader:
    """Reads single messages of a log, and keeps the last frame for neighbours."""

    def __init__(self, log: PartitionLog, end: int) -> None:
        self._log = log
        self._end = end
        self._header = Header(frame.DATA, 0, 0, 0, 0)
        self._rows: list[dict[str, Any]] = []

    def row(self, offset: int) -> dict[str, Any] | None:
        """The message at an offset as plain values, times in microseconds; None if it was trimmed meanwhile:
        then its death is over."""
        here = self._header.base_offset <= offset < self._header.end_offset
        if not here and not self._open(offset):
            return None
        header = self._header
        for row, fields in enumerate(self._rows):
            if header.base_offset + fields.get("offset_delta", row) == offset:
                return dict(fields)
        raise Corrupt(f"offset {offset} is missing in its frame")

    def _open(self, offset: int) -> bool:
        for part in self._log.read(offset, self._end, 1):
            for header, body in frame.walk(part, check=False):
                if header.kind == frame.DATA and header.base_offset <= offset < header.end_offset:
                    found = batch.decode(body, header.columns)
                    for name in ("timestamp", "deliver_at", "expires_at"):
                        place = found.schema.get_field_index(name)
                        if place >= 0:
                            found = found.set_column(place, name, found.column(place).cast("int64"))
                    self._header, self._rows = header, found.to_pylist()
                    for fields in self._rows:
                        fields["append_time"] = header.append_time_us
                    return True
        if offset < self._log.stats().start_offset:
            return False
        raise Corrupt(f"offset {offset} is missing in the log")
