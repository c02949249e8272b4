"""The driver of a process: steps never nest, and nothing of an earlier life is heard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tailrace.broker.runtime.clock import ManualClock
from tailrace.broker.runtime.process_driver import ProcessDriver, Processes, ProcessKind
from tailrace.broker.runtime.pump import Pump
from tailrace.core.catalog.catalog import Catalog
from tailrace.core.model.commands import CreateTopic, Done
from tailrace.core.model.facts import Buried, Dying
from tailrace.core.model.identifiers import Refusal, TopicPartition
from tailrace.core.process import process as core
from tailrace.errors import Corrupt, StorageFault
from tests.broker.held_engine import HeldThreads

TARGET = TopicPartition("t", 0)
Script = Callable[[core.Event], Sequence[core.Effect]]


class Scripted:
    """A process that does what the test says, and notes what it hears."""

    def __init__(self, state: Stage) -> None:
        self._state = state
        self.stepping = False

    def step(self, event: core.Event, now: core.Now) -> Sequence[core.Effect]:
        assert not self.stepping
        self._state.heard.append(event)
        return self._state.effects.pop(type(event).__name__, ())


class Stage:
    """A driver with its home and its router, which keep the answers back."""

    def __init__(self, shelf: Any = None) -> None:
        self.heard: list[core.Event] = []
        self.effects: dict[str, Sequence[core.Effect]] = {}
        self.sent: list[tuple[Any, Any]] = []
        self.at_once = False
        self.counted = 0
        self.told: list[str] = []
        self.found_damage: list[Exception] = []
        self.damage: Refusal | None = None
        self.catalog = Catalog()
        self.log: Any = "the log"
        self.end_offset = 7
        self.clock = ManualClock()
        self.threads = HeldThreads()
        self.pump = Pump(self.clock, self.threads)
        log = logging.getLogger("tailrace.test")
        readers = {str: self._read}
        kind = ProcessKind(Scripted, frozenset((Dying,)), log, readers, self._count, self.told.append, shelf)
        self.driver = ProcessDriver(kind, self, self, self.pump)

    def _count(self) -> None:
        self.counted += 1

    def _read(self, log: Any, end: int, request: str) -> tuple[Any, StorageFault | None]:
        if request == "fail":
            raise StorageFault("a bad place")
        return (log, end, request), Corrupt("damage", outcome="none") if request == "damage" else None

    def damaged(self, error: Exception, source: Any) -> None:
        self.found_damage.append(error)

    def submit(
        self, target: Any, topic_id: int, command: Any, body: Any, respond: Any, *, sure: bool
    ) -> None:
        self.sent.append(((str(target), topic_id, command, body, sure), respond))
        if self.at_once:
            respond(Done(), ())

    def change(self, request: Any, respond: Any) -> None:
        self.sent.append((request, respond))

    def begin(self, *effects: core.Effect) -> None:
        self.effects["Begun"] = effects
        self.driver.begin(self)

    def later(self, seconds: float) -> None:
        self.clock.set_us(self.clock.now_us() + int(seconds * 1e6))
        self.pump.tick()


def test_effects_are_carried_out_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    change = CreateTopic("new")
    with caplog.at_level(logging.WARNING):
        stage.begin(
            core.Submit("a", TARGET, "command", b"body", 4, sure=False),
            core.Change("b", change),
            core.Log("warning", "100 % of it"),
            core.Count(),
        )
    assert [what for what, _ in stage.sent] == [("t/0", 4, "command", b"body", False), change]
    assert (caplog.messages, stage.counted) == (["100 % of it"], 1)
    for _, respond in reversed(stage.sent):
        respond(Done(), ())
    assert stage.heard == [core.Begun(), core.Answered("b", Done()), core.Answered("a", Done())]


def test_steps_never_nest() -> None:
    stage = Stage()
    stage.at_once = True
    stage.begin(core.Submit("a", TARGET, "first"), core.Submit("b", TARGET, "second"))
    assert stage.heard == [core.Begun(), core.Answered("a", Done()), core.Answered("b", Done())]


def test_nothing_of_an_earlier_life_is_heard() -> None:
    stage = Stage()
    stage.begin(core.Submit("a", TARGET, "command"), core.Read("b", "rows"), core.After("c", 1_000_000))
    stage.begin()
    ((_, respond),) = stage.sent
    respond(Done(), ())
    stage.pump.drain()
    stage.later(2)
    assert stage.heard == [core.Begun(), core.Begun()]
    stage.driver.end()
    stage.driver.committed([])
    assert stage.driver.process is None
    assert len(stage.heard) == 2


def test_a_life_that_ends_within_a_step_does_no_more() -> None:
    stage = Stage()
    stage.effects["Begun"] = (core.Submit("a", TARGET, "first"), core.Submit("b", TARGET, "second"))
    submit, sent = stage.submit, stage.sent

    def fails(*arguments: Any, **fields: Any) -> None:
        submit(*arguments, **fields)
        stage.driver.end()

    stage.submit = fails  # type: ignore[method-assign]
    stage.driver.begin(stage)
    assert len(sent) == 1


@pytest.mark.parametrize("request_", ["rows", "damage", "fail"])
def test_a_read_ends_with_its_result_or_a_refusal(request_: str) -> None:
    stage = Stage()
    stage.begin(core.Read("r", request_))
    stage.pump.drain()
    (_, found) = stage.heard
    assert isinstance(found, core.Found)
    if request_ == "fail":
        assert isinstance(found.result, Refusal)
    else:
        assert found == core.Found("r", ("the log", 7, request_))
    assert len(stage.found_damage) == (request_ == "damage")


class KeptRows:
    """A shelf that keeps results, and tells their number."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def keep(self, found: Any) -> Any:
        self.kept.append(found)
        return len(self.kept)

    def fill(self, command: Any) -> tuple[Any, bytes]:
        return f"{command} of {len(self.kept)}", b"rows"

    def forget(self, what: Any) -> None:
        self.kept.remove(what)

    def clear(self) -> None:
        self.kept.clear()


