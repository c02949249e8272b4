"""Grants as a process: a play, and a seeded model with planted bugs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tailrace.core.catalog.catalog import Catalog
from tailrace.core.groups.coordinator import Coordinator
from tailrace.core.model import internal_commands as inner
from tailrace.core.model.group_options import GroupPolicy
from tailrace.core.model.topic_options import TopicOptions
from tailrace.core.process import grant_process
from tailrace.core.process.grant_process import GrantProcess, Recheck
from tailrace.core.process.process import After, Asked, Begun, Effect, Event, FactsStored, Now, Submit
from tests.core.process.group_world import HOME, T0, GroupWorld
from tests.core.process.process_model import caught
from tests.core.process.process_plays import check_play, python
from tests.core.turns import at

SEEDS = range(80)
BUG_SEEDS = range(400)


# --------------------------------------------------------------------------------------------------- play


class GrantActs:
    """`MEMBER joins GROUP`, `MEMBER leaves GROUP`, `GROUP is deleted`: decided by the coordinator, stored and
    heard of. `recheck GROUP`; `a new life`. A report is `nothing` or `MEMBER GENERATION`."""

    def __init__(self) -> None:
        self.machine = Coordinator(TopicOptions())
        self._time_us = T0
        self.process = GrantProcess(HOME, self.machine.groups.by_name, self.machine.deletions)

    def now(self) -> Now:
        return Now(Catalog())

    def act(self, line: str) -> bool:
        if line == "a new life":
            self.process = GrantProcess(HOME, self.machine.groups.by_name, self.machine.deletions)
            return True
        return False

    def event(self, line: str) -> Event | None:
        """The event behind a line."""
        words = line.split()
        sizes = [("t", 2)]
        if words[1:2] == ["joins"]:
            return self._decide(inner.Join(words[2], words[0], sizes, GroupPolicy(), topic_ids={"t": 1}))
        if words[1:2] == ["leaves"]:
            return self._decide(inner.Leave(words[2], words[0]))
        if words[1:3] == ["is", "deleted"]:
            return self._decide(inner.DropGroup(words[0], force=True))
        if words[0] == "recheck":
            return Asked(Recheck(words[1]))
        return None

    def _decide(self, command: Any) -> Event:
        self._time_us += 1_000_000
        decision = self.machine.decide(command, at(self._time_us))
        for fact in decision.facts:
            self.machine.apply(fact)
        return FactsStored(decision.facts)

    def value(self, text: str) -> Any:
        if "(" in text:
            return python(text)
        if text == "nothing":
            return inner.GroupHeld(0)
        member, generation = text.split()
        group = self.machine.groups.by_name["g"]
        return inner.GroupHeld(0, group.id, member, int(generation), policy=group.policy)


def test_play() -> None:
    check_play("grants", GrantActs)


def test_a_group_is_carried_when_its_creation_is_durable() -> None:
    """Before that a crash may bring the group before it back, which would be forgotten on the partitions."""
    acts = GrantActs()
    joined = acts.event("ann joins g")
    assert joined is not None
    assert len(acts.process.step(joined, acts.now())) == 6
    acts.event("g is deleted")
    created = acts.event("bob joins g")
    assert created is not None
    assert acts.process.step(Asked(Recheck("g")), acts.now()) == []
    assert acts.process.step(created, acts.now())


# -------------------------------------------------------------------------------------------------- model


def test_every_seed_holds() -> None:
    assert caught(GroupWorld, SEEDS) is None


class ToldWhenWritten(GrantProcess):
    def step(self, event: Event, now: Now) -> list[Effect]:
        return [
            effect._replace(sure=False) if isinstance(effect, Submit) else effect
            for effect in super().step(event, now)
        ]


class ToldBeforeTheyKnow(GrantProcess):
    def assignments(self, group: Any) -> Any:
        for place, each in self._carried[group.name].places.items():
            each.confirmed = each.confirmed or grant_process._wanted(group, place)
        return super().assignments(group)


class NotTriedAgain(GrantProcess):
    def step(self, event: Event, now: Now) -> list[Effect]:
        return [effect for effect in super().step(event, now) if not isinstance(effect, After)]


class NoNewReports(GrantProcess):
    def step(self, event: Event, now: Now) -> Any:
        return () if isinstance(event, Asked) else super().step(event, now)


class NoReportsAtTheBeginning(GrantProcess):
    def step(self, event: Event, now: Now) -> Any:
        return () if isinstance(event, Begun) else super().step(event, now)


class ConfirmedByTheFirstAnswer(GrantProcess):
    def _answered(self, tag: Any, reply: Any) -> Any:
        each = self._carried[tag.group].places.get(tag.place) if tag.group in self._carried else None
        if each is not None and tag.what == "send" and each.number == tag.number:
            each.left = 1
        return super()._answered(tag, reply)


class DeletedGroupsGoOn(GrantProcess):
    def _send(self, *arguments: Any) -> Any:
        effects = list(super()._send(*arguments))
        return [
            effect
            for effect in effects
            if not (isinstance(effect, Submit) and isinstance(effect.command, inner.Delist))
        ]


@pytest.mark.parametrize(
    "bug",
    [
        ToldWhenWritten,
        ToldBeforeTheyKnow,
        NotTriedAgain,
        NoNewReports,
        NoReportsAtTheBeginning,
        ConfirmedByTheFirstAnswer,
        DeletedGroupsGoOn,
    ],
)
def test_planted_bug_is_caught(bug: type[GrantProcess]) -> None:
    assert caught(partial(GroupWorld, grants=bug), BUG_SEEDS) is not None
