"""`decide` only reads: asked twice it says the same, and the snapshot before and after is the same, in random
lives of a partition and of a coordinator.

Honest exceptions are caches, which deciding fills and which no snapshot holds. `CACHES` names them; every
other attribute of a partition, however deep, is compared before and after each decision. That the caches
cannot be observed is shown by a twin with the same facts that is asked once only. In between the partition is
asked for much that is thrown away, also as of later times, and it decides what its twin decides. The one
trace is that a partition which was asked more may miss fewer frames: it is told them again.

No kind of command is left out: three sorts of lives ask all that a partition decides, and each kind leads to
facts in some of them (`test_every_kind_of_command_is_asked`); a coordinator has a case for each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tailrace.core.collections.hash_table import Buffer
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.model import internal_commands as inner
from tailrace.core.model.commands import Publish
from tailrace.core.model.decision import Decision
from tailrace.core.model.group_commands import DeleteSchedule, PutSchedule
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.queue_commands import (
    Ack,
    DecideStaged,
    Extend,
    GiveBack,
    Nack,
    RejectMessages,
    Reopen,
)
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.model.turn_input import TurnInput
from tailrace.core.partition import Partition
from tailrace.core.queue.group_queues import GroupQueues
from tailrace.core.queue.lease_decision import LeaseDecision
from tailrace.core.queue.ledger import Ledger
from tailrace.core.staged.staged_batches import attempt_number
from tailrace.core.staged.staged_versions import ChooseStaged, FinishStaged
from tests.core.modelled_partition import ModelledPartition
from tests.core.oracle import Oracle, Row, view_of
from tests.core.queue.test_delivery_model import Groups
from tests.core.test_replay import LIVES, OPTIONS, PRODUCERS_MAX, T0, WINDOW_MS, play
from tests.core.turns import at
from tests.mixtures import dear, mixtures

CACHES = {
    "Ledger.pool": "the rows that the row selector has looked at, and its notes for the shell",
    "Ledger.keys_of_lease": "keys of leased messages, as found in frames",
    "GroupLeases._deadlines": "deadlines of leases that are over go when they come up",
    "Backlog.clock_us": "the time up to which due times were compared",
    "Backlog.ready": "what waits and is due by then; with `_dues` it is all of `back`",
    "Backlog.renewed": "the part of it that was redriven",
    "Backlog._dues": "what waits and is not due by then",
    "Backlog.came_due": "how many have become due since the shell was told",
    "Backlog._open": "messages behind the cursor that no earlier one of their key holds up",
    "Backlog.scanned": "how far these were looked for",
    "Backlog.held": "the others of them",
    "Backlog.blockers": "the messages that hold up others of their key",
}
"""What deciding may change, although it only reads."""
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


def photo(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Everything in an object, but for caches and functions."""
    if value is None or isinstance(value, int | float | str | bytes | np.generic) or callable(value):
        return value
    if id(value) in above:
        return "above"
    above = (*above, id(value))
    if isinstance(value, dict):
        return [[photo(key, above), photo(item, above)] for key, item in value.items()]
    if isinstance(value, np.ndarray | bytearray | memoryview):
        return bytes(value)
    if not type(value).__module__.startswith("tailrace"):
        return [photo(item, above) for item in value]
    kinds = type(value).__mro__
    names = {name for kind in kinds for name in getattr(kind, "__slots__", ())} | {
        *getattr(value, "__dict__", ())
    }
    inside = {name: getattr(value, name) for name in sorted(names) if hasattr(value, name)}
    label = type(value).__name__
    return {
        f"{label}.{name}": photo(item, above)
        for name, item in inside.items()
        if f"{label}.{name}" not in CACHES and not callable(item)
    }


def changes(before: Any, after: Any, label: str) -> Iterator[str]:
    """The attributes that differ in two photos."""
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for name in before:
            yield from changes(before[name], after[name], name)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for one, other in zip(before, after, strict=True):
            yield from changes(one, other, label)
    else:
        yield label


class CuriousPartition(Partition):
    """A partition that is asked everything twice, and more than that; its twin is asked once."""

    asked: ClassVar[set[type]] = set()
    """Kinds of commands that some partition was asked."""
    answered: ClassVar[set[type]] = set()
    """Kinds of them that led to facts."""

    def __init__(self, options: TopicOptions) -> None:
        super().__init__(options)
        self.twin = Partition(options)

    @classmethod
    def restore(cls, options: TopicOptions, chunks: Sequence[Buffer]) -> Partition:
        partition = super().restore(options, chunks)
        assert isinstance(partition, CuriousPartition)
        partition.twin = Partition.restore(options, chunks)
        return partition

    def decide(self, command: Any, turn: TurnInput) -> Decision:
        before, held = image(self), self._held()
        self._probe(turn)
        first, second = super().decide(command, turn), super().decide(command, turn)
        assert plain(first) == plain(second), "asked again it says something else"
        wanted = self.twin.decide(command, turn)
        if first.missing is None and wanted.missing is None:
            assert plain(first) == plain(wanted), "what it was asked before can be observed"
        assert image(self) == before, "deciding changed the state"
        changed = set(changes(held, self._held(), "Partition"))
        assert not changed, f"deciding changed what is no cache: {sorted(changed)}"
        self.asked.add(type(command))
        if first.facts:
            self.answered.add(type(command))
        return first if first.missing is not None else wanted

    def _held(self) -> Any:
        """The photo of all parts."""
        return [
            photo(part) for name, part in vars(self).items() if name != "twin" and not name.startswith("_")
        ]

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


