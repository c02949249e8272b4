"""Applies decided versions of staged writes: every target appends its attempts, in rounds, until all have.

A round asks each target that has not confirmed yet. The staged batches are read back from the log on a reader
thread and given to the partition as one command, which appends them whole or not at all:

    version 7 of writer "loader": orders/0, orders/1, refunds/0
    round 1    orders/0 confirms    orders/1: the disk is full    refunds/0 confirms
               the writer is answered: decided, not applied everywhere yet
    pause      100 ms, doubled after each round up to 30 s
    round 2    orders/1 confirms
               all have it ──▶ FinishStaged: the coordinator may forget the decision

What is decided is never undone, so rounds go on for as long as it takes. A target whose topic was deleted
counts as done; only the catalog can say so, by the topic's id. A topic that is merely unknown is waited for.

A target has confirmed when what it appended is synced (`broker.runtime.assurance`). A crash before the end
asks every target again, and each knows which versions it has applied. Versions of one writer are applied one
after the other.

Memory is bounded for all targets together: those beyond the bound wait in a queue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from tailrace.broker.groups.group_directory import GroupDirectory
from tailrace.broker.partition.queue_partition import QueuePartition
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.topics import Topics
from tailrace.core.model.commands import Reply
from tailrace.core.model.group_facts import Target
from tailrace.core.model.identifiers import HAS_DELIVER_AT, BatchView, Refusal
from tailrace.core.model.internal_commands import ApplyStaged
from tailrace.core.publish.publish_rules import late_rows
from tailrace.core.staged.staged_batches import attempt_number
from tailrace.core.staged.staged_versions import FinishStaged
from tailrace.errors import NotFound
from tailrace.format import batch
from tailrace.format.frame import Buffer, Header, crc32c

log = logging.getLogger("tailrace.staged")

READ_BYTES_MAX = 128 * 1024 * 1024
"""Memory for staged batches on their way into the log, of all targets together."""
TARGET_BYTES_MAX = 16 * 1024 * 1024
"""Most that one target counts against that bound; large batches stay in the pages of their file."""
PARTED_BYTES_MAX = 8 * 1024 * 1024
"""Memory of one target for batches that are split into due and delayed rows. Batches beyond are delayed as a
whole; their due rows are released at the next tick."""
PAUSE_US_MIN = 100_000
PAUSE_US_MAX = 30_000_000

Place = tuple[str, int]
Part = tuple[BatchView, int, Buffer]
"""A batch to append: its view, checksum and body."""
Heard = Callable[[bool], None]
"""Called at the end of a round: whether all targets have confirmed."""


class _Roll:
    """One decided version on its way to its targets."""

    def __init__(self, writer: str, version: int, attempts: list[Target]) -> None:
        self.writer = writer
        self.version = version
        self.todo: dict[Place, list[str]] = {}
        for topic, partition, attempt in attempts:
            self.todo.setdefault((topic, partition), []).append(attempt)
        self.asked: set[Place] = set()
        self.waiting: list[Heard] = []
        self.pause_us = PAUSE_US_MIN


class StagedApply:
    """Applies the versions of all writers, one version at a time for each."""

    def __init__(self, topics: Topics, pump: Pump, coordinators: GroupDirectory) -> None:
        self._topics = topics
        self._pump = pump
        self._coordinators = coordinators
        self._rolls: dict[str, _Roll] = {}
        self._queue: deque[tuple[_Roll, Place]] = deque()
        self._bytes = 0

    def under_way(self, writer: str) -> bool:
        """Whether a version of the writer is being applied, or will be after a pause."""
        return writer in self._rolls

    def begin(self, writer: str, version: int, attempts: list[Target], heard: Heard) -> None:
        """Apply a version; if that is under way already, call `heard` at the end of the running round."""
        roll = self._rolls.get(writer)
        if roll is None:
            roll = self._rolls[writer] = _Roll(writer, version, attempts)
            roll.waiting.append(heard)
            self._round(roll)
            return
        assert roll.version == version, "the next version waits for the last"
        if roll.asked:
            roll.waiting.append(heard)
        else:
            heard(False)  # A round failed a moment ago, and the next one waits for its pause.

    def _round(self, roll: _Roll) -> None:
        """Ask every target that has not confirmed yet."""
        roll.asked = set(roll.todo)
        if not roll.asked:
            self._ended(roll)
            return
        self._queue.extend((roll, place) for place in roll.todo)
        self._advance()

    def _advance(self) -> None:
        while self._queue:
            roll, place = self._queue[0]
            runtime = self._runtime(roll, place)
            numbers = [attempt_number(roll.writer, attempt) for attempt in roll.todo[place]]
            size = 0 if runtime is None else min(runtime.state.staging.size(numbers), TARGET_BYTES_MAX)
            if self._bytes and self._bytes + size > READ_BYTES_MAX:
                return
            self._queue.popleft()
            if runtime is None:
                self._missed(roll, place)
            elif runtime.lost is not None:
                self._heard_of(roll, place)  # Its state was dropped: the next round asks it again.
            else:
                self._bytes += size
                self._read(roll, place, runtime, size)

    def _id(self, roll: _Roll, topic: str) -> int:
        """Id of the topic that the decision meant; 0 if the decision does not tell."""
        machine = self._coordinators.of(roll.writer)
        last = None if machine is None else machine.staged.last(roll.writer)
        return 0 if last is None else last.topic_ids.get(topic, 0)

    def _runtime(self, roll: _Roll, place: Place) -> QueuePartition | None:
        host = self._topics.find(place[0])
        if host is None or self._id(roll, place[0]) not in (0, host.info.id):
            return None
        return host.runtimes[place[1]] if place[1] < len(host.runtimes) else None

    def _missed(self, roll: _Roll, place: Place) -> None:
        """A target does not exist: its topic was deleted, or is merely unknown."""
        if self._topics.catalog.was_deleted(self._id(roll, place[0])):
            self._confirmed(roll, place)
            return
        text = "%s/%d is not known: version %d of writer %r waits for it"
        log.error(text, *place, roll.version, roll.writer)
        self._heard_of(roll, place)

    def _read(self, roll: _Roll, place: Place, runtime: QueuePartition, size: int) -> None:
        """Read the staged batches from the log, and submit them to the partition."""
        attempts, staging = roll.todo[place], runtime.state.staging
        entries: list[int] = []
        if staging.applied_version(roll.writer) < roll.version:
            each = [staging.entries([attempt_number(roll.writer, attempt)]) for attempt in attempts]
            entries = [entry for found in each for entry in found]
            if not all(each):
                text = "%s: version %d of writer %r was decided, and its staged batches are lost"
                log.error(text, runtime.name, roll.version, roll.writer)
        partition_log, want_keys, wall_us = runtime.log, runtime.options.key_index, self._pump.clock.wall_us()

        def work() -> list[Part]:
            return parted(partition_log.read_entries(entries) if entries else (), want_keys, wall_us)

        def read(result: Any, error: Exception | None) -> None:
            if error is not None:
                log.error("%s: staged batches cannot be read: %s", runtime.name, error)
                self._failed(roll, place, size)
                return
            views, crcs, bodies = ([part[at] for part in result] for at in range(3))
            command = ApplyStaged(roll.writer, roll.version, attempts, entries, views, crcs, bodies)
            runtime.submit(command, b"", runtime.surely(answered))

        def answered(reply: Reply, parts: Any) -> None:
            if isinstance(reply, Refusal) and reply.code != NotFound.code:
                log.warning("%s: a decided version is not applied yet: %s", runtime.name, reply.message)
                self._failed(roll, place, size)
            else:
                self._bytes -= size
                self._confirmed(roll, place)
                self._advance()

        self._pump.threads.read(work, read)

    def _confirmed(self, roll: _Roll, place: Place) -> None:
        del roll.todo[place]
        self._heard_of(roll, place)

    def _failed(self, roll: _Roll, place: Place, size: int) -> None:
        self._bytes -= size
        self._heard_of(roll, place)
        self._advance()

    def _heard_of(self, roll: _Roll, place: Place) -> None:
        roll.asked.discard(place)
        if not roll.asked:
            self._ended(roll)

    def _ended(self, roll: _Roll) -> None:
        """A round is over: tell the coordinator that all have it, or set the timer for the next round."""
        done = not roll.todo
        if done:
            del self._rolls[roll.writer]
            # If this is lost, all targets are asked again, and each says that it has the version.
            finish = FinishStaged(roll.writer, roll.version)
            self._coordinators.submit(roll.writer, finish, lambda reply, parts: None)
        else:
            self._pump.at(self._pump.clock.now_us() + roll.pause_us, lambda now_us: self._round(roll))
            roll.pause_us = min(2 * roll.pause_us, PAUSE_US_MAX)
        waiting, roll.waiting = roll.waiting, []
        for heard in waiting:
            heard(done)


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
