"""The search of a trace: one walk over a partition's log that finds messages and follows their histories.

The walk begins at the first entry at which a wanted message can be, and goes on to the end of the log,
because any later fact may be about it. Headers come first: bodies of data frames are opened only within the
time that is searched, facts only if they can be about a message that was found:

    entry   kind    offsets      message 1042 is wanted, from 12:00 to 12:01
    70      DATA    1000-1099    12:00:30: opened, 1042 is found
    71      FACTS   span 900-950  cannot be about 1042: skipped by its header
    72      FACTS   span 0       may be about any message: opened, `Leased` of 1040 to 1049
    73      DATA    1100-1199    12:02: outside of the time, skipped
    74      FACTS   1000-1100    opened, `Acked` of 1042
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.model.identifiers import HAS_DELIVER_AT, HAS_KEY, PRIORITY_DEFAULT
from tailrace.core.partition_clock import SLEW
from tailrace.core.trace.message_history import (
    DYING,
    FREE,
    LEASED,
    SCHEDULED,
    STAGED,
    WAITING,
    MessageHistories,
    MessageHistory,
)
from tailrace.errors import NotFound
from tailrace.format import batch, frame
from tailrace.format.frame import Buffer, Header
from tailrace.ports import PartitionLog

ID_WINDOW_US = 60_000_000
"""Greatest distance between the time in a message's id and its append."""
CANDIDATES_MAX = 5_000
"""Messages that are followed when only those of one status are wanted."""
BYTES_MAX = 512 * 1024 * 1024
SECONDS_MAX = 5.0
END = 1 << 62
ROW_BITS = 20
ORIGIN = "tailrace-origin-"
UNSETTLED = (FREE, LEASED, WAITING, DYING)


class TraceQuery(msgspec.Struct, frozen=True):
    """The wanted messages. Times are those of the append, or of the first storing."""

    from_us: int
    to_us: int
    count_max: int
    offset: int | None = None
    id: bytes | None = None
    key: bytes | None = None
    status: str | None = None

    @property
    def limit(self) -> int:
        """Number of messages to follow: one more than wanted, to tell whether there are more."""
        return self.count_max + 1 if self.status is None else CANDIDATES_MAX


class SearchedPartition(msgspec.Struct, frozen=True):
    """A partition as it was when the search began."""

    topic: str
    partition: int
    log: PartitionLog
    end_offset: int
    names: dict[int, str]
    """Groups by number."""
    committed: dict[int, int]
    """First unsettled offset by group number."""
    decode: Callable[[Buffer], list[Any]]
    time_us: int = 0
    """Partition time."""
    behind_us: int = 0
    ahead_us: int = 0
    """How far append times are behind the wall clock or ahead of it, because that clock was moved. They may
    have been further ahead before, because such a lead shrinks (`core.partition_clock`)."""

    def entry_at(self, time_us: int) -> int:
        """An entry at or before the first frame appended at a time, by either clock."""
        return self.log.entry_at(max(time_us - self.behind_us, 0))

    def is_later(self, header: Header, time_us: int) -> bool:
        """Whether a frame, and all behind it, was appended after a time, by either clock."""
        ahead_us = self.ahead_us
        if ahead_us:
            ahead_us += max(0, self.time_us - time_us) // (SLEW - 1)
        return header.append_time_us > time_us + ahead_us


class Budget:
    """The bound on the cost of one trace; a search that uses it up ends early, and tells so."""

    def __init__(self, bytes_max: int = BYTES_MAX, seconds_max: float = SECONDS_MAX) -> None:
        self.complete = True
        self._bytes = bytes_max
        self._end_s = time.monotonic() + seconds_max
        self._steps = 0

    def spend(self, nbytes: int) -> bool:
        """Spend bytes; returns whether the search may continue."""
        self._bytes -= nbytes
        self._steps += 1
        if self._bytes < 0 or (self._steps % 256 == 0 and time.monotonic() > self._end_s):
            self.end()
        return self.complete

    def end(self) -> None:
        """The search ends early."""
        self.complete = False


def search(wanted: TraceQuery, source: SearchedPartition, budget: Budget) -> list[dict[str, Any]]:
    """Search a partition; returns message histories in the form of the answer."""
    walk = _Walk(wanted, source, budget)
    if wanted.offset is not None:
        walk.place(wanted.offset)
    else:
        walk.through(max(source.entry_at(wanted.from_us), walk.first_entry()))
    walk.lives.finish(source.committed)
    return [
        found
        for life in walk.lives.lives
        if life.events and wanted.status in (None, life.status(), *_by_group(walk.lives, life).values())
        for found in (_answer(source, walk.lives, life),)
    ]