def _takes_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that no snapshot holds, and that is no cache."""
    decide = GroupQueues.decide

    def writing(self: GroupQueues, command: Any, turn: TurnInput) -> Decision:
        self.last_asked = str(command)  # type: ignore[attr-defined]
        return decide(self, command, turn)

    monkeypatch.setattr(GroupQueues, "decide", writing)


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
        (_takes_notes, "deciding changed what is no cache"),
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


def live_with_producers(life: list[Any]) -> None:
    """The lives of `test_replay`: producers, duplicates, expected sequences, trims."""
    partition, now_us = CuriousPartition(OPTIONS), T0
    for machine in (partition, partition.twin):
        machine.producers.capacity = PRODUCERS_MAX
    oracle = Oracle(WINDOW_MS * 1000, OPTIONS.dedup_max, OPTIONS.key_index_max, PRODUCERS_MAX)
    for step, command in life:
        now_us += step
        play(partition, oracle, command, now_us)


QUEUE, STREAM = GroupPolicy(ordering="none"), GroupPolicy(mode="stream")
KINDS = (
    *(inner.PublishBatch, inner.Enlist, inner.GrantTo, inner.HoldRun, inner.MoveCursor, inner.ReportGroup),
    *(inner.StageBatch, inner.CheckStaged, inner.DropStaged, inner.RecordLoss, inner.Look, inner.Sweep),
    *(Ack, Nack, GiveBack, RejectMessages, Reopen, Extend, inner.EvictMember),
)


def made(kind: type, partition: Partition, step: int, number: int, count: int) -> Any:
    """A command of a kind that fits to the state, or nearly."""
    first = min(number, partition.end_offset)
    end, group = min(first + count, partition.end_offset), ("q", "s")[number % 2]
    known = partition.queues.grant(group)
    generation, spans = 0 if known is None else known[1], [first, end] if end > first else []
    ledger = partition.queues._ledgers.get("q")
    live = (
        {1: spans}
        if ledger is None
        else {1: spans} | {key: held.spans for key, held in ledger.receipts.live.items()}
    )
    lease = max(live)
    attempt = attempt_number("w", f"try-{number % 3}")
    commands: dict[type, Any] = {
        inner.PublishBatch: lambda: inner.PublishBatch(Publish("t", 0, 0, 0), view_of([Row()] * count)),
        inner.Enlist: lambda: inner.Enlist(group, STREAM if group == "s" else QUEUE),
        inner.GrantTo: lambda: inner.GrantTo(group, "ada", generation + 1),
        inner.HoldRun: lambda: inner.HoldRun("q", "ada", step + 10, spans, partition.end_offset, 30_000),
        inner.MoveCursor: lambda: inner.MoveCursor("s", "ada", generation, end),
        inner.ReportGroup: lambda: inner.ReportGroup(group),
        inner.StageBatch: lambda: inner.StageBatch("w", f"try-{number % 3}", view_of([Row()] * count), 0),
        inner.CheckStaged: lambda: inner.CheckStaged([attempt], [count]),
        inner.DropStaged: lambda: inner.DropStaged([attempt]),
        inner.RecordLoss: lambda: inner.RecordLoss(spans),
        inner.Look: inner.Look,
        inner.Sweep: lambda: inner.Sweep(first, partition.end_offset),
        Ack: lambda: Ack("t", 0, "q", [(lease, live[lease])]),
        Nack: lambda: Nack("t", 0, "q", lease, live[lease]),
        GiveBack: lambda: GiveBack("t", 0, "q", [(lease, live[lease])]),
        RejectMessages: lambda: RejectMessages("t", 0, "q", lease, live[lease]),
        Reopen: lambda: Reopen("t", 0, "q", spans),
        Extend: lambda: Extend("t", 0, "q", [lease], 60_000),
        inner.EvictMember: lambda: inner.EvictMember("q", "ada"),
    }
    return commands[kind]()


BEGIN: list[tuple[type, int, int]] = [
    (kind, number, 3) for kind in (inner.Enlist, inner.GrantTo, inner.PublishBatch) for number in (0, 1)
]
SCRIPT: list[tuple[type, int, int]] = [
    (kind, 0, 2)
    for settle in (Ack, Reopen, Extend, inner.EvictMember, Nack, GiveBack, RejectMessages)
    for kind in (inner.HoldRun, settle)
]
"""What ends a hold; by chance it rarely comes to that."""
RARE = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 8), st.integers(1, 4)), min_size=10, max_size=40
)


def live_rarely(life: list[tuple[type, int, int]]) -> None:
    """What no other life asks: losses, attempts, holds, streams, reports."""
    partition = CuriousPartition(TopicOptions())
    for step, (kind, number, count) in enumerate(BEGIN + life):
        command = made(kind, partition, step, number, count)
        turn = at(T0 + step * 1_000, next_entry=step)
        for fact in partition.decide(command, turn).facts:
            partition.apply(fact)
        partition.check()


@dear(20)
@given(LIVES)
def test_a_partition_asked_twice_answers_producers_the_same(life: list[Any]) -> None:
    live_with_producers(life)


@dear(20)
@given(RARE)
def test_a_partition_asked_twice_answers_the_rest_the_same(life: list[tuple[type, int, int]]) -> None:
    live_rarely(life)


def test_every_kind_of_command_is_asked() -> None:
    CuriousPartition.asked.clear()
    CuriousPartition.answered.clear()
    few: dict[str, Any] = {
        "derandomize": True,
        "database": None,
        "phases": [Phase.generate],
        "deadline": None,
    }
    run_state_machine_as_test(
        CuriousGroups, settings=settings(max_examples=25, stateful_step_count=25, **few)
    )
    settings(max_examples=25, **few)(given(LIVES)(live_with_producers))()
    settings(max_examples=25, **few)(given(RARE)(live_rarely))()
    live_rarely(SCRIPT)
    kinds = set(CuriousPartition(TopicOptions())._decide)
    assert kinds - CuriousPartition.asked == set()
    assert kinds - CuriousPartition.answered == {inner.Look, inner.ReportGroup, inner.CheckStaged}


members = st.sampled_from(["a", "b", "c"])
names = st.sampled_from(["g", "h"])
places = st.lists(st.tuples(st.just("t"), st.integers(0, 3)), max_size=3)
raised = st.lists(st.tuples(st.just("t"), st.integers(0, 3), st.integers(1, 99)), max_size=2)
sizes = st.just([("t", 3)]) | st.just([("t", 4), ("u", 1)])
policies = st.builds(
    GroupPolicy,
    assignment=st.sampled_from(["auto", "partitions", "shared"]),
    revoke_timeout_ms=st.just(5_000),
)
versions = st.integers(0, 3)
attempts = st.lists(st.tuples(st.just("t"), st.integers(0, 2), st.just("x")), max_size=2, unique=True)
decisions = st.builds(DecideStaged, st.just("w"), versions, attempts)
CASES: dict[type, st.SearchStrategy[Any]] = {
    inner.Join: st.builds(inner.Join, names, members, sizes, policies),
    inner.MakeGroup: st.builds(inner.MakeGroup, names, policies, sizes, st.booleans()),
    inner.Leave: st.builds(inner.Leave, names, members),
    inner.ConfirmReleased: st.builds(inner.ConfirmReleased, names, members, places),
    inner.ConfirmEnlisted: st.builds(inner.ConfirmEnlisted, names, places),
    inner.PassTime: st.builds(inner.PassTime, names),
    inner.ChangeOptions: st.builds(inner.ChangeOptions, names, st.just({"assignment": "shared"})),
    inner.ResizeTopics: st.builds(inner.ResizeTopics, names, sizes),
    inner.RaiseGenerations: st.builds(inner.RaiseGenerations, names, raised),
    inner.SetPaused: st.builds(inner.SetPaused, names, st.booleans()),
    inner.DropGroup: st.builds(inner.DropGroup, names, st.booleans()),
    inner.ConfirmForgotten: st.builds(inner.ConfirmForgotten, names, st.integers(1, 3), places),
    PutSchedule: st.builds(PutSchedule, names, st.just("t"), st.sampled_from(["* * * * *", "0 * * * *"])),
    DeleteSchedule: st.builds(DeleteSchedule, names),
    inner.TickDone: st.builds(inner.TickDone, names, st.integers(0, 3)),
    ChooseStaged: st.builds(ChooseStaged, decisions, st.just({"t": 1})),
    FinishStaged: st.builds(FinishStaged, st.just("w"), versions),
    inner.Look: st.builds(inner.Look),
}
commands = mixtures([CASES[inner.Join]], list(CASES.values()), max_size=30)
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


def test_a_coordinator_is_asked_every_kind_of_command() -> None:
    assert set(CASES) == set(Coordinator(TopicOptions())._decide)
