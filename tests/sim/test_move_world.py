"""The world of moves holds over fixed seeds, and each planted bug is caught: the test of the tests.

Covers `sim/actors/sim_operators.py` and `sim/worlds/move_world.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.broker.deadletter.dead_letter_verbs import DeadLetterVerbs
from tailrace.core.model.queue_commands import Reopen
from tailrace.core.process.cron_process import CronProcess
from tailrace.core.process.dead_letter_process import DeadLetterProcess
from tailrace.core.process.grant_process import GrantProcess
from tailrace.core.process.process import Effect, Event, Now, Process, Submit
from tailrace.core.process.staged_process import StagedProcess
from tailrace.sim.actors.sim_operators import Letter, SimOperator
from tailrace.sim.delivery_history import Given, HistoryAct
from tailrace.sim.virtual_time import Violation
from tailrace.sim.worlds import move_world
from tests.sim.planted import Plant, first_caught, reached

SEEDS = 25
BUG_SEEDS = 300
EVENTS = 1_100


def test_every_seed_holds_and_most_states_are_reached() -> None:
    found = reached(move_world.run, range(SEEDS))
    assert len(move_world.STATES - found) <= 2, move_world.STATES - found


def test_same_seed_same_run() -> None:
    assert move_world.run(3) == move_world.run(3)


@pytest.mark.parametrize("step", [97, pytest.param(5, marks=pytest.mark.long)])
def test_power_fails_once_after_any_event(step: int) -> None:
    """Events are steps: a request arrives, a turn is decided, a write or sync is done, its owner hears."""
    for after in range(1, EVENTS, step):  # Those of this seed.
        move_world.run(4, cut_after=after)


# ------------------------------------------------------------------------------------------- planted bugs


def _not_sure(kind: type[Process], tag: str) -> Plant:
    """One step of a process does not wait for the sync."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        step = kind.step

        def hasty(self: Process, event: Event, now: Now) -> list[Effect]:
            return [
                effect._replace(sure=False)
                if isinstance(effect, Submit) and tag in (effect.tag, getattr(effect.tag, "what", None))
                else effect
                for effect in step(self, event, now)
            ]

        monkeypatch.setattr(kind, "step", hasty)

    return plant


def _reopened_when_written(monkeypatch: pytest.MonkeyPatch) -> None:
    surely = DeadLetterVerbs._surely

    def hasty(self: DeadLetterVerbs, request: Any, body: Any, respond: Any, gate: Any) -> None:
        if isinstance(request, Reopen):
            self._topics.partition(request.topic, request.partition).submit(request, b"", respond)
        else:
            surely(self, request, body, respond, gate)

    monkeypatch.setattr(DeadLetterVerbs, "_surely", hasty)


def _letter_taken_off_when_written(monkeypatch: pytest.MonkeyPatch) -> None:
    surely = DeadLetterVerbs._surely

    def hasty(self: DeadLetterVerbs, request: Any, body: Any, respond: Any, gate: Any) -> None:
        if isinstance(request, Reopen):
            surely(self, request, body, respond, gate)
        else:
            self._topics.partition(request.topic, request.partition).submit(request, b"", respond)

    monkeypatch.setattr(DeadLetterVerbs, "_surely", hasty)


def _redrive_settles_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(self: SimOperator, letter: Letter) -> None:
        self._settle(letter, lambda: self._send_back(letter, self._later))

    monkeypatch.setattr(SimOperator, "send", send)


BUGS: dict[str, Plant] = {
    "letter only written": _not_sure(DeadLetterProcess, "append"),
    "death only written": _not_sure(DeadLetterProcess, "sync"),
    "staged batches only written": _not_sure(StagedProcess, "check"),
    "staged done when written": _not_sure(StagedProcess, "apply"),
    "tick recorded when written": _not_sure(CronProcess, "publish"),
    "grant told when written": _not_sure(GrantProcess, "send"),
    "reopened when written": _reopened_when_written,
    "letter taken off when written": _letter_taken_off_when_written,
    "redrive settles first": _redrive_settles_first,
}


RARE = ("tick recorded when written",)
"""It takes many seeds."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in RARE else []) for name in BUGS]
)
def test_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    assert first_caught(move_world.run, range(BUG_SEEDS)) is not None


# --------------------------------------------------------------------------------------------- the accounts


def _account_of(places: set[tuple[int, int]]) -> None:
    """The account of a message that was acked at one place and given up at another, where a copy of it was;
    it is at `places` in the end."""
    world = move_world.MoveWorld(0)
    world.operator = SimOperator(world)
    for number, (offset, kind) in enumerate(((7, "ack"), (15, "nack")), 1):
        act = HistoryAct(kind, number, None, number, "ok")
        world.history.given.append(
            Given("group-0", "a", (0, offset), b"8", number, number, 9, 1, 0, 1, number, [act])
        )
    world._check_life("group-0", b"8", places, [])


def test_copy_that_power_took_with_what_was_done_to_it_needs_no_end() -> None:
    _account_of({(0, 7)})


def test_copy_that_is_given_up_and_never_comes_again_is_caught() -> None:
    with pytest.raises(Violation, match="neither dead nor delivered again"):
        _account_of({(0, 7), (0, 15)})


def test_message_that_is_not_delivered_where_it_is_now_is_caught() -> None:
    with pytest.raises(Violation, match="never delivered"):
        _account_of({(0, 8)})
