"""The dead-letter writer: appends dying messages to `<topic>.dlq`, and only then settles them.

A dying message is not deliverable, and keeps its place in the order of its key until it is settled. Each step
is synced before the next begins, whatever the topics promise (`broker.runtime.assurance`):

    1  `Dying` at the origin
    2  the dead letter in `<topic>.dlq`, with a dedup id of topic id, partition, offset, group and time
    3  `Buried` at the origin: the message is settled

    power fails before 1          the message lives, and has no dead letter
    power fails between 1 and 2   the restart finds the message dying, and appends the dead letter
    power fails between 2 and 3   the restart appends it again; the dedup id makes that a duplicate

A failed step is tried again for ever, with pauses up to a minute, because a message that was given up would
be lost. A message that cannot be read is left out until the next try, so that the others go on. Dead letters
of a dead-letter topic are only settled: there is no `.dlq.dlq`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tailrace.broker.deadletter.dead_letter_batch import DeadLetterBatch, DeadLetterOrigin, DyingRow, write
from tailrace.broker.metrics import Metrics
from tailrace.broker.runtime.framing import publish_batch
from tailrace.broker.runtime.partition_runtime import PartitionRuntime, refuse
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.topics import Topics
from tailrace.core.model.commands import AlterTopic, CreateTopic, Done, Publish, Published, Reply
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.internal_commands import BuryDone
from tailrace.core.model.topic_options import DEAD_LETTERS, decode_folder
from tailrace.errors import Corrupt
from tailrace.format import batch
from tailrace.ports import PartitionLog

_log = logging.getLogger("tailrace.burial")

KEPT_MS = 14 * 24 * 3_600_000
DEDUP_MAX = 10_000_000
ROWS_MAX = 500
RETRY_US = 1_000_000
RETRY_US_MAX = 60_000_000


class DeadLetterWriter:
    """Writes the dead letters of all partitions."""

    def __init__(self, topics: Topics, pump: Pump, metrics: Metrics) -> None:
        self.topics = topics
        self.pump = pump
        self.metrics = metrics
        self._funerals: dict[PartitionRuntime, _DyingMessages] = {}

    def take_up(self, runtime: PartitionRuntime) -> None:
        """A partition may have dying messages: begin, or go on."""
        funeral = self._funerals.get(runtime)
        if funeral is None:
            queues = runtime.state.queues
            if not any(queues.dying(group, 1) for group in queues.names()):
                return
            funeral = self._funerals[runtime] = _DyingMessages(self, runtime)
        funeral.go_on()

    def over(self, runtime: PartitionRuntime) -> None:
        """A partition has no dying messages any more."""
        del self._funerals[runtime]


class _DyingMessages:
    """Writes the dying messages of one partition, a batch at a time."""

    def __init__(self, burial: DeadLetterWriter, runtime: PartitionRuntime) -> None:
        self._burial = burial
        self._topics = burial.topics
        self._runtime = runtime
        self._dead_letters = runtime.topic + DEAD_LETTERS
        _, self._topic_id = decode_folder(runtime.name.rpartition("/")[0])
        self._busy = False
        self._failures = 0
        self._unreadable: set[tuple[str, int]] = set()
        """Group and offset of messages that could not be read; left out until the next retry."""

    def go_on(self) -> None:
        """Begin the next batch, unless one is under way or waits for a retry."""
        if not self._busy:
            self._busy = True
            self._next()

    def _next(self) -> None:
        runtime = self._runtime
        if runtime.gone is not None:
            self._burial.over(runtime)
            return
        queues = runtime.state.queues
        for group in queues.names():
            rows = queues.dying(group, ROWS_MAX + len(self._unreadable))
            rows = [row for row in rows if (group, row.offset) not in self._unreadable][:ROWS_MAX]
            if rows:
                self._begin(DeadLetterOrigin(runtime.topic, runtime.partition, group, self._topic_id), rows)
                return
        if self._unreadable:
            self._retry(None)
        else:
            self._burial.over(runtime)

    def _begin(self, origin: DeadLetterOrigin, rows: Sequence[DyingRow]) -> None:
        def certain(reply: Reply, parts: Any) -> None:
            if type(reply) is Refusal:
                self._retry(reply)
            elif origin.topic.endswith(DEAD_LETTERS):
                self._settle_here(origin, rows)
            else:
                log, end = runtime.log, runtime.end_offset
                runtime.pump.threads.read(
                    lambda: write(log, end, origin, rows), lambda letters, error: read(log, letters, error)
                )

        def read(log: PartitionLog, letters: DeadLetterBatch, error: Exception | None) -> None:
            if error is not None:
                self._retry(refuse(error))
                return
            self._unreadable.update((origin.group, offset) for offset in letters.unreadable)
            if letters.problem is not None:
                _log.error("%s: a dying message cannot be read: %s", runtime.name, letters.problem)
                if isinstance(letters.problem, Corrupt):
                    runtime.damaged(letters.problem, log)
            if letters.header is None:
                self._next()
            else:
                self._publish(origin, letters)

        runtime = self._runtime
        # Wait until `Dying` is synced: before that a crash could bring the message back to life.
        runtime.answer(runtime.surely(certain), Done())

    def _settle_here(self, origin: DeadLetterOrigin, rows: Sequence[DyingRow]) -> None:
        """Settle dying dead letters: they have no dead letters of their own."""
        for row in rows:
            place = f"{origin.topic}/{origin.partition}/{row.offset}"
            text = "%s is settled for group %r: it died (%s), and dead letters have no dead letters"
            _log.warning(text, place, origin.group, row.reason)
        self._settle(origin, [row.offset for row in rows], "", [])

    def _publish(self, origin: DeadLetterOrigin, letters: DeadLetterBatch) -> None:
        host = self._topics.find(self._dead_letters)
        if host is None or len(host.runtimes) <= origin.partition:
            self._make_room(origin, letters)
            return
        target, header = host.runtimes[origin.partition], letters.header
        assert header is not None

        def published(reply: Reply, parts: Any) -> None:
            if isinstance(reply, Published):
                known = dict(reply.duplicates or ())
                places: list[int] = []
                next_offset = reply.base_offset
                for row in range(len(letters.offsets)):
                    offset = known.get(row)
                    if offset is None:
                        offset, next_offset = next_offset, next_offset + 1
                    places += (origin.partition, offset)
                self._settle(origin, letters.offsets, self._dead_letters, places)
            else:
                assert isinstance(reply, Refusal)
                self._retry(reply)

        # The view has no sizes: a message within the limits of its own topic always fits, with the added
        # headers, too.
        view = batch.view_of(header, letters.body, want_keys=target.options.key_index)
        publish = Publish(self._dead_letters, origin.partition, header.columns, header.body_crc)
        target.submit(publish_batch(publish, view, letters.body), letters.body, target.surely(published))

    def _make_room(self, origin: DeadLetterOrigin, letters: DeadLetterBatch) -> None:
        """Create the dead-letter topic, or add partitions until it has as many as its origin."""
        host = self._topics.find(origin.topic)
        if host is None:
            self._next()  # The topic was deleted meanwhile.
            return
        options = host.info.options
        request: CreateTopic | AlterTopic
        if self._topics.find(self._dead_letters) is None:
            wanted = {
                "partitions": options.partitions,
                "storage": options.storage,
                "durability": options.durability,
                "sync_interval_ms": options.sync_interval_ms,
                "message_bytes_max": options.message_bytes_max,
                "retention_ms": KEPT_MS,
                "dedup_window_ms": KEPT_MS,
                "dedup_max": DEDUP_MAX,
            }
            request = CreateTopic(self._dead_letters, wanted, if_missing=True)
        else:
            request = AlterTopic(self._dead_letters, {"partitions": options.partitions})

        def changed(reply: Reply, parts: Any) -> None:
            if isinstance(reply, Refusal):
                self._retry(reply)
            else:
                self._publish(origin, letters)

        self._topics.change(request, changed, internal=True)

    def _settle(
        self, origin: DeadLetterOrigin, offsets: Sequence[int], topic: str, places: list[int]
    ) -> None:
        """The dead letters are written: settle the messages at their origin."""
        spans: list[int] = []
        for offset in offsets:
            if spans and spans[-1] == offset:
                spans[-1] = offset + 1
            else:
                spans += (offset, offset + 1)

        def settled(reply: Reply, parts: Any) -> None:
            if isinstance(reply, Refusal):
                self._retry(reply)
            else:
                self._failures = 0
                self._next()

        self._runtime.submit(BuryDone(origin.group, spans, topic, places), b"", settled)

    def _retry(self, refusal: Refusal | None) -> None:
        """Try again later, for ever, because a message that was given up would be lost."""
        self._failures += 1
        self._burial.metrics.burial_failed(self._runtime.topic)
        delay_us = min(RETRY_US << min(self._failures - 1, 10), RETRY_US_MAX)
        if refusal is not None:
            text = "%s: the dead letters cannot be written, once more in %.0f s: %s"
            _log.warning(text, self._runtime.name, delay_us / 1e6, refusal.message)
        self._burial.pump.at(self._burial.pump.clock.now_us() + delay_us, self._retried)

    def _retried(self, now_us: int) -> None:
        self._unreadable.clear()
        self._next()
