"""The delivery world holds over fixed seeds, and each planted bug is caught: the test of the tests.

Covers `sim/delivery_history.py`, `sim/network.py`, `sim/actors/sim_auditors.py`,
`sim/actors/sim_members.py`, `sim/actors/sim_publishers.py`, `sim/actors/sim_trimmers.py`,
`sim/actors/sim_vandals.py`, `sim/actors/sim_writers.py`, `sim/worlds/broker_world.py` and
`sim/worlds/delivery_world.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

from tailrace.broker.deadletter import dead_letter_batch
from tailrace.broker.partition import frame_cache
from tailrace.broker.runtime.maintenance import Maintenance
from tailrace.broker.runtime.partition_runtime import PartitionRuntime
from tailrace.broker.runtime.pump import Pump, Timer
from tailrace.core import partition
from tailrace.core.collections.timing_wheel import WIDTH, TimingWheel
from tailrace.core.delay.delay_queue import DelayQueue
from tailrace.core.lost_offsets import LostOffsets
from tailrace.core.model import facts
from tailrace.core.model.decision import Decision
from tailrace.core.model.identifiers import Columns, Refusal
from tailrace.core.model.queue_commands import Ack, Settled
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.partition_clock import PartitionClock
from tailrace.core.process.dead_letter_process import DeadLetterProcess
from tailrace.core.process.process import Begun, Effect, Event, Now
from tailrace.core.process.session_process import SessionProcess
from tailrace.core.queue import lease_decision, ledger, settle_decision
from tailrace.core.queue.group_queues import GroupQueues
from tailrace.core.queue.ledger import Ledger
from tailrace.core.queue.settle_decision import SettleDecision
from tailrace.core.selection.row_selector import RowSelector
from tailrace.core.selection.selection_terms import Selection
from tailrace.format.gathering import columns_of
from tailrace.sim.worlds import delivery_world
from tests.sim.planted import Plant, first_caught, reached, title

SEEDS = 8
BUG_SEEDS = 50


def test_every_seed_holds_and_most_states_are_reached() -> None:
    found = reached(delivery_world.run, range(SEEDS))
    assert len(delivery_world.STATES - found) <= 4, delivery_world.STATES - found


def test_same_seed_same_run() -> None:
    assert delivery_world.run(3) == delivery_world.run(3)


# ------------------------------------------------------------------------------------------- planted bugs


def _settled_without_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one group settles is settled for all."""
    apply = GroupQueues.apply

    def for_all(self: GroupQueues, fact: Any) -> None:
        apply(self, fact)
        if isinstance(fact, facts.Acked):
            spans = sorted(
                pair for _, flat in fact.leases for pair in zip(flat[::2], flat[1::2], strict=True)
            )
            flat = [bound for pair in spans for bound in pair]
            for other in self._by_number.values():
                if other.number != fact.group:
                    other.settle_offsets(facts.OffsetsSettled(other.number, flat, fact.time_us))

    monkeypatch.setattr(GroupQueues, "apply", for_all)


def _retry_never_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "back_off_us", lambda *arguments: 10**15)


def _expiry_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle_decision.SettleDecision, "expire", lambda self: ())


def _expired_ones_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lease held when it ended is taken for done."""

    def forget(self: Ledger, fact: facts.LeaseExpired) -> None:
        lease = self.receipts.live.get(fact.lease)
        if lease is not None:
            self._settle([bound for piece in self.left_of(lease) for bound in piece[:2]], fact.time_us)

    monkeypatch.setattr(Ledger, "expire", forget)


def _order_of_keys_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "keyed", property(lambda self: False))


def _keys_in_flight_forgotten_when_a_topic_becomes_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    leased_rows = Ledger.leased_rows
    monkeypatch.setattr(Ledger, "leased_rows", lambda self: [row for row in leased_rows(self) if row[3]])


def _keys_of_others_forgotten_when_a_topic_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "divided", property(lambda self: self.sharing))


@pytest.mark.parametrize(
    "plant",
    [
        _keys_in_flight_forgotten_when_a_topic_becomes_shared,
        _keys_of_others_forgotten_when_a_topic_is_divided,
    ],
)
def test_order_lost_at_the_switch_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(delivery_world.run(seed, crowding=True)["topic divided"] for seed in range(3))
    plant(monkeypatch)
    crowded = partial(delivery_world.run, crowding=True)
    assert first_caught(crowded, range(BUG_SEEDS)) is not None


def _dying_removed_before_burial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        DeadLetterProcess, "_death_synced", lambda self, reply, now: DeadLetterProcess._settle_here(self)
    )


def _dead_letters_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The append to the dead letters has another dedup id each time, so a crash in between repeats it."""
    encode, times = dead_letter_batch._encode, count()

    def unlike(rows: Any, origin: Any, deaths: Any) -> Any:
        return encode(rows, origin, [f"{death}/{next(times)}" for death in deaths])

    monkeypatch.setattr(dead_letter_batch, "_encode", unlike)


