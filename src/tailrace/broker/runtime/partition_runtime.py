"""One partition at work: its core state, its log, its hot tail, and the replies that wait for durability.

    submit ──▶ inbox ──▶ turn: decide and apply all commands ──▶ storage: one write ──▶ hot tail, replies

The state is *speculative*: facts are applied when they are decided and may be ahead of the disk. A reply,
also a refusal, was decided on that state, so it leaves only when everything applied before it is as durable
as the topic asks. Only soft decisions, like a lease, are answered at once: a lost one can be made again.

    turn 1  publish a ──▶ DATA, entry 5     stored: its reply has left
    turn 2  publish b ──▶ DATA, entry 6     on its way to the disk
    turn 3  publish b ──▶ a duplicate of b  no frame; its reply waits for turn 2, whose fact it relies on

If the write of turn 2 fails, both answers about b become refusals. Nothing is rolled back by hand: the state
is replaced by an empty one that knows only where the readable log begins and ends, and nobody is answered
from it (`lost`), so leases, settlements, dead letters, releases and staged writes find nothing to work on.

    Full          the log took the write back whole: open it again, rebuild the state, take commands again
    Corrupt       quarantine: no more writes and leases; whole frames can still be read
    other faults  nobody knows what the disk holds: until a restart only fetches below the last sync are
                  answered, all else is refused with the outcome `unknown`. With `durability = interval`,
                  messages that were acknowledged and read may lie above the last sync.

An empty log may begin at any entry, so its second turn waits until the first is stored.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from tailrace.broker.metrics import Metrics
from tailrace.broker.partition.credit_waiters import CreditWaiters
from tailrace.broker.partition.delay_release import DelayRelease
from tailrace.broker.partition.frame_cache import COLD_BYTES, FrameCache
from tailrace.broker.partition.hot_tail import HotTail
from tailrace.broker.partition.lease_waiters import Late, LeaseWaiters
from tailrace.broker.runtime.assurance import Assurance, Reach
from tailrace.broker.runtime.framing import TurnFrames
from tailrace.broker.runtime.maintenance import Maintenance
from tailrace.broker.runtime.process_driver import Processes
from tailrace.broker.runtime.pump import SLOW_WRITE_US, Pump
from tailrace.broker.runtime.recovery import Rebuilt, rebuild
from tailrace.broker.runtime.repair import record_loss
from tailrace.broker.runtime.state_machines import DATA_PARTITION, MachineKind
from tailrace.broker.runtime.turn import NOTHING, Turn, refuse
from tailrace.core import partition as core
from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.facts import Delayed
from tailrace.core.model.identifiers import Refusal
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.partition_clock import PartitionClock
from tailrace.errors import Corrupt, Full, StorageFault
from tailrace.format import frame
from tailrace.format.frame import Buffer
from tailrace.ports import LogStats, LogStore, PartitionLog, Respond

__all__ = ["NOTHING", "PartitionRuntime", "Turn", "refuse"]

log = logging.getLogger("tailrace.partition")

FULL_RETRY_US = 1_000_000
INLINE_BYTES_MAX = 32 * 1024
INLINE_FRAME_BYTES = 2 * 1024
"""Many small frames are written on the loop up to this average size, and the bound on their sum below."""
INLINE_TOGETHER_BYTES_MAX = 256 * 1024
THREADS_ONLY_US = 1_000_000

_ILL = frozenset((Corrupt.code, StorageFault.code))
Item = tuple[Any, Buffer, Respond]
"""A command (of `core.model`, or a `Late` one), its body, and the receiver of its reply."""


class PartitionRuntime:
    """Host of one partition. All methods run on the pump's thread."""

    def __init__(
        self,
        name: str,
        topic: str,
        options: TopicOptions,
        pump: Pump,
        store: LogStore,
        metrics: Metrics,
        machine: MachineKind = DATA_PARTITION,
        *,
        known: bool = False,
    ) -> None:
        self.name = name
        self.machine = machine
        self.topic = topic
        self.options = options
        self.fault: Refusal | None = None
        self.gone: Refusal | None = None
        """Set when the topic was deleted; readers are refused, too."""
        self.lost: Refusal | None = None
        """Set while there is no state to answer from: storage failed, and the state was dropped."""
        self.cut_bytes = 0
        self.pump = pump
        self.store = store
        self.metrics = metrics
        self._inbox: list[Item] = []
        self._turns: deque[Turn] = deque()
        self.reopening = False
        self._closing = False
        self._full_until_us = 0
        self._hidden = False
        """Whether committed messages cannot be read any more, because their sync failed."""
        self._tail_bytes = options.ring_buffer_bytes
        self._cold_bytes = COLD_BYTES
        self.failures = 0
        self._outstanding = 0
        self.assurance = Assurance(self)
        self.credit: CreditWaiters | None = None
        """Counts messages in flight over all partitions. Set by the engine."""
        self.upkeep = Maintenance(self)
        self.wakeups = LeaseWaiters(self)
        self.releases = DelayRelease(self)
        self.processes = Processes(())
        """Protocols with other partitions; they live while this one takes commands. Set by the engine."""
        self.overslept: Callable[[str, str], None] = lambda group, member: None
        """Hook: a lease of this group and member has timed out; called before that is decided."""
        self.reopened: Callable[[PartitionRuntime], None] = lambda runtime: None
        """Hook: the state was rebuilt from the log and commands are taken again."""
        self.clock = PartitionClock(0, pump.clock.now_us())
        """Partition time, on which durations run."""
        self.log: PartitionLog = self._take_log(known=known)
        self.state: core.Partition
        """Made by `machine`: a coordinator on internal topics, with the same interface."""
        self.tail: HotTail
        try:
            self._adopt(self._recover(self.log))
        except StorageFault as error:
            # This partition cannot be opened; the others can.
            self._adopt(Rebuilt(machine.make(options), 0, 0, fault=error.message))

    # -- opening

    def _take_log(self, *, known: bool) -> PartitionLog:
        log = self.store.known_log(self.name) if known else self.store.log(self.name)
        threads = self.pump.threads
        log.on_damage(lambda error: threads.tell(lambda found, none: self.damaged(found, log), error))
        return log

    def _recover(self, log: PartitionLog) -> Rebuilt:
        """Rebuild the state from snapshot and log; may run on a storage thread."""
        return rebuild(self.name, log, self.machine, self.options)

    def _adopt(self, rebuilt: Rebuilt) -> None:
        self.rebuilt = rebuilt
        self.cut_bytes += rebuilt.cut_bytes
        state = self.state = rebuilt.state
        self.upkeep.debt = rebuilt.debt
        self.at_hand = FrameCache(self, self._cold_bytes)
        # Partition time goes on after a reopening, also where the log ends at an earlier time.
        now_us = self.pump.clock.now_us()
        self.clock = PartitionClock(max(state.append_time_us, self.clock.time_us(now_us)), now_us)
        self.entry = rebuilt.end_entry
        self.assurance.opened(Reach(rebuilt.end_entry, rebuilt.end_offset, state.start_offset))
        self._begun = rebuilt.end_entry > 0
        self.lost = None
        if rebuilt.fault is not None:
            self.fault = Refusal("corrupt", rebuilt.fault, "none")
        self.tail = HotTail(min(self.options.ring_buffer_bytes, self._tail_bytes), rebuilt.end_offset)

    def start(self) -> None:
        """Commands are taken (again): set timers, resume unfinished work."""
        if self.rebuilt.lost and self.fault is None:
            record_loss(self)
        if self.machine.delivers:
            if self.credit is not None and self.fault is None:
                self.state.queues.count_in(self.credit.flights)
            self.wakeups.arm()
            self.wakeups.wake_all()
            self.releases.start()
        self.processes.begin(self.state)

    # -- commands

    def submit(self, work: Any, body: Buffer, respond: Respond) -> None:
        """Queue a command for the next turn."""
        if not self._inbox:
            self.pump.ready(self)
        self._inbox.append((work, body, respond))

    def surely(self, respond: Respond) -> Respond:
        """A receiver for the reply to `submit` or `answer` that calls `respond` only after a sync; see
        `assurance`."""
        return self.assurance.surely(respond)

    def time_us(self) -> int:
        """Partition time now."""
        return self.clock.time_us(self.pump.clock.now_us())

    def turn(self, now_us: int, wall_us: int) -> None:
        """Decide and apply all commands that wait, and hand their frames to storage as one write."""
        if self._turns and not self._begun:
            return  # An empty log may begin anywhere: the second turn waits until the first is in it.
        inbox, self._inbox = self._inbox, []
        refusal = self._closed(now_us)
        if refusal is not None:
            for _, _, respond in inbox:
                respond(refusal, NOTHING)
            return
        turn = Turn(self, now_us)
        try:
            self._decide(inbox, turn, wall_us)
        except Exception as error:
            # A broken invariant: the state cannot be trusted any more, so the partition takes no writes.
            log.exception("%s: stepping down", self.name)
            self.fail(error)
            for _, _, respond in inbox:
                respond(refuse(error), NOTHING)
            return
        try:
            for respond, reply in turn.at_once:
                respond(reply, NOTHING)
        finally:  # Applied facts are written, even if answering failed.
            if turn.frames:
                self._turns.append(turn)
                self._write(turn)
            else:
                for respond, reply in turn.replies:
                    self.answer(respond, reply)
            self.wakeups.turned()

    def answer(self, respond: Respond, reply: Reply) -> None:
        """Reply from the state as it is now; the reply leaves when all facts in that state are stored."""
        if self.lost is not None:
            respond(self.lost, NOTHING)
        elif self._turns:
            self._turns[-1].replies.append((respond, reply))
        else:
            respond(reply, NOTHING)

    def _decide(self, inbox: list[Item], turn: Turn, wall_us: int) -> None:
        state, wakeups, time_us = self.state, self.wakeups, self.clock.time_us(turn.started_us)
        made = TurnFrames(self.entry, state.leader_epoch, max(time_us, state.append_time_us), wall_us)
        look = TurnInput(time_us, wall_us, made.next_entry, self.at_hand)
        for work, body, respond in inbox:
            late = type(work) is Late
            command = work.make() if late else work
            if command is None:
                continue
            if look.next_entry != made.next_entry:
                look = TurnInput(time_us, wall_us, made.next_entry, self.at_hand)
            decision = state.decide(command, look)
            if decision.missing is not None:
                self.at_hand.load(decision.missing, partial(self._loaded, work, body, respond))
                continue
            soft, reply = decision.soft, decision.reply
            if decision.facts:
                made.add(decision, command, body)
                for fact in decision.facts:
                    state.apply(fact)
                    if type(fact) in self.processes.watches:
                        turn.watched.append(fact)
                    elif type(fact) is Delayed:
                        self.releases.scheduled(fact)
                if not soft:
                    turn.hard = True
                wakeups.decided(command, decision.facts, soft)
            if late and type(reply) is Done:
                soft = True  # A lease request found nothing: nobody relies on that.
            if type(reply) is Refusal:
                self.metrics.refused(reply.code)
            (turn.at_once if soft else turn.replies).append((respond, reply))
        made.flush()
        self.entry = made.entry
        turn.frames = made.frames
        turn.start_offset = state.start_offset

    def _loaded(self, work: Any, body: Buffer, respond: Respond, error: Exception | None) -> None:
        """Decide a command again: the frame that it missed is loaded."""
        if error is None:
            self.submit(work, body, respond)
        else:
            respond(self.gone or refuse(error), NOTHING)

    def _write(self, turn: Turn) -> None:
        """Write a turn: on the storage threads, or at once if the write is small, is next and needs no sync.

        Waking a thread and being woken by it costs about 20 times as much as such a write. A disk that cannot
        keep up would stall the loop, so while the threads have a slow write under way, and for a while after
        a slow one here, they do all writes."""
        frames, pump = turn.frames, self.pump
        sync = turn.synced = turn.hard and self.options.durability == "fsync"
        size = frames[0].size if len(frames) == 1 else sum(item.size for item in frames)
        together = min(INLINE_FRAME_BYTES * len(frames), INLINE_TOGETHER_BYTES_MAX)
        if (
            sync
            or size > max(INLINE_BYTES_MAX, together)
            or self._outstanding
            or len(self._turns) > 1
            or pump.is_slow(turn.started_us)
            or size > self.log.room()
        ):
            self._outstanding += 1
            pump.writing[turn] = turn.started_us
            pump.threads.append(self.log, turn.frames, sync, turn.stored)
            return
        error: Exception | None = None
        try:
            self.log.append(turn.frames, sync=False)
        except StorageFault as fault:
            error = fault
        now_us = pump.clock.now_us()
        if now_us - turn.started_us > SLOW_WRITE_US:
            pump.threads_only_until_us = now_us + THREADS_ONLY_US
        self._outstanding += 1
        turn.stored(None, error)

    def run_in_order(self, work: Callable[[], object], done: Callable[[Any, Exception | None], None]) -> None:
        """Do other work on the log, in order with its appends."""
        self._outstanding += 1

        def finished(result: Any, error: Exception | None) -> None:
            self._outstanding -= 1
            done(result, error)

        self.pump.threads.run(self.log, work, finished)

    def _closed(self, now_us: int) -> Refusal | None:
        if self.fault is not None:
            return self.fault
        if self._closing:
            return Refusal("unavailable", "the broker is shutting down")
        if self.reopening or now_us < self._full_until_us:
            return self._full()
        return None

    def _full(self) -> Refusal:
        text = f"{self.name}: no space is left on the disk; free some, writes resume by themselves"
        return Refusal(Full.code, text, "none", {"retry_after_ms": FULL_RETRY_US // 1000})

    # -- completions

    def landed(self) -> None:
        """One piece of storage work has ended."""
        self._outstanding -= 1

    def stored(self, turn: Turn, error: Exception | None) -> None:
        """The oldest turn is durable, or storage failed."""
        if error is not None:
            self.fail(error)
            return
        assert self._turns[0] is turn, "a log completes its appends in order"
        self._turns.popleft()
        if not self._begun:
            self._begun = True
            self._go_on()
        tail = self.tail
        messages = size = data_bytes = waiting_bytes = 0
        delayed = -1
        for item in turn.frames:
            size += item.size
            if item.header.kind == frame.DATA:
                tail.push(item)
                data_bytes += item.size
                messages += item.header.count
            elif item.header.kind == frame.SCHEDULED:
                delayed = item.header.entry
                waiting_bytes += item.size
            elif item.header.kind == frame.STAGED:
                waiting_bytes += item.size
        for respond, reply in turn.replies:
            respond(reply, NOTHING)
        reach = Reach(turn.frames[-1].header.entry + 1, tail.end_offset, turn.start_offset)
        self.assurance.stored(reach, turn.synced)
        if messages:
            self.metrics.published(
                self.topic, messages, data_bytes, (self.pump.clock.now_us() - turn.started_us) / 1e6
            )
            self.wakeups.committed(messages)
        self.processes.stored(turn.watched)
        if delayed >= 0:
            self.releases.stored(delayed)
        data_bytes += waiting_bytes
        self.upkeep.wrote(turn.frames, data_bytes, size)

    def fail(self, error: Exception, *, outcome: str | None = None) -> None:
        """Drop the state and refuse the replies that wait; then rebuild it, or step down (see above)."""
        refusal = refuse(error)
        if outcome is not None:
            refusal = Refusal(refusal.code, refusal.message, outcome, refusal.details)
        self.failures += 1
        turns, self._turns = self._turns, deque()
        if turns:
            self.entry = turns[0].frames[0].header.entry
        if isinstance(error, Full):
            self.pump.filled()
            self._full_until_us = self.pump.clock.now_us() + FULL_RETRY_US
            self.lost = self._full()
            self._drop_state(self.assurance.written)
            self._reopen()
        elif isinstance(error, Corrupt):
            self.damaged(error, self.log)
            self.lost = self.fault
            self._drop_state(self.assurance.written)
        else:
            self._step_down(refusal)
        for turn in turns:
            turn.dropped = True
            for respond, _ in turn.replies:
                # A refusal that was decided on the dropped state must not be believed either.
                respond(refusal, NOTHING)
        self.assurance.fail(error)
        self._go_on()

    def _step_down(self, refusal: Refusal) -> None:
        """Hide everything above the last sync: nobody knows what of it is on the disk."""
        if self.fault is None:
            advice = "this partition takes no writes until the broker is restarted"
            text = f"{refusal.message}; {advice}, and only what was synced before can be read"
            self.fault = Refusal(StorageFault.code, text, "unknown", refusal.details)
        self.lost = self.fault
        synced = self.assurance.synced
        if synced.end_offset < self.tail.end_offset:
            self._hidden = True
            self.tail.clear(synced.end_offset)
        self._drop_state(synced)
        self.wakeups.wake_all()

    def _drop_state(self, reach: Reach) -> None:
        """Replace the state by an empty one that knows where the readable log begins and ends."""
        self.releases.stop()
        self.processes.end()
        self._count_out()
        self.state = self.state.bare(reach.start_offset, reach.end_offset)
        self.at_hand = FrameCache(self, self._cold_bytes)

    def _count_out(self) -> None:
        """Messages in flight here cannot be settled any more: stop counting them against members."""
        if self.machine.delivers:
            self.state.queues.count_out()

    def damaged(self, error: Exception, source: PartitionLog) -> None:
        """Quarantine, after a read found damage in a log: no more writes and leases. Whole frames are still
        read. What is found in a log that was opened again meanwhile counts no more: it may be mended."""
        if self.damage is not None or self.gone is not None or source is not self.log:
            return
        refusal = refuse(error)
        self.fault = Refusal(Corrupt.code, refusal.message, "none", refusal.details)
        log.error("%s/%d is quarantined: %s", self.topic, self.partition, refusal.message)
        self.metrics.damage_found()
        self._count_out()
        self._go_on()
        self.wakeups.wake_all()

    def open_log(self) -> tuple[PartitionLog, Rebuilt]:
        """Open the log again and rebuild the state from it; blocking."""
        log = self._take_log(known=True)
        try:
            return log, self._recover(log)
        except StorageFault:
            log.close()
            raise

    def take_over(self, log: PartitionLog, rebuilt: Rebuilt) -> bool:
        """Continue on a log that was opened again; false when the topic was deleted meanwhile."""
        old, threads = self.log, self.pump.threads
        self.pump.at(self.pump.clock.now_us() + FULL_RETRY_US, lambda now_us: threads.forget(old))
        self.log = log
        if self.gone is not None:
            self.log.close()
            return False
        self.processes.end()
        self._count_out()
        self._adopt(rebuilt)
        return True

    def _go_on(self) -> None:
        """Decide the commands that waited, for instance for the first turn of an empty log."""
        if self._inbox:
            self.pump.ready(self)

    def _reopen(self) -> None:
        if not self.reopening:
            self.reopening = True
            self._open_again()

    def _open_again(self) -> None:
        def work() -> object:
            self.log.close()
            return self.open_log()

        def done(result: Any, error: Exception | None) -> None:
            later_us = self.pump.clock.now_us() + FULL_RETRY_US
            if isinstance(error, Full):
                self.pump.at(later_us, lambda now_us: self._open_again())
                return
            self.reopening = False
            if error is not None:
                self._step_down(refuse(error))
                return
            failed = self.fault
            if not self.take_over(*result):
                return
            self.lost = failed  # A sync failed as well: only a restart can tell what it left behind.
            self.wakeups.wake_all()
            self.pump.at(self._full_until_us, lambda now_us: self.restart())

        self.upkeep.after_saving(lambda: self.run_in_order(work, done))

    def restart(self) -> None:
        """Take commands again, and call the hook `reopened`."""
        self.start()
        self.reopened(self)

    @property
    def partition(self) -> int:
        """Its number in the topic."""
        return int(self.name.rpartition("/")[2])

    # -- readers

    @property
    def end_offset(self) -> int:
        """End of the committed messages; only these are ever delivered."""
        return self.tail.end_offset

    @property
    def damage(self) -> Refusal | None:
        """Why nothing behind `end_offset` can be read; a reader there is refused instead of kept waiting."""
        fault = self.fault
        return fault if fault is not None and fault.code in _ILL else None

    @property
    def latest_offset(self) -> int:
        """Offset that "latest" means for readers: the end, or one more when messages behind the end cannot be
        read, so that a reader who gets there is refused. A failed sync counts only if it hid messages."""
        fault = self.damage
        return self.end_offset + (fault is not None and (fault.code == Corrupt.code or self._hidden))

    @property
    def end_entry(self) -> int:
        """End of the committed frames."""
        return self._turns[0].frames[0].header.entry if self._turns else self.entry

    def lost_at(self, offset: int) -> tuple[int, int] | None:
        """The range of lost offsets around an offset; None when it is not lost."""
        return self.state.lost.range_at(offset)

    @property
    def start_offset(self) -> int:
        """The first readable offset. A ring may overwrite messages before they are committed: then the
        decided start lies above the committed end."""
        return min(self.state.start_offset, self.tail.end_offset)

    # -- upkeep

    def limit_tail(self, bytes_max: int) -> None:
        """Set this partition's share of the memory for hot tails."""
        self._tail_bytes = bytes_max
        self.tail.bytes_max = min(self.options.ring_buffer_bytes, bytes_max)

    def limit_cold(self, bytes_max: int) -> None:
        """Set this partition's share of the memory for frames read from the log for delivery."""
        self._cold_bytes = self.at_hand.bytes_max = min(COLD_BYTES, bytes_max)

    def reconfigure(self, options: TopicOptions) -> None:
        """Take changed options."""
        self.options = options
        self.state.reconfigure(options)
        self.limit_tail(self._tail_bytes)

    def stats(self) -> LogStats:
        """Stats of the log, with the fault of the partition and the end that readers see."""
        stats = self.log.stats()
        if self.fault is None:
            return stats
        fault, end_offset = stats.fault or self.fault.message, min(stats.end_offset, self.end_offset)
        return msgspec.structs.replace(stats, fault=fault, end_offset=end_offset)

    def close(self, closed: Callable[[object, Exception | None], None]) -> None:
        """Store a snapshot, then close the log."""
        self.wakeups.stop()
        self.releases.stop()
        self.processes.end()
        self._closing = True
        self.upkeep.save_snapshot(lambda: self.run_in_order(lambda: self.log.close(), closed))

    def retire(self, closed: Callable[[object, Exception | None], None]) -> None:
        """The topic was deleted: refuse everything from now on, and close the log."""
        self.fault = self.gone = Refusal("not_found", f"topic {self.topic!r} was deleted")
        self.processes.end()
        self._count_out()
        self.upkeep.after_saving(lambda: self.run_in_order(lambda: self.log.close(), closed))
        self.wakeups.wake_all()

    def forget(self) -> None:
        """After `retire`: let the storage threads forget this log."""
        self.pump.threads.forget(self.log)
        self.assurance.forget()
        self.upkeep.forget()