def test_what_is_read_stays_on_the_shelf_until_it_is_forgotten_or_the_life_ends() -> None:
    shelf = KeptRows()
    stage = Stage(shelf)
    stage.begin(core.Read("r", "rows"), core.Read("s", "more"), core.Read("t", "fail"))
    stage.effects["Found"] = (core.Submit("a", TARGET, "release", None), core.Forget(("the log", 7, "rows")))
    stage.pump.drain()
    assert [event.result for event in stage.heard[1:3] if isinstance(event, core.Found)] == [1, 1]
    assert [(what[2], what[3]) for what, _ in stage.sent] == [("release of 1", b"rows")]
    assert shelf.kept == [("the log", 7, "more")]
    stage.begin(core.Read("r", "of an earlier life"))
    assert shelf.kept == []
    stage.driver.end()
    stage.pump.drain()
    assert shelf.kept == []


def test_delays_end_in_time() -> None:
    stage = Stage()
    stage.begin(core.After("c", 1_000_000), core.After("d", 1_000_000), core.Cancel("d"), core.Cancel("e"))
    stage.later(0.9)
    assert len(stage.heard) == 1
    stage.later(0.2)
    assert stage.heard[1:] == [core.Due("c")]


def test_a_time_takes_the_place_of_the_one_before() -> None:
    stage = Stage()
    wall_us = stage.clock.wall_us()
    stage.begin(core.AtWall("c", wall_us + 1_000_000), core.AtWall("c", wall_us + 3_000_000))
    stage.later(2)
    assert len(stage.heard) == 1
    stage.clock.skew_us = 2_000_000
    stage.later(0)
    assert stage.heard[1:] == [core.Due("c")]


def test_a_process_is_told_of_the_facts_that_it_watches() -> None:
    stage = Stage()
    processes = Processes((stage.driver,))
    assert processes.watches == {Dying}
    processes.begin(stage)
    dying, buried = Dying(0, [1, 2], "rejected", 0), Buried(0, [1, 2], 0)
    processes.committed([dying, buried])
    processes.committed([buried])
    assert stage.heard == [core.Begun(), core.FactsStored([dying])]
    processes.end()
    assert stage.driver.process is None


def test_a_request_is_answered_once_or_refused_when_the_life_ends() -> None:
    stage = Stage()
    processes = Processes((stage.driver,))
    replies: list[Any] = []

    def respond(reply: Any, parts: Any) -> None:
        replies.append(reply)

    processes.ask(Scripted, "too early", respond)
    assert [reply.code for reply in replies] == ["unavailable"]
    replies.clear()
    stage.begin()
    processes.ask(Scripted, "first", respond)
    asked = stage.heard[-1]
    assert isinstance(asked, core.Asked)
    assert asked == core.Asked("first", asked.tag)
    stage.effects["Asked"] = (core.Respond(asked.tag, Done()), core.Respond(asked.tag, Done()))
    processes.ask(Scripted, "second", respond)
    assert replies == [Done()]
    stage.driver.end()
    assert replies[1:] == [Refusal("unavailable", replies[1].message, "unknown")]


def test_a_step_knows_the_steady_time() -> None:
    stage = Stage()
    times: list[int] = []

    class Timed(Scripted):
        def step(self, event: core.Event, now: core.Now) -> Sequence[core.Effect]:
            times.append(now.now_us)
            return super().step(event, now)

    kind = ProcessKind(Timed, frozenset(), logging.getLogger("tailrace.test"))
    driver = ProcessDriver(kind, stage, stage, stage.pump)
    driver.begin(stage)
    stage.later(3)
    driver.ask("what time is it?")
    assert times == [stage.clock.now_us() - 3_000_000, stage.clock.now_us()]
