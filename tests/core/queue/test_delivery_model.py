"""Random lives of several groups on one partition: every reply is one that the model of its group allows.

Covers `core/queue/run_selector.py`.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tailrace.core.model.commands import Publish
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.identifiers import BatchView
from tailrace.core.model.internal_commands import Enlist, LeaseRun, PublishBatch, RunLeased
from tailrace.core.model.queue_commands import Nack
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.partition import Partition
from tests.core.delivery_model import DYING, LEASED, Letter
from tests.core.modelled_partition import T0, ModelledPartition, Shelf
from tests.core.turns import at

SETTLES = ("ack", "ack", "nack", "nack", "nack some", "give back", "unstarted", "reject", "extend")
ACTS = ("grant", "evict", "reopen", "settle", "trim", "foreign", "pause", "pause", "reset", "anew")
MEMBERS = ("ada", "bob", "eve")
GROUPS = ("billing", "mailing", "search")
LOG_MAX = 80
"""The model is plain, and slow with many messages."""

POLICIES = st.builds(
    GroupPolicy,
    assignment=st.sampled_from(["partitions", "shared"]),
    ordering=st.sampled_from(["none", "key", "key", "partition"]),
    start=st.sampled_from(["earliest", "earliest", "latest"]),
    lease_ms=st.sampled_from([1_000, 30_000]),
    max_attempts=st.sampled_from([1, 2, 3, 5]),
    max_deliveries=st.sampled_from([0, 1, 2, 3, 6]),
    backoff_ms=st.sampled_from([1_000, 100]),
    backoff_max_ms=st.sampled_from([60_000, 1_500]),
    in_flight_max=st.sampled_from([3, 10_000]),
    priority_mode=st.sampled_from(["weighted", "strict"]),
    starvation_ms=st.sampled_from([30_000, 3_000]),
    expired_to_dlq=st.booleans(),
)
STEPS_US = st.sampled_from([1, 499_999, 1_000_001, 3_000_001, 31_000_001, 61_000_001])
PLAIN = st.builds(Letter)
KEYED = st.builds(Letter, st.sampled_from(["a", "a", "b", None]))
LANED = st.builds(Letter, st.none(), st.integers(0, 4))
ENDING = st.builds(Letter, st.none(), st.just(2), st.sampled_from([0, T0 + 700_000, T0 + 5_000_000]))
MIXED = st.builds(
    Letter,
    st.sampled_from(["a", "b", "c", None]),
    st.sampled_from([0, 1, 2, 2, 4]),
    st.sampled_from([0, 0, 0, T0 + 2_000_000, T0 + 40_000_000]),
)
LETTERS = (PLAIN, KEYED, LANED, ENDING, MIXED)
BATCHES = st.one_of(*(st.lists(kind, min_size=1, max_size=6) for kind in LETTERS))


class Groups(RuleBasedStateMachine):
    """Three groups, three members; whatever can be done is done in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.play = self.partition()
        self.told: dict[str, list[tuple[int, list[int]]]] = {name: [] for name in GROUPS}
        """Receipts that were ever given out, stale ones too."""

    def partition(self) -> ModelledPartition:
        return ModelledPartition()

    @initialize(policies=st.tuples(POLICIES, POLICIES, POLICIES), batch=BATCHES)
    def begin(self, policies: tuple[GroupPolicy, ...], batch: list[Letter]) -> None:
        self.play.publish(batch)
        for name, policy in zip(GROUPS, policies, strict=True):
            self.play.enlist(name, policy)
            if policy.assignment != "shared":
                self.play.grant(name, MEMBERS[0])

    @rule(batch=BATCHES)
    def publish(self, batch: list[Letter]) -> None:
        if len(self.play.log) < LOG_MAX:
            self.play.publish(batch)

    @rule(batch=st.lists(PLAIN, min_size=1, max_size=4), data=st.data())
    def delay(self, batch: list[Letter], data: Any) -> None:
        delays = st.sampled_from([0, 1, 5_000, 700_000, 5_000_000])
        self.play.schedule(batch, [data.draw(delays) for _ in batch])

    @rule(
        batch=st.lists(PLAIN, min_size=1, max_size=4),
        pause_us=st.sampled_from([0, 0, 5_000, 1_000_000]),
        data=st.data(),
    )
    def stage(self, batch: list[Letter], pause_us: int, data: Any) -> None:
        delays = st.sampled_from([0, 1, 5_000, 700_000, 5_000_000])
        self.play.stage(batch, [data.draw(delays) for _ in batch], pause_us)

    @rule(limit=st.sampled_from([1, 2, 100]), between=st.sampled_from([False, False, True]))
    def release(self, limit: int, between: bool) -> None:
        self.play.release(limit, cancel_between=between)

    @precondition(lambda self: self.play.delays.rows)
    @rule(data=st.data(), hint=st.booleans())
    def cancel(self, data: Any, hint: bool) -> None:
        row = data.draw(st.sampled_from(self.play.delays.rows))
        self.play.cancel([row.id], [row.deliver_at_us if hint else 0])

    @rule(
        group=st.sampled_from(GROUPS),
        member=st.sampled_from(MEMBERS),
        count=st.sampled_from([1, 2, 3, 100, 100]),
        size=st.sampled_from([1, 1 << 20, 1 << 20]),
        stale=st.sampled_from([0, 0, 0, 0, 0, 1]),
        own=st.sampled_from([True, True, True, False]),
        lease_ms=st.sampled_from([None, None, None, 5_000]),
        alone=st.sampled_from([False, False, False, True]),
    )
    def lease(
        self,
        group: str,
        member: str,
        count: int,
        size: int,
        stale: int,
        own: bool,
        lease_ms: int | None,
        alone: bool,
    ) -> None:
        model = self.play.groups[group]
        if own and model.policy.assignment != "shared":
            member = model.holder[0]
        lease = self.play.lease(group, member, count, size, stale=stale, lease_ms=lease_ms, alone=alone)
        if lease is not None:
            self.told[group].append((lease, model.of_lease(lease)))

    def receipt(self, group: str, data: Any) -> tuple[int, list[int]] | None:
        """A receipt, mostly of what is leased now."""
        live = [item for item in self.told[group] if self.play.groups[group].of_lease(item[0])]
        items = live if live and data.draw(st.integers(0, 4)) else self.told[group]
        if not items:
            return None
        lease, offsets = data.draw(st.sampled_from(items))
        if data.draw(st.booleans()):
            return lease, [part for offset in sorted(offsets) for part in (offset, offset + 1)]
        offset = data.draw(st.sampled_from(offsets))
        return lease, [offset, offset + 1]

    @rule(group=st.sampled_from(GROUPS), data=st.data(), act=st.sampled_from(SETTLES))
    def settle(self, group: str, data: Any, act: str) -> None:
        if not (receipt := self.receipt(group, data)):
            return
        if act == "ack":
            self.play.ack(group, *receipt)
        elif act == "nack":
            self.play.nack(group, *receipt, data.draw(st.sampled_from([None, None, 0, 2_000])))
        elif act == "give back":
            self.play.nack(group, *receipt, failure=False)
        elif act == "nack some":
            lease, spans = receipt
            rest = (lease, spans[2:]) if spans[2:] else None
            self.play.nack(group, lease, spans[:2], started=rest)
        elif act == "unstarted":
            self.play.give_back(group, *receipt)
        elif act == "reject":
            self.play.reject(group, *receipt)
        else:
            self.play.extend(group, receipt[0], data.draw(st.sampled_from([500, 60_000])))

    @rule(step=STEPS_US, look=st.sampled_from([True, True, False]))
    def time_passes(self, step: int, look: bool) -> None:
        self.play.pass_time(step, look=look)

    @precondition(lambda self: any(model.offsets(DYING) for model in self.play.groups.values()))
    @rule(data=st.data())
    def bury(self, data: Any) -> None:
        groups = [name for name, model in self.play.groups.items() if model.offsets(DYING)]
        group = data.draw(st.sampled_from(groups))
        offset = data.draw(st.sampled_from(self.play.groups[group].offsets(DYING)))
        self.play.bury(group, [offset, offset + 1])

    @rule(choice=st.sampled_from(range(-10, 10)), data=st.data())
    def stop(self, choice: int, data: Any) -> None:
        """Frames leave memory, and sometimes the broker ends; a crash takes soft facts with it."""
        bases = [frame.base_offset for frame in self.play.shelf.frames]
        self.play.shelf.away = set(data.draw(st.lists(st.sampled_from(bases))))
        if choice > 5:
            self.play.restart()
        elif choice >= 0:
            self.play.crash(choice)

    @rule(group=st.sampled_from(GROUPS), data=st.data(), act=st.sampled_from(ACTS))
    def administer(self, group: str, data: Any, act: str) -> None:
        play, model = self.play, self.play.groups[group]
        log, start = play.log, play.partition.start_offset
        if act == "grant":
            if model.policy.assignment != "shared":
                play.grant(group, data.draw(st.sampled_from([*MEMBERS, ""])))
        elif act == "evict":
            play.evict(group, data.draw(st.sampled_from(MEMBERS)))
        elif act == "pause":
            play.pause(group, not model.paused)
        elif act == "reset":
            play.reset(group, data.draw(st.integers(start, len(log))))
        elif act == "reopen":
            first = data.draw(st.integers(0, len(log) - 1))
            play.reopen(group, [first, min(first + data.draw(st.integers(1, 4)), len(log))])
        elif act == "settle":
            offsets = [o for o in model.states if o not in model.offsets(DYING)]
            if offsets:
                offset = data.draw(st.sampled_from(offsets))
                play.settle_offsets(group, [offset, offset + 1])
        elif act == "trim":
            play.trim(data.draw(st.integers(start, min(start + 3, len(log)))))
        elif act == "foreign":  # one group's receipt is nothing to another
            other = data.draw(st.sampled_from(GROUPS))
            if other != group and (receipt := self.receipt(other, data)):
                play.ack(group, *receipt)
        else:
            policy = data.draw(POLICIES)
            play.delist(group)
            play.enlist(group, policy)
            if policy.assignment != "shared":
                play.grant(group, MEMBERS[1])

    @invariant()
    def nobody_has_the_same_twice(self) -> None:
        for model in self.play.groups.values():
            assert all(model.states[o].lease in model.leases for o in model.offsets(LEASED))

    def teardown(self) -> None:
        for name in self.play.groups:
            self.play.drain(name, "zoe")