def _delayed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = DelayQueue.schedule

    def hasty(self: DelayQueue, fact: facts.Delayed) -> None:
        assert fact.view.deliver_at_us is not None
        view = msgspec.structs.replace(fact.view, deliver_at_us=fact.view.deliver_at_us - 90_000)
        schedule(self, msgspec.structs.replace(fact, view=view))

    monkeypatch.setattr(DelayQueue, "schedule", hasty)


def _delayed_forgotten_by_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DelayQueue, "load", lambda self, columns: None)


def _cancel_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimingWheel, "cancel", lambda self, refs: np.empty((0, WIDTH), np.int64))


def _lanes_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of lanes passes over a message now and then, and never comes back to it."""
    select = RowSelector.select

    def skipping(self: RowSelector, *arguments: Any) -> Selection:
        chosen = select(self, *arguments)
        if len(chosen.offsets) > 2:
            self.acked([chosen.offsets[-1], chosen.offsets[-1] + 1])
            keys = chosen.keys[:-1] if chosen.keys else chosen.keys
            return msgspec.structs.replace(chosen, offsets=chosen.offsets[:-1], keys=keys)
        return chosen

    monkeypatch.setattr(RowSelector, "select", skipping)


def _stale_receipts_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    ack = settle_decision.SettleDecision.ack
    monkeypatch.setattr(
        settle_decision.SettleDecision,
        "ack",
        lambda self, command: msgspec.structs.replace(ack(self, command), reply=Settled()),
    )


def _leased_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then a lease does not keep others from the same messages."""
    lease = Ledger.lease

    def shared(self: Ledger, fact: facts.Leased) -> None:
        lease(self, fact)
        if fact.lease % 16 == 0:
            self.give_back(facts.GivenBack(self.number, fact.spans, fact.time_us, fact.keys))

    monkeypatch.setattr(Ledger, "lease", shared)


def _lease_survives_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receipts from before are taken for the messages that start again."""

    def reset(self: Ledger, fact: facts.GroupReset) -> None:
        self.generation = fact.generation

    monkeypatch.setattr(Ledger, "reset", reset)


def _delivery_taken_for_an_ack(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = Ledger.lease

    def done(self: Ledger, fact: facts.Leased) -> None:
        lease(self, fact)
        self.ack(facts.Acked(self.number, [(fact.lease, fact.spans)], fact.time_us))

    monkeypatch.setattr(Ledger, "lease", done)


def _ack_answered_before_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = partition.Partition.decide

    def hasty(self: partition.Partition, command: Any, turn: TurnInput) -> Decision:
        decision = decide(self, command, turn)
        return msgspec.structs.replace(decision, soft=True) if isinstance(command, Ack) else decision

    monkeypatch.setattr(partition.Partition, "decide", hasty)


def _no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "back_off_us", lambda *arguments: 0)


def _giving_back_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Ledger, fact: facts.GivenBack) -> None:
        self._fail(fact.spans, fact.keys, 0, fact.time_us)

    monkeypatch.setattr(Ledger, "give_back", fail)


def _never_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    def bury(self: settle_decision.SettleDecision, pieces: Any, known: Any, error: str, found: Any) -> Any:
        return pieces

    monkeypatch.setattr(settle_decision.SettleDecision, "_bury", bury)


def _fence_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_decision, "fenced", lambda *arguments: None)


def _end_of_life_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_cache, "columns_of", lambda *arguments: _endless(columns_of(*arguments)))


def _endless(columns: Columns) -> Columns:
    return msgspec.structs.replace(columns, expires_us=None)


def _state_kept_after_a_failed_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_fenced(self: PartitionRuntime, refusal: Refusal) -> None:
        self.fault = self.fault or refusal

    monkeypatch.setattr(PartitionRuntime, "_step_down", only_fenced)


def _only_a_clean_stop_leaves_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionRuntime, "shorten_replay", lambda self: None)


def _durations_on_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that was put back over a restart stops leases and back-offs until it has caught up."""
    monkeypatch.setattr(PartitionClock, "time_us", lambda self, now_us: now_us)
    monkeypatch.setattr(PartitionClock, "steady_us", lambda self, time_us: time_us)


def _absolute_times_on_the_partition_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one append under a fast clock messages are released early, and expire early."""
    decide = partition.Partition.decide

    def by_one_clock(self: partition.Partition, command: Any, turn: TurnInput) -> Decision:
        return decide(self, command, msgspec.structs.replace(turn, wall_us=turn.now_us))

    monkeypatch.setattr(partition.Partition, "decide", by_one_clock)


def _deliveries_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that kills its member each time is delivered for ever."""
    monkeypatch.setattr(SettleDecision, "_wear_out", lambda self, pieces, error: [])


