"""Framing: the facts of one turn laid out as frames in the log, and read back.

A fact that stores messages (`Appended`, `Delayed`, `Staged`) is a frame of its own, with the body of its
batch. All other facts are small: those of neighbouring decisions share one facts frame. The facts of one
decision apply whole or not at all, so when they need several frames, the flag MORE ties these together:

    decisions of a turn            frames
    ack                 Acked      │ FACTS  Acked, Leased          span: the offsets that both name
    lease               Leased     │
    publish             Appended   │ DATA
    release             Appended   │ DATA   MORE ─┐                whole or not at all
                        Released   │ FACTS  ◀─────┘

The `base_offset` and `span` of a facts frame bound the offsets that its facts name, so that a search for one
message can skip the frame by its header. A span of 0 means that some fact may concern any offset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tailrace.core.model.commands import Publish
from tailrace.core.model.decision import Decision
from tailrace.core.model.facts import Acked, Appended, Delayed, Fact, Staged, Stored
from tailrace.core.model.identifiers import BatchView
from tailrace.core.model.internal_commands import ApplyStaged, PublishBatch, ReleaseDue, StageBatch
from tailrace.format import batch, codec, frame
from tailrace.format.frame import Buffer, Frame, Header
from tailrace.format.gathering import stored_hashes

_STORED = (Appended, Delayed, Staged)
_SPAN_MAX = (1 << 32) - 1


def facts_of(
    header: Header, body: Buffer, *, want_keys: bool, decode: Callable[[Buffer], list[Any]]
) -> Sequence[Any]:
    """Read the facts back from a stored frame; `decode` decodes the body of a facts frame."""
    kind = header.kind
    if kind == frame.FACTS:
        return decode(body)
    if kind not in (frame.DATA, frame.SCHEDULED, frame.STAGED):
        return ()
    view = batch.view_of(header, body, want_keys=want_keys, want_ids=kind == frame.SCHEDULED)
    if kind == frame.STAGED:
        return (
            Staged(header.entry, view, header.append_time_us, header.producer_id, header.producer_sequence),
        )
    producer = header.producer_id, header.producer_epoch, header.producer_sequence
    released = bool(header.flags & frame.RELEASED)
    if kind == frame.SCHEDULED:
        return (Delayed(header.entry, view, header.append_time_us, *producer, released, header.wall_us),)
    return (Appended(header.base_offset, view, header.append_time_us, *producer, released, header.wall_us),)


class PublishedBody:
    """The body of a publish. Each choice of rows is cut once: for its size, and then for its frame."""

    __slots__ = ("_body", "_columns", "_cuts")

    def __init__(self, body: Buffer, columns: int) -> None:
        self._body = body
        self._columns = columns
        self._cuts: dict[bytes, Buffer] = {}

    def nbytes(self, rows: npt.NDArray[np.int64]) -> int:
        """The size of a body of only these rows."""
        return len(self.cut(rows))

    def cut(self, rows: npt.NDArray[np.int64]) -> Buffer:
        """A body of only these rows, in this order."""
        chosen = rows.tobytes()
        found = self._cuts.get(chosen)
        if found is None:
            found = self._cuts[chosen] = batch.take(self._body, self._columns, rows)
        return found


def publish_batch(publish: Publish, view: BatchView, body: Buffer) -> PublishBatch:
    """The command for a publish. Rows are left out of a body only if there are dedup ids or delays."""
    if view.dedup_ids is None and view.deliver_at_us is None:
        return PublishBatch(publish, view)
    return PublishBatch(publish, view, PublishedBody(body, view.columns))


class TurnFrames:
    """Collects the frames of one turn."""

    def __init__(self, entry: int, leader_epoch: int, time_us: int, wall_us: int) -> None:
        self.entry = entry
        """Index of the next frame."""
        self.frames: list[Frame] = []
        self._leader_epoch = leader_epoch
        self._time_us = time_us
        """Time of the turn, for facts that have none."""
        self._wall_us = wall_us
        self._facts: list[Fact] = []

    @property
    def next_entry(self) -> int:
        """Index of the next frame that holds a body."""
        return self.entry + bool(self._facts)

    def add(self, decision: Decision, work: Any, body: Buffer) -> None:
        """Add all facts of one decision, in order. A replay will find them as they are."""
        facts = decision.facts
        if len(facts) == 1 or not any(isinstance(fact, _STORED) for fact in facts):
            if len(facts) == 1 and isinstance(facts[0], _STORED):
                self.flush()
                self._put(facts[0], *_body(facts[0], decision, work, body, 0))
            else:
                self._facts += facts
            return
        self.flush()
        first, place = len(self.frames), 0
        for fact in facts:
            if isinstance(fact, _STORED):
                self.flush()
                self._put(fact, *_body(fact, decision, work, body, place))
                place += 1
            else:
                self._facts.append(fact)
        self.flush()
        for index in range(first, len(self.frames) - 1):
            item = self.frames[index]
            header = _with_flags(item.header, item.header.flags | frame.MORE)
            self.frames[index] = Frame(header, frame.pack(header), item.body, item.keys)

    def flush(self) -> None:
        """Put the small facts collected so far into one frame."""
        if not self._facts:
            return
        facts, self._facts = self._facts, []
        body = codec.encode_facts(facts)
        low, high = bounds(facts)
        time_us = max(getattr(fact, "time_us", self._time_us) for fact in facts)
        crc, epoch = frame.crc32c(body), self._leader_epoch
        place = self.entry, low, high - low, 0, epoch, time_us
        header = Header(frame.FACTS, 0, len(body), crc, *place, wall_us=self._wall_us)
        self._append(header, body)

    def _put(self, fact: Stored, body: Buffer, crc: int) -> None:
        view = fact.view
        assert len(body) == view.nbytes, f"a body of {len(body)} bytes was decided on as {view.nbytes}"
        kind, flags, base, span = frame.SCHEDULED, view.columns, 0, 0
        if isinstance(fact, Appended):
            kind, base, span = frame.DATA, fact.base_offset, view.count
        if isinstance(fact, Staged):
            kind, producer = frame.STAGED, (fact.attempt, 0, fact.number)
        else:
            producer = fact.producer_id, fact.producer_epoch, fact.producer_sequence
            if fact.released:
                flags |= frame.RELEASED
        header = Header(
            kind,
            flags,
            len(body),
            crc,
            self.entry,
            base,
            span,
            view.count,
            self._leader_epoch,
            fact.append_time_us,
            *producer,
            view.timestamp_max_us,
            self._wall_us,
        )
        keys = view.keys if kind == frame.DATA else None
        self._append(header, body, None if keys is None else stored_hashes(keys))

    def _append(self, header: Header, body: Buffer, keys: npt.NDArray[np.uint64] | None = None) -> None:
        self.frames.append(Frame(header, frame.pack(header), body, keys))
        self.entry += 1


def _body(fact: Stored, decision: Decision, work: Any, body: Buffer, place: int) -> tuple[Buffer, int]:
    """Body and checksum for the frame of a stored fact, number `place` among those of its decision."""
    if isinstance(work, PublishBatch):
        rows = decision.late if isinstance(fact, Delayed) else decision.keep
        if rows is None:
            return body, work.publish.crc
        assert isinstance(work.body, PublishedBody)
        body = work.body.cut(rows)
        return body, frame.crc32c(body)
    if isinstance(work, ApplyStaged):
        return work.bodies[place], work.crcs[place]
    assert isinstance(work, ReleaseDue | StageBatch)
    return body, work.crc


def _with_flags(header: Header, flags: int) -> Header:
    fields = [getattr(header, name) for name in Header.__struct_fields__]
    fields[1] = flags
    return Header(*fields)


def bounds(facts: Sequence[Fact]) -> tuple[int, int]:
    """Bounds [low, high) of the offsets that facts name; (0, 0) when some fact names none. Such a fact may
    concern any offset: it names a lease, a whole group, or the start of the log."""
    low, high = 1 << 62, 0
    for fact in facts:
        named = (
            [spans for _, spans in fact.leases] if isinstance(fact, Acked) else [getattr(fact, "spans", [])]
        )
        for spans in named:
            if not spans:
                return 0, 0
            low, high = min(low, spans[0]), max(high, spans[-1])
    return (low, high) if 0 < high - low <= _SPAN_MAX else (0, 0)
