"""One partition as a pure state machine: `decide` reads and gives facts, `apply` is the only mutator.

A publish is looked at in this order, and the first "no" is the answer:

1. the producer's sequence: a retry gets its first result, whatever else the request says;
2. limits of the batch and of its rows, options that the topic cannot give;
3. dedup ids: duplicates are filtered out; what follows is about the rows that are left;
4. the expected sequence of the partition, then those of keys.

A refused batch uses up neither offsets nor the producer's sequence. Windows go by append time, which never
goes back: ``append_time = max(now, last append_time)``; so replaying the facts gives the same state, byte
for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tailrace.core.commands import Claimed, ClaimProducer, Done, Publish, Published, Reply, TrimTopic
from tailrace.core.dedup import DedupWindow, Filtered
from tailrace.core.facts import Appended, Fact, ProducerAdvanced, ProducerClaimed, Trimmed
from tailrace.core.keys import KeyIndex
from tailrace.core.model import (
    ANY_KEY_SEQUENCE,
    BATCH_BYTES_MAX,
    BATCH_ROWS_MAX,
    HAS_DEDUP_ID,
    HAS_DELIVER_AT,
    HAS_KEY,
    HAS_OFFSET_DELTA,
    HEADER_BYTES_MAX,
    KEY_BYTES_MAX,
    TIMESTAMP_AHEAD_US_MAX,
    BatchView,
    Refusal,
)
from tailrace.core.producers import BatchResult, Producers
from tailrace.core.table import Buffer
from tailrace.core.topics import DURABILITIES, TopicOptions
from tailrace.errors import Corrupt, Fenced, InvalidRequest, SequenceConflict, TooLarge

SNAPSHOT_VERSION = 1
NOTHING: tuple[Appended | Fact, ...] = ()


class PublishBatch(msgspec.Struct, frozen=True, eq=False):
    """A publish with the view of its body, which the shell has derived from the body itself."""

    publish: Publish
    view: BatchView


class Sweep(msgspec.Struct, frozen=True):
    """Retention would keep everything from this offset on."""

    retention_offset: int


PartitionCommand = PublishBatch | ClaimProducer | TrimTopic | Sweep


class Decision(msgspec.Struct, frozen=True, eq=False):
    """What shall happen: facts to store and apply, in order, and the reply that leaves when they are safe.

    `keep` are the rows that are stored when some were duplicates: the body is to be cut down to them.
    """

    facts: tuple[Appended | Fact, ...]
    reply: Reply
    keep: npt.NDArray[np.int64] | None = None


class _SnapshotHead(msgspec.Struct, frozen=True, array_like=True):
    """In front of a snapshot: plain state, and the lengths of the buffers of each component."""

    version: int
    start_offset: int
    end_offset: int
    append_time_us: int
    timestamp_max_us: int
    leader_epoch: int
    producers: list[int]
    dedup: list[int]
    keys: list[int] | None


class Partition:
    """State of one partition. `decide` never changes it; `apply` takes every fact, live and at replay."""

    def __init__(self, options: TopicOptions) -> None:
        self.options = options
        self.start_offset = 0
        self.end_offset = 0
        self.append_time_us = 0
        self.timestamp_max_us = 0
        self.leader_epoch = 0
        self.producers = Producers()
        self.dedup = DedupWindow(options.dedup_window_ms, options.dedup_max)
        self.keys = KeyIndex(options.key_index_max) if options.key_index else None

    def reconfigure(self, options: TopicOptions) -> None:
        """The topic was altered; what was decided before stays."""
        assert options.key_index == self.options.key_index, "key_index cannot change"
        self.options = options
        self.dedup.window_us = options.dedup_window_ms * 1000
        self.dedup.entries_max = options.dedup_max
        if self.keys is not None:
            self.keys.entries_max = options.key_index_max

    # ---------------------------------------------------------------------------------------------- decide

    def decide(self, command: PartitionCommand, now_us: int) -> Decision:
        """What a command leads to, from the state and the time alone."""
        return _DECIDE[type(command)](self, command, now_us)

    def _publish(self, command: PublishBatch, now_us: int) -> Decision:
        publish, view = command.publish, command.view
        time_us = max(now_us, self.append_time_us)
        if publish.producer_id:
            known = self.producers.check(
                publish.producer_id, publish.producer_epoch, publish.producer_sequence, time_us
            )
            if known is not None:
                return Decision(NOTHING, known if isinstance(known, Refusal) else self._repeat(view, known))
        problem = _over_limit(view, self.options, now_us) or _unfit(publish, view, self.options)
        if problem is not None:
            return Decision(NOTHING, problem)
        keep = duplicates = None
        if view.dedup_ids is not None:
            found = self.dedup.find(view.dedup_ids, self.end_offset, time_us)
            if isinstance(found, Refusal):
                return Decision(NOTHING, found)
            if found is not None:
                if not len(found.keep):
                    return self._all_duplicates(publish, found, time_us)
                if publish.expected_sequence:
                    return Decision(NOTHING, _mixed(found))
                keep, duplicates = found.keep, found.duplicates
                view = view.take(keep)
        problem = self._unexpected(publish, view, keep)
        if problem is not None:
            return Decision(NOTHING, problem)
        appended = Appended(
            self.end_offset,
            view,
            time_us,
            publish.producer_id,
            publish.producer_epoch,
            publish.producer_sequence,
        )
        return Decision((appended,), Published(self.end_offset, time_us, duplicates), keep)

    def _repeat(self, view: BatchView, result: BatchResult) -> Published:
        """A retry: the first result again; the dedup window knows which rows were duplicates then."""
        if view.count == result.count:
            return Published(result.base_offset, result.append_time_us)
        if view.dedup_ids is None:  # not the batch that it was: say only what is known
            duplicates = [(row, -1) for row in range(view.count)]
        else:
            duplicates = self.dedup.recall(view.dedup_ids, result.base_offset, result.count)
        base_offset = result.base_offset if result.count else duplicates[0][1]
        return Published(base_offset, result.append_time_us, duplicates)

    def _all_duplicates(self, publish: Publish, found: Filtered, time_us: int) -> Decision:
        """Nothing is new: only the producer's sequence is used. The base offset told is the first row's."""
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
        )
        return Decision((fact,), reply, found.keep)

    def _unexpected(
        self, publish: Publish, view: BatchView, keep: npt.NDArray[np.int64] | None
    ) -> Refusal | None:
        """Expected sequences that do not hold, and keys that the index has no room for."""
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

    def _claim(self, command: ClaimProducer, now_us: int) -> Decision:
        if not command.producer_id:
            return Decision(NOTHING, Refusal(InvalidRequest.code, "producer_id 0 stands for no producer"))
        time_us = max(now_us, self.append_time_us)
        epoch = self.producers.next_epoch(command.producer_id, time_us)
        if isinstance(epoch, Refusal):
            return Decision(NOTHING, epoch)
        if command.epoch is not None and command.epoch < epoch - 1:
            text = f"epoch {command.epoch} of the producer is fenced by {epoch - 1}"
            return Decision(NOTHING, Refusal(Fenced.code, text, details={"epoch": epoch - 1}))
        return Decision((ProducerClaimed(command.producer_id, epoch, time_us),), Claimed(epoch))

    def _trim(self, command: TrimTopic, now_us: int) -> Decision:
        if not 0 <= command.offset <= self.end_offset:
            text = f"offset {command.offset} is not in the partition, which goes from {self.start_offset}"
            return Decision(NOTHING, Refusal(InvalidRequest.code, f"{text} to {self.end_offset}"))
        return self._drop_below(command.offset)

    def _sweep(self, command: Sweep, now_us: int) -> Decision:
        return self._drop_below(min(command.retention_offset, self.end_offset))

    def _drop_below(self, offset: int) -> Decision:
        return Decision((Trimmed(offset),) if offset > self.start_offset else NOTHING, Done())

    # ----------------------------------------------------------------------------------------------- apply

    def apply(self, fact: Appended | Fact) -> None:
        """Let a fact happen; the same for new ones, on followers and at replay."""
        _APPLY[type(fact)](self, fact)

    def _appended(self, fact: Appended) -> None:
        base_offset, view, time_us = fact.base_offset, fact.view, fact.append_time_us
        assert base_offset == self.end_offset, f"append at {base_offset}, the end is {self.end_offset}"
        assert view.count > 0
        assert time_us >= self.append_time_us, "append time goes back"
        if view.dedup_ids is not None:
            self.dedup.add(view.dedup_ids, base_offset, time_us)
        if view.keys is not None and self.keys is not None:
            self.keys.add(view.keys)
        if fact.producer_id:
            result = BatchResult(base_offset, view.count, time_us)
            self.producers.advance(fact.producer_id, fact.producer_epoch, fact.producer_sequence, result)
        self.end_offset = base_offset + view.count
        self.append_time_us = time_us
        if view.timestamp_max_us > self.timestamp_max_us:
            self.timestamp_max_us = view.timestamp_max_us

    def _producer_claimed(self, fact: ProducerClaimed) -> None:
        self.producers.claim(fact.producer_id, fact.epoch, fact.time_us)
        self.append_time_us = max(self.append_time_us, fact.time_us)

    def _producer_advanced(self, fact: ProducerAdvanced) -> None:
        result = BatchResult(fact.base_offset, fact.count, fact.time_us)
        self.producers.advance(fact.producer_id, fact.epoch, fact.sequence, result)
        self.append_time_us = max(self.append_time_us, fact.time_us)

    def _trimmed(self, fact: Trimmed) -> None:
        assert fact.offset <= self.end_offset, f"trim to {fact.offset}, the end is {self.end_offset}"
        self.start_offset = max(self.start_offset, fact.offset)

    # -------------------------------------------------------------------------------------------- snapshot

    def snapshot(self) -> list[Buffer]:
        """A copy of the whole state: a small head, then the columns as they lie in memory."""
        producers, dedup = self.producers.buffers(), self.dedup.buffers()
        keys = None if self.keys is None else self.keys.buffers()
        head = _SnapshotHead(
            SNAPSHOT_VERSION,
            self.start_offset,
            self.end_offset,
            self.append_time_us,
            self.timestamp_max_us,
            self.leader_epoch,
            [len(buffer) for buffer in producers],
            [len(buffer) for buffer in dedup],
            None if keys is None else [len(buffer) for buffer in keys],
        )
        packed = msgspec.msgpack.encode(head)
        return [len(packed).to_bytes(8, "little"), packed, *producers, *dedup, *(keys or ())]

    @classmethod
    def restore(cls, options: TopicOptions, chunks: Sequence[Buffer]) -> Partition:
        """The partition that a snapshot is of, however its bytes are cut into chunks; raises `Corrupt`."""
        data = memoryview(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        partition = cls(options)
        try:
            body = 8 + int.from_bytes(data[:8], "little")
            head = msgspec.msgpack.decode(data[8:body], type=_SnapshotHead)
            if head.version != SNAPSHOT_VERSION:
                raise Corrupt(f"snapshot version {head.version}: this release reads {SNAPSHOT_VERSION}")
            if (head.keys is None) != (partition.keys is None):
                raise Corrupt("the snapshot does not fit the topic's key_index")
            columns = _cut(data[body:], [*head.producers, *head.dedup, *(head.keys or ())])
            split = len(head.producers), len(head.producers) + len(head.dedup)
            partition.producers.load(columns[: split[0]])
            partition.dedup.load(columns[split[0] : split[1]])
            if partition.keys is not None:
                partition.keys.load(columns[split[1] :])
        except (msgspec.MsgspecError, ValueError) as error:
            raise Corrupt(f"the snapshot cannot be read: {error}") from error
        partition.start_offset, partition.end_offset = head.start_offset, head.end_offset
        partition.append_time_us, partition.timestamp_max_us = head.append_time_us, head.timestamp_max_us
        partition.leader_epoch = head.leader_epoch
        return partition

    def check(self) -> None:
        """Assert the invariants of the partition and of its parts; for tests and simulation."""
        assert 0 <= self.start_offset <= self.end_offset
        assert self.append_time_us >= 0
        self.producers.verify()
        self.dedup.verify()
        if self.keys is not None:
            self.keys.verify()


_DECIDE: dict[type, Callable[[Partition, Any, int], Decision]] = {
    PublishBatch: Partition._publish,
    ClaimProducer: Partition._claim,
    TrimTopic: Partition._trim,
    Sweep: Partition._sweep,
}
_APPLY: dict[type, Callable[[Partition, Any], None]] = {
    Appended: Partition._appended,
    ProducerClaimed: Partition._producer_claimed,
    ProducerAdvanced: Partition._producer_advanced,
    Trimmed: Partition._trimmed,
}


def _over_limit(view: BatchView, options: TopicOptions, now_us: int) -> Refusal | None:
    """The first limit that a batch is above."""
    if (
        view.nbytes <= BATCH_BYTES_MAX
        and 0 < view.count <= BATCH_ROWS_MAX
        and view.value_bytes_max <= options.message_bytes_max
        and view.key_bytes_max <= KEY_BYTES_MAX
        and view.header_bytes_max <= HEADER_BYTES_MAX
        and view.timestamp_max_us <= now_us + TIMESTAMP_AHEAD_US_MAX
    ):
        return None
    if not view.count:
        return Refusal(InvalidRequest.code, "the batch has no messages")
    for what, size, most in (
        ("the batch has {} messages", view.count, BATCH_ROWS_MAX),
        ("the batch has {} bytes", view.nbytes, BATCH_BYTES_MAX),
        ("a key has {} bytes", view.key_bytes_max, KEY_BYTES_MAX),
        ("the headers of a message have {} bytes", view.header_bytes_max, HEADER_BYTES_MAX),
        ("a value has {} bytes (message_bytes_max)", view.value_bytes_max, options.message_bytes_max),
    ):
        if size > most:
            return Refusal(
                TooLarge.code,
                f"{what.format(size)}, the limit is {most}",
                details={"size": size, "limit": most},
            )
    ahead = view.timestamp_max_us - now_us
    text = f"a timestamp lies {ahead} us ahead of the broker's clock, the limit is {TIMESTAMP_AHEAD_US_MAX}"
    return Refusal(InvalidRequest.code, text)


def _unfit(publish: Publish, view: BatchView, options: TopicOptions) -> Refusal | None:
    """What the request asks and this topic, or this release, cannot give."""
    columns, expected = view.columns, publish.expected_key_sequences
    if columns & (HAS_DELIVER_AT | HAS_OFFSET_DELTA):
        what = (
            "deliver_at: delays are not supported yet"
            if columns & HAS_DELIVER_AT
            else "offset_delta is not for producers"
        )
        return Refusal(InvalidRequest.code, what)
    if publish.acks is not None:
        if publish.acks not in DURABILITIES:
            return Refusal(
                InvalidRequest.code, f"acks is one of {', '.join(DURABILITIES)}, not {publish.acks[:80]!r}"
            )
        if DURABILITIES.index(publish.acks) > DURABILITIES.index(options.durability):
            text = f"acks = {publish.acks!r} is more than the topic's durability {options.durability!r}"
            return Refusal(InvalidRequest.code, text)
    if publish.expected_sequence < 0:
        return Refusal(
            InvalidRequest.code, f"expected_sequence is 0 or more, not {publish.expected_sequence}"
        )
    if expected is not None:
        if len(expected) != view.count:
            text = f"expected_key_sequences has {len(expected)} numbers for {view.count} messages"
            return Refusal(InvalidRequest.code, text)
        if not options.key_index and any(number != ANY_KEY_SEQUENCE for number in expected):
            return Refusal(InvalidRequest.code, "expected_key_sequences needs a topic with key_index = on")
        if not columns & HAS_KEY and any(number != ANY_KEY_SEQUENCE for number in expected):
            return Refusal(InvalidRequest.code, "expected_key_sequences needs messages with keys")
    assert view.dedup_ids is not None or not columns & HAS_DEDUP_ID, "the view lacks the dedup ids"
    assert view.keys is not None or not (options.key_index and columns & HAS_KEY), "the view lacks the keys"
    return None


def _mixed(found: Filtered) -> Refusal:
    rows = [row for row, _ in found.duplicates]
    text = f"expected_sequence with a batch of which only some messages are new: {len(rows)} are duplicates"
    return Refusal(InvalidRequest.code, text, details={"duplicates": rows[:100]})


def _cut(data: memoryview, lengths: list[int]) -> list[memoryview]:
    if sum(lengths) != len(data) or min(lengths) < 0:
        raise Corrupt(f"the snapshot has {len(data)} bytes behind its head, {sum(lengths)} are listed")
    pieces, at = [], 0
    for length in lengths:
        pieces.append(data[at : at + length])
        at += length
    return pieces
