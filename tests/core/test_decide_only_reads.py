"""`decide` only reads: asked twice it says the same, and the snapshot before and after is the same, in random
lives of a partition and of a coordinator.

Honest exceptions are caches, which deciding fills and which no snapshot holds: the rows that `row_selector`
and its key queues have looked at, their notes for the shell (`held_back`, `takers`), the place up to which
`backlog` has compared due times, and the keys and ends that `row_lookup` remembers. They cannot be observed
in decisions: beside each partition lives a twin with the same facts that is asked once only. In between the
partition is asked for much that is thrown away, also as of later times, and it decides what its twin decides.
The one trace is that a partition which was asked more may miss fewer frames: it is told them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tailrace.core.collections.hash_table import Buffer
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.model import internal_commands as inner
from tailrace.core.model.decision import Decision
from tailrace.core.model.group_commands import DeleteSchedule, PutSchedule
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.queue_commands import DecideStaged
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.partition import Partition
from tailrace.core.queue.group_queues import GroupQueues
from tailrace.core.queue.lease_decision import LeaseDecision
from tailrace.core.queue.ledger import Ledger
from tailrace.core.staged.staged_versions import ChooseStaged, FinishStaged
from tests.core.modelled_partition import ModelledPartition
from tests.core.queue.test_delivery_model import Groups
from tests.core.turns import at
from tests.mixtures import mixtures

LATER_US = 61_000_000
PROBE_LEASE = 1 << 60


def plain(value: Any) -> Any:
    """A decision as something that can be compared, with the type of everything in it."""
    if isinstance(value, msgspec.Struct):
        fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        return type(value).__name__, fields
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def image(machine: Partition | Coordinator) -> bytes:
    return b"".join(machine.snapshot())


class CuriousPartition(Partition):
    """A partition that is asked everything twice, and more than that; its twin is asked once."""

    def __init__(self, options: TopicOptions) -> None:
        super().__init__(options)
        self.twin = Partition(options)
        self.compared = 0

    @classmethod
    def restore(cls, options: TopicOptions, chunks: Sequence[Buffer]) -> Partition:
        partition = super().restore(options, chunks)
        assert isinstance(partition, CuriousPartition)
        partition.twin = Partition.restore(options, chunks)
        return partition

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        before = image(self)
        self._probe(turn)
        first, second = super().decide(command, turn), super().decide(command, turn)
        assert plain(first) == plain(second), "asked again it says something else"
        wanted = self.twin.decide(command, turn)
        if first.missing is None and wanted.missing is None:
            assert plain(first) == plain(wanted), "what it was asked before can be observed"
            self.compared += 1
        assert image(self) == before, "deciding changed the state"
        return first if first.missing is not None else wanted

    def _probe(self, turn: TurnInput) -> None:
        later = msgspec.structs.replace(turn, now_us=turn.now_us + LATER_US, wall_us=turn.wall_us + LATER_US)
        for group in self.queues.names():
            known = self.queues.grant(group)
            generation = 0 if known is None else known[1]
            asked = group, "eve", generation, PROBE_LEASE, 2, 1 << 20, self.end_offset
            grant = inner.GrantTo(group, "zoe", generation + 1)
            for probe in (inner.LeaseRun(*asked), inner.ExpireLeases(), grant):
                super().decide(probe, later)
                super().decide(probe, turn)

    def apply(self, fact: Any) -> None:
        super().apply(fact)
        self.twin.apply(fact)


class CuriousGroups(Groups):
    """The lives of `test_delivery_model`."""

    def partition(self) -> ModelledPartition:
        return ModelledPartition(kind=CuriousPartition)


TestCuriousGroups = CuriousGroups.TestCase
TestCuriousGroups.settings = settings(
    stateful_step_count=25, max_examples=max(10, settings.default.max_examples // 5)
)


def _writes_state(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = GroupQueues.decide

    def writing(self: GroupQueues, command: Any, turn: TurnInput) -> Decision:
        for ledger in self._ledgers.values():
            ledger.counters.acked += 1
        return decide(self, command, turn)

    monkeypatch.setattr(GroupQueues, "decide", writing)


def _answers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[int] = set()
    room = LeaseDecision._room

    def once(self: LeaseDecision) -> int:
        known = id(self._command) in asked
        asked.add(id(self._command))
        return 0 if known and self._command.lease != PROBE_LEASE else room(self)

    monkeypatch.setattr(LeaseDecision, "_room", once)


def _tires(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that can be observed: whoever was asked often has less to give."""
    asked: dict[int, tuple[Ledger, int]] = {}
    room = LeaseDecision._room

    def tired(self: LeaseDecision) -> int:
        times = asked.get(id(self._ledger), (self._ledger, 0))[1] + 1
        asked[id(self._ledger)] = self._ledger, times
        return min(room(self), 1) if times > 10 else room(self)

    monkeypatch.setattr(LeaseDecision, "_room", tired)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (_writes_state, "deciding changed the state"),
        (_answers_once, "asked again it says something else"),
        (_tires, "what it was asked before can be observed"),
    ],
)
def test_planted_faults_are_noticed(plant: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    lives = settings(
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        stateful_step_count=20,
        max_examples=100,
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError, match=said):
        run_state_machine_as_test(CuriousGroups, settings=lives)


members = st.sampled_from(["a", "b", "c"])
names = st.sampled_from(["g", "h"])
places = st.lists(st.tuples(st.just("t"), st.integers(0, 3)), max_size=3)
sizes = st.just([("t", 3)]) | st.just([("t", 4), ("u", 1)])
policies = st.builds(
    GroupPolicy,
    assignment=st.sampled_from(["auto", "partitions", "shared"]),
    revoke_timeout_ms=st.just(5_000),
)
versions = st.integers(0, 3)
attempts = st.lists(st.tuples(st.just("t"), st.integers(0, 2), st.just("x")), max_size=2, unique=True)
decisions = st.builds(DecideStaged, st.just("w"), versions, attempts)
commands = mixtures(
    [st.builds(inner.Join, names, members, sizes, policies)],
    [
        st.builds(inner.MakeGroup, names, policies, sizes, st.booleans()),
        st.builds(inner.Leave, names, members),
        st.builds(inner.ConfirmReleased, names, members, places),
        st.builds(inner.ConfirmEnlisted, names, places),
        st.builds(inner.PassTime, names),
        st.builds(inner.ChangeOptions, names, st.just({"assignment": "shared"})),
        st.builds(inner.ResizeTopics, names, sizes),
        st.builds(inner.SetPaused, names, st.booleans()),
        st.builds(inner.DropGroup, names, st.booleans()),
        st.builds(inner.ConfirmForgotten, names, st.integers(1, 3), places),
        st.builds(PutSchedule, names, st.just("t"), st.sampled_from(["* * * * *", "0 * * * *"])),
        st.builds(DeleteSchedule, names),
        st.builds(inner.TickDone, names, st.integers(0, 3)),
        st.builds(ChooseStaged, decisions, st.just({"t": 1})),
        st.builds(FinishStaged, st.just("w"), versions),
        st.builds(inner.Look),
    ],
    max_size=30,
)
steps = st.sampled_from([0, 1, 1_000_000, 6_000_000])


@given(commands, st.data())
def test_a_coordinator_asked_twice_says_the_same(life: list[Any], data: Any) -> None:
    machine, now_us = Coordinator(TopicOptions()), 1_000_000
    for command in life:
        now_us += data.draw(steps)
        before = image(machine)
        turn = at(now_us, wall_us=now_us + 5)
        first = machine.decide(command, turn)
        for probe in life:
            machine.decide(probe, at(now_us + LATER_US))
        assert plain(machine.decide(command, turn)) == plain(first)
        assert plain(Coordinator.restore(TopicOptions(), [before]).decide(command, turn)) == plain(first)
        assert image(machine) == before, "deciding changed the state"
        for fact in first.facts:
            machine.apply(fact)
        machine.check()
