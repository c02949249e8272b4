"""Reads of staged batches: a partition gets the bodies of a decided version back from its own log.

`ApplyStaged` arrives without bodies. The partition decides that it needs frames (`StagedFrames`), they are
read on a reader thread, and the command is decided again with them:

    ApplyStaged ──▶ missing: entries 40, 41 ──▶ read, parted ──▶ ApplyStaged with batches ──▶ Appended …

Memory is bounded for all partitions of a node together: a read counts its bytes until the answer to its
command leaves. Reads beyond the bound wait in a queue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.turn import NOTHING, refuse
from tailrace.core.model.commands import Reply
from tailrace.core.model.identifiers import HAS_DELIVER_AT, BatchView
from tailrace.core.model.internal_commands import ApplyStaged, StagedFrames
from tailrace.core.publish.publish_rules import late_rows
from tailrace.format import batch
from tailrace.format.frame import Buffer, Header, crc32c
from tailrace.ports import PartitionLog, Respond

log = logging.getLogger("tailrace.staged")

READ_BYTES_MAX = 128 * 1024 * 1024
"""Memory for staged batches on their way into the log, of all partitions together."""
TARGET_BYTES_MAX = 16 * 1024 * 1024
"""Most that one partition counts against that bound; large batches stay in the pages of their file."""
PARTED_BYTES_MAX = 8 * 1024 * 1024
"""Memory of one partition for batches that are split into due and delayed rows. Batches beyond are delayed as
a whole; their due rows are released at the next tick."""

Part = tuple[BatchView, int, Buffer]
"""A batch to append: its view, checksum and body."""


class StagedSource(NamedTuple):
    """The partition that reads."""

    name: str
    log: PartitionLog
    want_keys: bool
    submit: Callable[[Any, Buffer, Respond], None]


class StagedReads:
    """Reads staged batches for all partitions of a node. All methods run on the pump's thread."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._waiting: deque[tuple[StagedSource, ApplyStaged, StagedFrames, Respond]] = deque()
        self._bytes = 0

    def read(
        self, source: StagedSource, command: ApplyStaged, frames: StagedFrames, respond: Respond
    ) -> None:
        """Read the frames of a command, and submit it with them."""
        if frames.lost:
            text = "%s: version %d of writer %r was decided, and staged batches of %d attempts are lost"
            log.error(text, source.name, command.version, command.writer, frames.lost)
        self._waiting.append((source, command, frames, respond))
        self._advance()

    def _advance(self) -> None:
        while self._waiting:
            source, command, frames, respond = self._waiting[0]
            size = min(frames.nbytes, TARGET_BYTES_MAX)
            if self._bytes and self._bytes + size > READ_BYTES_MAX:
                return
            self._waiting.popleft()
            self._bytes += size
            work = partial(_with_batches, source, command, frames, self._pump.clock.wall_us())
            self._pump.threads.read(work, partial(self._read, source, partial(self._over, size, respond)))

    def _read(
        self, source: StagedSource, respond: Respond, command: ApplyStaged, error: Exception | None
    ) -> None:
        if error is None:
            source.submit(command, b"", respond)
            return
        log.error("%s: staged batches cannot be read: %s", source.name, error)
        respond(refuse(error), NOTHING)

    def _over(self, size: int, respond: Respond, reply: Reply, parts: Sequence[Buffer]) -> None:
        self._bytes -= size
        respond(reply, parts)
        self._advance()


def _with_batches(
    source: StagedSource, command: ApplyStaged, frames: StagedFrames, wall_us: int
) -> ApplyStaged:
    """The command with the batches of these frames; on a reader thread."""
    stored = source.log.read_entries(frames.entries) if frames.entries else ()
    parts = parted(stored, source.want_keys, wall_us)
    views, crcs, bodies = ([part[at] for part in parts] for at in range(3))
    return msgspec.structs.replace(command, entries=frames.entries, views=views, crcs=crcs, bodies=bodies)


def parted(frames: Iterable[tuple[Header, Buffer]], want_keys: bool, wall_us: int) -> list[Part]:
    """Prepare staged batches for the append. A batch of which only some rows are due comes in two parts, the
    delayed rows first."""
    parts: list[Part] = []
    room = PARTED_BYTES_MAX
    for header, body in frames:
        delayed = bool(header.columns & HAS_DELIVER_AT)
        view = batch.view_of(header, body, want_keys, want_ids=delayed)
        late = late_rows(view, wall_us)
        if late is None or late.all() or header.length > room:
            parts.append((view, header.body_crc, body))
            continue
        room -= header.length
        for rows in (np.flatnonzero(late), np.flatnonzero(~late)):
            piece = batch.take(body, header.columns, rows)
            part = msgspec.structs.replace(view.take(rows), nbytes=len(piece))
            parts.append((part, crc32c(piece), piece))
    return parts
