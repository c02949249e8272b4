"""Dead letters: dying messages are appended to `<topic>.dlq`, and only then settled.

A dying message is not deliverable, and keeps its place in the order of its key until it is settled. Each step
is synced before the next begins, whatever the topics promise:

    1  `Dying` at the origin
    2  the dead letter in `<topic>.dlq`, with a dedup id of topic id, partition, offset, group and time
    3  `Buried` at the origin: the message is settled

    power fails before 1          the message lives, and has no dead letter
    power fails between 1 and 2   the restart finds the message dying, and appends the dead letter
    power fails between 2 and 3   the restart appends it again; the dedup id makes that a duplicate

A failed step is tried again for ever, with pauses up to a minute, because a message that was given up would
be lost. A message that cannot be read is left out until the next try, so that the others go on. Dead letters
of a dead-letter topic are only settled: there is no `.dlq.dlq`.

One batch is under way at a time, of messages of one group. Its steps, by the tags of their effects:

    sync ──▶ read ──▶ append ──▶ settle ──▶ the next batch
                      ▲    │
                      └─ room: the topic of the dead letters is created, or gets more partitions
    any of them refused ──▶ retry, after a pause
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import msgspec

from tailrace.core.model.commands import AlterTopic, CreateTopic, Published, Reply
from tailrace.core.model.facts import Dying
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.model.internal_commands import BuryDone, Look, PublishBatch
from tailrace.core.model.topic_options import DEAD_LETTERS
from tailrace.core.process.process import (
    After,
    Answered,
    Change,
    Count,
    Due,
    Effect,
    Event,
    Found,
    Log,
    Now,
    Read,
    Submit,
)
from tailrace.core.queue.ledger_stats import Dead

KEPT_MS = 14 * 24 * 3_600_000
DEDUP_MAX = 10_000_000
ROWS_MAX = 500
RETRY_US = 1_000_000
RETRY_US_MAX = 60_000_000


class DyingMessages(Protocol):
    """The state of the home partition that this process is derived from."""

    def names(self) -> list[str]:
        """The groups of the partition."""
        ...

    def dying(self, group: str, limit: int) -> list[Dead]:
        """The first `limit` messages of a group on their way to the dead letters."""
        ...


class DeadLetterOrigin(msgspec.Struct, frozen=True):
    """The partition and the group in which messages are dying."""

    topic: str
    partition: int
    group: str
    topic_id: int
    """Tells the topic from a later one of the same name."""


class ReadDying(msgspec.Struct, frozen=True):
    """Read dying messages from the log, and make a batch of dead letters for the topic `dead_letters`."""

    origin: DeadLetterOrigin
    rows: list[Dead]
    dead_letters: str


class DeadLettersRead(msgspec.Struct, frozen=True, eq=False):
    """A batch of dead letters, made of the messages at `offsets`. Those at `unreadable` could not be read,
    and `problem` says why; `publish` is None when none could be read. Its view has the keys."""

    offsets: list[int]
    unreadable: list[int]
    publish: PublishBatch | None = None
    body: bytes | bytearray | memoryview = b""
    problem: str = ""


class DeadLetterProcess:
    """Writes the dead letters of one partition, a batch at a time."""

    WATCHES = frozenset((Dying,))

    def __init__(self, home: TopicPartition, topic_id: int, queues: DyingMessages) -> None:
        self._home = home
        self._topic_id = topic_id
        self._queues = queues
        self._dead_letters = TopicPartition(home.topic + DEAD_LETTERS, home.partition)
        self._busy = False
        """Whether a batch is under way, or waits for a retry."""
        self._failures = 0
        self._unreadable: set[tuple[str, int]] = set()
        """Group and offset of messages that could not be read; left out until the next retry."""
        self._group = ""
        self._rows: list[Dead] = []
        self._batch = DeadLettersRead([], [])
        self._answered: dict[Hashable, Callable[[Reply, Now], Sequence[Effect]]] = {
            "sync": self._death_synced,
            "room": self._room_made,
            "append": self._appended,
            "settle": self._settled,
        }

    def step(self, event: Event, now: Now) -> Sequence[Effect]:
        """See `Process.step`."""
        if isinstance(event, Answered):
            if isinstance(event.reply, Refusal):
                return self._retry(event.reply)
            return self._answered[event.tag](event.reply, now)
        if isinstance(event, Found):
            found = event.result
            return self._retry(found) if isinstance(found, Refusal) else self._read(found, now)
        if isinstance(event, Due):
            self._unreadable.clear()
            return self._next()
        return () if self._busy else self._next()  # Begun, or messages began to die.

    def _next(self) -> Sequence[Effect]:
        """Begin the next batch."""
        for group in self._queues.names():
            rows = self._queues.dying(group, ROWS_MAX + len(self._unreadable))
            rows = [row for row in rows if (group, row.offset) not in self._unreadable][:ROWS_MAX]
            if rows:
                self._busy, self._group, self._rows = True, group, rows
                # Before `Dying` is synced, a crash could bring the message back to life.
                return (Submit("sync", self._home, Look(), topic_id=self._topic_id),)
        if self._unreadable:
            return self._retry(None)
        self._busy = False
        return ()

    def _death_synced(self, reply: Reply, now: Now) -> Sequence[Effect]:
        # Some may have been settled or trimmed meanwhile; others that began to die are not synced yet.
        synced = {row.offset for row in self._rows}
        known = self._group in self._queues.names()
        dying = self._queues.dying(self._group, len(synced) + len(self._unreadable)) if known else []
        self._rows = [row for row in dying if row.offset in synced]
        if not self._rows:
            return self._next()
        if self._home.topic.endswith(DEAD_LETTERS):
            return self._settle_here()
        origin = DeadLetterOrigin(*self._home, self._group, self._topic_id)
        return (Read("read", ReadDying(origin, self._rows, self._dead_letters.topic)),)

    def _settle_here(self) -> Sequence[Effect]:
        """Settle dying dead letters: they have no dead letters of their own."""
        text = "{}/{} is settled for group {!r}: it died ({}), and dead letters have no dead letters"
        logged = [
            Log("warning", text.format(self._home, row.offset, self._group, row.reason)) for row in self._rows
        ]
        return (*logged, self._settle([row.offset for row in self._rows], "", []))

    def _read(self, batch: DeadLettersRead, now: Now) -> Sequence[Effect]:
        self._unreadable.update((self._group, offset) for offset in batch.unreadable)
        self._batch = batch
        logged: Sequence[Effect] = ()
        if batch.problem:
            logged = (Log("error", f"{self._home}: a dying message cannot be read: {batch.problem}"),)
        return (*logged, *(self._next() if batch.publish is None else self._append(now)))

    def _append(self, now: Now) -> Sequence[Effect]:
        target, batch = self._dead_letters, self._batch
        entry = now.catalog.topics.get(target.topic)
        if entry is None or entry.options.partitions <= target.partition:
            return self._make_room(now)
        publish = batch.publish
        assert publish is not None
        if not entry.options.key_index:
            view = msgspec.structs.replace(publish.view, keys=None)
            publish = msgspec.structs.replace(publish, view=view)
        return (Submit("append", target, publish, batch.body, entry.id),)

    def _make_room(self, now: Now) -> Sequence[Effect]:
        """Create the dead-letter topic, or add partitions until it has as many as its origin."""
        origin, name = now.catalog.topics.get(self._home.topic), self._dead_letters.topic
        if origin is None:
            return self._retry(None)  # The topic is being deleted, and this process with it.
        options = origin.options
        if name in now.catalog.topics:
            return (Change("room", AlterTopic(name, {"partitions": options.partitions})),)
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
        return (Change("room", CreateTopic(name, wanted, if_missing=True)),)

    def _room_made(self, reply: Reply, now: Now) -> Sequence[Effect]:
        return self._append(now)

    def _appended(self, reply: Reply, now: Now) -> Sequence[Effect]:
        """The dead letters are synced: settle the messages. Those that a crash had let through before are
        duplicates, and the reply says where they are."""
        assert isinstance(reply, Published)
        known = dict(reply.duplicates or ())
        places: list[int] = []
        next_offset = reply.base_offset
        for row in range(len(self._batch.offsets)):
            offset = known.get(row)
            if offset is None:
                offset, next_offset = next_offset, next_offset + 1
            places += (self._dead_letters.partition, offset)
        return (self._settle(self._batch.offsets, self._dead_letters.topic, places),)

    def _settle(self, offsets: Sequence[int], topic: str, places: list[int]) -> Submit:
        spans: list[int] = []
        for offset in offsets:
            if spans and spans[-1] == offset:
                spans[-1] = offset + 1
            else:
                spans += (offset, offset + 1)
        # No other log relies on this, and the next life would do it again.
        settle = BuryDone(self._group, spans, topic, places)
        return Submit("settle", self._home, settle, topic_id=self._topic_id, sure=False)

    def _settled(self, reply: Reply, now: Now) -> Sequence[Effect]:
        self._failures = 0
        return self._next()

    def _retry(self, refusal: Refusal | None) -> Sequence[Effect]:
        """Try again later, for ever, because a message that was given up would be lost."""
        self._busy = True
        self._failures += 1
        delay_us = min(RETRY_US << min(self._failures - 1, 10), RETRY_US_MAX)
        effects = (Count(), After("retry", delay_us))
        if refusal is None:
            return effects
        text = "{}: the dead letters cannot be written, once more in {:.0f} s: {}"
        return (Log("warning", text.format(self._home, delay_us / 1e6, refusal.message)), *effects)
