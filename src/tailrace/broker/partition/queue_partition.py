"""A partition with messages at work: what its readers, consumers and delays need, on the runtime.

    committed turn ──▶ hot tail ──▶ replies ──▶ readers and lease requests that wait are woken

    its processes: dead letters, and the release of delayed messages

*Retention.* `sweep` finds the offset to trim to and submits it as a command; the segments below are freed
when that is durable (`broker.runtime.maintenance`). Ephemeral topics are trimmed as their groups settle
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from tailrace.broker.metrics import Metrics
from tailrace.broker.partition.credit_waiters import CreditWaiter
from tailrace.broker.partition.delay_prefetch import NEAR_BYTES, DelayPrefetch
from tailrace.broker.partition.frame_cache import COLD_BYTES, ColdFrames, FrameCache
from tailrace.broker.partition.hot_tail import HotTail
from tailrace.broker.partition.lease_waiters import LeaseWaiters, WaitersTell
from tailrace.broker.partition.staged_reads import StagedReads, StagedSource
from tailrace.broker.runtime.partition_runtime import PartitionRuntime
from tailrace.broker.runtime.process_driver import Processes
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.recovery import Rebuilt
from tailrace.broker.runtime.state_machines import MachineKind
from tailrace.broker.runtime.turn import NOTHING, Decided, Reach, Turn, refuse
from tailrace.core.collections.span_map import count, flat
from tailrace.core.collections.timing_wheel import AT, NEVER, REF, ref_of
from tailrace.core.model.commands import Reply
from tailrace.core.model.facts import Fact
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import Refusal, TopicPartition, hash128
from tailrace.core.model.internal_commands import StagedFrames, Sweep
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tailrace.core.process.credit_process import CreditProcess
from tailrace.errors import Corrupt
from tailrace.format import codec, frame
from tailrace.format.frame import Buffer
from tailrace.ports import Finished, LogStore, Respond

PRESSES_MAX = 5
COLLECT_BYTES = 64 * 1024 * 1024
"""Bytes written to an ephemeral topic after which settled messages are trimmed: the size of a segment."""


class QueueListeners(NamedTuple):
    """Who hears of the queues of all partitions."""

    credit: CreditProcess[CreditWaiter]
    """Counts messages in flight over all partitions."""
    processes: Callable[[QueuePartition], Processes]
    """Makes the protocols of a partition with others."""
    overslept: Callable[[str, str], None]
    """A lease of this group and member has timed out; called before that is decided."""
    reopened: Callable[[QueuePartition], None]
    """The state of this partition was rebuilt from the log, and commands are taken again."""
    staged_reads: StagedReads
    """Reads staged batches."""
    expired: Callable[[TopicPartition, Sequence[int]], None]
    """Nobody has decided these staged attempts of a partition in time."""


class QueuePartition(PartitionRuntime[Partition]):
    """A partition of a user's topic."""

    machine = MachineKind(Partition, Partition.restore, codec.facts_decoder(Fact))
    cache: FrameCache

    def __init__(
        self,
        name: str,
        topic: str,
        options: TopicOptions,
        store: LogStore,
        pump: Pump,
        metrics: Metrics,
        listeners: QueueListeners,
        *,
        known: bool = False,
    ) -> None:
        super().__init__(name, topic, options, store, pump, metrics)
        self._listeners = listeners
        self._tail_bytes = options.ring_buffer_bytes
        self._cold_bytes = COLD_BYTES
        self._hidden = False
        """Whether committed messages cannot be read any more, because their sync failed."""
        self._uncollected_bytes = 0
        self._pressed = (0, 0)
        """A start offset, and how often `press` has tried to free the segments below it."""
        tell = WaitersTell(self.submit, listeners.overslept, listeners.credit.changed)
        self.wakeups = LeaseWaiters(self.pump, self._takes_commands, tell)
        self.prefetch = DelayPrefetch(options.key_index)
        self.processes = listeners.processes(self)
        self.tail: HotTail
        self.open(known=known)

    def _adopt(self, rebuilt: Rebuilt[Partition]) -> None:
        super()._adopt(rebuilt)
        self.tail = HotTail(min(self.options.ring_buffer_bytes, self._tail_bytes), rebuilt.end_offset)
        self._renew()

    def _renew(self) -> None:
        """The state is another one."""
        self.wakeups.adopt(self.state, self.tail, self.clock)
        reads = self.pump.threads.read
        source = ColdFrames(self.name, self.log, reads, lambda log: log is self.log, self.damaged)
        self.cache = FrameCache(source, self.tail, self.state.head, self.state.lost, self._cold_bytes)

    def _takes_commands(self) -> bool:
        return self.fault is None

    def _started(self) -> None:
        """Commands are taken (again): set timers, resume unfinished work."""
        if self.fault is None:
            self.state.queues.count_in(self._listeners.credit)
        self.wakeups.arm()
        self.wakeups.wake_all()

    # -- what the runtime tells

    def _missing(self, missing: int | StagedFrames, work: Any, body: Buffer, respond: Respond) -> None:
        if isinstance(missing, StagedFrames):
            source = StagedSource(self.name, self.log, self.options.key_index, self.submit)
            self._listeners.staged_reads.read(source, work, missing, respond)
        else:
            self.cache.load(missing, partial(self._loaded, work, body, respond))

    def _loaded(self, work: Any, body: Buffer, respond: Respond, error: Exception | None) -> None:
        """Decide a command again: the frame that it missed is cached."""
        if error is None:
            self.submit(work, body, respond)
        else:
            respond(self.gone or refuse(error), NOTHING)

    def _decided(self, turn: Turn, decided: Decided) -> None:
        waiters = self.wakeups
        for command, facts, soft in decided:
            waiters.decided(command, facts, soft)

    def _turned(self) -> None:
        self.wakeups.turned()

    def _committed(self, turn: Turn) -> None:
        """A turn is committed: its messages can be read, its replies leave, those who wait look again."""
        tail, messages, nbytes = self.tail, 0, 0
        for item in turn.frames:
            if item.header.kind == frame.DATA:
                tail.push(item)
                nbytes += item.size
                messages += item.header.count
        for respond, reply in turn.replies:
            respond(reply, NOTHING)
        if messages:
            seconds = (self.pump.clock.now_us() - turn.started_us) / 1e6
            self.metrics.published(self.topic, messages, nbytes, seconds)
            self.wakeups.committed(messages)

    def _wrote(self, turn: Turn) -> None:
        self.upkeep.wrote(turn.frames)
        if self.options.ephemeral:
            self._uncollected_bytes += sum(item.size for item in turn.frames if item.header.kind in _BODIES)
            if self._uncollected_bytes > COLLECT_BYTES:
                self._collect(0)

    def _drop_state(self, reach: Reach) -> None:
        self._ended()
        super()._drop_state(reach)
        self._renew()

    def _hide(self, reach: Reach) -> None:
        super()._hide(reach)
        self._hidden = True
        self.tail.clear(reach.end_offset)

    def _ended(self) -> None:
        """Messages in flight here cannot be settled any more: stop counting them against members."""
        self.state.queues.count_out()

    def _look_again(self) -> None:
        self.wakeups.wake_all()

    def _reopened(self) -> None:
        self._listeners.reopened(self)

    def missed(self, spans: Sequence[int]) -> dict[str, int]:
        """By group: the number of messages of these offsets that it has not settled."""
        queues = self.state.queues
        found = {group: count(flat(queues.missing(group, spans))) for group in queues.names()}
        return {group: messages for group, messages in found.items() if messages}

    def lowest_entry(self) -> int | None:
        """The oldest entry with a delayed or staged message."""
        return self.state.lowest_entry()

    def close(self, closed: Finished) -> None:
        """Stop the timers, store a snapshot, then close the log."""
        self.wakeups.stop()
        super().close(closed)

    # -- readers

    @property
    def latest_offset(self) -> int:
        """Offset that "latest" means for readers: the end, or one more when messages behind the end cannot be
        read, so that a reader who gets there is refused. A failed sync counts only if it hid messages."""
        fault = self.damage
        return self.end_offset + (fault is not None and (fault.code == Corrupt.code or self._hidden))

    def lost_at(self, offset: int) -> tuple[int, int] | None:
        """The range of lost offsets around an offset; None when it is not lost."""
        return self.state.lost.range_at(offset)

    def lost_next(self, offset: int) -> int:
        """Where the next lost range from an offset on begins, at most the end."""
        return self.state.lost.next_from(offset, self.end_offset)

    # -- what requests ask about groups and keys

    def policy(self, group: str) -> GroupPolicy | None:
        """The options of a group; None if it is not here."""
        return self.state.queues.policy(group)

    def group_ids(self) -> dict[str, int]:
        """The groups that are here, each with its id."""
        queues = self.state.queues
        return {name: queues.id_of(name) or 0 for name in queues.names()}

    def figures(self, group: str) -> dict[str, Any]:
        """The stats of a group; empty if it is not here."""
        return {} if self.policy(group) is None else self.state.queues.figures(group)

    def group_numbers(self) -> dict[int, str]:
        """The names of the groups by the numbers that facts have for them."""
        return self.state.queues.numbers()

    def holders(self, group: str) -> Collection[str]:
        """The members that have messages in flight."""
        return self.state.queues.holders(group)

    def apart(self, group: str) -> int | None:
        """The lowest number of deliveries among messages set apart; None without any, or in a pause."""
        return self.state.queues.apart(group)

    def first_unsettled(self, group: str) -> int | None:
        """The first offset that a group has not settled; None if it is not here."""
        return self.state.queues.committed(group)

    def unsettled(self, group: str, offset: int, count_max: int) -> list[int]:
        """Spans of the first committed messages from an offset on that a group has not settled."""
        first, end = max(offset, self.start_offset), self.end_offset
        return self.state.queues.unsettled(group, first, end, count_max)

    def key_rows(self, key: bytes) -> tuple[int, int, bool]:
        """The number of messages that a key has had, decided ones included; the end that this counts up to;
        and whether no other key shares its hash."""
        keys = self.state.keys
        assert keys is not None, "the topic has a key index"
        low, high = hash128(key)
        return keys.count(low, high), self.state.end_offset, keys.alone(low, high)

    def delayed(self, after_us: int, count_max: int) -> list[tuple[int, int]]:
        """Due times and refs of the first committed messages that are due after a time, in the order of
        release."""
        end = ref_of(self.end_entry, 0)
        rows = self.state.timetable.wheel.first(NEVER, count_max, after_us=after_us, refs_end=end)
        return [(at_us, ref) for at_us, ref in rows[:, AT : REF + 1].tolist()]

    # -- memory

    def limit_tail(self, bytes_max: int) -> None:
        """Set this partition's share of the memory for hot tails."""
        self._tail_bytes = bytes_max
        self.tail.limit(min(self.options.ring_buffer_bytes, bytes_max))

    def limit_cold(self, bytes_max: int) -> None:
        """Set this partition's share of the memory for frames read from the log for delivery."""
        self._cold_bytes = min(COLD_BYTES, bytes_max)
        self.cache.limit(self._cold_bytes)

    def limit_delays(self, bytes_max: int) -> None:
        """Set this partition's share of the memory for delayed messages that are due soon."""
        self.prefetch.limit(min(NEAR_BYTES, bytes_max))

    def reconfigure(self, options: TopicOptions) -> None:
        """Take changed options."""
        super().reconfigure(options)
        self.limit_tail(self._tail_bytes)

    # -- retention

    def report_expired(self) -> None:
        """Report staged attempts that nobody has decided in time."""
        attempts = () if self.fault or self.lost else self.state.staging.expired(self.time_us())
        if attempts:
            self._listeners.expired(TopicPartition(self.topic, self.partition), attempts)

    def sweep(self) -> None:
        """Apply retention: find the offset to trim to, record the trim, free the segments."""
        options = self.options
        if (
            options.retention_ms is None
            and options.retention_bytes is None
            and options.retention_count is None
        ):
            if options.ephemeral:
                self._collect(0)
            return
        since = None if options.retention_ms is None else self.time_us() - options.retention_ms * 1000
        find = partial(
            self.log.retention_offset,
            bytes_max=options.retention_bytes,
            append_time_us=since,
            count_max=options.retention_count,
        )
        self.run_in_order(find, self._retained)

    def _retained(self, offset: Any, error: Exception | None) -> None:
        if error is None:
            self._collect(offset)

    def _collect(self, retention_offset: int) -> None:
        """Trim to the start that retention wants, or that the groups of an ephemeral topic allow; then free
        the segments."""
        state, ephemeral = self.state, self.options.ephemeral
        self._uncollected_bytes = 0
        if self.lost is not None:
            return
        if retention_offset > state.start_offset or (ephemeral and state.ring.floor() > state.start_offset):
            sweep = Sweep(min(retention_offset, self.end_offset), self.end_offset)
            self.submit(sweep, b"", self._trimmed)
        elif ephemeral and state.start_offset > self.upkeep.freed_offset:
            self.upkeep.free()  # Publishing trimmed the ring to make room.

    def _trimmed(self, reply: Reply, parts: Sequence[Buffer]) -> None:
        if type(reply) is not Refusal:
            self.upkeep.free()

    def press(self) -> None:
        """On a full disk: free trimmed segments that stay only because nothing is published.

        A trimmed segment is removed when two snapshots are of later entries. Without messages there may be no
        later entry, so the start of the log is recorded once more, for another snapshot. The segment that is
        being written is never removed: if all of it is trimmed, it is sealed first."""
        start = self.state.start_offset
        if self.fault is not None or self.lost is not None or self.upkeep.saving:
            return
        stats = self.log.stats()
        only = stats.segments < 2
        if stats.start_offset >= start or (only and start < self.end_offset):
            return
        self._pressed = (start, self._pressed[1] + 1 if self._pressed[0] == start else 1)
        if self._pressed[1] <= PRESSES_MAX:
            if only:
                self.run_in_order(self.log.seal, self.upkeep.done)
            self.submit(Sweep(0, again=True), b"", self._trimmed)


_BODIES = frozenset((frame.DATA, frame.SCHEDULED, frame.STAGED))
"""Kinds of frames that hold messages."""