class _Walk:
    """One pass over a log."""

    def __init__(self, wanted: TraceQuery, source: SearchedPartition, budget: Budget) -> None:
        self._wanted = wanted
        self._source = source
        self._budget = budget
        self._waiting: dict[bytes, MessageHistory] = {}
        """Delayed and staged messages that have no offset yet, by id."""
        self._first_offset = 0
        """Messages below are skipped: every group has settled them, and unsettled ones are wanted."""
        if wanted.status in UNSETTLED and source.committed:
            self._first_offset = min(source.committed.values())
        self.lives = MessageHistories(source.names)

    def first_entry(self) -> int:
        """The first entry at which a wanted message can be."""
        log = self._source.log
        if self._first_offset and self._first_offset >= self._source.end_offset:
            return END
        for part in log.read(self._first_offset, self._source.end_offset, 1) if self._first_offset else ():
            for header, _ in frame.walk(part, check=False):
                return header.entry
        return 0

    def place(self, offset: int) -> None:
        """Follow the message at an offset, and look for its history before it had one."""
        for part in self._source.log.read(offset, self._source.end_offset, 1):
            for header, body in frame.walk(part, check=False):
                if header.kind != frame.DATA or not header.base_offset <= offset < header.end_offset:
                    continue
                rows = batch.decode(body, header.columns)
                for row, at in enumerate(_offsets(header, rows).tolist()):
                    if at == offset:
                        life = self._life(header, rows, row, at)
                        self._before(life, header)
                        self._appended_event(life, header, at)
                        self.lives.add(life)
                        self.through(header.entry + 1)
                        return
        raise NotFound(f"offset {offset} is not in the partition any more: it was collected")

    def _before(self, life: MessageHistory, header: Header) -> None:
        """Find the history of a released message before its release, by the time in its id."""
        if not header.flags & frame.RELEASED:
            return
        time_us = int.from_bytes(life.known["id"][:6], "big") * 1000
        log = self._source.log
        first = self._source.entry_at(time_us - ID_WINDOW_US)
        for earlier, read in log.scan(first, header.entry):
            staged = life.attempt >= 0
            if (not staged and self._source.is_later(earlier, time_us + ID_WINDOW_US)) or not self._spend(
                earlier
            ):
                return
            # A staged row with a delay is stored twice: when its version is applied, it becomes delayed.
            again = earlier.kind == frame.SCHEDULED and earlier.flags & frame.RELEASED
            if not (again if staged else earlier.kind in (frame.SCHEDULED, frame.STAGED)):
                continue
            rows = batch.decode(read(), earlier.columns)
            for row in _rows_with_id(rows, life.known["id"])[:1]:
                self._stored_event(life, earlier, rows, row)
                if earlier.kind == frame.SCHEDULED or not header.columns & HAS_DELIVER_AT:
                    return

    def through(self, entry: int) -> None:
        """Walk from an entry to the end."""
        for header, read in self._source.log.scan(entry, END):
            if not self._spend(header):
                return
            kind = header.kind
            if kind == frame.FACTS:
                if self.lives.concerns(header.base_offset, header.end_offset):
                    for fact in self._source.decode(read()):
                        self.lives.apply(fact, header.append_time_us)
            elif kind in (frame.DATA, frame.SCHEDULED, frame.STAGED):
                self._messages(header, read)
            if self._over(header):
                return

    def _spend(self, header: Header) -> bool:
        opened = header.length if header.kind != frame.FACTS and self._in_time(header) else 0
        return self._budget.spend(frame.HEADER_BYTES + opened)

    def _in_time(self, header: Header) -> bool:
        wanted = self._wanted
        if wanted.offset is not None:
            return False
        return any(wanted.from_us <= at <= wanted.to_us for at in (header.append_time_us, header.wall_us))

    def _over(self, header: Header) -> bool:
        """Whether nothing was found and nothing can be found any more."""
        return not self.lives.lives and self._source.is_later(header, self._wanted.to_us)

    def _messages(self, header: Header, read: Callable[[], Buffer]) -> None:
        data, staged_before = header.kind == frame.DATA, header.flags & frame.RELEASED
        if data and not self._first_offset < header.end_offset <= self._source.end_offset:
            return  # Settled by all, or not committed when the search began.
        released = staged_before and self._waiting
        if not released and not self._in_time(header):
            return
        if self._wanted.key is not None and not header.columns & HAS_KEY and not released:
            return
        rows = batch.decode(read(), header.columns)
        offsets = _offsets(header, rows) if data else None
        known = self._release(header, rows, offsets) if released else set()
        if not self._in_time(header):
            return
        for row in self._matching(rows):
            if row in known or (offsets is not None and offsets[row] < self._first_offset):
                continue
            if len(self.lives.lives) >= self._wanted.limit:
                if self._wanted.status is not None:
                    self._budget.end()
                return
            self._found(header, rows, row, None if offsets is None else int(offsets[row]))

    def _release(self, header: Header, rows: pa.RecordBatch, offsets: Any) -> set[int]:
        """Give waiting messages their offsets; a staged message may become a delayed one instead."""
        known: set[int] = set()
        for row, id_bytes in enumerate(rows.column("id").to_pylist()):
            life = self._waiting.get(id_bytes)
            if life is None:
                continue
            known.add(row)
            if offsets is None:
                self._stored_event(life, header, rows, row)
            else:
                del self._waiting[id_bytes]
                self._appended_event(life, header, int(offsets[row]))
                self.lives.appended(life, int(offsets[row]))
        return known

    def _matching(self, rows: pa.RecordBatch) -> Iterator[int]:
        wanted = self._wanted
        if wanted.id is not None:
            return iter(_rows_with_id(rows, wanted.id))
        if wanted.key is not None:
            if "key" not in rows.schema.names:
                return iter(())
            equal = pc.equal(rows.column("key"), pa.scalar(wanted.key, rows.column("key").type))
            return iter(np.flatnonzero(equal.fill_null(False).to_numpy(zero_copy_only=False)).tolist())
        return iter(range(rows.num_rows))

    def _found(self, header: Header, rows: pa.RecordBatch, row: int, offset: int | None) -> None:
        life = self._life(header, rows, row, offset)
        if offset is None:
            self._stored_event(life, header, rows, row)
            self._waiting[life.known["id"]] = life
        else:
            self._appended_event(life, header, offset)
        self.lives.add(life)

    # ------------------------------------------------------------------------------------------------- events

    def _life(self, header: Header, rows: pa.RecordBatch, row: int, offset: int | None) -> MessageHistory:
        known = _fields(rows, row)
        life = MessageHistory(known, offset=offset)
        life.event(known["timestamp_us"], "published")
        return life

    @staticmethod
    def _stored_event(life: MessageHistory, header: Header, rows: pa.RecordBatch, row: int) -> None:
        if header.kind == frame.STAGED:
            life.attempt = header.producer_id
            life.state = STAGED if life.offset is None else ""
            life.event(header.append_time_us, "staged", attempt_number=f"{header.producer_id:016x}")
            return
        life.ref = header.entry << ROW_BITS | row
        life.state = SCHEDULED if life.offset is None else ""
        due_us = (
            rows.column("deliver_at").cast("int64")[row].as_py() if header.columns & HAS_DELIVER_AT else None
        )
        life.event(header.append_time_us, "scheduled", deliver_at_us=due_us)

    @staticmethod
    def _appended_event(life: MessageHistory, header: Header, offset: int) -> None:
        what = "appended"
        if header.flags & frame.RELEASED:
            applied = not header.columns & HAS_DELIVER_AT or (life.attempt >= 0 and life.ref < 0)
            what = "applied" if applied else "released"
        life.event(header.append_time_us, what, offset=offset)


