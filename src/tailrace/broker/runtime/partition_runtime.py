"""One partition at work, whatever it holds: its state, its log, and the replies that wait for durability.

    submit ──▶ inbox ──▶ turn: decide, apply all commands ──▶ storage: a write ──▶ stored ──▶ commit: replies

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

*Two marks.* The stored mark (`Assurance.written`) moves by storage: the log is written up to there. The
`committed` mark moves by agreement (`commit`), and never passes the other: what lies below is as durable as
the topic asks. It alone makes messages readable, releases replies, tells processes of facts and lets a
snapshot be stored. On one node `_stored` moves it along; with copies, it waits for enough of them. A log that
is opened counts as committed: with copies, it is served once that is true. What is stored and not committed
when storage fails may come back: its replies become refusals with the outcome `unknown`.

The runtime knows frames and facts. What a partition does with its messages or its groups is added by its two
kinds, in `broker.partition`: they override the methods of `partition_kind`, and extend some here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic

import msgspec

from tailrace.broker.metrics import Metrics
from tailrace.broker.runtime.assurance import Assurance
from tailrace.broker.runtime.framing import TurnFrames
from tailrace.broker.runtime.log_writer import LogWriter
from tailrace.broker.runtime.maintenance import Captured, Maintenance, MaintenanceAsks
from tailrace.broker.runtime.partition_kind import PartitionKind
from tailrace.broker.runtime.process_driver import Processes
from tailrace.broker.runtime.pump import Pump
from tailrace.broker.runtime.recovery import Rebuilt, rebuild
from tailrace.broker.runtime.state_machines import MachineKind, State
from tailrace.broker.runtime.turn import (
    NOTHING,
    NOWHERE,
    Decided,
    Item,
    Late,
    Reach,
    Turn,
    refuse,
    unknown,
)
from tailrace.core.model.commands import Done, Reply
from tailrace.core.model.identifiers import CachedFrames, Refusal
from tailrace.core.model.internal_commands import RecordLoss
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.model.turn_input import NO_FRAMES, TurnInput
from tailrace.core.partition_clock import PartitionClock
from tailrace.errors import Corrupt, Full, StorageFault
from tailrace.format.frame import Buffer
from tailrace.ports import Finished, LogStats, LogStore, PartitionLog, Respond

log = logging.getLogger("tailrace.partition")

FULL_RETRY_US = 1_000_000

_ILL = frozenset((Corrupt.code, StorageFault.code))


class PartitionRuntime(PartitionKind, Generic[State]):
    """A partition at work. All methods run on the pump's thread. Its kinds call `open` when they are made."""

    machine: MachineKind[State]
    state: State

    def __init__(
        self, name: str, topic: str, options: TopicOptions, store: LogStore, pump: Pump, metrics: Metrics
    ) -> None:
        self.name = name
        self.topic = topic
        self.options = options
        self.store = store
        self.pump = pump
        self.metrics = metrics
        self.fault: Refusal | None = None
        self.gone: Refusal | None = None
        """Set when the topic was deleted; readers are refused, too."""
        self.lost: Refusal | None = None
        """Set while there is no state to answer from: storage failed, and the state was dropped."""
        self.cut_bytes = 0
        self._inbox: list[Item] = []
        self._turns: deque[Turn] = deque()
        """Turns with frames that are not committed."""
        self.committed = NOWHERE
        """The point of the log below which everything is committed."""
        self.entry = 0
        """Index of the next frame."""
        self._begun = False
        """Whether there is anything in the log."""
        self.reopening = False
        self._closing = False
        self._full_until_us = 0
        self._writer = LogWriter(pump, self._written)
        self.processes = Processes(())
        """Protocols with other partitions; they live while this one takes commands."""
        self.cache: CachedFrames = NO_FRAMES
        """Frames in memory that decisions may look at."""
        self.clock = PartitionClock(0, pump.clock.now_us())
        """Partition time, on which durations run."""
        self.assurance = Assurance(
            pump.threads,
            lambda: self.log,
            lambda: self.entry,
            lambda error: self.fail(error, outcome="unknown"),
            options.durability,
        )
        self.upkeep = Maintenance(
            name,
            pump,
            metrics,
            self.assurance,
            MaintenanceAsks(self._well, self._capture, self.run_in_order, self.answer),
        )

    # -- opening

    def open(self, *, known: bool) -> None:
        """Open the log and rebuild the state; blocking. With `known` the log has to exist."""
        self.log = self._take_log(known=known)
        try:
            self._adopt(self._recover(self.log))
        except StorageFault as error:
            # This partition cannot be opened; the others can.
            self._adopt(Rebuilt(self.machine.make(self.options), 0, 0, fault=error.message))

    def _take_log(self, *, known: bool) -> PartitionLog:
        take = self.store.known_log if known else self.store.log
        return take(self.name, self._found_damage)

    def _found_damage(self, error: Corrupt, log: PartitionLog) -> None:
        """A read found damage in a log; this runs in the thread of that read."""
        self.pump.threads.tell(lambda found, none: self.damaged(found, log), error)

    def _recover(self, log: PartitionLog) -> Rebuilt[State]:
        """Rebuild the state from snapshot and log; may run on a storage thread."""
        return rebuild(self.name, log, self.machine, self.options)

    def _adopt(self, rebuilt: Rebuilt[State]) -> None:
        self.rebuilt = rebuilt
        self.cut_bytes += rebuilt.cut_bytes
        state = self.state = rebuilt.state
        self.upkeep.owe(rebuilt.debt)
        # Partition time goes on after a reopening, also where the log ends at an earlier time.
        now_us = self.pump.clock.now_us()
        self.clock = PartitionClock(max(state.append_time_us, self.clock.time_us(now_us)), now_us)
        self.entry = rebuilt.end_entry
        self.committed = Reach(rebuilt.end_entry, rebuilt.end_offset, state.start_offset)
        self.assurance.opened(self.committed)
        self._begun = rebuilt.end_entry > 0
        self.lost = None
        if rebuilt.fault is not None:
            self.fault = Refusal("corrupt", rebuilt.fault, "none")

    def start(self) -> None:
        """Commands are taken (again): set timers, resume unfinished work."""
        if self.rebuilt.lost and self.fault is None:
            self._record_loss()
        self._started()
        self.processes.begin(self.state)

    def _record_loss(self) -> None:
        """Append the fact of an accepted loss, before all other commands. When it is synced, whatever the
        topic promises, storage may forget its own note of the loss."""
        self.submit(RecordLoss(list(self.rebuilt.lost)), b"", self.surely(self._loss_recorded))

    def _loss_recorded(self, reply: Reply, parts: object) -> None:
        if type(reply) is not Refusal:  # Else storage failed: the next opening does it.
            self.rebuilt.lost.clear()
            self.run_in_order(self.log.loss_recorded, self._loss_forgotten)

    def _loss_forgotten(self, result: object, error: Exception | None) -> None:
        if error is not None:
            self.fail(error)

    # -- what the kinds of partitions extend

    def _committed(self, turn: Turn) -> None:
        """A turn is committed: its replies leave."""
        for respond, reply in turn.replies:
            respond(reply, NOTHING)

    def _wrote(self, turn: Turn) -> None:
        """A turn is in the log."""
        self.upkeep.wrote(turn.frames)

    def _drop_state(self, reach: Reach) -> None:
        """Replace the state by an empty one that knows where the readable log begins and ends."""
        self.processes.end()
        self.state = self.state.bare(reach.start_offset, reach.end_offset)

    def _hide(self, reach: Reach) -> None:
        """Committed messages behind a point cannot be read any more, because their sync failed."""
        self.committed = reach

    # -- commands

    def submit(self, work: Any, body: Buffer, respond: Respond) -> None:
        """Queue a command for the next turn."""
        if not self._inbox:
            self.pump.ready(self)
        self._inbox.append((work, body, respond))

    def surely(self, respond: Respond) -> Respond:
        """A receiver of a reply that calls `respond` only after a sync; see `assurance`."""
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
        turn = Turn(now_us)
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
            self._turned()

    def answer(self, respond: Respond, reply: Reply) -> None:
        """Reply from the state as it is now; the reply leaves when all facts in that state are stored."""
        if self.lost is not None:
            respond(self.lost, NOTHING)
        elif self._turns:
            self._turns[-1].replies.append((respond, reply))
        else:
            respond(reply, NOTHING)

    def _decide(self, inbox: list[Item], turn: Turn, wall_us: int) -> None:
        state, cache, time_us = self.state, self.cache, self.clock.time_us(turn.started_us)
        made = TurnFrames(self.entry, state.leader_epoch, max(time_us, state.append_time_us), wall_us)
        look = TurnInput(time_us, wall_us, made.next_entry, cache)
        watches = self.processes.watches
        decided: Decided = []
        for work, body, respond in inbox:
            late = type(work) is Late
            command = work.make() if late else work
            if command is None:
                continue
            if look.next_entry != made.next_entry:
                look = TurnInput(time_us, wall_us, made.next_entry, cache)
            decision = state.decide(command, look)
            if decision.missing is not None:
                self._missing(decision.missing, work, body, respond)
                continue
            soft, reply = decision.soft, decision.reply
            if decision.facts:
                made.add(decision, command, body)
                for fact in decision.facts:
                    state.apply(fact)
                    if type(fact) in watches:
                        turn.watched.append(fact)
                if not soft:
                    turn.hard = True
                decided.append((command, decision.facts, soft))
            if late and type(reply) is Done:
                soft = True  # A lease request found nothing: nobody relies on that.
            if type(reply) is Refusal:
                self.metrics.refused(reply.code)
            (turn.at_once if soft else turn.replies).append((respond, reply))
        made.flush()
        self.entry = made.entry
        turn.frames = made.frames
        turn.reach = Reach(made.entry, state.end_offset, state.start_offset)
        if decided:
            self._decided(turn, decided)

    def _write(self, turn: Turn) -> None:
        turn.synced = turn.hard and self.options.durability == "fsync"
        self._writer.write(self.log, turn)

    def run_in_order(self, work: Callable[[], object], done: Finished) -> None:
        """Do other work on the log, in order with its appends."""
        self._writer.run(self.log, work, done)

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

    def _written(self, turn: Turn, error: Exception | None) -> None:
        """The log is written up to the end of a turn, or storage failed. Nothing waits for a turn that an
        earlier failure dropped."""
        if turn.dropped:
            return
        if error is not None:
            self.fail(error)
            return
        written = self.assurance.written.entry
        assert turn.frames[0].header.entry == written, "a log completes its appends in order"
        if not self._begun:
            self._begun = True
            self._go_on()
        self.assurance.stored(turn.reach, turn.synced)
        self._stored(turn.reach)
        self.assurance.release()
        self._wrote(turn)

    def _stored(self, reach: Reach) -> None:
        """The stored mark has moved; on one node that is all that a commit needs."""
        self.commit(reach.entry)

    def commit(self, entry: int) -> None:
        """What lies below an entry is as durable as the topic asks, as far as it is stored here."""
        entry = min(entry, self.assurance.written.entry)
        while self._turns and self._turns[0].reach.entry <= entry:
            turn = self._turns.popleft()
            self.committed = turn.reach
            if turn.watched:
                self.processes.committed(turn.watched)
            self._committed(turn)

    def fail(self, error: Exception, *, outcome: str | None = None) -> None:
        """Drop the state and refuse the replies that wait; then rebuild it, or step down (see above)."""
        refusal = refuse(error)
        if outcome is not None:
            refusal = Refusal(refusal.code, refusal.message, outcome, refusal.details)
        self.assurance.cut()
        self.entry = self.assurance.written.entry
        if isinstance(error, Full):
            self.pump.filled()
            self._full_until_us = self.pump.clock.now_us() + FULL_RETRY_US
            self.lost = self._full()
            self._drop_state(self.assurance.written)
            if not self.reopening:
                self.reopen(self.open_log, self._reopened_full)
        elif isinstance(error, Corrupt):
            self.damaged(error, self.log)
            self.lost = self.fault
            self._drop_state(self.assurance.written)
        else:
            self._step_down(refusal)
        self._drop(refusal)
        self.assurance.fail(error)
        self._go_on()

    def _drop(self, refusal: Refusal) -> None:
        """Refuse the replies of turns that will not be committed. Those that are stored may come back."""
        turns, self._turns = self._turns, deque()
        for turn in turns:
            turn.dropped = True
            told = unknown(refusal) if turn.reach.entry <= self.assurance.written.entry else refusal
            for respond, _ in turn.replies:
                # A refusal that was decided on the dropped state must not be believed either.
                respond(told, NOTHING)

    def _step_down(self, refusal: Refusal) -> None:
        """Hide everything above the last sync: nobody knows what of it is on the disk."""
        if self.fault is None:
            advice = "this partition takes no writes until the broker is restarted"
            text = f"{refusal.message}; {advice}, and only what was synced before can be read"
            self.fault = Refusal(StorageFault.code, text, "unknown", refusal.details)
            log.error("%s/%d steps down: %s", self.topic, self.partition, text)
        self.lost = self.fault
        synced = self.assurance.synced
        if synced.end_offset < self.committed.end_offset:
            self._hide(synced)
        self._drop_state(synced)
        self._look_again()

    def damaged(self, error: Exception, source: PartitionLog) -> None:
        """Quarantine, after a read found damage in a log: no more writes and leases. Whole frames are still
        read. What is found in a log that was opened again meanwhile counts no more: it may be mended."""
        if self.damage is not None or self.gone is not None or source is not self.log:
            return
        self.fault = msgspec.structs.replace(refuse(error), code=Corrupt.code, outcome="none")
        log.error("%s/%d is quarantined: %s", self.topic, self.partition, self.fault.message)
        self.metrics.damage_found()
        self._ended()
        self._go_on()
        self._look_again()

    def reopen(self, opening: Callable[[], object], opened: Finished) -> None:
        """Close the log, behind everything that was begun before, and open it again by `opening`, which may
        block; no commands are taken meanwhile."""
        self.reopening = True
        work = partial(_closed_first, self.log, opening)
        self.upkeep.after_saving(partial(self.run_in_order, work, opened))

    def open_log(self) -> tuple[PartitionLog, Rebuilt[State]]:
        """Open the log again and rebuild the state from it; blocking."""
        log = self._take_log(known=True)
        try:
            return log, self._recover(log)
        except StorageFault:
            log.close()
            raise

    def _take_over(self, log: PartitionLog, rebuilt: Rebuilt[State]) -> bool:
        """Continue on a log that was opened again; false when the topic was deleted meanwhile."""
        old, threads = self.log, self.pump.threads
        self.pump.at(self.pump.clock.now_us() + FULL_RETRY_US, lambda now_us: threads.forget(old))
        self.log = log
        if self.gone is not None:
            self.log.close()
            return False
        self.processes.end()
        self._ended()
        self._drop(Refusal(Corrupt.code, f"{self.name}: the log was opened again", "unknown"))
        self._adopt(rebuilt)
        return True

    def _go_on(self) -> None:
        """Decide the commands that waited, for instance for the first turn of an empty log."""
        if self._inbox:
            self.pump.ready(self)

    def _reopened_full(self, result: Any, error: Exception | None) -> None:
        """The log was opened again after a write found no space."""
        if isinstance(error, Full):
            later_us = self.pump.clock.now_us() + FULL_RETRY_US
            self.pump.at(later_us, lambda now_us: self.reopen(self.open_log, self._reopened_full))
            return
        self.reopening = False
        if error is not None:
            self._step_down(refuse(error))
            return
        failed = self.fault
        if not self._take_over(*result):
            return
        self.lost = failed  # A sync failed as well: only a restart can tell what it left behind.
        self._look_again()
        self.pump.at(self._full_until_us, lambda now_us: self.restart())

    def mended(self, log: PartitionLog, rebuilt: Rebuilt[State]) -> None:
        """The log was opened again without its damage: continue on it, if its topic is still there."""
        self.reopening = False
        if self.gone is None:
            self.fault = None
        if self._take_over(log, rebuilt) and self.fault is None:
            self.restart()
            self.upkeep.save_snapshot()  # So that no replay has to cross a gap: it would know less.

    def not_mended(self, error: Exception) -> None:
        """The log cannot be opened any more."""
        self.reopening = False
        self.fault = refuse(error)

    def restart(self) -> None:
        """Take commands again, and tell the node that the state is another one."""
        self.start()
        self._reopened()

    @property
    def partition(self) -> int:
        """Its number in the topic."""
        return int(self.name.rpartition("/")[2])

    # -- readers

    @property
    def end_offset(self) -> int:
        """End of the committed messages; only these are ever delivered."""
        return self.committed.end_offset

    @property
    def end_entry(self) -> int:
        """End of the committed frames."""
        return self.committed.entry

    @property
    def start_offset(self) -> int:
        """The first readable offset. A ring may overwrite messages before they are committed: then the
        decided start lies above the committed end."""
        return min(self.state.start_offset, self.committed.end_offset)

    @property
    def damage(self) -> Refusal | None:
        """Why nothing behind `end_offset` can be read; a reader there is refused instead of kept waiting."""
        fault = self.fault
        return fault if fault is not None and fault.code in _ILL else None

    # -- upkeep

    def _well(self) -> PartitionLog | None:
        return self.log if self.fault is None and self.lost is None else None

    def _capture(self) -> Captured | None:
        if self.fault is not None or self.reopening or not self.entry:
            return None
        state = self.state
        encode = state.freeze()
        return Captured(
            self.log, self.entry - 1, state.end_offset, state.start_offset, self.lowest_entry(), encode
        )

    def sync(self, now_us: int) -> None:
        """With `durability = interval`: sync when the interval is over or enough was written."""
        if self.options.durability == "interval" and self.fault is None and not self.reopening:
            self.upkeep.sync(now_us, self.options.sync_interval_ms * 1000)

    @property
    def replayed(self) -> bool:
        """Whether a restart replays this log and a snapshot of it can be taken now."""
        return self.options.storage != "memory" and self.fault is None and not self.reopening

    def shorten_replay(self) -> None:
        """Take a snapshot, so that a restart replays less."""
        self.upkeep.save_snapshot()

    def reconfigure(self, options: TopicOptions) -> None:
        """Take changed options."""
        self.options = options
        self.state.reconfigure(options)
        self.assurance.reconfigure(options.durability)

    def stats(self) -> LogStats:
        """Stats of the log, with the fault of the partition and the end that readers see."""
        stats = self.log.stats()
        fault = stats.fault or (None if self.fault is None else self.fault.message)
        end_offset = min(stats.end_offset, self.end_offset)
        return msgspec.structs.replace(stats, fault=fault, end_offset=end_offset)

    def close(self, closed: Finished) -> None:
        """Store a snapshot, then close the log."""
        self.processes.end()
        self._closing = True
        self.upkeep.save_snapshot(lambda: self.run_in_order(lambda: self.log.close(), closed))

    def retire(self, closed: Finished) -> None:
        """The topic was deleted: refuse everything from now on, and close the log."""
        self.fault = self.gone = Refusal("not_found", f"topic {self.topic!r} was deleted")
        self.processes.end()
        self._ended()
        self.upkeep.after_saving(lambda: self.run_in_order(lambda: self.log.close(), closed))
        self._look_again()

    def forget(self) -> None:
        """After `retire`: let the storage threads forget this log, and refuse what was not committed."""
        assert self.gone is not None
        self._drop(self.gone)
        self.pump.threads.forget(self.log)
        self.assurance.forget()
        self.upkeep.forget()


def _closed_first(log: PartitionLog, opening: Callable[[], object]) -> object:
    log.close()
    return opening()