def _the_clocks_take_the_timer_from_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a schedule waits for a tick that is far away nothing ends: no lease, and no session of those who
    died while the broker was away."""

    def at_wall(self: Pump, due_us: int, action: Callable[[int], None]) -> Timer:
        timer, first = self._wall_timers.add(due_us, action)
        if first:
            self._arm(due_us - self.clock.wall_us() + self.clock.now_us())
        return timer

    monkeypatch.setattr(Pump, "at_wall", at_wall)


def _members_of_the_last_run_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that starts watches only over those who show themselves to it: who died before keeps what it
    had, and the group stands still."""
    step = SessionProcess.step

    def stepping(self: SessionProcess, event: Event, now: Now) -> Sequence[Effect]:
        effects = step(self, event, now)
        return () if isinstance(event, Begun) else effects

    monkeypatch.setattr(SessionProcess, "step", stepping)


def _a_trim_outlives_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trimmed goes at once, and not when a snapshot is stored that has the trim."""

    def free(self: Maintenance) -> None:
        captured = self._asks.capture()
        if captured is not None and self._asks.well() is not None:
            log, offset, floor = captured.log, captured.start_offset, self._floor
            self._asks.in_order(lambda: log.trim(offset, floor), self.done)
        self.save_snapshot()

    monkeypatch.setattr(Maintenance, "free", free)


def _a_snapshot_vouches_for_later_trims(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is freed goes by the state, which is ahead of the snapshot that was stored."""
    trim = Maintenance._trim

    def hasty(self: Maintenance) -> None:
        captured = self._asks.capture()
        if captured is not None:
            self._stored_start = captured.start_offset
        trim(self)

    monkeypatch.setattr(Maintenance, "_trim", hasty)


def _damage_found_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionRuntime, "damaged", lambda self, error, source: None)


def _lost_messages_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lost is settled as if somebody had done it."""

    def lose(self: Ledger, spans: Any, time_us: int) -> None:
        self.counters.acked += self.settled_anyhow(spans, time_us)

    monkeypatch.setattr(Ledger, "lose", lose)


def _readers_pass_over_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LostOffsets, "apply", lambda self, fact: None)


def _an_accepted_loss_settles_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    lose = Ledger.lose

    def more(self: Ledger, spans: Any, time_us: int) -> None:
        lose(self, [max(spans[0] - 1, self.committed()), *spans[1:]], time_us)

    monkeypatch.setattr(Ledger, "lose", more)


BUGS: list[Plant] = [
    _damage_found_is_not_shown,
    _lost_messages_not_counted,
    _readers_pass_over_a_loss,
    _an_accepted_loss_settles_its_neighbours,
    _a_trim_outlives_its_record,
    _a_snapshot_vouches_for_later_trims,
    _the_clocks_take_the_timer_from_each_other,
    _members_of_the_last_run_forgotten,
    _deliveries_not_counted,
    _durations_on_wall_time,
    _absolute_times_on_the_partition_clock,
    _settled_without_the_group,
    _retry_never_handed_out,
    _expiry_lost,
    _expired_ones_settled,
    _order_of_keys_ignored,
    _dying_removed_before_burial,
    _delayed_too_early,
    _cancel_ignored,
    _lanes_skip,
    _stale_receipts_taken,
    _leased_twice,
    _lease_survives_a_reset,
    _delivery_taken_for_an_ack,
    _ack_answered_before_it_is_stored,
    _no_back_off,
    _giving_back_counts_as_a_failure,
    _never_dies,
    _dead_letters_doubled,
    _delayed_forgotten_by_a_restart,
    _fence_is_open,
    _end_of_life_ignored,
    _state_kept_after_a_failed_sync,
    _only_a_clean_stop_leaves_a_snapshot,
]


RARE = {
    _absolute_times_on_the_partition_clock: 50,
    _deliveries_not_counted: 90,
    _a_snapshot_vouches_for_later_trims: 50,
    _state_kept_after_a_failed_sync: 185,
}
"""Bugs that few seeds show: 56, 97, 54 and 190 are the first that do; the search begins shortly before."""


@pytest.mark.parametrize("plant", BUGS, ids=title)
def test_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    first = RARE.get(plant, 0)
    assert first_caught(delivery_world.run, range(first, first + BUG_SEEDS)) is not None


@pytest.mark.parametrize("seed", [603, 674, 934, 1036, 1254, 1569, 1571, 1725])
def test_seeds_that_failed_once(seed: int) -> None:
    """603, 674: a read of a damaged log ends when that has been mended and opened again.
    934: a leased message is trimmed. 1036: a partition comes back from quarantine between two acks of the
    same messages, and takes the second one. 1254: a message is trimmed while its dead letter is made.
    1569: power fails after an accepted loss. 1571: staged messages become due while they are applied.
    1725: the disk is full while a shared group is reset, and members keep the generation that was lost."""
    delivery_world.run(seed)