def _offsets(header: Header, rows: pa.RecordBatch) -> Any:
    if "offset_delta" in rows.schema.names:
        return np.asarray(rows.column("offset_delta")).astype(np.int64) + header.base_offset
    return np.arange(header.base_offset, header.base_offset + rows.num_rows)


def _rows_with_id(rows: pa.RecordBatch, id_bytes: bytes) -> list[int]:
    equal = pc.equal(rows.column("id"), pa.scalar(id_bytes, rows.column("id").type))
    found: list[int] = np.flatnonzero(equal.to_numpy(zero_copy_only=False)).tolist()
    return found


def _fields(rows: pa.RecordBatch, row: int) -> dict[str, Any]:
    """The fields of a message in the answer, besides its events."""
    names = rows.schema.names
    headers = rows.column("headers")[row].as_py() if "headers" in names else None
    value = rows.column("value")[row]
    known: dict[str, Any] = {
        "id": rows.column("id")[row].as_py(),
        "key": rows.column("key")[row].as_py() if "key" in names else None,
        "timestamp_us": rows.column("timestamp").cast("int64")[row].as_py(),
        "value_bytes": len(value.as_py() or b""),
        "priority": rows.column("priority")[row].as_py() if "priority" in names else PRIORITY_DEFAULT,
    }
    if "expires_at" in names:
        known["expires_at_us"] = rows.column("expires_at").cast("int64")[row].as_py()
    origin: dict[str, str] = {}
    for name, data in headers or ():
        if name == "traceparent":
            known["traceparent"] = data.decode("utf-8", "replace")
        elif name.startswith(ORIGIN):
            origin[name.removeprefix(ORIGIN)] = data.decode("utf-8", "replace")
    if origin:
        known["origin"] = origin
    return known


def _by_group(lives: MessageHistories, life: MessageHistory) -> dict[str, str]:
    return {lives.name(group): status for group, status in life.statuses.items()}


def _answer(source: SearchedPartition, lives: MessageHistories, life: MessageHistory) -> dict[str, Any]:
    found = {
        "topic": source.topic,
        "partition": source.partition,
        "offset": life.offset,
        **life.known,
        "status": life.status(),
        "groups": _by_group(lives, life),
        "events": life.events,
    }
    if life.cut:
        found["cut"] = True
    return found
