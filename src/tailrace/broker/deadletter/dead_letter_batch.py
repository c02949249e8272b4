"""Batches of dead letters: messages read back from the log, with the story of their end in their headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tailrace.core.model.dead_letter_headers import NAMES, PREFIX, STORY
from tailrace.core.model.identifiers import PRIORITY_DEFAULT
from tailrace.errors import Corrupt, StorageFault
from tailrace.format import batch, frame
from tailrace.format.frame import Buffer, Header
from tailrace.ports import PartitionLog

BYTES_MAX = 4 * 1024 * 1024
"""A batch of dead letters ends with the message that brings its bodies above this."""


class DyingRow(Protocol):
    """A dying message, as its partition describes it."""

    @property
    def offset(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def error(self) -> str: ...
    @property
    def deliveries(self) -> int: ...
    @property
    def failures(self) -> int: ...
    @property
    def first_us(self) -> int: ...
    @property
    def last_us(self) -> int: ...
    @property
    def member(self) -> str: ...


class DeadLetterOrigin(msgspec.Struct, frozen=True):
    """The partition and the group in which messages are dying."""

    topic: str
    partition: int
    group: str
    topic_id: int
    """Tells the topic from a later one of the same name."""


class DeadLetterBatch(msgspec.Struct, frozen=True, eq=False):
    """A batch of dead letters; its rows are the messages at `offsets`. Those at `unreadable` could not be
    read; `header` is None when none could be read."""

    offsets: list[int]
    unreadable: list[int]
    header: Header | None = None
    body: Buffer = b""
    problem: Exception | None = None


def write(
    log: PartitionLog, end: int, origin: DeadLetterOrigin, dying: Sequence[DyingRow]
) -> DeadLetterBatch:
    """Read dying messages below the committed end, and make a batch of them; blocking."""
    rows: list[dict[str, Any]] = []
    offsets: list[int] = []
    deaths: list[str] = []
    unreadable: list[int] = []
    problem: Exception | None = None
    size = 0
    reader = _Reader(log, end)
    for item in dying:
        try:
            row = reader.row(item.offset)
        except StorageFault as error:  # One bad place on the disk does not hold up the others.
            unreadable.append(item.offset)
            problem = error
            continue
        row["headers"] = _headers(row, origin, item)
        rows.append(row)
        offsets.append(item.offset)
        deaths.append(f"{item.offset}/{origin.group}/{item.first_us or item.last_us}")
        size += len(row["value"] or b"")
        if size > BYTES_MAX:
            break
    if not rows:
        return DeadLetterBatch(offsets, unreadable, problem=problem)
    header, body = _encode(rows, origin, deaths)
    return DeadLetterBatch(offsets, unreadable, header, body, problem)


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


def _headers(row: dict[str, Any], origin: DeadLetterOrigin, item: DyingRow) -> list[tuple[str, bytes]]:
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

    def row(self, offset: int) -> dict[str, Any]:
        """The message at an offset as plain values; times in microseconds."""
        if not self._header.base_offset <= offset < self._header.end_offset:
            self._open(offset)
        header = self._header
        for row, fields in enumerate(self._rows):
            if header.base_offset + fields.get("offset_delta", row) == offset:
                return dict(fields)
        raise Corrupt(f"offset {offset} is missing in its frame")

    def _open(self, offset: int) -> None:
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
                    return
        raise Corrupt(f"offset {offset} is missing in the log")
