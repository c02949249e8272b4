"""One partition as a pure state machine: `decide` reads and gives facts, `apply` is the only mutator.

A publish is checked in this order, and the first step that has an answer gives it:

1. the producer's sequence: a retry gets its first result, whatever else the request says;
2. limits of the batch and of its rows, and options that the topic does not support;
3. dedup ids: duplicates are filtered out, and the next steps are about the remaining rows;
4. the expected sequence of the partition, then those of keys;
5. room, if the topic is a ring.

A refused batch uses up neither offsets nor the producer's sequence. Windows count in append time, which never
goes back: ``append_time = max(now, last append_time)``. So replaying the facts gives the same state, byte for
byte. `now` is the time of the partition (see `core.partition_clock` for what counts in which time); absolute
times given by users are compared with the wall clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.core.collections.hash_table import Buffer
from tailrace.core.delay.delay_queue import DelayQueue
from tailrace.core.log_head import LogHead
from tailrace.core.lost_offsets import LostOffsets
from tailrace.core.model.commands import Claimed, ClaimProducer, Done, Publish, Published, TrimTopic
from tailrace.core.model.decision import NOTHING, Decision
from tailrace.core.model.facts import (
    Appended,
    Delayed,
    Fact,
    MessagesLost,
    ProducerAdvanced,
    ProducerClaimed,
    Stored,
    Trimmed,
)
from tailrace.core.model.identifiers import BatchView, Refusal
from tailrace.core.model.internal_commands import Look, PublishBatch, RecordLoss, Sweep
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.publish.capacity import Capacity
from tailrace.core.publish.dedup import DedupWindow, Filtered
from tailrace.core.publish.key_index import KeyIndex
from tailrace.core.publish.producers import BatchResult, Producers, out_of_range
from tailrace.core.publish.publish_rules import late_rows, mixed, over_limit, repeat_late, unfit, unplaced
from tailrace.core.queue.group_queues import GroupQueues
from tailrace.core.salvage import salvage
from tailrace.core.staged.staged_batches import StagedBatches
from tailrace.errors import Corrupt, Fenced, InvalidRequest, SequenceConflict

SNAPSHOT_VERSION = 1


class _SnapshotHead(msgspec.Struct, frozen=True, array_like=True):
    """The head of a snapshot: plain state, and the lengths of the buffers of each part."""

    version: int
    start_offset: int
    end_offset: int
    append_time_us: int
    timestamp_max_us: int
    leader_epoch: int
    producers: list[int]
    dedup: list[int]
    keys: list[int] | None
    queues: list[int] = []
    timetable: list[int] = []
    staging: list[int] = []
    ring: list[int] = []
    lost: list[int] = []


class Partition:
    """The state of one partition. `decide` never changes it; `apply` takes every fact, live and at replay."""

    def __init__(self, options: TopicOptions) -> None:
        self.head = LogHead(options)
        self.timestamp_max_us = 0
        self.leader_epoch = 0
        self.producers = Producers()
        self.dedup = DedupWindow(options.dedup_window_ms, options.dedup_max)
        self.keys = KeyIndex(options.key_index_max) if options.key_index else None
        self.lost = LostOffsets(self.head)
        self.queues = GroupQueues(self.head, self.lost)
        self.timetable = DelayQueue(self.head)
        self.staging = StagedBatches(self.head, self.keys)
        self.ring = Capacity(self.head, self.queues.places)
        self._decide: dict[type, Callable[[Any, TurnInput], Decision]] = {
            PublishBatch: self._publish,
            ClaimProducer: self._claim,
            TrimTopic: self._trim,
            Sweep: self._sweep,
            RecordLoss: self.lost.decide,
            Look: _look,
        }
        self._apply: dict[type, Callable[[Any], None]] = {
            Appended: self._appended,
            Delayed: self._scheduled,
            ProducerClaimed: self._producer_claimed,
            ProducerAdvanced: self._producer_advanced,
            Trimmed: self._trimmed,
            MessagesLost: self._messages_lost,
        }
        for part in (self.queues, self.timetable, self.staging):
            self._decide.update(dict.fromkeys(part.COMMANDS, part.decide))
            self._apply.update(dict.fromkeys(part.FACTS, part.apply))

    @property
    def options(self) -> TopicOptions:
        """The options of the topic."""
        return self.head.options

    @property
    def start_offset(self) -> int:
        """Where the readable log begins."""
        return self.head.start_offset

    @property
    def end_offset(self) -> int:
        """The offset that the next message will have."""
        return self.head.end_offset

    @property
    def append_time_us(self) -> int:
        """The time of the newest fact."""
        return self.head.append_time_us

    def bare(self, start_offset: int, end_offset: int) -> Partition:
        """A partition without state, but for where its log begins and ends, and its lost offsets."""
        partition = Partition(self.options)
        partition.head.load(start_offset, end_offset)
        partition.ring.load(())
        partition.lost.load(self.lost.spans)
        return partition

    def reconfigure(self, options: TopicOptions) -> None:
        """Take over changed options of the topic; earlier decisions stay."""
        assert options.key_index == self.options.key_index, "key_index cannot change"
        self.head.reconfigure(options)
        for window in (self.dedup, self.timetable.dedup.waiting):
            window.window_us = options.dedup_window_ms * 1000
            window.entries_max = options.dedup_max
        if self.keys is not None:
            self.keys.reconfigure(options.key_index_max)

    def lowest_entry(self) -> int | None:
        """The entry of the oldest frame outside of the readable log that is still needed; None if there is
        none."""
        needed = (self.timetable.lowest_entry(), self.staging.lowest_entry())
        return min((entry for entry in needed if entry is not None), default=None)

    # ---------------------------------------------------------------------------------------------- decide

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        """Decide a command from the state and the input of the turn alone."""
        if turn.now_us < self.head.append_time_us:
            turn = turn.not_before(self.head.append_time_us)
        decision = self._decide[type(command)](command, turn)
        return self.ring.admit(decision) if decision.facts else decision

    def _publish(self, command: PublishBatch, turn: TurnInput) -> Decision:
        publish, view = command.publish, command.view
        time_us, wall_us = turn.now_us, turn.wall_us
        if publish.producer_id:
            known = self.producers.check(
                publish.producer_id, publish.producer_epoch, publish.producer_sequence, time_us
            )
            if known is not None:
                return Decision(NOTHING, known if isinstance(known, Refusal) else self._repeat(view, known))
        elif publish.producer_epoch or publish.producer_sequence:
            # They mean nothing, and are stored all the same: a number without room would stop the partition.
            wrong = out_of_range(0, publish.producer_epoch, publish.producer_sequence)
            if wrong is not None:
                return Decision(NOTHING, wrong)
        problem = over_limit(view, self.options, wall_us) or unfit(publish, view, self.options)
        if problem is not None:
            return Decision(NOTHING, problem)
        late = late_rows(view, wall_us)
        if late is not None and (problem := unplaced(publish)) is not None:
            return Decision(NOTHING, problem)
        keep = duplicates = None
        if view.dedup_ids is not None:
            found = self.dedup.find(
                view.dedup_ids, self.end_offset, time_us, late=late, others=self.timetable.dedup
            )
            if isinstance(found, Refusal):
                return Decision(NOTHING, found)
            if found is not None:
                if not len(found.keep):
                    return self._all_duplicates(publish, found, time_us, wall_us)
                if publish.expected_sequence:
                    return Decision(NOTHING, mixed(found))
                keep, duplicates = found.keep, found.duplicates
                view, late = view.take(keep), None if late is None else late[keep]
        problem = self._unexpected(publish, view, keep)
        if problem is not None:
            return Decision(NOTHING, problem)
        producer = publish.producer_id, publish.producer_epoch, publish.producer_sequence
        if late is None or not late.any():
            stored = _stored(command, view, keep)
            appended = Appended(self.end_offset, stored, time_us, *producer, wall_us=wall_us)
            return Decision((appended,), Published(self.end_offset, time_us, duplicates), keep)
        rows = np.arange(view.count) if keep is None else keep
        waiting = rows[late].tolist()
        if late.all():
            stored = _stored(command, view, keep)
            scheduled = Delayed(turn.next_entry, stored, time_us, *producer, wall_us=wall_us)
            return Decision((scheduled,), Published(-1, time_us, duplicates, waiting), late=keep)
        # The first frame of the group is the scheduled one; the producer's sequence counts once.
        waits, goes = (
            _stored(command, view.take(np.flatnonzero(chosen)), rows[chosen]) for chosen in (late, ~late)
        )
        scheduled = Delayed(turn.next_entry, waits, time_us, wall_us=wall_us)
        appended = Appended(self.end_offset, goes, time_us, *producer, wall_us=wall_us)
        reply = Published(self.end_offset, time_us, duplicates, waiting)
        return Decision((scheduled, appended), reply, keep=rows[~late], late=rows[late])

    def _repeat(self, view: BatchView, result: BatchResult) -> Published:
        """The answer to a retry: the first result. The dedup window knows which rows were duplicates then."""
        late = late_rows(view, result.wall_us)
        if late is not None:
            return repeat_late(view, late, result, self.dedup, self.timetable.dedup)
        if view.count == result.count:
            return Published(result.base_offset, result.append_time_us)
        if view.dedup_ids is None:  # This is not the same batch as before: return only what is known.
            duplicates = [(row, -1) for row in range(view.count)]
        else:
            duplicates = self.dedup.recall(view.dedup_ids, result.base_offset, result.count)
        base_offset = result.base_offset if result.count else duplicates[0][1]
        return Published(base_offset, result.append_time_us, duplicates)

    def _all_duplicates(self, publish: Publish, found: Filtered, time_us: int, wall_us: int) -> Decision:
        """All rows are duplicates: only the producer's sequence is used up. The base offset in the reply is
        that of the first row."""
        reply = Published(found.duplicates[0][1], time_us, found.duplicates)
        if not publish.producer_id:
            return Decision(NOTHING, reply, found.keep)
        fact = ProducerAdvanced(
            publish.producer_id,
            publish.producer_epoch,
            publish.producer_sequence,
            self.end_offset,
            0,
            time_us,
            wall_us,
        )
        return Decision((fact,), reply, found.keep)

    def _unexpected(
        self, publish: Publish, view: BatchView, keep: npt.NDArray[np.int64] | None
    ) -> Refusal | None:
        """Refuse expected sequences that do not hold, and keys for which the index has no room."""
        if publish.expected_sequence and publish.expected_sequence != self.end_offset + 1:
            return Refusal(
                SequenceConflict.code,
                f"sequence {publish.expected_sequence} was expected, the partition is at {self.end_offset}",
                details={"current_sequence": self.end_offset, "expected_sequence": publish.expected_sequence},
            )
        expected = publish.expected_key_sequences
        if self.keys is not None and view.keys is not None:
            if expected is not None and keep is not None:
                expected = [expected[row] for row in keep.tolist()]
            return self.keys.check(view.keys, expected, keep)
        return None

    def _claim(self, command: ClaimProducer, turn: TurnInput) -> Decision:
        if not command.producer_id:
            return Decision(NOTHING, Refusal(InvalidRequest.code, "producer_id 0 stands for no producer"))
        epoch = self.producers.next_epoch(command.producer_id, turn.now_us)
        if isinstance(epoch, Refusal):
            return Decision(NOTHING, epoch)
        if command.epoch is not None and command.epoch < epoch - 1:
            text = f"epoch {command.epoch} of the producer is fenced by {epoch - 1}"
            return Decision(NOTHING, Refusal(Fenced.code, text, details={"epoch": epoch - 1}))
        return Decision((ProducerClaimed(command.producer_id, epoch, turn.now_us),), Claimed(epoch))

    def _trim(self, command: TrimTopic, turn: TurnInput) -> Decision:
        if not 0 <= command.offset <= self.end_offset:
            text = f"offset {command.offset} is not in the partition, which goes from {self.start_offset}"
            return Decision(NOTHING, Refusal(InvalidRequest.code, f"{text} to {self.end_offset}"))
        return self._drop_below(command.offset)

    def _sweep(self, command: Sweep, turn: TurnInput) -> Decision:
        offset = min(command.retention_offset, self.end_offset)
        if self.options.ephemeral:
            offset = max(offset, min(self.ring.floor(), command.committed))
        if command.again and offset <= self.start_offset:
            return Decision((Trimmed(self.start_offset),), Done())
        return self._drop_below(offset)

    def _drop_below(self, offset: int) -> Decision:
        return Decision((Trimmed(offset),) if offset > self.start_offset else NOTHING, Done())

    # ----------------------------------------------------------------------------------------------- apply

    def apply(self, fact: Stored | Fact) -> None:
        """Apply a fact; the same for new facts and at replay."""
        self._apply[type(fact)](fact)

    def apply_after_loss(self, fact: Stored | Fact) -> None:
        """Like `apply`, if facts or messages before this one are lost; see `core.salvage`."""
        believed = salvage(fact, self.head, self.producers, self.staging, self.queues)
        if believed is not None:
            self.apply(believed)

    def lose(self, end_offset: int) -> None:
        """At replay: the entries here are lost, with the messages up to an offset."""
        if end_offset > self.head.end_offset:
            self.head.extend(end_offset)
            self.queues.traits.lost(end_offset)
            self.ring.appended(end_offset, 0)

    def _appended(self, fact: Appended) -> None:
        base_offset, view, time_us = fact.base_offset, fact.view, fact.append_time_us
        head = self.head
        assert base_offset == head.end_offset, f"append at {base_offset}, the end is {head.end_offset}"
        assert view.count > 0
        assert time_us >= head.append_time_us, "append time goes back"
        if view.dedup_ids is not None:
            if fact.released:
                self.timetable.land(view.dedup_ids, base_offset, time_us, fact.wall_us or time_us)
            else:
                self.dedup.add(view.dedup_ids, base_offset, time_us)
        if view.keys is not None and self.keys is not None:
            self.keys.add(view.keys)
        if fact.producer_id:
            result = BatchResult(base_offset, view.count, time_us, fact.wall_us or time_us)
            self.producers.advance(fact.producer_id, fact.producer_epoch, fact.producer_sequence, result)
        head.end_offset = end_offset = base_offset + view.count
        head.append_time_us = time_us
        if view.timestamp_max_us > self.timestamp_max_us:
            self.timestamp_max_us = view.timestamp_max_us
        self.queues.appended(fact)
        self.ring.appended(end_offset, view.nbytes)

    def _scheduled(self, fact: Delayed) -> None:
        assert fact.append_time_us >= self.append_time_us, "append time goes back"
        if fact.producer_id:
            wall_us = fact.wall_us or fact.append_time_us
            result = BatchResult(-1, fact.view.count, fact.append_time_us, wall_us)
            self.producers.advance(fact.producer_id, fact.producer_epoch, fact.producer_sequence, result)
        self.head.pass_time(fact.append_time_us)
        self.timetable.schedule(fact)

    def _producer_claimed(self, fact: ProducerClaimed) -> None:
        self.producers.claim(fact.producer_id, fact.epoch, fact.time_us)
        self.head.pass_time(fact.time_us)

    def _producer_advanced(self, fact: ProducerAdvanced) -> None:
        result = BatchResult(fact.base_offset, fact.count, fact.time_us, fact.wall_us or fact.time_us)
        self.producers.advance(fact.producer_id, fact.epoch, fact.sequence, result)
        self.head.pass_time(fact.time_us)

    def _trimmed(self, fact: Trimmed) -> None:
        assert fact.offset <= self.end_offset, f"trim to {fact.offset}, the end is {self.end_offset}"
        if fact.offset > self.start_offset:
            self.head.begin(fact.offset)
            self.queues.trimmed(fact.offset)
            self.ring.trimmed(fact.offset)
            self.lost.trimmed(fact.offset)

    def _messages_lost(self, fact: MessagesLost) -> None:
        self.lost.apply(fact)
        self.queues.lost(fact.spans, fact.time_us)

    # -------------------------------------------------------------------------------------------- snapshot

    def freeze(self) -> Callable[[], list[Buffer]]:
        """Capture the state now; the returned function encodes it later, on any thread: a small head, then
        the columns as they lie in memory."""
        small = (
            self.start_offset,
            self.end_offset,
            self.append_time_us,
            self.timestamp_max_us,
            self.leader_epoch,
        )
        producers, dedup = self.producers.buffers(), self.dedup.buffers()
        keys = None if self.keys is None else self.keys.buffers()
        queues = self.queues.freeze()
        others = [part.buffers() for part in (self.timetable, self.staging, self.ring)]
        lost = list(self.lost.spans)

        def thaw() -> list[Buffer]:
            parts = [queues(), *others]
            head = _SnapshotHead(
                SNAPSHOT_VERSION,
                *small,
                [len(buffer) for buffer in producers],
                [len(buffer) for buffer in dedup],
                None if keys is None else [len(buffer) for buffer in keys],
                *([len(buffer) for buffer in part] for part in parts),
            )
            packed = msgspec.msgpack.encode(msgspec.structs.replace(head, lost=lost))
            columns = [buffer for part in (producers, dedup, keys or (), *parts) for buffer in part]
            return [len(packed).to_bytes(8, "little"), packed, *columns]

        return thaw

    def snapshot(self) -> list[Buffer]:
        """A copy of the whole state."""
        return self.freeze()()

    @classmethod
    def restore(cls, options: TopicOptions, chunks: Sequence[Buffer]) -> Partition:
        """Restore the partition from a snapshot, cut into chunks anywhere; raises `Corrupt`."""
        data = memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        partition = cls(options)
        try:
            body = 8 + int.from_bytes(data[:8], "little")
            head = msgspec.msgpack.decode(data[8:body], type=_SnapshotHead)
            if head.version != SNAPSHOT_VERSION:
                raise Corrupt(f"snapshot version {head.version}: this release reads {SNAPSHOT_VERSION}")
            if (head.keys is None) != (partition.keys is None):
                raise Corrupt("the snapshot does not fit the topic's key_index")
            lengths = [head.producers, head.dedup, head.keys or [], head.queues, head.timetable]
            lengths += [head.staging, head.ring]
            columns = iter(_cut(data[body:], [length for part in lengths for length in part]))
            producers, dedup, keys, queues, timetable, staging, ring = (
                [next(columns) for _ in part] for part in lengths
            )
            partition.head.load(head.start_offset, head.end_offset, head.append_time_us)
            partition.timestamp_max_us, partition.leader_epoch = head.timestamp_max_us, head.leader_epoch
            partition.producers.load(producers)
            partition.dedup.load(dedup)
            if partition.keys is not None:
                partition.keys.load(keys)
            partition.queues.load(queues)
            partition.timetable.load(timetable)
            partition.staging.load(staging)
            partition.ring.load(ring)
            partition.lost.load(head.lost)
        except (msgspec.MsgspecError, ValueError) as error:
            raise Corrupt(f"the snapshot cannot be read: {error}") from error
        return partition

    def check(self) -> None:
        """Assert the invariants of the partition and of its parts; for tests and simulation."""
        assert 0 <= self.start_offset <= self.end_offset
        assert self.append_time_us >= 0
        self.producers.verify()
        self.dedup.verify()
        if self.keys is not None:
            self.keys.verify()
        self.queues.verify()
        self.timetable.verify()
        self.staging.verify()
        self.ring.verify()
        self.lost.verify()


def _look(command: Look, turn: TurnInput) -> Decision:
    return Decision(NOTHING, Done())


def _stored(command: PublishBatch, view: BatchView, rows: npt.NDArray[np.int64] | None) -> BatchView:
    """The view of the rows that are stored, with the size of their body; None: all rows."""
    if rows is None or command.body is None:
        return view
    return msgspec.structs.replace(view, nbytes=command.body.nbytes(rows))


def _cut(data: memoryview, lengths: list[int]) -> list[memoryview]:
    if sum(lengths) != len(data) or min(lengths) < 0:
        raise Corrupt(f"the snapshot has {len(data)} bytes behind its head, {sum(lengths)} are listed")
    pieces, at = [], 0
    for length in lengths:
        pieces.append(data[at : at + length])
        at += length
    return pieces