TestGroups = Groups.TestCase
TestGroups.settings = settings(
    stateful_step_count=50, max_examples=min(settings.default.max_examples * 2 // 5, 400)
)


@pytest.mark.parametrize("retries", [False, True])
def test_weights_are_observed_over_any_thousand_deliveries(retries: bool) -> None:
    """A backlog of all lanes, taken in pieces of any size; what fails comes back in its lane."""
    random, shares = Random(1), (50, 25, 15, 7, 3)
    partition, shelf, lanes = Partition(TopicOptions()), Shelf(), []
    for _ in range(60):
        count = random.choice((50, 150))
        letters = [Letter(priority=lane) for lane in random.choices(range(5), shares, k=count)]
        columns = shelf.add(letters, len(lanes), T0)
        view = BatchView(len(letters), columns, 1000, T0, priorities=shelf.frames[-1].priorities)
        _do(partition, shelf, PublishBatch(Publish("t", 0, columns, 0), view))
        lanes += [letter.priority for letter in letters]
    _do(partition, shelf, Enlist("g", GroupPolicy(assignment="shared", ordering="none")))
    given: list[int] = []
    while len(given) < len(lanes) // 2:
        size, lease = random.choice((1, 7, 64, 300)), len(given) + 1
        leased = _do(partition, shelf, LeaseRun("g", "m", 0, lease, size, 1 << 30, len(lanes)))
        assert isinstance(leased, RunLeased)
        offsets = [first + at for first, count, _, _ in leased.runs for at in range(count)]
        given += [lanes[offset] for offset in offsets]
        if retries and random.random() < 0.2:
            _do(partition, shelf, Nack("t", 0, "g", lease, [offsets[0], offsets[0] + 1], 0))
    for begin in range(0, len(given) - 1000, 50):
        window = Counter(given[begin : begin + 1000])
        for lane, share in enumerate(shares):
            assert abs(window[lane] - 10 * share) <= share, f"lane {lane}: {window[lane]} of 1000"


def _do(partition: Partition, shelf: Shelf, command: Any) -> Any:
    decision = partition.decide(command, at(T0, shelf))
    assert decision.missing is None
    for fact in decision.facts:
        partition.apply(fact)
    return decision.reply
